//! Bytes on a GPU: what is counted is what was predicted, and steps need no more of them.

use candle_core::DType;
use dp_core::memory::device_memory;
use dp_core::{ParamSpec, Trainer};
use dp_zero::ModelStates;

use crate::harness::Test;
use crate::support::STRATEGIES;
use crate::task::Task;

pub const TESTS: &[Test] = &[
    ("memory: counted bytes are the predicted bytes", counted),
    ("memory: the driver's count stays level", level),
];

fn counted() {
    for strategy in STRATEGIES {
        for dtype in [DType::F32, DType::BF16] {
            for world_size in [1, 2, 4] {
                let task = Task {
                    strategy,
                    dtype,
                    ..Task::on_gpu(world_size)
                };
                task.run(move |training| {
                    training.steps(0..2)?;
                    let trainer = training.trainer();
                    let params = ParamSpec::of_all(&trainer.store().params());
                    let predicted = ModelStates::of_layout(trainer.layout(), &params, strategy, 2);
                    let predicted = predicted.expect("a strategy with a trainer");
                    let counted = ModelStates::from(trainer.ledger().current());
                    assert_eq!(counted, predicted, "{task:?}");
                    Ok(())
                });
            }
        }
    }
}

fn level() {
    for strategy in STRATEGIES {
        let task = Task {
            strategy,
            ..Task::on_gpu(2)
        };
        task.run(move |training| {
            let held = training.trainer().ledger().current().model_states();
            training.steps(0..3)?;
            training.rank.comm().barrier()?;
            let device = training.rank.device().clone();
            device.synchronize()?;
            training.rank.comm().barrier()?;
            let early = device_memory(&device)?.expect("a GPU");
            assert!(early.used >= held, "{early:?}, {held} held");
            training.rank.comm().barrier()?;
            training.steps(3..30)?;
            device.synchronize()?;
            training.rank.comm().barrier()?;
            let late = device_memory(&device)?.expect("a GPU");
            // Ranks are not at the same place, and a tensor or two may be alive.
            assert!(late.used <= early.used + (1 << 20), "{late:?} {early:?}");
            assert!(late.used_peak >= late.used, "{late:?}");
            Ok(())
        });
    }
}
