use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::DType;
use dp_core::ParamStore;
use dp_core::comm::{Collective, Request};
use dp_core::{
    Backend, Buffer, DistributedDataParallel, Error, Rank, ReduceOp, Result, Sgd, Trainer, World,
};

use crate::support::{
    Probe, both_backends, builder, expect_error, failing_ranks, ones, ranks, ranks_of, world,
};

fn floats(n: usize) -> Buffer {
    Buffer::from_vec(vec![1f32; n])
}

fn sum(rank: &Rank) -> Result<Buffer> {
    rank.comm().all_reduce(floats(3), ReduceOp::Sum)?.wait()
}

/// Rank 1 of three asks for something else than the others: all three must name both.
fn mismatch(usual: fn() -> (Request, Buffer), other: fn() -> (Request, Buffer), names: [&str; 2]) {
    for world in both_backends(3) {
        let errors = ranks_of(world, move |rank| {
            rank.comm().barrier()?;
            let (request, buffer) = if rank.rank() == 1 { other() } else { usual() };
            let result = rank.comm().start(request, buffer).and_then(|p| p.wait());
            Ok(result.expect_err("ranks differ"))
        });
        for error in &errors {
            assert!(matches!(error, Error::Mismatch { seq: 1, .. }), "{error}");
            let text = error.to_string();
            assert!(
                names.iter().all(|n| text.contains(n)) && text.contains("rank 1 called"),
                "{text}"
            );
            assert_eq!(text, errors[0].to_string());
        }
    }
}

fn request(collective: Collective, label: &'static str) -> Request {
    Request::new(collective, label)
}

#[test]
fn ranks_that_ask_for_different_things_all_get_both() {
    const SUM: Collective = Collective::AllReduce(ReduceOp::Sum);
    let usual = || (request(SUM, "w"), floats(6));
    let named = "all_reduce(sum) of 6 f32 [w]";
    mismatch(
        usual,
        || {
            (
                request(Collective::AllReduce(ReduceOp::Max), "w"),
                floats(6),
            )
        },
        [named, "all_reduce(max)"],
    );
    mismatch(
        usual,
        || {
            (
                request(Collective::ReduceScatter(ReduceOp::Sum), "w"),
                floats(6),
            )
        },
        [named, "reduce_scatter"],
    );
    mismatch(
        usual,
        || (request(SUM, "w"), floats(5)),
        [named, "of 5 f32"],
    );
    mismatch(
        usual,
        || (request(SUM, "w"), Buffer::from_vec(vec![1f64; 6])),
        [named, "of 6 f64"],
    );
    mismatch(usual, || (request(SUM, "b"), floats(6)), [named, "[b]"]);
    mismatch(
        usual,
        || {
            (
                request(Collective::Barrier, ""),
                Buffer::from_vec::<u8>(vec![]),
            )
        },
        [named, "barrier"],
    );
    mismatch(
        || (request(Collective::Broadcast { root: 0 }, ""), floats(1)),
        || (request(Collective::Broadcast { root: 2 }, ""), floats(1)),
        ["broadcast(root 0)", "broadcast(root 2)"],
    );
    mismatch(
        || (request(Collective::AllReduce(ReduceOp::Max), ""), floats(1)),
        || {
            (
                request(Collective::AllReduce(ReduceOp::Mean), ""),
                floats(1),
            )
        },
        ["all_reduce(max)", "all_reduce(mean)"],
    );
}

/// Rank 1 of three ends as `ends` says while the others wait for it. Returns what the launcher says and the others'
/// errors.
fn rank_1_ends(world: World, ends: fn(&Rank) -> Result<()>) -> (dp_core::WorldError, Vec<Error>) {
    let others = Arc::new(std::sync::Mutex::new(Vec::new()));
    let record = Arc::clone(&others);
    let error = failing_ranks(world, move |rank| {
        sum(&rank)?;
        if rank.rank() == 1 {
            std::thread::sleep(Duration::from_millis(50));
            return ends(&rank);
        }
        let start = Instant::now();
        let error = sum(&rank).expect_err("rank 1 is gone");
        assert!(
            start.elapsed() < Duration::from_secs(1),
            "told after {:?}",
            start.elapsed()
        );
        record.lock().expect("not poisoned").push(error.clone());
        // Later calls fail at once as well.
        sum(&rank).expect_err("rank 1 is still gone");
        Err(error)
    });
    let others = others.lock().expect("not poisoned").clone();
    assert_eq!(others.len(), 2);
    (error, others)
}

