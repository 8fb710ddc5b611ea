//! Checkpoints do not say where a trainer computes: from the CPU to a GPU and back.

use candle_core::DType;
use dp_core::{LoadOptions, SaveOptions, Trainer};
use dp_zero::Sharding;

use crate::harness::Test;
use crate::support::{STRATEGIES, same_on_all};
use crate::task::{Place, Task};

pub const TESTS: &[Test] = &[
    ("checkpoints: CPU to GPU and back", round_trip),
    ("checkpoints: a run goes on with the same bits", goes_on),
    ("checkpoints: weights out and in", weights),
];

fn folder() -> (tempfile::TempDir, std::path::PathBuf) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let run = folder.path().join("run");
    (folder, run)
}

fn round_trip() {
    for dtype in [DType::F32, DType::BF16] {
        let (_guard, run) = folder();
        let on_cpu = Task {
            place: Place::Cpu,
            strategy: Sharding::Zero2,
            dtype,
            ..Task::on_gpu(2)
        };
        let to = run.clone();
        let saved = same_on_all(on_cpu.run(move |training| {
            let outcome = training.steps(0..3)?;
            training.trainer().save(&to)?;
            Ok(outcome.sha256)
        }));
        for strategy in STRATEGIES {
            let on_gpu = Task {
                strategy,
                dtype,
                ..Task::on_gpu(4)
            };
            let (from, (_guard, back)) = (run.clone(), folder());
            let to = back.clone();
            let runs = on_gpu.run(move |training| {
                let trainer = training.trainer();
                trainer.load_latest(&from, &LoadOptions::new())?;
                let loaded = trainer.store().sha256()?;
                trainer
                    .save_in_background(&to, &SaveOptions::new())?
                    .wait()?;
                Ok(loaded)
            });
            assert_eq!(same_on_all(runs), saved, "{on_gpu:?}");
            // What comes back goes on as if it had never been away.
            let go_on = |from: std::path::PathBuf| {
                let outcomes = on_cpu.run(move |training| {
                    let trainer = training.trainer();
                    trainer.load_latest(&from, &LoadOptions::new())?;
                    training.steps(3..5)
                });
                same_on_all(outcomes)
            };
            assert_eq!(go_on(back), go_on(run.clone()), "{on_gpu:?}");
        }
    }
}

fn goes_on() {
    for strategy in STRATEGIES {
        for dtype in [DType::F32, DType::BF16] {
            let task = Task {
                strategy,
                dtype,
                ..Task::on_gpu(2)
            };
            let (_guard, run) = folder();
            let to = run.clone();
            let whole = task.run(move |training| {
                training.steps(0..3)?;
                training.trainer().save(&to)?;
                training.steps(3..6)
            });
            let rest = task.run(move |training| {
                let trainer = training.trainer();
                trainer.load_latest(&run, &LoadOptions::new())?;
                training.steps(3..6)
            });
            assert_eq!(same_on_all(rest), same_on_all(whole), "{task:?}");
        }
    }
}

fn weights() {
    let (_guard, file) = folder();
    let task = Task {
        strategy: Sharding::Zero1,
        dtype: DType::F16,
        ..Task::on_gpu(2)
    };
    let to = file.clone();
    let saved = same_on_all(task.run(move |training| {
        let outcome = training.steps(0..2)?;
        training.trainer().export_safetensors(&to)?;
        Ok(outcome.sha256)
    }));
    for place in [Place::Cpu, Place::SharedGpu] {
        let from = file.clone();
        let task = Task { place, ..task };
        let loaded = task.run(move |training| {
            let trainer = training.trainer();
            trainer.import_safetensors(&from, &LoadOptions::new())?;
            let loaded = trainer.store().sha256()?;
            training.steps(2..3)?;
            Ok(loaded)
        });
        assert_eq!(same_on_all(loaded), saved, "{place:?}");
    }
}
