//! What the other snippets train: a small network that learns `y = x0 * x1`.

use candle_core::{Device, Result, Tensor};
use candle_nn::{Module, VarBuilder, linear, seq};

/// Samples to train on; those after them are for evaluation.
pub const NUM_SAMPLES: usize = 256;

// ANCHOR: model
pub fn build_model(vb: VarBuilder) -> Result<impl Module> {
    let hidden = linear(2, 32, vb.pp("hidden"))?;
    let out = linear(32, 1, vb.pp("out"))?;
    Ok(seq().add(hidden).add_fn(|x| x.tanh()).add(out))
}
// ANCHOR_END: model

// ANCHOR: load
/// Inputs `[n, 2]` and targets `[n, 1]` of the samples `indices`.
pub fn load(indices: &[usize], device: &Device) -> Result<(Tensor, Tensor)> {
    let x: Vec<[f32; 2]> = indices.iter().map(|&i| point(i)).collect();
    let y: Vec<f32> = x.iter().map(|x| x[0] * x[1]).collect();
    let (x, n) = (x.concat(), indices.len());
    Ok((
        Tensor::from_vec(x, (n, 2), device)?,
        Tensor::from_vec(y, (n, 1), device)?,
    ))
}
// ANCHOR_END: load

/// Point `i` of the R2 sequence, which spreads evenly over `[-1, 1)^2`.
fn point(i: usize) -> [f32; 2] {
    [0.754_877_666_246_692_7, 0.569_840_290_998_053_2]
        .map(|step: f64| (2.0 * (step * i as f64).fract() - 1.0) as f32)
}
