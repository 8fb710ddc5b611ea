//! One pass over reduced gradients: the parts of the norm, and whether all are finite.

use candle_core::cuda_backend::cudarc::driver::{CudaView, CudaViewMut, DevicePtr, DevicePtrMut};

use super::args::GradientArgs;
use super::kernels::{CudaFloat, Kernels, same_len};
use super::sources::Kernel;
use crate::error::Result;

/// Numbers of the sum of squares: limbs of 32 bits, as `norm.rs` sends them.
const NUM_LIMBS: usize = 4;

impl Kernels {
    /// `max = max(max, |grad / divisor|)` over all elements; NaN if one is NaN. `max` is one number, 0 before the first part.
    /// After an all-reduce by `Max` it is the norm of [`GradNorm::Inf`](crate::GradNorm::Inf).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if `max` is not one number;
    /// [`Error::Cuda`](crate::Error::Cuda) if the driver refuses.
    pub fn max_abs<G: CudaFloat>(
        &self,
        grad: &CudaView<'_, G>,
        divisor: f32,
        max: &mut CudaViewMut<'_, f32>,
    ) -> Result<()> {
        same_len("max_abs, its result", 1, max.len())?;
        let stream = self.stream();
        let (grad_ptr, _grad) = grad.device_ptr(stream);
        let (max, _max) = max.device_ptr_mut(stream);
        let args = GradientArgs {
            max,
            ..pass(grad_ptr, grad.len(), divisor)
        };
        let kernel = Kernel::of("max_abs", G::DTYPE);
        // SAFETY: `grad` has its length, and `max` one element; the guards live until the launch is recorded.
        unsafe { self.launch(kernel, grad.len(), &args) }
    }

    /// Adds `(grad / divisor / 2^e)^2`, cut off to multiples of `2^-62`, over all elements to `limbs`, four numbers that begin
    /// as zeros. `2^e` is the power of two above `max`, which [`max_abs`](Self::max_abs) has left for all parts of all ranks.
    /// The sum is `limbs[0] + 2^32 limbs[1] + 2^64 limbs[2] + 2^96 limbs[3]`; limbs may exceed 32 bits. They may be
    /// all-reduced by `Sum` as they are; then `norm::l2_norm(max, sum_of_limbs(&limbs))` is the norm, and these five numbers are
    /// all that the host needs. Nothing is added if `max` is not finite: the norm is `max` then.
    ///
    /// # Errors
    /// As [`max_abs`](Self::max_abs).
    pub fn sum_of_squares<G: CudaFloat>(
        &self,
        grad: &CudaView<'_, G>,
        divisor: f32,
        max: &CudaView<'_, f32>,
        limbs: &mut CudaViewMut<'_, i64>,
    ) -> Result<()> {
        same_len("sum_of_squares, its max", 1, max.len())?;
        same_len("sum_of_squares, its limbs", NUM_LIMBS, limbs.len())?;
        let stream = self.stream();
        let (grad_ptr, _grad) = grad.device_ptr(stream);
        let (max, _max) = max.device_ptr(stream);
        let (limbs, _limbs) = limbs.device_ptr_mut(stream);
        let args = GradientArgs {
            max,
            limbs,
            ..pass(grad_ptr, grad.len(), divisor)
        };
        let kernel = Kernel::of("sum_of_squares", G::DTYPE);
        // SAFETY: `grad` has its length, `max` one element, `limbs` four; the guards live until the launch is recorded.
        unsafe { self.launch(kernel, grad.len(), &args) }
    }

    /// `not_finite`, one number, becomes 1 if `grad / divisor` is NaN or infinite for some element, and stays as it is
    /// otherwise.
    ///
    /// # Errors
    /// As [`max_abs`](Self::max_abs).
    pub fn find_non_finite<G: CudaFloat>(
        &self,
        grad: &CudaView<'_, G>,
        divisor: f32,
        not_finite: &mut CudaViewMut<'_, u32>,
    ) -> Result<()> {
        same_len("find_non_finite, its flag", 1, not_finite.len())?;
        let stream = self.stream();
        let (grad_ptr, _grad) = grad.device_ptr(stream);
        let (not_finite, _flag) = not_finite.device_ptr_mut(stream);
        let args = GradientArgs {
            not_finite,
            ..pass(grad_ptr, grad.len(), divisor)
        };
        let kernel = Kernel::of("find_non_finite", G::DTYPE);
        // SAFETY: `grad` has its length, and the flag one element; the guards live until the launch is recorded.
        unsafe { self.launch(kernel, grad.len(), &args) }
    }
}

fn pass(grad: u64, len: usize, divisor: f32) -> GradientArgs {
    GradientArgs {
        grad,
        len: len as u64,
        max: 0,
        limbs: 0,
        not_finite: 0,
        divisor,
    }
}
