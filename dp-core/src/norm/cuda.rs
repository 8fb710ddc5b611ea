//! The parts of a norm, added up on a CUDA device. The host copies five numbers, when all parts are in.

use candle_core::{CudaDevice, DType};

use crate::buffer::CudaMemory;
use crate::cuda::Kernels;
use crate::error::Result;
use crate::mean_gradient::MeanGradient;
use crate::norm::sum_of_limbs;
use crate::precision::with_trainable;

/// Numbers that kernels add to.
pub(super) struct Sums {
    kernels: Kernels,
    /// The greatest absolute value.
    max: CudaMemory,
    /// The sum of the scaled squares, in four limbs.
    limbs: CudaMemory,
}

/// Looks at a part for the greatest absolute value. The first part's device makes the sums.
pub(super) fn max_abs(sums: &mut Option<Sums>, part: &MeanGradient<'_>) -> Result<()> {
    with_trainable!(part.dtype(), G => {
        let (device, grad) = part.on_cuda::<G>(part.range())?;
        let sums = match sums {
            Some(sums) => sums,
            None => sums.insert(Sums::new(device)?),
        };
        sums.kernels.max_abs(&grad, part.divisor(), &mut sums.max.view_mut(0..1)?)
    })
}

impl Sums {
    fn new(device: &CudaDevice) -> Result<Self> {
        Ok(Self {
            kernels: Kernels::of(device)?,
            max: CudaMemory::zeros(DType::F32, 1, device)?,
            limbs: CudaMemory::zeros(DType::I64, 4, device)?,
        })
    }

    /// The greatest absolute value of all parts.
    pub fn max(&self) -> Result<f32> {
        Ok(self.max.to_vec(0..1)?[0])
    }

    /// Tells the device the greatest absolute value over all ranks, which squares are scaled by.
    pub fn set_max(&mut self, max: f32) -> Result<()> {
        self.max.write_with(0..1, |_, value| {
            value.fill(max);
            Ok(())
        })
    }

    /// Adds the squares of a part.
    pub fn add_squares(&mut self, part: &MeanGradient<'_>) -> Result<()> {
        with_trainable!(part.dtype(), G => {
            let (_, grad) = part.on_cuda::<G>(part.range())?;
            let (max, limbs) = (self.max.view(0..1)?, &mut self.limbs.view_mut(0..4)?);
            self.kernels.sum_of_squares(&grad, part.divisor(), &max, limbs)
        })
    }

    /// The sum of all squares.
    pub fn squares(&self) -> Result<u128> {
        Ok(sum_of_limbs(&self.limbs.to_vec(0..4)?))
    }
}
