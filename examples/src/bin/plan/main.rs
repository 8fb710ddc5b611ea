//! Know before you rent: memory per card, bytes sent and buckets of each strategy, without training.
//!
//! ```text
//! cargo run --release --bin plan -- --params 7.5B --ranks 4,64 --dtype bf16 --card 80GiB
//! cargo run --release --bin plan -- --layers 12 --width 768 --heads 12 --context 1024 --vocab 50257 --batch 4 --ranks 1,2,4
//! cargo run --release --bin plan -- --config examples/configs/gpt-bytes.json --ranks 1,2,4
//! ```
//!
//! A shape or a configuration of train-gpt (--config) gives the numbers of the trainers themselves, to the byte, and an estimate of activations. A count gives the formulas of
//! the ZeRO paper.

mod configured;
mod html;
mod options;
mod report;
mod subject;
mod table;

use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;
use dp_examples::options::exit_code;

use options::{Job, Options};
use report::Report;

fn main() -> ExitCode {
    exit_code(|| Options::parse().into_job(), run)
}

/// Prints the plan and writes the files that were asked for. A plan in which nothing fits is no failure.
fn run(job: &Job) -> anyhow::Result<bool> {
    let report = Report::new(job)?;
    table::print(&report);
    let write = |path: &Option<std::path::PathBuf>, text: String| match path {
        Some(path) => {
            std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
        }
        None => Ok(()),
    };
    write(&job.json, serde_json::to_string_pretty(&report)?)?;
    write(&job.html, html::page(&report))?;
    Ok(true)
}
