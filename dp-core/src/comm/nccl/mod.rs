//! Ranks with a GPU each, over NCCL: threads of one process, or processes on any number of hosts.
//!
//! Data goes over NCCL ([`library`]), everything else over the control channel (`comm/control`): how the ranks find each
//! other, whether they call the same collectives, how they end. A result is given back when both are through with it: NCCL with
//! the numbers, and the control channel with the word that all ranks meant the same. Whoever waits looks at both, and at
//! NCCL's own errors, until the deadline. After a failure no collective begins; the communicator is aborted at the end of the run,
//! when all ranks have been told, and until then Candle's stream goes on, which never waits for NCCL's.
//!
//! Buffers on this rank's GPU are reduced in place. Buffers of the host are for small things, such as the summary of a step:
//! they are copied to the GPU and back.
//!
//! **Sums are NCCL's**: their order depends on algorithm, topology and length, so they differ from those of threads in the last bits, and
//! sums of 16-bit numbers are rounded where NCCL does it. `Mean` is `ncclAvg`, and all ranks get the same bits.
//!
//! **Barriers** are meetings over the control channel, and say nothing of what GPUs have done.
//!
//! **Starting** waits for other ranks in one case: NCCL connects ranks when an algorithm is first used, and takes the next call only
//! after that. This wait has the deadline, too.
//!
//! `ncclGroupStart` is used where one thread makes the communicators of several ranks. Collectives need no group: each one is one call
//! per rank, and buckets are what gathers small ones.
//!
//! Bytes sent are counted by formula, those of the best ring: what NCCL really sends it does not say.

mod library;
mod session;
mod work;

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::control::Control;
use super::rendezvous::{GroupControl, Patience};
use super::traffic::{TrafficCounters, bytes_sent};
use super::{Collective, Communicator, Pending, PendingCollective, Request, Traffic};
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use library::{Library, Progress};
pub(crate) use session::{NcclGroup, nccl_group, visible_gpus};
use work::{Streams, Work};

/// One rank's end of a group over NCCL.
struct NcclRank {
    control: Control,
    library: Library,
    streams: Streams,
    patience: Patience,
    traffic: TrafficCounters,
    /// Work whose `Pending` was dropped: its memory is in use until it is done.
    abandoned: Mutex<Vec<Work>>,
}

impl NcclRank {
    /// Looks again and again until `done`, as long as `hope` has no error.
    fn poll(
        &self,
        mut done: impl FnMut() -> Result<bool>,
        hope: impl Fn() -> Result<()>,
    ) -> Result<()> {
        /// Short against any collective over a network, and long against a look.
        const NAP: Duration = Duration::from_micros(20);
        let begin = Instant::now();
        loop {
            // First of all: what is done is done, whatever has failed since.
            if done()? {
                return Ok(());
            }
            hope()?;
            let waited = begin.elapsed();
            if waited < self.patience.spin {
                std::hint::spin_loop();
            } else if waited < self.patience.poll {
                std::thread::yield_now();
            } else {
                std::thread::sleep(NAP);
            }
        }
    }

    /// Fails if collective `seq` has no hope: for its ranks, by its deadline, or by what NCCL has found.
    fn check(&self, seq: u64, operation: &str, start: Instant) -> Result<()> {
        self.control.check(seq, operation, start)?;
        self.library.progress().map(drop)
    }

    /// No collective goes on after `error`.
    fn fail(&self, error: Error) -> Error {
        self.control.close(error.clone());
        error
    }

    fn start(&self, request: &Request, buffer: Buffer, operation: &str, seq: u64) -> Result<Work> {
        let start = Instant::now();
        self.sweep();
        let n = self.control.world_size();
        let settle = || {
            self.poll(
                || Ok(self.library.progress()? == Progress::Done),
                || self.control.check(seq, operation, start),
            )
        };
        let sent = bytes_sent(
            request.collective,
            self.control.rank(),
            n,
            buffer.len(),
            buffer.dtype().size_in_bytes(),
        );
        let work = self
            .streams
            .start(&self.library, request, buffer, n, &settle)
            .map_err(|failure| {
                let (error, work) = *failure;
                self.abandoned.lock().extend(work);
                error
            })?;
        self.traffic.sent(request.collective, sent);
        Ok(work)
    }

    /// Frees the memory of dropped collectives that are done.
    fn sweep(&self) {
        // One that cannot be asked any more stays until the communicator is aborted.
        let under_way = |work: &Work| !work.is_done().unwrap_or(false);
        self.abandoned.lock().retain(under_way);
    }

