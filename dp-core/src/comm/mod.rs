//! Collectives: one object-safe trait; two backends for ranks that are threads, MPI for ranks that are processes, and NCCL for
//! both, with a GPU each.
//!
//! A collective takes a [`Buffer`] by value, works in place, and hands the same buffer back from [`Pending::wait`].
//! With `N` ranks and `x_r` the buffer of rank `r`:
//!
//! | call | every rank passes | afterwards on rank `r` |
//! |---|---|---|
//! | `all_reduce(op)` | `len` elements | `op(x_0, ..., x_{N-1})` |
//! | `reduce_scatter(op)` | `len` elements, `len % N == 0` | slice `r` holds its part of the reduction; the rest is unspecified |
//! | `all_gather` | `len` elements, `len % N == 0`, own slice `r` filled | slice `s` holds rank `s`'s slice |
//! | `broadcast(root)` | `len` elements | the root's elements |
//!
//! Slice `r` is `[r * len/N, (r+1) * len/N)`. The names and the in-place form are NCCL's.
//!
//! **The order is fixed**, but over NCCL: reductions add rank 0, 1, ..., N-1 in this order, 16-bit floats accumulate in f32 and are
//! rounded once at the end. So results are the same bits on all ranks and in all runs, whoever arrives first.
//!
//! **Mismatches are errors**: each call carries its position in the sequence, and ranks that differ in operation,
//! dtype, length, root or label all get [`Error::Mismatch`].

// Tested in every build; used where ranks talk over NCCL.
#[cfg(any(test, feature = "nccl"))]
#[cfg_attr(not(feature = "nccl"), allow(dead_code))]
mod control;
mod exchange;
#[cfg(any(test, feature = "mpi", feature = "nccl"))]
#[cfg_attr(not(any(feature = "mpi", feature = "nccl")), allow(dead_code))]
mod failures;
mod gathering;
#[cfg(feature = "mpi")]
mod mpi;
mod naive;
#[cfg(feature = "nccl")]
mod nccl;
mod pending;
#[cfg(any(feature = "mpi", feature = "nccl"))]
mod process_group;
mod reduce;
mod rendezvous;
mod shared;
mod timed;
mod traffic;

use std::fmt;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use candle_core::{DType, DeviceLocation};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::buffer::Buffer;
use crate::error::{Error, Result};

pub use gathering::Gathering;
#[cfg(feature = "mpi")]
pub(crate) use mpi::MpiGroup;
pub(crate) use naive::naive_group;
#[cfg(test)]
pub(crate) use naive::reduce_one;
#[cfg(feature = "nccl")]
pub(crate) use nccl::{NcclGroup, nccl_group, visible_gpus};
pub use pending::{Pending, PendingCollective};
#[cfg(any(feature = "mpi", feature = "nccl"))]
pub(crate) use process_group::ProcessGroup;
pub(crate) use rendezvous::{GroupControl, Patience};
pub(crate) use shared::shared_group;
pub(crate) use timed::{CommClock, TimedComm};
pub use traffic::{CollectiveTraffic, Traffic};

/// The ends of a group, in rank order, and what it is told of its ranks.
pub(crate) type Connected = (Vec<Arc<dyn Communicator>>, Arc<dyn GroupControl>);

/// How a reduction combines the ranks' values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceOp {
    /// `x_0 + ... + x_{N-1}`
    Sum,
    /// `(x_0 + ... + x_{N-1}) / N`, divided in the accumulator before the one rounding. Floats only.
    Mean,
    /// The greatest; NaN if any is NaN.
    Max,
    /// The least; NaN if any is NaN.
    Min,
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sum => write!(f, "sum"),
            Self::Mean => write!(f, "mean"),
            Self::Max => write!(f, "max"),
            Self::Min => write!(f, "min"),
        }
    }
}

/// A collective operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Collective {
    /// Reduce, result on all ranks.
    AllReduce(ReduceOp),
    /// Reduce, slice `r` of the result on rank `r`.
    ReduceScatter(ReduceOp),
    /// Slice `r` of rank `r` to all ranks.
    AllGather,
    /// The root's buffer to all ranks.
    Broadcast {
        /// The sending rank.
        root: usize,
    },
    /// Nothing but the meeting.
    Barrier,
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllReduce(op) => write!(f, "all_reduce({op})"),
            Self::ReduceScatter(op) => write!(f, "reduce_scatter({op})"),
            Self::AllGather => write!(f, "all_gather"),
            Self::Broadcast { root } => write!(f, "broadcast(root {root})"),
            Self::Barrier => write!(f, "barrier"),
        }
    }
}

