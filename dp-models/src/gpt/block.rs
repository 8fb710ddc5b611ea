//! One block of a GPT: attention and a multi-layer perceptron, each behind a LayerNorm and added to its input.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, Linear, VarBuilder};

use super::{GptConfig, LAYER_NORM_EPS};
use crate::init::{self, normal_weight, residual_stdev};
use crate::layers::{CausalSelfAttention, LayerNorm, gelu_linear, linear};

/// Weight and bias of a linear layer.
#[derive(Clone, Debug)]
struct Affine {
    weight: Tensor,
    bias: Tensor,
}

impl From<Affine> for Linear {
    fn from(affine: Affine) -> Self {
        Linear::new(affine.weight, Some(affine.bias))
    }
}

#[derive(Clone, Debug)]
pub(super) struct Block {
    ln1: LayerNorm,
    attention: CausalSelfAttention,
    ln2: LayerNorm,
    fc: Affine,
    out: Affine,
}

impl Block {
    pub(super) fn new(config: &GptConfig, vb: VarBuilder) -> Result<Self> {
        let width = config.width;
        let residual_stdev = residual_stdev(config.layers);

        let ln1 = LayerNorm::new(width, LAYER_NORM_EPS, vb.pp("ln1"))?;
        let qkv = affine(width, 3 * width, init::STDEV, vb.pp("qkv"))?;
        let proj = affine(width, width, residual_stdev, vb.pp("proj"))?;
        let attention = CausalSelfAttention::new(qkv.into(), proj.into(), config.heads)?;
        let ln2 = LayerNorm::new(width, LAYER_NORM_EPS, vb.pp("ln2"))?;
        let fc = affine(width, 4 * width, init::STDEV, vb.pp("fc"))?;
        let out = affine(4 * width, width, residual_stdev, vb.pp("out"))?;
        Ok(Self {
            ln1,
            attention,
            ln2,
            fc,
            out,
        })
    }

    /// `x` `[B T, D]` and a causal mask `[T, T]` to `[B T, D]`.
    pub(super) fn forward(&self, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let x = (x + self.attention.forward(&self.ln1.forward(x)?, mask)?)?;
        let hidden = linear(&self.ln2.forward(&x)?, &self.fc.weight, Some(&self.fc.bias))?;
        &x + gelu_linear(&hidden, &self.out.weight, &self.out.bias)?
    }
}

/// A linear layer with GPT-2's initial values: a normal weight, a zero bias.
fn affine(input: usize, output: usize, stdev: f64, vb: VarBuilder) -> Result<Affine> {
    let weight = normal_weight((output, input), stdev, &vb)?;
    let bias = vb.get_with_hints(output, "bias", Init::Const(0.))?;
    Ok(Affine { weight, bias })
}
