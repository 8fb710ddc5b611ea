use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use candle_core::{DType, Tensor};
use candle_nn::Init;
use dp_core::checkpoint::{Checkpoint, CheckpointProblem};
use dp_core::comm::{Pending, Request, Traffic};
use dp_core::{
    AdamW, Buffer, Communicator, Error, LoadOptions, LrSchedule, Optimizer, ParamGroups,
    ParamStore, Rank, Result, SaveOptions, Sgd, Trainer,
};
use dp_zero::Sharding;

use crate::checkpoint::folder;
use crate::faulty::{Fault, Faulty};
use crate::support::{AnyTrainer, STRATEGIES, caps, ones, ranks, values};

/// `p` of 5 and `q` of 3 trained elements, and a frozen f16 tensor.
pub fn model(strategy: Sharding, rank: &Rank) -> Result<(Tensor, Tensor, AnyTrainer<AdamW>)> {
    model_over(rank.comm(), strategy, rank)
}

fn model_over(
    comm: Arc<dyn Communicator>,
    strategy: Sharding,
    rank: &Rank,
) -> Result<(Tensor, Tensor, AnyTrainer<AdamW>)> {
    let store = ParamStore::new(rank.device()).with_frozen(|name| name == "frozen");
    let (p, q) = (ones(&store, 5, "p")?, ones(&store, 3, "q")?);
    store
        .var_builder(DType::F16)
        .get_with_hints(7, "frozen", Init::Const(0.5))?;
    let trainer = AnyTrainer::over(comm, strategy, store, AdamW::with_lr(0.1), |e| {
        e.bucket_caps = caps(4)
    })?;
    Ok((p, q, trainer))
}

pub fn step<O: Optimizer>(trainer: &mut AnyTrainer<O>, p: &Tensor, q: &Tensor) -> Result<()> {
    trainer.backward(&(p.sum_all()? + q.sqr()?.sum_all()?)?)?;
    trainer.step().map(drop)
}

/// The parts of a checkpoint's error that all ranks must agree on.
pub fn parts<T: std::fmt::Debug>(result: Result<T>) -> (Option<usize>, CheckpointProblem, String) {
    match result {
        Err(Error::Checkpoint {
            rank,
            problem,
            message,
            ..
        }) => (rank, problem, message),
        other => panic!("expected an error of a checkpoint, got {other:?}"),
    }
}

/// Case C45: a folder that does not exist, a slow rank 0, a reader on the last rank right after the save.
#[test]
fn c45_a_save_returns_when_it_is_complete() {
    for strategy in STRATEGIES {
        let (_guard, root) = folder();
        let run = root.join("not").join("yet").join("there");
        ranks(4, move |rank| {
            let comm: Arc<dyn Communicator> = match rank.rank() {
                0 => Faulty::new(&rank, Fault::Delay { seed: 3 }),
                _ => rank.comm(),
            };
            let (p, q, mut trainer) = model_over(comm, strategy, &rank)?;
            for saved in 0..2 {
                let folder = trainer.save(&run)?;
                if rank.rank() == 3 {
                    let checkpoint = Checkpoint::open(&run)?;
                    checkpoint.verify()?;
                    assert_eq!(checkpoint.folder(), folder);
                    assert_eq!(checkpoint.manifest().step, saved);
                }
                // Back to back: the next one waits for nobody.
                trainer.save(&run)?;
                step(&mut trainer, &p, &q)?;
            }
            Ok(())
        });
    }
}

/// Case C45: ranks without a common file system.
#[test]
fn c45_a_folder_that_only_rank_0_sees() {
    for strategy in STRATEGIES {
        let (_guard, root) = folder();
        ranks(3, move |rank| {
            let (p, q, mut trainer) = model(strategy, &rank)?;
            let shared = root.join("shared");
            trainer.save(&shared)?;
            step(&mut trainer, &p, &q)?;
            let before = trainer.store().sha256()?;
            let own = match rank.rank() {
                0 => shared.clone(),
                r => root.join(format!("disk of {r}")),
            };
            let (failed, problem, message) = parts(trainer.save(&own));
            assert_eq!((failed, problem), (Some(1), CheckpointProblem::Io));
            assert!(message.contains("this rank does not see it"), "{message}");
            let (failed, problem, message) = parts(trainer.load(&own));
            assert_eq!((failed, problem), (Some(1), CheckpointProblem::Missing));
            assert!(message.contains("cannot be opened"), "{message}");
            assert_eq!(trainer.store().sha256()?, before);
            // The latest is as it was, and training goes on.
            assert_eq!(trainer.load(&shared)?.step, 0);
            step(&mut trainer, &p, &q)
        });
    }
}