    /// Waits for collectives that nobody has waited for: other ranks may.
    fn drain(&self) -> Result<()> {
        let start = Instant::now();
        let operation = "the end of the run, with collectives that nobody has waited for";
        let done = || {
            self.sweep();
            Ok(self.abandoned.lock().is_empty())
        };
        let seq = self.control.num_joined();
        // Nobody joins this number, so only failures and the deadline end the wait.
        let hope = || match seq {
            0 => Ok(()),
            seq => self.check(seq - 1, operation, start),
        };
        self.poll(done, hope)
    }
}

impl Drop for NcclRank {
    fn drop(&mut self) {
        // Before the memory of what is under way is freed.
        if !self.library.abort() {
            std::mem::forget(std::mem::take(self.abandoned.get_mut()));
        }
    }
}

/// This rank's communicator.
#[derive(Clone)]
struct NcclComm(Arc<NcclRank>);

impl fmt::Debug for NcclComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NcclComm")
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .field("gpu", &self.0.streams.ordinal())
            .finish()
    }
}

impl Communicator for NcclComm {
    fn rank(&self) -> usize {
        self.0.control.rank()
    }

    fn world_size(&self) -> usize {
        self.0.control.world_size()
    }

    fn timeout(&self) -> Duration {
        self.0.control.timeout()
    }

    fn start(&self, request: Request, buffer: Buffer) -> Result<Pending> {
        let (dtype, len) = (buffer.dtype(), buffer.len());
        request.validate(dtype, len, self.world_size())?;
        self.0.traffic.called(request.collective);
        let operation = request.describe(dtype, len);
        // In this order: a failure has its own words.
        self.0.control.check_open(&operation)?;
        // Also for a barrier, which NCCL has no part in.
        self.0.library.check_open()?;
        let seq = self.0.control.join(&operation)?;
        let state = if len == 0 || request.collective == Collective::Barrier {
            State::Nothing(buffer)
        } else {
            let work = self.0.start(&request, buffer, &operation, seq);
            State::Work(work.map_err(|e| self.0.fail(e))?)
        };
        Ok(Pending::new(NcclPending {
            rank: Arc::clone(&self.0),
            seq,
            operation,
            state: Some(state),
            completed_at: Cell::new(None),
        }))
    }

    /// NCCL needs no help; what is done of dropped collectives is freed.
    fn progress(&self) {
        self.0.sweep();
    }

    fn traffic(&self) -> Traffic {
        self.0.traffic.read()
    }
}

/// One rank's handle on a collective under way.
struct NcclPending {
    rank: Arc<NcclRank>,
    seq: u64,
    operation: String,
    /// `None` once it is waited for.
    state: Option<State>,
    completed_at: Cell<Option<Instant>>,
}

enum State {
    Work(Work),
    /// There is nothing to move.
    Nothing(Buffer),
}

impl NcclPending {
    fn look(&self) -> Result<bool> {
        if self.completed_at.get().is_some() {
            return Ok(true);
        }
        let moved = match &self.state {
            // In this order: an abort ends kernels early, and the event comes then, too.
            Some(State::Work(work)) => work.is_done()? && !self.rank.library.is_aborted(),
            Some(State::Nothing(_)) | None => true,
        };
        let done = moved && self.rank.control.has_agreed(self.seq);
        if done {
            self.completed_at.set(Some(Instant::now()));
        }
        Ok(done)
    }
}

impl PendingCollective for NcclPending {
    fn is_done(&self) -> bool {
        // With an error, too.
        self.look().unwrap_or(true) || self.rank.control.is_closed()
    }

    fn wait(mut self: Box<Self>) -> Result<Buffer> {
        let (rank, start) = (&self.rank, Instant::now());
        let waited = match &self.state {
            Some(State::Work(_)) => rank.poll(
                || self.look(),
                || rank.check(self.seq, &self.operation, start),
            ),
            // The other ranks alone are waited for.
            _ => rank.control.wait(self.seq, &self.operation),
        };
        waited.map_err(|e| self.rank.fail(e))?;
        match self.state.take() {
            Some(State::Work(work)) => self.rank.streams.finish(work),
            Some(State::Nothing(buffer)) => Ok(buffer),
            None => unreachable!("a Pending is waited for once"),
        }
    }

    /// When this rank first saw it, which the trainers' calls of `is_done` make early.
    fn completed_at(&self) -> Option<Instant> {
        self.completed_at.get()
    }
}

impl Drop for NcclPending {
    fn drop(&mut self) {
        if let Some(State::Work(work)) = self.state.take() {
            self.rank.abandoned.lock().push(work);
        }
    }
}

impl GroupControl for NcclGroup {
    // Both are told by `end`, with all that is known of the failure.
    fn rank_failed(&self, _: usize, _: String) {}
    fn rank_left(&self, _: usize) {}

    fn was_told(&self, _: usize) -> bool {
        self.control().was_told()
    }
}
