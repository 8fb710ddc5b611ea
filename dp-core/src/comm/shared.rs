//! The shared-memory backend: ranks are threads, buffers are never copied into the communicator.
//!
//! A collective owns the buffers of all ranks while it runs. Its elements are cut into chunks; any rank may claim a chunk,
//! reads it from each rank's buffer once and writes it where it belongs once. No phase needs to wait for another, so there
//! is no barrier inside a collective. `exchange.rs` has the states of a collective, and who may touch the buffers when.
//!
//! Who works: a rank in [`Pending::wait`] works until no chunk is left. A rank that computes takes its share, `1/N` of
//! the chunks, whenever [`Communicator::progress`] is called. So communication goes on during backward without
//! extra threads, and a rank that is late is not the only one to do the work.
//!
//! Once as many collectives have been under way as ever will be, nothing is allocated any more.

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::exchange::{Exchange, Hold};
use super::gathering::ReadSlice;
use super::rendezvous::{GroupControl, Patience, Payload, Rendezvous, Slot};
use super::traffic::TrafficCounters;
use super::{Communicator, Pending, Request, Traffic};
use crate::buffer::{Buffer, with_element};
use crate::error::Result;

/// Creates a group of `world_size` ranks that talk through shared memory.
pub(crate) fn shared_group(
    world_size: usize,
    timeout: Duration,
    patience: Patience,
) -> (Vec<Arc<dyn Communicator>>, Arc<dyn GroupControl>) {
    let group = Arc::new(Group {
        meeting: Rendezvous::new(world_size, timeout, patience),
        traffic: (0..world_size)
            .map(|_| TrafficCounters::default())
            .collect(),
        in_flight: (0..world_size)
            .map(|_| Mutex::new(Vec::with_capacity(Exchange::KEPT)))
            .collect(),
    });
    let comms = (0..world_size)
        .map(|rank| {
            Arc::new(SharedComm {
                rank,
                group: Arc::clone(&group),
            }) as Arc<dyn Communicator>
        })
        .collect();
    (comms, group)
}

struct Group {
    meeting: Rendezvous<Exchange>,
    traffic: Vec<TrafficCounters>,
    /// Per rank: collectives it has joined and not seen done, for `progress`, in their order. Without a hold: if every rank
    /// has dropped its `Pending`, nobody wants the result, and the buffers are freed.
    in_flight: Vec<Mutex<Vec<Arc<Slot<Exchange>>>>>,
}

impl GroupControl for Group {
    fn rank_failed(&self, rank: usize, reason: String) {
        self.meeting.rank_failed(rank, reason);
    }
    fn rank_left(&self, rank: usize) {
        self.meeting.rank_left(rank);
    }
    fn was_told(&self, rank: usize) -> bool {
        self.meeting.was_told(rank)
    }
}

/// One rank's communicator of a [`shared_group`].
struct SharedComm {
    rank: usize,
    group: Arc<Group>,
}

impl fmt::Debug for SharedComm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedComm")
            .field("rank", &self.rank)
            .field("world_size", &self.world_size())
            .finish()
    }
}

impl Communicator for SharedComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world_size(&self) -> usize {
        self.group.meeting.world_size()
    }

    fn timeout(&self) -> Duration {
        self.group.meeting.timeout()
    }

    fn start(&self, request: Request, buffer: Buffer) -> Result<Pending> {
        let (dtype, len, n) = (buffer.dtype(), buffer.len(), self.world_size());
        request.validate(dtype, len, n)?;
        self.group.traffic[self.rank].called(request.collective);
        let slot =
            self.group
                .meeting
                .join(self.rank, request, dtype, len, |exchange: &Exchange| {
                    exchange.deposit(self.rank, buffer);
                })?;
        self.group.forget_what_is_over(self.rank);
        self.group.in_flight[self.rank]
            .lock()
            .push(Arc::clone(&slot));
        Ok(Pending::shared(SharedPending {
            rank: self.rank,
            group: Arc::clone(&self.group),
            to_read: Cell::new(slot.request.in_place),
            hold: Hold::of_rank(slot),
        }))
    }

    fn progress(&self) {
        let in_flight = self.group.in_flight[self.rank].lock();
        for slot in in_flight.iter().filter(|s| s.is_ready()) {
            if let Some(hold) = Hold::another(slot) {
                self.group.work(&hold, self.rank, slot.payload.fair_share());
            }
        }
        drop(in_flight);
        self.group.forget_what_is_over(self.rank);
    }

    fn traffic(&self) -> Traffic {
        self.group.traffic[self.rank].read()
    }
}

