//! The work of one collective of the shared-memory backend: the buffers of all ranks, cut into chunks that anybody may do.
//!
//! States of a slot: *open* (some buffers missing; nobody touches any) -> *ready* (all there; chunks are claimed) ->
//! *done* (every chunk finished; each owner takes its buffer back) -> *free* (no [`Hold`] is left, no buffer either; the
//! slot may serve another collective).
//!
//! Buffers on a CUDA device are not cut into chunks: one rank starts the kernels of the whole collective.

#[cfg(feature = "cuda")]
mod cuda;

use std::ops::{Deref, Range};
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use candle_core::DType;
use parking_lot::RwLock;

use super::gathering::{ReadSlice, others, slice};
use super::reduce::{Ranks, copy, reduce};
use super::rendezvous::{Payload, Slot};
use super::traffic::TrafficCounters;
use super::{Collective, Request};
use crate::buffer::{Buffer, Element, with_element};
use crate::error::Result;

/// Bytes of one chunk of one rank. Small enough that a rank which comes late finds some left to help with, and large
/// enough that claiming one, and the start of the processor's prefetching, do not count.
const CHUNK_BYTES: usize = 64 << 10;

/// What moments are counted from, since an atomic has no room for an `Instant`.
static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// The buffers of one collective and the progress of the work on them.
pub(super) struct Exchange {
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
    /// When the latest chunk was finished, in nanoseconds from [`START`]; 0 before any.
    finished_at: AtomicU64,
    /// Those who may still touch the buffers; see [`Hold`].
    holders: AtomicUsize,
    #[cfg(feature = "cuda")]
    streams: cuda::Streams,
}

/// Where one rank's buffer lies while the collective owns it.
struct Berth {
    start: AtomicPtr<u8>,
    /// Locked for reading by those who read it in place.
    buffer: RwLock<Option<Buffer>>,
}

impl Payload for Exchange {
    /// More than are ever under way at a time: a bucket each, and what a step adds.
    const KEPT: usize = 64;

    fn new(request: &Request, dtype: DType, len: usize, world_size: usize) -> Self {
        let berth = |_| Berth {
            start: AtomicPtr::new(std::ptr::null_mut()),
            buffer: RwLock::new(None),
        };
        let mut exchange = Self {
            collective: request.collective,
            dtype,
            berths: (0..world_size).map(berth).collect(),
            chunks_per_slice: 0,
            num_chunks: 0,
            chunk_len: 0,
            len,
            next_chunk: AtomicUsize::new(0),
            finished_chunks: AtomicUsize::new(0),
            finished_at: AtomicU64::new(0),
            holders: AtomicUsize::new(0),
            #[cfg(feature = "cuda")]
            streams: cuda::Streams::new(world_size),
        };
        exchange.renew(request, dtype, len);
        exchange
    }

    fn renew(&mut self, request: &Request, dtype: DType, len: usize) {
        let world_size = self.berths.len();
        self.collective = request.collective;
        self.dtype = dtype;
        self.len = len;
        self.chunk_len = CHUNK_BYTES / dtype.size_in_bytes();
        self.chunks_per_slice = len.div_ceil(world_size).div_ceil(self.chunk_len);
        self.num_chunks = self.chunks_per_slice * world_size;
        *self.next_chunk.get_mut() = 0;
        if request.in_place {
            // One for each rank, which it claims by its reading.
            self.num_chunks = world_size;
            *self.next_chunk.get_mut() = world_size;
        }
        *self.finished_chunks.get_mut() = 0;
        *self.finished_at.get_mut() = 0;
        // Each rank will hold the slot; those who have not come yet, too, or it would be free before they do.
        *self.holders.get_mut() = world_size;
        #[cfg(feature = "cuda")]
        self.streams.renew();
    }
}

/// The right to touch the buffers of an exchange. The last one who gives it up frees the buffers that nobody has taken, so
/// a collective that nobody waits for keeps no memory.
pub(super) struct Hold(Arc<Slot<Exchange>>);

