//! [`World::map`] where this process is one rank of several, over MPI or NCCL.

use std::error::Error as StdError;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

use candle_core::Device;

#[cfg(feature = "nccl")]
use crate::backend::Backend;
#[cfg(feature = "mpi")]
use crate::comm::MpiGroup;
#[cfg(feature = "nccl")]
use crate::comm::NcclGroup;
use crate::comm::ProcessGroup;
#[cfg(feature = "nccl")]
use crate::devices::Devices;
use crate::error::Result;
use crate::launcher::Launched;
use crate::rank::Rank;
use crate::world::World;
use crate::world_error::WorldError;

impl World {
    /// Runs `f` on this process' rank, and returns when all ranks have ended.
    pub(crate) fn map_process<T, E, F>(&self, launched: &Launched, f: F) -> Result<T, E>
    where
        F: Fn(Rank) -> Result<T, E> + Sync,
        T: Send,
        E: Into<Box<dyn StdError + Send + Sync>> + From<WorldError> + Send,
    {
        let error_here = |error| self.failure_of(launched.rank, error);
        let patience = self.patience(launched.local_size());
        match self.backend.of_processes(launched).map_err(error_here)? {
            #[cfg(feature = "nccl")]
            Backend::Nccl => {
                let begin = || {
                    let device = match &self.devices {
                        Devices::Cpu => crate::backend::own_gpu(launched)?,
                        chosen => chosen.of(launched.local_rank())?,
                    };
                    let group = NcclGroup::begin(launched, self.timeout, patience, &device)?;
                    Ok((group, device))
                };
                let (group, device) = begin().map_err(error_here)?;
                self.map_group(launched, &group, || Ok(device.clone()), f)
            }
            #[cfg(feature = "mpi")]
            _ => {
                let group =
                    MpiGroup::begin(launched, self.timeout, patience).map_err(error_here)?;
                let device = || self.devices.of(launched.local_rank());
                self.map_group(launched, &group, device, f)
            }
            #[cfg(not(feature = "mpi"))]
            other => unreachable!("{other:?} was refused"),
        }
    }

    fn map_group<T, E, F>(
        &self,
        launched: &Launched,
        group: &Arc<impl ProcessGroup>,
        device: impl Fn() -> Result<Device> + Sync,
        f: F,
    ) -> Result<T, E>
    where
        F: Fn(Rank) -> Result<T, E> + Sync,
        T: Send,
        E: Into<Box<dyn StdError + Send + Sync>> + From<WorldError> + Send,
    {
        let order = AtomicUsize::new(0);
        let outcome = self.supervise(launched.rank, group.as_ref(), &order, || {
            // Here, so that the others hear of it if there is no such device.
            let device = device().map_err(|error| self.failure_of(launched.rank, error))?;
            f(Rank::new(group.comm(), launched.local_rank(), device))
        });
        let (outcome, mut failures) = group.end(outcome);
        match outcome {
            Ok(value) if failures.is_empty() => return Ok(value),
            Ok(_) => {}
            Err(own) => failures.push(own),
        }
        // Who failed because of another one has no order of its own.
        failures.sort_by_key(|f| {
            (
                f.consequence,
                if f.consequence { 0 } else { f.order },
                f.rank,
            )
        });
        Err(E::from(WorldError {
            world_size: self.world_size,
            failures,
        }))
    }
}
