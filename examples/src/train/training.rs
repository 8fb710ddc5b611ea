//! The training loop, on every rank.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use candle_core::Tensor;
use dp_core::checkpoint::CheckpointProblem;
use dp_core::{
    DataPosition, DistributedSampler, Error, HyperParameters, LoadOptions, ParamStore, Rank,
    SaveOptions, StepReport, Trainer, max_over_ranks,
};
use dp_models::CausalLm;
use dp_zero::config::ConfiguredOptimizer;
use serde::{Deserialize, Serialize};

use super::evaluation::evaluate;
use super::interrupt;
use super::job::Job;
use super::monitor::Monitor;
use super::sampling::sample;

/// A run that has skipped so many steps in a row learns nothing any more.
const MAX_SKIPPED: u32 = 100;

const DIVERGED: &str = "the training has diverged; try a lower learning rate or gradient_clipping; the last checkpoint is as it was";

/// What a rank brings home.
#[derive(Debug, Serialize, Deserialize)]
pub struct Outcome {
    /// Optimizer steps taken, those before a resume included.
    pub steps: u64,
    /// A signal has ended the run.
    pub stopped: bool,
    /// The last checkpoint.
    pub checkpoint: PathBuf,
    /// Most bytes held at a time, by category.
    pub memory: dp_core::LedgerSnapshot,
    /// SHA-256 of the parameters.
    pub params_sha256: String,
    /// The model's own text; rank 0 only.
    pub sample: Option<String>,
}

/// Trains the job's model on this rank. `hyper_parameters`: what to do where a checkpoint's differ from the configuration's.
///
/// # Errors
/// Those of training; a loss that is no number any more; a checkpoint that cannot be saved at the end.
pub fn train(job: &Job, hyper_parameters: HyperParameters, rank: &Rank) -> anyhow::Result<Outcome> {
    let mut store = ParamStore::new(rank.device()).with_seed(job.config.run.seed);
    if let Some(path) = &job.initial_values {
        store = store.with_initial_values(path)?;
    }
    let model = job.model.build(store.var_builder(job.dtype()))?;
    let steps = job.config.run.steps;
    let trainer = job
        .config
        .deepspeed
        .trainer(store, rank.comm(), Some(steps))?;
    let mut run = Run {
        job,
        rank,
        trainer,
        batches: Batches::new(job, rank)?,
        monitor: None,
        skipped_in_row: 0,
        saved: None,
    };
    let resumed = run.resume(hyper_parameters)?;
    if rank.rank() == 0 {
        run.monitor = Some(Monitor::start(job, resumed)?);
    }
    let stopped = run.train(model.as_ref())?;
    let checkpoint = run.save()?;
    let Run {
        trainer, monitor, ..
    } = run;
    if !stopped {
        trainer.export_safetensors(&job.folder.weights())?;
    }
    let sampled = match (monitor, stopped) {
        (Some(monitor), stopped) => {
            monitor.finish();
            if stopped {
                None
            } else {
                sample(model.as_ref(), job)?
            }
        }
        (None, _) => None,
    };
    Ok(Outcome {
        steps: trainer.num_steps(),
        stopped,
        checkpoint,
        memory: trainer.ledger().peak(),
        params_sha256: trainer.store().sha256()?,
        sample: sampled,
    })
}

/// One rank's run.
struct Run<'a> {
    job: &'a Job,
    rank: &'a Rank,
    trainer: Box<dyn Trainer<Optimizer = ConfiguredOptimizer>>,
    batches: Batches<'a>,
    /// On rank 0.
    monitor: Option<Monitor>,
    skipped_in_row: u32,
    /// The last checkpoint of this run's folder, and its step.
    saved: Option<(u64, PathBuf)>,
}