#[test]
fn c51_a_rank_that_panics_is_named_with_its_message() {
    for world in both_backends(3) {
        let (error, others) = rank_1_ends(world, |_| panic!("boom {}", 7));
        for e in &others {
            let Error::RankFailed {
                failed: 1, reason, ..
            } = e
            else {
                panic!("{e}")
            };
            assert!(reason.contains("boom 7"), "{reason}");
            expect_error::<()>(
                Err(e.clone()),
                &["rank 1 failed", "all_reduce(sum) of 3 f32"],
            );
        }
        let text = error.to_string();
        assert!(text.starts_with("rank 1 panicked: boom 7\n"), "{text}");
        assert!(
            text.ends_with("rank 0, 2 of 3 stopped because of it")
                || text.ends_with("rank 2, 0 of 3 stopped because of it"),
            "{text}"
        );
        let flags: Vec<_> = error
            .failures()
            .iter()
            .map(|f| (f.rank() == 1, f.is_consequence()))
            .collect();
        assert_eq!(flags, [(true, false), (false, true), (false, true)]);
        assert!(error.failures()[0].error().is_none());
    }
}

#[test]
fn c51_a_rank_that_returns_an_error_is_named_with_it() {
    for world in both_backends(3) {
        let (error, others) =
            rank_1_ends(world, |_| Err(Error::invalid("data", "file 3 is empty")));
        for e in &others {
            assert!(matches!(e, Error::RankFailed { failed: 1, .. }), "{e}");
            assert!(e.to_string().contains("file 3 is empty"), "{e}");
        }
        let first = &error.failures()[0];
        assert_eq!((first.rank(), first.is_consequence()), (1, false));
        let own = first.error().and_then(|e| e.downcast_ref::<Error>());
        assert!(
            matches!(own, Some(Error::InvalidArgument { what: "data", .. })),
            "{own:?}"
        );
        assert!(error.failures()[1..].iter().all(|f| f.is_consequence()));
    }
}

#[test]
fn c51_a_rank_that_finishes_early_is_named() {
    for world in both_backends(3) {
        let (error, others) = rank_1_ends(world, |_| Ok(()));
        let left = |e: &&Error| {
            matches!(
                e,
                Error::RankLeft {
                    left: 1,
                    left_seq: 1,
                    seq: 1,
                    ..
                }
            )
        };
        assert!(others.iter().any(|e| left(&e)), "{others:?}");
        // The other one may have heard of it from the first.
        assert!(
            others.iter().all(|e| e
                .to_string()
                .contains("rank 1 finished after 1 collectives")),
            "{others:?}"
        );
        assert_eq!(error.failures().len(), 2);
        assert!(!error.failures()[0].is_consequence());
    }
}

#[test]
fn a_rank_may_finish_while_others_collect_what_it_joined() {
    for world in both_backends(3) {
        let sums = ranks_of(world, |rank| {
            let pending = rank.comm().all_reduce(floats(40_000), ReduceOp::Sum)?;
            if rank.rank() == 1 {
                return Ok(3.0);
            }
            std::thread::sleep(Duration::from_millis(20));
            Ok(pending.wait()?.as_slice::<f32>()?[39_999])
        });
        assert_eq!(sums, [3.0; 3]);
    }
}

#[test]
fn c51_a_panic_in_backward_with_buckets_in_flight() {
    let error = failing_ranks(world(3), |rank| {
        let store = ParamStore::new(rank.device());
        let vb = builder(&store);
        let (a, b) = (ones(&vb, 50_000, "a")?, ones(&vb, 50_000, "b")?);
        let config = dp_core::DdpConfig::default().with_bucket_caps(dp_core::BucketCaps::new(4)?);
        let mut trainer =
            DistributedDataParallel::with_config(store, rank.comm(), Sgd::new(0.1), config)?;
        let r = rank.rank();
        let h = a.apply_op1(Probe(move || assert!(r != 1, "ran out of luck")))?;
        trainer.backward(&(h * b)?.sum_all()?)?;
        trainer.step().map(drop)
    });
    assert!(
        error
            .to_string()
            .starts_with("rank 1 panicked: ran out of luck"),
        "{error}"
    );
    for f in &error.failures()[1..] {
        assert!(f.is_consequence());
        let e = f.error().and_then(|e| e.downcast_ref::<Error>());
        assert!(
            matches!(e, Some(Error::RankFailed { failed: 1, .. })),
            "{f}"
        );
    }
}

