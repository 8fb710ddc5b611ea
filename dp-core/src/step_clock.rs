//! How long the parts of a step take on this rank.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::Span;
use tracing::field::Empty;

use crate::comm::CommClock;
use crate::memory::Ledger;
use crate::report::LocalReport;
use crate::trace::overlapping;

/// The clock on one trainer's steps. A step begins with its first forward.
pub(crate) struct StepClock {
    rank: usize,
    comm: Arc<CommClock>,
    step_began: Instant,
    forward: Forward,
    /// Sent before the step's first backward.
    sent_before: u64,
    /// Time in the communicator during backward.
    in_backward: Duration,
    current: LocalReport,
    /// Of the last step.
    last: LocalReport,
}

/// A moment, and what the rank had spent in its communicator until then.
#[derive(Clone, Copy)]
pub(crate) struct Moment {
    at: Instant,
    in_comm: Duration,
}

impl StepClock {
    /// The forward of the first step begins now.
    pub fn new(rank: usize, comm: Arc<CommClock>) -> Self {
        let forward = Forward::begin(rank, 1, 0);
        Self {
            rank,
            comm,
            step_began: forward.began,
            forward,
            sent_before: 0,
            in_backward: Duration::ZERO,
            current: LocalReport::default(),
            last: LocalReport::default(),
        }
    }

    /// What came before was not the forward.
    pub fn begin_forward(&mut self, step: u64, micro_batch: usize) {
        self.forward = Forward::begin(self.rank, step, micro_batch);
        if micro_batch == 0 {
            self.step_began = self.forward.began;
        }
    }

    /// The forward has ended, and a backward begins. `bytes_sent`: by this rank so far.
    pub fn begin_backward(&mut self, micro_batch: usize, bytes_sent: u64) -> Moment {
        let now = self.now();
        self.current.forward += now.at - self.forward.began;
        self.forward.end();
        if micro_batch == 0 {
            self.sent_before = bytes_sent;
        }
        now
    }

    pub fn end_backward(&mut self, begin: Moment) {
        let (computing, communicating) = self.since(begin);
        self.current.backward += computing;
        self.current.exposed_communication += communicating;
        self.in_backward += communicating;
    }

    /// The begin of something that ends with [`end_optimizer`](Self::end_optimizer).
    pub fn now(&self) -> Moment {
        Moment {
            at: Instant::now(),
            in_comm: self.comm.spent(),
        }
    }

    pub fn end_optimizer(&mut self, begin: Moment) {
        let (computing, communicating) = self.since(begin);
        self.current.optimizer += computing;
        self.current.exposed_communication += communicating;
    }

    /// The step has ended, and number `next_step` begins. `bytes_sent`: by this rank so far.
    pub fn end_step(
        &mut self,
        next_step: u64,
        reductions: Reductions,
        bytes_sent: u64,
        ledger: &Ledger,
    ) {
        self.last = LocalReport {
            total: self.step_began.elapsed(),
            reduction: reductions.under_way,
            exposed_reduction: self.in_backward + reductions.waited,
            bytes_sent: bytes_sent - self.sent_before,
            memory: ledger.current(),
            peak_memory: ledger.peak(),
            ..self.current
        };
        self.forget(next_step);
    }

    /// Drops what has been measured of the current step; it begins anew.
    pub fn forget(&mut self, step: u64) {
        self.current = LocalReport::default();
        self.in_backward = Duration::ZERO;
        self.begin_forward(step, 0);
    }

    /// The last step's report; all zero before the first.
    pub fn last(&self) -> &LocalReport {
        &self.last
    }

    /// Outside of the communicator, and in it.
    fn since(&self, begin: Moment) -> (Duration, Duration) {
        let now = self.now();
        let communicating = now.in_comm - begin.in_comm;
        // Another thread's use of the communicator (a checkpoint's) may be in it.
        let computing = (now.at - begin.at).saturating_sub(communicating);
        (computing, communicating)
    }
}

/// A forward, which only the backward that follows it makes one.
struct Forward {
    began: Instant,
    span: Span,
    ended: bool,
}

impl Forward {
    fn begin(rank: usize, step: u64, micro_batch: usize) -> Self {
        Self {
            span: overlapping!(
                "forward",
                rank,
                step,
                micro_batch = micro_batch,
                discarded = Empty
            ),
            began: Instant::now(),
            ended: false,
        }
    }

    fn end(&mut self) {
        self.ended = true;
        self.span = Span::none();
    }
}

impl Drop for Forward {
    fn drop(&mut self) {
        if !self.ended {
            self.span.record("discarded", true);
        }
    }
}

/// The reductions of a step.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Reductions {
    /// Time in which at least one was under way, from launch to completion.
    pub under_way: Duration,
    /// Time in the communicator after backward, until all were complete.
    pub waited: Duration,
    /// Until here `under_way` has been counted.
    until: Option<Instant>,
}

impl Reductions {
    /// Counts one; in the order of launches.
    pub fn add(&mut self, launched: Instant, completed: Instant) {
        let from = self.until.map_or(launched, |until| until.max(launched));
        self.under_way += completed.saturating_duration_since(from);
        self.until = Some(completed.max(from));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_which_any_reduction_is_under_way_counts_once() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut reductions = Reductions::default();
        // Two that overlap, one within them, one after a pause, and one of no length.
        for (launched, completed) in [(0, 10), (5, 20), (6, 8), (30, 37), (40, 40)] {
            reductions.add(at(launched), at(completed));
        }
        assert_eq!(reductions.under_way, Duration::from_millis(20 + 7));
    }
}
