//! Where ranks compute.

use candle_core::Device;

use crate::error::{Error, Result};
use crate::memory::keep_freed_memory;

/// The devices of a [`World`](crate::World)'s ranks.
///
/// ```
/// use dp_core::{Devices, World};
///
/// # fn main() -> dp_core::Result<()> {
/// let world = World::threads(4)?.with_devices(Devices::Cuda(vec![0])); // four ranks share the first GPU
/// # let _ = world;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Devices {
    /// All ranks compute on the CPU.
    #[default]
    Cpu,
    /// CUDA devices by their numbers (those of `CUDA_VISIBLE_DEVICES`), dealt out to the ranks of this machine in turn:
    /// [`local_rank`](crate::Rank::local_rank) `r` gets number `r` of the list, modulo its length. So `vec![0]` is one GPU
    /// for all ranks, and `vec![0, 1, 2, 3]` a GPU for each of four.
    ///
    /// Each rank has a Candle device with a CUDA stream of its own (`Device::new_cuda_with_stream`), so ranks that share a GPU
    /// do not wait for each other's kernels. Its random numbers begin at [`rank.seed(0)`](crate::Rank::seed), different on each
    /// rank and the same in each run; `device.set_seed(rank.seed(seed))` chooses others. What a rank frees stays with the
    /// process, to be allocated again.
    Cuda(Vec<usize>),
}

impl Devices {
    /// The device of one rank.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the list is empty, if there is no such device, and in a build without CUDA.
    pub(crate) fn of(&self, local_rank: usize) -> Result<Device> {
        let Self::Cuda(ordinals) = self else {
            return Ok(Device::Cpu);
        };
        if ordinals.is_empty() {
            let message =
                "the list of CUDA devices is empty; name one, e.g. Devices::Cuda(vec![0])";
            return Err(Error::invalid("devices", message));
        }
        let ordinal = ordinals[local_rank % ordinals.len()];
        let device = Device::new_cuda_with_stream(ordinal).map_err(|e| {
            let message = match cfg!(feature = "cuda") {
                true => format!(
                    "CUDA device {ordinal} cannot be used: {e}; see nvidia-smi and CUDA_VISIBLE_DEVICES"
                ),
                false => "this build has no CUDA; build with the feature `cuda`".to_string(),
            };
            Error::invalid("devices", message)
        })?;
        keep_freed_memory(&device)?;
        Ok(device)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_is_named() -> Result<()> {
        assert!(Devices::Cpu.of(3)?.is_cpu());
        let text = |devices: Devices| match devices.of(0) {
            Ok(device) => format!("{:?}", device.location()),
            Err(e) => e.to_string(),
        };
        assert!(text(Devices::Cuda(vec![])).contains("Devices::Cuda(vec![0])"));
        // No machine has as many.
        let text = text(Devices::Cuda(vec![9999]));
        let expected = match cfg!(feature = "cuda") {
            true => "CUDA device 9999 cannot be used",
            false => "build with the feature `cuda`",
        };
        assert!(text.contains(expected), "{text}");
        Ok(())
    }
}
