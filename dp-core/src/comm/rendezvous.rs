//! Where the ranks of one process meet: sequence numbers, mismatch detection, deadlines, failure propagation.
//!
//! Each rank numbers its collectives 0, 1, 2, ... Ranks with the same number meet in one [`Slot`]. A slot is *open*
//! until all ranks have joined, then *ready*. The first failure (a rank's panic or error, a mismatch, a timeout)
//! closes the group for good: all present and later waits return it. A rank that finished early fails only the
//! slots it never joined.
//!
//! What the ranks do with a ready slot is the backend's business: its payload `P`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use candle_core::DType;
use parking_lot::{Condvar, Mutex};

use super::Request;
use crate::error::{Error, Result};

/// One collective, shared by the ranks that take part.
#[derive(Debug)]
pub(super) struct Slot<P> {
    pub seq: u64,
    pub request: Request,
    pub dtype: DType,
    pub len: usize,
    pub payload: P,
    ready: AtomicBool,
}

impl<P> Slot<P> {
    /// True once all ranks have joined. What they deposited before is visible after.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }

    pub fn describe(&self) -> String {
        self.request.describe(self.dtype, self.len)
    }
}

/// Why a group is closed.
#[derive(Debug, Clone)]
enum Failure {
    Rank { rank: usize, reason: String },
    Error(Error),
}

#[derive(Debug)]
struct State<P> {
    /// Slots that some rank has not joined yet, in order; the first one has number `first_open`.
    open: VecDeque<(Arc<Slot<P>>, Vec<bool>)>,
    first_open: u64,
    /// Number of the next collective of each rank.
    next_seq: Vec<u64>,
    /// Ranks whose closure has returned.
    left: Vec<bool>,
    /// Ranks that were told of somebody else's failure: their own later error is a consequence.
    told: Vec<bool>,
    failure: Option<Failure>,
    /// Waiters on the condition variable.
    parked: usize,
}

#[derive(Debug)]
pub(super) struct Rendezvous<P> {
    world_size: usize,
    timeout: Duration,
    spin: Duration,
    failed: AtomicBool,
    state: Mutex<State<P>>,
    changed: Condvar,
}

impl<P> Rendezvous<P> {
    /// `spin`: how long a wait polls before it parks. Polling is faster while cores are free, and steals time from
    /// the rank being waited for when they are not.
    pub fn new(world_size: usize, timeout: Duration, spin: Duration) -> Self {
        Self {
            world_size,
            timeout,
            spin,
            failed: AtomicBool::new(false),
            state: Mutex::new(State {
                open: VecDeque::new(),
                first_open: 0,
                next_seq: vec![0; world_size],
                left: vec![false; world_size],
                told: vec![false; world_size],
                failure: None,
                parked: 0,
            }),
            changed: Condvar::new(),
        }
    }

    pub fn world_size(&self) -> usize {
        self.world_size
    }

    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Joins the next collective of `rank`. `make` creates the payload for the first one there, `deposit` leaves this
    /// rank's part in it.
    pub fn join(
        &self,
        rank: usize,
        request: Request,
        dtype: DType,
        len: usize,
        make: impl FnOnce() -> P,
        deposit: impl FnOnce(&P),
    ) -> Result<Arc<Slot<P>>> {
        let mut state = self.state.lock();
        let seq = state.next_seq[rank];
        if let Some(failure) = state.failure.clone() {
            state.told[rank] = true;
            return Err(consequence(rank, request.describe(dtype, len), failure));
        }
        let index = (seq - state.first_open) as usize;
        if index == state.open.len() {
            let slot = Slot {
                seq,
                request: request.clone(),
                dtype,
                len,
                payload: make(),
                ready: AtomicBool::new(false),
            };
            state
                .open
                .push_back((Arc::new(slot), vec![false; self.world_size]));
        }
        let (slot, joined) = &mut state.open[index];
        if slot.request != request || slot.dtype != dtype || slot.len != len {
            let error = Error::Mismatch {
                seq,
                rank_a: joined.iter().position(|j| *j).unwrap_or(rank),
                operation_a: slot.describe(),
                rank_b: rank,
                operation_b: request.describe(dtype, len),
            };
            self.close(&mut state, Failure::Error(error.clone()));
            return Err(error);
        }
        deposit(&slot.payload);
        joined[rank] = true;
        let slot = Arc::clone(slot);
        let complete = joined.iter().all(|j| *j);
        state.next_seq[rank] += 1;
        if complete {
            // Ranks join in order, so the slots become ready in order.
            slot.ready.store(true, Ordering::Release);
            state.open.pop_front();
            state.first_open += 1;
            if state.parked > 0 {
                self.changed.notify_all();
            }
        }
        Ok(slot)
    }

