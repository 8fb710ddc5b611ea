//! Parameter groups, a learning rate schedule, gradient accumulation and clipping.

mod task;

use candle_core::{DType, Device};
use candle_nn::Module;
use candle_nn::loss::mse;
use dp_core::{
    AdamW, DistributedDataParallel, DistributedSampler, ParamGroups, ParamStore, Result,
    StepReport, Trainer, World,
};
use task::{NUM_SAMPLES, build_model, load};

fn main() -> Result<()> {
    World::threads(2)?.run(|rank| {
        let store = ParamStore::new(rank.device());
        let model = build_model(store.var_builder(DType::F32))?;
        let mut trainer = DistributedDataParallel::new(store, rank.comm(), groups())?;
        let sampler = DistributedSampler::new(NUM_SAMPLES, rank.world_size(), rank.rank())?;
        for batch in sampler.indices(0).chunks(32) {
            let (report, norm) = step(&mut trainer, &model, batch)?;
            assert_eq!(report.num_micro_batches, 4);
            assert_eq!(report.grad_norm, Some(norm));
        }
        assert_eq!(trainer.num_steps(), 4);
        Ok(())
    })
}

// ANCHOR: groups
fn groups() -> ParamGroups<AdamW> {
    let adamw = AdamW::with_lr(1e-2);
    let no_decay = AdamW {
        weight_decay: 0.0,
        ..adamw.clone()
    };
    ParamGroups::new(adamw).with_group("no decay", |name| name.ends_with("bias"), no_decay)
}
// ANCHOR_END: groups

// ANCHOR: step
/// One step on this rank's `batch`, in micro-batches of 8 samples.
fn step(
    trainer: &mut impl Trainer,
    model: &impl Module,
    batch: &[usize],
) -> Result<(StepReport, f64)> {
    let warmup = ((trainer.num_steps() + 1) as f64 / 10.0).min(1.0);
    trainer.set_learning_rate(1e-2 * warmup);

    let mut window = trainer.accumulate(batch.len().div_ceil(8))?;
    for micro_batch in batch.chunks(8) {
        let (x, y) = load(micro_batch, &Device::Cpu)?;
        window.backward(&mse(&model.forward(&x)?, &y)?)?;
    }
    window.finish()?;

    let norm = trainer.clip_grad_norm(0.5)?;
    Ok((trainer.step()?, norm))
}
// ANCHOR_END: step
