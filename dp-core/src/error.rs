//! Typed errors. Every variant says which rank, which operation or which parameter, and what to do.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::checkpoint::CheckpointProblem;
use crate::world_error::WorldError;

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong in a data-parallel run.
///
/// The error is cheap to clone, because one failure is reported by every rank that was waiting for it.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another rank panicked or returned an error; this rank could not go on without it.
    #[error("rank {failed} failed, so rank {rank} cannot complete {operation}: {reason}")]
    RankFailed {
        /// The rank that reports this error.
        rank: usize,
        /// The rank that failed first.
        failed: usize,
        /// What the reporting rank was doing, e.g. `all_reduce(sum) of 10 f32 [bucket 0: w, b]`.
        operation: String,
        /// The failed rank's own message.
        reason: String,
    },

    /// Another rank's closure returned while this rank still waits for it in a collective.
    #[error(
        "rank {left} finished after {left_seq} collectives, but rank {rank} waits for it in collective number {seq}, \
         {operation}; every rank must call the same collectives"
    )]
    RankLeft {
        /// The rank that reports this error.
        rank: usize,
        /// The rank that has finished.
        left: usize,
        /// How many collectives the finished rank had called.
        left_seq: u64,
        /// Position of the collective in the sequence of this communicator, from 0.
        seq: u64,
        /// The collective the reporting rank waits in.
        operation: String,
    },

    /// A wait passed its deadline.
    #[error(
        "rank {rank} waited {waited:?} in collective number {seq}, {operation}; {}; look for a rank that is stuck or much \
         slower, or raise the timeout of the World",
        awaited(missing)
    )]
    Timeout {
        /// The rank that reports this error.
        rank: usize,
        /// Position of the collective in the sequence of this communicator, from 0.
        seq: u64,
        /// The collective.
        operation: String,
        /// The ranks that had not joined; empty if all had, and the work was not done.
        missing: Vec<usize>,
        /// How long the reporting rank waited.
        waited: Duration,
    },

    /// Two ranks called different collectives at the same position of the sequence.
    #[error(
        "collective number {seq} differs between ranks: rank {rank_a} called {operation_a}, rank {rank_b} called \
         {operation_b}; every rank must call the same collectives with the same dtype, length and root"
    )]
    Mismatch {
        /// Position of the collective in the sequence of this communicator, from 0.
        seq: u64,
        /// The rank that came first.
        rank_a: usize,
        /// What it called.
        operation_a: String,
        /// The rank whose call differs.
        rank_b: usize,
        /// What that one called.
        operation_b: String,
    },

    /// The ranks hold different models.
    #[error("the model of rank {rank} differs from rank 0's at parameter `{parameter}`: {detail}")]
    ReplicaMismatch {
        /// The first parameter that differs, in rank 0's creation order.
        parameter: String,
        /// The rank that differs from rank 0.
        rank: usize,
        /// Both sides of the difference.
        detail: String,
    },

    /// The ranks held the same parameters once, and do not any more.
    #[error(
        "after step {step} parameter `{parameter}` of rank {rank} differs from rank 0's; something has changed it on some \
         ranks only, e.g. code that writes parameters, or a learning rate that is not the same everywhere"
    )]
    Diverged {
        /// The first parameter that differs, in rank 0's creation order.
        parameter: String,
        /// The first rank that differs from rank 0 in it.
        rank: usize,
        /// The number of steps taken when it was found.
        step: u64,
    },

    /// A 16-bit parameter is not its f32 master rounded: something other than the trainer has written it.
    #[error(
        "parameter `{parameter}` was changed since the last step, but not through the trainer, so its f32 master is another \
         one; to keep the change, call refresh_masters on all ranks, or use set_parameter or import_safetensors instead"
    )]
    Altered {
        /// The first such parameter in rank 0's creation order.
        parameter: String,
    },

    /// Parameters that should be trained got no gradient on any rank, and the trainer was told to be strict.
    #[error(
        "no rank computed a gradient for: {}; freeze them (ParamStore::with_frozen) if they should not be trained, else \
         look for a candle_nn op without backward between them and the loss (LayerNorm and RmsNorm on contiguous input, \
         softmax_last_dim, rope)",
        names.join(", ")
    )]
    NoGradient {
        /// The parameters, in rank 0's creation order.
        names: Vec<String>,
    },

    /// An argument or setting is out of its range.
    #[error("invalid {what}: {message}")]
    InvalidArgument {
        /// The argument or setting.
        what: &'static str,
        /// What is wrong, and what is accepted.
        message: String,
    },

    /// The dtype is not supported by this operation.
    #[error("{what} does not support dtype {dtype}; supported: {supported}")]
    UnsupportedDType {
        /// The operation or parameter.
        what: String,
        /// The dtype that was given.
        dtype: &'static str,
        /// The dtypes that work.
        supported: &'static str,
    },

    /// Something is wrong with one parameter.
    #[error("parameter `{name}`: {message}")]
    Parameter {
        /// The parameter's full name.
        name: String,
        /// What is wrong, and what to do.
        message: String,
    },

    /// Calls came in an order that has no meaning.
    #[error("{call}: {message}")]
    Misuse {
        /// The call.
        call: &'static str,
        /// Why it cannot work now, and what to do.
        message: String,
    },

    /// The environment describes a multi-process job that this build cannot join.
    #[error("environment variable {variable}={value}: {message}")]
    Environment {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
        /// Why it stops the run.
        message: String,
    },

    /// The ranks that a launcher has started as processes have not come together.
    #[error("rank {rank} cannot meet the other ranks at {address}: {message}")]
    Rendezvous {
        /// The rank that reports this error.
        rank: usize,
        /// Host and port where rank 0 listens.
        address: String,
        /// Why, and what to do.
        message: String,
    },

    /// A call of the MPI library failed.
    #[error("rank {rank}: {call} failed: {message}")]
    Mpi {
        /// The rank that reports this error.
        rank: usize,
        /// The function of MPI.
        call: &'static str,
        /// The library's own message.
        message: String,
    },

    /// A call of the NCCL library failed, or NCCL has found that a connection is broken.
    #[error("rank {rank}: {call} failed: {message}")]
    Nccl {
        /// The rank that reports this error.
        rank: usize,
        /// The function of NCCL, or `NCCL` for what it has found by itself.
        call: &'static str,
        /// The library's own message.
        message: String,
    },

    /// A call of the CUDA driver failed, or a kernel was not compiled.
    #[error("CUDA device {device}: {call} failed: {message}")]
    Cuda {
        /// The device's number.
        device: usize,
        /// The driver's function, or `NVRTC`.
        call: &'static str,
        /// The driver's own message, or the compiler's log.
        message: String,
    },

    /// Reading or writing a file failed.
    #[error("{}: {message}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        message: String,
    },

    /// A checkpoint or a file of weights cannot be saved or loaded. The same error on all ranks. The previous checkpoint is
    /// as it was, and so is the trainer, unless a disk has failed after all checks of a load: then it refuses to train.
    #[error("{}{}: {message}", of_rank(*rank), path.display())]
    Checkpoint {
        /// The rank that met the problem; `None` outside of a trainer.
        rank: Option<usize>,
        /// The file or folder.
        path: PathBuf,
        /// What kind of problem.
        problem: CheckpointProblem,
        /// What is wrong, and what to do.
        message: String,
    },

    /// One or several ranks of a [`crate::World`] failed.
    #[error(transparent)]
    World(Arc<WorldError>),

    /// An error of Candle.
    #[error("candle: {0}")]
    Candle(Arc<candle_core::Error>),
}