    /// Waits until `done()`. Once the slot is ready, `work` is called, without a lock, to do what nobody has begun.
    /// Fails as the module's text says.
    pub fn wait_until(
        &self,
        rank: usize,
        slot: &Slot<P>,
        done: impl Fn() -> bool,
        mut work: impl FnMut(),
    ) -> Result<()> {
        let start = Instant::now();
        let mut helped = false;
        loop {
            if slot.is_ready() && !helped {
                work();
                helped = true;
            }
            if done() {
                return Ok(());
            }
            if start.elapsed() >= self.spin || self.failed.load(Ordering::Acquire) {
                break;
            }
            std::hint::spin_loop();
        }
        let mut state = self.state.lock();
        loop {
            // Checked under the lock: `wake` and `join` notify under it, so no wake-up is lost.
            if done() {
                return Ok(());
            }
            if slot.is_ready() && !helped {
                helped = true;
                parking_lot::MutexGuard::unlocked(&mut state, &mut work);
                continue;
            }
            if let Some(failure) = state.failure.clone() {
                state.told[rank] = true;
                return Err(consequence(rank, slot.describe(), failure));
            }
            let missing = if slot.is_ready() {
                Vec::new()
            } else {
                missing_in(&state, slot.seq)
            };
            if let Some(&left) = missing.iter().find(|r| state.left[**r]) {
                // The other rank did not fail, so this is this rank's own failure.
                return Err(Error::RankLeft {
                    rank,
                    left,
                    left_seq: state.next_seq[left],
                    seq: slot.seq,
                    operation: slot.describe(),
                });
            }
            let Some(rest) = self.timeout.checked_sub(start.elapsed()) else {
                let error = Error::Timeout {
                    rank,
                    seq: slot.seq,
                    operation: slot.describe(),
                    missing,
                    waited: start.elapsed(),
                };
                self.close(&mut state, Failure::Error(error.clone()));
                return Err(error);
            };
            state.parked += 1;
            self.changed.wait_for(&mut state, rest);
            state.parked -= 1;
        }
    }

    /// Makes waiters look again, after work on a slot was finished.
    pub fn wake(&self) {
        let state = self.state.lock();
        if state.parked > 0 {
            self.changed.notify_all();
        }
    }

    /// True if the group is closed: waits end at once.
    pub fn is_closed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    fn close(&self, state: &mut State<P>, failure: Failure) {
        if state.failure.is_none() {
            state.failure = Some(failure);
            self.failed.store(true, Ordering::Release);
        }
        self.changed.notify_all();
    }
}

/// What the launcher tells a group about its ranks.
pub(crate) trait GroupControl: Send + Sync {
    /// `rank` panicked or returned an error.
    fn rank_failed(&self, rank: usize, reason: String);
    /// `rank` returned normally.
    fn rank_left(&self, rank: usize);
    /// True if `rank` was told of another rank's failure before.
    fn was_told(&self, rank: usize) -> bool;
}

impl<P: Send + Sync> GroupControl for Rendezvous<P> {
    fn rank_failed(&self, rank: usize, reason: String) {
        let mut state = self.state.lock();
        state.left[rank] = true;
        self.close(&mut state, Failure::Rank { rank, reason });
    }

    fn rank_left(&self, rank: usize) {
        let mut state = self.state.lock();
        state.left[rank] = true;
        self.changed.notify_all();
    }

    fn was_told(&self, rank: usize) -> bool {
        self.state.lock().told[rank]
    }
}

fn missing_in<P>(state: &State<P>, seq: u64) -> Vec<usize> {
    let joined = |r: &usize| state.next_seq[*r] > seq;
    (0..state.next_seq.len()).filter(|r| !joined(r)).collect()
}

fn consequence(rank: usize, operation: String, failure: Failure) -> Error {
    match failure {
        Failure::Rank {
            rank: failed,
            reason,
        } => Error::RankFailed {
            rank,
            failed,
            operation,
            reason,
        },
        // A timeout or a mismatch is the same fact for everybody.
        Failure::Error(e) => e,
    }
}
