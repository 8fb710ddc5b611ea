//! A rank's handle on a collective under way.

use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use super::gathering::ReadSlice;
use super::shared::SharedPending;
use super::timed::CommClock;
use crate::buffer::Buffer;
use crate::error::Result;

/// A collective under way; see [`Communicator::start`](super::Communicator::start).
///
/// Dropping it without waiting is allowed: the other ranks still get their results, the buffer is freed.
#[must_use = "the buffer comes back from wait"]
pub struct Pending {
    handle: Handle,
    /// Where the time of the wait is added.
    clock: Option<Arc<CommClock>>,
}

/// The backend that is there in any case needs no block on the heap for each collective.
enum Handle {
    Shared(SharedPending),
    Other(Box<dyn PendingCollective>),
}

impl Pending {
    /// For backends: wraps the backend's own handle.
    pub fn new(inner: impl PendingCollective + 'static) -> Self {
        Self {
            handle: Handle::Other(Box::new(inner)),
            clock: None,
        }
    }

    pub(super) fn shared(inner: SharedPending) -> Self {
        Self {
            handle: Handle::Shared(inner),
            clock: None,
        }
    }

    /// Adds the time of the wait to `clock`.
    pub(super) fn timed(mut self, clock: Arc<CommClock>) -> Self {
        self.clock = Some(clock);
        self
    }

    /// True when [`wait`](Self::wait) would return at once, with the buffer or with an error.
    pub fn is_done(&self) -> bool {
        match &self.handle {
            Handle::Shared(pending) => pending.is_done(),
            Handle::Other(pending) => pending.is_done(),
        }
    }

    /// Waits for the result and returns the buffer.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error::Timeout) after the communicator's timeout; [`Error::RankFailed`](crate::Error::RankFailed) or [`Error::RankLeft`](crate::Error::RankLeft) as soon as a
    /// rank that has not joined is known to be gone; [`Error::Mismatch`](crate::Error::Mismatch).
    pub fn wait(self) -> Result<Buffer> {
        self.wait_and_when().0
    }

    /// [`wait`](Self::wait), and when the collective was complete, which may be long before anybody asked.
    pub(crate) fn wait_and_when(self) -> (Result<Buffer>, Instant) {
        let begin = Instant::now();
        let (buffer, completed) = match self.handle {
            Handle::Shared(pending) => {
                let buffer = pending.wait();
                (buffer, pending.completed_at())
            }
            Handle::Other(pending) => {
                let completed = pending.completed_at().filter(|_| pending.is_done());
                (pending.wait(), completed)
            }
        };
        let now = Instant::now();
        if let Some(clock) = self.clock {
            clock.add(now - begin);
        }
        (buffer, completed.unwrap_or(now))
    }

    /// [`wait`](Self::wait), for a [`Gathering`](super::Gathering). Gives itself back where slices cannot be read in place.
    pub(super) fn wait_reading(
        self,
        read: &mut ReadSlice<'_>,
    ) -> std::result::Result<Result<Buffer>, Self> {
        let pending = match &self.handle {
            Handle::Shared(pending) if pending.reads_in_place() => pending,
            _ => return Err(self),
        };
        let begin = Instant::now();
        let buffer = pending.wait_reading(read);
        if let Some(clock) = &self.clock {
            clock.add(begin.elapsed());
        }
        Ok(buffer)
    }
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending")
            .field("done", &self.is_done())
            .finish()
    }
}

/// A backend's handle on a collective under way.
pub trait PendingCollective: Send {
    /// See [`Pending::is_done`].
    fn is_done(&self) -> bool;
    /// See [`Pending::wait`].
    fn wait(self: Box<Self>) -> Result<Buffer>;
    /// When the collective was complete, for backends that know; asked for when it [is](Self::is_done). Else it counts as
    /// complete when its result is fetched, and what backward hides of it looks smaller than it is.
    fn completed_at(&self) -> Option<Instant> {
        None
    }
}
