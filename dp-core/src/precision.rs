//! Mixed precision: f16 and bf16 numbers next to the f32 ones that are computed with.

use candle_core::{DType, Tensor};
use half::{bf16, f16};
use multiversion::multiversion;

use crate::buffer::{Buffer, Element};
#[cfg(feature = "cuda")]
use crate::cuda::Kernels;
use crate::error::{Error, Result};
#[cfg(feature = "cuda")]
use crate::param::with_cuda;
use crate::param::with_values;
use crate::param_flags::ParamFlags;

/// What the gradients of 16-bit parameters are kept in, between backward and step (`grad_accum_dtype` in DeepSpeed's
/// `data_types`). Gradients of f32 parameters are f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum GradAccumDType {
    /// f32: nothing is rounded between Candle's backward and the update of the master weights. 4 bytes per element.
    #[default]
    F32,
    /// The parameter's own dtype, as in the ZeRO paper: 2 bytes per element. It costs precision: each further micro-batch is
    /// added with a rounding, so that a small gradient is lost beside a large sum (256 + 1 is 256 in bf16), and the mean over
    /// ranks is rounded once more. In f16 a mean above 65504 becomes infinity.
    Parameter,
}

impl GradAccumDType {
    /// The dtype of the gradients of parameters of `dtype`.
    pub fn of(self, dtype: DType) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::Parameter => dtype,
        }
    }
}

/// The floats that parameters, gradients and what is sent of them can be. Arithmetic is in f32.
pub(crate) trait Trainable: Element<Acc = f32> {
    /// The numbers themselves, if they are f32: then there is nothing to convert.
    fn as_f32(_values: &[Self]) -> Option<&[f32]> {
        None
    }
    /// As [`as_f32`](Self::as_f32).
    fn as_f32_mut(_values: &mut [Self]) -> Option<&mut [f32]> {
        None
    }
}

impl Trainable for f16 {}
impl Trainable for bf16 {}

impl Trainable for f32 {
    fn as_f32(values: &[f32]) -> Option<&[f32]> {
        Some(values)
    }

    fn as_f32_mut(values: &mut [f32]) -> Option<&mut [f32]> {
        Some(values)
    }
}

/// Converts without loss; both have the same length.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn widen<T: Trainable>(values: &[T], out: &mut [f32]) {
    T::widen(values, out);
}

/// Rounds to nearest even; both have the same length.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn narrow<T: Trainable>(values: &[f32], out: &mut [T]) {
    T::narrow(values, out);
}

/// Runs `$body` with the type parameter `$t` bound to the [`Trainable`] of `$dtype`; an error for any other.
macro_rules! with_trainable {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $t = f32;
                $body
            }
            candle_core::DType::F16 => {
                type $t = half::f16;
                $body
            }
            candle_core::DType::BF16 => {
                type $t = half::bf16;
                $body
            }
            other => Err($crate::precision::not_trainable("a number to train", other)),
        }
    };
}
pub(crate) use with_trainable;