#[test]
fn a_target_that_cannot_be_a_folder() {
    let (guard, _) = folder();
    let file = guard.path().join("file");
    fs::write(&file, "precious").expect("writable");
    let targets = [
        file.clone(),
        file.join("below"),
        PathBuf::from("/proc/no-such-folder"),
        PathBuf::from("\0"),
    ];
    for target in targets {
        for strategy in STRATEGIES {
            let target = target.clone();
            ranks(2, move |rank| {
                let (p, q, mut trainer) = model(strategy, &rank)?;
                let (failed, problem, message) = parts(trainer.save(&target));
                assert_eq!(
                    (failed, problem),
                    (Some(0), CheckpointProblem::Io),
                    "{message}"
                );
                assert!(message.contains("cannot be created"), "{message}");
                parts(trainer.save_in_background(&target, &SaveOptions::new()));
                parts(trainer.export_safetensors(&target.join("weights.safetensors")));
                step(&mut trainer, &p, &q)
            });
        }
    }
    assert_eq!(fs::read_to_string(&file).expect("still there"), "precious");
}

#[test]
fn nothing_to_load() {
    let (_guard, run) = folder();
    fs::create_dir_all(run.join("step-00000007")).expect("writable");
    ranks(2, move |rank| {
        let (_, _, mut trainer) = model(Sharding::Zero2, &rank)?;
        assert_eq!(
            trainer.load_latest(&run.join("nowhere"), &LoadOptions::new())?,
            None
        );
        let (_, problem, message) = parts(trainer.load(&run.join("nowhere")));
        assert_eq!(problem, CheckpointProblem::Missing);
        assert!(message.contains("no checkpoint is there"), "{message}");
        // A checkpoint that has lost its manifest is not passed over.
        let (_, problem, message) = parts(trainer.load_latest(&run, &LoadOptions::new()));
        assert_eq!(problem, CheckpointProblem::Corrupt);
        assert!(message.contains("has no manifest.json"), "{message}");
        Ok(())
    });
}

/// A checkpoint's own files are not written over, nor is anything put beside them.
#[test]
fn a_checkpoint_is_never_written_to() {
    let (_guard, run) = folder();
    ranks(2, move |rank| {
        let (_, _, trainer) = model(Sharding::Zero2, &rank)?;
        let checkpoint = trainer.save(&run)?;
        let (_, _, message) = parts(trainer.save(&checkpoint));
        assert!(
            message.contains("save to the folder of its run"),
            "{message}"
        );
        for target in [
            checkpoint.join("manifest.json"),
            checkpoint.join("more"),
            run.join("latest"),
        ] {
            let (_, _, message) = parts(trainer.export_safetensors(&target));
            assert!(
                message.contains("among the files of a checkpoint"),
                "{message}"
            );
        }
        let (_, _, message) = parts(trainer.export_safetensors(&run));
        assert!(message.contains("not a regular file"), "{message}");
        // A file that is merely called as a manifest is does not make its folder a checkpoint.
        let other = run.with_file_name("other");
        if rank.rank() == 0 {
            std::fs::create_dir(&other).unwrap();
            std::fs::write(other.join("manifest.json"), "{}").unwrap();
        }
        trainer.export_safetensors(&other.join("weights.safetensors"))?;
        Checkpoint::open(&run)?.verify()
    });
}