impl Run<'_> {
    /// Goes on from a checkpoint, if there is one; returns its step.
    fn resume(&mut self, hyper_parameters: HyperParameters) -> anyhow::Result<Option<u64>> {
        let Some(start) = &self.job.start else {
            return Ok(None);
        };
        let options = LoadOptions::new().with_hyper_parameters(hyper_parameters);
        let loaded = self.trainer.load_with(&start.folder, &options);
        let loaded = loaded.map_err(|error| match &error {
            Error::Checkpoint {
                problem: CheckpointProblem::HyperParameters,
                ..
            } => anyhow!(
                "{error}; where only settings differ, --hyper-parameters saved takes the checkpoint's and current the \
                 configuration's, but another kind of optimizer cannot go on from it"
            ),
            _ => anyhow!(error),
        })?;
        if start.same_data {
            self.batches.seek(loaded.data)?;
        }
        if start.is_own {
            self.saved = Some((loaded.step, loaded.folder.clone()));
        }
        if self.rank.rank() == 0 {
            println!(
                "from step {} of {} ranks, {}",
                loaded.step,
                loaded.world_size,
                loaded.folder.display()
            );
        }
        Ok(Some(loaded.step))
    }

    /// All steps; true if a signal has ended them early.
    fn train(&mut self, model: &dyn CausalLm) -> anyhow::Result<bool> {
        let run = &self.job.config.run;
        if self.trainer.num_steps() == 0 && self.job.initial_values.is_some() {
            // What the model could before.
            self.evaluate(model)?;
        }
        while self.trainer.num_steps() < run.steps {
            let started = Instant::now();
            let report = self.step(model)?;
            self.look_at(&report, started.elapsed())?;
            let step = self.trainer.num_steps();
            let is_due = |every: u64| every > 0 && step.is_multiple_of(every);
            if report.skipped.is_none() && step < run.steps {
                if is_due(run.eval_every) {
                    self.evaluate(model)?;
                }
                if is_due(run.save_every) {
                    self.save_if_possible()?;
                }
            }
            // Ranks hear of a signal at different moments, and stop together.
            let requested = usize::from(interrupt::is_requested());
            let stops = max_over_ranks(self.rank.comm().as_ref(), requested)? > 0;
            if stops && step < run.steps {
                return Ok(true);
            }
        }
        self.evaluate(model)?;
        Ok(false)
    }

    /// One optimizer step.
    fn step(&mut self, model: &dyn CausalLm) -> anyhow::Result<StepReport> {
        let config = &self.job.config.deepspeed;
        // Evaluations, checkpoints and metrics are no part of the forward.
        self.trainer.begin_forward();
        let mut window = self.trainer.accumulate(self.job.sizes.accumulation_steps)?;
        for _ in 0..self.job.sizes.accumulation_steps {
            let (inputs, targets) = self.batches.next()?;
            window.backward(&model.loss(&inputs, &targets)?)?;
        }
        window.finish()?;
        if config.gradient_clipping > 0.0 {
            self.trainer.clip_grad_norm(config.gradient_clipping)?;
        }
        Ok(self.trainer.step()?)
    }

    /// Shows a step, and ends a run that has diverged.
    fn look_at(&mut self, report: &StepReport, elapsed: Duration) -> anyhow::Result<()> {
        if let Some(monitor) = &mut self.monitor {
            let (epoch, record) = (self.batches.position().epoch, self.trainer.record(report));
            monitor.step(report, record, elapsed, epoch);
        }
        match &report.skipped {
            Some(reason) => {
                self.skipped_in_row += 1;
                if self.skipped_in_row >= MAX_SKIPPED {
                    bail!(
                        "{MAX_SKIPPED} steps in a row were skipped, the last because of {reason}; {DIVERGED}"
                    );
                }
            }
            None => self.skipped_in_row = 0,
        }
        match report.loss {
            Some(loss) if !loss.is_finite() && report.skipped.is_none() => {
                bail!("the loss of step {} is {loss}: {DIVERGED}", report.step)
            }
            _ => Ok(()),
        }
    }

    fn evaluate(&mut self, model: &dyn CausalLm) -> anyhow::Result<()> {
        let Some(data) = &self.job.validation else {
            return Ok(());
        };
        let (max, micro) = (
            self.job.config.run.eval_sequences,
            self.job.sizes.micro_batch_size,
        );
        let loss = evaluate(model, data, max, micro, self.rank)?;
        let step = self.trainer.num_steps();
        if let Some(monitor) = &mut self.monitor {
            monitor.evaluation(step, loss);
        }
        if !loss.is_finite() {
            bail!("the validation loss after step {step} is {loss}: {DIVERGED}");
        }
        Ok(())
    }

    /// Saves, unless the last checkpoint is of this step.
    fn save(&mut self) -> anyhow::Result<PathBuf> {
        let step = self.trainer.num_steps();
        if let Some((saved, folder)) = &self.saved
            && *saved == step
        {
            return Ok(folder.clone());
        }
        let options = SaveOptions::new()
            .keep_last(self.job.config.run.keep_last)?
            .with_data(self.batches.position());
        let options = match self.rank.rank() {
            0 => options.with_rank_state(&self.job.identity)?,
            _ => options,
        };
        let folder = self.job.folder.checkpoints();
        let saved = self.trainer.save_with(&folder, &options)?;
        self.saved = Some((step, saved.clone()));
        Ok(saved)
    }

    /// A full disk is no reason to stop: the last checkpoint is as it was, and the next save may work.
    fn save_if_possible(&mut self) -> anyhow::Result<()> {
        let Err(error) = self.save() else {
            return Ok(());
        };
        match error.downcast_ref::<Error>() {
            Some(Error::Checkpoint { .. }) => {
                if let Some(monitor) = &self.monitor {
                    monitor.say(&format!(
                        "step {} not saved: {error:#}",
                        self.trainer.num_steps()
                    ));
                }
                Ok(())
            }
            _ => Err(error),
        }
    }
}

