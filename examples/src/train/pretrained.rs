//! A GPT-2 in the layout of Hugging Face, to go on training with.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, ensure};
use dp_models::GptConfig;
use dp_models::gpt::hugging_face;

use crate::options::one_line;

/// Files of a model folder that training does not change: the tokenizer, and how text is generated.
const COMPANIONS: [&str; 6] = [
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
];
const TOKENIZER: &str = "tokenizer.json";

/// A model folder: `config.json`, weights in safetensors, and often a `tokenizer.json`.
#[derive(Debug, Clone)]
pub struct Pretrained {
    folder: PathBuf,
    config: GptConfig,
}

impl Pretrained {
    /// Reads the folder's `config.json`.
    ///
    /// # Errors
    /// There is no such folder; it is not that of a GPT-2.
    pub fn open(folder: &Path) -> anyhow::Result<Self> {
        ensure!(
            folder.is_dir(),
            "--model: {} is no folder; expected one with config.json and model.safetensors",
            folder.display()
        );
        let config =
            hugging_face::read_config(folder).map_err(|e| anyhow!("--model: {}", one_line(&e)))?;
        Ok(Self {
            folder: folder.to_path_buf(),
            config,
        })
    }

    /// The shape.
    pub fn config(&self) -> &GptConfig {
        &self.config
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The folder's `tokenizer.json`, if there is one.
    pub fn tokenizer(&self) -> Option<PathBuf> {
        Some(self.folder.join(TOKENIZER)).filter(|path| path.exists())
    }

    /// Writes the weights to the file `to`, with our names.
    ///
    /// # Errors
    /// Weights that are not those of `config.json`; a file that cannot be written.
    pub fn convert(&self, to: &Path) -> anyhow::Result<()> {
        hugging_face::import_weights(&self.config, &self.folder, to)
            .map_err(|e| anyhow!("--model: {}", one_line(&e)))
    }

    /// Writes a folder of the same layout with the weights of a safetensors file of ours, and the files of `tokenizer`: a path, `bytes`
    /// for none, or `None` for those of this model. An older folder `to` is replaced when the new one is complete.
    ///
    /// # Errors
    /// Files that cannot be read or written.
    pub fn export(&self, weights: &Path, tokenizer: Option<&str>, to: &Path) -> anyhow::Result<()> {
        let draft = to.with_extension("part");
        remove_if_there(&draft)?;
        hugging_face::export(&self.config, weights, &draft)
            .map_err(|e| anyhow!("{}", one_line(&e)))?;
        let copy = |from: &Path, name: &str| {
            std::fs::copy(from, draft.join(name))
                .with_context(|| format!("cannot copy {}", from.display()))
        };
        match tokenizer.filter(|name| Some(Path::new(name)) != self.tokenizer().as_deref()) {
            None => {
                for name in COMPANIONS {
                    let file = self.folder.join(name);
                    if file.exists() {
                        copy(&file, name)?;
                    }
                }
            }
            Some("bytes") => {}
            Some(path) => {
                copy(Path::new(path), TOKENIZER)?;
            }
        }
        remove_if_there(to)?;
        std::fs::rename(&draft, to).with_context(|| format!("cannot write {}", to.display()))
    }
}

fn remove_if_there(folder: &Path) -> anyhow::Result<()> {
    match std::fs::remove_dir_all(folder) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            Err(e).with_context(|| format!("cannot replace {}", folder.display()))
        }
        _ => Ok(()),
    }
}
