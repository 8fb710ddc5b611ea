//! Ranks with a GPU each, over NCCL. Without a GPU it says so, and ends well.
//!
//! ```text
//! cargo test --workspace --features nccl --test nccl    # threads and processes, for up to 4 GPUs; one is enough for some of it
//! torchrun --no-python --nproc-per-node 2 target/debug/deps/nccl-...    # one rank of several: what a communicator promises
//! ... nccl-... fail error|panic|mismatch|early|killed|stopped|late      # the same, of which rank 1 fails; all must say why
//! ```

#[path = "nccl/behaviour.rs"]
mod behaviour;
mod contract;
#[path = "nccl/failures.rs"]
mod failures;
#[path = "cuda/harness.rs"]
#[allow(dead_code)]
mod harness;
#[path = "nccl/processes.rs"]
mod processes;
#[path = "nccl/rank.rs"]
mod rank;
#[path = "nccl/results.rs"]
mod results;
mod spoiled;
#[allow(dead_code)]
mod support;

use std::process::ExitCode;
use std::sync::OnceLock;
use std::time::Duration;

use candle_core::Device;
use dp_core::{Backend, Rank, Result, World};
use harness::Test;
use support::guarded;

/// The longest that anything here waits.
const DEADLINE: Duration = Duration::from_secs(20);

fn main() -> ExitCode {
    if std::env::var_os("WORLD_SIZE").is_some() {
        return rank::main();
    }
    let tests = [THREADS, failures::TESTS, processes::TESTS];
    harness::run(&tests.concat())
}

const THREADS: &[Test] = &[
    ("threads: results", || on_threads(results::are_right)),
    ("threads: contract", || {
        on_threads(|rank| contract::holds(rank.comm().as_ref()))
    }),
    ("threads: objects and barriers", || {
        on_threads(behaviour::objects_and_barriers)
    }),
    ("threads: many in flight", || {
        on_threads(behaviour::in_flight)
    }),
    ("threads: overlap", || on_threads(behaviour::overlaps)),
    ("threads: training", || on_threads(behaviour::train)),
];

/// The GPUs that are used, up to 4.
fn gpus() -> usize {
    static GPUS: OnceLock<usize> = OnceLock::new();
    let usable = |i: &usize| Device::new_cuda_with_stream(*i).is_ok();
    *GPUS.get_or_init(|| (0..4).take_while(usable).count())
}

fn world(ranks: usize) -> World {
    World::threads(ranks)
        .expect("a positive world size")
        .with_backend(Backend::Nccl)
        .with_timeout(DEADLINE)
        .with_threads_per_rank(1)
}

/// On as many ranks as there are GPUs, and on fewer; twice, since a world may run again.
fn on_threads(test: fn(&Rank) -> Result<()>) {
    for n in 1..=gpus() {
        let run = move || {
            let world = world(n);
            world.run(|rank| test(&rank))?;
            world.run(|rank| test(&rank))
        };
        guarded(6 * DEADLINE, run).unwrap_or_else(|e| panic!("{n} ranks: {e}"));
    }
}