/// The rank's part of each micro-batch. Epoch after epoch, each a new permutation of all sequences, makes one endless row, which
/// depends on the seed only; all ranks together take the next `micro-batch size * ranks` of it. So a global batch is the same
/// sequences on any number of ranks, also across the end of an epoch.
struct Batches<'a> {
    job: &'a Job,
    rank: &'a Rank,
    /// Of all sequences: ranks deal them out here.
    sampler: DistributedSampler,
    /// Sequences of the row that all ranks together have used.
    used: usize,
    /// An epoch, and its order.
    order: (u64, Vec<usize>),
}

impl<'a> Batches<'a> {
    fn new(job: &'a Job, rank: &'a Rank) -> anyhow::Result<Self> {
        let sampler = DistributedSampler::new(job.train.len(), 1, 0)?;
        let sampler = sampler.with_shuffle(job.config.run.seed);
        Ok(Self {
            order: (0, sampler.indices(0)),
            job,
            rank,
            sampler,
            used: 0,
        })
    }

    fn seek(&mut self, position: DataPosition) -> anyhow::Result<()> {
        let epochs = usize::try_from(position.epoch)?;
        self.used = epochs * self.job.train.len() + position.samples;
        Ok(())
    }

    /// What a checkpoint says.
    fn position(&self) -> DataPosition {
        let len = self.job.train.len();
        DataPosition {
            epoch: (self.used / len) as u64,
            samples: self.used % len,
            seed: self.job.config.run.seed,
        }
    }

    /// Inputs and targets of the next micro-batch, `[B, T]` each.
    fn next(&mut self) -> anyhow::Result<(Tensor, Tensor)> {
        let (size, ranks) = (self.job.sizes.micro_batch_size, self.rank.world_size());
        let first = self.used + self.rank.rank();
        let sequences: Vec<usize> = (0..size)
            .map(|i| self.sequence(first + i * ranks))
            .collect();
        self.used += size * ranks;
        self.job
            .train
            .batch(&sequences, self.rank.device())
            .context("data.train")
    }

    /// The sequence at a place in the row.
    fn sequence(&mut self, at: usize) -> usize {
        let len = self.job.train.len();
        let epoch = (at / len) as u64;
        if self.order.0 != epoch {
            self.order = (epoch, self.sampler.indices(epoch));
        }
        self.order.1[at % len]
    }
}
