//! One strategy's run, and what its steps took.

use anyhow::Context;
use candle_core::Tensor;
use dp_core::memory::{heap_usage, reset_heap_peak};
use dp_core::{EngineConfig, LocalReport, Rank, World};
use dp_zero::Sharding;

use crate::options::Job;

/// A run of one strategy.
#[derive(Debug, Clone)]
pub struct Run {
    /// Mean loss over all ranks, per step.
    pub losses: Vec<f64>,
    /// Per rank: all steps but the warm-up.
    pub times: Vec<Vec<LocalReport>>,
    /// Growth of the heap from before the model was made to its peak, of the rank with the greatest.
    pub peak_bytes: u64,
    pub params_sha256: String,
}

/// Trains the job's model with `sharding` on the ranks of `world`.
pub fn train(job: &Job, world: &World, sharding: Sharding) -> anyhow::Result<Run> {
    let ranks: Vec<RankRun> = world.map(|rank| train_rank(job, sharding, &rank))?;
    for (rank, run) in ranks.iter().enumerate() {
        anyhow::ensure!(
            run.params_sha256 == ranks[0].params_sha256,
            "the parameters of rank {rank} differ from rank 0's"
        );
    }
    Ok(Run {
        losses: ranks[0].losses.clone(),
        peak_bytes: ranks.iter().map(|r| r.peak_bytes).max().unwrap_or(0),
        params_sha256: ranks[0].params_sha256.clone(),
        times: ranks.into_iter().map(|r| r.times).collect(),
    })
}

struct RankRun {
    losses: Vec<f64>,
    times: Vec<LocalReport>,
    peak_bytes: u64,
    params_sha256: String,
}

fn train_rank(job: &Job, sharding: Sharding, rank: &Rank) -> anyhow::Result<RankRun> {
    let heap_before = heap_usage(Some(rank.rank())).current;
    reset_heap_peak(Some(rank.rank()));
    let (store, model) = job.build(rank.device())?;
    let mut engine = EngineConfig::default();
    engine.bucket_caps = job.bucket_caps;
    let optimizer = job.optimizer.clone();
    let mut trainer = dp_zero::trainer(sharding, store, rank.comm(), optimizer, engine)?;

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
            times.push(*trainer.local_report());
        }
    }
    Ok(RankRun {
        losses,
        times,
        peak_bytes: heap_usage(Some(rank.rank()))
            .peak
            .saturating_sub(heap_before),
        params_sha256: trainer.store().sha256()?,
    })
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
