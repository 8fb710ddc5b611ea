//! How ranks over NCCL meet, and what they tell each other beside the data: a TCP connection of every rank to rank 0.
//!
//! NCCL moves numbers, and nothing else. It does not find the other ranks, does not compare what they ask for, and waits for
//! ever for one that is gone. So:
//!
//! - *Meeting.* Rank 0 listens, the others [knock](knock), until all are there ([`listen`]). Who belongs to another job, comes
//!   twice, or counts another world size, is named.
//! - *Agreement.* Each rank tells rank 0 which collective it joins, and goes on. Rank 0 tells all when every rank has joined the
//!   same one, or what differs ([`coordinator`]). A result is taken only after that word.
//! - *Failures.* A rank tells how its closure has ended. One that dies says nothing, but its connection breaks. All others
//!   know at once.
//!
//! Messages are a few hundred bytes, one per rank and collective each way. Ranks that are threads of one process do the same
//! without TCP.
//!
//! Threads: rank 0 has one for each other process, each other process has one. They read, and end when the connection does.
//!
//! The connections are neither encrypted nor authenticated, as those of NCCL and of PyTorch's store: for trusted networks.

mod coordinator;
mod frame;
mod knock;
mod lines;
mod listen;
mod place;
mod protocol;
#[cfg(test)]
mod tests;
mod view;

use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::failures::RemoteFailure;
use crate::error::{Error, Result};
use crate::world_error::RankError;
use coordinator::{Coordinator, Outlet};
use lines::{Line, Lines};
pub(crate) use place::Place;
pub(crate) use protocol::Hello;
use protocol::Report;
use view::View;

/// How long a rank that has passed its deadline waits for rank 0 to say who is missing.
const LAST_WORD: Duration = Duration::from_secs(5);

/// One rank's end of the control channel, for one run.
#[derive(Debug)]
pub(crate) struct Control {
    rank: usize,
    world_size: usize,
    timeout: Duration,
    view: Arc<View>,
    /// Locked while a collective is reported, so that reports come in the order of their numbers.
    num_joined: Mutex<u64>,
    link: Link,
}

#[derive(Debug)]
enum Link {
    /// To the coordinator in this process; rank 0 keeps its lines to the others here.
    Here(
        Arc<Coordinator>,
        #[allow(dead_code, reason = "held")] Option<Lines>,
    ),
    There(Line),
}

impl Control {
    /// For ranks that are threads of this process.
    pub fn in_process(world_size: usize, timeout: Duration) -> Vec<Self> {
        let views: Vec<Arc<View>> = (0..world_size)
            .map(|rank| Arc::new(View::new(rank, world_size)))
            .collect();
        let coordinator = Coordinator::new(views.iter().cloned().map(Outlet::Here));
        let ends = views.into_iter().enumerate();
        ends.map(|(rank, view)| {
            let link = Link::Here(Arc::clone(&coordinator), None);
            Self::new(rank, world_size, timeout, view, link)
        })
        .collect()
    }

