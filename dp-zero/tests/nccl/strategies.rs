//! All strategies over NCCL give about the numbers of threads on the CPU; sums of NCCL's have another order.

use candle_core::DType;

use crate::gpus;
use crate::harness::Test;
use crate::parity::{assert_close, outcome};
use crate::support::STRATEGIES;
use crate::task::{Place, Task};

pub const TESTS: &[Test] = &[
    ("strategies: close to the CPU in f32", || {
        close_to_the_cpu(DType::F32, 1e-4);
    }),
    ("strategies: close to the CPU in f16", || {
        close_to_the_cpu(DType::F16, 1e-2);
    }),
    ("strategies: close to the CPU in bf16", || {
        close_to_the_cpu(DType::BF16, 5e-2);
    }),
    (
        "strategies: ranks and micro-batches are one batch",
        one_batch,
    ),
    ("strategies: a run again gives the same bits", repeated),
];

/// SGD, since AdamW turns the sign of a gradient that is all rounding into a whole step.
fn on_own_gpus(world_size: usize) -> Task {
    Task {
        place: Place::OwnGpus,
        sgd: true,
        ..Task::on_gpu(world_size)
    }
}

fn close_to_the_cpu(dtype: DType, tolerance: f64) {
    // 8 windows are dealt out equally.
    for world_size in [1, 2, 4].into_iter().filter(|n| *n <= gpus()) {
        for strategy in STRATEGIES {
            for clip in [None, Some(0.05)] {
                let task = Task {
                    dtype,
                    strategy,
                    clip,
                    ..on_own_gpus(world_size)
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
    let expected = outcome(on_own_gpus(1));
    for strategy in STRATEGIES {
        for (world_size, micro_batches) in [(1, 4), (2, 1), (2, 2), (4, 2)] {
            let task = Task {
                strategy,
                micro_batches,
                ..on_own_gpus(world_size)
            };
            if world_size <= gpus() {
                assert_close(&outcome(task), &expected, 1e-4, task);
            }
        }
    }
}

/// On one machine, NCCL adds in the same order each time. With AdamW, which would show the last bit.
fn repeated() {
    for strategy in STRATEGIES {
        let task = Task {
            strategy,
            sgd: false,
            ..on_own_gpus(gpus())
        };
        if 8 % gpus() == 0 {
            let first = outcome(task).sha256;
            for _ in 0..3 {
                assert_eq!(outcome(task).sha256, first, "{strategy:?}");
            }
        }
    }
}
