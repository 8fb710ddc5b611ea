//! A global allocator that counts heap bytes per rank.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicI64, Ordering};

/// Ranks that get counters of their own. Threads of higher ranks share the counters of "no rank".
const MAX_RANKS: usize = 256;
const NO_RANK: usize = MAX_RANKS;

struct Counters {
    current: AtomicI64,
    peak: AtomicI64,
    tracked: AtomicI64,
    untracked_peak: AtomicI64,
}

static COUNTERS: [Counters; MAX_RANKS + 1] = [const {
    Counters {
        current: AtomicI64::new(0),
        peak: AtomicI64::new(0),
        tracked: AtomicI64::new(0),
        untracked_peak: AtomicI64::new(0),
    }
}; MAX_RANKS + 1];

thread_local! {
    // A const initialiser and no destructor: reading it never allocates, so the allocator may use it.
    static SLOT: Cell<usize> = const { Cell::new(NO_RANK) };
}

/// Attributes the heap use of this thread to `rank` from now on (`None`: to no rank).
pub(crate) fn set_thread_rank(rank: Option<usize>) {
    SLOT.set(rank.filter(|r| *r < MAX_RANKS).unwrap_or(NO_RANK));
}

pub(crate) fn current_slot() -> usize {
    SLOT.get()
}

/// Tells the counters that `delta` bytes of the heap are explained by the ledger.
pub(crate) fn add_tracked(slot: usize, delta: i64) {
    COUNTERS[slot].tracked.fetch_add(delta, Ordering::Relaxed);
}

/// Heap use of the threads of one rank, in bytes as requested from the allocator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
#[non_exhaustive]
pub struct HeapUsage {
    /// Allocated and not yet freed.
    pub current: u64,
    /// Highest `current` since [`reset_heap_peak`].
    pub peak: u64,
    /// Highest value since [`reset_heap_peak`] of `current` less what the rank's ledger held at that moment:
    /// activations, temporaries and everything else that the framework does not keep.
    pub untracked_peak: u64,
}

/// Heap use attributed to `rank`, or to threads of no rank for `None`. All zeros unless a [`CountingAllocator`] is
/// installed.
///
/// A block freed by another rank's thread than the one that allocated it is taken off the freeing rank. The framework
/// hands every buffer back to its owner; what moves between ranks is what user code moves, and the bookkeeping of
/// collectives, some hundred bytes each, which the first rank to come allocates and the last one to leave frees.
pub fn heap_usage(rank: Option<usize>) -> HeapUsage {
    let c = counters(rank);
    let read = |v: &AtomicI64| v.load(Ordering::Relaxed).max(0) as u64;
    HeapUsage {
        current: read(&c.current),
        peak: read(&c.peak),
        untracked_peak: read(&c.untracked_peak),
    }
}

/// Starts new peaks for `rank` at the present values.
pub fn reset_heap_peak(rank: Option<usize>) {
    let c = counters(rank);
    let current = c.current.load(Ordering::Relaxed);
    c.peak.store(current, Ordering::Relaxed);
    c.untracked_peak.store(
        current - c.tracked.load(Ordering::Relaxed),
        Ordering::Relaxed,
    );
}

fn counters(rank: Option<usize>) -> &'static Counters {
    &COUNTERS[rank.filter(|r| *r < MAX_RANKS).unwrap_or(NO_RANK)]
}

fn count(delta: i64) {
    let c = &COUNTERS[current_slot()];
    let now = c.current.fetch_add(delta, Ordering::Relaxed) + delta;
    if delta > 0 {
        // `fetch_max` is a compare-and-swap loop; the plain load spares it nearly always.
        if now > c.peak.load(Ordering::Relaxed) {
            c.peak.fetch_max(now, Ordering::Relaxed);
        }
        let untracked = now - c.tracked.load(Ordering::Relaxed);
        if untracked > c.untracked_peak.load(Ordering::Relaxed) {
            c.untracked_peak.fetch_max(untracked, Ordering::Relaxed);
        }
    }
}

/// Counts what passes through it to the allocator `A`, per rank.
///
/// A binary installs it, so that [`heap_usage`] measures:
///
/// ```
/// use dp_core::memory::{CountingAllocator, heap_usage};
///
/// #[global_allocator]
/// static ALLOCATOR: CountingAllocator = CountingAllocator::system();
///
/// let block = vec![0u8; 1 << 20];
/// assert!(heap_usage(None).current >= 1 << 20);
/// # drop(block);
/// ```
#[derive(Debug, Default, Clone, Copy)]
pub struct CountingAllocator<A = System> {
    inner: A,
}

impl CountingAllocator<System> {
    /// Counts over the system's allocator.
    pub const fn system() -> Self {
        Self::new(System)
    }
}

impl<A> CountingAllocator<A> {
    /// Counts over `inner`, e.g. mimalloc.
    pub const fn new(inner: A) -> Self {
        Self { inner }
    }
}

// SAFETY: every call is handed to `inner` unchanged and its answer returned unchanged, so the contract of GlobalAlloc
// holds because it holds for `inner`. The counting touches only atomics and a const thread-local: it neither allocates
// nor unwinds.
unsafe impl<A: GlobalAlloc> GlobalAlloc for CountingAllocator<A> {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise, passed on.
        let p = unsafe { self.inner.alloc(layout) };
        if !p.is_null() {
            count(layout.size() as i64);
        }
        p
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.inner.dealloc(ptr, layout) };
        count(-(layout.size() as i64));
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise, passed on.
        let p = unsafe { self.inner.alloc_zeroed(layout) };
        if !p.is_null() {
            count(layout.size() as i64);
        }
        p
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller's promise, passed on.
        let p = unsafe { self.inner.realloc(ptr, layout, new_size) };
        if !p.is_null() {
            count(new_size as i64 - layout.size() as i64);
        }
        p
    }
}