    /// Meets the ranks of other processes at `place`, and returns with what rank 0 has for all, once all have come.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] after `timeout`, and as soon as it is known that they cannot meet; what `payload` says, which only
    /// rank 0 calls.
    pub fn meet(
        place: &Place,
        hello: &Hello,
        timeout: Duration,
        payload: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<(Self, Vec<u8>)> {
        let deadline = Instant::now() + timeout;
        let (rank, world_size) = (hello.rank, hello.world_size);
        let view = Arc::new(View::new(rank, world_size));
        let problem = |e| rendezvous_error(rank, place, format!("the connection failed: {e}"));
        let ready = |stream: &TcpStream| {
            stream.set_nonblocking(false)?;
            stream.set_read_timeout(None)?;
            stream.set_write_timeout(Some(timeout))
        };
        if rank == 0 {
            // Before anybody is let in: if it fails, nobody waits for it.
            let payload = payload()?;
            let streams = listen::listen(place, hello, &payload, deadline)?;
            let mut sockets = streams.iter().map(|(stream, _)| stream);
            sockets.try_for_each(ready).map_err(problem)?;
            let (coordinator, lines) = Lines::open(&view, streams).map_err(problem)?;
            let link = Link::Here(coordinator, Some(lines));
            return Ok((Self::new(0, world_size, timeout, view, link), payload));
        }
        let (stream, inbox, payload) = knock::knock(place, hello, deadline)?;
        ready(&stream).map_err(problem)?;
        let line = Line::open(&view, stream, inbox).map_err(problem)?;
        let control = Self::new(rank, world_size, timeout, view, Link::There(line));
        Ok((control, payload))
    }

    fn new(rank: usize, world_size: usize, timeout: Duration, view: Arc<View>, link: Link) -> Self {
        Self {
            rank,
            world_size,
            timeout,
            view,
            num_joined: Mutex::new(0),
            link,
        }
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    pub fn world_size(&self) -> usize {
        self.world_size
    }

    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The number of the next collective.
    pub fn num_joined(&self) -> u64 {
        *self.num_joined.lock()
    }

    /// Joins the next collective, and returns its number. `operation` says all that must be the same on all ranks.
    ///
    /// # Errors
    /// The failure, if the group has one.
    pub fn join(&self, operation: &str) -> Result<u64> {
        let mut num_joined = self.num_joined.lock();
        self.view.check_open(operation)?;
        self.report(Report::Joined {
            operation: operation.to_string(),
        });
        *num_joined += 1;
        Ok(*num_joined - 1)
    }

    /// True once all ranks have joined collective `seq`, alike.
    pub fn has_agreed(&self, seq: u64) -> bool {
        self.view.has_agreed(seq)
    }

    /// True if no collective can go on.
    pub fn is_closed(&self) -> bool {
        self.view.state.lock().has_failed()
    }

    /// Fails if no collective can go on, before `operation`.
    ///
    /// # Errors
    /// The failure.
    pub fn check_open(&self, operation: &str) -> Result<()> {
        self.view.check_open(operation)
    }

    /// No collective goes on after `error`, which is this rank's own; the others learn of it when this rank
    /// [ends](Self::end).
    pub fn close(&self, error: Error) {
        self.view.close(error);
    }

    /// Fails if the wait for collective `seq`, which began at `start`, has no hope.
    ///
    /// # Errors
    /// [`Error::Mismatch`], [`Error::RankFailed`], [`Error::RankLeft`], [`Error::Timeout`].
    pub fn check(&self, seq: u64, operation: &str, start: Instant) -> Result<()> {
        self.view.check_open(operation)?;
        if let Some((left, left_seq)) = self.view.left_before(seq) {
            return Err(Error::RankLeft {
                rank: self.rank,
                left,
                left_seq,
                seq,
                operation: operation.to_string(),
            });
        }
        let waited = start.elapsed();
        if waited < self.timeout {
            return Ok(());
        }
        // Rank 0 knows who has not joined.
        self.report(Report::TimedOut {
            seq,
            operation: operation.to_string(),
            waited,
        });
        self.view
            .wait(Instant::now() + LAST_WORD, view::State::has_failed);
        self.view.check_open(operation)?;
        let error = Error::Timeout {
            rank: self.rank,
            seq,
            operation: operation.to_string(),
            missing: vec![0],
            waited,
        };
        self.view.close(error.clone());
        Err(error)
    }

    /// Waits until all ranks have joined collective `seq`, alike.
    ///
    /// # Errors
    /// See [`check`](Self::check).
    pub fn wait(&self, seq: u64, operation: &str) -> Result<()> {
        let start = Instant::now();
        while !self.has_agreed(seq) {
            self.check(seq, operation, start)?;
            let until = start + self.timeout;
            self.view.wait(until, |state| {
                state.has_failed() || self.has_agreed(seq) || state.has_left_before(seq)
            });
        }
        Ok(())
    }

    /// Tells the others how this rank's closure has ended, and waits until theirs have, too.
    ///
    /// # Errors
    /// [`Error::Timeout`] where they do not.
    pub fn end(&self, failure: Option<&RankError>) -> Result<()> {
        let failure = failure.map(RemoteFailure::of);
        self.report(Report::Ended { failure });
        let start = Instant::now();
        let all = |state: &view::State| state.all_ended_but(self.rank);
        if self.view.wait(start + self.timeout, all) {
            return Ok(());
        }
        Err(Error::Timeout {
            rank: self.rank,
            seq: *self.num_joined.lock(),
            operation: "the end of the run".to_string(),
            missing: self.view.running(),
            waited: start.elapsed(),
        })
    }

    /// Tells the others how this rank's closure has ended, without waiting for theirs: for threads, whose `World` waits.
    pub fn leave(&self, failure: Option<RemoteFailure>) {
        self.report(Report::Ended { failure });
    }

    /// The failures of the other ranks, as far as they are known.
    pub fn failures(&self) -> Vec<RankError> {
        self.view.failures()
    }

    /// True if this rank was told of another one's failure.
    pub fn was_told(&self) -> bool {
        self.view.state.lock().told
    }

    fn report(&self, report: Report) {
        match &self.link {
            Link::Here(coordinator, _) => coordinator.hear(self.rank, report),
            Link::There(line) => {
                if let Err(e) = line.send(&report) {
                    self.view.lost_rank_0(&e.to_string());
                }
            }
        }
    }
}

fn rendezvous_error(rank: usize, place: &Place, message: String) -> Error {
    Error::Rendezvous {
        rank,
        address: place.to_string(),
        message,
    }
}
