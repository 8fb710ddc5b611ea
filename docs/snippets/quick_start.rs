//! The program of the quick start: `first-ranks RANKS STRATEGY`, with 1, 2, 4 or 8 ranks and ddp, zero1 or zero2.

use candle_core::{DType, Device, Result as CandleResult, Tensor};
use candle_nn::{Module, VarBuilder, linear, loss::mse, seq};
use dp_core::{AdamW, DistributedSampler, EngineConfig, ParamStore, Rank, Result, World};
use dp_zero::Sharding;

// ANCHOR: model
/// Two inputs, 256 hidden units, one output: an ordinary Candle model.
fn build_model(vb: VarBuilder) -> CandleResult<impl Module> {
    let hidden = linear(2, 256, vb.pp("hidden"))?;
    let middle = linear(256, 256, vb.pp("middle"))?;
    let out = linear(256, 1, vb.pp("out"))?;
    let hidden = seq().add(hidden).add_fn(|x| x.tanh());
    Ok(hidden.add(middle).add_fn(|x| x.tanh()).add(out))
}

/// Inputs `[n, 2]` and targets `[n, 1]`: the function `y = x0 * x1` on a grid of 32 x 32 points.
fn load(indices: &[usize], device: &Device) -> CandleResult<(Tensor, Tensor)> {
    let coordinate = |i: usize| i as f32 / 16.0 - 1.0;
    let x = indices
        .iter()
        .map(|i| [coordinate(i % 32), coordinate(i / 32)]);
    let x: Vec<f32> = x.flatten().collect();
    let x = Tensor::from_vec(x, (indices.len(), 2), device)?;
    let y = (x.narrow(1, 0, 1)? * x.narrow(1, 1, 1)?)?;
    Ok((x, y))
}
// ANCHOR_END: model

// ANCHOR: train
fn train(rank: &Rank, sharding: Sharding) -> Result<()> {
    // The parameters. The seed gives every rank the same initial values.
    let store = ParamStore::new(rank.device()).with_seed(1);
    let model = build_model(store.var_builder(DType::F32))?;

    // The trainer owns parameters and optimizer from here on.
    let config = EngineConfig::default();
    let mut trainer = dp_zero::trainer(sharding, store, rank.comm(), AdamW::with_lr(1e-3), config)?;

    // Each rank takes its part of 1024 samples, and of every global batch of 64.
    let sampler = DistributedSampler::new(1024, rank.world_size(), rank.rank())?.with_shuffle(1);
    for epoch in 0..20 {
        let mut loss_of_epoch = 0.0;
        for indices in sampler.indices(epoch).chunks(64 / rank.world_size()) {
            let (x, y) = load(indices, rank.device())?;
            trainer.backward(&mse(&model.forward(&x)?, &y)?)?;
            loss_of_epoch += trainer.step()?.loss.unwrap_or(0.0) / 16.0;
        }
        if rank.rank() == 0 && (epoch + 1) % 10 == 0 {
            println!("epoch {}: loss {loss_of_epoch:.7}", epoch + 1);
        }
    }
    // ANCHOR_END: train

    // ANCHOR: memory
    let held = trainer.ledger().current();
    if rank.rank() == 0 {
        println!(
            "{}, ranks: {}, bytes on each: {} parameters, {} gradients, {} optimizer, {} in all",
            trainer.strategy_name(),
            rank.world_size(),
            held.parameters,
            held.gradients,
            held.optimizer,
            held.model_states(),
        );
    }
    // ANCHOR_END: memory
    Ok(())
}

// ANCHOR: main
fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let ranks = arguments.next().and_then(|a| a.parse().ok()).unwrap_or(2);
    let sharding = match arguments.next().as_deref() {
        None | Some("ddp") => Sharding::Ddp,
        Some("zero1") => Sharding::Zero1,
        Some("zero2") => Sharding::Zero2,
        Some(other) => panic!("no strategy {other}: it is ddp, zero1 or zero2"),
    };
    World::threads(ranks)?.run(|rank| train(&rank, sharding))
}
// ANCHOR_END: main
