//! Trains the same GPT on real text with plain data parallelism, ZeRO-1 and ZeRO-2, and compares the memory per card.
//!
//! ```text
//! cargo run --release                                   # 4 ranks, all strategies
//! cargo run --release -- --ranks 2 --data my-text.txt   # other settings: --help
//! cargo run --release --features cuda -- --device cuda  # the ranks share the first GPU
//! mpirun -n 4 target/release/memory-per-card            # built with --features dp-core/mpi
//! ```
//!
//! Writes `report.html` and `report.json` to `target/memory-per-card` and exits non-zero if one of its checks fails.

mod html;
mod options;
mod report;
mod table;
mod training;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use dp_core::World;
use dp_core::memory::CountingAllocator;
use dp_examples::{checks, options::exit_code, pages};
use indicatif::{ProgressBar, ProgressStyle};
use mimalloc::MiMalloc;

use options::{Job, Options};
use report::{Model, Report};

// ANCHOR: allocator
#[global_allocator]
static ALLOCATOR: CountingAllocator<MiMalloc> = CountingAllocator::new(MiMalloc);
// ANCHOR_END: allocator

fn main() -> ExitCode {
    pages::keep();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .init();
    exit_code(check, |(world, job)| run(world, job))
}

/// Everything that can be wrong before the first step.
fn check() -> anyhow::Result<(World, Job)> {
    let options = Options::parse();
    // Before the progress bar starts its thread: the World can then tell Candle how many threads a rank has.
    let world = World::from_env_or_threads(usize::from(options.ranks))?
        .with_devices(options.device.clone());
    let job = options.into_job(&world)?;
    Ok((world, job))
}

/// Runs all strategies and writes the reports; true if all checks hold.
fn run(world: &World, job: &Job) -> anyhow::Result<bool> {
    let options = &job.options;
    let progress = match world.is_main_process() {
        true => ProgressBar::new((options.strategies.len() * options.steps) as u64),
        false => ProgressBar::hidden(),
    };
    progress.set_style(ProgressStyle::with_template(
        "{bar:40} {pos}/{len} {msg} ETA {eta}",
    )?);
    progress.enable_steady_tick(Duration::from_millis(200));
    let mut strategies = Vec::new();
    for sharding in &options.strategies {
        let strategy = training::train(job, world, *sharding, &progress)
            .with_context(|| format!("strategy {}", sharding.name()))?;
        if world.is_main_process() {
            progress.suspend(|| println!("{}", table::summary(&strategy)));
        }
        strategies.push(strategy);
    }
    progress.finish_and_clear();

    let report = Report {
        world_size: world.world_size(),
        num_params: job.model.num_params(),
        dtype: options.dtype.as_str(),
        grad_dtype: options.grad_accum_dtype.of(options.dtype).as_str(),
        communication_dtype: options.communication_dtype.map(|d| d.as_str()),
        seed: options.seed,
        model: Model {
            layers: options.layers,
            width: options.width,
            heads: options.heads,
            context: options.context,
            batch: options.batch,
            text_bytes: job.text.len(),
            bucket_kib: options.bucket_kib,
        },
        strategies,
    };
    if !world.is_main_process() {
        // It has the same report, and the main process says what is wrong with it.
        return Ok(report.checks().into_iter().all(|(_, holds)| holds));
    }
    table::print(&report);
    let all_hold = checks::print(report.checks());
    let write = |name: &str, text: String| {
        let path = options.out.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        println!("wrote {}", path.display());
        anyhow::Ok(())
    };
    println!();
    write("report.json", serde_json::to_string_pretty(&report)?)?;
    write("report.html", html::page(&report))?;
    Ok(all_hold)
}
