//! Numbers from one slice to another: conversions, and gradients on their way into a bucket.

use candle_core::cuda_backend::cudarc::driver::{CudaView, CudaViewMut, DevicePtr, DevicePtrMut};

use super::args::ConvertArgs;
use super::kernels::{CudaFloat, Kernels, same_len};
use super::sources::Kernel;
use crate::error::Result;

impl Kernels {
    /// `to = from`, rounded to nearest even where `to` is narrower. Equal lengths.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if the lengths differ;
    /// [`Error::Cuda`](crate::Error::Cuda) if the driver refuses.
    pub fn convert<F: CudaFloat, T: CudaFloat>(
        &self,
        from: &CudaView<'_, F>,
        to: &mut CudaViewMut<'_, T>,
    ) -> Result<()> {
        self.read_gradient(from, to, 1.0, false, None)
    }

    /// `to = to + from`, in f32 and rounded once. Equal lengths.
    ///
    /// # Errors
    /// As [`convert`](Self::convert).
    pub fn add<F: CudaFloat, T: CudaFloat>(
        &self,
        from: &CudaView<'_, F>,
        to: &mut CudaViewMut<'_, T>,
    ) -> Result<()> {
        self.read_gradient(from, to, 1.0, true, None)
    }

    /// `out = grad factor`, or `out + grad factor` if `accumulate`; in f32 and rounded once. Equal lengths. `not_finite`, one
    /// number, becomes 1 if a result is NaN or infinite, and stays as it is otherwise: zero it before the first gradient of a
    /// window, and read it when the step decides.
    ///
    /// # Errors
    /// As [`convert`](Self::convert).
    pub fn read_gradient<G: CudaFloat, T: CudaFloat>(
        &self,
        grad: &CudaView<'_, G>,
        out: &mut CudaViewMut<'_, T>,
        factor: f32,
        accumulate: bool,
        not_finite: Option<&mut CudaViewMut<'_, u32>>,
    ) -> Result<()> {
        let len = grad.len();
        same_len("read_gradient", len, out.len())?;
        let stream = self.stream();
        let (from, _from) = grad.device_ptr(stream);
        let (to, _to) = out.device_ptr_mut(stream);
        let flag = match not_finite {
            Some(flag) => {
                same_len("read_gradient, its flag", 1, flag.len())?;
                Some(flag.device_ptr_mut(stream))
            }
            None => None,
        };
        let args = ConvertArgs {
            from,
            to,
            not_finite: flag.as_ref().map_or(0, |(flag, _)| *flag),
            len: len as u64,
            factor,
            accumulate: u32::from(accumulate),
        };
        let kernel = Kernel::of_pair("convert", G::DTYPE, T::DTYPE);
        // SAFETY: the slices have `len` elements and the flag one; their guards live until the launch is recorded.
        unsafe { self.launch(kernel, len, &args) }
    }
}
