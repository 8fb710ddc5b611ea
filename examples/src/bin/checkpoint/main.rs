//! Looks at checkpoints, without the code of the model.
//!
//! ```text
//! cargo run --release --bin checkpoint -- inspect target/resume
//! cargo run --release --bin checkpoint -- export target/resume weights.safetensors
//! ```
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::ensure;
use clap::{Parser, Subcommand};
use dp_core::checkpoint::Checkpoint;
use dp_examples::closed_pipe;

mod report;

#[derive(Parser)]
struct Options {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Print the manifest and verify all files; exit code 1 if anything is missing or damaged
    Inspect {
        /// A checkpoint, or the folder of a run: then its latest one
        dir: PathBuf,
        /// Print the manifest as JSON instead
        #[arg(long)]
        json: bool,
    },
    /// Verify a checkpoint and write its weights to one plain safetensors file
    Export {
        /// A checkpoint, or the folder of a run: then its latest one
        dir: PathBuf,
        /// The file to write
        file: PathBuf,
    },
}

fn main() -> ExitCode {
    closed_pipe::end_quietly();
    match run(Options::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Inspect { dir, json } => {
            let checkpoint = Checkpoint::open(&dir)?;
            let wrong = report::wrong_files(&checkpoint);
            if json {
                println!("{}", serde_json::to_string_pretty(checkpoint.manifest())?);
            } else {
                report::print(&checkpoint, &wrong);
            }
            for (_, error) in &wrong {
                eprintln!("{error}");
            }
            ensure!(
                wrong.is_empty(),
                "{} of {} files are missing or damaged",
                wrong.len(),
                checkpoint.manifest().ranks.len()
            );
            Ok(checkpoint.verify()?)
        }
        Command::Export { dir, file } => {
            let checkpoint = Checkpoint::open(&dir)?;
            checkpoint.export_safetensors(&file)?;
            let manifest = checkpoint.manifest();
            println!(
                "{}: {} tensors of step {}",
                file.display(),
                manifest.parameters.len(),
                manifest.step
            );
            Ok(())
        }
    }
}
