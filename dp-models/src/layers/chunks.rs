//! Computation in f32, chunk by chunk, on tensors of any type that fused layers know.
//!
//! A 16-bit chunk is widened, computed with and rounded while it is in the cache, so no f32 copy of a whole tensor is made.
//! Where chunks begin follows from shapes alone, never from the number of threads.

use candle_core::{CpuStorage, DType, Result};
use rayon::prelude::*;

use super::values::{Numbers, NumbersMut, zeros};

/// Elements of a chunk where any number of them will do; a multiple of all vector lengths.
pub(super) const ELEMENTS: usize = 1 << 14;

/// What [`map`] makes: a storage of `len` numbers, of which each chunk fills `chunk` (the last one maybe fewer).
pub(super) struct Output {
    pub dtype: DType,
    pub len: usize,
    pub chunk: usize,
}

impl Output {
    /// As many as `like`, of its dtype, by [`ELEMENTS`].
    pub fn like(like: Numbers<'_>) -> Self {
        Self::rows(like, ELEMENTS)
    }

    /// As many as `like`, of its dtype, `chunk` at a time.
    pub fn rows(like: Numbers<'_>, chunk: usize) -> Self {
        Self {
            dtype: like.dtype(),
            len: like.len(),
            chunk,
        }
    }

    /// Nothing, for functions that only return something.
    pub fn none() -> Self {
        Self {
            dtype: DType::F32,
            len: 0,
            chunk: 0,
        }
    }
}

/// Calls `compute` for each chunk with its index, its part of each input (the number beside an input is the size of these
/// parts) and its part of the output, zeros at first. The results are in the order of the chunks.
pub(super) fn map<const N: usize, R: Send>(
    inputs: [(Numbers<'_>, usize); N],
    output: Output,
    compute: impl Fn(usize, [&[f32]; N], &mut [f32]) -> R + Sync,
) -> Result<(CpuStorage, Vec<R>)> {
    let sizes = inputs
        .iter()
        .map(|(numbers, chunk)| (numbers.len(), *chunk));
    let count = sizes
        .chain([(output.len, output.chunk)])
        .filter(|(_, chunk)| *chunk > 0)
        .map(|(len, chunk)| len.div_ceil(chunk))
        .max()
        .unwrap_or(0);
    let one = |idx: usize, out: NumbersMut<'_>| {
        let parts = inputs.map(|(numbers, chunk)| {
            let start = (idx * chunk).min(numbers.len());
            let end = (start + chunk).min(numbers.len());
            numbers.range(start..end).to_f32()
        });
        out.fill(|out| compute(idx, parts.each_ref().map(|part| &**part), out))
    };

    let mut storage = zeros(output.dtype, output.len)?;
    let mut rest = NumbersMut::of(&mut storage)?;
    let results = if count == 1 {
        vec![one(0, rest)]
    } else {
        let mut parts = Vec::with_capacity(count);
        for _ in 0..count {
            let (part, others) = rest.split_at(output.chunk);
            parts.push(part);
            rest = others;
        }
        let parts = parts.into_par_iter().enumerate();
        parts.map(|(idx, out)| one(idx, out)).collect()
    };
    Ok((storage, results))
}

/// The sum of what chunks returned, `len` numbers each, in their order.
pub(super) fn total(rows: Vec<Vec<f32>>, len: usize) -> Vec<f32> {
    let mut total = vec![0f32; len];
    for row in rows {
        total.iter_mut().zip(row).for_each(|(t, x)| *t += x);
    }
    total
}
