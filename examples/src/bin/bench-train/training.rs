//! One variant's run, and what its steps took.

use anyhow::Context;
use candle_core::Tensor;
use dp_core::{LocalReport, Rank, World};
use dp_examples::measurement::Measurement;
use serde::{Deserialize, Serialize};

use crate::options::Job;
use crate::variant::Variant;

/// A run of one variant.
#[derive(Debug, Clone)]
pub struct Run {
    /// Mean loss over all ranks, per step.
    pub losses: Vec<f64>,
    /// Per rank: all steps but the warm-up.
    pub times: Vec<Vec<StepTimes>>,
    /// Growth of the heap, or of the GPU's memory, from before the model was made to its peak, of the rank with the greatest.
    pub peak_bytes: u64,
    pub params_sha256: String,
}

/// What a step took on one rank, in seconds: parts of its [`LocalReport`].
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct StepTimes {
    pub total: f64,
    pub forward: f64,
    pub backward: f64,
    pub exposed_communication: f64,
    pub optimizer: f64,
    pub reduction: f64,
    /// `None` where nothing is reduced.
    pub hidden_share: Option<f64>,
    pub bytes_sent: u64,
}

impl From<&LocalReport> for StepTimes {
    fn from(report: &LocalReport) -> Self {
        Self {
            total: report.total.as_secs_f64(),
            forward: report.forward.as_secs_f64(),
            backward: report.backward.as_secs_f64(),
            exposed_communication: report.exposed_communication.as_secs_f64(),
            optimizer: report.optimizer.as_secs_f64(),
            reduction: report.reduction.as_secs_f64(),
            hidden_share: report.hidden_share(),
            bytes_sent: report.bytes_sent,
        }
    }
}

/// Trains the job's model in one way on the ranks of `world`. All processes get the same.
pub fn train(job: &Job, world: &World, variant: Variant) -> anyhow::Result<Run> {
    // What all ranks bring home, once per rank of this process.
    let runs = world.map(|rank| -> anyhow::Result<(Vec<f64>, Vec<RankRun>)> {
        let (losses, mine) = train_rank(job, variant, &rank)?;
        let all = rank.comm().all_gather_object(&mine, "runs of all ranks")?;
        Ok((losses, all))
    })?;
    let (losses, ranks) = runs.into_iter().next().context("a process has a rank")?;
    for (rank, run) in ranks.iter().enumerate() {
        anyhow::ensure!(
            run.params_sha256 == ranks[0].params_sha256,
            "the parameters of rank {rank} differ from rank 0's"
        );
    }
    Ok(Run {
        losses,
        peak_bytes: ranks.iter().map(|r| r.peak_bytes).max().unwrap_or(0),
        params_sha256: ranks[0].params_sha256.clone(),
        times: ranks.into_iter().map(|r| r.times).collect(),
    })
}

#[derive(Serialize, Deserialize)]
struct RankRun {
    times: Vec<StepTimes>,
    peak_bytes: u64,
    params_sha256: String,
}

/// The losses, which are those of all ranks, and what is this rank's own.
fn train_rank(job: &Job, variant: Variant, rank: &Rank) -> anyhow::Result<(Vec<f64>, RankRun)> {
    let measurement = Measurement::begin(rank)?;
    let (store, model) = job.build(rank.device())?;
    let engine = variant.engine(job.bucket_caps);
    let optimizer = job.optimizer.clone();
    let mut trainer = dp_zero::trainer(variant.sharding, store, rank.comm(), optimizer, engine)?;

    let options = &job.options;
    let mut losses = Vec::with_capacity(options.steps);
    let mut times = Vec::with_capacity(options.steps);
    for step in 0..options.steps {
        let (inputs, targets) = batch(job, step, rank)?;
        trainer.begin_forward();
        let loss = model.loss(&inputs, &targets)?;
        trainer.backward(&loss)?;
        let report = trainer.step()?;
        losses.push(report.loss.context("all ranks have samples")?);
        if step >= options.warmup {
            times.push(StepTimes::from(trainer.local_report()));
        }
    }
    let run = RankRun {
        times,
        peak_bytes: measurement.end(rank, trainer.ledger().peak())?.peak,
        params_sha256: trainer.store().sha256()?,
    };
    Ok((losses, run))
}

/// The rank's rows of the global batch of `step`: inputs and targets, `[batch / ranks, context]` each.
fn batch(job: &Job, step: usize, rank: &Rank) -> anyhow::Result<(Tensor, Tensor)> {
    let (batch, context) = (job.options.batch, job.options.context);
    let windows = job.text.num_windows(context)? as u64;
    let (r, n) = (rank.rank(), rank.world_size());
    let offsets: Vec<usize> = (r * batch / n..(r + 1) * batch / n)
        .map(|row| {
            (splitmix64((job.options.seed << 32) + (step * batch + row) as u64) % windows) as usize
        })
        .collect();
    Ok(job.text.batch(&offsets, context, rank.device())?)
}

/// The output function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014). Row
/// `i` of the global batch `G` of step `s` starts at byte `splitmix64(seed 2^32 + s G + i) mod (len - context)` of the text:
/// a rule that is written in one line of any language, and does not depend on the number of ranks.
fn splitmix64(x: u64) -> u64 {
    let mut z = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
