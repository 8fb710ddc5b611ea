//! `config.json` of Hugging Face's GPT-2.

use std::path::Path;

use candle_core::{Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};

use super::super::{GptConfig, LAYER_NORM_EPS};
use crate::safetensors_file::cannot;

/// The fields that matter. Those with a default may be absent; the defaults are those of `GPT2Config`.
#[derive(Deserialize)]
struct Gpt2Config {
    #[serde(default = "gpt2")]
    model_type: String,
    vocab_size: usize,
    n_positions: Option<usize>,
    /// The older name of `n_positions`.
    n_ctx: Option<usize>,
    n_embd: usize,
    n_head: usize,
    n_layer: usize,
    n_inner: Option<usize>,
    #[serde(default = "gelu_new")]
    activation_function: String,
    #[serde(default = "epsilon")]
    layer_norm_epsilon: f64,
    #[serde(default = "yes")]
    tie_word_embeddings: bool,
    #[serde(default = "yes")]
    scale_attn_weights: bool,
    #[serde(default)]
    scale_attn_by_inverse_layer_idx: bool,
    #[serde(default)]
    add_cross_attention: bool,
}

fn gpt2() -> String {
    "gpt2".to_string()
}

fn gelu_new() -> String {
    "gelu_new".to_string()
}

fn epsilon() -> f64 {
    LAYER_NORM_EPS
}

fn yes() -> bool {
    true
}

/// `path` is where the text is from.
pub(super) fn from_json(json: &str, path: &Path) -> Result<GptConfig> {
    let theirs: Gpt2Config =
        serde_json::from_str(json).map_err(|e| cannot("understand", path, &e.into()))?;
    let place = path.display();
    let refuse = |field: &str, value: &dyn std::fmt::Debug, supported: &str| {
        bail!("{place}: {field} is {value:?}, but Gpt only has {supported}")
    };
    if theirs.model_type != "gpt2" {
        return refuse("model_type", &theirs.model_type, "\"gpt2\"");
    }
    // Two names of one function.
    if !["gelu_new", "gelu_pytorch_tanh"].contains(&theirs.activation_function.as_str()) {
        let supported = "\"gelu_new\" and \"gelu_pytorch_tanh\"";
        return refuse(
            "activation_function",
            &theirs.activation_function,
            supported,
        );
    }
    if theirs.layer_norm_epsilon != LAYER_NORM_EPS {
        return refuse("layer_norm_epsilon", &theirs.layer_norm_epsilon, "1e-5");
    }
    if let Some(inner) = theirs.n_inner
        && inner != 4 * theirs.n_embd
    {
        return refuse("n_inner", &inner, "4 n_embd");
    }
    for (field, value, supported) in [
        ("scale_attn_weights", theirs.scale_attn_weights, true),
        (
            "scale_attn_by_inverse_layer_idx",
            theirs.scale_attn_by_inverse_layer_idx,
            false,
        ),
        ("add_cross_attention", theirs.add_cross_attention, false),
    ] {
        if value != supported {
            return refuse(field, &value, &supported.to_string());
        }
    }
    let Some(context) = theirs.n_positions.or(theirs.n_ctx) else {
        bail!("{place}: n_positions is missing")
    };
    let config = GptConfig {
        vocab_size: theirs.vocab_size,
        context,
        width: theirs.n_embd,
        heads: theirs.n_head,
        layers: theirs.n_layer,
        tied_head: theirs.tie_word_embeddings,
    };
    match config.validate() {
        Ok(()) => Ok(config),
        Err(err) => bail!("{place}: {err}"),
    }
}

pub(super) fn to_json(config: &GptConfig) -> Value {
    json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.context,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": null,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": LAYER_NORM_EPS,
        "tie_word_embeddings": config.tied_head,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "bos_token_id": null,
        "eos_token_id": null,
    })
}
