//! The folder of a run, and where a run goes on from.

use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail, ensure};
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

impl Resume {
    /// The checkpoint that is meant, in a run whose own checkpoints are in `own`; `None` if there is none yet.
    ///
    /// # Errors
    /// There is no checkpoint where one is named, or it is damaged.
    pub fn checkpoint(&self, own: &Path) -> anyhow::Result<Option<Checkpoint>> {
        let path = match self {
            Self::Latest if !has_entries(own) => return Ok(None),
            Self::Latest => own.to_path_buf(),
            // The folder of a whole run.
            Self::From(path) if path.join(CHECKPOINTS).is_dir() => path.join(CHECKPOINTS),
            Self::From(path) => path.clone(),
        };
        Checkpoint::open(&path).map(Some).map_err(|e| {
            let hint = match self {
                Self::Latest => "; --resume FOLDER goes on from one that is whole",
                Self::From(_) => "",
            };
            anyhow!("--resume: {e}{hint}")
        })
    }
}

const CHECKPOINTS: &str = "checkpoints";

/// The folder of a run. While it is there no other process can have the same.
#[derive(Debug)]
pub struct RunFolder {
    root: PathBuf,
    /// Locked, in the main process.
    _lock: Option<File>,
}

impl RunFolder {
    /// Creates the folder and locks it, and refuses one whose checkpoints this run would mix with its own.
    ///
    /// # Errors
    /// Another process trains there; the folder has checkpoints and the run does not go on from them; it cannot be written.
    pub fn prepare(root: &Path, resume: Option<&Resume>) -> anyhow::Result<Self> {
        ensure!(
            !root.as_os_str().is_empty(),
            "run.out: is empty; it names a folder"
        );
        std::fs::create_dir_all(root)
            .with_context(|| format!("run.out: cannot create {}", root.display()))?;
        let folder = Self {
            root: root.to_path_buf(),
            _lock: Some(lock(root)?),
        };
        ensure!(
            resume == Some(&Resume::Latest) || !has_entries(&folder.checkpoints()),
            "run.out: {} has checkpoints of an earlier run; go on from them with --resume latest, or choose another folder",
            root.display()
        );
        for file in [
            folder.metrics(),
            folder.report(),
            folder.weights(),
            folder.config(),
            folder.sample(),
        ] {
            let is_new = !file.exists();
            writable("run.out", &file)?;
            if is_new {
                std::fs::remove_file(&file)?;
            }
        }
        Ok(folder)
    }

    /// The folder, which the main process prepares, for another process of the same run.
    pub fn of_other_process(root: &Path) -> Self {
        Self {
            root: root.to_path_buf(),
            _lock: None,
        }
    }

    /// Where the checkpoints are.
    pub fn checkpoints(&self) -> PathBuf {
        self.root.join(CHECKPOINTS)
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

/// Locks the folder for as long as the file is open, also against a process that is killed: the system unlocks it.
fn lock(root: &Path) -> anyhow::Result<File> {
    let path = root.join(".lock");
    let file =
        File::create(&path).with_context(|| format!("run.out: cannot write {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => bail!(
            "run.out: another process trains in {}; wait for it, or choose another folder",
            root.display()
        ),
        Err(TryLockError::Error(e)) => {
            Err(e).with_context(|| format!("run.out: cannot lock {}", path.display()))
        }
    }
}

fn has_entries(folder: &Path) -> bool {
    std::fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some())
}