impl Group {
    fn forget_what_is_over(&self, rank: usize) {
        self.in_flight[rank].lock().retain(|s| !s.payload.is_over());
    }

    /// Claims and does up to `limit` chunks of a ready slot, on the thread of `rank`.
    fn work(&self, hold: &Hold, rank: usize, limit: usize) {
        debug_assert!(hold.is_ready());
        for _ in 0..limit {
            // Nobody waits for the results of a closed group.
            if self.meeting.is_closed() || !Exchange::do_next_chunk(hold, rank, &self.traffic) {
                return;
            }
            if hold.payload.is_done() {
                self.meeting.wake();
            }
        }
    }
}

/// One rank's handle on a collective under way.
pub(super) struct SharedPending {
    rank: usize,
    group: Arc<Group>,
    hold: Hold,
    /// The others' slices are still to be read by this rank: until it has, their buffers stay with the exchange.
    to_read: Cell<bool>,
}

impl SharedPending {
    pub fn is_done(&self) -> bool {
        (self.hold.is_ready() && self.hold.payload.is_done()) || self.group.meeting.is_closed()
    }

    /// Once: it takes the buffer.
    pub fn wait(&self) -> Result<Buffer> {
        if self.reads_in_place() {
            return self.wait_copying();
        }
        self.wait_until_done()
    }

    /// True for a collective that nobody but the ranks themselves can do: each reads the others' slices.
    pub fn reads_in_place(&self) -> bool {
        self.hold.request.in_place
    }

    /// Reads the slices of the other ranks where they lie; once, instead of [`wait`](Self::wait).
    pub fn wait_reading(&self, read: &mut ReadSlice<'_>) -> Result<Buffer> {
        let (hold, group) = (&self.hold, &self.group);
        let ready = || hold.is_ready();
        group.meeting.wait_until(self.rank, hold, ready, || {})?;
        let outcome = Exchange::read_slices(hold, self.rank, &group.traffic, read);
        self.has_read();
        let buffer = self.wait_until_done()?;
        outcome.map(|()| buffer)
    }

    /// [`wait`](Self::wait), for a caller that wants the slices in the buffer after all: a communicator around this one.
    fn wait_copying(&self) -> Result<Buffer> {
        // The own buffer is the others' to read until all are done.
        let mut slices = Vec::new();
        let mut buffer = self.wait_reading(&mut |at, from| {
            let mut copy = Buffer::zeros(from.dtype(), at.len())?;
            copy.copy_from(from, at.clone())?;
            slices.push((at, copy));
            Ok(())
        })?;
        with_element!(buffer.dtype(), T => for (at, copy) in slices {
            buffer.as_mut_slice::<T>()?[at].copy_from_slice(copy.as_slice()?);
        });
        Ok(buffer)
    }

    fn wait_until_done(&self) -> Result<Buffer> {
        let (hold, group) = (&self.hold, &self.group);
        group.meeting.wait_until(
            self.rank,
            hold,
            || hold.is_ready() && hold.payload.is_done(),
            || group.work(hold, self.rank, usize::MAX),
        )?;
        let buffer = hold.payload.take(self.rank)?;
        // Now, so that the slot is free when the last rank has come to here, and not when this one starts something else.
        group.forget_what_is_over(self.rank);
        Ok(buffer.expect("a Pending is waited for once, and only wait takes the buffer"))
    }

    fn has_read(&self) {
        if self.to_read.replace(false) {
            self.hold.payload.finish_chunks(1);
            if self.hold.payload.is_done() {
                self.group.meeting.wake();
            }
        }
    }

    /// When the last chunk was finished, on whichever rank.
    pub fn completed_at(&self) -> Option<Instant> {
        self.hold.payload.completed_at()
    }
}

impl Drop for SharedPending {
    /// Who does not read keeps nobody waiting.
    fn drop(&mut self) {
        self.has_read();
    }
}