impl Hold {
    /// The hold that each rank has from the beginning; taken once per rank, when it has joined.
    pub fn of_rank(slot: Arc<Slot<Exchange>>) -> Self {
        Self(slot)
    }

    /// Another hold, unless the exchange is free.
    pub fn another(slot: &Arc<Slot<Exchange>>) -> Option<Self> {
        let one_more = |n: usize| (n > 0).then_some(n + 1);
        let holders = &slot.payload.holders;
        holders
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more)
            .ok()?;
        Some(Self(Arc::clone(slot)))
    }
}

impl Deref for Hold {
    type Target = Arc<Slot<Exchange>>;
    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let exchange = &self.0.payload;
        // AcqRel: what the others did with the buffers happened before they are freed.
        if exchange.holders.fetch_sub(1, Ordering::AcqRel) == 1 {
            #[cfg(feature = "cuda")]
            exchange.streams.before_free(&exchange.berths);
            for berth in &exchange.berths {
                drop(berth.buffer.write().take());
            }
        }
    }
}

impl Exchange {
    /// Leaves a rank's buffer. Once per rank, before the slot is ready.
    pub fn deposit(&self, rank: usize, mut buffer: Buffer) {
        let berth = &self.berths[rank];
        #[cfg(feature = "cuda")]
        self.streams.leave(rank, &buffer);
        // The elements do not move when the Buffer does: they are on the heap.
        berth.start.store(buffer.as_mut_ptr(), Ordering::Release);
        *berth.buffer.write() = Some(buffer);
    }

    /// Takes a rank's buffer back; `None` if it was taken before. Only when the exchange is done.
    ///
    /// # Errors
    /// [`Error::Cuda`](crate::Error::Cuda) and [`Error::InvalidArgument`](crate::Error::InvalidArgument), on all ranks, if the
    /// kernels could not be started. On the host it does not fail.
    pub fn take(&self, rank: usize) -> Result<Option<Buffer>> {
        let buffer = self.berths[rank].buffer.write().take();
        #[cfg(feature = "cuda")]
        if let Some(buffer) = &buffer {
            self.streams.take(buffer)?;
        }
        Ok(buffer)
    }

    /// True when every chunk is finished.
    pub fn is_done(&self) -> bool {
        self.finished_chunks.load(Ordering::Acquire) == self.num_chunks
    }

    /// When the last chunk was finished; `None` if there was none.
    pub fn completed_at(&self) -> Option<Instant> {
        let at = self.finished_at.load(Ordering::Relaxed);
        (at > 0).then(|| *START + Duration::from_nanos(at))
    }

    /// The chunks that each rank would do if all did as many.
    pub fn fair_share(&self) -> usize {
        self.num_chunks.div_ceil(self.berths.len())
    }

    /// Nobody needs to look at it again: all done, or nobody holds it.
    pub fn is_over(&self) -> bool {
        self.is_done() || self.holders.load(Ordering::Relaxed) == 0
    }

    /// Claims one chunk and does it; false if all are claimed. The slot of `hold` must be ready. `rank`: whose thread this is.
    pub fn do_next_chunk(hold: &Hold, rank: usize, traffic: &[TrafficCounters]) -> bool {
        let exchange = &hold.payload;
        #[cfg(feature = "cuda")]
        if exchange.streams.on_device() {
            return exchange.start_kernels(rank, traffic);
        }
        #[cfg(not(feature = "cuda"))]
        let _ = rank;
        // Looked at first, so that the counter cannot run away.
        if exchange.next_chunk.load(Ordering::Relaxed) >= exchange.num_chunks {
            return false;
        }
        let chunk = exchange.next_chunk.fetch_add(1, Ordering::Relaxed);
        if chunk >= exchange.num_chunks {
            return false;
        }
        let home = chunk / exchange.chunks_per_slice;
        let slice = exchange.slice(home);
        let start = slice.start + (chunk % exchange.chunks_per_slice) * exchange.chunk_len;
        let range = start.min(slice.end)..(start + exchange.chunk_len).min(slice.end);
        if !range.is_empty() {
            debug_assert!(hold.is_ready());
            with_element!(exchange.dtype, T => {
                // SAFETY: the slot is ready (the caller's contract, checked above in debug builds), so every berth was
                // given a buffer of `len` elements of `dtype`. None of them is gone: owners take theirs back only when
                // `finished_chunks` has reached `num_chunks`, which it cannot before this chunk is finished, and the rest
                // is freed only when there is no hold. `fetch_add` gave this chunk to this thread alone, and chunks are
                // disjoint ranges, so nobody else touches these elements meanwhile.
                unsafe { exchange.do_range::<T>(home, range.clone()) }
            });
            exchange.count(home, range.len(), traffic);
        }
        exchange.finish_chunks(1);
        true
    }

