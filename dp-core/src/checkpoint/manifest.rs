//! The manifest of a checkpoint: everything but the numbers.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::CheckpointProblem as Problem;
use super::file::OpenFile;
use super::problem;
use crate::error::Result;
use crate::hashing::hex;
use crate::loss_scale::{LossScaleState, MIN_SCALE};
use crate::masters::MASTER;
use crate::optim::LrSchedule;
use crate::param::ParamKind;
use crate::param_spec::{ParamSpec, describe};
use crate::precision::has_master;

/// The version that this library writes, and the only one it reads.
pub const MANIFEST_VERSION: u32 = 1;

const FORMAT: &str = "data-parallel checkpoint for candle";

/// `manifest.json`: what is in a checkpoint, and where.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct Manifest {
    /// Says that the file is such a manifest.
    pub format: String,
    /// [`MANIFEST_VERSION`].
    pub version: u32,
    /// Optimizer steps taken.
    pub step: u64,
    /// The trainer that saved: `ddp`, `zero1`, `zero2`. Any trainer loads it.
    pub strategy: String,
    /// The number of ranks that saved. Any number loads it.
    pub world_size: usize,
    /// Cap of the first gradient bucket, in bytes. Any other does as well.
    pub first_bucket_cap: usize,
    /// Cap of the other gradient buckets, in bytes.
    pub bucket_cap: usize,
    /// The learning-rate schedule.
    pub schedule: LrSchedule,
    /// The loss scale of the next step; `None` without loss scaling.
    pub loss_scale: Option<LossScaleState>,
    /// The parameter groups; the default group is the first.
    pub groups: Vec<GroupRecord>,
    /// Where the run stood in its data.
    pub data: DataPosition,
    /// The parameters and buffers, in creation order.
    pub parameters: Vec<ParamRecord>,
    /// What each rank wrote, by rank.
    pub ranks: Vec<RankRecord>,
    /// SHA-256 of this file's text, where these 64 digits count as zeros.
    pub sha256: String,
}

/// A parameter group in a [`Manifest`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct GroupRecord {
    /// The group's name.
    pub name: String,
    /// The kind of optimizer, e.g. `adamw`.
    pub optimizer: String,
    /// Its hyper-parameters at the time of saving.
    pub hyper_parameters: BTreeMap<String, f64>,
    /// The numbers kept per element, e.g. `exp_avg`.
    pub states: Vec<String>,
}

/// A parameter or buffer in a [`Manifest`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct ParamRecord {
    /// The full name.
    pub name: String,
    /// The shape.
    pub shape: Vec<usize>,
    /// Candle's name of the dtype, e.g. `f32`.
    pub dtype: String,
    /// Trained, frozen, or a buffer.
    pub kind: ParamKind,
    /// Several layers share it.
    pub tied: bool,
    /// Position of its parameter group; `None` unless trained.
    pub group: Option<usize>,
    /// Updates so far (`state['step']` in PyTorch).
    pub updates: u64,
}

/// One rank's part of a checkpoint in a [`Manifest`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct RankRecord {
    /// The rank's file, beside the manifest.
    pub file: String,
    /// The file's length in bytes.
    pub bytes: u64,
    /// SHA-256 of the file, as hexadecimal digits.
    pub sha256: String,
    /// What [`SaveOptions::with_rank_state`](super::SaveOptions::with_rank_state) was given.
    pub rank_state: Value,
}

/// Where a run stands in its data. The same on all ranks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataPosition {
    /// The epoch, from 0.
    pub epoch: u64,
    /// Samples of this epoch that all ranks together have used:
    /// [`DistributedSampler::indices_after`](crate::DistributedSampler::indices_after) goes on from there.
    pub samples: usize,
    /// The sampler's seed.
    pub seed: u64,
}

impl Manifest {
    /// The constant fields filled in, no checksum yet.
    pub(crate) fn format() -> String {
        FORMAT.to_string()
    }

    /// The file's text, with its checksum.
    pub(crate) fn to_text(&self) -> serde_json::Result<String> {
        let mut manifest = self.clone();
        manifest.sha256 = "0".repeat(64);
        let mut text = serde_json::to_string_pretty(&manifest)?;
        let digest = hex(&Sha256::digest(&text));
        let at = text.rfind(&manifest.sha256).unwrap_or_default();
        text.replace_range(at..at + digest.len(), &digest);
        Ok(text)
    }

    /// Reads and checks the text of the file at `path`.
    pub(crate) fn parse(text: &str, path: &Path) -> Result<Self> {
        let corrupt = |message: String| problem(path, Problem::Corrupt, message);
        #[derive(Deserialize)]
        struct Head {
            format: String,
            version: u32,
        }
        // The version first: another one may have other fields.
        let head: Head = serde_json::from_str(text)
            .map_err(|e| corrupt(format!("not a checkpoint's manifest: {e}")))?;
        if head.format != FORMAT {
            return Err(corrupt(format!(
                "not a checkpoint's manifest: its format is `{}`",
                head.format
            )));
        }
        if head.version != MANIFEST_VERSION {
            return Err(problem(
                path,
                Problem::Version,
                format!(
                    "version {} of the manifest; this library reads version {MANIFEST_VERSION}: use the release that wrote it",
                    head.version
                ),
            ));
        }
        let manifest: Self = serde_json::from_str(text).map_err(|e| corrupt(e.to_string()))?;
        manifest.check_sum(text).map_err(corrupt)?;
        manifest.check_fields().map_err(corrupt)?;
        Ok(manifest)
    }

