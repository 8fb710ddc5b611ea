//! The same program on four ranks, with DistributedDataParallel.

mod task;

use candle_core::DType;
use candle_nn::Module;
use candle_nn::loss::mse;
use dp_core::{
    AdamW, DistributedDataParallel, DistributedSampler, ParamStore, Rank, Remainder, Result,
    Trainer, World, weighted_mean,
};
use task::{NUM_SAMPLES, build_model, load};

// ANCHOR: main
fn main() -> Result<()> {
    World::threads(4)?.run(|rank| {
        let store = ParamStore::new(rank.device()).with_seed(42);
        let model = build_model(store.var_builder(DType::F32))?;
        let mut trainer = DistributedDataParallel::new(store, rank.comm(), AdamW::with_lr(1e-2))?;

        let sampler = DistributedSampler::new(NUM_SAMPLES, rank.world_size(), rank.rank())?;
        for epoch in 0..30 {
            for indices in sampler.indices(epoch).chunks(32 / rank.world_size()) {
                let (x, y) = load(indices, rank.device())?;
                let loss = mse(&model.forward(&x)?, &y)?;
                trainer.backward(&loss)?;
                trainer.step()?;
            }
        }

        let loss = evaluate(&rank, &model)?;
        if rank.rank() == 0 {
            println!("loss {loss:.5}");
        }
        assert!(loss < 0.03, "the untrained loss is about 0.11");
        Ok(())
    })
}
// ANCHOR_END: main

// ANCHOR: evaluate
/// The mean loss over 101 samples, which four ranks cannot share equally.
fn evaluate(rank: &Rank, model: &impl Module) -> Result<f64> {
    let sampler = DistributedSampler::new(101, rank.world_size(), rank.rank())?
        .with_remainder(Remainder::Keep); // every sample once
    let indices: Vec<usize> = sampler.indices(0).iter().map(|i| NUM_SAMPLES + i).collect();
    let (x, y) = load(&indices, rank.device())?;
    let sum = (model.forward(&x)? - y)?
        .sqr()?
        .sum_all()?
        .to_scalar::<f32>()?;
    weighted_mean(rank.comm().as_ref(), sum.into(), indices.len() as f64)
}
// ANCHOR_END: evaluate