    /// The elements that are reduced for rank `home`, or come from it.
    fn slice(&self, home: usize) -> Range<usize> {
        slice(home, self.len, self.berths.len())
    }

    /// Calls `read` with the slice of each other rank, where it lies. The slot of `hold` must be ready, and
    /// [`finish_chunks`](Self::finish_chunks) must follow: until then no owner takes its buffer back.
    pub fn read_slices(
        hold: &Hold,
        rank: usize,
        traffic: &[TrafficCounters],
        read: &mut ReadSlice<'_>,
    ) -> Result<()> {
        let exchange = &hold.payload;
        debug_assert!(hold.is_ready() && !exchange.is_done());
        for other in others(rank, exchange.berths.len()) {
            let at = exchange.slice(other);
            let bytes = at.len() * exchange.dtype.size_in_bytes();
            if let Some(buffer) = &*exchange.berths[other].buffer.read() {
                read(at, buffer)?;
            }
            traffic[other].sent(exchange.collective, bytes as u64);
        }
        Ok(())
    }

    /// So many more are done.
    pub fn finish_chunks(&self, count: usize) {
        // Before the chunks count: whoever sees all of them finished sees the latest moment.
        let now = START.elapsed().as_nanos() as u64;
        self.finished_at.fetch_max(now.max(1), Ordering::Relaxed);
        self.finished_chunks.fetch_add(count, Ordering::AcqRel);
    }

    /// # Safety
    /// All berths hold buffers of `len >= range.end` elements of type `T`, and no other thread accesses `range` of any
    /// of them during the call.
    unsafe fn do_range<T: Element>(&self, home: usize, range: Range<usize>) {
        let n = self.berths.len();
        let ranks = At {
            berths: &self.berths,
            from: range.start,
        };
        match self.collective {
            // SAFETY: passed on; two different ranks' buffers do not overlap.
            Collective::AllReduce(op) => unsafe {
                reduce::<T, _>(ranks, 0..n, range.len(), op);
            },
            // SAFETY: passed on; two different ranks' buffers do not overlap.
            Collective::ReduceScatter(op) => unsafe {
                reduce::<T, _>(ranks, home..home + 1, range.len(), op);
            },
            Collective::AllGather | Collective::Broadcast { .. } => {
                let source = match self.collective {
                    Collective::Broadcast { root } => root,
                    _ => home,
                };
                // SAFETY: passed on; two different ranks' buffers do not overlap.
                unsafe { copy::<T, _>(ranks, source, range.len()) };
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

/// The ranks' buffers from an element on.
#[derive(Clone, Copy)]
struct At<'a> {
    berths: &'a [Berth],
    from: usize,
}

impl<T: Element> Ranks<T> for At<'_> {
    #[inline(always)]
    fn world_size(&self) -> usize {
        self.berths.len()
    }

    #[inline(always)]
    fn start(&self, rank: usize) -> *mut T {
        let start = self.berths[rank].start.load(Ordering::Acquire).cast::<T>();
        // Inside the buffer wherever `do_range` may be called; not dereferenced here.
        start.wrapping_add(self.from)
    }
}
