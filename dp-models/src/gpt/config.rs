//! The shape of a GPT, and what follows from it.

use candle_core::{Result, bail};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A decoder of the GPT-2 shape: learned positions, LayerNorm, GELU, biases.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GptConfig {
    /// `V`, the number of different tokens. Absent or 0: taken from the tokenizer.
    #[serde(default)]
    pub vocab_size: usize,
    /// The longest sequence, in tokens, and the number of position embeddings.
    pub context: usize,
    /// `D`, features of a position between the blocks; a multiple of `heads`.
    pub width: usize,
    /// Attention heads in each block.
    pub heads: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Whether the head uses the token embedding as its weight (Press and Wolf, arXiv 1608.05859), as GPT-2 does.
    /// Absent: it does.
    #[serde(default = "default_tied_head")]
    pub tied_head: bool,
}

fn default_tied_head() -> bool {
    true
}

impl GptConfig {
    /// A byte-level model that trains on a laptop's CPU: 120,576 parameters.
    pub fn mini() -> Self {
        Self {
            vocab_size: 256,
            context: 64,
            width: 64,
            heads: 4,
            layers: 2,
            tied_head: true,
        }
    }

    /// The smallest published GPT-2: 124,439,808 parameters.
    pub fn gpt2() -> Self {
        Self {
            vocab_size: 50257,
            context: 1024,
            width: 768,
            heads: 12,
            layers: 12,
            tied_head: true,
        }
    }

    /// Checks that a model of this shape can be made.
    ///
    /// # Errors
    ///
    /// A size of zero, or a width that is not a multiple of the heads, by the name of its field.
    pub fn validate(&self) -> Result<()> {
        for (name, size) in [
            ("vocab_size", self.vocab_size),
            ("context", self.context),
            ("width", self.width),
            ("heads", self.heads),
            ("layers", self.layers),
        ] {
            if size == 0 {
                bail!("GptConfig: {name} must not be zero")
            }
        }
        if !self.width.is_multiple_of(self.heads) {
            bail!(
                "GptConfig: width ({}) must be a multiple of heads ({})",
                self.width,
                self.heads
            )
        }
        Ok(())
    }

    /// Elements of all parameters: `V D + context D + layers (12 D^2 + 13 D) + 2 D`, and `V D` more with an untied head.
    pub fn num_params(&self) -> usize {
        let d = self.width;
        let embeddings = (self.vocab_size + self.context) * d;
        // qkv 3 D^2 + 3 D, proj D^2 + D, fc 4 D^2 + 4 D, out 4 D^2 + D, and two norms of 2 D.
        let block = 12 * d * d + 13 * d;
        let head = if self.tied_head {
            0
        } else {
            self.vocab_size * d
        };
        embeddings + self.layers * block + 2 * d + head
    }
}
