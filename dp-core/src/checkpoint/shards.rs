//! The files of a checkpoint, opened: which numbers lie where.
//!
//! A tensor of a rank's file is a *piece*: elements `start..end` (row-major) of a parameter's value or of one of its
//! optimizer states. Its key is `NAME@START..END/STATE`, where `STATE` is `value`, or the optimizer's name for it.

use std::collections::HashMap;
use std::io::{self, Read};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use safetensors::Dtype;

use super::CheckpointProblem as Problem;
use super::file::OpenFile;
use super::manifest::Manifest;
use super::{VALUE, problem};
use crate::buffer::Element;
use crate::error::Result;
use crate::little_endian::read_le;

/// The key of a piece.
pub(crate) fn piece_key(name: &str, range: &Range<usize>, state: &str) -> String {
    format!("{name}@{}..{}/{state}", range.start, range.end)
}

fn parse_key(key: &str) -> Option<(&str, Range<usize>, &str)> {
    let (piece, state) = key.rsplit_once('/')?;
    let (name, range) = piece.rsplit_once('@')?;
    let (start, end) = range.split_once("..")?;
    let range = start.parse().ok()?..end.parse().ok()?;
    (range.start < range.end).then_some((name, range, state))
}

/// The elements of parameters that will be read.
pub(crate) enum Wanted {
    All,
    Nothing,
    Ranges(HashMap<String, Vec<Range<usize>>>),
}

impl Wanted {
    fn includes(&self, name: &str, range: &Range<usize>) -> bool {
        let overlaps = |r: &Range<usize>| r.start < range.end && range.start < r.end;
        match self {
            Self::All => true,
            Self::Nothing => false,
            Self::Ranges(ranges) => ranges.get(name).is_some_and(|r| r.iter().any(overlaps)),
        }
    }
}

struct Piece {
    range: Range<usize>,
    rank: usize,
    offset: u64,
    dtype: Dtype,
}

/// All files of a checkpoint, with an index by parameter and state.
pub(crate) struct Shards {
    /// By rank. Files that nobody needs are closed: there may be many.
    files: Vec<(Arc<Path>, Option<OpenFile>)>,
    /// By parameter name, then state: the pieces by start.
    pieces: HashMap<String, HashMap<String, Vec<Piece>>>,
}

impl Shards {
    /// Opens the files that `manifest` lists in `folder`, reads their headers, and checks that they hold each number
    /// that the manifest promises exactly once. `wanted`: the elements of parameters that will be read; the files of others
    /// are closed again.
    pub fn open(folder: &Path, manifest: &Manifest, wanted: &Wanted) -> Result<Self> {
        let mut shards = Self {
            files: Vec::new(),
            pieces: HashMap::new(),
        };
        for (rank, record) in manifest.ranks.iter().enumerate() {
            let path: Arc<Path> = folder.join(&record.file).into();
            let file = OpenFile::open(&path)?;
            record.check_len(&path, &file)?;
            let (header, data_start) = file.header(&path)?;
            let mut needed = false;
            for (key, info) in header.tensors() {
                let corrupt =
                    |m: &str| problem(&path, Problem::Corrupt, format!("tensor `{key}`: {m}"));
                let (name, range, state) =
                    parse_key(&key).ok_or_else(|| corrupt("not the key of a piece"))?;
                if info.shape != [range.len()] {
                    return Err(corrupt("its length is not that of its range"));
                }
                needed |= wanted.includes(name, &range);
                let of_param = shards.pieces.entry(name.to_string()).or_default();
                of_param.entry(state.to_string()).or_default().push(Piece {
                    range,
                    rank,
                    offset: data_start + info.data_offsets.0 as u64,
                    dtype: info.dtype,
                });
            }
            shards.files.push((path, needed.then_some(file)));
        }
        shards.check_cover(folder, manifest)?;
        Ok(shards)
    }

