//! What one rank knows of all others.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::coordinator::gone;
use super::protocol::News;
use crate::comm::failures::{Closed, RemoteFailure};
use crate::comm::rendezvous::{Failure, consequence};
use crate::error::{Error, Result};
use crate::world_error::RankError;

/// How a rank's closure ended: after how many collectives, and the failure with its place in their order.
type Ended = (u64, Option<(usize, RemoteFailure)>);

#[derive(Debug)]
pub(super) struct State {
    failure: Option<Failure>,
    /// The failure is another rank's.
    is_foreign: bool,
    /// This rank was told of it: its own later error is a consequence.
    pub told: bool,
    ended: Vec<Option<Ended>>,
    num_failed: usize,
}

#[derive(Debug)]
pub(super) struct View {
    rank: usize,
    /// Collectives that all have joined, alike. Outside of the lock, since waits look at it all the time.
    num_agreed: AtomicU64,
    pub state: Mutex<State>,
    changed: Condvar,
}

impl View {
    pub fn new(rank: usize, world_size: usize) -> Self {
        Self {
            rank,
            num_agreed: AtomicU64::new(0),
            state: Mutex::new(State {
                failure: None,
                is_foreign: false,
                told: false,
                ended: vec![None; world_size],
                num_failed: 0,
            }),
            changed: Condvar::new(),
        }
    }

    /// Rank 0 has said something.
    pub fn hear(&self, news: News) {
        let mut state = self.state.lock();
        match news {
            News::Agreed { num } => self.num_agreed.store(num, Ordering::Release),
            News::Closed(closed) => {
                // Who came second, or has run out of patience, has found it.
                let finder = match &closed {
                    Closed::Mismatch { rank_b, .. } => *rank_b,
                    Closed::Timeout { rank, .. } => *rank,
                };
                state.fail(Failure::Error(closed.into_error()), finder != self.rank);
            }
            News::Ended {
                rank,
                num_collectives,
                failure,
            } => state.end(rank, num_collectives, failure),
        }
        self.changed.notify_all();
    }

    /// The connection to rank 0 has broken.
    pub fn lost_rank_0(&self, why: &str) {
        let mut state = self.state.lock();
        if state.all_ended_but(self.rank) {
            return; // The run has ended, and rank 0 has nothing more to say.
        }
        if state.ended[0].is_none() {
            let num = self.num_agreed.load(Ordering::Acquire);
            state.end(0, num, Some(gone(why)));
        }
        self.changed.notify_all();
    }

    /// True once all ranks have joined collective `seq`, alike.
    pub fn has_agreed(&self, seq: u64) -> bool {
        self.num_agreed.load(Ordering::Acquire) > seq
    }

    /// Fails if no collective can go on.
    pub fn check_open(&self, operation: &str) -> Result<()> {
        let mut state = self.state.lock();
        let Some(failure) = state.failure.clone() else {
            return Ok(());
        };
        state.told |= state.is_foreign;
        Err(consequence(self.rank, operation.to_string(), failure))
    }

    /// The rank that has ended without joining collective `seq`, and after how many collectives.
    pub fn left_before(&self, seq: u64) -> Option<(usize, u64)> {
        let state = self.state.lock();
        let ended = state.ended.iter().enumerate();
        ended
            .filter_map(|(rank, ended)| Some((rank, ended.as_ref()?.0)))
            .find(|(_, num)| *num <= seq)
    }

    /// This rank's own failure, which the others will be told of.
    pub fn close(&self, error: Error) {
        self.state.lock().fail(Failure::Error(error), false);
        self.changed.notify_all();
    }

    /// Ranks that have not ended.
    pub fn running(&self) -> Vec<usize> {
        let state = self.state.lock();
        (0..state.ended.len())
            .filter(|r| state.ended[*r].is_none() && *r != self.rank)
            .collect()
    }

    /// The failures of other ranks.
    pub fn failures(&self) -> Vec<RankError> {
        let state = self.state.lock();
        let ended = state.ended.iter().enumerate();
        ended
            .filter_map(|(rank, ended)| Some((rank, ended.as_ref()?.1.clone()?)))
            .map(|(rank, (order, failure))| failure.into_rank_error(rank, order))
            .collect()
    }

    /// Waits until something changes or `until`, unless `done`. False when it is too late.
    pub fn wait(&self, until: Instant, done: impl Fn(&State) -> bool) -> bool {
        let mut state = self.state.lock();
        while !done(&state) {
            let rest = until.saturating_duration_since(Instant::now());
            if rest == Duration::ZERO {
                return false;
            }
            self.changed.wait_for(&mut state, rest);
        }
        true
    }
}

impl State {
    fn fail(&mut self, failure: Failure, is_foreign: bool) {
        if self.failure.is_none() {
            self.failure = Some(failure);
            self.is_foreign = is_foreign;
        }
    }

    fn end(&mut self, rank: usize, num_collectives: u64, failure: Option<RemoteFailure>) {
        let failure = failure.map(|failure| {
            self.num_failed += 1;
            let reason = failure.message.clone();
            self.fail(Failure::Rank { rank, reason }, true);
            (self.num_failed, failure)
        });
        self.ended[rank] = Some((num_collectives, failure));
    }

    pub fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    pub fn has_left_before(&self, seq: u64) -> bool {
        self.ended.iter().flatten().any(|(num, _)| *num <= seq)
    }

    /// All but `rank` have ended.
    pub fn all_ended_but(&self, rank: usize) -> bool {
        let mut others = self.ended.iter().enumerate().filter(|(r, _)| *r != rank);
        others.all(|(_, ended)| ended.is_some())
    }
}
