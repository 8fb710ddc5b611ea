//! How fast collectives are, with the columns of nccl-tests and in parts of what copying memory takes.
//!
//! ```text
//! cargo run --release --bin bench-collectives
//! mpirun -n 2 target/release/bench-collectives     # with --features dp-core/mpi
//! cargo run --release --bin bench-collectives -- --ranks 4 --ops all_reduce --dtype bf16 --json target/collectives.json
//! ```
//!
//! ```text
//! size    bytes of the whole buffer of one rank
//! algbw   size / time
//! busbw   algbw * 2 (N-1)/N for all_reduce, algbw * (N-1)/N for reduce_scatter and all_gather, algbw for broadcast
//! memcpy  time in which N ranks each copy size bytes, over the time of the collective on N ranks
//! ```
//!
//! Each result is checked, element by element, before it is measured. Exits non-zero if one is wrong.

mod measure;
mod options;
mod report;

use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use dp_core::World;
use dp_examples::machine::Provenance;
use dp_examples::options::exit_code;

use options::Options;
use report::{Report, Row};

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .init();
    exit_code(check, |(world, options)| run(world, options))
}

/// Everything that can be wrong before the first call.
fn check() -> anyhow::Result<(World, Options)> {
    let mut options = Options::parse();
    let world = World::from_env_or_threads(usize::from(options.ranks))?;
    options.ranks = u16::try_from(world.world_size())?;
    // Collectives are done by the rank's own thread; a pool of more would only count as more threads than cores.
    Ok((world.with_threads_per_rank(1), options.checked()?))
}

/// Measures everything, prints and writes the report; true, since a wrong result is an error.
fn run(world: &World, options: &Options) -> anyhow::Result<bool> {
    let provenance = Provenance::now();
    if world.is_main_process() {
        println!("{}", provenance.summary());
        println!("{}", report::header(options));
    }
    let mut rows = Vec::new();
    for op in &options.ops {
        for bytes in options.sizes() {
            let times = measure::measure(world, options, *op, bytes)
                .with_context(|| format!("{} of {bytes} bytes", op.name()))?;
            let row = Row::new(*op, usize::from(options.ranks), &times);
            if world.is_main_process() {
                println!("{row}");
            }
            rows.push(row);
        }
    }
    if let Some(path) = options.json.as_ref().filter(|_| world.is_main_process()) {
        let report = Report {
            rows,
            ranks: options.ranks,
            dtype: options.dtype.name(),
            provenance,
        };
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        println!("wrote {}", path.display());
    }
    Ok(true)
}