/// What one rank asks for; all ranks must ask for the same.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Request {
    /// The operation.
    pub collective: Collective,
    /// What it is for, e.g. `bucket 0: w, b`. Part of the comparison between ranks and of every message.
    pub label: Arc<str>,
    /// The optimizer step that it belongs to, if ranks shall agree on it. Part of the comparison, too.
    pub step: Option<u64>,
    /// For an all_gather: the slices are read where they lie; see [`Gathering`]. Only of buffers in the host's memory.
    in_place: bool,
}

impl Request {
    /// Asks for `collective`, described by `label`.
    pub fn new(collective: Collective, label: impl Into<Arc<str>>) -> Self {
        Self {
            collective,
            label: label.into(),
            step: None,
            in_place: false,
        }
    }

    /// Says which step it belongs to.
    #[must_use]
    pub fn of_step(mut self, step: u64) -> Self {
        self.step = Some(step);
        self
    }

    /// Asks for `collective`, without a label.
    fn unlabelled(collective: Collective) -> Self {
        // Shared, since even an empty one would be allocated.
        static EMPTY: LazyLock<Arc<str>> = LazyLock::new(|| Arc::from(""));
        Self::new(collective, Arc::clone(&EMPTY))
    }

    /// The request with its data, for messages: `all_reduce(mean) of 10 f32 [bucket 0: w, b]`.
    pub(crate) fn describe(&self, dtype: DType, len: usize) -> String {
        let mut text = self.collective.to_string();
        if self.in_place {
            text.push_str(" in place");
        }
        if self.collective != Collective::Barrier {
            text.push_str(&format!(" of {len} {}", dtype.as_str()));
        }
        match self.step {
            Some(step) => text.push_str(&format!(" [step {step} of {}]", self.label)),
            None if self.label.is_empty() => {}
            None => text.push_str(&format!(" [{}]", self.label)),
        }
        text
    }

    /// Refuses what no backend can do, before anything is sent.
    pub(crate) fn validate(&self, dtype: DType, len: usize, world_size: usize) -> Result<()> {
        let fail = |message: String| {
            Err(Error::InvalidArgument {
                what: "collective",
                message: format!("{}: {message}", self.describe(dtype, len)),
            })
        };
        match self.collective {
            Collective::ReduceScatter(_) | Collective::AllGather
                if !len.is_multiple_of(world_size) =>
            {
                return fail(format!(
                    "the length must be a multiple of the {world_size} ranks; pad it"
                ));
            }
            Collective::Broadcast { root } if root >= world_size => {
                return fail(format!("the root must be below the {world_size} ranks"));
            }
            _ => {}
        }
        let averages = matches!(
            self.collective,
            Collective::AllReduce(ReduceOp::Mean) | Collective::ReduceScatter(ReduceOp::Mean)
        );
        if averages && dtype.is_int() {
            return fail(
                "an average of integers is not an integer; use sum, or floats".to_string(),
            );
        }
        Ok(())
    }
}

/// One rank's end of a group of ranks.
///
/// The provided methods on `dyn Communicator` are the calls to use; backends implement [`start`](Self::start).
/// Ranks must start the same collectives in the same order. Every wait ends by [`timeout`](Self::timeout).
pub trait Communicator: fmt::Debug + Send + Sync {
    /// This rank, `0 <= rank < world_size`.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn world_size(&self) -> usize;

    /// The longest that a wait in a collective lasts.
    fn timeout(&self) -> Duration;

    /// Joins a collective without waiting for the other ranks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for what cannot be done, [`Error::Mismatch`], [`Error::RankFailed`].
    fn start(&self, request: Request, buffer: Buffer) -> Result<Pending>;

    /// Does some of the work of collectives that all ranks have joined. Backends that progress by themselves do
    /// nothing. The trainers call it whenever a gradient appears, so that reductions go on during backward.
    fn progress(&self) {}

    /// What this rank has sent so far.
    fn traffic(&self) -> Traffic;
}

