//! One interface over all decoders, for programs that learn from a config which one they train.
//!
//! `B` sequences, `T` positions, `D` width, `V` size of the vocabulary.

use std::fmt::Debug;

use candle_core::{Result, Tensor, bail};

use crate::generate::{Sampling, generate};
use crate::ids::check_ids;
use crate::layers::{cross_entropy, linear};
use crate::model_config::ModelConfig;

/// A decoder that predicts the next token, as `AutoModelForCausalLM` of Hugging Face. Made by [`ModelConfig::build`], or as a
/// [`Gpt`](crate::Gpt) or a [`Llama`](crate::Llama).
///
/// A model of its own implements three methods; the others follow from them.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use dp_models::{CausalLm, GptConfig, LlamaConfig, ModelConfig};
///
/// for config in [ModelConfig::from(GptConfig::mini()), LlamaConfig::mini().into()] {
///     let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
///     let model: Box<dyn CausalLm> = config.build(vb)?;
///     let tokens = Tensor::new(&[[72u32, 101, 108]], &Device::Cpu)?;
///     assert_eq!(model.forward(&tokens)?.dims(), [1, 3, config.vocab_size()]);
///     assert_eq!(model.next_logits(&tokens)?.dims(), [1, config.vocab_size()]);
/// }
/// # Ok::<(), candle_core::Error>(())
/// ```
pub trait CausalLm: Debug + Send + Sync {
    /// The shape this model was made with.
    fn model_config(&self) -> ModelConfig;

    /// What the head is applied to, `[B T, D]`, for `tokens` `[B, T]` u32: one row per position, sequence after sequence. A row
    /// depends on tokens up to its position and on none after it.
    ///
    /// A batch is a matrix because then a linear layer is one matrix product, and no reshape is recorded for the backward pass.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward), in the words of the layers.
    fn hidden_states(&self, tokens: &Tensor) -> Result<Tensor>;

    /// The weight of the head, `[V, D]`; a tied one is the token embedding itself.
    fn head(&self) -> &Tensor;

    /// Logits `[B, T, V]` of the token after each position, for `tokens` `[B, T]` u32 with `1 <= T <= context`.
    ///
    /// The logits at a position depend on tokens up to it and on none after it.
    ///
    /// # Errors
    ///
    /// `tokens` has another rank or dtype, is empty, is longer than the context, or (checked on the CPU) contains an id that
    /// is not below `vocab_size`.
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let (batch, len) = check_tokens("tokens", tokens, &self.model_config())?;
        let logits = linear(&self.hidden_states(tokens)?, self.head(), None)?;
        logits.reshape((batch, len, self.head().dim(0)?))
    }

    /// The mean [`cross_entropy`] over all positions: a scalar, for `inputs` and `targets` `[B, T]` u32. Targets are the tokens
    /// that follow the inputs; nothing is shifted here.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward), for the targets, too; or the two shapes differ.
    fn loss(&self, inputs: &Tensor, targets: &Tensor) -> Result<Tensor> {
        if inputs.shape() != targets.shape() {
            bail!(
                "inputs {:?} and targets {:?} must have one shape",
                inputs.shape(),
                targets.shape()
            )
        }
        check_tokens("inputs", inputs, &self.model_config())?;
        let logits = linear(&self.hidden_states(inputs)?, self.head(), None)?;
        cross_entropy(&logits, &targets.flatten_all()?)
    }

    /// Logits `[B, V]` of the token after the last position: [`forward`](Self::forward) without the head's product, the largest
    /// of all, for positions that nobody asks for.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward).
    fn next_logits(&self, tokens: &Tensor) -> Result<Tensor> {
        let (batch, len) = check_tokens("tokens", tokens, &self.model_config())?;
        let hidden = self.hidden_states(tokens)?;
        let width = hidden.dim(1)?;
        let last = hidden
            .reshape((batch, len, width))?
            .narrow(1, len - 1, 1)?
            .reshape((batch, width))?;
        linear(&last, self.head(), None)
    }

    /// The `prompt` followed by `num_tokens` tokens of the model's choice, as nanoGPT's `generate`.
    ///
    /// Once the text is longer than the context, the model sees only its last `context` tokens. Nothing is cached between
    /// tokens: each one costs a forward pass.
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use candle_nn::{VarBuilder, VarMap};
    /// use dp_models::{ByteTokens, CausalLm, Gpt, GptConfig, Sampling};
    ///
    /// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    /// let gpt = Gpt::new(&GptConfig::mini(), vb)?;
    /// let sampling = Sampling { top_k: Some(40), ..Sampling::with_seed(1) };
    /// let tokens = gpt.generate(&ByteTokens::encode("Once"), 5, &sampling)?;
    /// assert_eq!(tokens.len(), 9);
    /// assert!(ByteTokens::decode(&tokens).starts_with("Once"));
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// An empty prompt, a prompt token that is not below `vocab_size`, a setting of `sampling` out of its range, or logits that
    /// are not finite.
    fn generate(&self, prompt: &[u32], num_tokens: usize, sampling: &Sampling) -> Result<Vec<u32>> {
        generate(self, prompt, num_tokens, sampling)
    }
}

/// Checks that `tokens`, called `what` in an error, suit a model of this shape; returns `B` and `T`.
fn check_tokens(what: &str, tokens: &Tensor, config: &ModelConfig) -> Result<(usize, usize)> {
    let [batch, len] = *tokens.dims() else {
        bail!("{what} must be [B, T], got {:?}", tokens.shape())
    };
    if batch == 0 || len == 0 {
        bail!("{what} must not be empty, got {:?}", tokens.shape())
    }
    let context = config.context();
    if len > context {
        bail!("{what} of length {len} are longer than the context of {context}")
    }
    check_ids(what, tokens, config.vocab_size())?;
    Ok((batch, len))
}
