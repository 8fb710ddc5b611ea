use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicI64, Ordering};

use candle_core::{DType, Tensor};
use dp_core::memory::{Category, CountingAllocator, heap_usage, reset_heap_peak};
use dp_core::{AdamW, Buffer, DistributedDataParallel, Ledger, ParamStore, Rank, Result, Trainer};

use crate::support::{builder, isolated, linear_loss, ones, ranks, world};

/// Counts the heap of the whole test binary. Counters belong to rank numbers, so tests that read them run in processes
/// of their own.
#[global_allocator]
static ALLOCATOR: CountingAllocator<Total> = CountingAllocator::new(Total);

/// The system's allocator with a count over all threads, to check the other counts against.
struct Total;

static TOTAL: AtomicI64 = AtomicI64::new(0);

// SAFETY: every call is handed to the system's allocator unchanged. `realloc` and `alloc_zeroed` are the provided ones,
// which call these two.
unsafe impl GlobalAlloc for Total {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        TOTAL.fetch_add(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        TOTAL.fetch_sub(layout.size() as i64, Ordering::Relaxed);
        // SAFETY: the caller's promise, passed on.
        unsafe { System.dealloc(ptr, layout) }
    }
}

const MIB: u64 = 1 << 20;

/// What bookkeeping may cost.
const SLACK: u64 = 32 << 10;

fn current(rank: &Rank) -> u64 {
    heap_usage(Some(rank.rank())).current
}

#[track_caller]
fn assert_about(bytes: u64, expected: u64) {
    assert!(
        bytes.abs_diff(expected) <= SLACK,
        "{bytes} bytes, expected about {expected}"
    );
}

#[test]
fn heap_is_attributed_to_ranks() {
    isolated("memory::heap_is_attributed_to_ranks", &[], || {
        let outside = vec![1u8; 3 * MIB as usize];
        assert!(heap_usage(None).current >= 3 * MIB);
        ranks(3, |rank| {
            let before = current(&rank);
            let block = vec![1u8; rank.rank() * MIB as usize];
            assert_about(current(&rank) - before, rank.rank() as u64 * MIB);
            rank.comm().barrier()?;
            // Threads of the rank's pool count for it.
            let (a, b) = rayon::join(|| vec![1u8; MIB as usize], || vec![1u8; MIB as usize]);
            assert_about(current(&rank) - before, (rank.rank() as u64 + 2) * MIB);
            drop((a, b, block));
            assert_about(current(&rank), before);
            Ok(())
        });
        drop(outside);
    });
}

#[test]
fn peaks_see_temporaries_and_know_what_the_ledger_explains() {
    isolated(
        "memory::peaks_see_temporaries_and_know_what_the_ledger_explains",
        &[],
        || {
            ranks(2, |rank| {
                let me = Some(rank.rank());
                let ledger = Ledger::new();
                reset_heap_peak(me);
                let base = heap_usage(me);
                drop(vec![1u8; 2 * MIB as usize]);
                let now = heap_usage(me);
                assert_about(now.peak - base.peak, 2 * MIB);
                assert_about(now.untracked_peak - base.untracked_peak, 2 * MIB);
                assert_about(now.current, base.current);

                reset_heap_peak(me);
                let buffer =
                    Buffer::reserved(DType::F32, MIB as usize, &ledger, Category::Gradients)?;
                let now = heap_usage(me);
                assert_about(now.peak - base.current, 4 * MIB);
                assert_about(now.untracked_peak, base.untracked_peak);
                drop(vec![1u8; MIB as usize]);
                drop(buffer);
                let now = heap_usage(me);
                assert_about(now.untracked_peak - base.untracked_peak, MIB);
                assert_about(now.peak - base.current, 5 * MIB);
                reset_heap_peak(me);
                assert_about(heap_usage(me).peak, base.current);
                Ok(())
            });
        },
    );
}

/// A model of a million elements, trained for two steps; the bytes it holds are given to `look`.
fn train(rank: &Rank, look: impl Fn(&DistributedDataParallel<AdamW>) -> Result<()>) -> Result<()> {
    let store = ParamStore::new(rank.device());
    let vb = builder(&store);
    let (a, b) = (ones(&vb, (500, 1000), "a")?, ones(&vb, 500_000, "b")?);
    let mut trainer = DistributedDataParallel::new(store, rank.comm(), AdamW::default())?;
    for _ in 0..2 {
        trainer.backward(&(linear_loss(&a, 1.0)? + linear_loss(&b, 2.0)?)?)?;
        trainer.step()?;
    }
    look(&trainer)
}

