//! The folder of a run: checkpoints that appear whole or not at all.
//!
//! ```text
//! runs/gpt/
//!   latest                        the name of the newest complete checkpoint
//!   step-00000020/
//!     manifest.json
//!     rank-00000-of-00002.safetensors
//!     rank-00001-of-00002.safetensors
//!   .saving-step-00000030-5f0c/   one that is being written, or whose writer was killed
//!   .lock                         locked by the job that saves
//! ```
//!
//! Everything is written to a `.saving-` folder and is on the disk before that folder is renamed; `latest` is replaced by
//! a rename, too, after that. So at any moment there is the old checkpoint or the new one.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::CheckpointProblem as Problem;
use super::problem;
use crate::error::Result;

pub(crate) const MANIFEST: &str = "manifest.json";
const LATEST: &str = "latest";
const LOCK: &str = ".lock";
const SAVING: &str = ".saving-";
const REMOVING: &str = ".removing-";
const STEP: &str = "step-";

/// A checkpoint being written. Dropping it removes what was written.
pub(crate) struct Draft {
    run: PathBuf,
    /// The folder that the files go to.
    pub folder: PathBuf,
    step: u64,
    committed: bool,
    _lock: Option<File>,
}

impl Draft {
    /// Makes the folders. One job at a time.
    pub fn create(run: &Path, step: u64) -> Result<Self> {
        let failed = |what: &str, e: io::Error| problem(run, Problem::Io, format!("{what}: {e}"));
        fs::create_dir_all(run).map_err(|e| failed("the folder cannot be created", e))?;
        let lock = lock(run)?;
        // What a killed job has left: nobody writes there any more, since this job has the lock.
        for name in names(run, |name| {
            name.starts_with(SAVING) || name.starts_with(REMOVING)
        }) {
            let _ = fs::remove_dir_all(run.join(name));
        }
        let nonce: u32 = rand::random();
        let folder = run.join(format!("{SAVING}{STEP}{step:08}-{nonce:08x}"));
        fs::create_dir(&folder).map_err(|e| failed("a folder in it cannot be created", e))?;
        Ok(Self {
            run: run.to_path_buf(),
            folder,
            step,
            committed: false,
            _lock: lock,
        })
    }

    /// Writes the manifest, and makes the draft the newest checkpoint. Returns its folder.
    pub fn commit(mut self, manifest: &str) -> Result<PathBuf> {
        let failed = |path: &Path, e: io::Error| {
            problem(path, Problem::Io, format!("cannot be written: {e}"))
        };
        let path = self.folder.join(MANIFEST);
        write_durably(&path, manifest.as_bytes()).map_err(|e| failed(&path, e))?;
        sync_folder(&self.folder).map_err(|e| failed(&self.folder, e))?;
        let (name, target) = self.free_name();
        fs::rename(&self.folder, &target).map_err(|e| failed(&target, e))?;
        self.committed = true;
        sync_folder(&self.run).map_err(|e| failed(&self.run, e))?;
        let latest = self.run.join(LATEST);
        let next = self.run.join(format!(".{LATEST}"));
        write_durably(&next, name.as_bytes())
            .and_then(|()| fs::rename(&next, &latest))
            .and_then(|()| sync_folder(&self.run))
            .map_err(|e| failed(&latest, e))?;
        Ok(target)
    }

    /// `step-00000020`, or `step-00000020-2` if that exists: an existing checkpoint is never written to.
    fn free_name(&self) -> (String, PathBuf) {
        let mut name = format!("{STEP}{:08}", self.step);
        let mut attempt = 1;
        while self.run.join(&name).exists() {
            attempt += 1;
            name = format!("{STEP}{:08}-{attempt}", self.step);
        }
        let target = self.run.join(&name);
        (name, target)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.committed {
            // If this fails, the next save of the run tries again.
            let _ = fs::remove_dir_all(&self.folder);
        }
    }
}

fn lock(run: &Path) -> Result<Option<File>> {
    let path = run.join(LOCK);
    let failed = |e: io::Error| problem(&path, Problem::Io, format!("cannot be locked: {e}"));
    let file = File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::WouldBlock) => Err(problem(
            run,
            Problem::Io,
            "a checkpoint is being saved there already: by another job, or in the background and not waited for",
        )),
        // Some network file systems have no locks; they do without.
        Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Unsupported => Ok(None),
        Err(TryLockError::Error(e)) => Err(failed(e)),
    }
}

/// The folder of the checkpoint that `path` means: itself, or the latest of the run whose folder it is.
pub(crate) fn resolve(path: &Path) -> Result<PathBuf> {
    if path.join(MANIFEST).exists() {
        return Ok(path.to_path_buf());
    }
    let latest = path.join(LATEST);
    let name = match fs::read_to_string(&latest) {
        Ok(name) => name,
        Err(e) => {
            let there = names(path, |name| name.starts_with(STEP));
            let hint = match there.as_slice() {
                [] => "no checkpoint is there".to_string(),
                all => format!("there are {}: give the path of one of them", all.join(", ")),
            };
            let kind = if e.kind() == io::ErrorKind::NotFound {
                Problem::Missing
            } else {
                Problem::Io
            };
            return Err(problem(
                path,
                kind,
                format!("it has no {MANIFEST}, and no readable file `{LATEST}` ({e}); {hint}"),
            ));
        }
    };
    // A plain name: it cannot lead out of the folder.
    let plain =
        name.starts_with(STEP) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    if !plain {
        return Err(problem(
            &latest,
            Problem::Corrupt,
            format!("{name:?} is not the name of a checkpoint"),
        ));
    }
    let folder = path.join(&name);
    match folder.join(MANIFEST).exists() {
        true => Ok(folder),
        false => Err(problem(
            &folder,
            Problem::Missing,
            format!("`{LATEST}` names it, but it has no {MANIFEST}"),
        )),
    }
}

/// True if no checkpoint has been completed in `run` yet.
pub(crate) fn is_new(run: &Path) -> bool {
    !run.join(LATEST).exists() && !run.join(MANIFEST).exists()
}

/// Removes all but the `n` checkpoints that were saved last. Never the latest.
pub(crate) fn keep_last(run: &Path, n: usize) {
    let latest = fs::read_to_string(run.join(LATEST)).unwrap_or_default();
    let saved_at = |name: &String| {
        fs::metadata(run.join(name).join(MANIFEST))
            .and_then(|m| m.modified())
            .ok()
    };
    let mut old = names(run, |name| name.starts_with(STEP) && name != latest);
    old.retain(|name| saved_at(name).is_some());
    old.sort_by_cached_key(|name| std::cmp::Reverse((saved_at(name), name.clone())));
    for name in old.into_iter().skip(n.saturating_sub(1)) {
        // Renamed first, so that nothing half removed is ever called a checkpoint.
        let doomed = run.join(format!("{REMOVING}{name}"));
        let removed =
            fs::rename(run.join(&name), &doomed).and_then(|()| fs::remove_dir_all(&doomed));
        if let Err(e) = removed {
            tracing::warn!(
                "old checkpoint {} cannot be removed: {e}",
                run.join(&name).display()
            );
        }
    }
}

/// Names in a folder, sorted; none if it cannot be read.
fn names(folder: &Path, wanted: impl Fn(&str) -> bool) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|e| e.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| wanted(name)).collect();
    names.sort();
    names
}

/// Writes a file, and returns when it is on the disk.
pub(crate) fn write_durably(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Makes the names in a folder durable.
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    match cfg!(unix) {
        true => File::open(folder)?.sync_all(),
        false => Ok(()), // Elsewhere folders cannot be opened.
    }
}
