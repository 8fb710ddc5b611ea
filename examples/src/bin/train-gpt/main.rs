//! Trains a GPT-2 or a Llama from a configuration with DeepSpeed's keys.
//!
//! ```text
//! cargo run --release --bin train-gpt -- --config examples/configs/gpt-bytes.json --set data.train=my-text.txt
//! cargo run --release --bin train-gpt -- --config examples/configs/gpt-bytes.json --set data.train=my-text.txt --resume latest
//! ```
//!
//! Ctrl-C ends it after the step that is under way, with a checkpoint. It writes checkpoints, `metrics.jsonl`, `report.html`,
//! `model.safetensors` and `sample.txt` to the folder `run.out`.

use std::process::ExitCode;

use clap::Parser;
use dp_examples::train::program::{self, Arguments};
use mimalloc::MiMalloc;

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// Trains a GPT-2 or a Llama from a configuration with DeepSpeed's keys.
#[derive(Debug, Clone, Parser)]
#[command(name = "train-gpt", version)]
struct Options {
    #[command(flatten)]
    arguments: Arguments,
}

fn main() -> ExitCode {
    program::main(Options::parse().arguments, None)
}
