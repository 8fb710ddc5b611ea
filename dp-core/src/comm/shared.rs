//! The shared-memory backend: ranks are threads, buffers are never copied into the communicator.
//!
//! A collective owns the buffers of all ranks while it runs. Its elements are cut into chunks that fit in cache; any
//! rank may claim a chunk, reads it from each rank's buffer once and writes it where it belongs once. No phase
//! needs to wait for another, so there is no barrier inside a collective.
//!
//! States of a slot: *open* (some buffers missing; nobody touches any) -> *ready* (all there; chunks are claimed) ->
//! *done* (every chunk finished; each owner takes its buffer back).
//!
//! Who works: a rank in [`Pending::wait`] works until no chunk is left. A rank that computes takes its share, `1/N` of
//! the chunks, whenever [`Communicator::progress`] is called. So communication goes on during backward without
//! extra threads, and a rank that is late is not the only one to do the work.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use candle_core::DType;
use parking_lot::Mutex;

use super::rendezvous::{GroupControl, Rendezvous, Slot};
use super::traffic::TrafficCounters;
use super::{Collective, Communicator, Pending, PendingCollective, ReduceOp, Request, Traffic};
use crate::buffer::{Buffer, Element, with_element};
use crate::error::Result;

/// Bytes of one chunk: with 4 ranks, the chunk of all of them stays in a 1 MiB L2 cache.
const CHUNK_BYTES: usize = 64 << 10;

/// Elements reduced at a time; the accumulators live on the stack.
const BLOCK: usize = 1024;

/// Creates a group of `world_size` ranks that talk through shared memory.
pub(crate) fn shared_group(
    world_size: usize,
    timeout: Duration,
    spin: Duration,
) -> (Vec<Arc<dyn Communicator>>, Arc<dyn GroupControl>) {
    let group = Arc::new(Group {
        meeting: Rendezvous::new(world_size, timeout, spin),
        traffic: (0..world_size)
            .map(|_| TrafficCounters::default())
            .collect(),
    });
    let comms = (0..world_size)
        .map(|rank| {
            Arc::new(SharedComm {
                rank,
                group: Arc::clone(&group),
                in_flight: Mutex::new(VecDeque::new()),
            }) as Arc<dyn Communicator>
        })
        .collect();
    (comms, group)
}

struct Group {
    meeting: Rendezvous<Exchange>,
    traffic: Vec<TrafficCounters>,
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
    /// Collectives this rank has joined and not seen done, for `progress`. Weak: if every rank has dropped its `Pending`,
    /// nobody wants the result, and the buffers are freed.
    in_flight: Mutex<VecDeque<Weak<Slot<Exchange>>>>,
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

    fn start(&self, request: Request, mut buffer: Buffer) -> Result<Pending> {
        let (dtype, len, n) = (buffer.dtype(), buffer.len(), self.world_size());
        request.validate(dtype, len, n)?;
        self.group.traffic[self.rank].called(request.collective);
        let collective = request.collective;
        let slot = self.group.meeting.join(
            self.rank,
            request,
            dtype,
            len,
            || Exchange::new(collective, dtype, len, n),
            |exchange| {
                let berth = &exchange.berths[self.rank];
                // The elements do not move when the Buffer does: they are on the heap.
                berth.start.store(buffer.as_mut_ptr(), Ordering::Release);
                *berth.buffer.lock() = Some(buffer);
            },
        )?;
        let mut in_flight = self.in_flight.lock();
        in_flight.retain(is_under_way);
        in_flight.push_back(Arc::downgrade(&slot));
        drop(in_flight);
        Ok(Pending::new(SharedPending {
            rank: self.rank,
            group: Arc::clone(&self.group),
            slot,
        }))
    }

    fn progress(&self) {
        let mut in_flight = self.in_flight.lock();
        for slot in in_flight
            .iter()
            .filter_map(Weak::upgrade)
            .filter(|s| s.is_ready())
        {
            let share = slot.payload.num_chunks.div_ceil(self.world_size());
            self.group.work(&slot, share);
        }
        in_flight.retain(is_under_way);
    }

    fn traffic(&self) -> Traffic {
        self.group.traffic[self.rank].read()
    }
}

fn is_under_way(slot: &Weak<Slot<Exchange>>) -> bool {
    slot.upgrade().is_some_and(|s| !s.payload.is_done())
}

