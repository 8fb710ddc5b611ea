//! One block of a Llama: attention and a gated multi-layer perceptron, each behind an RMSNorm and added to its input.

use candle_core::{Module, Result, Tensor};
use candle_nn::{Linear, VarBuilder};

use super::LlamaConfig;
use crate::init::{self, normal, normal_weight, residual_stdev};
use crate::layers::{CausalSelfAttention, RmsNorm, Rotary, SwiGlu};

#[derive(Clone, Debug)]
pub(super) struct Block {
    norm1: RmsNorm,
    attention: CausalSelfAttention,
    norm2: RmsNorm,
    mlp: SwiGlu,
}

impl Block {
    /// `rotary` is one for all blocks: a clone of it shares its tables.
    pub(super) fn new(config: &LlamaConfig, rotary: &Rotary, vb: VarBuilder) -> Result<Self> {
        let (width, heads, kv_heads) = (config.width, config.heads, config.num_kv_heads());
        let qkv_width = (heads + 2 * kv_heads) * (width / heads);
        let residual_stdev = residual_stdev(config.layers);

        let norm1 = RmsNorm::new(width, config.rms_norm_eps, vb.pp("norm1"))?;
        let qkv = normal_weight((qkv_width, width), init::STDEV, &vb.pp("qkv"))?;
        let proj = normal_weight((width, width), residual_stdev, &vb.pp("proj"))?;
        let [qkv, proj] = [qkv, proj].map(|weight| Linear::new(weight, None));
        let attention = CausalSelfAttention::grouped(qkv, proj, heads, kv_heads)?
            .with_rotary(rotary.clone())?;
        let norm2 = RmsNorm::new(width, config.rms_norm_eps, vb.pp("norm2"))?;
        let (init, down_init) = (normal(init::STDEV), normal(residual_stdev));
        let mlp = SwiGlu::with_init(width, config.hidden, init, down_init, vb)?;
        Ok(Self {
            norm1,
            attention,
            norm2,
            mlp,
        })
    }

    /// `x` `[B T, D]` and a causal mask `[T, T]` to `[B T, D]`.
    pub(super) fn forward(&self, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let x = (x + self.attention.forward(&self.norm1.forward(x)?, mask)?)?;
        &x + self.mlp.forward(&self.norm2.forward(&x)?)?
    }
}
