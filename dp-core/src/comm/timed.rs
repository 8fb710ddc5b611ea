//! The time that a rank spends in its communicator.
//!
//! With ranks that are threads, it is the ranks themselves who add and copy, in `progress` and in `wait`; what is spent in
//! these calls is not spent on computing, so all of it is exposed. Waiting for a slower rank is part of it. A backend that
//! works by itself costs a trainer the waits alone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::{Communicator, Pending, Request, Traffic};
use crate::buffer::Buffer;
use crate::error::Result;

/// Adds up the time of one rank's calls.
#[derive(Debug, Default)]
pub(crate) struct CommClock(AtomicU64);

impl CommClock {
    pub fn add(&self, time: Duration) {
        self.0.fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
    }

    /// The time spent so far.
    pub fn spent(&self) -> Duration {
        Duration::from_nanos(self.0.load(Ordering::Relaxed))
    }

    fn time<R>(&self, call: impl FnOnce() -> R) -> R {
        let begin = Instant::now();
        let result = call();
        self.add(begin.elapsed());
        result
    }
}

/// Hands every call to another communicator, and adds up the time they take, waits included.
#[derive(Debug)]
pub(crate) struct TimedComm {
    inner: Arc<dyn Communicator>,
    clock: Arc<CommClock>,
}

impl TimedComm {
    pub fn new(inner: Arc<dyn Communicator>) -> Self {
        Self {
            inner,
            clock: Arc::default(),
        }
    }

    pub fn clock(&self) -> &Arc<CommClock> {
        &self.clock
    }
}

impl Communicator for TimedComm {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn world_size(&self) -> usize {
        self.inner.world_size()
    }

    fn timeout(&self) -> Duration {
        self.inner.timeout()
    }

    fn start(&self, request: Request, buffer: Buffer) -> Result<Pending> {
        let pending = self.clock.time(|| self.inner.start(request, buffer))?;
        Ok(pending.timed(Arc::clone(&self.clock)))
    }

    fn progress(&self) {
        self.clock.time(|| self.inner.progress());
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ReduceOp, World};

    #[test]
    fn what_a_rank_waits_for_is_counted_and_nothing_else() -> Result<()> {
        const LATE: Duration = Duration::from_millis(30);
        World::threads(2)?.run(|rank| -> Result<()> {
            let timed = TimedComm::new(rank.comm());
            let comm: &dyn Communicator = &timed;
            comm.barrier()?;
            let before = timed.clock().spent();
            if rank.rank() == 1 {
                std::thread::sleep(LATE);
            }
            let slept = timed.clock().spent() - before;
            let sum = comm.all_reduce(Buffer::from_vec(vec![1.0f32; 10]), ReduceOp::Sum)?;
            assert_eq!(sum.wait()?.into_vec::<f32>()?, [2.0; 10]);
            if rank.rank() == 1 {
                assert_eq!(slept, Duration::ZERO, "sleeping is no communication");
            } else {
                // Rank 0 cannot have gone on before rank 1 came.
                assert!(timed.clock().spent() - before >= LATE / 2);
            }
            assert_eq!(timed.traffic(), rank.comm().traffic());
            Ok(())
        })
    }

    /// The moment is that of the work, not of the question.
    #[test]
    fn a_collective_knows_when_it_was_complete() -> Result<()> {
        const LATE: Duration = Duration::from_millis(30);
        World::threads(2)?.run(|rank| -> Result<()> {
            let comm = rank.comm();
            let begin = Instant::now();
            let pending =
                comm.all_reduce(Buffer::from_vec(vec![1.0f32; 100_000]), ReduceOp::Sum)?;
            comm.barrier()?; // both are in
            while !pending.is_done() {
                comm.progress();
            }
            let seen = Instant::now();
            std::thread::sleep(LATE);
            let (buffer, completed) = pending.wait_and_when();
            assert_eq!(buffer?.len(), 100_000);
            assert!(begin <= completed && completed <= seen);
            Ok(())
        })
    }
}
