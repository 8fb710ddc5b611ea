//! A communicator that measures the time a rank spends in it.
//!
//! With ranks that are threads, it is the ranks themselves who add and copy, in `progress` and in `wait`; what is spent in
//! these calls is not spent on computing, so all of it is exposed. Waiting for a slower rank is part of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dp_core::comm::{Pending, PendingCollective, Request, Traffic};
use dp_core::{Buffer, Communicator, Result};

/// Hands every call to another communicator, and adds up the time they take.
#[derive(Debug)]
pub struct TimedComm {
    inner: Arc<dyn Communicator>,
    nanoseconds: Arc<AtomicU64>,
}

impl TimedComm {
    pub fn new(inner: Arc<dyn Communicator>) -> Self {
        Self {
            inner,
            nanoseconds: Arc::default(),
        }
    }

    /// The time spent in calls so far.
    pub fn spent(&self) -> Duration {
        Duration::from_nanos(self.nanoseconds.load(Ordering::Relaxed))
    }
}

fn timed<R>(nanoseconds: &AtomicU64, call: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let result = call();
    nanoseconds.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
    result
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
        let pending = timed(&self.nanoseconds, || self.inner.start(request, buffer))?;
        Ok(Pending::new(TimedPending {
            pending,
            nanoseconds: Arc::clone(&self.nanoseconds),
        }))
    }

    fn progress(&self) {
        timed(&self.nanoseconds, || self.inner.progress());
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }
}

struct TimedPending {
    pending: Pending,
    nanoseconds: Arc<AtomicU64>,
}

impl PendingCollective for TimedPending {
    fn is_done(&self) -> bool {
        self.pending.is_done()
    }

    fn wait(self: Box<Self>) -> Result<Buffer> {
        let Self {
            pending,
            nanoseconds,
        } = *self;
        timed(&nanoseconds, || pending.wait())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dp_core::{ReduceOp, World};

    #[test]
    fn what_a_rank_waits_for_is_counted_and_nothing_else() -> anyhow::Result<()> {
        const LATE: Duration = Duration::from_millis(30);
        World::threads(2)?.run(|rank| -> anyhow::Result<()> {
            let timed = TimedComm::new(rank.comm());
            let comm: &dyn Communicator = &timed;
            comm.barrier()?;
            let before = timed.spent();
            if rank.rank() == 1 {
                std::thread::sleep(LATE);
            }
            let slept = timed.spent() - before;
            let sum = comm.all_reduce(Buffer::from_vec(vec![1.0f32; 10]), ReduceOp::Sum)?;
            assert_eq!(sum.wait()?.into_vec::<f32>()?, [2.0; 10]);
            if rank.rank() == 1 {
                assert_eq!(slept, Duration::ZERO, "sleeping is no communication");
            } else {
                // Rank 0 cannot have gone on before rank 1 came.
                assert!(timed.spent() - before >= LATE / 2);
            }
            assert_eq!(timed.traffic(), rank.comm().traffic());
            Ok(())
        })
    }
}