impl dyn Communicator + '_ {
    /// Reduces `buffer` over all ranks; every rank gets the result. `torch.distributed.all_reduce`.
    ///
    /// # Errors
    /// See [`Communicator::start`].
    pub fn all_reduce(&self, buffer: Buffer, op: ReduceOp) -> Result<Pending> {
        self.start(Request::unlabelled(Collective::AllReduce(op)), buffer)
    }

    /// Reduces `buffer` over all ranks; rank `r` gets slice `r`, in place. `torch.distributed.reduce_scatter_tensor`.
    ///
    /// # Errors
    /// See [`Communicator::start`]; the length must be a multiple of the world size.
    pub fn reduce_scatter(&self, buffer: Buffer, op: ReduceOp) -> Result<Pending> {
        self.start(Request::unlabelled(Collective::ReduceScatter(op)), buffer)
    }

    /// Fills each slice of `buffer` from the rank that owns it. `torch.distributed.all_gather_into_tensor`.
    ///
    /// # Errors
    /// See [`Communicator::start`]; the length must be a multiple of the world size.
    pub fn all_gather(&self, buffer: Buffer) -> Result<Pending> {
        self.start(Request::unlabelled(Collective::AllGather), buffer)
    }

    /// Lets each rank read the others' slices of `buffer`, of which each fills its own; see [`Gathering`]. `label` says what it
    /// is, as in a [`Request`].
    ///
    /// # Errors
    /// See [`Communicator::start`]; the length must be a multiple of the world size.
    pub fn all_gather_reading(
        &self,
        buffer: Buffer,
        label: impl Into<Arc<str>>,
    ) -> Result<Gathering> {
        let mut request = Request::new(Collective::AllGather, label);
        request.in_place = buffer.location() == DeviceLocation::Cpu;
        let (rank, world_size) = (self.rank(), self.world_size());
        Ok(Gathering::new(
            self.start(request, buffer)?,
            rank,
            world_size,
        ))
    }

    /// Copies the buffer of `root` to all ranks. `torch.distributed.broadcast`.
    ///
    /// # Errors
    /// See [`Communicator::start`].
    pub fn broadcast(&self, buffer: Buffer, root: usize) -> Result<Pending> {
        self.start(Request::unlabelled(Collective::Broadcast { root }), buffer)
    }

    /// Returns when all ranks have called it. `torch.distributed.barrier`.
    ///
    /// # Errors
    /// See [`Communicator::start`] and [`Pending::wait`].
    pub fn barrier(&self) -> Result<()> {
        let nothing = Buffer::from_vec::<u8>(Vec::new());
        self.start(Request::unlabelled(Collective::Barrier), nothing)?
            .wait()
            .map(drop)
    }

    /// Gives every rank the values of all ranks, in rank order. `torch.distributed.all_gather_object`.
    ///
    /// The values travel as JSON, so floats keep their bits, but NaN and infinities do not arrive. `label` says what they
    /// are, for messages; it must be the same on all ranks.
    ///
    /// ```
    /// # fn main() -> dp_core::Result<()> {
    /// dp_core::World::threads(3)?.run(|rank| {
    ///     let names: Vec<String> = rank.comm().all_gather_object(&format!("rank {}", rank.rank()), "names")?;
    ///     assert_eq!(names, ["rank 0", "rank 1", "rank 2"]);
    ///     Ok(())
    /// })
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for what is not JSON or no `T`; see [`Communicator::start`] and [`Pending::wait`].
    pub fn all_gather_object<T: DeserializeOwned>(
        &self,
        mine: &impl Serialize,
        label: &str,
    ) -> Result<Vec<T>> {
        let wrong = |e| Error::invalid("JSON", format!("{label}: {e}"));
        let mine = serde_json::to_vec(mine).map_err(wrong)?;
        let all = self.all_gather_bytes(&mine, label)?;
        all.iter()
            .map(|text| serde_json::from_slice(text).map_err(wrong))
            .collect()
    }

    /// Gives every rank the byte strings of all ranks, in rank order; they may differ in length.
    ///
    /// # Errors
    /// See [`Communicator::start`] and [`Pending::wait`].
    pub fn all_gather_bytes(&self, mine: &[u8], label: &str) -> Result<Vec<Vec<u8>>> {
        let (rank, n) = (self.rank(), self.world_size());
        let mut lengths = vec![0i64; n];
        lengths[rank] = mine.len() as i64;
        let request = Request::new(Collective::AllGather, format!("{label}: lengths"));
        let lengths = self.start(request, Buffer::from_vec(lengths))?.wait()?;
        let lengths: Vec<usize> = lengths
            .as_slice::<i64>()?
            .iter()
            .map(|l| *l as usize)
            .collect();
        let slot = lengths.iter().copied().max().unwrap_or(0);
        let mut all = vec![0u8; slot * n];
        all[rank * slot..][..mine.len()].copy_from_slice(mine);
        let all = self
            .start(
                Request::new(Collective::AllGather, label),
                Buffer::from_vec(all),
            )?
            .wait()?;
        let all = all.as_slice::<u8>()?;
        Ok(lengths
            .iter()
            .enumerate()
            .map(|(r, len)| all[r * slot..][..*len].to_vec())
            .collect())
    }
}
