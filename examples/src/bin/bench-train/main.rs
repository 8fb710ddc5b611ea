//! Trains a byte-level GPT with each strategy, and says how fast: tokens per second, and what a step's time goes into. On request
//! with and without overlap, and with gradients sent in several dtypes.
//!
//! ```text
//! cargo run --release --bin bench-train                                     # one rank
//! cargo run --release --bin bench-train -- --ranks 2 --json target/train.json
//! mpirun -n 2 target/release/bench-train --overlap-comm on,off --communication-dtype f32,bf16   # with --features dp-core/mpi
//! cargo run --release --bin bench-train -- --ranks 2 --init init.safetensors --data text --expect pytorch.json
//! ```
//!
//! Model, optimizer and batches are those of `examples/pytorch/gpt_train.py`, so with its weights and its text the losses
//! must be PyTorch's, and `--expect` compares them. `--trace` draws the steps of one strategy, for <https://ui.perfetto.dev>. Exits non-zero if one of its checks fails.

mod options;
mod report;
mod training;
mod variant;

use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use dp_core::World;
use dp_core::memory::CountingAllocator;
use dp_examples::machine::Provenance;
use dp_examples::options::exit_code;
use dp_examples::{checks, logging, pages};
use mimalloc::MiMalloc;

use options::{Job, Options};
use report::{Report, Row};

#[global_allocator]
static ALLOCATOR: CountingAllocator<MiMalloc> = CountingAllocator::new(MiMalloc);

fn main() -> ExitCode {
    pages::keep();
    exit_code(check, |(world, job)| run(world, job))
}

/// Everything that can be wrong before the first step.
fn check() -> anyhow::Result<(World, Job)> {
    let options = Options::parse();
    let world = World::from_env_or_threads(usize::from(options.ranks))?
        .with_threads_per_rank(options.threads)
        .with_devices(options.device.clone());
    let job = options.into_job(&world)?;
    Ok((world, job))
}

/// Trains all variants, prints and writes the report; true if all checks hold.
fn run(world: &World, job: &Job) -> anyhow::Result<bool> {
    let options = &job.options;
    let trace = options.trace.as_ref();
    let trace = trace.map(|path| logging::trace_of(path, world));
    let timeline = logging::init(trace.as_deref())?;
    let provenance = Provenance::now();
    let mut runs: Vec<Vec<training::Run>> = vec![Vec::new(); job.variants.len()];
    for round in 0..options.rounds {
        for (variant, runs) in job.variants.iter().zip(&mut runs) {
            let run = training::train(job, world, *variant).with_context(|| variant.to_string())?;
            if world.is_main_process() {
                let row = Row::new(job, *variant, &[&run]);
                eprintln!("round {}: {variant} {row}", round + 1);
            }
            runs.push(run);
        }
    }
    if let Some(timeline) = timeline {
        timeline.finish()?;
    }
    let report = Report::new(job, provenance, &runs);
    let checks = report.checks(job.expected.as_deref());
    if !world.is_main_process() {
        // It has the same report, and the main process says what is wrong with it.
        return Ok(checks.into_iter().all(|(_, holds)| holds));
    }
    if let Some(path) = &options.trace {
        println!("wrote {}", path.display());
    }
    println!("{}", report.table());
    let all_hold = checks::print(checks);
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        println!("wrote {}", path.display());
    }
    Ok(all_hold)
}