/// True if [`with_trainable`] knows the dtype.
pub(crate) fn is_trainable(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// True for the dtypes whose parameters have f32 masters.
pub(crate) fn has_master(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

pub(crate) fn not_trainable(what: &str, dtype: DType) -> Error {
    Error::UnsupportedDType {
        what: what.to_string(),
        dtype: dtype.as_str(),
        supported: "f32, f16, bf16",
    }
}

/// Elements that are converted at a time, so that they stay in the first-level cache.
pub(crate) const CHUNK: usize = 2048;

/// Copies the values of a tensor of any layout, times `factor`, to `out`, or adds them in f32 and rounds once. `watch`: raises
/// the flag of this parameter if a result is not finite; without it, nobody looks.
pub(crate) fn read_gradient(
    grad: &Tensor,
    out: &mut Buffer,
    range: std::ops::Range<usize>,
    factor: f32,
    accumulate: bool,
    watch: Option<(&mut ParamFlags, usize)>,
) -> Result<()> {
    // Candle's backward hands out sums it has just made, which are contiguous: then this copies nothing.
    let grad = grad.contiguous()?;
    with_trainable!(grad.dtype(), G => with_trainable!(out.dtype(), T => {
        #[cfg(feature = "cuda")]
        if out.is_cuda() {
            let mut out = out.cuda_mut()?.view_mut::<T>(range)?;
            let mut flag = watch.map(|(flags, param_idx)| flags.on_cuda(param_idx)).transpose()?;
            return with_cuda::<G, _>(&grad, |device, values| {
                let kernels = Kernels::of(device)?;
                kernels.read_gradient(&values, &mut out, factor, accumulate, flag.as_mut())
            });
        }
        let out = &mut out.as_mut_slice::<T>()?[range];
        with_values(&grad, |values: &[G]| {
            match (accumulate, factor == 1.0) {
                (true, true) => add::<G, T>(values, out),
                (false, true) => convert::<G, T>(values, out),
                (_, false) => add_scaled::<G, T>(values, factor, accumulate, out),
            }
            if let Some((flags, param_idx)) = watch
                && !out.iter().all(|x| x.to_acc().is_finite())
            {
                flags.raise(param_idx);
            }
        })
    }))
}

/// Overwrites `to` with `from`, rounded once where `to` is narrower. Both have the same length.
pub(crate) fn convert_buffer(from: &Buffer, to: &mut Buffer) -> Result<()> {
    with_trainable!(from.dtype(), F => with_trainable!(to.dtype(), T => {
        #[cfg(feature = "cuda")]
        if from.is_cuda() {
            let (from, to) = (from.cuda()?, to.cuda_mut()?);
            let (kernels, whole) = (Kernels::of(from.device())?, 0..to.len());
            return kernels.convert::<F, T>(&from.view(0..from.len())?, &mut to.view_mut(whole)?);
        }
        convert::<F, T>(from.as_slice()?, to.as_mut_slice()?);
        Ok(())
    }))
}

/// `out = values`, rounded once where `out` is narrower.
pub(crate) fn convert<F: Trainable, T: Trainable>(values: &[F], out: &mut [T]) {
    if let Some(values) = F::as_f32(values) {
        return narrow(values, out);
    }
    if let Some(out) = T::as_f32_mut(out) {
        return widen(values, out);
    }
    let mut wide = [0f32; CHUNK];
    for (values, out) in values.chunks(CHUNK).zip(out.chunks_mut(CHUNK)) {
        let wide = &mut wide[..values.len()];
        widen(values, wide);
        narrow(wide, out);
    }
}

/// `out = out + values`, in f32 and rounded once.
pub(crate) fn add<F: Trainable, T: Trainable>(values: &[F], out: &mut [T]) {
    if let (Some(values), Some(out)) = (F::as_f32(values), T::as_f32_mut(out)) {
        return out.iter_mut().zip(values).for_each(|(o, x)| *o += x);
    }
    let (mut wide, mut sum) = ([0f32; CHUNK], [0f32; CHUNK]);
    for (values, out) in values.chunks(CHUNK).zip(out.chunks_mut(CHUNK)) {
        let (wide, sum) = (&mut wide[..values.len()], &mut sum[..values.len()]);
        widen(values, wide);
        widen(out, sum);
        sum.iter_mut().zip(wide).for_each(|(s, x)| *s += *x);
        narrow(sum, out);
    }
}

/// `out = values factor`, or `out + values factor`, in f32 and rounded once.
fn add_scaled<F: Trainable, T: Trainable>(
    values: &[F],
    factor: f32,
    accumulate: bool,
    out: &mut [T],
) {
    let (mut wide, mut sum) = ([0f32; CHUNK], [0f32; CHUNK]);
    for (values, out) in values.chunks(CHUNK).zip(out.chunks_mut(CHUNK)) {
        let (wide, sum) = (&mut wide[..values.len()], &mut sum[..values.len()]);
        widen(values, wide);
        match accumulate {
            true => widen(out, sum),
            false => sum.fill(0.0),
        }
        sum.iter_mut()
            .zip(wide)
            .for_each(|(s, x)| *s += *x * factor);
        narrow(sum, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_rounded_once_and_chunks_leave_no_seam() {
        let n = CHUNK + 3;
        let ones = vec![1f32; n];
        let mut sum: Vec<bf16> = vec![bf16::from_f32(256.0); n];
        add::<f32, bf16>(&ones, &mut sum);
        assert!(sum.iter().all(|x| x.to_f32() == 256.0));
        let mut wide = vec![0f32; n];
        convert::<bf16, f32>(&sum, &mut wide);
        add::<bf16, f32>(&vec![bf16::ONE; n], &mut wide);
        assert!(wide.iter().all(|x| *x == 257.0));
    }

    #[test]
    fn conversions_round_to_nearest_even() {
        // Halfway between two bf16 numbers, 2^-7 apart above 1: ties go to the even one.
        let halfway = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0];
        let mut out = [bf16::ZERO; 2];
        narrow::<bf16>(&halfway, &mut out);
        assert_eq!(out.map(bf16::to_f32), [1.0, 1.0 + 4.0 / 256.0]);
        let mut out = [f16::ZERO; 2];
        narrow::<f16>(&[65519.0, 65520.0], &mut out);
        assert_eq!(out.map(f16::to_f32), [65504.0, f32::INFINITY]);
    }
}
