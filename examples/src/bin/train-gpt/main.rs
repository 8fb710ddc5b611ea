//! Trains a GPT-2 or a Llama from a configuration with DeepSpeed's keys.
//!
//! ```text
//! cargo run --release --bin train-gpt -- --config examples/configs/gpt-bytes.json --set data.train=my-text.txt
//! cargo run --release --bin train-gpt -- --config examples/configs/gpt-bytes.json --set data.train=my-text.txt --resume latest
//! ```
//!
//! Ctrl-C ends it after the step that is under way, with a checkpoint. It writes checkpoints, `metrics.jsonl`, `report.html`,
//! `model.safetensors` and `sample.txt` to the folder `run.out`.

use std::cell::Cell;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, ValueEnum};
use dp_core::{HyperParameters, World};
use dp_examples::options::{exit_code, writable};
use dp_examples::train::config::TrainConfig;
use dp_examples::train::interrupt;
use dp_examples::train::job::Job;
use dp_examples::train::report::report;
use dp_examples::train::run_folder::Resume;
use dp_examples::train::training::{Outcome, train};
use dp_examples::{logging, pages};
use mimalloc::MiMalloc;

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

/// Trains a GPT-2 or a Llama from a configuration with DeepSpeed's keys.
#[derive(Debug, Clone, Parser)]
#[command(name = "train-gpt", version)]
struct Options {
    /// The configuration, JSON; docs/src/config-reference.md lists its keys
    #[arg(long)]
    config: PathBuf,
    /// Override one key, e.g. zero_optimization.stage=2; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Number of ranks
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=256))]
    ranks: u16,
    /// Go on from a checkpoint: `latest` of the run's own folder (from the start, if there is none), or a folder
    #[arg(long, value_parser = resume)]
    resume: Option<Resume>,
    /// What to do where optimizer or schedule of the checkpoint differ from the configuration's
    #[arg(long, value_enum, default_value_t = Differences::Refuse, requires = "resume")]
    hyper_parameters: Differences,
    /// File for a timeline of all steps, for https://ui.perfetto.dev
    #[arg(long)]
    trace: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Differences {
    /// Stop with the first difference
    Refuse,
    /// Take the checkpoint's
    Saved,
    /// Take the configuration's
    Current,
}

fn resume(text: &str) -> Result<Resume, String> {
    match text {
        "" => Err("expected `latest` or a folder".to_string()),
        "latest" => Ok(Resume::Latest),
        path => Ok(Resume::From(PathBuf::from(path))),
    }
}

fn main() -> ExitCode {
    pages::keep();
    let stopped = Cell::new(false);
    let code = exit_code(check, |(options, world, job)| {
        run(options, world, job, &stopped)
    });
    match stopped.get() {
        // As a shell reports a program that was interrupted.
        true => ExitCode::from(130),
        false => code,
    }
}

/// Everything that can be wrong before the first step.
fn check() -> anyhow::Result<(Options, World, Job)> {
    let options = Options::parse();
    let config = TrainConfig::from_file(&options.config, &options.set)?;
    // Before anything starts a thread: the World can then tell Candle how many threads a rank has.
    let world = World::from_env_or_threads(usize::from(options.ranks))?;
    let in_file = || options.config.display().to_string();
    let job = Job::new(config, world.world_size(), options.resume.clone()).with_context(in_file)?;
    if let Some(path) = &options.trace {
        writable("--trace", path)?;
    }
    Ok((options, world, job))
}

fn run(options: &Options, world: &World, job: &Job, stopped: &Cell<bool>) -> anyhow::Result<bool> {
    let timeline = logging::init(options.trace.as_deref())?;
    interrupt::listen()?;
    println!("{}", job.summary());
    let hyper_parameters = match options.hyper_parameters {
        Differences::Refuse => HyperParameters::MustMatch,
        Differences::Saved => HyperParameters::Saved,
        Differences::Current => HyperParameters::Current,
    };
    let outcomes: Vec<Outcome> = world.map(|rank| train(job, hyper_parameters, &rank))?;
    if let (Some(timeline), Some(path)) = (timeline, &options.trace) {
        timeline.finish()?;
        println!("wrote {}", path.display());
    }
    let outcome = &outcomes[0];
    let write = |path: PathBuf, text: &str| {
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        println!("wrote {}", path.display());
        anyhow::Ok(())
    };
    println!("saved {}", outcome.checkpoint.display());
    write(
        job.folder.report(),
        &report(job, &outcomes, &job.folder.metrics())?,
    )?;
    if outcome.stopped {
        stopped.set(true);
        println!(
            "stopped after step {} of {}; to go on, run the same command with --resume latest",
            outcome.steps, job.config.run.steps
        );
        return Ok(true);
    }
    println!("wrote {}", job.folder.weights().display());
    if let Some(sample) = &outcome.sample {
        write(job.folder.sample(), sample)?;
        println!("\n{sample}\n");
    }
    println!(
        "{} steps done, parameters {}",
        outcome.steps, outcome.params_sha256
    );
    Ok(true)
}
