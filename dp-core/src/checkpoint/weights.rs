//! Plain safetensors files of the weights alone, which any other program reads.

use std::collections::HashSet;
use std::io;
use std::path::Path;

use super::CheckpointProblem as Problem;
use super::agree::rank_0;
use super::file::{Item, write_file};
use super::folder::{self, or_current, sync_folder};
use super::options::LoadOptions;
use super::problem;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::initial_values::InitialValues;
use crate::optim::Optimizer;
use crate::param::Param;
use crate::replica::broadcast_values;

/// Writes a file beside `path`, and renames it when it is complete and on the disk.
pub(crate) fn write_atomically(path: &Path, items: Vec<Item<'_>>) -> Result<()> {
    let Some(name) = path.file_name() else {
        return Err(problem(path, Problem::Io, "it is not the path of a file"));
    };
    let parent = or_current(path.parent().unwrap_or(path));
    let is_latest = name == folder::LATEST && parent.join(folder::LOCK).exists();
    if is_latest || folder::is_checkpoint(parent) {
        return Err(problem(
            path,
            Problem::Io,
            "it would be among the files of a checkpoint; name a file outside of that folder",
        ));
    }
    if path.symlink_metadata().is_ok_and(|m| !m.is_file()) {
        return Err(problem(
            path,
            Problem::Io,
            "it exists and is not a regular file",
        ));
    }
    let nonce: u32 = rand::random();
    let mut part = std::ffi::OsString::from(".");
    part.push(name);
    part.push(format!(".{nonce:08x}.part"));
    let part = path.with_file_name(part);
    // The name of the part is not one that the caller knows.
    let written = write_file(&part, items).map_err(|e| match e {
        Error::Checkpoint {
            problem: kind,
            message,
            ..
        } => problem(path, kind, message),
        other => other,
    });
    let renamed = written.and_then(|_| {
        std::fs::rename(&part, path)
            .and_then(|()| sync_folder(parent))
            .map_err(|e| problem(path, Problem::Io, format!("cannot be written: {e}")))
    });
    if renamed.is_err() {
        let _ = std::fs::remove_file(&part);
    }
    renamed
}

impl<O: Optimizer> Engine<O> {
    /// All ranks hold all parameters, so rank 0 writes the file.
    pub(crate) fn export_safetensors(&self, path: &Path) -> Result<()> {
        self.require_whole("export_safetensors")?;
        rank_0(self.comm.as_ref(), "export_safetensors", path, || {
            let item = |param: &'_ Param| Item {
                key: param.name().to_string(),
                dtype: param.tensor().dtype(),
                shape: param.tensor().dims().to_vec(),
                write: Box::new({
                    let param = param.clone();
                    move |out| {
                        param
                            .write_le(0..param.num_elements(), out)
                            .map_err(io::Error::other)
                    }
                }),
            };
            write_atomically(path, self.params.iter().map(item).collect())
        })
    }

    /// Rank 0 reads the file and sends its values.
    pub(crate) fn import_safetensors(&mut self, path: &Path, options: &LoadOptions) -> Result<()> {
        self.require_empty_window("import_safetensors")?;
        let mut file = None;
        let present: Vec<String> = rank_0(self.comm.as_ref(), "import_safetensors", path, || {
            let (opened, present) = check(path, &self.params, options)?;
            file = Some(opened);
            Ok(present)
        })?;
        let present: HashSet<String> = present.into_iter().collect();
        let by_name = |i: &usize| present.contains(self.params[*i].name());
        let positions: Vec<usize> = self.order.iter().copied().filter(by_name).collect();
        for position in positions {
            let param = &self.params[position];
            if let Some(file) = &file {
                file.load_into(param)?;
            }
            broadcast_values(
                &self.params,
                [position],
                self.comm.as_ref(),
                self.store.ledger(),
            )?;
        }
        let (owned, params) = (&self.owned, &self.params);
        let is_present = |i: usize| present.contains(params[i].name());
        self.masters
            .refresh(&self.layout, params, owned, is_present)?;
        self.mark_update()
    }
}

/// Compares the file with the model, before anything is changed. Returns the names that both have.
fn check(
    path: &Path,
    params: &[Param],
    options: &LoadOptions,
) -> Result<(InitialValues, Vec<String>)> {
    let wrong = |kind, message: String| problem(path, kind, message);
    let file = InitialValues::open(path).map_err(|e| match e {
        Error::File { message, .. } => {
            let kind = match path.is_file() {
                true => Problem::Corrupt,
                false => Problem::Missing,
            };
            wrong(kind, format!("cannot be read as safetensors: {message}"))
        }
        other => other,
    })?;
    let mut present = Vec::new();
    for param in params {
        let (name, own) = (param.name(), param.tensor().shape());
        match file.shape(name) {
            Some(shape) if shape == *own => {
                file.check_dtype(name)
                    .map_err(|message| wrong(Problem::Model, message))?;
                present.push(name.to_string());
            }
            Some(shape) => {
                let message =
                    format!("`{name}` has shape {shape:?} there, but {own:?} in the model");
                return Err(wrong(Problem::Model, message));
            }
            None if options.allows_new(name) => {}
            None => {
                return Err(wrong(
                    Problem::Model,
                    format!("`{name}` of the model is not there; see LoadOptions::with_new_params"),
                ));
            }
        }
    }
    let own: HashSet<&str> = params.iter().map(Param::name).collect();
    let known = |name: &String| own.contains(name.as_str()) || options.allows_dropped(name);
    if let Some(extra) = file.names().into_iter().find(|name| !known(name)) {
        let message =
            format!("`{extra}` is not in the model; see LoadOptions::with_dropped_params");
        return Err(wrong(Problem::Model, message));
    }
    Ok((file, present))
}
