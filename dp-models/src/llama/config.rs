//! The shape of a Llama, and what follows from it.

use candle_core::{Result, bail};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A decoder of the Llama shape: rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct LlamaConfig {
    /// `V`, the number of different tokens. Absent or 0: taken from the tokenizer.
    #[serde(default)]
    pub vocab_size: usize,
    /// The longest sequence, in tokens.
    pub context: usize,
    /// `D`, features of a position between the blocks; a multiple of `heads`, and `width / heads` is even.
    pub width: usize,
    /// Heads of queries in each block.
    pub heads: usize,
    /// Heads of keys, and of values, in each block; they divide `heads`, and `heads / kv_heads` query heads share each
    /// (grouped-query attention). Absent: as many as `heads`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_heads: Option<usize>,
    /// Hidden features of the gated MLP; Llama takes about `8 / 3 width`.
    pub hidden: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Whether the head uses the token embedding as its weight. Absent: it has a weight of its own.
    #[serde(default)]
    pub tied_head: bool,
    /// Base of the rotary angles: pair `i` of a head of `E` features turns by `rope_theta^(-2 i / E)` per position.
    #[serde(default = "default_rope_theta")]
    pub rope_theta: f64,
    /// Added to the mean square in each RMSNorm.
    #[serde(default = "default_rms_norm_eps")]
    pub rms_norm_eps: f64,
}

/// Llama 1 and 2; Llama 3 has 500,000.
fn default_rope_theta() -> f64 {
    10_000.
}

/// Llama 2 and 3; Llama 1 has 1e-6.
fn default_rms_norm_eps() -> f64 {
    1e-5
}

impl LlamaConfig {
    /// A byte-level model that trains on a laptop's CPU: 108,864 parameters.
    pub fn mini() -> Self {
        Self {
            vocab_size: 256,
            context: 64,
            width: 64,
            heads: 4,
            kv_heads: Some(2),
            hidden: 176,
            layers: 2,
            tied_head: true,
            rope_theta: default_rope_theta(),
            rms_norm_eps: default_rms_norm_eps(),
        }
    }

    /// `K`, heads of keys and of values: [`kv_heads`](Self::kv_heads), or else [`heads`](Self::heads).
    pub fn num_kv_heads(&self) -> usize {
        self.kv_heads.unwrap_or(self.heads)
    }

    /// Checks that a model of this shape can be made.
    ///
    /// # Errors
    ///
    /// A size of zero, a width that is not a multiple of the heads, heads of an odd width, `kv_heads` that do not divide the
    /// heads, or a `rope_theta` or `rms_norm_eps` that is not positive and finite; by the name of the field.
    pub fn validate(&self) -> Result<()> {
        for (name, size) in [
            ("vocab_size", self.vocab_size),
            ("context", self.context),
            ("width", self.width),
            ("heads", self.heads),
            ("kv_heads", self.num_kv_heads()),
            ("hidden", self.hidden),
            ("layers", self.layers),
        ] {
            if size == 0 {
                bail!("LlamaConfig: {name} must not be zero")
            }
        }
        let (width, heads, kv_heads) = (self.width, self.heads, self.num_kv_heads());
        if !width.is_multiple_of(heads) {
            bail!("LlamaConfig: width ({width}) must be a multiple of heads ({heads})")
        }
        if !(width / heads).is_multiple_of(2) {
            bail!(
                "LlamaConfig: width / heads ({width} / {heads}) must be even, since features are rotated in pairs"
            )
        }
        if !heads.is_multiple_of(kv_heads) {
            bail!("LlamaConfig: heads ({heads}) must be a multiple of kv_heads ({kv_heads})")
        }
        for (name, value) in [
            ("rope_theta", self.rope_theta),
            ("rms_norm_eps", self.rms_norm_eps),
        ] {
            if !value.is_finite() || value <= 0. {
                bail!("LlamaConfig: {name} must be positive and finite, got {value}")
            }
        }
        Ok(())
    }

    /// Elements of all parameters of a valid config: `V D + layers ((2 H + 2 K) E D + 3 D hidden + 2 D) + D` with `K` heads of
    /// keys and `E = D / H`, and `V D` more with an untied head.
    pub fn num_params(&self) -> usize {
        let d = self.width;
        // qkv (H + 2 K) E D, proj D^2 = H E D, three matrices of the MLP, and two norms.
        let attention = 2 * (self.heads + self.num_kv_heads()) * (d / self.heads) * d;
        let block = attention + 3 * d * self.hidden + 2 * d;
        let tables = if self.tied_head { 1 } else { 2 };
        tables * self.vocab_size * d + self.layers * block + d
    }
}
