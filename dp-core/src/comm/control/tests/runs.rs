//! What ranks learn of each other during a run.

use super::*;
use crate::comm::failures::RemoteFailure;
use crate::world_error::{Cause, RankError};

fn failure(rank: usize, message: &str) -> RankError {
    RankError {
        rank,
        cause: Cause::Error(message.into()),
        consequence: false,
        order: 0,
    }
}

/// Runs `f` on `n` ranks, with and without TCP.
fn both<T: Send>(
    n: usize,
    timeout: Duration,
    f: impl Fn(Control) -> T + Send + Sync,
) -> Vec<Vec<T>> {
    vec![in_process(n, timeout, &f), over_tcp(n, timeout, &f)]
}

#[test]
fn ranks_that_do_the_same_agree_however_far_one_is_ahead() {
    for results in both(4, LONG, |control| {
        let operations: Vec<String> = (0..200).map(|i| format!("all_reduce {i}")).collect();
        if control.rank() == 2 {
            std::thread::sleep(Duration::from_millis(100));
        }
        let joined: Result<Vec<u64>> = operations.iter().map(|o| control.join(o)).collect();
        let joined = joined.expect("nobody fails");
        assert_eq!(joined, (0..200).collect::<Vec<u64>>());
        // In any order.
        for seq in joined.into_iter().rev() {
            control.wait(seq, &operations[seq as usize])?;
        }
        control.end(None)
    }) {
        for result in results {
            result.expect("all agree");
        }
    }
}

#[test]
fn a_wait_ends_only_when_the_last_rank_has_joined() {
    for times in both(3, LONG, |control| {
        let start = Instant::now();
        if control.rank() == 1 {
            std::thread::sleep(Duration::from_millis(300));
        }
        let seq = control.join("barrier").expect("nobody fails");
        assert!(control.rank() == 1 || !control.has_agreed(seq));
        control.wait(seq, "barrier").expect("all come");
        let waited = start.elapsed();
        control.end(None).expect("all end");
        waited
    }) {
        for time in times {
            assert!(time >= Duration::from_millis(290), "{time:?}");
        }
    }
}

#[test]
fn a_mismatch_names_both_sides_to_all_at_once() {
    let start = Instant::now();
    for errors in both(3, LONG, |control| {
        join(&control, "barrier").expect("all are there");
        if control.rank() == 1 {
            std::thread::sleep(Duration::from_millis(200));
        }
        let operation = match control.rank() {
            1 => "all_reduce(sum) of 6 f32 [b]",
            _ => "all_reduce(sum) of 5 f32 [b]",
        };
        let error = join(&control, operation).expect_err("they differ");
        assert_eq!(control.was_told(), control.rank() != 1);
        // Nothing goes on after it.
        let later = control.join("barrier").expect_err("the group is closed");
        assert_eq!(later.to_string(), error.to_string());
        let end = control.end(Some(&failure(control.rank(), "mismatch")));
        end.expect("all end");
        error
    }) {
        for error in errors {
            assert!(
                matches!(
                    error,
                    Error::Mismatch {
                        seq: 1,
                        rank_b: 1,
                        ..
                    }
                ),
                "{error}"
            );
            says(
                &error,
                &[
                    "rank 1 called all_reduce(sum) of 6 f32",
                    "called all_reduce(sum) of 5 f32",
                ],
            );
        }
    }
    at_once(start);
}

#[test]
fn a_rank_that_does_not_join_is_named_after_the_deadline() {
    for errors in both(3, SHORT, |control| {
        join(&control, "barrier").expect("all are there");
        if control.rank() == 2 {
            std::thread::sleep(2 * SHORT);
        }
        let error = join(&control, "all_gather of 4 u8").expect_err("one is late");
        assert_eq!(
            control.was_told(),
            !matches!(error, Error::Timeout { rank, .. } if rank == control.rank())
        );
        error
    }) {
        for error in &errors {
            let Error::Timeout {
                seq: 1,
                missing,
                waited,
                ..
            } = error
            else {
                panic!("{error}");
            };
            assert_eq!(missing, &[2]);
            assert!(*waited >= SHORT && *waited < 2 * SHORT, "{waited:?}");
            assert_eq!(error.to_string(), errors[0].to_string());
        }
    }
}

#[test]
fn what_a_rank_fails_with_reaches_all() {
    let start = Instant::now();
    for errors in both(3, LONG, |control| {
        join(&control, "barrier").expect("all are there");
        if control.rank() == 1 {
            let own = failure(1, "rank 1 gives up");
            control.end(Some(&own)).expect("all end");
            assert!(
                control.failures().is_empty() || control.failures().iter().all(|f| f.consequence)
            );
            return None;
        }
        let error = join(&control, "broadcast").expect_err("rank 1 has failed");
        says(&error, &["rank 1 failed", "rank 1 gives up", "broadcast"]);
        assert!(control.was_told());
        let own = RankError {
            consequence: true,
            ..failure(control.rank(), &error.to_string())
        };
        control.end(Some(&own)).expect("all end");
        let failures = control.failures();
        let first = failures
            .iter()
            .find(|f| !f.consequence)
            .expect("rank 1 has said it");
        assert_eq!(
            (first.rank, first.cause.to_string().as_str()),
            (1, "rank 1 gives up")
        );
        Some(failures.len())
    }) {
        // Both others: rank 1, and the one that stopped because of it.
        assert_eq!(errors, [Some(2), None, Some(2)]);
    }
    at_once(start);
}

#[test]
fn a_rank_that_ends_early_is_missed_only_where_it_is_missing() {
    let start = Instant::now();
    for errors in both(2, LONG, |control| {
        join(&control, "one").expect("all are there");
        if control.rank() == 1 {
            control.end(None).expect("all end");
            return None;
        }
        let error = join(&control, "two").expect_err("rank 1 has ended");
        control.end(None).expect("all end");
        Some(error)
    }) {
        let error = errors[0].as_ref().expect("rank 0 has one");
        assert!(
            matches!(
                error,
                Error::RankLeft {
                    left: 1,
                    left_seq: 1,
                    seq: 1,
                    ..
                }
            ),
            "{error}"
        );
    }
    at_once(start);
}

#[test]
fn a_connection_that_breaks_is_a_rank_that_failed() {
    let start = Instant::now();
    // Rank 0 breaks its connections, or another one.
    for broken in [0, 2] {
        let errors = over_tcp(3, LONG, |control| {
            join(&control, "barrier").expect("all are there");
            if control.rank() == broken {
                return None; // Drops it, without a word.
            }
            Some(join(&control, "all_reduce").expect_err("one has gone"))
        });
        for error in errors.into_iter().flatten() {
            let named = matches!(&error, Error::RankFailed { failed, .. } if *failed == broken);
            // Where rank 0 has gone first, nobody else can pass on what came later.
            assert!(named, "{error}");
            says(&error, &["its process is gone, or the network to it"]);
        }
    }
    at_once(start);
}

#[test]
fn threads_leave_without_waiting() {
    let mut controls = Control::in_process(2, LONG);
    let (one, zero) = (controls.pop().expect("two"), controls.pop().expect("two"));
    let panic = RemoteFailure {
        is_panic: true,
        message: "too much".to_string(),
        consequence: false,
    };
    one.leave(Some(panic));
    let error = zero.join("barrier").expect_err("rank 1 has panicked");
    says(&error, &["rank 1 failed", "too much"]);
    assert!(zero.was_told() && !one.was_told());
}
