//! GPT-2 checkpoints in the layout of Hugging Face's `transformers`, converted to that of [`Gpt`](super::Gpt) and back.
//!
//! A model folder there has `config.json` and `model.safetensors`, or several files that `model.safetensors.index.json` lists.
//! [`import`] makes one safetensors file of it, with the parameters of [`Gpt`](super::Gpt), which
//! [`GptConfig::load_weights`] and a trainer's import of weights take. [`export`] makes such a folder, for
//! `GPT2LMHeadModel.from_pretrained`.
//!
//! | Hugging Face | here |
//! |---|---|
//! | `transformer.wte.weight`, `transformer.wpe.weight` | `wte.weight`, `wpe.weight` |
//! | `transformer.h.i.ln_1`, `transformer.h.i.ln_2` | `blocks.i.ln1`, `blocks.i.ln2` |
//! | `transformer.h.i.attn.c_attn`, weight transposed | `blocks.i.qkv` |
//! | `transformer.h.i.attn.c_proj`, weight transposed | `blocks.i.proj` |
//! | `transformer.h.i.mlp.c_fc`, weight transposed | `blocks.i.fc` |
//! | `transformer.h.i.mlp.c_proj`, weight transposed | `blocks.i.out` |
//! | `transformer.ln_f` | `lnf` |
//! | `lm_head.weight`, absent if tied | `head.weight`, absent if tied |
//!
//! Weights that are transposed are those of `Conv1D` there, `[in, out]`; here they are `[out, in]`. The prefix `transformer.` may be
//! absent, as in files of `GPT2Model` and of the first published models; [`export`] writes it. The masks `attn.bias` and
//! `attn.masked_bias` of old files are no parameters, and are left out. No number changes, and neither does a dtype (f64, f32,
//! f16 or bf16), so a model that is imported and exported has the same bytes in each tensor.
//!
//! Tensors are converted one after the other: two of them are in memory at most. What is written has its name only when it is
//! complete and on the disk.

mod config;
mod convert;
mod names;

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use candle_core::{Result, bail};

