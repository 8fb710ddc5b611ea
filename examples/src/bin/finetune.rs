//! Goes on training a GPT-2 in the layout of Hugging Face, and writes one in the same layout.
//!
//! ```text
//! cargo run --release --bin finetune -- --model models/gpt2 --config examples/configs/finetune.json --set data.train=my-text.txt
//! ```
//!
//! The folder of the model has `config.json`, `model.safetensors` (or several files and their index) and often `tokenizer.json`. The
//! result is in `run.out/hugging_face`, for `GPT2LMHeadModel.from_pretrained`, beside what `train-gpt` leaves.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use dp_examples::train::program::{self, Arguments};
use mimalloc::MiMalloc;

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// Goes on training a GPT-2 in the layout of Hugging Face, and writes one in the same layout.
#[derive(Debug, Clone, Parser)]
#[command(name = "finetune", version)]
struct Options {
    /// Folder of the model: config.json, model.safetensors, and tokenizer.json if there is one
    #[arg(long, value_name = "FOLDER")]
    model: PathBuf,
    #[command(flatten)]
    arguments: Arguments,
}

fn main() -> ExitCode {
    let options = Options::parse();
    program::main(options.arguments, Some(options.model))
}
