//! Masters, non-finite gradients and written parameters, whose flags are raised on the GPU.

use candle_core::{DType, Tensor};
use dp_core::{Error, GradAccumDType, NonFinite, Result, SkipReason, Trainer};

use crate::harness::Test;
use crate::support::{STRATEGIES, same_on_all};
use crate::task::{Task, Training};

pub const TESTS: &[Test] = &[
    ("safeguards: non-finite gradients skip the step", non_finite),
    ("safeguards: written 16-bit parameters are found", altered),
    (
        "safeguards: set_parameter reaches masters and ranks",
        set_parameter,
    ),
    ("safeguards: communication in bf16", communication_dtype),
];

/// A step whose loss is multiplied by `factor` on rank 1.
fn scaled_step(training: &mut Training, step: usize, factor: f64) -> Result<Option<SkipReason>> {
    let factor = if training.rank.rank() == 1 {
        factor
    } else {
        1.0
    };
    let loss = (training.loss(step, 0)? * factor)?;
    let trainer = training.trainer();
    trainer.backward(&loss)?;
    Ok(trainer.step()?.skipped)
}

fn non_finite() {
    for strategy in STRATEGIES {
        for dtype in [DType::F32, DType::BF16] {
            let task = Task {
                strategy,
                dtype,
                ..Task::on_gpu(2)
            };
            let skip = |engine: &mut dp_core::EngineConfig| engine.non_finite = NonFinite::SkipStep;
            let runs = task.run_with(skip, |training| {
                assert_eq!(scaled_step(training, 0, 1.0)?, None);
                let before = training.trainer().store().sha256()?;
                let skipped = scaled_step(training, 1, f64::INFINITY)?;
                assert_eq!(training.trainer().store().sha256()?, before);
                assert_eq!(training.trainer().num_steps(), 1);
                assert_eq!(scaled_step(training, 2, 1.0)?, None);
                assert_ne!(training.trainer().store().sha256()?, before);
                Ok(skipped)
            });
            let runs = runs.unwrap_or_else(|e| panic!("{task:?}: {e}"));
            match same_on_all(runs) {
                Some(SkipReason::NonFinite { rank, .. }) => assert_eq!(rank, 1, "{task:?}"),
                other => panic!("{other:?} in {task:?}"),
            }
        }
    }
}

fn altered() {
    for strategy in STRATEGIES {
        let task = Task {
            strategy,
            dtype: DType::BF16,
            ..Task::on_gpu(2)
        };
        task.run(|training| {
            training.steps(0..1)?;
            let trainer = training.trainer();
            let param = trainer.store().params().swap_remove(1);
            // On all ranks: with ZeRO only the owner looks.
            param.write(0..1, &[1000.0])?;
            let loss = training.loss(1, 0)?;
            let trainer = training.trainer();
            trainer.backward(&loss)?;
            match trainer.step() {
                Err(Error::Altered { parameter }) => assert_eq!(parameter, param.name()),
                other => panic!("{other:?}"),
            }
            Ok(())
        });
        task.run(|training| {
            training.steps(0..1)?;
            let param = training.trainer().store().params().swap_remove(1);
            param.write(0..1, &[1000.0])?;
            training.trainer().refresh_masters()?;
            training.steps(1..2)?;
            let mut value = [0.0];
            param.read(0..1, &mut value)?;
            assert!((990.0..1010.0).contains(&value[0]), "{value:?}");
            Ok(())
        });
    }
}

fn set_parameter() {
    for strategy in STRATEGIES {
        for dtype in [DType::F32, DType::F16] {
            let task = Task {
                strategy,
                dtype,
                ..Task::on_gpu(2)
            };
            let digests = task.run(move |training| {
                training.steps(0..1)?;
                let param = training.trainer().store().params().swap_remove(0);
                // From the host and from the device.
                for (i, device) in [candle_core::Device::Cpu, training.rank.device().clone()]
                    .iter()
                    .enumerate()
                {
                    let shape = param.tensor().shape();
                    let values = Tensor::full(0.5 + i as f32, shape, device)?;
                    training.trainer().set_parameter(param.name(), &values)?;
                    let mut first = [0.0];
                    param.read(0..1, &mut first)?;
                    assert_eq!(first, [0.5 + i as f32]);
                }
                Ok(training.steps(1..3)?.sha256)
            });
            same_on_all(digests);
        }
    }
}

fn communication_dtype() {
    let mut digests = Vec::new();
    for strategy in STRATEGIES {
        let task = Task {
            strategy,
            ..Task::on_gpu(4)
        };
        let bf16 = |engine: &mut dp_core::EngineConfig| {
            engine.communication_dtype = Some(DType::BF16);
            engine.grad_accum_dtype = GradAccumDType::F32;
        };
        let outcomes = task.run_with(bf16, |training| training.steps(0..3));
        let outcomes = outcomes.unwrap_or_else(|e| panic!("{task:?}: {e}"));
        digests.push(same_on_all(outcomes).sha256);
    }
    same_on_all(digests);
}
