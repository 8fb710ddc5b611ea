//! A VarMap and a candle_nn optimizer, made data parallel with two lines.

mod task;

use std::path::Path;

use candle_core::backprop::GradStore;
use candle_core::{DType, Result};
use candle_nn::loss::mse;
use candle_nn::{AdamW, Module, Optimizer, VarBuilder, VarMap};
use dp_core::{DistributedSampler, Rank, VarMapSync, World};
use task::{NUM_SAMPLES, build_model, load};

fn main() -> Result<()> {
    let replicas = train(4)?;
    for name in replicas[0].keys() {
        for other in &replicas[1..] {
            assert_eq!(
                replicas[0][name], other[name],
                "{name} is the same on all ranks"
            );
        }
    }
    println!("{} variables, the same on all ranks", replicas[0].len());
    World::threads(2)?.run(further)
}

// ANCHOR: loop
fn train(world_size: usize) -> Result<Vec<Values>> {
    World::threads(world_size)?.map(|rank| {
        let varmap = VarMap::new(); // one per rank
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, rank.device());
        let model = build_model(vb)?;
        let ddp = VarMapSync::new(&varmap, rank.comm())?; // first line
        let mut optimizer = AdamW::new_lr(varmap.all_vars(), 1e-2)?;

        let sampler = DistributedSampler::new(NUM_SAMPLES, rank.world_size(), rank.rank())?;
        for indices in sampler.indices(0).chunks(8) {
            let (x, y) = load(indices, rank.device())?;
            let loss = mse(&model.forward(&x)?, &y)?;
            let mut grads = loss.backward()?;
            ddp.all_reduce(&mut grads)?; // second line
            optimizer.step(&grads)?;
        }
        values(&varmap)
    })
}
// ANCHOR_END: loop

/// The same loop with what the trainers would do by themselves: several micro-batches per step, clipping, saved weights.
fn further(rank: Rank) -> Result<()> {
    let varmap = VarMap::new();
    let model = build_model(VarBuilder::from_varmap(&varmap, DType::F32, rank.device()))?;
    let ddp = VarMapSync::new(&varmap, rank.comm())?;
    let mut optimizer = AdamW::new_lr(varmap.all_vars(), 1e-2)?;
    let sampler = DistributedSampler::new(NUM_SAMPLES, rank.world_size(), rank.rank())?;
    for batch in sampler.indices(0).chunks(32) {
        let mut grads = accumulate(&varmap, &model, batch)?;
        ddp.all_reduce(&mut grads)?; // once per step
        clip_grad_norm(&varmap, &mut grads, 0.5)?; // after it, so that all ranks take the same factor
        optimizer.step(&grads)?;
    }
    let path = std::env::temp_dir().join(format!("existing-loop-{}", std::process::id()));
    save(&rank, &varmap, &path)?;
    load_again(&rank, &varmap, &path)
}

// ANCHOR: accumulate
/// The mean of the gradients of micro-batches of 8 samples; `batch` is a multiple of 8.
fn accumulate(varmap: &VarMap, model: &impl Module, batch: &[usize]) -> Result<GradStore> {
    let device = candle_core::Device::Cpu;
    let num_micro_batches = batch.len() / 8;
    let mut sum: Option<GradStore> = None;
    for indices in batch.chunks(8) {
        let (x, y) = load(indices, &device)?;
        let loss = (mse(&model.forward(&x)?, &y)? / num_micro_batches as f64)?;
        let grads = loss.backward()?;
        sum = Some(match sum {
            None => grads,
            Some(mut sum) => {
                for var in varmap.all_vars() {
                    let both = match (sum.remove(&var), grads.get(&var)) {
                        (Some(a), Some(b)) => (a + b)?,
                        (Some(a), None) => a,
                        (None, Some(b)) => b.clone(),
                        (None, None) => continue,
                    };
                    sum.insert(&var, both);
                }
                sum
            }
        });
    }
    sum.ok_or_else(|| candle_core::Error::msg("a batch has at least one micro-batch"))
}
// ANCHOR_END: accumulate

// ANCHOR: clip
/// Scales reduced gradients to a norm of at most `max_norm`, as `torch.nn.utils.clip_grad_norm_`. Returns the norm before.
fn clip_grad_norm(varmap: &VarMap, grads: &mut GradStore, max_norm: f64) -> Result<f64> {
    // By name: all_vars() has another order on each rank, and sums of floats depend on it.
    let vars = varmap
        .data()
        .lock()
        .expect("no rank panicked with the lock");
    let vars: std::collections::BTreeMap<_, _> = vars.iter().collect();
    let mut squares = 0f64;
    for var in vars.values() {
        if let Some(grad) = grads.get(var) {
            squares += grad
                .sqr()?
                .sum_all()?
                .to_dtype(DType::F64)?
                .to_scalar::<f64>()?;
        }
    }
    let norm = squares.sqrt();
    let factor = max_norm / (norm + 1e-6);
    if factor < 1.0 {
        for var in vars.values() {
            if let Some(grad) = grads.remove(var) {
                grads.insert(var, (grad * factor)?);
            }
        }
    }
    Ok(norm)
}
// ANCHOR_END: clip

// ANCHOR: save
/// All ranks hold the same, so one of them writes; the others must not read before it is done.
fn save(rank: &Rank, varmap: &VarMap, path: &Path) -> Result<()> {
    if rank.rank() == 0 {
        varmap.save(path)?;
    }
    Ok(rank.comm().barrier()?)
}

/// Weights are loaded before `VarMapSync::new`, on all ranks or on rank 0, whose values count.
fn load_again(rank: &Rank, trained: &VarMap, path: &Path) -> Result<()> {
    let mut varmap = VarMap::new();
    build_model(VarBuilder::from_varmap(&varmap, DType::F32, rank.device()))?;
    if rank.rank() == 0 {
        varmap.load(path)?;
        std::fs::remove_file(path)?;
    }
    VarMapSync::new(&varmap, rank.comm())?;
    assert_eq!(values(&varmap)?, values(trained)?);
    Ok(())
}
// ANCHOR_END: save

type Values = std::collections::BTreeMap<String, Vec<f32>>;

fn values(varmap: &VarMap) -> Result<Values> {
    let vars = varmap
        .data()
        .lock()
        .expect("no rank panicked with the lock");
    vars.iter()
        .map(|(name, var)| Ok((name.clone(), var.flatten_all()?.to_vec1()?)))
        .collect()
}
