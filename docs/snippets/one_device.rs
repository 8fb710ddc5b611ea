//! An ordinary Candle program on one device: where the guide begins.

mod task;

use candle_core::{DType, Device, Result};
use candle_nn::loss::mse;
use candle_nn::{AdamW, Module, Optimizer, VarBuilder, VarMap};
use task::{NUM_SAMPLES, build_model, load};

// ANCHOR: main
fn main() -> Result<()> {
    let device = Device::Cpu;
    let varmap = VarMap::new();
    let model = build_model(VarBuilder::from_varmap(&varmap, DType::F32, &device))?;
    let mut optimizer = AdamW::new_lr(varmap.all_vars(), 1e-2)?;

    let indices: Vec<usize> = (0..NUM_SAMPLES).collect();
    for _epoch in 0..30 {
        for indices in indices.chunks(32) {
            let (x, y) = load(indices, &device)?;
            let loss = mse(&model.forward(&x)?, &y)?;
            let grads = loss.backward()?;
            optimizer.step(&grads)?;
        }
    }

    let held_out: Vec<usize> = (NUM_SAMPLES..NUM_SAMPLES + 101).collect();
    let (x, y) = load(&held_out, &device)?;
    let loss = mse(&model.forward(&x)?, &y)?.to_scalar::<f32>()?;
    println!("loss {loss:.5}");
    assert!(loss < 0.03, "the untrained loss is about 0.11");
    Ok(())
}
// ANCHOR_END: main
