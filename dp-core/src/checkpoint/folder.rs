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
use super::manifest::is_shard_name;
use super::problem;
use crate::error::Result;

pub(crate) const MANIFEST: &str = "manifest.json";
pub(crate) const LATEST: &str = "latest";
pub(crate) const LOCK: &str = ".lock";
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
        let run = or_current(run);
        let failed = |what: &str, e: io::Error| problem(run, Problem::Io, format!("{what}: {e}"));
        if is_checkpoint(run) {
            let message = "it is a checkpoint itself; save to the folder of its run";
            return Err(problem(run, Problem::Io, message));
        }
        create_durably(run).map_err(|e| failed("the folder cannot be created", e))?;
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

    /// Writes the manifest, and makes the draft the newest checkpoint; then removes all but the `keep_last` newest. Returns
    /// the name of its folder.
    pub fn commit(mut self, manifest: &str, keep: Option<usize>) -> Result<String> {
        let failed = |path: &Path, e: io::Error| {
            problem(path, Problem::Io, format!("cannot be written: {e}"))
        };
        let path = self.folder.join(MANIFEST);
        write_durably(&path, manifest.as_bytes()).map_err(|e| failed(&path, e))?;
        sync_folder(&self.folder).map_err(|e| failed(&self.folder, e))?;
        let (name, target) = self.free_name();
        fs::rename(&self.folder, &target).map_err(|e| failed(&target, e))?;
        // Until `latest` names it, it is still a draft.
        self.folder = target;
        sync_folder(&self.run).map_err(|e| failed(&self.run, e))?;
        let latest = self.run.join(LATEST);
        let next = self.run.join(format!(".{LATEST}"));
        let replaced =
            write_durably(&next, name.as_bytes()).and_then(|()| fs::rename(&next, &latest));
        if let Err(e) = replaced {
            let _ = fs::remove_file(&next);
            return Err(failed(&latest, e));
        }
        self.committed = true;
        sync_folder(&self.run).map_err(|e| failed(&self.run, e))?;
        if let Some(n) = keep {
            keep_last(&self.run, n);
        }
        Ok(name)
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
            let _ = remove(&self.run, &self.folder);
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
            "a checkpoint is being saved there already: by another job (give each its own folder), or in the background and not waited for",
        )),
        // Some network file systems have no locks; they do without.
        Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Unsupported => Ok(None),
        Err(TryLockError::Error(e)) => Err(failed(e)),
    }
}

/// The folder of the checkpoint that `path` means: itself, or the latest of the run whose folder it is.
pub(crate) fn resolve(path: &Path) -> Result<PathBuf> {
    match find(path)? {
        Some(folder) => Ok(folder),
        None => {
            let what = if path.is_file() {
                "it is a file, not a folder"
            } else {
                "no checkpoint is there"
            };
            Err(problem(path, Problem::Missing, what))
        }
    }
}

/// [`resolve`], where `None` says that no checkpoint has been completed in `path` yet.
pub(crate) fn find(path: &Path) -> Result<Option<PathBuf>> {
    // What cannot be looked at may be there: starting anew beside it would be worse than an error.
    let exists = |p: &Path| match p.try_exists() {
        Err(e) if e.kind() == io::ErrorKind::NotADirectory => Ok(false),
        other => other.map_err(|e| problem(p, Problem::Io, format!("cannot be looked at: {e}"))),
    };
    if exists(&path.join(MANIFEST))? {
        return Ok(Some(path.to_path_buf()));
    }
    let latest = path.join(LATEST);
    if !exists(&latest)? {
        // A job that was killed right after its first checkpoint was complete, or a copy of a part of the folder.
        let complete = by_age(path);
        let all = names(path, is_ours);
        if let Some(broken) = all.iter().find(|name| !complete.contains(name)) {
            let message = format!(
                "there is no file `{LATEST}`, and this checkpoint has no {MANIFEST}; name one that is whole"
            );
            return Err(problem(&path.join(broken), Problem::Corrupt, message));
        }
        return Ok(complete.last().map(|name| path.join(name)));
    }
    let name = fs::read_to_string(&latest)
        .map_err(|e| problem(&latest, Problem::Io, format!("cannot be read: {e}")))?;
    let name = name.trim_end();
    // A plain name: it cannot lead out of the folder.
    let plain = name.starts_with(STEP)
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    if !plain {
        return Err(problem(
            &latest,
            Problem::Corrupt,
            format!("{name:?} is not the name of a checkpoint, such as {STEP}00000010"),
        ));
    }
    let folder = path.join(name);
    match exists(&folder.join(MANIFEST))? {
        true => Ok(Some(folder)),
        false => Err(problem(
            &folder,
            Problem::Missing,
            format!("`{LATEST}` names it, but it has no {MANIFEST}"),
        )),
    }
}

