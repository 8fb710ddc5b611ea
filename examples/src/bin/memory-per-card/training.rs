//! One strategy's run.

use std::time::Instant;

use anyhow::Context;
use candle_core::Tensor;
use dp_core::{AdamW, DistributedSampler, ParamSpec, ParamStore, Rank, Trainer, World};
use dp_models::Gpt;
use dp_zero::{ModelStates, Sharding, bytes_sent_per_step};
use indicatif::ProgressBar;
use serde::{Deserialize, Serialize};

use dp_examples::measurement::Measurement;

use crate::options::Job;
use crate::report::{RankReport, StrategyReport};

/// Trains the job's model with `sharding` on the ranks of `world`.
pub fn train(
    job: &Job,
    world: &World,
    sharding: Sharding,
    progress: &ProgressBar,
) -> anyhow::Result<StrategyReport> {
    // What all ranks bring home, once per rank of this process.
    let runs = world.map(|rank| -> anyhow::Result<Vec<RankRun>> {
        let mine = train_rank(job, sharding, &rank, progress)?;
        Ok(rank.comm().all_gather_object(&mine, "runs of all ranks")?)
    })?;
    let mut runs = runs.into_iter().next().context("a process has a rank")?;
    let first = &runs[0];
    for run in &runs {
        anyhow::ensure!(
            run.params_sha256 == first.params_sha256,
            "{}: the parameters of rank {} differ from rank 0's",
            sharding.name(),
            run.memory.rank
        );
    }
    Ok(StrategyReport {
        name: sharding.name(),
        bytes_sent_as_predicted: runs.iter().all(|r| r.bytes_sent == r.bytes_predicted),
        bytes_sent_per_step: runs.iter().map(|r| r.bytes_sent).max().unwrap_or(0),
        bytes_sent_predicted: runs.iter().map(|r| r.bytes_predicted).max().unwrap_or(0),
        params_sha256: first.params_sha256.clone(),
        tokens_per_second: first.tokens_per_second,
        losses: std::mem::take(&mut runs[0].losses),
        ranks: runs.into_iter().map(|r| r.memory).collect(),
    })
}

/// What one rank brings home.
#[derive(Serialize, Deserialize)]
struct RankRun {
    losses: Vec<f64>,
    params_sha256: String,
    tokens_per_second: f64,
    bytes_sent: u64,
    bytes_predicted: u64,
    memory: RankReport,
}

fn train_rank(
    job: &Job,
    sharding: Sharding,
    rank: &Rank,
    progress: &ProgressBar,
) -> anyhow::Result<RankRun> {
    // From here on; what the runs before have left is no part of it.
    let measurement = Measurement::begin(rank)?;
    let store = ParamStore::new(rank.device()).with_seed(job.options.seed);
    let model = Gpt::new(&job.model, store.var_builder(job.options.dtype))?;
    let optimizer = AdamW::with_lr(job.options.lr);
    let engine = job.engine.clone();
    let trainer = dp_zero::trainer(sharding, store, rank.comm(), optimizer, engine)?;
    run_steps(job, sharding, rank, &model, trainer, measurement, progress)
}