#[test]
fn between_backward_and_step_nothing_is_saved_or_loaded() {
    let (_guard, run) = folder();
    ranks(2, move |rank| {
        let (p, q, mut trainer) = model(Sharding::Zero1, &rank)?;
        trainer.save(&run)?;
        trainer.backward(&(p.sum_all()? + q.sum_all()?)?)?;
        for error in [
            trainer.save(&run).err(),
            trainer.load(&run).err(),
            trainer.import_safetensors(&run, &LoadOptions::new()).err(),
        ] {
            assert!(matches!(error, Some(Error::Misuse { .. })), "{error:?}");
        }
        trainer.zero_grad()?;
        trainer.load(&run).map(drop)
    });
}

/// What a trainer is made of, to differ from the one that saved in one thing at a time.
struct Recipe {
    shape: &'static [usize],
    dtype: DType,
    frozen: &'static str,
    slow: &'static str,
    schedule: LrSchedule,
}

const RECIPE: Recipe = Recipe {
    shape: &[2, 3],
    dtype: DType::F16,
    frozen: "frozen",
    slow: "none",
    schedule: LrSchedule::Constant,
};

fn trainer_of<O: Optimizer>(recipe: &Recipe, optimizer: O, rank: &Rank) -> Result<AnyTrainer<O>> {
    let frozen = recipe.frozen;
    let store = ParamStore::new(rank.device()).with_frozen(move |name| name == frozen);
    ones(&store, recipe.shape, "w")?;
    ones(&store, 4, "v")?;
    store
        .var_builder(recipe.dtype)
        .get_with_hints(7, "frozen", Init::Const(0.5))?;
    let slow = recipe.slow;
    let groups =
        ParamGroups::new(optimizer.clone()).with_group("slow", move |name| name == slow, optimizer);
    let mut trainer = AnyTrainer::new(Sharding::Zero2, store, rank, groups, caps(4))?;
    trainer.set_lr_schedule(recipe.schedule)?;
    Ok(trainer)
}

#[test]
fn every_difference_is_named_before_anything_changes() {
    use CheckpointProblem::{HyperParameters, Model};
    let (_guard, run) = folder();
    ranks(2, move |rank| {
        trainer_of(&RECIPE, AdamW::default(), &rank)?.save(&run)?;
        trainer_of(&RECIPE, AdamW::default(), &rank)?.load(&run)?;
        let refused =
            |recipe: Recipe, kind: CheckpointProblem, parts_of_message: &[&str]| -> Result<()> {
                let mut trainer = trainer_of(&recipe, AdamW::default(), &rank)?;
                let (failed, problem, message) = parts(trainer.load(&run));
                assert_eq!((failed, problem), (Some(0), kind), "{message}");
                for part in parts_of_message {
                    assert!(message.contains(part), "no {part:?} in {message:?}");
                }
                Ok(())
            };
        refused(
            Recipe {
                shape: &[3, 2],
                ..RECIPE
            },
            Model,
            &["`w`", "[2, 3] f32", "[3, 2] f32"],
        )?;
        refused(
            Recipe {
                dtype: DType::BF16,
                ..RECIPE
            },
            Model,
            &["`frozen`", "[7] f16", "[7] bf16"],
        )?;
        refused(
            Recipe {
                frozen: "v",
                dtype: DType::F32,
                ..RECIPE
            },
            Model,
            &["`v`", "trained there", "frozen in the model"],
        )?;
        refused(
            Recipe {
                slow: "v",
                ..RECIPE
            },
            HyperParameters,
            &["`v`", "`slow`", "`default` there"],
        )?;
        let schedule = LrSchedule::LinearWarmup { warmup: 3 };
        refused(
            Recipe { schedule, ..RECIPE },
            HyperParameters,
            &["schedule", "LinearWarmup { warmup: 3 }", "Constant"],
        )?;

        let mut sgd = trainer_of(&RECIPE, Sgd::new(0.1), &rank)?;
        let current = LoadOptions::new().with_hyper_parameters(dp_core::HyperParameters::Current);
        let (_, _, message) = parts(sgd.load_with(&run, &current));
        assert!(message.contains("is sgd, but adamw there"), "{message}");
        let mut other_rate = trainer_of(&RECIPE, AdamW::with_lr(0.5), &rank)?;
        let (_, _, message) = parts(other_rate.load(&run));
        assert!(
            message.contains("`lr` of parameter group `default` is 0.5 in the trainer, but 0.001"),
            "{message}"
        );
        other_rate.load_with(&run, &current)?;
        assert_eq!(other_rate.param_groups()[0].optimizer.lr, 0.5);
        Ok(())
    });
}

