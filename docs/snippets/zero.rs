//! From DistributedDataParallel to ZeRO stage 2, and proof that it trains the same model.

mod task;

use candle_core::DType;
use candle_nn::Module;
use candle_nn::loss::mse;
use dp_core::{
    AdamW, DistributedDataParallel, DistributedSampler, ParamStore, Rank, Result, Trainer, World,
};
use dp_zero::{ZeroConfig, ZeroOptimizer, ZeroStage};
use task::{NUM_SAMPLES, build_model, load};

// ANCHOR: same
fn main() -> Result<()> {
    World::threads(4)?.run(|rank| {
        let store = ParamStore::new(rank.device()).with_seed(42);
        let model = build_model(store.var_builder(DType::F32))?;
        let ddp = train(&rank, &model, data_parallel(store, &rank)?)?;

        let store = ParamStore::new(rank.device()).with_seed(42);
        let model = build_model(store.var_builder(DType::F32))?;
        let zero2 = train(&rank, &model, zero(store, &rank)?)?;

        assert_eq!(ddp.sha256, zero2.sha256); // the same bits,
        assert!(zero2.model_states < ddp.model_states); // in fewer bytes
        Ok(())
    })
}
// ANCHOR_END: same

// ANCHOR: ddp
fn data_parallel(store: ParamStore, rank: &Rank) -> Result<DistributedDataParallel<AdamW>> {
    DistributedDataParallel::new(store, rank.comm(), AdamW::with_lr(1e-2))
}
// ANCHOR_END: ddp

// ANCHOR: zero
fn zero(store: ParamStore, rank: &Rank) -> Result<ZeroOptimizer<AdamW>> {
    let config = ZeroConfig::stage(ZeroStage::Two);
    ZeroOptimizer::new(store, rank.comm(), AdamW::with_lr(1e-2), config)
}
// ANCHOR_END: zero

// ANCHOR: train
/// One loop for data parallelism and for every ZeRO stage.
fn train(rank: &Rank, model: &impl Module, mut trainer: impl Trainer) -> Result<Outcome> {
    let sampler = DistributedSampler::new(NUM_SAMPLES, rank.world_size(), rank.rank())?;
    for indices in sampler.indices(0).chunks(8) {
        let (x, y) = load(indices, rank.device())?;
        trainer.backward(&mse(&model.forward(&x)?, &y)?)?;
        trainer.step()?;
    }
    Ok(Outcome {
        sha256: trainer.store().sha256()?,
        model_states: trainer.ledger().current().model_states(),
    })
}

struct Outcome {
    sha256: String,
    model_states: u64,
}
// ANCHOR_END: train
