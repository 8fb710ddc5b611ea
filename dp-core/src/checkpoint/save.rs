//! Saving: each rank its share, rank 0 the manifest.

use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};

use candle_core::DType;
use serde_json::Value;

use super::CheckpointProblem as Problem;
use super::agree::{agree, rank_0};
use super::file::{Item, Written, write_file};
use super::folder::{self, Draft};
use super::manifest::{
    GroupRecord, MANIFEST_VERSION, Manifest, ParamRecord, RankRecord, shard_name,
};
use super::options::SaveOptions;
use super::shards::{Shards, Wanted, piece_key};
use super::{VALUE, problem};
use crate::buffer::Buffer;
use crate::comm::Communicator;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::masters::MASTER;
use crate::memory::Category;
use crate::optim::Optimizer;
use crate::param::{Param, ParamKind};
use crate::trace::phase;

/// A checkpoint between its beginning and its commit; one per rank.
struct Saving {
    comm: Arc<dyn Communicator>,
    run: PathBuf,
    /// This rank's file.
    shard: PathBuf,
    /// On rank 0: the folder, and the manifest as of the beginning.
    draft: Option<(Draft, Manifest)>,
    keep_last: Option<usize>,
    rank_state: Value,
}

impl Saving {
    /// Writes this rank's file.
    fn write(run: &Path, shard: &Path, items: Vec<Item<'_>>) -> Result<Written> {
        if !shard.parent().is_some_and(Path::is_dir) {
            return Err(problem(
                run,
                Problem::Io,
                "rank 0 has made a folder for the checkpoint there, but this rank does not see it: all ranks need one file \
                 system",
            ));
        }
        // The draft's folder will be gone when the message is read.
        let name = shard.file_name().unwrap_or_default().to_string_lossy();
        write_file(shard, items).map_err(|e| match e {
            Error::Checkpoint {
                problem: kind,
                message,
                ..
            } => problem(run, kind, format!("{name} {message}")),
            other => other,
        })
    }

    /// Makes the checkpoint the latest, if all ranks have written their files.
    fn commit(self, written: Result<Written>) -> Result<PathBuf> {
        let written = written.map(|w| (w, self.rank_state));
        let files: Vec<(Written, Value)> =
            agree(self.comm.as_ref(), "save: files", &self.run, written)?;
        let name: String = rank_0(self.comm.as_ref(), "save: commit", &self.run, || {
            let (draft, mut manifest) = self
                .draft
                .ok_or_else(|| problem(&self.run, Problem::Io, "rank 0 has no draft"))?;
            let record = |(rank, (written, rank_state)): (usize, (Written, Value))| RankRecord {
                file: shard_name(rank, manifest.world_size),
                bytes: written.bytes,
                sha256: written.sha256,
                rank_state,
            };
            manifest.ranks = files.into_iter().enumerate().map(record).collect();
            let path = draft.folder.join(folder::MANIFEST);
            let text = manifest
                .to_text()
                .map_err(|e| problem(&path, Problem::Io, e))?;
            // What could not be read back must not become the latest.
            Manifest::parse(&text, &path)?;
            Shards::open(&draft.folder, &manifest, &Wanted::Nothing)?;
            draft.commit(&text, self.keep_last)
        })?;
        Ok(self.run.join(name))
    }
}

/// A checkpoint that is being written in the background; see [`Trainer::save_in_background`](crate::Trainer::save_in_background).
///
/// It counts only after [`wait`](Self::wait). Dropped without, nothing is left of it.
#[must_use = "the checkpoint is complete only after wait"]
pub struct PendingSave {
    saving: Saving,
    written: mpsc::Receiver<Result<Written>>,
}

impl PendingSave {
    /// Waits until all ranks have written their files, and makes the checkpoint the latest. Collective: all ranks call it at
    /// the same place, e.g. before the next save. Returns the checkpoint's folder.
    ///
    /// # Errors
    /// As [`Trainer::save`](crate::Trainer::save), the same on all ranks.
    pub fn wait(self) -> Result<PathBuf> {
        // Less than the others wait for this rank, so that they hear of it.
        let timeout = self.saving.comm.timeout().mul_f64(0.9);
        let written = self.written.recv_timeout(timeout).unwrap_or_else(|e| {
            let message = match e {
                mpsc::RecvTimeoutError::Timeout => {
                    format!("the file is not written after {timeout:?} of waiting; raise the timeout of the World")
                }
                mpsc::RecvTimeoutError::Disconnected => "the thread that wrote the file has stopped".to_string(),
            };
            Err(problem(&self.saving.run, Problem::Io, message))
        });
        self.saving.commit(written)
    }
}

