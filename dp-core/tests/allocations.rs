//! How often collectives allocate. A binary of its own: its allocator counts every call.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use dp_core::comm::{Collective, Pending, Request};
use dp_core::{Buffer, Rank, ReduceOp, Result, World};
use parking_lot::{Condvar, Mutex};

#[global_allocator]
static ALLOCATOR: Calls = Calls;

/// The system's allocator, with a count of calls per thread.
struct Calls;

thread_local! {
    static NUM_CALLS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: every call is handed to the system's allocator unchanged. `realloc` and `alloc_zeroed` are the provided ones,
// which call these two.
unsafe impl GlobalAlloc for Calls {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        NUM_CALLS.set(NUM_CALLS.get() + 1);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        NUM_CALLS.set(NUM_CALLS.get() + 1);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// As many collectives as `buffers`, all under way at a time, of all kinds; then a barrier.
fn round(
    rank: &Rank,
    label: &Arc<str>,
    buffers: &mut [Option<Buffer>],
    pending: &mut Vec<Pending>,
) -> Result<()> {
    let comm = rank.comm();
    for (i, buffer) in buffers.iter_mut().enumerate() {
        let collective = match i % 4 {
            0 => Collective::AllReduce(ReduceOp::Mean),
            1 => Collective::ReduceScatter(ReduceOp::Sum),
            2 => Collective::AllGather,
            _ => Collective::Broadcast {
                root: i % comm.world_size(),
            },
        };
        let buffer = buffer.take().expect("put back in each round");
        pending.push(comm.start(Request::new(collective, Arc::clone(label)), buffer)?);
        comm.progress();
    }
    for (buffer, pending) in buffers.iter_mut().zip(pending.drain(..)) {
        *buffer = Some(pending.wait()?);
    }
    comm.barrier()
}

#[test]
fn collectives_allocate_nothing_once_warm() -> Result<()> {
    for world_size in [1, 2, 3, 4] {
        let world = World::threads(world_size)?.with_threads_per_rank(1);
        let counts = world.map(|rank| -> Result<u64> {
            let label: Arc<str> = "a bucket".into();
            // Several chunks in the longest, none in the empty one.
            let lens = [0, 12, 1200, 48_000, 120_000];
            let mut buffers: Vec<Option<Buffer>> = (0..60)
                .map(|i| Some(Buffer::from_vec(vec![0f32; lens[i % lens.len()]])))
                .collect();
            let mut pending = Vec::with_capacity(buffers.len());
            // The most that may be under way at a time.
            round(&rank, &label, &mut buffers, &mut pending)?;
            // parking_lot makes its notes on a thread when it parks it for the first time.
            let (lock, changed) = (Mutex::new(()), Condvar::new());
            changed.wait_for(&mut lock.lock(), Duration::from_millis(1));
            rank.comm().barrier()?;
            let before = NUM_CALLS.get();
            for _ in 0..100 {
                round(&rank, &label, &mut buffers[..20], &mut pending)?;
            }
            Ok(NUM_CALLS.get() - before)
        })?;
        assert_eq!(counts, vec![0; world_size], "{world_size} ranks");
    }
    Ok(())
}
