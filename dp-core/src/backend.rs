//! How ranks talk.

#[cfg(feature = "nccl")]
use candle_core::Device;

use crate::error::{Error, Result};
#[cfg(any(feature = "mpi", feature = "nccl"))]
use crate::launcher::{Launched, Launcher};

/// How the ranks of a [`World`](crate::World) talk to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Backend {
    /// Threads of one process over shared memory: the default. Where ranks are processes, [`Nccl`](Self::Nccl) takes its place
    /// in a build with the feature `nccl`, else [`Mpi`](Self::Mpi).
    #[default]
    SharedMemory,
    /// Threads of one process over the slow, obvious implementation, to check the other one against.
    Naive,
    /// Processes over MPI, on the CPU. Needs the feature `mpi`.
    Mpi,
    /// Processes, or threads of one process, with a GPU each, over NCCL. Needs the feature `nccl`.
    ///
    /// Threads get GPUs 0, 1, 2, ..., and processes the GPU of their `LOCAL_RANK`, or the only one that they see, unless
    /// [`with_devices`](crate::World::with_devices) says otherwise.
    Nccl,
}

impl Backend {
    /// The backend that processes talk over.
    ///
    /// # Errors
    /// [`Error::Environment`], [`Error::Misuse`] if this build or this launcher has no such backend.
    #[cfg(any(feature = "mpi", feature = "nccl"))]
    pub(crate) fn of_processes(self, launched: &Launched) -> Result<Self> {
        let chosen = match self {
            Self::SharedMemory if cfg!(feature = "nccl") => Self::Nccl,
            Self::SharedMemory => Self::Mpi,
            Self::Naive => {
                let message = "Naive is a backend for threads, but this process is a rank of several; leave the backend as it is";
                return Err(Error::misuse("World::run", message));
            }
            chosen => chosen,
        };
        chosen.check_built()?;
        if chosen == Self::Mpi && launched.launcher == Launcher::Torchrun {
            return Err(launched.refused(format!(
                "MPI cannot connect processes that {} has started; start them by mpirun",
                launched.launcher
            )));
        }
        Ok(chosen)
    }

    /// Refuses what this build does not have.
    ///
    /// # Errors
    /// [`Error::Misuse`].
    pub(crate) fn check_built(self) -> Result<()> {
        let missing = match self {
            Self::Mpi if !cfg!(feature = "mpi") => "mpi",
            Self::Nccl if !cfg!(feature = "nccl") => "nccl",
            _ => return Ok(()),
        };
        let message = format!(
            "this build has no {self:?}; build with the feature `{missing}` (cargo build --release --workspace --features \
             dp-core/{missing})"
        );
        Err(Error::misuse("World::with_backend", message))
    }
}

/// The device of a process over NCCL that has not been given one.
///
/// # Errors
/// [`Error::Environment`] if there is no such GPU.
#[cfg(feature = "nccl")]
pub(crate) fn own_gpu(launched: &Launched) -> Result<Device> {
    let visible = crate::comm::visible_gpus()?;
    let local_rank = launched.local_rank();
    // Slurm can show each process its own GPU alone, as number 0. Ranks that share one find out when they meet.
    let ordinal = if visible == 1 { 0 } else { local_rank };
    if ordinal >= visible {
        return Err(launched.local_rank_refused(format!(
            "this process sees {visible} GPUs, so there is none for it; start one process per GPU (torchrun --nproc-per-node, \
             mpirun --map-by ppr:N:node, srun --ntasks-per-node), or look at CUDA_VISIBLE_DEVICES"
        )));
    }
    crate::devices::Devices::Cuda(vec![ordinal]).of(0)
}
