//! Where the ranks of one process meet: sequence numbers, mismatch detection, deadlines, failure propagation.
//!
//! Each rank numbers its collectives 0, 1, 2, ... Ranks with the same number meet in one [`Slot`]. A slot is *open*
//! until all ranks have joined, then *ready*. The first failure (a rank's panic or error, a mismatch, a timeout)
//! closes the group for good: all present and later waits return it. A rank that finished early fails only the
//! slots it never joined.
//!
//! What the ranks do with a ready slot is the backend's business: its payload `P`. Slots that nobody holds any more are
//! used again, so that a collective allocates nothing.

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

/// What a backend keeps in a slot.
pub(super) trait Payload {
    /// Slots that are kept to be used again; 0 where a payload holds on to memory.
    const KEPT: usize;

    /// For the first rank that joins.
    fn new(request: &Request, dtype: DType, len: usize, world_size: usize) -> Self;

    /// Makes the payload of a slot that nobody holds like a new one.
    fn renew(&mut self, request: &Request, dtype: DType, len: usize);
}

/// How long a wait looks again and again before it parks: first without a pause, then lending its core to whoever wants to
/// run between two looks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    pub(super) spin: Duration,
    /// Both together.
    pub(super) poll: Duration,
}

impl Patience {
    /// Parks at once.
    pub const NONE: Self = Self {
        spin: Duration::ZERO,
        poll: Duration::ZERO,
    };

    /// For ranks that have a core each, or for more (`crowded`).
    ///
    /// To spin is the fastest way to see another rank come, while it can run. Where cores are scarce, it keeps the very rank
    /// from running that is waited for. To yield costs a system call a look, and lets it run. To park is free, but being
    /// woken takes as long as the whole of this: so only a longer wait is worth it.
    pub fn new(crowded: bool) -> Self {
        let spin = if crowded { 0 } else { 3 };
        Self {
            spin: Duration::from_micros(spin),
            poll: Duration::from_micros(100),
        }
    }
}

/// Why a group is closed.
#[derive(Debug, Clone)]
pub(super) enum Failure {
    Rank { rank: usize, reason: String },
    Error(Error),
}

#[derive(Debug)]
struct State<P> {
    /// Slots that some rank has not joined yet, in order; the first one has number `first_open`.
    open: VecDeque<Arc<Slot<P>>>,
    /// Slots that all have joined, oldest first, to be used again once nobody holds them.
    used: VecDeque<Arc<Slot<P>>>,
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

impl<P> State<P> {
    fn has_joined(&self, rank: usize, seq: u64) -> bool {
        self.next_seq[rank] > seq
    }
}

impl<P: Payload> State<P> {
    /// A slot for a new collective: the oldest used one that nobody holds, or a new one.
    fn slot(
        &mut self,
        seq: u64,
        request: &Request,
        dtype: DType,
        len: usize,
        world_size: usize,
    ) -> Arc<Slot<P>> {
        let free = (0..self.used.len()).find(|i| Arc::get_mut(&mut self.used[*i]).is_some());
        let mut used = free.and_then(|i| self.used.remove(i));
        if let Some(slot) = used.as_mut().and_then(Arc::get_mut) {
            slot.seq = seq;
            slot.request = request.clone();
            slot.dtype = dtype;
            slot.len = len;
            slot.payload.renew(request, dtype, len);
            *slot.ready.get_mut() = false;
        }
        used.unwrap_or_else(|| {
            Arc::new(Slot {
                seq,
                request: request.clone(),
                dtype,
                len,
                payload: P::new(request, dtype, len, world_size),
                ready: AtomicBool::new(false),
            })
        })
    }

    /// The first open slot is ready.
    fn retire_first(&mut self) {
        let slot = self.open.pop_front();
        self.first_open += 1;
        self.used.extend(slot.filter(|_| P::KEPT > 0));
        if self.used.len() > P::KEPT {
            self.used.pop_front();
        }
    }
}

#[derive(Debug)]
pub(super) struct Rendezvous<P> {
    world_size: usize,
    timeout: Duration,
    patience: Patience,
    failed: AtomicBool,
    state: Mutex<State<P>>,
    changed: Condvar,
}

impl<P: Payload> Rendezvous<P> {
    pub fn new(world_size: usize, timeout: Duration, patience: Patience) -> Self {
        Self {
            world_size,
            timeout,
            patience,
            failed: AtomicBool::new(false),
            state: Mutex::new(State {
                // With room, so that they never grow while slots are used again.
                open: VecDeque::with_capacity(P::KEPT),
                used: VecDeque::with_capacity(P::KEPT + 1),
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

    /// Joins the next collective of `rank`. `deposit` leaves this rank's part in the payload, before the slot is ready.
    pub fn join(
        &self,
        rank: usize,
        request: Request,
        dtype: DType,
        len: usize,
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
            let slot = state.slot(seq, &request, dtype, len, self.world_size);
            state.open.push_back(slot);
        }
        let slot = Arc::clone(&state.open[index]);
        if slot.request != request || slot.dtype != dtype || slot.len != len {
            let first = (0..self.world_size).find(|r| state.has_joined(*r, seq));
            let error = Error::Mismatch {
                seq,
                rank_a: first.unwrap_or(rank),
                operation_a: slot.describe(),
                rank_b: rank,
                operation_b: request.describe(dtype, len),
            };
            self.close(&mut state, Failure::Error(error.clone()));
            return Err(error);
        }
        deposit(&slot.payload);
        state.next_seq[rank] += 1;
        if (0..self.world_size).all(|r| state.has_joined(r, seq)) {
            // Ranks join in order, so the slots become ready in order.
            slot.ready.store(true, Ordering::Release);
            state.retire_first();
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
            let waited = start.elapsed();
            if waited >= self.patience.poll || self.failed.load(Ordering::Acquire) {
                break;
            }
            if waited < self.patience.spin {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
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
            // None once the slot is ready. Not collected before there is an error: parking allocates nothing.
            let missing = || (0..self.world_size).filter(|r| !state.has_joined(*r, slot.seq));
            if let Some(left) = missing().find(|r| state.left[*r]) {
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
                    missing: missing().collect(),
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

impl<P: Payload + Send + Sync> GroupControl for Rendezvous<P> {
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

/// What a rank that waits gets when the group is closed.
pub(super) fn consequence(rank: usize, operation: String, failure: Failure) -> Error {
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
