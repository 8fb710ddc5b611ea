//! Checkpoints of ranks over NCCL: a run goes on there, and on the CPU.

use dp_core::{LoadOptions, Trainer};
use dp_zero::Sharding;

use crate::gpus;
use crate::harness::Test;
use crate::parity::assert_close;
use crate::support::same_on_all;
use crate::task::{Outcome, Place, Task};

pub const TESTS: &[Test] = &[("checkpoints: a run goes on, there and on the CPU", goes_on)];

fn goes_on() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let run = folder.path().join("run");
    let task = Task {
        place: Place::OwnGpus,
        strategy: Sharding::Zero2,
        sgd: true,
        ..Task::on_gpu(gpus().min(2))
    };
    let to = run.clone();
    let whole = same_on_all(task.run(move |training| {
        training.steps(0..3)?;
        training.trainer().save(&to)?;
        training.steps(3..6)
    }));
    let rest = |place| -> Outcome {
        let from = run.clone();
        same_on_all(Task { place, ..task }.run(move |training| {
            let trainer = training.trainer();
            trainer.load_latest(&from, &LoadOptions::new())?;
            training.steps(3..6)
        }))
    };
    assert_eq!(rest(Place::OwnGpus).sha256, whole.sha256);
    assert_close(&rest(Place::Cpu), &whole, 1e-4, task);
}
