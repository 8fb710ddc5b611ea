//! Ranks that differ, fail or are late, as threads.

use std::time::Duration;

use candle_core::DType;
use dp_core::{Backend, Devices, Error, ReduceOp, Result, World};

use crate::harness::Test;
use crate::results::on_gpu;
use crate::{gpus, world};

pub const TESTS: &[Test] = &[
    ("failures: two ranks on one GPU", two_ranks_on_one_gpu),
    ("failures: ranks that differ", || {
        with_others(ranks_that_differ)
    }),
    ("failures: a rank that fails", || {
        with_others(a_rank_that_fails)
    }),
    ("failures: a rank that is late", || {
        with_others(a_rank_that_is_late)
    }),
];

fn with_others(test: fn(&World)) {
    match gpus() {
        1 => println!("skipped: there is one GPU"),
        n => test(&world(n)),
    }
}

fn two_ranks_on_one_gpu() {
    let world = World::threads(2).expect("two ranks");
    let world = world
        .with_backend(Backend::Nccl)
        .with_devices(Devices::Cuda(vec![0]));
    fails(
        world.run(|_| Ok(())),
        &["ranks 0 and 1 both have GPU 0", "NCCL needs a GPU"],
    );
}

#[track_caller]
fn fails(result: Result<()>, parts: &[&str]) {
    let text = result.expect_err("this must fail").to_string();
    for part in parts {
        assert!(text.contains(part), "no {part:?} in {text:?}");
    }
}

fn ranks_that_differ(world: &World) {
    let result = world.run(|rank| {
        rank.comm().barrier()?;
        let len = if rank.rank() == 1 { 600_000 } else { 500_000 };
        let buffer = on_gpu(&rank, &vec![1.0; len], DType::F32)?;
        let error = rank.comm().all_reduce(buffer, ReduceOp::Sum)?.wait();
        let error = error.expect_err("ranks differ");
        assert!(matches!(error, Error::Mismatch { seq: 1, .. }), "{error}");
        Err(error)
    });
    fails(
        result,
        &["of 600000 f32", "of 500000 f32", "differs between ranks"],
    );
}

fn a_rank_that_fails(world: &World) {
    let result = world.run(|rank| {
        if rank.rank() == 1 {
            return Err(Error::invalid("test", "rank 1 gives up"));
        }
        let buffer = on_gpu(&rank, &[1.0; 1000], DType::F32)?;
        rank.comm()
            .all_reduce(buffer, ReduceOp::Sum)?
            .wait()
            .map(drop)
    });
    fails(
        result,
        &[
            "rank 1 failed: invalid test: rank 1 gives up",
            "stopped because of it",
        ],
    );
}

fn a_rank_that_is_late(world: &World) {
    let short = world.clone().with_timeout(Duration::from_secs(3));
    let result = short.run(|rank| {
        rank.comm().barrier()?;
        if rank.rank() == 1 {
            std::thread::sleep(Duration::from_secs(5));
        }
        let buffer = on_gpu(&rank, &[1.0; 1000], DType::F32)?;
        rank.comm()
            .all_reduce(buffer, ReduceOp::Sum)?
            .wait()
            .map(drop)
    });
    fails(result, &["waited 3", "not there: rank 1"]);
}
