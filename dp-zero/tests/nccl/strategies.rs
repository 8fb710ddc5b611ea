//! All strategies over NCCL give about the numbers of threads on the CPU; sums of NCCL's have another order.

use candle_core::DType;
use dp_zero::Sharding;

use crate::gpus;
use crate::harness::Test;
use crate::parity::{assert_close, outcome};
use crate::support::STRATEGIES;
use crate::task::{Place, Task};

pub const TESTS: &[Test] = &[
    ("strategies: close to the CPU in f32", || {
        close_to_the_cpu(DType::F32, 1e-4, &[1, 2, 4]);
    }),
    ("strategies: close to the CPU in f16", || {
        close_to_the_cpu(DType::F16, 1e-2, &[2]);
    }),
    ("strategies: close to the CPU in bf16", || {
        close_to_the_cpu(DType::BF16, 5e-2, &[2]);
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

fn close_to_the_cpu(dtype: DType, tolerance: f64, world_sizes: &[usize]) {
    const CLIP: Option<f64> = Some(0.05);
    let variants = [
        (Sharding::Ddp, None),
        (Sharding::Zero1, CLIP),
        (Sharding::Zero2, None),
        (Sharding::Zero2, CLIP),
    ];
    for world_size in world_sizes.iter().filter(|n| **n <= gpus()) {
        for (strategy, clip) in variants {
            let task = Task {
                dtype,
                strategy,
                clip,
                ..on_own_gpus(*world_size)
            };
            let expected = outcome(Task {
                place: Place::Cpu,
                ..task
            });
            assert_close(&outcome(task), &expected, tolerance, task);
        }
    }
}

fn one_batch() {
    let expected = outcome(on_own_gpus(1));
    for strategy in STRATEGIES {
        for (world_size, micro_batches) in [(2, 2), (4, 2)] {
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
            ..on_own_gpus(gpus().min(2))
        };
        assert_eq!(outcome(task).sha256, outcome(task).sha256, "{strategy:?}");
    }
}
