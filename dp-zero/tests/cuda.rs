//! The trainers on ranks that share one GPU. Without one it says so, and ends well.
//!
//! ```text
//! cargo test --workspace --features cuda --test cuda
//! ```

#[path = "cuda/checkpoints.rs"]
mod checkpoints;
#[path = "../../dp-core/tests/cuda/harness.rs"]
mod harness;
#[path = "cuda/memory.rs"]
mod memory;
#[path = "cuda/parity.rs"]
mod parity;
#[path = "cuda/safeguards.rs"]
mod safeguards;
#[allow(dead_code)]
mod support;
// Ranks with a GPU each are those of nccl.rs.
#[allow(dead_code)]
#[path = "cuda/task.rs"]
mod task;

use std::process::ExitCode;

fn main() -> ExitCode {
    let tests = [
        parity::TESTS,
        memory::TESTS,
        safeguards::TESTS,
        checkpoints::TESTS,
    ];
    harness::run(&tests.concat())
}
