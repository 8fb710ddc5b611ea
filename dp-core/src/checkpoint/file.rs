//! safetensors files, written and read piece by piece: no file is ever in memory as a whole.

use std::cmp::Reverse;
use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::Path;

use candle_core::DType;
use safetensors::tensor::{Metadata, TensorInfo};

use super::CheckpointProblem as Problem;
use super::problem;
use crate::error::Result;
use crate::hashing::{Hashing, hex};
use crate::little_endian::CHUNK;

/// The longest header that the format allows.
const MAX_HEADER: u64 = 100_000_000;

type WriteFn<'a> = Box<dyn FnOnce(&mut dyn Write) -> io::Result<()> + Send + 'a>;

/// A tensor of a file to be written.
pub(crate) struct Item<'a> {
    pub key: String,
    pub dtype: DType,
    pub shape: Vec<usize>,
    /// Writes the elements as little-endian bytes.
    pub write: WriteFn<'a>,
}

/// What was written.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub(crate) struct Written {
    pub bytes: u64,
    pub sha256: String,
}

/// Writes a new safetensors file, and returns when it is on the disk.
pub(crate) fn write_file(path: &Path, mut items: Vec<Item<'_>>) -> Result<Written> {
    let failed = |e: io::Error| problem(path, Problem::Io, format!("cannot be written: {e}"));
    if items.iter().any(|item| item.key == "__metadata__") {
        let message = "a parameter is called `__metadata__`, which the format keeps for itself";
        return Err(problem(path, Problem::Model, message));
    }
    // Wide elements first, so that all are aligned: readers map the file.
    items.sort_by_key(|item| Reverse(item.dtype.size_in_bytes()));
    let mut end = 0;
    let mut info = |item: &Item| {
        let bytes = item.shape.iter().product::<usize>() * item.dtype.size_in_bytes();
        let data_offsets = (end, end + bytes);
        end += bytes;
        let (dtype, shape) = (item.dtype.into(), item.shape.clone());
        (
            item.key.clone(),
            TensorInfo {
                dtype,
                shape,
                data_offsets,
            },
        )
    };
    let infos = items.iter().map(&mut info).collect();
    let header = Metadata::new(None, infos)
        .map_err(io::Error::other)
        .map_err(failed)?;
    let mut header = serde_json::to_vec(&header).map_err(|e| failed(e.into()))?;
    header.resize(header.len().next_multiple_of(8), b' ');

    let file = File::create_new(path).map_err(failed)?;
    let mut out = Hashing::new(BufWriter::with_capacity(CHUNK, file));
    out.write_all(&(header.len() as u64).to_le_bytes())
        .map_err(failed)?;
    out.write_all(&header).map_err(failed)?;
    let data_start = out.num_bytes();
    for item in items {
        (item.write)(&mut out).map_err(failed)?;
    }
    if out.num_bytes() - data_start != end as u64 {
        let message = format!(
            "{} bytes of data were to be written, got {}",
            end,
            out.num_bytes() - data_start
        );
        return Err(problem(path, Problem::Io, message));
    }
    let bytes = out.num_bytes();
    let (out, digest) = out.finish();
    let file = out.into_inner().map_err(|e| failed(e.into_error()))?;
    file.sync_all().map_err(failed)?;
    Ok(Written {
        bytes,
        sha256: hex(&digest),
    })
}

/// A safetensors file that is read in ranges.
pub(crate) struct OpenFile {
    file: File,
    pub len: u64,
}

impl OpenFile {
    pub fn open(path: &Path) -> Result<Self> {
        let failed = |e: io::Error| {
            let kind = match e.kind() {
                io::ErrorKind::NotFound => Problem::Missing,
                _ => Problem::Io,
            };
            problem(path, kind, format!("cannot be opened: {e}"))
        };
        let file = File::open(path).map_err(failed)?;
        let len = file.metadata().map_err(failed)?.len();
        Ok(Self { file, len })
    }

    /// The header, and where the data begins; the file must be as long as they say.
    pub fn header(&self, path: &Path) -> Result<(Metadata, u64)> {
        let corrupt = |message: String| problem(path, Problem::Corrupt, message);
        let unreadable = |e: io::Error| corrupt(format!("its header cannot be read: {e}"));
        let mut length = [0; 8];
        self.reader(0)
            .and_then(|mut r| r.read_exact(&mut length))
            .map_err(unreadable)?;
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER || length + 8 > self.len {
            return Err(corrupt(format!(
                "a header of {length} bytes does not fit in it"
            )));
        }
        let mut header = vec![0; length as usize];
        self.reader(8)
            .and_then(|mut r| r.read_exact(&mut header))
            .map_err(unreadable)?;
        let header: Metadata = serde_json::from_slice(&header)
            .map_err(|e| corrupt(format!("its header is not that of a safetensors file: {e}")))?;
        let expected = (header.data_len() as u64).saturating_add(8 + length);
        if expected != self.len {
            return Err(corrupt(format!(
                "it is {} bytes long, its header says {expected}",
                self.len
            )));
        }
        Ok((header, 8 + length))
    }

    /// Reads from `offset` on.
    pub fn reader(&self, offset: u64) -> io::Result<impl Read + '_> {
        let mut file = &self.file;
        file.seek(SeekFrom::Start(offset))?;
        Ok(file)
    }

    /// SHA-256 of the whole file, as hexadecimal digits.
    pub fn sha256(&self) -> io::Result<String> {
        let mut hash = Hashing::only();
        io::copy(&mut self.reader(0)?, &mut hash)?;
        Ok(hex(&hash.finish().1))
    }
}
