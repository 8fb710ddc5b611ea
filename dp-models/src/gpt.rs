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
//! Reduce buckets are filled in reverse creation order, so they fill in the order in which backward finishes the gradients.

mod block;
mod config;
mod generate;
mod load;

use candle_core::{Module, Result, Tensor, bail};
use candle_nn::{Init, VarBuilder};

pub use config::GptConfig;
pub use generate::Sampling;

use crate::ids::check_ids;
use crate::layers::{CausalMask, LayerNorm, cross_entropy, embed, linear};
use block::Block;

const LAYER_NORM_EPS: f64 = 1e-5;
const INIT_STDEV: f64 = 0.02;

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
#[derive(Debug)]
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

        let wte = normal((vocab_size, width), INIT_STDEV, &vb.pp("wte"))?;
        let wpe = normal((config.context, width), INIT_STDEV, &vb.pp("wpe"))?;
        let blocks = (0..config.layers)
            .map(|idx| Block::new(config, vb.pp("blocks").pp(idx)))
            .collect::<Result<_>>()?;
        let lnf = LayerNorm::new(width, LAYER_NORM_EPS, vb.pp("lnf"))?;
        let head = if config.tied_head {
            wte.clone()
        } else {
            normal((vocab_size, width), INIT_STDEV, &vb.pp("head"))?
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

    /// Logits `[B, T, V]` of the token after each position, for `tokens` `[B, T]` u32 with `1 <= T <= context`.
    ///
    /// The logits at a position depend on tokens up to it and on none after it.
    ///
    /// # Errors
    ///
    /// `tokens` has another rank or dtype, is empty, is longer than the context, or (checked on the CPU) contains an id that
    /// is not below `vocab_size`.
    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let hidden = self.hidden("tokens", tokens)?;
        let (batch, len) = tokens.dims2()?;
        let logits = linear(&hidden, &self.head, None)?;
        logits.reshape((batch, len, self.config.vocab_size))
    }

    /// The mean [`cross_entropy`] over all positions: a scalar, for `inputs` and `targets` `[B, T]` u32.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward), for the targets, too; or the two shapes differ.
    pub fn loss(&self, inputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
        if inputs.shape() != targets.shape() {
            bail!(
                "inputs {:?} and targets {:?} must have one shape",
                inputs.shape(),
                targets.shape()
            )
        }
        let hidden = self.hidden("inputs", inputs)?;
        cross_entropy(&linear(&hidden, &self.head, None)?, &targets.flatten_all()?)
    }

    /// What the head is applied to, `[B T, D]`; `what` names the tokens in an error.
    ///
    /// From the embedding on, a batch is a matrix with one row per position: a linear layer is then one matrix product, and no
    /// reshape is recorded for the backward pass.
    fn hidden(&self, what: &str, tokens: &Tensor) -> Result<Tensor> {
        let len = self.check_tokens(what, tokens)?;
        let mask = self.mask.get(len)?;

        let mut hidden = embed(tokens, &self.wte, &self.wpe)?;
        for block in &self.blocks {
            hidden = block.forward(&hidden, &mask)?;
        }
        self.lnf.forward(&hidden)
    }

    fn check_tokens(&self, what: &str, tokens: &Tensor) -> Result<usize> {
        let [batch, len] = *tokens.dims() else {
            bail!("{what} must be [B, T], got {:?}", tokens.shape())
        };
        if batch == 0 || len == 0 {
            bail!("{what} must not be empty, got {:?}", tokens.shape())
        }
        if len > self.config.context {
            let context = self.config.context;
            bail!("{what} of length {len} are longer than the context of {context}")
        }
        check_ids(what, tokens, self.config.vocab_size)?;
        Ok(len)
    }
}

/// The parameter `weight` of `vb`, normally distributed around zero.
fn normal(shape: (usize, usize), stdev: f64, vb: &VarBuilder) -> Result<Tensor> {
    vb.get_with_hints(shape, "weight", Init::Randn { mean: 0., stdev })
}
