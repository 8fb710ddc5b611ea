//! A decoder of the Llama shape (Touvron et al., arXiv 2302.13971; with grouped-query attention as in Llama 2, arXiv 2307.09288).
//!
//! ```text
//! h = wte[tokens]
//! each block:   h = h + proj(attention(rotary(qkv(norm1(h)))))
//!               h = h + down_proj(silu(gate_proj(norm2(h))) * up_proj(norm2(h)))
//! logits = head(normf(h))
//! ```
//!
//! Rotary positions of queries and keys, where feature `i` of a head is rotated with feature `i + E / 2` as in Hugging Face's
//! Llama; pre-RMSNorm; no biases. `H` query heads of `E = D / H` features share the keys and values of `K` heads, `F` is `hidden`.
//! Parameters, in the order in which they are created, which is the order of their use, and what Hugging Face's
//! `LlamaForCausalLM` calls them:
//!
//! | name | shape | initial values | Hugging Face |
//! |---|---|---|---|
//! | `wte.weight` | `[V, D]` | normal, std 0.02 | `model.embed_tokens.weight` |
//! | `blocks.i.norm1.weight` | `[D]` | ones | `model.layers.i.input_layernorm.weight` |
//! | `blocks.i.qkv.weight` | `[(H + 2 K) E, D]`: queries, keys, values | normal, std 0.02 | the rows of `model.layers.i.self_attn.q_proj.weight`, then `k_proj`, then `v_proj` |
//! | `blocks.i.proj.weight` | `[D, D]` | normal, std 0.02 / sqrt(2 layers) | `model.layers.i.self_attn.o_proj.weight` |
//! | `blocks.i.norm2.weight` | `[D]` | ones | `model.layers.i.post_attention_layernorm.weight` |
//! | `blocks.i.gate_proj.weight`, `blocks.i.up_proj.weight` | `[F, D]` | normal, std 0.02 | `model.layers.i.mlp.gate_proj.weight`, `up_proj` |
//! | `blocks.i.down_proj.weight` | `[D, F]` | normal, std 0.02 / sqrt(2 layers) | `model.layers.i.mlp.down_proj.weight` |
//! | `normf.weight` | `[D]` | ones | `model.norm.weight` |
//! | `head.weight`, absent with the tied head | `[V, D]` | normal, std 0.02 | `lm_head.weight` |
//!
//! Reduce buckets are filled in reverse creation order, so they fill in the order in which backward finishes the gradients.

mod block;
mod config;

use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;

pub use config::LlamaConfig;

use crate::causal_lm::CausalLm;
use crate::init::{self, normal_weight};
use crate::layers::{CausalMask, RmsNorm, Rotary, RotaryPairs, embedding};
use crate::model_config::ModelConfig;
use block::Block;

/// A decoder of the Llama shape; see the [module page](self) for its formula and its parameters.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use dp_models::{Llama, LlamaConfig};
///
/// let config = LlamaConfig::mini();
/// let llama = Llama::new(&config, VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu))?;
/// let tokens = Tensor::new(&[[72u32, 101, 108]], &Device::Cpu)?;
/// assert_eq!(llama.forward(&tokens)?.dims(), [1, 3, config.vocab_size]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Llama {
    config: LlamaConfig,
    wte: Tensor,
    blocks: Vec<Block>,
    normf: RmsNorm,
    /// With the tied head its weight is the tensor of `wte`, so both uses add to one gradient.
    head: Tensor,
    mask: CausalMask,
}

impl Llama {
    /// Takes the parameters from `vb`, in the order of the table on the [module page](self).
    ///
    /// # Errors
    ///
    /// [`LlamaConfig::validate`], or whatever `vb` reports: a missing name, or another shape.
    pub fn new(config: &LlamaConfig, vb: VarBuilder) -> Result<Self> {
        config.validate()?;
        let (vocab_size, width) = (config.vocab_size, config.width);
        let rotary = Rotary::new(
            width / config.heads,
            config.context,
            config.rope_theta,
            RotaryPairs::Halves,
            vb.dtype(),
            vb.device(),
        )?;

        let wte = normal_weight((vocab_size, width), init::STDEV, &vb.pp("wte"))?;
        let blocks = (0..config.layers)
            .map(|idx| Block::new(config, &rotary, vb.pp("blocks").pp(idx)))
            .collect::<Result<_>>()?;
        let normf = RmsNorm::new(width, config.rms_norm_eps, vb.pp("normf"))?;
        let head = if config.tied_head {
            wte.clone()
        } else {
            normal_weight((vocab_size, width), init::STDEV, &vb.pp("head"))?
        };

        Ok(Self {
            config: config.clone(),
            wte,
            blocks,
            normf,
            head,
            mask: CausalMask::new(vb.dtype(), vb.device()),
        })
    }

    /// The shape this model was made with.
    pub fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// [`CausalLm::forward`]: logits `[B, T, V]` for `tokens` `[B, T]` u32 with `1 <= T <= context`.
    ///
    /// # Errors
    ///
    /// [`CausalLm::forward`].
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        CausalLm::forward(self, tokens)
    }

    /// [`CausalLm::loss`]: the mean cross-entropy, a scalar, for `inputs` and `targets` `[B, T]` u32.
    ///
    /// # Errors
    ///
    /// [`CausalLm::loss`].
    pub fn loss(&self, inputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
        CausalLm::loss(self, inputs, targets)
    }
}

impl CausalLm for Llama {
    fn model_config(&self) -> ModelConfig {
        self.config.clone().into()
    }

    fn hidden_states(&self, tokens: &Tensor) -> Result<Tensor> {
        let (_, len) = tokens.dims2()?;
        let mask = self.mask.get(len)?;
        let mut hidden = embedding(tokens, &self.wte)?;
        for block in &self.blocks {
            hidden = block.forward(&hidden, &mask)?;
        }
        self.normf.forward(&hidden)
    }

    fn head(&self) -> &Tensor {
        &self.head
    }
}
