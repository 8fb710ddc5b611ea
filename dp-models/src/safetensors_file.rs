//! safetensors files, read and written one tensor at a time: a model that is converted need not fit in memory.
//!
//! The crate `safetensors` reads from a slice of the whole file. Such a slice is a memory map, and that is not sound while
//! another program writes to the file. So the crate's header types are used, and tensors are read with ordinary reads.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use candle_core::{Error, Result, bail};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

/// The longest header that the format allows.
const MAX_HEADER: u64 = 100_000_000;

/// The tensors of one or several files, by name. The data of each is read when it is asked for.
pub(crate) struct TensorFiles {
    tensors: BTreeMap<String, Location>,
    files: Vec<(PathBuf, File)>,
}

struct Location {
    info: TensorInfo,
    file_idx: usize,
    /// Of the first byte, in the file.
    offset: u64,
}

impl TensorFiles {
    /// Opens the files and reads their headers.
    ///
    /// # Errors
    ///
    /// A file cannot be read or is not a whole safetensors file, or two have a tensor of the same name.
    pub fn open(paths: &[PathBuf]) -> Result<Self> {
        let (mut tensors, mut files) = (BTreeMap::new(), Vec::new());
        for (file_idx, path) in paths.iter().enumerate() {
            let mut file = File::open(path).map_err(|e| cannot("read", path, &e))?;
            let (header, data) = read_header(&mut file)
                .map_err(|e| cannot("read the safetensors header of", path, &e))?;
            for (name, info) in header.tensors() {
                let location = Location {
                    info: info.clone(),
                    file_idx,
                    offset: data + info.data_offsets.0 as u64,
                };
                if tensors.insert(name.clone(), location).is_some() {
                    bail!(
                        "{} has a tensor {name} that another file has, too",
                        path.display()
                    )
                }
            }
            files.push((path.clone(), file));
        }
        Ok(Self { tensors, files })
    }

    /// Names, dtypes and shapes, sorted by name.
    pub fn infos(&self) -> impl Iterator<Item = (&str, &TensorInfo)> {
        self.tensors
            .iter()
            .map(|(name, location)| (name.as_str(), &location.info))
    }

    /// The elements of a tensor as they lie in the file: little-endian, row after row.
    ///
    /// # Errors
    ///
    /// There is none of this name, or it cannot be read.
    pub fn read(&self, name: &str) -> Result<Vec<u8>> {
        let Some(location) = self.tensors.get(name) else {
            bail!("there is no tensor {name}")
        };
        let (path, file) = &self.files[location.file_idx];
        let (start, end) = location.info.data_offsets;
        let mut bytes = vec![0; end - start];
        let mut file: &File = file;
        file.seek(SeekFrom::Start(location.offset))
            .and_then(|_| file.read_exact(&mut bytes))
            .map_err(|e| cannot(&format!("read {name} of"), path, &e))?;
        Ok(bytes)
    }
}

/// The header, and where the data begins.
fn read_header(file: &mut File) -> io::Result<(Metadata, u64)> {
    let corrupt = |message: String| io::Error::new(io::ErrorKind::InvalidData, message);
    let file_len = file.metadata()?.len();
    let mut len = [0; 8];
    file.read_exact(&mut len)?;
    let len = u64::from_le_bytes(len);
    if len > MAX_HEADER || len + 8 > file_len {
        return Err(corrupt(format!(
            "a header of {len} bytes does not fit in it"
        )));
    }
    let mut header = vec![0; len as usize];
    file.read_exact(&mut header)?;
    let header: Metadata = serde_json::from_slice(&header)?;
    let expected = (header.data_len() as u64).saturating_add(8 + len);
    if expected != file_len {
        return Err(corrupt(format!(
            "the file has {file_len} bytes, its header says {expected}"
        )));
    }
    Ok((header, 8 + len))
}

/// Writes a safetensors file, and returns when it is on the disk under its name: it is never there in part. `data` gives the
/// elements of the tensor at an index of `tensors`, one tensor at a time.
///
/// # Errors
///
/// The file cannot be written, or what `data` reports.
pub(crate) fn write(
    path: &Path,
    metadata: Option<HashMap<String, String>>,
    tensors: &[(String, Dtype, Vec<usize>)],
    mut data: impl FnMut(usize) -> Result<Vec<u8>>,
) -> Result<()> {
    // Wide elements first, so that all are aligned: readers map the file.
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&idx| (Reverse(tensors[idx].1.bitsize()), &tensors[idx].0));
    let mut end = 0;
    let infos = order.iter().map(|&idx| {
        let (name, dtype, shape) = tensors[idx].clone();
        let start = end;
        end += shape.iter().product::<usize>() * dtype.bitsize() / 8;
        let data_offsets = (start, end);
        let info = TensorInfo {
            dtype,
            shape,
            data_offsets,
        };
        (name, info)
    });
    let header = Metadata::new(metadata, infos.collect())
        .map_err(|e| cannot("write", path, &io::Error::other(e)))?;
    let mut header = serde_json::to_vec(&header).map_err(|e| cannot("write", path, &e.into()))?;
    header.resize(header.len().next_multiple_of(8), b' ');

    write_atomically(path, |out| {
        let failed = |e: io::Error| cannot("write", path, &e);
        out.write_all(&(header.len() as u64).to_le_bytes())
            .and_then(|()| out.write_all(&header))
            .map_err(failed)?;
        let mut written = 0;
        for &idx in &order {
            let bytes = data(idx)?;
            written += bytes.len();
            out.write_all(&bytes).map_err(failed)?;
        }
        if written != end {
            bail!(
                "cannot write {}: its tensors have {written} bytes, its header says {end}",
                path.display()
            )
        }
        Ok(())
    })
}

/// Writes a file beside `path`, and renames it once it is complete and on the disk.
pub(crate) fn write_atomically(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<()> {
    let failed = |e: io::Error| cannot("write", path, &e);
    let parent = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let mut builder = tempfile::Builder::new();
    // A temporary file is private; this one is not to stay temporary. The process's umask applies.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let part = builder
        .prefix(".")
        .suffix(".part")
        .tempfile_in(parent)
        .map_err(failed)?;
    let mut out = BufWriter::with_capacity(1 << 20, part);
    write(&mut out)?;
    let part = out.into_inner().map_err(|e| failed(e.into_error()))?;
    part.as_file().sync_all().map_err(failed)?;
    part.persist(path).map_err(|e| failed(e.error))?;
    // The rename is on the disk once the folder is. Only Unix can open one.
    #[cfg(unix)]
    File::open(parent)
        .and_then(|f| f.sync_all())
        .map_err(failed)?;
    Ok(())
}

/// An error of a file, which it names.
pub(crate) fn cannot(what: &str, path: &Path, err: &io::Error) -> Error {
    Error::msg(format!("cannot {what} {}: {err}", path.display()))
}
