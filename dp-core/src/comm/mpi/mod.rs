//! Ranks as processes over MPI.
//!
//! Collectives are made of non-blocking messages between two ranks, and sums are computed here: in rank order, as threads do
//! it, so that results are the same bits. `MPI_Allreduce` promises neither an order nor f32 sums of 16-bit numbers.
//! `transfer.rs` says who sends what; each rank sends as few bytes as the best ring algorithm.
//!
//! No call blocks. A wait looks again and again, lending its core to others in between, until its deadline. There is no
//! thread that communicates: messages go on whenever this rank calls its communicator, and the trainers do so whenever a
//! gradient appears.
//!
//! Memory beside the buffers: [`staging`] has at most 4 rows of 2 MiB up to 129 ranks, which no ledger counts.
//!
//! How a run ends: each rank tells all others how its closure ended. So everyone's [`WorldError`](crate::WorldError) has the
//! message of the rank that failed. A process that is killed tells nobody; the launcher ends the others, and where it
//! does not, they end by their deadline.

mod channel;
mod engine;
mod message;
mod moves;
mod peers;
mod session;
mod staging;
mod transfer;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::DeviceLocation;
use parking_lot::Mutex;

use super::failures::RemoteFailure;
use super::rendezvous::{GroupControl, Patience};
use super::traffic::TrafficCounters;
use super::{Communicator, Pending, PendingCollective, ProcessGroup, Request, Traffic};
use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::launcher::Launched;
use crate::world_error::{Cause, RankError};
use engine::Engine;

/// This process' rank in one run over MPI.
pub(crate) struct MpiGroup {
    rank: usize,
    world_size: usize,
    timeout: Duration,
    patience: Patience,
    traffic: Arc<TrafficCounters>,
    /// `None` when the run has ended.
    engine: Mutex<Option<Engine>>,
}

impl MpiGroup {
    /// Begins a run. The first one initialises MPI, which waits for all ranks, up to `timeout`.
    ///
    /// # Errors
    /// [`Error::Misuse`] while there is another run, and after one that failed; [`Error::Environment`] if MPI and launcher
    /// disagree; [`Error::Mpi`].
    pub fn begin(launched: &Launched, timeout: Duration, patience: Patience) -> Result<Arc<Self>> {
        let (channel, mail) = session::begin(launched, timeout)?;
        let traffic = Arc::<TrafficCounters>::default();
        let engine = Engine::new(channel, mail, Arc::clone(&traffic))?;
        Ok(Arc::new(Self {
            rank: launched.rank,
            world_size: launched.world_size,
            timeout,
            patience,
            traffic,
            engine: Mutex::new(Some(engine)),
        }))
    }

    fn with_engine<R>(&self, f: impl FnOnce(&mut Engine) -> Result<R>) -> Result<R> {
        match self.engine.lock().as_mut() {
            Some(engine) => f(engine),
            None => Err(Error::misuse(
                "a collective",
                "the run of its World has ended; call collectives in the closure only",
            )),
        }
    }

    /// Calls `look` after each poll, until it has a result.
    fn wait_until<R>(&self, mut look: impl FnMut(&mut Engine) -> Result<Option<R>>) -> Result<R> {
        const LONGEST: Duration = Duration::from_millis(1);
        let mut idle_since = Instant::now();
        let mut nap = Duration::from_micros(50);
        loop {
            let progressed = {
                let mut engine = self.engine.lock();
                let Some(engine) = engine.as_mut() else {
                    return self.with_engine(|_| unreachable!("there is no engine"));
                };
                let progressed = engine.poll();
                // First of all: what is done is done, whatever has failed since.
                if let Some(result) = look(engine)? {
                    return Ok(result);
                }
                progressed?
            };
            if progressed {
                (idle_since, nap) = (Instant::now(), Duration::from_micros(50));
                continue;
            }
            let idle = idle_since.elapsed();
            if idle < self.patience.spin {
                std::hint::spin_loop();
            } else if idle < self.patience.poll {
                std::thread::yield_now();
            } else {
                std::thread::sleep(nap);
                nap = (2 * nap).min(LONGEST);
            }
        }
    }

    fn own_failure(&self, error: Error) -> RankError {
        RankError {
            rank: self.rank,
            consequence: self.was_told(self.rank),
            cause: Cause::Error(error.into()),
            order: 0,
        }
    }

    /// Waits for the collectives that nobody has waited for: other ranks may.
    fn drain(&self) -> Result<()> {
        let mut last = None;
        let mut start = Instant::now();
        self.wait_until(|engine| {
            let Some(seq) = engine.first_unfinished() else {
                return Ok(Some(()));
            };
            if last.replace(seq) != Some(seq) {
                start = Instant::now();
            }
            engine.check(seq, start, self.timeout).map(|()| None)
        })
    }

