//! Case C54: 2,000 steps with everything switched on gather nothing. A process of its own, because the counters of the heap
//! belong to rank numbers.

use std::alloc::System;
use std::time::Duration;

use candle_core::{DType, Tensor};
use dp_core::memory::{CountingAllocator, heap_usage};
use dp_core::{
    AdamW, BucketCaps, EngineConfig, Loss, NonFinite, ParamStore, Rank, Result, Trainer, World,
};
use dp_zero::{Sharding, trainer};

#[global_allocator]
static ALLOCATOR: CountingAllocator<System> = CountingAllocator::new(System);

/// What may be there in the end and not in the beginning: a container that has grown to its size late.
const SLACK: u64 = 8 << 10;

/// Two micro-batches, one of them without data on rank 1; clipping; every 50th step has a NaN.
fn step(
    trainer: &mut dyn Trainer<Optimizer = AdamW>,
    params: &[Tensor],
    step: usize,
    rank: &Rank,
) -> Result<()> {
    let mut loss = Tensor::zeros((), DType::F32, rank.device())?;
    for p in params {
        loss = (loss + p.sqr()?.sum_all()?)?;
    }
    if step % 50 == 49 {
        loss = (loss * f64::NAN)?;
    }
    let mut window = trainer.accumulate(2)?;
    window.backward_weighted(Loss::Mean {
        loss: &loss,
        count: 3,
    })?;
    window.backward_weighted(match rank.rank() {
        1 => Loss::Nothing,
        _ => Loss::Sum {
            loss: &loss,
            count: 2,
        },
    })?;
    window.finish()?;
    trainer.clip_grad_norm(1.0)?;
    trainer.step().map(drop)
}

/// Bytes of both ranks together (what one allocates for a collective, the other may free), threads and open files.
fn held() -> (u64, usize, usize) {
    let bytes = [Some(0), Some(1)].map(|rank| heap_usage(rank).current);
    let count = |folder| std::fs::read_dir(folder).map_or(0, Iterator::count);
    (
        bytes.iter().sum(),
        count("/proc/self/task"),
        count("/proc/self/fd"),
    )
}

#[test]
fn c54_long_runs_with_everything_on_are_flat() -> Result<()> {
    for sharding in [Sharding::Ddp, Sharding::Zero1, Sharding::Zero2] {
        let world = World::threads(2)?
            .with_timeout(Duration::from_secs(30))
            .with_threads_per_rank(1);
        world.run(move |rank| -> Result<()> {
            // A rank that frees more than it allocates would be cut off at 0.
            let ballast = vec![1u8; 16 << 20];
            let store = ParamStore::new(rank.device());
            let vb = store.var_builder(DType::F32);
            let create =
                |i: usize| vb.get_with_hints(10, &format!("p{i}"), candle_nn::Init::Const(1.0));
            let params: Vec<Tensor> = (0..6).map(create).collect::<candle_core::Result<_>>()?;
            let mut engine = EngineConfig::default();
            engine.bucket_caps = BucketCaps::with_first(80, 80)?;
            engine.non_finite = NonFinite::SkipStep;
            engine.compare_replicas_every = 100;
            let mut trainer = trainer(sharding, store, rank.comm(), AdamW::default(), engine)?;
            assert_eq!(trainer.layout().buckets().len(), 3);
            // One rank measures: to count files is to open a folder.
            let (first, mut warm) = (rank.rank() == 0, None);
            for i in 0..2000 {
                step(trainer.as_mut(), &params, i, &rank)?;
                if i == 200 {
                    trainer.barrier()?;
                    warm = first.then(held);
                    trainer.barrier()?;
                }
            }
            assert_eq!(trainer.num_steps(), 2000 - 2000 / 50);
            trainer.barrier()?;
            let now = first.then(held);
            trainer.barrier()?;
            drop(ballast);
            if let (Some(warm), Some(now)) = (warm, now) {
                assert!(
                    now.0 <= warm.0 + SLACK,
                    "{sharding:?}: {} bytes, then {}",
                    warm.0,
                    now.0
                );
                assert_eq!((now.1, now.2), (warm.1, warm.2), "threads and files");
            }
            Ok(())
        })?;
    }
    Ok(())
}
