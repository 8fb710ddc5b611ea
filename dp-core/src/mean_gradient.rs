//! The mean gradient that a step reads: a part of a reduced bucket, and what is left to divide by.

use std::ops::Range;

#[cfg(feature = "cuda")]
use candle_core::{CudaDevice, DType, cuda_backend::cudarc::driver::CudaView};

use crate::buffer::Buffer;
#[cfg(feature = "cuda")]
use crate::cuda::Kernels;
use crate::error::Result;
use crate::param_flags::ParamFlags;
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

    /// Raises the flag of parameter `param_idx` if an element of `range` is not finite.
    pub fn find_non_finite(
        &self,
        range: Range<usize>,
        flags: &mut ParamFlags,
        param_idx: usize,
    ) -> Result<()> {
        #[cfg(feature = "cuda")]
        if self.is_cuda() {
            return with_trainable!(self.dtype(), G => {
                let (device, grad) = self.on_cuda::<G>(range)?;
                let mut flag = flags.on_cuda(param_idx)?;
                Kernels::of(device)?.find_non_finite(&grad, self.divisor, &mut flag)
            });
        }
        let mut finite = true;
        self.for_each_chunk(range, |_, part| {
            finite &= part.iter().all(|g| g.is_finite())
        })?;
        if !finite {
            flags.raise(param_idx);
        }
        Ok(())
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

#[cfg(feature = "cuda")]
impl MeanGradient<'_> {
    /// True if it lies in the memory of a CUDA device.
    pub fn is_cuda(&self) -> bool {
        self.buffer.is_cuda()
    }

    /// Of the reduced elements.
    pub fn dtype(&self) -> DType {
        self.buffer.dtype()
    }

    /// What kernels divide each element by.
    pub fn divisor(&self) -> f32 {
        self.divisor
    }

    /// Elements `range`, not divided yet.
    pub fn on_cuda<G: Trainable>(
        &self,
        range: Range<usize>,
    ) -> Result<(&CudaDevice, CudaView<'_, G>)> {
        let (memory, start) = (self.buffer.cuda()?, self.owned.start);
        let view = memory.view(start + range.start..start + range.end)?;
        Ok((memory.device(), view))
    }
}
