//! Checks the tensors of one layout against a config, and writes those of the other, one after the other.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use candle_core::{Error, Result, bail};
use safetensors::tensor::{Dtype, TensorInfo};

use super::super::GptConfig;
use super::names::{Name, canonical, names};
use crate::safetensors_file::{TensorFiles, write};

/// Tensors that an error names of each kind.
const NAMED: usize = 4;

/// Edge of the squares in which a matrix is transposed: rows of both sides stay in the cache.
const TILE: usize = 32;

/// Names and shapes of the parameters.
#[derive(Clone, Copy)]
pub(super) enum Layout {
    HuggingFace,
    Ours,
}

impl Layout {
    fn other(self) -> Self {
        match self {
            Self::HuggingFace => Self::Ours,
            Self::Ours => Self::HuggingFace,
        }
    }
}

/// Files whose tensors are all there, and nothing else.
pub(super) struct Conversion<'a> {
    files: &'a TensorFiles,
    from: Layout,
    tensors: Vec<(Name, Source)>,
}

/// A tensor of the files.
struct Source {
    name: String,
    info: TensorInfo,
}

impl<'a> Conversion<'a> {
    /// From this layout to the other one; `place` is where the files are, for errors.
    pub fn new(
        config: &GptConfig,
        from: Layout,
        files: &'a TensorFiles,
        place: &Path,
    ) -> Result<Self> {
        let (embedding, head) = match from {
            Layout::HuggingFace => ("transformer.wte.weight", "lm_head.weight"),
            Layout::Ours => ("wte.weight", "head.weight"),
        };
        let (mut sources, mut problems) = (BTreeMap::new(), Problems::default());
        for (name, info) in files.infos() {
            let key = match from {
                Layout::HuggingFace => canonical(name),
                Layout::Ours => Some(name.to_string()),
            };
            let source = Source {
                name: name.to_string(),
                info: info.clone(),
            };
            if let Some(key) = key
                && let Some(twin) = sources.insert(key, source)
            {
                problems
                    .unexpected
                    .push(format!("{} (as well as {name})", twin.name));
            }
        }
        if config.tied_head
            && let Some(tied) = sources.remove(head)
        {
            match sources.get(embedding) {
                // Of two names of one tensor, a writer keeps one.
                None => {
                    sources.insert(embedding.to_string(), tied);
                }
                Some(embedding) => check_tied(files, embedding, &tied, place)?,
            }
        }

        let mut tensors = Vec::new();
        for name in names(config) {
            let (key, shape) = name.in_layout(from);
            let Some(source) = sources.remove(key) else {
                problems.missing.push(key.to_string());
                continue;
            };
            let info = &source.info;
            let what = &source.name;
            if info.shape != shape {
                let got = &info.shape;
                problems
                    .misshaped
                    .push(format!("{what} {got:?} instead of {shape:?}"));
            } else if element_size(info.dtype).is_none() {
                problems.of_dtype.push(format!("{what} ({:?})", info.dtype));
            }
            tensors.push((name, source));
        }
        let left = sources.into_values().map(|source| source.name);
        problems.unexpected.extend(left);
        problems.report(place)?;
        Ok(Self {
            files,
            from,
            tensors,
        })
    }

    pub fn write(&self, to: &Path, metadata: Option<HashMap<String, String>>) -> Result<()> {
        let outputs = self.tensors.iter().map(|(name, source)| {
            let (key, shape) = name.in_layout(self.from.other());
            (key.to_string(), source.info.dtype, shape)
        });
        let outputs: Vec<_> = outputs.collect();
        write(to, metadata, &outputs, |idx| {
            let (name, source) = &self.tensors[idx];
            let bytes = self.files.read(&source.name)?;
            match (name.is_transposed, source.info.shape.as_slice()) {
                (true, &[rows, cols]) => transpose(&bytes, rows, cols, source.info.dtype),
                _ => Ok(bytes),
            }
        })
    }
}

impl Name {
    /// Name and shape in a layout.
    fn in_layout(&self, layout: Layout) -> (&str, Vec<usize>) {
        let mut shape = self.shape.clone();
        match layout {
            Layout::Ours => (&self.ours, shape),
            Layout::HuggingFace => {
                if self.is_transposed {
                    shape.reverse();
                }
                (&self.theirs, shape)
            }
        }
    }
}

fn check_tied(files: &TensorFiles, embedding: &Source, head: &Source, place: &Path) -> Result<()> {
    let same_kind =
        embedding.info.shape == head.info.shape && embedding.info.dtype == head.info.dtype;
    if same_kind && files.read(&embedding.name)? == files.read(&head.name)? {
        return Ok(());
    }
    bail!(
        "{}: {} differs from {}, but the config says that the head is tied",
        place.display(),
        head.name,
        embedding.name
    )
}

/// Bytes of an element, of the dtypes that a model can have.
fn element_size(dtype: Dtype) -> Option<usize> {
    match dtype {
        Dtype::F16 | Dtype::BF16 => Some(2),
        Dtype::F32 => Some(4),
        Dtype::F64 => Some(8),
        _ => None,
    }
}

/// `[rows, cols]` to `[cols, rows]`.
fn transpose(bytes: &[u8], rows: usize, cols: usize, dtype: Dtype) -> Result<Vec<u8>> {
    match element_size(dtype) {
        Some(2) => Ok(transpose_elements::<2>(bytes, rows, cols)),
        Some(4) => Ok(transpose_elements::<4>(bytes, rows, cols)),
        Some(8) => Ok(transpose_elements::<8>(bytes, rows, cols)),
        _ => bail!("cannot transpose a matrix of {dtype:?}"),
    }
}

fn transpose_elements<const SIZE: usize>(bytes: &[u8], rows: usize, cols: usize) -> Vec<u8> {
    let (elements, _) = bytes.as_chunks::<SIZE>();
    let mut out = vec![[0u8; SIZE]; elements.len()];
    for first_row in (0..rows).step_by(TILE) {
        for first_col in (0..cols).step_by(TILE) {
            for row in first_row..rows.min(first_row + TILE) {
                for col in first_col..cols.min(first_col + TILE) {
                    out[col * rows + row] = elements[row * cols + col];
                }
            }
        }
    }
    out.into_flattened()
}

/// What is wrong with the tensors of a file, all of it.
#[derive(Default)]
struct Problems {
    missing: Vec<String>,
    unexpected: Vec<String>,
    misshaped: Vec<String>,
    of_dtype: Vec<String>,
}

impl Problems {
    fn report(&self, place: &Path) -> Result<()> {
        let kinds = [
            ("missing", &self.missing),
            ("not a part of the model", &self.unexpected),
            ("of another shape", &self.misshaped),
            ("not f64, f32, f16 or bf16", &self.of_dtype),
        ];
        let found: Vec<String> = kinds
            .iter()
            .filter(|(_, tensors)| !tensors.is_empty())
            .map(|(what, tensors)| {
                let named = tensors.iter().take(NAMED);
                let named: Vec<&str> = named.map(String::as_str).collect();
                let more = match tensors.len() - named.len() {
                    0 => String::new(),
                    more => format!(" and {more} more"),
                };
                format!("{what}: {}{more}", named.join(", "))
            })
            .collect();
        match found.is_empty() {
            true => Ok(()),
            false => Err(Error::msg(format!(
                "the tensors of {} are not those of the config. {}",
                place.display(),
                found.join("; ")
            ))),
        }
    }
}