impl Group {
    /// Claims and does up to `limit` chunks of a ready slot.
    fn work(&self, slot: &Slot<Exchange>, limit: usize) {
        debug_assert!(slot.is_ready());
        let exchange = &slot.payload;
        for _ in 0..limit {
            // Nobody waits for the results of a closed group.
            if self.meeting.is_closed() || !exchange.do_next_chunk(slot, &self.traffic) {
                return;
            }
            if exchange.is_done() {
                self.meeting.wake();
            }
        }
    }
}

struct SharedPending {
    rank: usize,
    group: Arc<Group>,
    slot: Arc<Slot<Exchange>>,
}

impl PendingCollective for SharedPending {
    fn is_done(&self) -> bool {
        (self.slot.is_ready() && self.slot.payload.is_done()) || self.group.meeting.is_closed()
    }

    fn wait(self: Box<Self>) -> Result<Buffer> {
        let (slot, group) = (&self.slot, &self.group);
        group.meeting.wait_until(
            self.rank,
            slot,
            || slot.is_ready() && slot.payload.is_done(),
            || group.work(slot, usize::MAX),
        )?;
        let buffer = slot.payload.berths[self.rank].buffer.lock().take();
        Ok(buffer.expect("a Pending is waited for once, and only wait takes the buffer"))
    }
}

/// The buffers of one collective and the progress of the work on them.
struct Exchange {
    collective: Collective,
    dtype: DType,
    berths: Box<[Berth]>,
    /// Chunks in each slice, and in all.
    chunks_per_slice: usize,
    num_chunks: usize,
    chunk_len: usize,
    len: usize,
    next_chunk: AtomicUsize,
    finished_chunks: AtomicUsize,
}

/// Where one rank's buffer lies while the collective owns it.
struct Berth {
    start: AtomicPtr<u8>,
    buffer: Mutex<Option<Buffer>>,
}

impl Exchange {
    fn new(collective: Collective, dtype: DType, len: usize, world_size: usize) -> Self {
        let chunk_len = CHUNK_BYTES / dtype.size_in_bytes();
        let chunks_per_slice = len.div_ceil(world_size).div_ceil(chunk_len);
        Self {
            collective,
            dtype,
            berths: (0..world_size)
                .map(|_| Berth {
                    start: AtomicPtr::new(std::ptr::null_mut()),
                    buffer: Mutex::new(None),
                })
                .collect(),
            chunks_per_slice,
            num_chunks: chunks_per_slice * world_size,
            chunk_len,
            len,
            next_chunk: AtomicUsize::new(0),
            finished_chunks: AtomicUsize::new(0),
        }
    }

    fn is_done(&self) -> bool {
        self.finished_chunks.load(Ordering::Acquire) == self.num_chunks
    }

    /// Claims one chunk and does it; false if all are claimed.
    fn do_next_chunk(&self, slot: &Slot<Exchange>, traffic: &[TrafficCounters]) -> bool {
        // Looked at first, so that the counter cannot run away.
        if self.next_chunk.load(Ordering::Relaxed) >= self.num_chunks {
            return false;
        }
        let chunk = self.next_chunk.fetch_add(1, Ordering::Relaxed);
        if chunk >= self.num_chunks {
            return false;
        }
        let n = self.berths.len();
        let home = chunk / self.chunks_per_slice;
        let slice = home * self.len / n..(home + 1) * self.len / n;
        let start = slice.start + (chunk % self.chunks_per_slice) * self.chunk_len;
        let range = start.min(slice.end)..(start + self.chunk_len).min(slice.end);
        if !range.is_empty() {
            debug_assert!(slot.is_ready());
            with_element!(self.dtype, T => {
                // SAFETY: the slot is ready (the caller's contract, checked above in debug builds), so every berth holds
                // a live buffer of `len` elements of `dtype`. `fetch_add` gave this chunk to this thread alone, and
                // chunks are disjoint ranges, so nobody else touches these elements until `finished_chunks` reaches
                // `num_chunks`; only then do owners take their buffers back.
                unsafe { self.do_range::<T>(home, range.clone()) }
            });
            self.count(home, range.len(), traffic);
        }
        self.finished_chunks.fetch_add(1, Ordering::AcqRel);
        true
    }