/// Only one rank is given other options: still the same answer everywhere.
#[test]
fn ranks_that_allow_different_things_agree() {
    let (_guard, run) = folder();
    ranks(3, move |rank| {
        let (_, _, trainer) = model(Sharding::Zero2, &rank)?;
        trainer.save(&run)?;
        let store = ParamStore::new(rank.device());
        let p = ones(&store, 5, "p")?;
        let mut trainer =
            AnyTrainer::new(Sharding::Zero2, store, &rank, AdamW::with_lr(0.1), caps(4))?;
        let mut options = LoadOptions::new();
        if rank.rank() != 2 {
            options = options.with_dropped_params(|_| true);
        }
        let (failed, problem, _) = parts(trainer.load_with(&run, &options));
        assert_eq!((failed, problem), (Some(2), CheckpointProblem::Model));
        assert_eq!(values(&p), [1.0; 5]);
        Ok(())
    });
}

/// A checkpoint that is complete but was not named any more: the first one of a killed job, or a folder that was copied in
/// part. It is the latest, and a run does not begin anew beside it.
#[test]
fn a_complete_checkpoint_without_a_pointer_is_the_latest() {
    let (_guard, run) = folder();
    ranks(2, move |rank| {
        let (p, q, mut trainer) = model(Sharding::Zero2, &rank)?;
        step(&mut trainer, &p, &q)?;
        trainer.save(&run)?;
        if rank.rank() == 0 {
            fs::remove_file(run.join("latest")).expect("it is there");
        }
        trainer.barrier()?;
        let (_, _, mut trainer) = model(Sharding::Zero1, &rank)?;
        assert_eq!(
            trainer
                .load_latest(&run, &LoadOptions::new())?
                .map(|l| l.step),
            Some(1)
        );
        trainer.barrier()?;
        // By hand, with an editor that ends lines.
        if rank.rank() == 0 {
            fs::write(run.join("latest"), "step-00000001\n").expect("writable");
        }
        trainer.barrier()?;
        assert_eq!(trainer.load(&run)?.step, 1);
        Ok(())
    });
}

/// What cannot be looked at is not taken for "nothing there".
#[cfg(unix)]
#[test]
fn a_folder_that_cannot_be_read_is_not_a_new_run() {
    let (_guard, run) = folder();
    fs::create_dir_all(run.parent().expect("a folder")).expect("writable");
    // A loop of links: looking fails with something else than "not found", for root, too.
    std::os::unix::fs::symlink(&run, &run).expect("writable");
    ranks(2, move |rank| {
        let (_, _, mut trainer) = model(Sharding::Zero2, &rank)?;
        let (_, problem, message) = parts(trainer.load_latest(&run, &LoadOptions::new()));
        assert_eq!(problem, CheckpointProblem::Io);
        assert!(message.contains("cannot be looked at"), "{message}");
        Ok(())
    });
}

/// The last step of a save fails: nothing is left of it, and the old ones are not removed yet.
#[test]
fn a_save_that_cannot_become_the_latest_leaves_nothing() {
    let (_guard, run) = folder();
    ranks(2, move |rank| {
        let (p, q, mut trainer) = model(Sharding::Zero2, &rank)?;
        trainer.save(&run)?;
        if rank.rank() == 0 {
            fs::remove_file(run.join("latest")).expect("it is there");
            fs::create_dir(run.join("latest")).expect("writable");
        }
        for _ in 0..3 {
            step(&mut trainer, &p, &q)?;
            let (failed, problem, message) =
                parts(trainer.save_with(&run, &SaveOptions::new().keep_last(1)?));
            assert_eq!(
                (failed, problem),
                (Some(0), CheckpointProblem::Io),
                "{message}"
            );
            trainer.barrier()?;
            let mut names: Vec<_> = fs::read_dir(&run)
                .expect("a folder")
                .flatten()
                .map(|e| e.file_name())
                .collect();
            names.sort();
            assert_eq!(names, [".lock", "latest", "step-00000000"]);
            trainer.barrier()?;
        }
        Ok(())
    });
}

