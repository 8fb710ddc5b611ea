//! Runs the tests of a GPU one after the other, or says that there is none.

use std::panic::catch_unwind;
use std::process::ExitCode;

use candle_core::Device;
use dp_core::{Devices, World};

/// Its name, and what panics if it fails.
pub type Test = (&'static str, fn());

/// Runs the tests whose names contain one of the program's arguments; all of them without arguments.
pub fn run(tests: &[Test]) -> ExitCode {
    // Options are those of Rust's own test programs; they mean nothing here.
    let wanted: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    if let Err(e) = Device::new_cuda_with_stream(0) {
        println!("no CUDA device: skipped {} tests ({e})", tests.len());
        return ExitCode::SUCCESS;
    }
    let is_wanted =
        |test: &&Test| wanted.is_empty() || wanted.iter().any(|w| test.0.contains(w.as_str()));
    let mut num_failed = 0;
    let mut num_passed = 0;
    for (name, test) in tests.iter().filter(is_wanted) {
        // Said before, so that a test that ends the process is known.
        println!("test {name} ...");
        match catch_unwind(test) {
            Ok(()) => num_passed += 1,
            Err(_) => {
                println!("test {name} FAILED");
                num_failed += 1;
            }
        }
    }
    println!("CUDA tests: {num_passed} passed, {num_failed} failed");
    match num_failed {
        0 => ExitCode::SUCCESS,
        _ => ExitCode::FAILURE,
    }
}

/// Ranks that share the first GPU.
pub fn gpu_world(world_size: usize) -> World {
    World::threads(world_size)
        .expect("a positive world size")
        .with_timeout(std::time::Duration::from_secs(60))
        .with_threads_per_rank(1)
        .with_devices(Devices::Cuda(vec![0]))
}
