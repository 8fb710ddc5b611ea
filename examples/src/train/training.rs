//! The training loop, on every rank.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use candle_core::Tensor;
use dp_core::checkpoint::CheckpointProblem;
use dp_core::{
    DataPosition, DistributedSampler, Error, HyperParameters, LoadOptions, ParamStore, Rank,
    Remainder, SaveOptions, StepReport, Trainer, max_over_ranks,
};
use dp_models::CausalLm;
use dp_zero::config::ConfiguredOptimizer;

use super::evaluation::evaluate;
use super::interrupt;
use super::job::Job;
use super::monitor::Monitor;
use super::run_folder::Resume;
use super::sampling::sample;

/// A run that has skipped so many steps in a row learns nothing any more.
const MAX_SKIPPED: u32 = 100;

/// What a rank brings home.
#[derive(Debug)]
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
        let options = LoadOptions::new().with_hyper_parameters(hyper_parameters);
        let folder = self.job.folder.checkpoints();
        let loaded = match &self.job.resume {
            None => Ok(None),
            Some(Resume::Latest) => self.trainer.load_latest(&folder, &options),
            Some(Resume::From(path)) => self.trainer.load_with(path, &options).map(Some),
        };
        let loaded = loaded.map_err(|error| match &error {
            Error::Checkpoint {
                problem: CheckpointProblem::HyperParameters,
                ..
            } => anyhow!("{error}; --hyper-parameters saved takes the checkpoint's, current the configuration's"),
            _ => anyhow!(error),
        })?;
        let Some(loaded) = loaded else {
            return Ok(None);
        };
        self.batches.seek(loaded.data);
        if self.job.resume == Some(Resume::Latest) {
            self.saved = Some((loaded.step, loaded.folder.clone()));
        }
        let steps = self.job.config.run.steps;
        if loaded.step > steps {
            bail!(
                "run.steps is {steps}, but the checkpoint is of step {}",
                loaded.step
            );
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
            let (epoch, record) = (self.batches.position.epoch, self.trainer.record(report));
            monitor.step(report, record, elapsed, epoch);
        }
        let last = "the last checkpoint is as it was";
        match &report.skipped {
            Some(reason) => {
                self.skipped_in_row += 1;
                if self.skipped_in_row >= MAX_SKIPPED {
                    bail!(
                        "{MAX_SKIPPED} steps in a row were skipped, the last because of {reason}; {last}"
                    );
                }
            }
            None => self.skipped_in_row = 0,
        }
        match report.loss {
            Some(loss) if !loss.is_finite() && report.skipped.is_none() => bail!(
                "the loss of step {} is {loss}: the training has diverged; try a lower learning rate or gradient_clipping; {last}",
                report.step
            ),
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
        if let Some(monitor) = &mut self.monitor {
            monitor.evaluation(self.trainer.num_steps(), loss);
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
            .with_data(self.batches.position);
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

/// The rank's part of each micro-batch: sequences in a shuffled order that depends on the seed only. The same global batch on
/// any number of ranks.
struct Batches<'a> {
    job: &'a Job,
    rank: &'a Rank,
    sampler: DistributedSampler,
    position: DataPosition,
    order: std::vec::IntoIter<usize>,
}

impl<'a> Batches<'a> {
    fn new(job: &'a Job, rank: &'a Rank) -> anyhow::Result<Self> {
        let seed = job.config.run.seed;
        let sampler = DistributedSampler::new(job.train.len(), rank.world_size(), rank.rank())?
            .with_shuffle(seed)
            .with_remainder(Remainder::Drop);
        Ok(Self {
            order: sampler.indices(0).into_iter(),
            job,
            rank,
            sampler,
            position: DataPosition {
                seed,
                ..DataPosition::default()
            },
        })
    }

    fn seek(&mut self, position: DataPosition) {
        self.position = position;
        let order = self.sampler.indices_after(position.epoch, position.samples);
        self.order = order.into_iter();
    }

    /// Inputs and targets of the next micro-batch, `[B, T]` each.
    fn next(&mut self) -> anyhow::Result<(Tensor, Tensor)> {
        let mut sequences = Vec::with_capacity(self.job.sizes.micro_batch_size);
        while sequences.len() < self.job.sizes.micro_batch_size {
            match self.order.next() {
                Some(sequence) => {
                    sequences.push(sequence);
                    self.position.samples += self.rank.world_size();
                }
                None => {
                    self.position.epoch += 1;
                    self.position.samples = 0;
                    self.order = self.sampler.indices(self.position.epoch).into_iter();
                }
            }
        }
        self.job
            .train
            .batch(&sequences, self.rank.device())
            .context("data.train")
    }
}
