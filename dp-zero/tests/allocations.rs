//! Steady state allocates nothing in the framework's own path: hooks, collectives, clipping and step. What Candle allocates for
//! its tensors is not counted. A process of its own, for its allocator.

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::{Cell, RefCell};
use std::time::Duration;

use candle_core::{DType, Tensor};
use dp_core::{
    AdamW, BucketCaps, EngineConfig, LossScaling, NonFinite, ParamStore, Rank, Result, World,
};
use dp_zero::{Sharding, trainer};

thread_local! {
    static COUNTING: Cell<bool> = const { Cell::new(false) };
    /// Who has allocated: the innermost functions of ours and of Candle, in the order of calls.
    static FOUND: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

struct Watching;

// SAFETY: hands all calls on to the system's allocator; what it does besides allocates only while it does not count.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNTING.replace(false) {
            FOUND.with_borrow_mut(|found| found.push(Backtrace::force_capture().to_string()));
            COUNTING.set(true);
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// Functions of this project that allocated themselves, not through Candle.
fn own(backtraces: &[String]) -> Vec<String> {
    let crates = [
        "dp_core::",
        "dp_zero::",
        "candle_core::",
        "candle_nn::",
        "gemm",
        "rayon",
    ];
    let innermost = |trace: &String| {
        let lines = trace.lines();
        let mut frames = lines.filter(|l| crates.iter().any(|c| l.contains(c)));
        frames.next().map(|l| l.trim().to_string())
    };
    let frames = backtraces.iter().filter_map(innermost);
    frames
        .filter(|f| f.contains("dp_core::") || f.contains("dp_zero::"))
        .collect()
}

fn run(rank: &Rank, sharding: Sharding, dtype: DType) -> Result<Vec<String>> {
    let store = ParamStore::new(rank.device());
    let vb = store.var_builder(dtype);
    let create = |i: usize| vb.get_with_hints(10, &format!("p{i}"), candle_nn::Init::Const(1.0));
    let params: Vec<Tensor> = (0..6).map(create).collect::<candle_core::Result<_>>()?;
    let mut engine = EngineConfig::default();
    engine.bucket_caps = BucketCaps::with_first(80, 80)?;
    engine.non_finite = NonFinite::SkipStep;
    if dtype == DType::F16 {
        engine.loss_scaling = LossScaling::dynamic();
        engine.communication_dtype = Some(DType::BF16);
    }
    let mut trainer = trainer(sharding, store, rank.comm(), AdamW::default(), engine)?;
    // Each rank waits for the other one once, so long that its thread is put to sleep, which allocates the first time.
    for late in 0..rank.world_size() {
        if rank.rank() == late {
            std::thread::sleep(Duration::from_millis(20));
        }
        trainer.barrier()?;
    }
    for step in 0..12 {
        let mut loss = Tensor::zeros((), DType::F32, rank.device())?;
        for p in &params {
            loss = (loss + p.sqr()?.sum_all()?.to_dtype(DType::F32)?)?;
        }
        COUNTING.set(step == 11);
        let outcome = trainer
            .backward(&loss)
            .and_then(|()| trainer.clip_grad_norm(1.0))
            .and_then(|_| trainer.step());
        COUNTING.set(false);
        outcome?;
    }
    let all = FOUND.take();
    assert!(
        !all.is_empty(),
        "Candle allocates the gradients, so it is counted"
    );
    Ok(own(&all))
}

#[test]
fn a_step_allocates_nothing() -> Result<()> {
    for sharding in [Sharding::Ddp, Sharding::Zero1, Sharding::Zero2] {
        for dtype in [DType::F32, DType::F16] {
            let world = World::threads(2)?
                .with_timeout(Duration::from_secs(60))
                .with_threads_per_rank(1);
            let found: Vec<Vec<String>> = world.map(move |rank| run(&rank, sharding, dtype))?;
            assert!(
                found.iter().all(Vec::is_empty),
                "{sharding:?} {dtype:?}: {found:#?}"
            );
        }
    }
    Ok(())
}
