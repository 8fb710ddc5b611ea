//! All strategies give the same bits on a GPU, and about the CPU's numbers.

use candle_core::DType;
use dp_zero::Sharding;

use crate::harness::Test;
use crate::support::{STRATEGIES, same_on_all};
use crate::task::{Outcome, Place, Task};

pub const TESTS: &[Test] = &[
    ("parity: strategies agree to the bit in f32", || {
        strategies_agree(DType::F32)
    }),
    ("parity: strategies agree to the bit in bf16", || {
        strategies_agree(DType::BF16)
    }),
    ("parity: strategies agree to the bit in f16", || {
        strategies_agree(DType::F16)
    }),
    ("parity: repeated runs agree to the bit", repeated),
    ("parity: close to the CPU", close_to_the_cpu),
    ("parity: ranks and micro-batches are one batch", one_batch),
];

pub fn outcome(task: Task) -> Outcome {
    same_on_all(task.run(|training| training.steps(0..5)))
}

fn strategies_agree(dtype: DType) {
    for world_size in [1, 2, 4] {
        for sgd in [false, true] {
            for clip in [None, Some(0.05)] {
                let base = Task {
                    dtype,
                    sgd,
                    clip,
                    ..Task::on_gpu(world_size)
                };
                let expected = outcome(base);
                assert!(expected.losses.iter().all(|l| l.is_finite()));
                for strategy in [Sharding::Zero1, Sharding::Zero2] {
                    let got = outcome(Task { strategy, ..base });
                    assert_eq!(got.losses, expected.losses, "{strategy:?} of {base:?}");
                    assert_eq!(got.norms, expected.norms, "{strategy:?} of {base:?}");
                    assert_eq!(got.sha256, expected.sha256, "{strategy:?} of {base:?}");
                }
            }
        }
    }
}

fn repeated() {
    for strategy in STRATEGIES {
        let task = Task {
            strategy,
            ..Task::on_gpu(4)
        };
        let first = outcome(task).sha256;
        for _ in 0..5 {
            assert_eq!(outcome(task).sha256, first, "{strategy:?}");
        }
    }
}

#[track_caller]
pub fn assert_close(got: &Outcome, expected: &Outcome, tolerance: f64, what: Task) {
    let pairs = got.losses.iter().zip(&expected.losses);
    for (a, b) in pairs.chain(got.norms.iter().zip(&expected.norms)) {
        let difference = (a - b).abs() / b.abs();
        assert!(difference < tolerance, "{a} against {b} in {what:?}");
    }
    let greatest = got
        .values
        .iter()
        .zip(&expected.values)
        .map(|(a, b)| f64::from((a - b).abs()))
        .fold(0.0, f64::max);
    assert!(greatest < tolerance, "off by {greatest} in {what:?}");
}

/// SGD, since AdamW turns the sign of a gradient that is all rounding into a whole step.
fn close_to_the_cpu() {
    let tolerances = [(DType::F32, 1e-4), (DType::F16, 1e-2), (DType::BF16, 5e-2)];
    for (dtype, tolerance) in tolerances {
        for strategy in STRATEGIES {
            for clip in [None, Some(0.05)] {
                let task = Task {
                    dtype,
                    strategy,
                    clip,
                    sgd: true,
                    ..Task::on_gpu(2)
                };
                let expected = outcome(Task {
                    place: Place::Cpu,
                    ..task
                });
                assert_close(&outcome(task), &expected, tolerance, task);
            }
        }
    }
}

fn one_batch() {
    let base = Task {
        sgd: true,
        ..Task::on_gpu(1)
    };
    let expected = outcome(base);
    for strategy in STRATEGIES {
        for (world_size, micro_batches) in [(1, 4), (2, 1), (2, 2), (4, 2)] {
            let task = Task {
                strategy,
                world_size,
                micro_batches,
                ..base
            };
            assert_close(&outcome(task), &expected, 1e-4, task);
        }
    }
}