fn run_steps(
    job: &Job,
    sharding: Sharding,
    rank: &Rank,
    model: &Gpt,
    mut trainer: Box<dyn Trainer<Optimizer = AdamW>>,
    measurement: Measurement,
    progress: &ProgressBar,
) -> anyhow::Result<RankRun> {
    let comm = rank.comm();
    let params = ParamSpec::of_all(&trainer.store().params());
    let bytes_predicted = bytes_sent_per_step(
        trainer.layout(),
        sharding,
        &job.engine,
        params.len(),
        rank.rank(),
    );
    let mut batches = Batches::new(job, rank)?;
    let mut losses = Vec::with_capacity(job.options.steps);
    let mut bytes_sent = None;
    let mut started = Instant::now();
    for step in 0..job.options.steps {
        if step == 1 {
            // The first step warms up allocator and caches.
            started = Instant::now();
        }
        let (inputs, targets) = batches.next_batch()?;
        let sent_before = comm.traffic().bytes_sent();
        let loss = model.loss(&inputs, &targets)?;
        trainer.backward(&loss)?;
        let report = trainer.step()?;
        let sent = comm.traffic().bytes_sent() - sent_before;
        // A step that the loss scale was too large for gathers no parameters.
        if report.skipped.is_none() {
            if bytes_sent.is_some_and(|b| b != sent) {
                anyhow::bail!("step {step} sent {sent} bytes, the steps before {bytes_sent:?}");
            }
            bytes_sent = Some(sent);
        }
        losses.push(report.loss.context("all ranks have samples")?);
        if rank.rank() == 0 {
            progress.set_message(format!("{} loss {:.3}", sharding.name(), losses[step]));
            progress.inc(1);
        }
    }
    let counted_steps = job.options.steps.saturating_sub(1);
    let tokens = counted_steps * rank.world_size() * job.options.batch * job.options.context;
    let tokens_per_second = match counted_steps {
        0 => 0.0,
        _ => tokens as f64 / started.elapsed().as_secs_f64(),
    };

    let measured = measurement.end(rank, trainer.ledger().peak())?;
    let held = trainer.ledger().current();
    let num_states = 2; // AdamW: exp_avg and exp_avg_sq
    let predicted = ModelStates::of_layout(trainer.layout(), &params, sharding, num_states);
    Ok(RankRun {
        losses,
        params_sha256: trainer.store().sha256()?,
        tokens_per_second,
        bytes_sent: bytes_sent.unwrap_or(0),
        bytes_predicted,
        memory: RankReport {
            rank: rank.rank(),
            parameters: held.parameters,
            gradients: held.gradients,
            optimizer: held.optimizer,
            communication: trainer.ledger().peak().communication,
            activations_peak: measured.activations_peak,
            peak: measured.peak,
            gpu: measured.gpu,
            predicted: predicted
                .ok_or_else(|| anyhow::anyhow!("no prediction for {sharding:?}"))?,
        },
    })
}

/// The rank's part of each global batch: windows of the text in a shuffled order that depends on the seed only.
pub struct Batches<'a> {
    job: &'a Job,
    rank: &'a Rank,
    sampler: DistributedSampler,
    epoch: u64,
    offsets: std::vec::IntoIter<usize>,
}

impl<'a> Batches<'a> {
    pub fn new(job: &'a Job, rank: &'a Rank) -> anyhow::Result<Self> {
        let windows = job.text.num_windows(job.options.context)?;
        let sampler = DistributedSampler::new(windows, rank.world_size(), rank.rank())?;
        let sampler = sampler.with_shuffle(job.options.seed);
        Ok(Self {
            offsets: sampler.indices(0).into_iter(),
            job,
            rank,
            sampler,
            epoch: 0,
        })
    }

