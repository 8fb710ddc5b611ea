//! An AdamW step on one parameter in the GPU's memory, to hold beside PyTorch's fused one.

use std::time::Instant;

use candle_core::{DType, Device};
use dp_core::{AdamW, Devices, DistributedDataParallel, ParamStore, Rank, Trainer, World};
use dp_examples::statistics::median;

pub const ELEMENTS: usize = 50_000_000;
const STEPS: usize = 30;
const WARMUP: usize = 10;

/// The median time of a step, from a device without work to a device without work.
pub fn measure() -> anyhow::Result<String> {
    let world = World::threads(1)?.with_devices(Devices::Cuda(vec![0]));
    let seconds = world.map(|rank| measure_rank(&rank))?[0];
    // Reads weight, gradient and two moments, writes three of them.
    let bandwidth = (7 * 4 * ELEMENTS) as f64 / seconds / 1e9;
    Ok(format!("step_ms {:.4}, {bandwidth:.0} GB/s", seconds * 1e3))
}

fn measure_rank(rank: &Rank) -> anyhow::Result<f64> {
    let device: &Device = rank.device();
    let store = ParamStore::new(device);
    let vb = store.var_builder(DType::F32);
    let weight = vb.get_with_hints(ELEMENTS, "weight", candle_nn::Init::Const(1.0))?;
    let mut trainer = DistributedDataParallel::new(store, rank.comm(), AdamW::with_lr(1e-3))?;
    let mut times = Vec::new();
    for step in 0..STEPS {
        let loss = (weight.sum_all()? * 0.01)?;
        trainer.backward(&loss)?;
        device.synchronize()?;
        let start = Instant::now();
        trainer.step()?;
        device.synchronize()?;
        if step >= WARMUP {
            times.push(start.elapsed().as_secs_f64());
        }
    }
    Ok(median(times))
}
