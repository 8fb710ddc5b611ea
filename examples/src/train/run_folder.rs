//! The folder of a run, and where a run goes on from.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use dp_core::checkpoint::Checkpoint;

use crate::options::writable;

/// What `--resume` says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resume {
    /// The latest checkpoint of the run's own folder; if there is none yet, from the start.
    Latest,
    /// This checkpoint, or the latest of this folder.
    From(PathBuf),
}

/// The folder of a run.
#[derive(Debug, Clone)]
pub struct RunFolder {
    root: PathBuf,
}

impl RunFolder {
    /// Creates the folder, and refuses one whose checkpoints this run would mix with its own.
    ///
    /// # Errors
    /// The folder has checkpoints and the run does not go on from them; it cannot be written; there is nothing to go on from.
    pub fn prepare(root: &Path, resume: Option<&Resume>) -> anyhow::Result<Self> {
        let folder = Self {
            root: root.to_path_buf(),
        };
        if let Some(Resume::From(path)) = resume {
            Checkpoint::open(path).with_context(|| format!("--resume {}", path.display()))?;
        }
        let has_checkpoints = std::fs::read_dir(folder.checkpoints())
            .is_ok_and(|mut entries| entries.next().is_some());
        ensure!(
            resume == Some(&Resume::Latest) || !has_checkpoints,
            "run.out: {} has checkpoints of an earlier run; go on from them with --resume latest, or choose another folder",
            root.display()
        );
        std::fs::create_dir_all(root)
            .with_context(|| format!("run.out: cannot create {}", root.display()))?;
        for file in [
            folder.metrics(),
            folder.report(),
            folder.weights(),
            folder.config(),
        ] {
            let is_new = !file.exists();
            writable("run.out", &file)?;
            if is_new {
                std::fs::remove_file(&file)?;
            }
        }
        Ok(folder)
    }

    /// Where the checkpoints are.
    pub fn checkpoints(&self) -> PathBuf {
        self.root.join("checkpoints")
    }

    /// The configuration as it was read, overrides included.
    pub fn config(&self) -> PathBuf {
        self.root.join("config.json")
    }

    /// One JSON object a line.
    pub fn metrics(&self) -> PathBuf {
        self.root.join("metrics.jsonl")
    }

    /// The page about the run.
    pub fn report(&self) -> PathBuf {
        self.root.join("report.html")
    }

    /// The weights at the end.
    pub fn weights(&self) -> PathBuf {
        self.root.join("model.safetensors")
    }

    /// The model that a fine-tuning begins with, in our layout, while ranks are made from it.
    pub fn initial_values(&self) -> PathBuf {
        self.root.join("initial.safetensors")
    }

    /// The trained model in the layout of Hugging Face.
    pub fn hugging_face(&self) -> PathBuf {
        self.root.join("hugging_face")
    }

    /// The model's own text.
    pub fn sample(&self) -> PathBuf {
        self.root.join("sample.txt")
    }

    /// Event files, if the configuration does not say where.
    pub fn tensorboard(&self) -> PathBuf {
        self.root.join("tensorboard")
    }
}
