//! Ranks with a GPU each. Built without the feature `nccl`, as the other code of the book is, such a world is refused by name.

mod task;

use candle_core::DType;
use candle_nn::Module;
use candle_nn::loss::mse;
use dp_core::{
    AdamW, Backend, DistributedDataParallel, DistributedSampler, ParamStore, Result, Trainer, World,
};
use task::{NUM_SAMPLES, build_model, load};

fn main() -> Result<()> {
    let trained = train();
    if cfg!(feature = "nccl") {
        return trained;
    }
    let refused = trained
        .expect_err("there is no NCCL in this build")
        .to_string();
    assert!(
        refused.contains("build with the feature `nccl`"),
        "{refused}"
    );
    println!("{refused}");
    Ok(())
}

// ANCHOR: threads
fn train() -> Result<()> {
    World::threads(4)?.with_backend(Backend::Nccl).run(|rank| {
        let store = ParamStore::new(rank.device()); // GPU 0 for rank 0, GPU 1 for rank 1, ...
        let model = build_model(store.var_builder(DType::F32))?;
        let mut trainer = DistributedDataParallel::new(store, rank.comm(), AdamW::default())?;
        let shard = DistributedSampler::new(NUM_SAMPLES, rank.world_size(), rank.rank())?;
        let (x, y) = load(&shard.indices(0), rank.device())?; // as on the CPU
        trainer.backward(&mse(&model.forward(&x)?, &y)?)?;
        trainer.step()?;
        Ok(())
    })
}
// ANCHOR_END: threads
