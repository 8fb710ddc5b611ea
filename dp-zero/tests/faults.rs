use std::path::Path;
use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use candle_core::Tensor;
use dp_core::checkpoint::Checkpoint;
use dp_core::{
    AdamW, BucketCaps, Communicator, EngineConfig, Error, ParamStore, Rank, Result, World,
    WorldError,
};
use dp_zero::Sharding;

use crate::checkpoint::folder;
use crate::faulty::{Fault, Faulty};
use crate::support::{STRATEGIES, noise, ones, ranks, same_on_all};

/// Trains two steps of three buckets over `comm`, then saves to `run` and loads from there; the digest of the model.
fn train(
    strategy: Sharding,
    rank: &Rank,
    comm: Arc<dyn Communicator>,
    run: &Path,
) -> Result<String> {
    let store = ParamStore::new(rank.device());
    let params: Vec<Tensor> = ["a", "b", "c"]
        .into_iter()
        .map(|name| ones(&store, 10, name))
        .collect::<Result<_>>()?;
    let mut engine = EngineConfig::default();
    engine.bucket_caps = BucketCaps::new(40)?;
    let mut trainer = dp_zero::trainer(strategy, store, comm, AdamW::default(), engine)?;
    for step in 0..2 {
        let mut loss = Tensor::zeros((), candle_core::DType::F32, rank.device())?;
        for (i, p) in params.iter().enumerate() {
            let x = noise(100 * step + 10 * i as u64 + rank.rank() as u64, 10);
            loss = (loss + (p.tanh()? * x)?.sum_all()?)?;
        }
        trainer.backward(&loss)?;
        trainer.clip_grad_norm(1.0)?;
        trainer.step()?;
    }
    trainer.save(run)?;
    trainer.load(run)?;
    trainer.store().sha256()
}

/// Notes when a rank ends, by a return or a panic.
struct Ends(Arc<Mutex<[Option<Instant>; 3]>>, usize);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.lock().expect("not poisoned")[self.1] = Some(Instant::now());
    }
}

/// Three ranks, of which rank 1 has the fault: how the world ended, and how much later than rank 1 the last rank did.
fn world_with(strategy: Sharding, fault: Fault, timeout: Duration) -> (WorldError, Duration) {
    let (send, receive) = mpsc::channel();
    let (_guard, folder) = folder();
    let run = folder.clone();
    std::thread::spawn(move || {
        let world = World::threads(3)
            .expect("ranks")
            .with_timeout(timeout)
            .with_threads_per_rank(1);
        let ends: Arc<Mutex<[Option<Instant>; 3]>> = Arc::default();
        let result = world.run(|rank| -> Result<()> {
            let _ends = Ends(Arc::clone(&ends), rank.rank());
            let comm: Arc<dyn Communicator> = match rank.rank() {
                1 => Faulty::new(&rank, fault),
                _ => rank.comm(),
            };
            train(strategy, &rank, comm, &run).map(drop)
        });
        // The receiver is gone only if the test has failed by deadline.
        let ends = ends
            .lock()
            .expect("not poisoned")
            .map(|e| e.expect("all ranks end"));
        let last = ends.into_iter().max().expect("three ranks");
        let _ = send.send((result, last - ends[1]));
    });
    let (result, took) = receive
        .recv_timeout(Duration::from_secs(30))
        .expect("hangs");
    // Wherever it failed: there is no checkpoint, or a whole one.
    if folder.join("latest").exists() {
        Checkpoint::open(&folder)
            .and_then(|c| c.verify())
            .expect("complete");
    }
    match result {
        Err(Error::World(error)) => (Arc::into_inner(error).expect("nobody else holds it"), took),
        other => panic!("{strategy:?} {fault:?}: {other:?}"),
    }
}

/// How many collectives a rank starts in `train`.
fn num_collectives(strategy: Sharding) -> usize {
    let (_guard, run) = folder();
    same_on_all(ranks(3, move |rank| {
        let comm = Faulty::new(&rank, Fault::Delay { seed: 0 });
        train(
            strategy,
            &rank,
            Arc::clone(&comm) as Arc<dyn Communicator>,
            &run,
        )?;
        Ok(comm.num_calls())
    }))
}

#[test]
fn a_rank_that_fails_in_any_collective_is_named_by_all() {
    for strategy in STRATEGIES {
        let num = num_collectives(strategy);
        assert!(num > 12, "{num}");
        for at in 0..num {
            for fault in [Fault::Fails { at }, Fault::Panics { at }] {
                let (error, took) = world_with(strategy, fault, Duration::from_secs(20));
                assert!(
                    took < Duration::from_secs(1),
                    "{strategy:?} {fault:?}: {took:?}"
                );
                let failures = error.failures();
                assert_eq!(failures.len(), 3, "{strategy:?} {fault:?}: {error}");
                assert_eq!(failures[0].rank(), 1, "{strategy:?} {fault:?}: {error}");
                assert!(failures[0].to_string().contains("the cable is out"));
                for other in &failures[1..] {
                    assert!(other.is_consequence());
                    let error = other.error().and_then(|e| e.downcast_ref::<Error>());
                    match error {
                        Some(Error::RankFailed {
                            failed: 1, reason, ..
                        }) => {
                            assert!(reason.contains("the cable is out"), "{reason}");
                        }
                        other => panic!("{strategy:?} {fault:?}: {other:?}"),
                    }
                }
            }
        }
    }
}

#[test]
fn a_rank_that_never_answers_is_named_after_the_timeout() {
    let timeout = Duration::from_millis(700);
    for strategy in STRATEGIES {
        let num = num_collectives(strategy);
        // The start values, a bucket, the last collective.
        for at in [3, num / 2, num - 1] {
            let (error, took) = world_with(strategy, Fault::IsLost { at }, timeout);
            assert!(took < Duration::from_secs(5), "{strategy:?} {at}: {took:?}");
            let timeouts = error
                .failures()
                .iter()
                .filter_map(|f| f.error()?.downcast_ref::<Error>());
            let named = timeouts.filter(|e| match e {
                Error::Timeout { missing, .. } => *missing == [1],
                // Rank 1 goes on with its next collective in the place of the lost one.
                Error::Mismatch { rank_a, rank_b, .. } => *rank_a == 1 || *rank_b == 1,
                _ => false,
            });
            assert!(named.count() >= 2, "{strategy:?} {at}: {error}");
        }
    }
}

#[test]
fn delays_in_the_communicator_change_no_bits() {
    let run = |strategy: Sharding, seed: usize| {
        let (_guard, run) = folder();
        same_on_all(ranks(3, move |rank| {
            let comm = Faulty::new(&rank, Fault::Delay { seed });
            train(strategy, &rank, comm, &run)
        }))
    };
    let expected = run(Sharding::Ddp, 0);
    for strategy in STRATEGIES {
        for seed in 0..8 {
            assert_eq!(run(strategy, seed), expected, "{strategy:?}");
        }
    }
}
