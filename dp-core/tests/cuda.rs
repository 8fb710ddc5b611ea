//! Ranks that share one GPU. Without one it says so, and ends well.
//!
//! ```text
//! cargo test --workspace --features cuda --test cuda
//! ```

#[path = "cuda/buffers.rs"]
mod buffers;
#[path = "cuda/collectives.rs"]
mod collectives;
#[path = "cuda/harness.rs"]
mod harness;
#[path = "cuda/random.rs"]
mod random;
#[allow(dead_code)]
mod support;
#[path = "cuda/training.rs"]
mod training;

use std::process::ExitCode;

fn main() -> ExitCode {
    let tests = [
        buffers::TESTS,
        collectives::TESTS,
        training::TESTS,
        random::TESTS,
    ];
    harness::run(&tests.concat())
}
