//! Checkpoints: saved by any trainer on any number of ranks, loaded by any other.
//!
//! [`Trainer::save`](crate::Trainer::save) writes a folder `step-00000020` into the folder of the run. In it each rank has
//! one safetensors file with its share of the values and of the optimizer state, by parameter name and element range;
//! [`Manifest`] says all the rest. [`Trainer::load`](crate::Trainer::load) reads from these files what its rank
//! owns in *its* layout: world size, strategy and bucket caps may differ.
//!
//! A checkpoint is whole or not there: see [`SaveOptions`]. Every failure is the same [`Error::Checkpoint`] on all ranks, and
//! training can go on after it.

mod agree;
mod file;
mod folder;
mod load;
mod manifest;
mod options;
mod read;
mod save;
mod shards;
mod weights;

use std::fmt;
use std::path::Path;

use crate::error::Error;

pub use load::LoadedCheckpoint;
pub use manifest::{
    DataPosition, GroupRecord, MANIFEST_VERSION, Manifest, ParamRecord, RankRecord,
};
pub use options::{HyperParameters, LoadOptions, SaveOptions};
pub use read::Checkpoint;
pub use save::PendingSave;

/// The state that every parameter has: its value.
pub(crate) const VALUE: &str = "value";

/// What kind of thing is wrong with a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub enum CheckpointProblem {
    /// It is not there, or one of its files is not.
    Missing,
    /// Damaged, cut, edited, or put together from several.
    Corrupt,
    /// Written by another version of this library.
    Version,
    /// It belongs to another model.
    Model,
    /// The trainer's hyper-parameters, groups or schedule are others.
    HyperParameters,
    /// The file system says no: full, not writable, not shared by all ranks.
    Io,
}

fn problem(path: &Path, problem: CheckpointProblem, message: impl fmt::Display) -> Error {
    Error::Checkpoint {
        rank: None,
        path: path.to_path_buf(),
        problem,
        message: message.to_string(),
    }
}