/// The complete checkpoints of a run, that saved last last. Folders with names of somebody else's are not counted.
fn by_age(run: &Path) -> Vec<String> {
    let saved_at = |name: &String| {
        fs::metadata(run.join(name).join(MANIFEST))
            .and_then(|m| m.modified())
            .ok()
    };
    let mut all = names(run, is_ours);
    all.retain(|name| saved_at(name).is_some());
    all.sort_by_cached_key(|name| (saved_at(name), name.clone()));
    all
}

/// `step-00000020` and `step-00000020-2`, but not `step-00000020-best`.
fn is_ours(name: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    name.strip_prefix(STEP)
        .is_some_and(|rest| rest.split('-').all(number))
}

/// Removes all but the `n` checkpoints that were saved last. Never the latest.
fn keep_last(run: &Path, n: usize) {
    let latest = fs::read_to_string(run.join(LATEST)).unwrap_or_default();
    let mut old = by_age(run);
    old.retain(|name| *name != latest.trim_end());
    let kept = n.saturating_sub(1).min(old.len());
    for name in &old[..old.len() - kept] {
        let folder = run.join(name);
        if let Err(e) = remove(run, &folder) {
            tracing::warn!("old checkpoint {} cannot be removed: {e}", folder.display());
        }
    }
}

/// Removes a folder of a run. It is renamed first, so that nothing half removed is ever taken for a checkpoint; the next save
/// clears away what is left after a failure.
fn remove(run: &Path, folder: &Path) -> io::Result<()> {
    let doomed = run.join(format!("{REMOVING}{:08x}", rand::random::<u32>()));
    fs::rename(folder, &doomed)?;
    fs::remove_dir_all(&doomed)
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
fn write_durably(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Creates a folder with all above it, so that their names are on the disk, too.
fn create_durably(folder: &Path) -> io::Result<()> {
    let is_missing = |f: &&Path| !f.as_os_str().is_empty() && !f.exists();
    let missing: Vec<&Path> = folder.ancestors().take_while(is_missing).collect();
    fs::create_dir_all(folder)?;
    for parent in missing.iter().rev().filter_map(|f| f.parent()) {
        sync_folder(or_current(parent))?;
    }
    Ok(())
}

/// Is `folder` that of one checkpoint? A file that happens to be called as the manifest is does not make it one.
pub(crate) fn is_checkpoint(folder: &Path) -> bool {
    folder.join(MANIFEST).exists() && !names(folder, is_shard_name).is_empty()
}

/// The empty path is the current folder, which has to be called by a name to be opened.
pub(crate) fn or_current(folder: &Path) -> &Path {
    match folder == Path::new("") {
        true => Path::new("."),
        false => folder,
    }
}

/// Makes the names in a folder durable.
pub(crate) fn sync_folder(folder: &Path) -> io::Result<()> {
    match cfg!(unix) {
        true => File::open(folder)?.sync_all(),
        false => Ok(()), // Elsewhere folders cannot be opened.
    }
}