    /// Tells all how this rank has ended, and waits until they have, too.
    fn part(&self, failure: Option<&RankError>) -> Result<()> {
        let failure = failure.map(RemoteFailure::of);
        self.with_engine(|engine| engine.end(failure))?;
        let start = Instant::now();
        self.wait_until(|engine| {
            let missing = engine.running();
            if missing.is_empty() && engine.has_told() {
                return Ok(Some(()));
            }
            if start.elapsed() < self.timeout {
                return Ok(None);
            }
            Err(Error::Timeout {
                rank: self.rank,
                seq: engine.num_joined(),
                operation: "the end of the run".to_string(),
                missing,
                waited: start.elapsed(),
            })
        })
    }
}

impl ProcessGroup for MpiGroup {
    fn comm(self: &Arc<Self>) -> Arc<dyn Communicator> {
        Arc::new(MpiComm(Arc::clone(self)))
    }

    fn end<T>(&self, outcome: Result<T, RankError>) -> (Result<T, RankError>, Vec<RankError>) {
        let mut outcome = outcome.and_then(|value| {
            self.drain().map_err(|e| self.own_failure(e))?;
            Ok(value)
        });
        if let Err(error) = self.part(outcome.as_ref().err())
            && outcome.is_ok()
        {
            outcome = Err(self.own_failure(error));
        }
        let Some(engine) = self.engine.lock().take() else {
            return (outcome, Vec::new());
        };
        let others = engine
            .failures()
            .into_iter()
            .map(|(rank, failure, order)| failure.into_rank_error(rank, order));
        let others: Vec<RankError> = others.collect();
        if outcome.is_ok() && others.is_empty() && engine.is_clean() {
            let (channel, mail) = engine.into_channel();
            session::end(channel, mail);
        } else {
            session::fail(engine.all_ended().then_some(self.timeout));
        }
        (outcome, others)
    }
}

impl GroupControl for MpiGroup {
    // Both are told by `end`, with all that is known of the failure.
    fn rank_failed(&self, _: usize, _: String) {}
    fn rank_left(&self, _: usize) {}

    fn was_told(&self, _: usize) -> bool {
        self.engine.lock().as_ref().is_some_and(Engine::was_told)
    }
}

/// This rank's end of a group over MPI.
struct MpiComm(Arc<MpiGroup>);

impl fmt::Debug for MpiComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MpiComm")
            .field("rank", &self.0.rank)
            .field("world_size", &self.0.world_size)
            .finish()
    }
}

impl Communicator for MpiComm {
    fn rank(&self) -> usize {
        self.0.rank
    }

    fn world_size(&self) -> usize {
        self.0.world_size
    }

    fn timeout(&self) -> Duration {
        self.0.timeout
    }

    fn start(&self, request: Request, buffer: Buffer) -> Result<Pending> {
        request.validate(buffer.dtype(), buffer.len(), self.0.world_size)?;
        if buffer.location() != DeviceLocation::Cpu {
            let message = "MPI moves buffers of the host's memory only, and this one is on a GPU; ranks with a GPU each talk \
                           over NCCL";
            return Err(Error::invalid("buffer", message));
        }
        let seq = self
            .0
            .with_engine(|engine| engine.start(&request, buffer))?;
        Ok(Pending::new(MpiPending {
            group: Arc::clone(&self.0),
            seq,
        }))
    }

    fn progress(&self) {
        // An error stays in the engine, for the next wait.
        let _ = self.0.with_engine(Engine::poll);
    }

    fn traffic(&self) -> Traffic {
        self.0.traffic.read()
    }
}

/// One rank's handle on a collective under way.
struct MpiPending {
    group: Arc<MpiGroup>,
    seq: u64,
}

impl PendingCollective for MpiPending {
    fn is_done(&self) -> bool {
        let engine = self.group.engine.lock();
        engine
            .as_ref()
            .is_none_or(|e| e.is_closed() || e.completed_at(self.seq).is_some())
    }

    fn wait(self: Box<Self>) -> Result<Buffer> {
        let start = Instant::now();
        self.group.wait_until(|engine| {
            if let Some(buffer) = engine.take_if_done(self.seq) {
                return Ok(Some(buffer));
            }
            engine
                .check(self.seq, start, self.group.timeout)
                .map(|()| None)
        })
    }

    fn completed_at(&self) -> Option<Instant> {
        self.group.engine.lock().as_ref()?.completed_at(self.seq)
    }
}

impl Drop for MpiPending {
    fn drop(&mut self) {
        if let Some(engine) = self.group.engine.lock().as_mut() {
            engine.detach(self.seq);
        }
    }
}