/// Ranks that mean different things: an error on all of them, after which they go on.
#[test]
fn ranks_that_save_different_things_are_told() {
    for strategy in STRATEGIES {
        let (_guard, run) = folder();
        ranks(3, move |rank| {
            let (p, q, mut trainer) = model(strategy, &rank)?;
            let mut odd = SaveOptions::new();
            if rank.rank() == 2 {
                odd = odd.keep_last(3)?;
            }
            for background in [false, true] {
                let error = match background {
                    true => trainer.save_in_background(&run, &odd).map(drop),
                    false => trainer.save_with(&run, &odd).map(drop),
                };
                let error = error.expect_err("not the same").to_string();
                assert!(error.contains("rank 2 has: keep_last Some(3)"), "{error}");
            }
            step(&mut trainer, &p, &q)?;
            trainer.save(&run).map(drop)
        });
    }
}

/// Hyper-parameters that a step would refuse: a save does, too, since nobody could load it.
#[test]
fn settings_that_cannot_be_trained_are_not_saved() {
    let (_guard, run) = folder();
    ranks(2, move |rank| {
        let store = ParamStore::new(rank.device());
        ones(&store, 3, "w")?;
        let mut trainer = AnyTrainer::new(Sharding::Zero2, store, &rank, Sgd::new(0.1), caps(4))?;
        trainer.save(&run)?;
        trainer.param_groups_mut()[0].optimizer.momentum = 0.9;
        let error = trainer
            .save_with(&run, &SaveOptions::new().keep_last(1)?)
            .expect_err("no state for it");
        assert!(
            error.to_string().contains("cannot be given one later"),
            "{error}"
        );
        trainer.param_groups_mut()[0].optimizer.momentum = 0.0;
        trainer.load(&run).map(drop)
    });
}

/// Cuts a file when all checks of a load are through: a disk that fails in the middle.
#[derive(Debug)]
struct CutsAfterTheCheck {
    inner: Arc<dyn Communicator>,
    file: PathBuf,
}

impl Communicator for CutsAfterTheCheck {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn world_size(&self) -> usize {
        self.inner.world_size()
    }
    fn timeout(&self) -> Duration {
        self.inner.timeout()
    }
    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }
    fn start(&self, request: Request, buffer: Buffer) -> Result<Pending> {
        if &*request.label == "load: check" {
            let file = fs::File::options()
                .write(true)
                .open(&self.file)
                .expect("there");
            file.set_len(file.metadata().expect("a file").len() - 4)
                .expect("writable");
        }
        self.inner.start(request, buffer)
    }
}

#[test]
fn a_load_that_fails_in_the_middle_must_be_repeated() {
    for strategy in STRATEGIES {
        let (_guard, run) = folder();
        ranks(2, move |rank| {
            let (_, _, trainer) = model(strategy, &rank)?;
            let good = trainer.save(&run)?;
            let bad = trainer.save(&run)?;
            // Only rank 1 has a disk that fails, and only it needs its own file.
            let file = bad.join("rank-00001-of-00002.safetensors");
            let comm: Arc<dyn Communicator> = match rank.rank() {
                0 => rank.comm(),
                _ => Arc::new(CutsAfterTheCheck {
                    inner: rank.comm(),
                    file,
                }),
            };
            let (p, q, mut trainer) = model_over(comm, strategy, &rank)?;
            let (_, problem, message) = parts(trainer.load(&bad));
            assert_eq!(problem, CheckpointProblem::Io);
            assert!(message.contains("reading `"), "{message}");
            trainer.zero_grad()?;
            let export = trainer.export_safetensors(&run.join("weights.safetensors"));
            assert!(export.is_err_and(|e| e.to_string().contains("a mixture")));
            let error = step(&mut trainer, &p, &q)
                .expect_err("a mixture")
                .to_string();
            assert!(error.contains("a load failed in the middle"), "{error}");
            assert!(trainer.save(&run).is_err());
            trainer.load(&good)?;
            step(&mut trainer, &p, &q)
        });
    }
}
