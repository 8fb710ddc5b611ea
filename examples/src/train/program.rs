//! The programs that train from a configuration: command line, checks, run, and what is written at the end.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, ValueEnum};
use dp_core::{Devices, HyperParameters, World};

use super::config::TrainConfig;
use super::interrupt;
use super::job::Job;
use super::pretrained::Pretrained;
use super::report::report;
use super::run_folder::Resume;
use super::training::{Outcome, train};
use crate::options::{devices, exit_code, threads_only, writable};
use crate::{logging, pages};

/// What `train-gpt` and `finetune` are told alike.
#[derive(Debug, Clone, Args)]
pub struct Arguments {
    /// The configuration, JSON; docs/src/config-reference.md lists its keys
    #[arg(long)]
    config: PathBuf,
    /// Override one key, e.g. zero_optimization.stage=2; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// Number of ranks
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=256))]
    ranks: u16,
    /// Where ranks compute: cpu; cuda, the first GPU for all of them; or GPUs in turn, as in cuda:0,1
    #[arg(long, default_value = "cpu", value_parser = devices)]
    device: Devices,
    /// Go on from a checkpoint: `latest` of the run's own folder (from the start, if there is none), or the folder of a checkpoint or
    /// of another run
    #[arg(long, value_parser = resume)]
    resume: Option<Resume>,
    /// What to do where optimizer or schedule of the checkpoint differ from the configuration's
    #[arg(long, value_enum, default_value_t = Differences::Refuse, requires = "resume")]
    hyper_parameters: Differences,
    /// Go on with other data or another seed than the checkpoint's: the data begins anew
    #[arg(long, requires = "resume")]
    restart_data: bool,
    /// File for a timeline of all steps, for Perfetto (ui.perfetto.dev)
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

/// The whole program, given its command line and, if it goes on with one, the folder of a model. The exit code is 0 for a run that is
/// done, 130 for one that was interrupted, 1 for one that failed, and 2 for what cannot be.
pub fn main(arguments: Arguments, model: Option<PathBuf>) -> ExitCode {
    pages::keep();
    let stopped = Cell::new(false);
    let checked = || check(&arguments, model.as_deref());
    let code = exit_code(checked, |(world, job)| {
        run(&arguments, world, job, &stopped)
    });
    match stopped.get() {
        // As a shell reports a program that was interrupted.
        true => ExitCode::from(130),
        false => code,
    }
}

/// Everything that can be wrong before the first step.
fn check(arguments: &Arguments, model: Option<&Path>) -> anyhow::Result<(World, Job)> {
    let pretrained = model.map(Pretrained::open).transpose()?;
    let config = TrainConfig::from_file(&arguments.config, &arguments.set, pretrained)?;
    // Before anything starts a thread: the World can then tell Candle how many threads a rank has.
    let mut world = World::from_env_or_threads(usize::from(arguments.ranks))?
        .with_devices(arguments.device.clone());
    if config.pretrained.is_some() {
        // The model is converted once, by the process that all ranks are in.
        world = threads_only(world)?;
    }
    let in_file = || arguments.config.display().to_string();
    let resume = arguments.resume.clone();
    let job = Job::new(config, &world, resume, arguments.restart_data).with_context(in_file)?;
    if let Some(path) = &arguments.trace {
        writable("--trace", path)?;
    }
    Ok((world, job))
}

fn run(
    arguments: &Arguments,
    world: &World,
    job: &Job,
    stopped: &Cell<bool>,
) -> anyhow::Result<bool> {
    let trace = arguments
        .trace
        .as_ref()
        .map(|path| logging::trace_of(path, world));
    let timeline = logging::init(trace.as_deref())?;
    interrupt::listen()?;
    if world.is_main_process() {
        println!("{}", job.summary());
    }
    let hyper_parameters = match arguments.hyper_parameters {
        Differences::Refuse => HyperParameters::MustMatch,
        Differences::Saved => HyperParameters::Saved,
        Differences::Current => HyperParameters::Current,
    };
    // Those of all ranks, as each rank of this process knows them.
    let mut outcomes = world.map(|rank| -> anyhow::Result<Vec<Outcome>> {
        let mine = train(job, hyper_parameters, &rank)?;
        Ok(rank
            .comm()
            .all_gather_object(&mine, "outcomes of all ranks")?)
    })?;
    let outcomes = outcomes.swap_remove(0);
    stopped.set(outcomes[0].stopped);
    if !world.is_main_process() {
        return Ok(true);
    }
    if let (Some(timeline), Some(path)) = (timeline, trace) {
        timeline.finish()?;
        println!("wrote {}", path.display());
    }
    if let Some(path) = &job.initial_values {
        // A run that goes on makes it anew.
        let _ = std::fs::remove_file(path);
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
        println!(
            "stopped after step {} of {}; to go on, run the same command with --resume latest",
            outcome.steps, job.config.run.steps
        );
        return Ok(true);
    }
    println!("wrote {}", job.folder.weights().display());
    if let Some(pretrained) = &job.config.pretrained {
        let (weights, folder) = (job.folder.weights(), job.folder.hugging_face());
        let tokenizer = job.config.data.tokenizer.as_deref();
        pretrained.export(&weights, tokenizer, &folder)?;
        println!("wrote {}", folder.display());
    }
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