impl Error {
    /// True if no collective can succeed after this error.
    pub(crate) fn ends_the_group(&self) -> bool {
        matches!(
            self,
            Self::RankFailed { .. }
                | Self::RankLeft { .. }
                | Self::Timeout { .. }
                | Self::Mismatch { .. }
                | Self::Mpi { .. }
                | Self::Cuda { .. }
                | Self::Nccl { .. }
        )
    }

    /// Shorthand for [`Error::InvalidArgument`].
    pub fn invalid(what: &'static str, message: impl fmt::Display) -> Self {
        Self::InvalidArgument {
            what,
            message: message.to_string(),
        }
    }

    /// Shorthand for [`Error::Misuse`].
    pub fn misuse(call: &'static str, message: impl fmt::Display) -> Self {
        Self::Misuse {
            call,
            message: message.to_string(),
        }
    }

    /// Shorthand for [`Error::Cuda`].
    #[cfg(feature = "cuda")]
    pub(crate) fn cuda(device: usize, call: &'static str, message: impl fmt::Display) -> Self {
        Self::Cuda {
            device,
            call,
            message: message.to_string(),
        }
    }

    /// Shorthand for [`Error::Parameter`].
    pub fn parameter(name: &str, message: impl fmt::Display) -> Self {
        Self::Parameter {
            name: name.to_string(),
            message: message.to_string(),
        }
    }
}

impl From<candle_core::Error> for Error {
    fn from(e: candle_core::Error) -> Self {
        Self::Candle(Arc::new(e))
    }
}

impl From<Error> for candle_core::Error {
    fn from(e: Error) -> Self {
        candle_core::Error::wrap(e)
    }
}

impl From<WorldError> for Error {
    fn from(e: WorldError) -> Self {
        Self::World(Arc::new(e))
    }
}

impl From<WorldError> for candle_core::Error {
    fn from(e: WorldError) -> Self {
        candle_core::Error::wrap(e)
    }
}

fn of_rank(rank: Option<usize>) -> String {
    rank.map_or(String::new(), |r| format!("rank {r}: "))
}

fn awaited(missing: &[usize]) -> String {
    if missing.is_empty() {
        return "all ranks are there, but the work on it is not done".to_string();
    }
    let ranks: Vec<String> = missing.iter().map(usize::to_string).collect();
    format!("not there: rank {}", ranks.join(", "))
}