    fn check_sum(&self, text: &str) -> Result<(), String> {
        let digits = self.sha256.len() == 64 && self.sha256.bytes().all(|b| b.is_ascii_hexdigit());
        let at = text.rfind(&self.sha256).filter(|_| digits);
        let at = at.ok_or("its checksum is not 64 hexadecimal digits")?;
        let mut hash = Sha256::new();
        hash.update(&text[..at]);
        hash.update("0".repeat(64));
        hash.update(&text[at + 64..]);
        match hex(&hash.finalize()) == self.sha256 {
            true => Ok(()),
            false => Err("its checksum is wrong: it has been damaged or edited".to_string()),
        }
    }

    /// What later code relies on.
    fn check_fields(&self) -> Result<(), String> {
        if self.world_size == 0 || self.ranks.len() != self.world_size {
            return Err(format!(
                "{} files for {} ranks",
                self.ranks.len(),
                self.world_size
            ));
        }
        for (rank, record) in self.ranks.iter().enumerate() {
            let expected = shard_name(rank, self.world_size);
            if record.file != expected {
                return Err(format!(
                    "the file of rank {rank} is `{}`, not `{expected}`",
                    record.file
                ));
            }
        }
        let is_scale = |s: LossScaleState| s.scale.is_finite() && s.scale >= MIN_SCALE;
        if !self.loss_scale.is_none_or(is_scale) {
            return Err(format!("{:?} is no loss scale", self.loss_scale));
        }
        let mut names = HashSet::new();
        for p in &self.parameters {
            if !names.insert(p.name.as_str()) {
                return Err(format!("parameter `{}` is listed twice", p.name));
            }
            let elements = p.shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
            if elements.is_none_or(|n| n > isize::MAX as usize / 8) {
                return Err(format!(
                    "parameter `{}` has the impossible shape {:?}",
                    p.name, p.shape
                ));
            }
            let grouped = p.kind == ParamKind::Trained;
            if p.group.is_some() != grouped || p.group.is_some_and(|g| g >= self.groups.len()) {
                return Err(format!(
                    "parameter `{}` has no such group: {:?}",
                    p.name, p.group
                ));
            }
        }
        Ok(())
    }

    /// Elements of trained parameters.
    pub fn num_trained(&self) -> usize {
        let trained = self
            .parameters
            .iter()
            .filter(|p| p.kind == ParamKind::Trained);
        trained
            .map(ParamRecord::num_elements)
            .fold(0, usize::saturating_add)
    }

    /// Bytes of all ranks' files.
    pub fn num_bytes(&self) -> u64 {
        self.ranks
            .iter()
            .fold(0, |sum, r| sum.saturating_add(r.bytes))
    }

    /// What is kept of a parameter: its value, the states of its group's optimizer, and the f32 master of a trained 16-bit one.
    pub(crate) fn states_of<'a>(&'a self, param: &'a ParamRecord) -> impl Iterator<Item = &'a str> {
        let group = param.group.map(|g| &self.groups[g]);
        let states = group
            .into_iter()
            .flat_map(|g| g.states.iter().map(String::as_str));
        let dtype = param.dtype.parse().ok();
        let master = group.and_then(|_| dtype.filter(|d| has_master(*d)).map(|_| MASTER));
        std::iter::once(super::VALUE).chain(states).chain(master)
    }
}

impl ParamRecord {
    /// Number of elements.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// True if it is what the model's parameter of this name is.
    pub(crate) fn is_of(&self, spec: &ParamSpec) -> bool {
        (&self.shape, self.dtype.as_str(), self.kind)
            == (&spec.shape, spec.dtype.as_str(), spec.kind)
    }

    pub(crate) fn describe(&self) -> String {
        describe(&self.shape, &self.dtype, self.kind)
    }
}

impl RankRecord {
    pub(crate) fn check_len(&self, path: &Path, file: &OpenFile) -> Result<()> {
        if file.len == self.bytes {
            return Ok(());
        }
        let message = format!(
            "it is {} bytes long, the manifest says {}",
            file.len, self.bytes
        );
        Err(problem(path, Problem::Corrupt, message))
    }

    /// Compares length and hash.
    pub(crate) fn verify(&self, path: &Path, file: &OpenFile) -> Result<()> {
        self.check_len(path, file)?;
        let sha256 = file
            .sha256()
            .map_err(|e| problem(path, Problem::Io, format!("cannot be read: {e}")))?;
        match sha256 == self.sha256 {
            true => Ok(()),
            false => Err(problem(
                path,
                Problem::Corrupt,
                "its SHA-256 is not the manifest's: it has been damaged or replaced",
            )),
        }
    }
}

/// The name of a rank's file.
pub(crate) fn shard_name(rank: usize, world_size: usize) -> String {
    format!("rank-{rank:05}-of-{world_size:05}.safetensors")
}

/// Is it a name that [`shard_name`] gives?
pub(crate) fn is_shard_name(name: &str) -> bool {
    let numbers = name
        .strip_prefix("rank-")
        .and_then(|rest| rest.strip_suffix(".safetensors"))
        .and_then(|rest| rest.split_once("-of-"));
    numbers.is_some_and(|(rank, world_size)| {
        rank.parse::<usize>().is_ok() && world_size.parse::<usize>().is_ok()
    })
}
