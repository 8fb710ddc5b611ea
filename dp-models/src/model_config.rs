//! The shape of any decoder of this crate, as a config file names it.

use candle_core::{Result, bail};
use candle_nn::VarBuilder;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::causal_lm::CausalLm;
use crate::gpt::{Gpt, GptConfig};
use crate::llama::{Llama, LlamaConfig};

/// The model that is trained: its architecture and its sizes.
///
/// In JSON the field `architecture` says which one, and the others are those of its config. A field that is unknown is an error.
/// An absent `vocab_size` is 0, which [`with_vocab_size`](Self::with_vocab_size) replaces by that of the tokenizer.
///
/// ```
/// use dp_models::ModelConfig;
///
/// let json = r#"{"architecture": "gpt2", "context": 64, "width": 64, "heads": 4, "layers": 2}"#;
/// let config: ModelConfig = serde_json::from_str(json).unwrap();
/// let config = config.with_vocab_size(256)?;
/// config.validate()?;
/// assert_eq!(config.num_params(), 120_576);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "architecture", rename_all = "lowercase")]
#[schemars(description = "The model that is trained: its architecture and its sizes.")]
#[non_exhaustive]
pub enum ModelConfig {
    /// A decoder of the GPT-2 shape: learned positions, LayerNorm, GELU, biases.
    Gpt2(GptConfig),
    /// A decoder of the Llama shape: rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases.
    Llama(LlamaConfig),
}

impl From<GptConfig> for ModelConfig {
    fn from(config: GptConfig) -> Self {
        Self::Gpt2(config)
    }
}

impl From<LlamaConfig> for ModelConfig {
    fn from(config: LlamaConfig) -> Self {
        Self::Llama(config)
    }
}

impl ModelConfig {
    /// The model of this shape, with its parameters from `vb`.
    ///
    /// # Errors
    ///
    /// [`validate`](Self::validate), or whatever `vb` reports: a missing name, or another shape.
    pub fn build(&self, vb: VarBuilder) -> Result<Box<dyn CausalLm>> {
        Ok(match self {
            Self::Gpt2(config) => Box::new(Gpt::new(config, vb)?),
            Self::Llama(config) => Box::new(Llama::new(config, vb)?),
        })
    }

    /// The same for a tokenizer of `num_tokens` tokens: a `vocab_size` of 0 becomes `num_tokens`. A larger one is kept: many
    /// models pad their vocabulary to a round number.
    ///
    /// # Errors
    ///
    /// The config has a `vocab_size` below `num_tokens`.
    pub fn with_vocab_size(mut self, num_tokens: usize) -> Result<Self> {
        let vocab_size = match &mut self {
            Self::Gpt2(config) => &mut config.vocab_size,
            Self::Llama(config) => &mut config.vocab_size,
        };
        match *vocab_size {
            0 => *vocab_size = num_tokens,
            size if size < num_tokens => bail!(
                "ModelConfig: vocab_size is {size}, but the tokenizer has {num_tokens} tokens; leave vocab_size out, or make it at least {num_tokens}"
            ),
            _ => {}
        }
        Ok(self)
    }

    /// Checks that a model of this shape can be made.
    ///
    /// # Errors
    ///
    /// [`GptConfig::validate`] or [`LlamaConfig::validate`], which name the field.
    pub fn validate(&self) -> Result<()> {
        match self {
            Self::Gpt2(config) => config.validate(),
            Self::Llama(config) => config.validate(),
        }
    }

    /// Elements of all parameters of a valid config; a tied head counts once.
    pub fn num_params(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.num_params(),
            Self::Llama(config) => config.num_params(),
        }
    }

    /// The name of the architecture, as in JSON.
    pub fn architecture(&self) -> &'static str {
        match self {
            Self::Gpt2(_) => "gpt2",
            Self::Llama(_) => "llama",
        }
    }

    /// `V`, the number of different tokens; 0 as long as it is to be the tokenizer's.
    pub fn vocab_size(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.vocab_size,
            Self::Llama(config) => config.vocab_size,
        }
    }

    /// The longest sequence, in tokens.
    pub fn context(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.context,
            Self::Llama(config) => config.context,
        }
    }

    /// `D`, features of a position between the blocks.
    pub fn width(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.width,
            Self::Llama(config) => config.width,
        }
    }

    /// Heads of queries in each block.
    pub fn heads(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.heads,
            Self::Llama(config) => config.heads,
        }
    }

    /// Number of blocks.
    pub fn layers(&self) -> usize {
        match self {
            Self::Gpt2(config) => config.layers,
            Self::Llama(config) => config.layers,
        }
    }
}