    /// Inputs and targets, `[batch, context]` each.
    pub fn next_batch(&mut self) -> anyhow::Result<(Tensor, Tensor)> {
        let mut offsets = Vec::with_capacity(self.job.options.batch);
        while offsets.len() < self.job.options.batch {
            match self.offsets.next() {
                Some(offset) => offsets.push(offset),
                None => {
                    self.epoch += 1;
                    self.offsets = self.sampler.indices(self.epoch).into_iter();
                }
            }
        }
        let context = self.job.options.context;
        Ok(self.job.text.batch(&offsets, context, self.rank.device())?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::Options;
    use candle_core::DType;
    use candle_nn::{Optimizer as _, ParamsAdamW, VarBuilder, VarMap};
    use clap::Parser;

    fn job(arguments: &str) -> anyhow::Result<Job> {
        let out = std::env::temp_dir().join("memory-per-card-test");
        let arguments = format!("memory-per-card {arguments} --out {}", out.display());
        let options = Options::try_parse_from(arguments.split(' '))?;
        let world = World::threads(usize::from(options.ranks))?;
        options.into_job(&world)
    }

    /// One rank computes what a plain Candle loop computes: same initial values, same data, candle_nn's own AdamW.
    #[test]
    fn one_rank_equals_plain_candle() -> anyhow::Result<()> {
        let job =
            job("--ranks 1 --steps 8 --width 32 --heads 2 --layers 2 --context 16 --batch 3")?;
        let store = ParamStore::new(&candle_core::Device::Cpu).with_seed(job.options.seed);
        Gpt::new(&job.model, store.var_builder(DType::F32))?;

        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, &candle_core::Device::Cpu);
        let model = Gpt::new(&job.model, vb)?;
        for (name, var) in varmap.data().lock().unwrap().iter() {
            let initial = store.get(name).expect("the same names").tensor().detach();
            var.set(&initial)?;
        }
        World::threads(1)?.run(|rank| -> anyhow::Result<()> {
            let params = ParamsAdamW {
                lr: job.options.lr,
                ..Default::default()
            };
            let mut optimizer = candle_nn::AdamW::new(varmap.all_vars(), params)?;
            let mut batches = Batches::new(&job, &rank)?;
            let mut losses = Vec::new();
            for _ in 0..job.options.steps {
                let (inputs, targets) = batches.next_batch()?;
                let loss = model.loss(&inputs, &targets)?;
                optimizer.backward_step(&loss)?;
                losses.push(f64::from(loss.to_scalar::<f32>()?));
            }
            // The digest needs the parameters in a store: names, shapes and values decide it.
            let file = std::env::temp_dir()
                .join(format!("plain-candle-{}.safetensors", std::process::id()));
            varmap.save(&file)?;
            let store = ParamStore::new(rank.device()).with_initial_values(&file)?;
            Gpt::new(&job.model, store.var_builder(DType::F32))?;
            std::fs::remove_file(&file)?;
            for sharding in [Sharding::Ddp, Sharding::Zero1, Sharding::Zero2] {
                let ours = train(&job, &World::threads(1)?, sharding, &ProgressBar::hidden())?;
                assert_eq!(ours.losses, losses, "{sharding:?}");
                assert_eq!(ours.params_sha256, store.sha256()?, "{sharding:?}");
            }
            Ok(())
        })
    }

    /// Neither the bucket cap nor a second run changes a bit.
    #[test]
    fn bits_do_not_depend_on_the_bucket_cap() -> anyhow::Result<()> {
        let arguments = "--ranks 3 --steps 3 --width 32 --heads 2 --layers 1 --context 16 --batch 1 --bucket-kib";
        let run = |kib: &str| -> anyhow::Result<StrategyReport> {
            train(
                &job(&format!("{arguments} {kib}"))?,
                &World::threads(3)?,
                Sharding::Zero2,
                &ProgressBar::hidden(),
            )
        };
        let first = run("1")?;
        for kib in ["1", "7", "25600"] {
            let other = run(kib)?;
            assert_eq!(other.params_sha256, first.params_sha256, "{kib} KiB");
            assert_eq!(other.losses, first.losses, "{kib} KiB");
        }
        Ok(())
    }

    /// Case of mixed precision: masters in f32 make up for what 16 bits lose.
    #[test]
    fn training_in_16_bits_ends_near_the_loss_of_f32() -> anyhow::Result<()> {
        let arguments = "--ranks 2 --steps 200 --width 48 --heads 2 --layers 2 --context 32 --batch 4 --lr 3e-3 --dtype";
        let last = |dtype: &str| -> anyhow::Result<f64> {
            let job = job(&format!("{arguments} {dtype}"))?;
            let world = World::threads(2)?.with_threads_per_rank(1);
            let report = train(&job, &world, Sharding::Zero2, &ProgressBar::hidden())?;
            Ok(report.losses[199])
        };
        let f32 = last("f32")?;
        assert!(f32 < 2.6, "it has learned something: {f32}");
        for dtype in ["bf16", "f16", "bf16 --grad-accum-dtype parameter"] {
            let loss = last(dtype)?;
            let difference = (loss / f32 - 1.0).abs();
            assert!(difference < 0.02, "{dtype}: {loss}, f32: {f32}");
        }
        Ok(())
    }
}
