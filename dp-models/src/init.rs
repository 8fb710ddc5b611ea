//! Initial values that all decoders share.

use candle_core::{Result, Tensor};
use candle_nn::{Init, VarBuilder};

/// Standard deviation of weights, as in GPT-2, and as `initializer_range` of Hugging Face's GPT-2 and Llama.
pub(crate) const STDEV: f64 = 0.02;

/// That of the projections that add to the residual stream, two in each layer: so scaled, they leave its variance as it was
/// (GPT-2, section 2.3).
pub(crate) fn residual_stdev(layers: usize) -> f64 {
    STDEV / (2. * layers as f64).sqrt()
}

/// Normally distributed around zero.
pub(crate) fn normal(stdev: f64) -> Init {
    Init::Randn { mean: 0., stdev }
}

/// The parameter `weight` of `vb`, normally distributed around zero.
pub(crate) fn normal_weight(shape: (usize, usize), stdev: f64, vb: &VarBuilder) -> Result<Tensor> {
    vb.get_with_hints(shape, "weight", normal(stdev))
}