    /// # Safety
    /// All berths hold buffers of `len >= range.end` elements of type `T`, and no other thread accesses `range` of any
    /// of them during the call.
    unsafe fn do_range<T: Element>(&self, home: usize, range: Range<usize>) {
        let at = |rank: usize| {
            let start = self.berths[rank].start.load(Ordering::Acquire).cast::<T>();
            // SAFETY: inside the buffer, as the caller promises.
            unsafe { start.add(range.start) }
        };
        let n = self.berths.len();
        match self.collective {
            Collective::AllReduce(op) => {
                // SAFETY: passed on.
                unsafe {
                    reduce::<T>(n, at, range.len(), op, |block, from| {
                        for rank in 0..n {
                            std::ptr::copy_nonoverlapping(
                                block.as_ptr(),
                                at(rank).add(from),
                                block.len(),
                            );
                        }
                    })
                }
            }
            Collective::ReduceScatter(op) => {
                // SAFETY: passed on.
                unsafe {
                    reduce::<T>(n, at, range.len(), op, |block, from| {
                        std::ptr::copy_nonoverlapping(
                            block.as_ptr(),
                            at(home).add(from),
                            block.len(),
                        );
                    })
                }
            }
            Collective::AllGather | Collective::Broadcast { .. } => {
                let source = match self.collective {
                    Collective::Broadcast { root } => root,
                    _ => home,
                };
                for rank in (0..n).filter(|r| *r != source) {
                    // SAFETY: two different ranks' buffers do not overlap; both ranges are in bounds.
                    unsafe { std::ptr::copy_nonoverlapping(at(source), at(rank), range.len()) };
                }
            }
            Collective::Barrier => {}
        }
    }

    fn count(&self, home: usize, elements: usize, traffic: &[TrafficCounters]) {
        let bytes = (elements * self.dtype.size_in_bytes()) as u64;
        let others = (self.berths.len() - 1) as u64;
        let to_home = matches!(
            self.collective,
            Collective::AllReduce(_) | Collective::ReduceScatter(_)
        );
        let from = match self.collective {
            Collective::AllReduce(_) | Collective::AllGather => Some(home),
            Collective::Broadcast { root } => Some(root),
            Collective::ReduceScatter(_) | Collective::Barrier => None,
        };
        for (rank, counters) in traffic.iter().enumerate() {
            if to_home && rank != home {
                counters.sent(self.collective, bytes);
            }
            if from == Some(rank) {
                counters.sent(self.collective, bytes * others);
            }
        }
    }
}

/// Reduces `len` elements at `at(rank)` over the ranks, block by block, and hands each block with its offset to `put`.
/// A block is read completely before `put` is called for it, so `put` may overwrite the inputs.
///
/// # Safety
/// `at(rank)` is valid for reads of `len` elements for each `rank < n`.
unsafe fn reduce<T: Element>(
    n: usize,
    at: impl Fn(usize) -> *mut T,
    len: usize,
    op: ReduceOp,
    mut put: impl FnMut(&[T], usize),
) {
    let divisor = (op == ReduceOp::Mean).then_some(n as f64);
    let mut scratch = [T::ZERO; BLOCK];
    let mut from = 0;
    while from < len {
        let count = BLOCK.min(len - from);
        // SAFETY: in bounds by the caller's promise; the elements of one rank are initialised numbers.
        let input = |rank: usize| unsafe {
            std::slice::from_raw_parts(at(rank).add(from).cast_const(), count)
        };
        let mut acc = [T::ZERO.to_acc(); BLOCK];
        for (a, x) in acc[..count].iter_mut().zip(input(0)) {
            *a = x.to_acc();
        }
        for rank in 1..n {
            let pairs = acc[..count].iter_mut().zip(input(rank));
            match op {
                ReduceOp::Max => pairs.for_each(|(a, x)| *a = T::max(*a, x.to_acc())),
                ReduceOp::Min => pairs.for_each(|(a, x)| *a = T::min(*a, x.to_acc())),
                _ => pairs.for_each(|(a, x)| *a = T::add(*a, x.to_acc())),
            }
        }
        if let Some(divisor) = divisor {
            acc[..count]
                .iter_mut()
                .for_each(|a| *a = T::divide(*a, divisor));
        }
        let block = &mut scratch[..count];
        for (b, a) in block.iter_mut().zip(&acc) {
            *b = T::from_acc(*a);
        }
        put(block, from);
        from += count;
    }
}
