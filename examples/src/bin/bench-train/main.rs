//! Trains a byte-level GPT with each strategy, and says how fast: tokens per second, and what a step's time goes into.
//!
//! ```text
//! cargo run --release --bin bench-train                                     # one rank
//! cargo run --release --bin bench-train -- --ranks 2 --json target/train.json
//! cargo run --release --bin bench-train -- --ranks 2 --init init.safetensors --data text --expect pytorch.json
//! ```
//!
//! Model, optimizer and batches are those of `examples/pytorch/gpt_train.py`, so with its weights and its text the losses
//! must be PyTorch's, and `--expect` compares them. `--trace` draws the steps of one strategy, for <https://ui.perfetto.dev>. Exits non-zero if one of its checks fails.

mod options;
mod report;
mod training;

use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use dp_core::World;
use dp_core::memory::CountingAllocator;
use dp_examples::machine::Provenance;
use dp_examples::options::{exit_code, threads_only};
use dp_examples::{checks, logging, pages};
use mimalloc::MiMalloc;

use options::{Job, Options};
use report::{Report, Row};

#[global_allocator]
static ALLOCATOR: CountingAllocator<MiMalloc> = CountingAllocator::new(MiMalloc);

fn main() -> ExitCode {
    pages::keep();
    exit_code(|| Options::parse().into_job(), run)
}

/// Trains with all strategies, prints and writes the report; true if all checks hold.
fn run(job: &Job) -> anyhow::Result<bool> {
    let options = &job.options;
    let timeline = logging::init(options.trace.as_deref())?;
    let provenance = Provenance::now();
    let world = threads_only(World::from_env_or_threads(usize::from(options.ranks))?)?
        .with_threads_per_rank(options.threads);
    let mut runs: Vec<Vec<training::Run>> = vec![Vec::new(); options.strategies.len()];
    for round in 0..options.rounds {
        for (sharding, runs) in options.strategies.iter().zip(&mut runs) {
            let name = sharding.name();
            let run = training::train(job, &world, *sharding)
                .with_context(|| format!("strategy {name}"))?;
            eprintln!("round {}: {}", round + 1, Row::new(job, name, &[&run]));
            runs.push(run);
        }
    }
    if let (Some(timeline), Some(path)) = (timeline, &options.trace) {
        timeline.finish()?;
        println!("wrote {}", path.display());
    }
    let report = Report::new(job, provenance, &runs);
    println!("{}", report.table());
    let all_hold = checks::print(report.checks(job.expected.as_deref()));
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        println!("wrote {}", path.display());
    }
    Ok(all_hold)
}
