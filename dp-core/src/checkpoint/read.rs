//! A checkpoint on disk, without the program that wrote it.

use std::io;
use std::path::{Path, PathBuf};

use super::CheckpointProblem as Problem;
use super::file::{Item, OpenFile};
use super::folder::{self, MANIFEST};
use super::manifest::{Manifest, ParamRecord};
use super::shards::{Shards, Wanted};
use super::weights::write_atomically;
use super::{VALUE, problem};
use crate::error::{Error, Result};

/// A checkpoint on disk: its manifest, and its numbers where they are asked for.
///
/// For tools that look at checkpoints without the model's code; training programs call
/// [`Trainer::load`](crate::Trainer::load).
#[derive(Debug, Clone)]
pub struct Checkpoint {
    folder: PathBuf,
    manifest: Manifest,
}

impl Checkpoint {
    /// The checkpoint at `path`, or the latest one of the run whose folder `path` is. Reads the manifest only.
    ///
    /// # Errors
    /// [`Error::Checkpoint`](crate::Error::Checkpoint) naming the file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let folder = folder::resolve(path.as_ref())?;
        let manifest = Manifest::parse(&read_manifest(&folder)?, &folder.join(MANIFEST))?;
        Ok(Self { folder, manifest })
    }

    /// The checkpoint's own folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Compares the length and the hash of one rank's file with the manifest.
    ///
    /// # Errors
    /// [`Error::Checkpoint`](crate::Error::Checkpoint) if it is missing, damaged, or another one;
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if there is no such rank.
    pub fn verify_rank(&self, rank: usize) -> Result<()> {
        let ranks = &self.manifest.ranks;
        let record = ranks.get(rank).ok_or_else(|| {
            Error::invalid("rank", format!("{rank} is not below {}", ranks.len()))
        })?;
        let path = self.folder.join(&record.file);
        record.verify(&path, &OpenFile::open(&path)?)
    }

    /// Reads all files: lengths, hashes, and whether they hold each number exactly once.
    ///
    /// # Errors
    /// [`Error::Checkpoint`](crate::Error::Checkpoint) for the first thing that is wrong.
    pub fn verify(&self) -> Result<()> {
        self.verified_shards().map(drop)
    }

    fn verified_shards(&self) -> Result<Shards> {
        let shards = Shards::open(&self.folder, &self.manifest, &Wanted::All)?;
        shards.verify(&self.manifest, 0, 1)?;
        Ok(shards)
    }

    /// All elements of a f32 parameter's value (`state` is `value`), of one of its optimizer states, e.g. `exp_avg`, or of the
    /// `master` of a 16-bit parameter.
    ///
    /// # Errors
    /// [`Error::Checkpoint`](crate::Error::Checkpoint) if there is no such state, if it is not f32, or if files are missing or
    /// damaged.
    pub fn read_f32(&self, param: &str, state: &str) -> Result<Vec<f32>> {
        let of_name = |r: &&ParamRecord| r.name == param;
        let record = self.manifest.parameters.iter().find(of_name);
        let record = record.filter(|r| self.manifest.states_of(r).any(|s| s == state));
        let Some(record) = record.filter(|r| r.dtype == "f32" || state != VALUE) else {
            let message = format!("it holds no f32 `{state}` of `{param}`");
            return Err(problem(&self.folder, Problem::Missing, message));
        };
        let mut numbers = vec![0f32; record.num_elements()];
        let shards = Shards::open(&self.folder, &self.manifest, &Wanted::All)?;
        shards.read(param, state, 0..numbers.len(), &mut numbers)?;
        Ok(numbers)
    }

    /// Verifies the checkpoint, then writes the values of all parameters and buffers to one plain safetensors file;
    /// optimizer state is left out. Holds one chunk of them at a time in memory. An existing file is replaced when the
    /// new one is complete.
    ///
    /// # Errors
    /// As [`verify`](Self::verify); [`Error::Checkpoint`](crate::Error::Checkpoint) naming `file` if it cannot be written.
    pub fn export_safetensors(&self, file: impl AsRef<Path>) -> Result<()> {
        let shards = &self.verified_shards()?;
        let mut items = Vec::new();
        for param in &self.manifest.parameters {
            let dtype: candle_core::DType = param.dtype.parse().map_err(|_| {
                let message = format!(
                    "parameter `{}` has the unknown dtype `{}`",
                    param.name, param.dtype
                );
                problem(&self.folder.join(MANIFEST), Problem::Corrupt, message)
            })?;
            let (name, len) = (&param.name, param.num_elements());
            items.push(Item {
                key: name.clone(),
                dtype,
                shape: param.shape.clone(),
                write: Box::new(move |out| {
                    shards
                        .copy(name, VALUE, 0..len, dtype.size_in_bytes(), out)
                        .map_err(io::Error::other)
                }),
            });
        }
        write_atomically(file.as_ref(), items)
    }
}

pub(crate) fn read_manifest(folder: &Path) -> Result<String> {
    let path = folder.join(MANIFEST);
    let bytes = std::fs::read(&path)
        .map_err(|e| problem(&path, Problem::Io, format!("cannot be read: {e}")))?;
    String::from_utf8(bytes).map_err(|_| problem(&path, Problem::Corrupt, "it is not text"))
}
