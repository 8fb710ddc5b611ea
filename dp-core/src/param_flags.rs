//! Findings about parameters, raised where the numbers lie.

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::CudaViewMut;
use candle_core::{DType, Device};

use crate::buffer::Buffer;
use crate::error::Result;

/// One flag per parameter.
///
/// On a device, kernels raise flags in its memory, and the host hears of all of them together, in one copy of 4 bytes per
/// parameter, when it [reads](Self::read) them. So nothing waits for the device where a flag is raised.
#[derive(Debug)]
pub(crate) struct ParamFlags {
    raised: Vec<bool>,
    /// One u32 per parameter, 0 or 1, which the host has not seen yet; `None` on the CPU.
    on_device: Option<Buffer>,
    /// A kernel may have raised some since they were cleared: else there is nothing to wait for.
    lent: bool,
}

impl ParamFlags {
    /// None raised. `device`: that of the parameters.
    pub fn new(num_params: usize, device: &Device) -> Result<Self> {
        let on_device = || Buffer::zeros_on(DType::U32, num_params, device);
        Ok(Self {
            raised: vec![false; num_params],
            on_device: (!device.is_cpu()).then(on_device).transpose()?,
            lent: false,
        })
    }

    /// Takes all of them down.
    pub fn clear(&mut self) -> Result<()> {
        self.raised.fill(false);
        match &mut self.on_device {
            Some(flags) if std::mem::take(&mut self.lent) => flags.fill_zero(0..flags.len()),
            _ => Ok(()),
        }
    }

    /// Raises the flag of a parameter.
    pub fn raise(&mut self, param_idx: usize) {
        self.raised[param_idx] = true;
    }

    /// The flag of a parameter, for a kernel to set to 1.
    #[cfg(feature = "cuda")]
    pub fn on_cuda(&mut self, param_idx: usize) -> Result<CudaViewMut<'_, u32>> {
        self.lent = true;
        match &mut self.on_device {
            Some(flags) => flags.cuda_mut()?.view_mut(param_idx..param_idx + 1),
            None => Err(crate::Error::invalid("flags", "are on the CPU")),
        }
    }

    /// Per parameter: raised, by the host or by its device.
    pub fn read(&mut self) -> Result<&[bool]> {
        if let Some(flags) = self.on_device.as_ref().filter(|_| self.lent) {
            for (raised, flag) in self.raised.iter_mut().zip(flags.to_vec::<u32>()?) {
                *raised |= flag != 0;
            }
        }
        Ok(&self.raised)
    }
}
