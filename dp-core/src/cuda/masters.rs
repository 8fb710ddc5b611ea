//! 16-bit parameters against their f32 masters. To refresh all of them, [`Kernels::convert`] the parameters.

use candle_core::cuda_backend::cudarc::driver::{CudaView, CudaViewMut, DevicePtr, DevicePtrMut};

use super::args::MasterArgs;
use super::kernels::{CudaFloat, Kernels, same_len};
use super::sources::Kernel;
use crate::error::Result;

impl Kernels {
    /// `altered`, one number, becomes 1 if an element of `values` is not its master rounded, and stays as it is otherwise. Two
    /// NaNs are alike. Equal lengths.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if lengths do not fit;
    /// [`Error::Cuda`](crate::Error::Cuda) if the driver refuses.
    pub fn find_altered<P: CudaFloat>(
        &self,
        masters: &CudaView<'_, f32>,
        values: &CudaView<'_, P>,
        altered: &mut CudaViewMut<'_, u32>,
    ) -> Result<()> {
        let len = masters.len();
        same_len("find_altered", len, values.len())?;
        same_len("find_altered, its flag", 1, altered.len())?;
        let stream = self.stream();
        let (masters, _masters) = masters.device_ptr(stream);
        let (values, _values) = values.device_ptr(stream);
        let (altered, _altered) = altered.device_ptr_mut(stream);
        let args = MasterArgs {
            masters,
            values,
            altered,
            len: len as u64,
        };
        let kernel = Kernel::of("find_altered", P::DTYPE);
        // SAFETY: both slices have `len` elements and the flag one; the guards live until the launch is recorded.
        unsafe { self.launch(kernel, len, &args) }
    }

    /// Makes the masters of those `values` that are not their masters rounded what these are. Equal lengths.
    ///
    /// # Errors
    /// As [`find_altered`](Self::find_altered).
    pub fn refresh_altered<P: CudaFloat>(
        &self,
        masters: &mut CudaViewMut<'_, f32>,
        values: &CudaView<'_, P>,
    ) -> Result<()> {
        let len = masters.len();
        same_len("refresh_altered", len, values.len())?;
        let stream = self.stream();
        let (masters, _masters) = masters.device_ptr_mut(stream);
        let (values, _values) = values.device_ptr(stream);
        let args = MasterArgs {
            masters,
            values,
            altered: 0,
            len: len as u64,
        };
        let kernel = Kernel::of("refresh_altered", P::DTYPE);
        // SAFETY: both slices have `len` elements; the guards live until the launch is recorded.
        unsafe { self.launch(kernel, len, &args) }
    }
}
