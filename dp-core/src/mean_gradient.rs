//! The mean gradient that a step reads: a part of a reduced bucket, and what is left to divide by.

use std::ops::Range;

use crate::buffer::Buffer;
use crate::error::Result;
use crate::precision::{CHUNK, Trainable, widen, with_trainable};
use crate::strategy::Strategy;

/// The owned range of a reduced bucket. Each element counts as itself over `divisor`, in f32.
///
/// The division is done where an element is read, so it costs no pass over memory, and a 16-bit gradient is not rounded again.
pub(crate) struct MeanGradient<'a> {
    buffer: &'a Buffer,
    owned: Range<usize>,
    divisor: f32,
}

impl<'a> MeanGradient<'a> {
    pub fn of(strategy: &'a dyn Strategy, bucket: usize, divisor: f32) -> Result<Self> {
        let (buffer, owned) = strategy.gradient(bucket)?;
        Ok(Self::new(buffer, owned, divisor))
    }

    /// Elements `owned` of `buffer`, each over `divisor`.
    pub fn new(buffer: &'a Buffer, owned: Range<usize>, divisor: f32) -> Self {
        Self {
            buffer,
            owned,
            divisor,
        }
    }

    /// All of it.
    pub fn range(&self) -> Range<usize> {
        0..self.owned.len()
    }

    /// Calls `f` with one chunk of `range` after the other, in f32, and the elements' positions in the owned range.
    pub fn for_each_chunk(
        &self,
        range: Range<usize>,
        mut f: impl FnMut(Range<usize>, &[f32]),
    ) -> Result<()> {
        let start = self.owned.start;
        with_trainable!(self.buffer.dtype(), T => {
            let values = &self.buffer.as_slice::<T>()?[start + range.start..start + range.end];
            let mut wide = [0f32; CHUNK];
            for (i, values) in values.chunks(CHUNK).enumerate() {
                let at = range.start + i * CHUNK;
                let at = at..at + values.len();
                match T::as_f32(values) {
                    Some(values) if self.divisor == 1.0 => f(at, values),
                    _ => {
                        let wide = &mut wide[..values.len()];
                        widen(values, wide);
                        wide.iter_mut().for_each(|g| *g /= self.divisor);
                        f(at, wide);
                    }
                }
            }
            Ok(())
        })
    }
}