#[test]
fn a_timeout_names_the_missing_ranks() {
    for backend in [Backend::SharedMemory, Backend::Naive] {
        let world = world(4)
            .with_backend(backend)
            .with_timeout(Duration::from_millis(400));
        let errors = ranks_of(world, |rank| {
            sum(&rank)?;
            if rank.rank() % 2 == 1 {
                std::thread::sleep(Duration::from_millis(1200));
            }
            let start = Instant::now();
            let error = sum(&rank).expect_err("some ranks are late");
            assert!(start.elapsed() < Duration::from_millis(1100));
            Ok(error)
        });
        for error in errors {
            let Error::Timeout {
                missing,
                seq,
                waited,
                ..
            } = &error
            else {
                panic!("{error}")
            };
            assert_eq!((missing.as_slice(), *seq), ([1, 3].as_slice(), 1));
            assert!(*waited >= Duration::from_millis(400));
            assert!(
                error.to_string().contains("not there: rank 1, 3;"),
                "{error}"
            );
        }
    }
}

#[test]
fn the_default_timeout_is_a_minute() -> Result<()> {
    World::threads(2)?.run(|rank| {
        assert_eq!(rank.comm().timeout(), Duration::from_secs(60));
        Ok(())
    })
}

#[test]
fn a_timeout_in_which_nobody_is_missing_says_so() {
    let error = Error::Timeout {
        rank: 2,
        seq: 3,
        operation: "all_reduce(sum) of 8 f32".to_string(),
        missing: Vec::new(),
        waited: Duration::from_millis(5),
    };
    assert!(
        error
            .to_string()
            .contains("all ranks are there, but the work on it is not done"),
        "{error}"
    );
}

#[test]
fn a_new_world_works_after_a_failed_one() {
    for round in 0..3 {
        let error = failing_ranks(world(3), move |rank| match rank.rank() == round {
            true => panic!("round {round}"),
            false => sum(&rank).map(drop),
        });
        assert_eq!(error.failures()[0].rank(), round);
        let sums = ranks(3, |rank| sum(&rank)?.into_vec::<f32>());
        assert_eq!(sums, vec![vec![3.0; 3]; 3]);
    }
}

#[test]
fn two_ranks_that_fail_on_their_own_are_both_reported() {
    let error = failing_ranks(world(3), |rank| match rank.rank() {
        0 => sum(&rank).map(drop),
        r => {
            std::thread::sleep(Duration::from_millis(30 * r as u64));
            Err(Error::invalid("disk", format!("rank {r} is full")))
        }
    });
    let text = error.to_string();
    assert!(
        text.starts_with("rank 1 failed: invalid disk: rank 1 is full\nalso rank 2 failed"),
        "{text}"
    );
    assert!(
        text.ends_with("\nrank 0 of 3 stopped because of it"),
        "{text}"
    );
}

#[test]
fn an_error_of_another_type_is_kept() {
    #[derive(Debug)]
    struct MyError(String);
    impl std::fmt::Display for MyError {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "mine: {}", self.0)
        }
    }
    impl std::error::Error for MyError {}
    impl From<dp_core::WorldError> for MyError {
        fn from(e: dp_core::WorldError) -> Self {
            Self(e.to_string())
        }
    }
    let result = crate::support::guarded(crate::support::HANG, || {
        world(2).run(|rank| {
            if rank.rank() == 1 {
                Err(MyError("x".into()))
            } else {
                Ok(())
            }
        })
    });
    assert_eq!(
        result.expect_err("rank 1 fails").0,
        "rank 1 failed: mine: x"
    );
}

#[test]
fn a_trainer_step_fails_on_all_ranks_when_one_is_gone() {
    let error = failing_ranks(world(2), |rank| {
        let store = ParamStore::new(rank.device());
        let w = ones(&store.var_builder(DType::F32), 3, "w")?;
        let mut trainer = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.1))?;
        for step in 0..3 {
            if (rank.rank(), step) == (1, 2) {
                return Err(Error::invalid("batch", "no more data"));
            }
            trainer.backward(&w.sum_all()?)?;
            trainer.step()?;
        }
        Ok(())
    });
    assert!(
        error
            .to_string()
            .starts_with("rank 1 failed: invalid batch: no more data"),
        "{error}"
    );
    let other = error.failures()[1].to_string();
    assert!(
        other.contains("[bucket 0: w]") || other.contains("[used parameters]"),
        "{other}"
    );
}