impl std::fmt::Debug for PendingSave {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PendingSave")
            .field("file", &self.saving.shard)
            .finish()
    }
}

/// A part of a parameter's value, or of one of its optimizer states.
struct Piece<'a> {
    param: &'a Param,
    range: Range<usize>,
    /// The state's name, and where its numbers lie; `None`: the value.
    state: Option<(&'static str, &'a Buffer, Range<usize>)>,
}

impl<'a> Piece<'a> {
    fn item(&self, write: impl FnOnce(&mut dyn Write) -> io::Result<()> + Send + 'a) -> Item<'a> {
        Item {
            key: piece_key(
                self.param.name(),
                &self.range,
                self.state.as_ref().map_or(VALUE, |(name, _, _)| name),
            ),
            dtype: self.dtype(),
            shape: vec![self.range.len()],
            write: Box::new(write),
        }
    }

    fn dtype(&self) -> DType {
        let state = self.state.as_ref();
        state.map_or(self.param.tensor().dtype(), |_| DType::F32)
    }

    fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        match &self.state {
            None => self
                .param
                .write_le(self.range.clone(), out)
                .map_err(io::Error::other),
            Some((_, buffer, at)) => buffer.write_le(at.clone(), out),
        }
    }
}

impl<O: Optimizer> Engine<O> {
    pub(crate) fn save(&self, run: &Path, options: &SaveOptions) -> Result<PathBuf> {
        let _span = phase!("save", self.comm.rank(), self.steps);
        let saving = self.begin_save("save", run, options)?;
        let written = self.with_pieces(|pieces| {
            Saving::write(
                &saving.run,
                &saving.shard,
                pieces.iter().map(|p| p.item(|out| p.write(out))).collect(),
            )
        });
        saving.commit(written)
    }

    pub(crate) fn save_in_background(
        &self,
        run: &Path,
        options: &SaveOptions,
    ) -> Result<PendingSave> {
        let _span = phase!("save", self.comm.rank(), self.steps);
        let saving = self.begin_save("save_in_background", run, options)?;
        let copies = self.with_pieces(|pieces| {
            pieces
                .iter()
                .map(|p| self.copy(p))
                .collect::<Result<Vec<Item<'static>>>>()
        });
        let (send, written) = mpsc::channel();
        let (run, shard) = (saving.run.clone(), saving.shard.clone());
        let write = move || {
            // The receiver is gone if nobody wants the checkpoint any more.
            let _ = send.send(copies.and_then(|items| Saving::write(&run, &shard, items)));
        };
        let thread = std::thread::Builder::new().name("checkpoint".to_string());
        if let Err(e) = thread.spawn(write) {
            tracing::warn!("no thread to save in: {e}"); // wait() says that nothing came.
        }
        Ok(PendingSave { saving, written })
    }