use super::GptConfig;
use crate::safetensors_file::{TensorFiles, cannot, write_atomically};
use convert::{Conversion, Layout};

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Converts a model folder of Hugging Face into the safetensors file `to`; returns the shape of its [`Gpt`](super::Gpt).
///
/// `model` may also be a safetensors file with `config.json` beside it.
///
/// ```no_run
/// use candle_core::{DType, Device};
/// use candle_nn::VarBuilder;
/// use dp_models::{Gpt, gpt::hugging_face};
///
/// let config = hugging_face::import("models/gpt2", "gpt2.safetensors")?;
/// let weights = config.load_weights("gpt2.safetensors", &Device::Cpu)?;
/// let gpt = Gpt::new(&config, VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu))?;
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
///
/// Those of [`read_config`] and [`import_weights`].
pub fn import(model: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<GptConfig> {
    let config = read_config(&model)?;
    import_weights(&config, model, to)?;
    Ok(config)
}

/// As [`import`], for weights without a `config.json`, or with another one: `config` says what they are.
///
/// # Errors
///
/// An invalid `config`; a file that is missing, unreadable or not a safetensors file; tensors that are missing, not a part of the
/// model, of another shape or not floats, which are named, up to a few of each; an `lm_head.weight` that differs from the
/// token embedding although the head is tied; a file that cannot be written.
pub fn import_weights(
    config: &GptConfig,
    weights: impl AsRef<Path>,
    to: impl AsRef<Path>,
) -> Result<()> {
    config.validate()?;
    let weights = weights.as_ref();
    let files = TensorFiles::open(&weight_files(weights)?)?;
    Conversion::new(config, Layout::HuggingFace, &files, weights)?.write(to.as_ref(), None)
}

/// Converts a safetensors file with the parameters of a [`Gpt`](super::Gpt), such as one that a trainer has exported, into a model
/// folder of Hugging Face, which must not exist yet, or be empty.
///
/// Its `config.json` has dropout rates of 0, because a [`Gpt`](super::Gpt) has no dropout, and no ids of special tokens, which
/// belong to the tokenizer.
///
/// # Errors
///
/// Those of [`import_weights`], or the folder exists and is not empty.
pub fn export(
    config: &GptConfig,
    weights: impl AsRef<Path>,
    folder: impl AsRef<Path>,
) -> Result<()> {
    config.validate()?;
    let (weights, folder) = (weights.as_ref(), folder.as_ref());
    let files = TensorFiles::open(&[weights.to_path_buf()])?;
    let conversion = Conversion::new(config, Layout::Ours, &files, weights)?;

    std::fs::create_dir_all(folder).map_err(|e| cannot("make the folder", folder, &e))?;
    let mut entries = std::fs::read_dir(folder).map_err(|e| cannot("read", folder, &e))?;
    if entries.next().is_some() {
        bail!(
            "{} is not empty; name a new folder for the exported model",
            folder.display()
        )
    }
    // `from_pretrained` refuses files that do not say that they were meant for PyTorch.
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    conversion.write(&folder.join(WEIGHTS), Some(metadata))?;
    // The last file: a folder without it is no model yet.
    let path = folder.join(CONFIG);
    write_atomically(&path, |out| {
        let json = serde_json::to_string_pretty(&config::to_json(config));
        json.map_err(Into::into)
            .and_then(|json| writeln!(out, "{json}"))
            .map_err(|e| cannot("write", &path, &e))
    })
}

/// The shape of a model folder of Hugging Face, from its `config.json`; `model` may also be that file, or one beside it.
///
/// Dropout rates are not taken over: a [`Gpt`](super::Gpt) has none.
///
/// # Errors
///
/// The file cannot be read; a size is missing; or a setting asks for another model, such as another activation function, an
/// epsilon of LayerNorm other than 1e-5, or `scale_attn_by_inverse_layer_idx`. The error names the field.
pub fn read_config(model: impl AsRef<Path>) -> Result<GptConfig> {
    let model = model.as_ref();
    let is_config = model.extension().is_some_and(|ext| ext == "json");
    let path = match (model.is_dir(), is_config) {
        (true, _) => model.join(CONFIG),
        (false, true) => model.to_path_buf(),
        (false, false) => model.with_file_name(CONFIG),
    };
    let json = std::fs::read_to_string(&path).map_err(|e| cannot("read", &path, &e))?;
    config::from_json(&json, &path)
}

/// The safetensors files of a model folder, or the one that `weights` is.
fn weight_files(weights: &Path) -> Result<Vec<PathBuf>> {
    if !weights.is_dir() {
        return Ok(vec![weights.to_path_buf()]);
    }
    let (single, index) = (weights.join(WEIGHTS), weights.join(INDEX));
    if single.exists() {
        return Ok(vec![single]);
    }
    if !index.exists() {
        bail!(
            "{} has neither {WEIGHTS} nor {INDEX}; other formats are not read, but `save_pretrained` of transformers writes these",
            weights.display()
        )
    }
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: HashMap<String, String>,
    }
    let json = std::fs::read_to_string(&index).map_err(|e| cannot("read", &index, &e))?;
    let parsed: Index =
        serde_json::from_str(&json).map_err(|e| cannot("understand", &index, &e.into()))?;
    let names: BTreeSet<String> = parsed.weight_map.into_values().collect();
    // Files of the index lie beside it; anything else is not what transformers writes.
    if let Some(name) = names
        .iter()
        .find(|name| Path::new(name).file_name() != Some(name.as_ref()))
    {
        bail!(
            "{} lists {name}, which is not the name of a file in its folder",
            index.display()
        )
    }
    Ok(names.iter().map(|name| weights.join(name)).collect())
}