    fn check_cover(&mut self, folder: &Path, manifest: &Manifest) -> Result<()> {
        let corrupt = |m: String| problem(folder, Problem::Corrupt, m);
        let mut expected = 0;
        for param in &manifest.parameters {
            let len = param.num_elements();
            for state in manifest.states_of(param).filter(|_| len > 0) {
                expected += 1;
                let pieces = self
                    .pieces
                    .get_mut(&param.name)
                    .and_then(|s| s.get_mut(state));
                let pieces = pieces.map(|p| {
                    p.sort_by_key(|piece| piece.range.start);
                    &p[..]
                });
                let dtype = match state {
                    VALUE => &param.dtype,
                    _ => "f32",
                };
                let mut end = 0;
                for piece in pieces.unwrap_or_default() {
                    if piece.range.start != end {
                        break;
                    }
                    let found = candle_core::DType::try_from(piece.dtype).map(|d| d.as_str());
                    if found.ok() != Some(dtype) {
                        let message = format!(
                            "`{state}` of `{}` is {:?}, not {dtype}",
                            param.name, piece.dtype
                        );
                        return Err(corrupt(message));
                    }
                    end = piece.range.end;
                }
                let covered =
                    pieces.is_some_and(|p| p.last().is_some_and(|last| last.range.end == end));
                if end != len || !covered {
                    let message = format!(
                        "the files do not hold each element of `{state}` of `{}` exactly once: elements {end}.. of {len}",
                        param.name
                    );
                    return Err(corrupt(message));
                }
            }
        }
        match self.pieces.values().map(HashMap::len).sum::<usize>() == expected {
            true => Ok(()),
            false => Err(corrupt(
                "the files hold tensors that the manifest does not list".to_string(),
            )),
        }
    }

    /// Compares with the manifest the files that this rank reads, and those whose turn it is: together the ranks look at
    /// all. Another rank's word would not do for what is read here: it may see another disk.
    pub fn verify(&self, manifest: &Manifest, rank: usize, world_size: usize) -> Result<()> {
        for (index, ((path, file), record)) in self.files.iter().zip(&manifest.ranks).enumerate() {
            match file {
                Some(file) => record.verify(path, file)?,
                None if index % world_size == rank => {
                    record.verify(path, &OpenFile::open(path)?)?
                }
                None => {}
            }
        }
        Ok(())
    }

    /// Reads elements `range` of a state of a parameter.
    pub fn read<T: Element>(
        &self,
        name: &str,
        state: &str,
        range: Range<usize>,
        out: &mut [T],
    ) -> Result<()> {
        let start = range.start;
        self.for_parts(name, state, range, size_of::<T>(), |part, input| {
            read_le(input, &mut out[part.start - start..part.end - start])
        })
    }

    /// Hands on elements `range` of a state of a parameter as little-endian bytes, in order.
    pub fn copy(
        &self,
        name: &str,
        state: &str,
        range: Range<usize>,
        element_size: usize,
        out: &mut dyn io::Write,
    ) -> Result<()> {
        self.for_parts(name, state, range, element_size, |part, input| {
            let bytes = (part.len() * element_size) as u64;
            match io::copy(&mut input.take(bytes), out)? == bytes {
                true => Ok(()),
                false => Err(io::ErrorKind::UnexpectedEof.into()),
            }
        })
    }

    /// Calls `f` for each stored part of `range`, in order, with a reader that stands at its start.
    fn for_parts(
        &self,
        name: &str,
        state: &str,
        range: Range<usize>,
        element_size: usize,
        mut f: impl FnMut(Range<usize>, &mut dyn Read) -> io::Result<()>,
    ) -> Result<()> {
        let pieces = self.pieces.get(name).and_then(|s| s.get(state));
        for piece in pieces.map_or(&[][..], Vec::as_slice) {
            let part = piece.range.start.max(range.start)..piece.range.end.min(range.end);
            if part.is_empty() {
                continue;
            }
            let (path, file) = &self.files[piece.rank];
            let Some(file) = file else {
                return Err(problem(
                    path,
                    Problem::Io,
                    "it was closed before it was read",
                ));
            };
            let offset = piece.offset + ((part.start - piece.range.start) * element_size) as u64;
            let done = file
                .reader(offset)
                .and_then(|mut input| f(part, &mut input));
            done.map_err(|e| problem(path, Problem::Io, format!("reading `{name}`: {e}")))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_come_back_whatever_the_name() {
        for name in ["w", "a.b@c/d", "x@1..2/value"] {
            let key = piece_key(name, &(3..7), "exp_avg");
            assert_eq!(parse_key(&key), Some((name, 3..7, "exp_avg")));
        }
        for bad in [
            "w",
            "w/value",
            "w@1/value",
            "w@2..2/value",
            "w@3..2/value",
            "w@a..b/value",
        ] {
            assert_eq!(parse_key(bad), None, "{bad}");
        }
    }
}