    /// A piece with numbers of its own, entered in the ledger.
    fn copy(&self, piece: &Piece<'_>) -> Result<Item<'static>> {
        let dtype = piece.dtype();
        let bytes = piece.range.len() * dtype.size_in_bytes();
        let mut copy =
            Buffer::reserved(DType::U8, bytes, self.store.ledger(), Category::Checkpoint)?;
        piece
            .write(&mut copy.as_mut_slice::<u8>()?)
            .map_err(|e| Error::parameter(piece.param.name(), e))?;
        let key = piece.item(|_| Ok(())).key;
        Ok(Item {
            key,
            dtype,
            shape: vec![piece.range.len()],
            write: Box::new(move |out| {
                let bytes = copy.as_slice::<u8>().map_err(io::Error::other)?;
                out.write_all(bytes)
            }),
        })
    }

    /// Collective: checks that all ranks mean the same, and makes the draft's folder.
    fn begin_save(&self, call: &'static str, run: &Path, options: &SaveOptions) -> Result<Saving> {
        self.require_empty_window(call)?;
        let (comm, step) = (&self.comm, self.steps);
        let intent = format!(
            "keep_last {:?}, {:?}, {}",
            options.keep_last,
            options.data,
            self.settings()
        );
        let intents = agree(
            comm.as_ref(),
            "save: settings",
            run,
            self.check_groups()
                .and_then(|()| self.check_masters())
                .map(|()| intent),
        )?;
        if let Some(rank) = (1..intents.len()).find(|r| intents[*r] != intents[0]) {
            let message = format!(
                "all ranks must save the same, but rank {rank} has: {}; and rank 0: {}",
                intents[rank], intents[0]
            );
            return Err(Error::invalid("save options or settings", message));
        }
        let mut draft = None;
        let name: String = rank_0(comm.as_ref(), "save: folder", run, || {
            let new = Draft::create(run, step)?;
            let name = new.folder.file_name().unwrap_or_default();
            let name = name.to_string_lossy().into_owned();
            draft = Some((new, self.manifest(options)));
            Ok(name)
        })?;
        Ok(Saving {
            comm: Arc::clone(comm),
            run: run.to_path_buf(),
            shard: run
                .join(name)
                .join(shard_name(comm.rank(), comm.world_size())),
            draft,
            keep_last: options.keep_last,
            rank_state: options.rank_state.clone(),
        })
    }

    /// Hands `f` what this rank writes: slice `r` of each bucket in every strategy, and its part of what is not trained.
    fn with_pieces<R>(&self, f: impl FnOnce(&[Piece<'_>]) -> R) -> R {
        let (rank, n) = (self.comm.rank(), self.comm.world_size());
        let mut pieces = Vec::new();
        for (index, bucket) in self.layout.buckets().iter().enumerate() {
            for segment in bucket.segments(bucket.slice(rank, n)) {
                let param = &self.params[segment.param_idx];
                let names = self.groups.groups()[self.group_of[segment.param_idx]]
                    .optimizer
                    .state_names();
                pieces.push(Piece {
                    param,
                    range: segment.in_param.clone(),
                    state: None,
                });
                // Plain data parallelism keeps the state of the whole bucket.
                let start = segment.in_bucket.start - self.owned[index].start;
                let at = start..start + segment.in_bucket.len();
                let states = names.iter().copied().zip(&self.states[index]);
                let master = self.masters.of(index).map(|masters| (MASTER, masters));
                for (name, buffer) in states.chain(master) {
                    pieces.push(Piece {
                        param,
                        range: segment.in_param.clone(),
                        state: Some((name, buffer, at.clone())),
                    });
                }
            }
        }
        for param in self
            .params
            .iter()
            .filter(|p| p.kind() != ParamKind::Trained)
        {
            let len = param.num_elements();
            let range = match (param.kind(), rank) {
                // Ranks may hold different buffers between two steps; rank 0's count.
                (ParamKind::Buffer, 0) => 0..len,
                (ParamKind::Buffer, _) => 0..0,
                _ => rank * len / n..(rank + 1) * len / n,
            };
            if !range.is_empty() {
                pieces.push(Piece {
                    param,
                    range,
                    state: None,
                });
            }
        }
        f(&pieces)
    }

    fn manifest(&self, options: &SaveOptions) -> Manifest {
        let owned = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        let groups = self.groups.groups().iter().map(|group| GroupRecord {
            name: group.name().to_string(),
            optimizer: group.optimizer.name().to_string(),
            hyper_parameters: group
                .optimizer
                .hyper_parameters()
                .into_iter()
                .map(|(k, v)| (k.to_string(), v))
                .collect(),
            states: owned(group.optimizer.state_names()),
        });
        let parameters = self.order.iter().map(|&i| {
            let param = &self.params[i];
            ParamRecord {
                name: param.name().to_string(),
                shape: param.tensor().dims().to_vec(),
                dtype: param.tensor().dtype().as_str().to_string(),
                kind: param.kind(),
                tied: param.is_tied(),
                group: (param.kind() == ParamKind::Trained).then(|| self.group_of[i]),
                updates: self.param_steps[i],
            }
        });
        Manifest {
            format: Manifest::format(),
            version: MANIFEST_VERSION,
            step: self.steps,
            strategy: self.strategy_name.to_string(),
            world_size: self.comm.world_size(),
            first_bucket_cap: self.layout.caps().first(),
            bucket_cap: self.layout.caps().rest(),
            schedule: self.schedule,
            loss_scale: self.loss_scale.state,
            groups: groups.collect(),
            data: options.data,
            parameters: parameters.collect(),
            ranks: Vec::new(),
            sha256: String::new(),
        }
    }
}
