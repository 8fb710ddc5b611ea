//! The trainers on ranks with a GPU each, over NCCL. Without a GPU it says so, and ends well.
//!
//! ```text
//! cargo test --workspace --features nccl --test nccl     # as many ranks as there are GPUs, up to 4
//! ```

#[path = "nccl/checkpoints.rs"]
mod checkpoints;
#[path = "../../dp-core/tests/cuda/harness.rs"]
mod harness;
#[allow(dead_code)]
#[path = "cuda/parity.rs"]
mod parity;
#[path = "nccl/strategies.rs"]
mod strategies;
#[allow(dead_code)]
mod support;
#[allow(dead_code)]
#[path = "cuda/task.rs"]
mod task;

use std::process::ExitCode;
use std::sync::OnceLock;

use candle_core::Device;

fn main() -> ExitCode {
    harness::run(&[strategies::TESTS, checkpoints::TESTS].concat())
}

/// The GPUs that are used, up to 4.
fn gpus() -> usize {
    static GPUS: OnceLock<usize> = OnceLock::new();
    let usable = |i: &usize| Device::new_cuda_with_stream(*i).is_ok();
    *GPUS.get_or_init(|| (0..4).take_while(usable).count())
}