#[test]
fn the_ledger_is_the_heap_of_a_trainer() {
    isolated("memory::the_ledger_is_the_heap_of_a_trainer", &[], || {
        let before = TOTAL.load(Ordering::Relaxed);
        for world_size in [1, 2, 3] {
            ranks(world_size, |rank| {
                let before = current(&rank);
                train(&rank, |trainer| {
                    let held = trainer.ledger().current();
                    assert!(
                        (16_000_000..16_000_100).contains(&held.model_states()),
                        "{held:?}"
                    );
                    assert_eq!(held.communication, 0);
                    rank.comm().barrier()?;
                    assert_about(current(&rank) - before, held.model_states());
                    Ok(())
                })?;
                rank.comm().barrier()?;
                // Nothing holds anything else: no cycle between parameters, hooks and trainer.
                assert_about(current(&rank), before);
                Ok(())
            });
            assert_about((TOTAL.load(Ordering::Relaxed) - before).unsigned_abs(), 0);
        }
    });
}

#[test]
fn the_model_alone_does_not_hold_gradients_and_moments() {
    isolated(
        "memory::the_model_alone_does_not_hold_gradients_and_moments",
        &[],
        || {
            ranks(1, |rank| {
                let before = current(&rank);
                let store = ParamStore::new(rank.device());
                let w = ones(&builder(&store), 1_000_000, "w")?;
                assert_about(current(&rank) - before, 4_000_000);
                let trainer = DistributedDataParallel::new(store, rank.comm(), AdamW::default())?;
                assert_about(current(&rank) - before, 16_000_000);
                drop(trainer);
                assert_about(current(&rank) - before, 4_000_000);
                drop(w);
                assert_about(current(&rank), before);
                Ok(())
            });
        },
    );
}

#[test]
fn c54_steps_do_not_gather_memory() {
    isolated("memory::c54_steps_do_not_gather_memory", &[], || {
        let used = || TOTAL.load(Ordering::Relaxed);
        ranks(2, move |rank| {
            let store = ParamStore::new(rank.device());
            let w = ones(&builder(&store), 50, "w")?;
            let mut trainer = DistributedDataParallel::new(store, rank.comm(), AdamW::default())?;
            let mut total = Tensor::new(0f32, rank.device())?;
            let mut warm = 0;
            for step in 0..2000 {
                let loss = w.sqr()?.mean_all()?;
                trainer.backward(&loss)?;
                trainer.step()?;
                total = (total + loss.detach())?.detach();
                if step == 200 {
                    trainer.barrier()?;
                    warm = used();
                    trainer.barrier()?;
                }
            }
            trainer.barrier()?;
            let now = used();
            trainer.barrier()?;
            assert!(now - warm < 16 << 10, "{warm} bytes, then {now}");
            Ok(())
        });
    });
}

#[test]
fn c54_worlds_that_work_and_worlds_that_fail_leave_nothing() {
    isolated(
        "memory::c54_worlds_that_work_and_worlds_that_fail_leave_nothing",
        &[],
        || {
            let one = |fails: bool| {
                let result = world(2).run(|rank| {
                    let store = ParamStore::new(rank.device());
                    let w = ones(&builder(&store), 5000, "w")?;
                    let mut trainer =
                        DistributedDataParallel::new(store, rank.comm(), AdamW::default())?;
                    trainer.backward(&linear_loss(&w, 1.0)?)?;
                    if fails && rank.rank() == 1 {
                        return Err(dp_core::Error::invalid("disk", "it is on fire"));
                    }
                    trainer.step().map(drop)
                });
                assert_eq!(result.is_err(), fails);
            };
            (0..10).for_each(|i| one(i % 2 == 0));
            let settled = || {
                // A thread that has been joined may take a moment to free its last bytes.
                std::thread::sleep(std::time::Duration::from_millis(100));
                TOTAL.load(Ordering::Relaxed)
            };
            let before = settled();
            (0..200).for_each(|i| one(i % 2 == 0));
            let now = settled();
            assert!(now - before < 16 << 10, "{before} bytes, then {now}");
        },
    );
}
