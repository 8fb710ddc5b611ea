//! A decoder of the GPT-2 shape (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019).
//!
//! ```text
//! h = wte[tokens] + wpe[0..T]
//! each block:   h = h + proj(attention(qkv(ln1(h))))
//!               h = h + out(gelu_tanh(fc(ln2(h))))
//! logits = head(lnf(h))
//! ```
//!
//! Learned positions, pre-LayerNorm with eps 1e-5, biases everywhere but in the head, tanh GELU, causal attention.
//! Parameters, in the order in which they are created, which is the order of their use:
//!
//! | name | shape | initial values |
//! |---|---|---|
//! | `wte.weight` | `[V, D]` | normal, std 0.02 |
//! | `wpe.weight` | `[context, D]` | normal, std 0.02 |
//! | `blocks.i.ln1.{weight,bias}`, `blocks.i.ln2.{weight,bias}` | `[D]` | ones, zeros |
//! | `blocks.i.qkv.weight` | `[3 D, D]`: queries, keys, values | normal, std 0.02 |
//! | `blocks.i.proj.weight` | `[D, D]` | normal, std 0.02 / sqrt(2 layers) |
//! | `blocks.i.fc.weight` | `[4 D, D]` | normal, std 0.02 |
//! | `blocks.i.out.weight` | `[D, 4 D]` | normal, std 0.02 / sqrt(2 layers) |
//! | `blocks.i.{qkv,proj,fc,out}.bias` | one per output | zeros |
//! | `lnf.{weight,bias}` | `[D]` | ones, zeros |
//! | `head.weight`, absent with the tied head | `[V, D]` | normal, std 0.02 |
//!
//! [`hugging_face`] converts published GPT-2 checkpoints to these names and back.
//!
//! Reduce buckets are filled in reverse creation order, so they fill in the order in which backward finishes the gradients.

mod block;
mod config;
pub mod hugging_face;
mod load;

use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;

pub use config::GptConfig;

use crate::causal_lm::CausalLm;
use crate::init::{self, normal_weight};
use crate::layers::{CausalMask, LayerNorm, embed};
use crate::model_config::ModelConfig;
use block::Block;

const LAYER_NORM_EPS: f64 = 1e-5;

/// A decoder of the GPT-2 shape; see the [module page](self) for its formula and its parameters.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use dp_models::{Gpt, GptConfig};
///
/// let config = GptConfig::mini();
/// let gpt = Gpt::new(&config, VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu))?;
/// let tokens = Tensor::new(&[[72u32, 101, 108]], &Device::Cpu)?;
/// assert_eq!(gpt.forward(&tokens)?.dims(), [1, 3, config.vocab_size]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Gpt {
    config: GptConfig,
    wte: Tensor,
    wpe: Tensor,
    blocks: Vec<Block>,
    lnf: LayerNorm,
    /// With the tied head its weight is the tensor of `wte`, so both uses add to one gradient.
    head: Tensor,
    mask: CausalMask,
}

impl Gpt {
    /// Takes the parameters from `vb`, in the order of the table on the [module page](self).
    ///
    /// # Errors
    ///
    /// [`GptConfig::validate`], or whatever `vb` reports: a missing name, or another shape.
    pub fn new(config: &GptConfig, vb: VarBuilder) -> Result<Self> {
        config.validate()?;
        let (vocab_size, width) = (config.vocab_size, config.width);

        let wte = normal_weight((vocab_size, width), init::STDEV, &vb.pp("wte"))?;
        let wpe = normal_weight((config.context, width), init::STDEV, &vb.pp("wpe"))?;
        let blocks = (0..config.layers)
            .map(|idx| Block::new(config, vb.pp("blocks").pp(idx)))
            .collect::<Result<_>>()?;
        let lnf = LayerNorm::new(width, LAYER_NORM_EPS, vb.pp("lnf"))?;
        let head = if config.tied_head {
            wte.clone()
        } else {
            normal_weight((vocab_size, width), init::STDEV, &vb.pp("head"))?
        };

        Ok(Self {
            config: config.clone(),
            wte,
            wpe,
            blocks,
            lnf,
            head,
            mask: CausalMask::new(vb.dtype(), vb.device()),
        })
    }

    /// The shape this model was made with.
    pub fn config(&self) -> &GptConfig {
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

impl CausalLm for Gpt {
    fn model_config(&self) -> ModelConfig {
        self.config.clone().into()
    }

    fn hidden_states(&self, tokens: &Tensor) -> Result<Tensor> {
        let (_, len) = tokens.dims2()?;
        let mask = self.mask.get(len)?;
        let mut hidden = embed(tokens, &self.wte, &self.wpe)?;
        for block in &self.blocks {
            hidden = block.forward(&hidden, &mask)?;
        }
        self.lnf.forward(&hidden)
    }

    fn head(&self) -> &Tensor {
        &self.head
    }
}
