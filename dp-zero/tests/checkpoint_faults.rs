use std::fs;
use std::path::{Path, PathBuf};
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
use sha2::{Digest, Sha256};

use crate::checkpoint::folder;
use crate::faulty::{Fault, Faulty};
use crate::support::{AnyTrainer, STRATEGIES, caps, ones, ranks, same_on_all, values};

/// `p` of 5 and `q` of 3 trained elements, and a frozen f16 tensor.
fn model(strategy: Sharding, rank: &Rank) -> Result<(Tensor, Tensor, AnyTrainer<AdamW>)> {
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

fn step<O: Optimizer>(trainer: &mut AnyTrainer<O>, p: &Tensor, q: &Tensor) -> Result<()> {
    trainer.backward(&(p.sum_all()? + q.sqr()?.sum_all()?)?)?;
    trainer.step().map(drop)
}

/// The parts of a checkpoint's error that all ranks must agree on.
fn parts<T: std::fmt::Debug>(result: Result<T>) -> (Option<usize>, CheckpointProblem, String) {
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

/// Case C44, the broken files: one byte short, empty, damaged, swapped, of another checkpoint, not JSON, another version.
/// An explicit load says which file; the run's other checkpoint loads.
#[test]
fn c44_broken_files_are_named() {
    let (_guard, run) = folder();
    let to = run.clone();
    let folders = same_on_all(ranks(2, move |rank| {
        let (p, q, mut trainer) = model(Sharding::Zero2, &rank)?;
        let mut folders = Vec::new();
        for _ in 0..2 {
            folders.push(trainer.save(&to)?);
            step(&mut trainer, &p, &q)?;
        }
        Ok(folders)
    }));
    let (good, bad) = (folders[0].clone(), folders[1].clone());
    let [shard0, shard1, manifest] = [
        "rank-00000-of-00002.safetensors",
        "rank-00001-of-00002.safetensors",
        "manifest.json",
    ];
    let read = |folder: &Path, name: &str| fs::read(folder.join(name)).expect("a file");
    let (original0, original1, original) =
        (read(&bad, shard0), read(&bad, shard1), read(&bad, manifest));
    let text = String::from_utf8(original.clone()).expect("text");
    let mut flipped = original1.clone();
    *flipped.last_mut().expect("not empty") ^= 1;
    let version = text
        .replace("\"version\": 1", "\"version\": 2")
        .into_bytes();
    let edited = text.replace("\"step\": 1", "\"step\": 9").into_bytes();
    let cases: [(&str, Vec<u8>, CheckpointProblem); 10] = [
        (
            shard1,
            original1[..original1.len() - 1].to_vec(),
            CheckpointProblem::Corrupt,
        ),
        (shard1, Vec::new(), CheckpointProblem::Corrupt),
        (shard1, flipped, CheckpointProblem::Corrupt),
        (shard1, original0.clone(), CheckpointProblem::Corrupt),
        (shard1, read(&good, shard1), CheckpointProblem::Corrupt),
        (manifest, read(&good, manifest), CheckpointProblem::Corrupt),
        (manifest, Vec::new(), CheckpointProblem::Corrupt),
        (
            manifest,
            text[..text.len() / 2].into(),
            CheckpointProblem::Corrupt,
        ),
        (manifest, version, CheckpointProblem::Version),
        (manifest, edited, CheckpointProblem::Corrupt),
    ];
    for (i, (file, content, expected)) in cases.into_iter().enumerate() {
        fs::write(bad.join(file), content).expect("writable");
        let (run, broken, good) = (run.clone(), bad.clone(), good.clone());
        ranks(3, move |rank| {
            let (_, _, mut trainer) = model(Sharding::Zero1, &rank)?;
            let before = trainer.store().sha256()?;
            for path in [&run, &broken] {
                let error = trainer.load(path).expect_err("broken");
                // With the older manifest it is the shards that are wrong.
                let named = if i == 5 { shard0 } else { file };
                assert!(error.to_string().contains(named), "case {i}: {error}");
                assert_eq!(parts(Err::<(), _>(error)).1, expected, "case {i}");
            }
            assert_eq!(trainer.store().sha256()?, before);
            assert!(trainer.load_latest(&run, &LoadOptions::new()).is_err());
            trainer.load(&good).map(drop)
        });
        for (file, content) in [(shard1, &original1), (manifest, &original)] {
            fs::write(bad.join(file), content).expect("writable");
        }
    }
    let (good, bad) = (run.join("latest"), "../elsewhere");
    fs::write(&good, bad).expect("writable");
    assert!(
        Checkpoint::open(&run)
            .is_err_and(|e| e.to_string().contains("not the name of a checkpoint"))
    );
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

/// Each rank has a disk of its own, and rank 1's copy is damaged where another rank's turn it would be to look.
#[test]
fn ranks_do_not_trust_each_others_disks() {
    for strategy in STRATEGIES {
        let (_guard, root) = folder();
        let to = root.join("of 0");
        ranks(3, move |rank| {
            let (p, q, mut trainer) = model(Sharding::Zero2, &rank)?;
            step(&mut trainer, &p, &q)?;
            trainer.save(&to)
        });
        let copy = |from: &Path, to: &Path| {
            fs::create_dir_all(to).expect("writable");
            for file in fs::read_dir(from).expect("a folder").flatten() {
                fs::copy(file.path(), to.join(file.file_name())).expect("readable");
            }
        };
        let checkpoint = Path::new("step-00000001");
        copy(
            &root.join("of 0").join(checkpoint),
            &root.join("of 1").join(checkpoint),
        );
        for damaged in 0..3 {
            let shard = root
                .join("of 1")
                .join(checkpoint)
                .join(format!("rank-0000{damaged}-of-00003.safetensors"));
            let mut bytes = fs::read(&shard).expect("a file");
            let good = bytes.clone();
            *bytes.last_mut().expect("not empty") ^= 1;
            fs::write(&shard, &bytes).expect("writable");
            let root = root.clone();
            let outcomes = ranks(2, move |rank| {
                let (p, q, mut trainer) = model(strategy, &rank)?;
                let expected = [[0.9f32; 5].to_vec(), [0.9; 3].to_vec()];
                match trainer.load(&root.join(format!("of {}", rank.rank())).join(checkpoint)) {
                    // A file that this rank neither needs nor has the turn of.
                    Ok(_) => {
                        let got = [values(&p), values(&q)];
                        let close = |a: &f32, b: &f32| (a - b).abs() < 2e-3;
                        assert!(
                            got.concat()
                                .iter()
                                .zip(&expected.concat())
                                .all(|(a, b)| close(a, b)),
                            "{got:?}"
                        );
                        Ok(true)
                    }
                    Err(e) => {
                        assert_eq!(parts(Err::<(), _>(e)).1, CheckpointProblem::Corrupt);
                        Ok(false)
                    }
                }
            });
            assert_eq!(outcomes[0], outcomes[1], "all ranks alike");
            if strategy == Sharding::Ddp {
                assert!(!outcomes[0], "every rank reads everything");
            }
            fs::write(&shard, good).expect("writable");
        }
    }
}

/// More files than ranks that load, and each of them damaged once.
#[test]
fn every_file_is_verified_by_somebody() {
    let (_guard, run) = folder();
    let to = run.clone();
    ranks(5, move |rank| {
        let (p, q, mut trainer) = model(Sharding::Zero2, &rank)?;
        step(&mut trainer, &p, &q)?;
        trainer.save(&to)
    });
    for damaged in 0..5 {
        let shard = run
            .join("step-00000001")
            .join(format!("rank-0000{damaged}-of-00005.safetensors"));
        let good = fs::read(&shard).expect("a file");
        let mut bytes = good.clone();
        *bytes.last_mut().expect("not empty") ^= 1;
        fs::write(&shard, &bytes).expect("writable");
        for world_size in [1, 2] {
            let run = run.clone();
            ranks(world_size, move |rank| {
                let (_, _, mut trainer) = model(Sharding::Zero2, &rank)?;
                let (_, problem, message) = parts(trainer.load(&run));
                assert_eq!(problem, CheckpointProblem::Corrupt, "{message}");
                Ok(())
            });
        }
        fs::write(&shard, good).expect("writable");
    }
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

/// A small generator, for positions and bytes.
fn numbers(seed: u64) -> impl FnMut(usize) -> usize {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move |below| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 16) as usize % below.max(1)
    }
}

/// Signs a manifest again, as an attacker or a very unlucky disk would.
fn sign(text: &str) -> String {
    let Some(at) = text.rfind("\"sha256\": \"").map(|at| at + 11) else {
        return text.to_string();
    };
    let Some(rest) = text.get(at + 64..) else {
        return text.to_string();
    };
    let zeros = format!("{}{}{rest}", &text[..at], "0".repeat(64));
    let digest: String = Sha256::digest(&zeros)
        .iter()
        .map(|b| format!("{b:02x}"))
        .collect();
    format!("{}{digest}{rest}", &text[..at])
}

fn mutate(bytes: &mut Vec<u8>, next: &mut impl FnMut(usize) -> usize) {
    match next(8) {
        0 => bytes.truncate(next(bytes.len())),
        1 => bytes.extend((0..next(40)).map(|i| i as u8)),
        2 if !bytes.is_empty() => {
            let at = next(bytes.len());
            bytes.remove(at);
        }
        // Digits become other digits, so that the file stays readable and lies.
        3..=5 => {
            let digits: Vec<usize> = (0..bytes.len())
                .filter(|i| bytes[*i].is_ascii_digit())
                .collect();
            if !digits.is_empty() {
                bytes[digits[next(digits.len())]] = b'0' + next(10) as u8;
            }
        }
        _ if !bytes.is_empty() => {
            let at = next(bytes.len());
            bytes[at] ^= 1 << next(8);
        }
        _ => {}
    }
}

/// Random damage: an error on all ranks and nothing changed, or, where the damage undid itself, the right values.
#[test]
fn random_damage_is_never_loaded() {
    let (_guard, run) = folder();
    let to = run.clone();
    let expected = same_on_all(ranks(2, move |rank| {
        let (p, q, mut trainer) = model(Sharding::Zero2, &rank)?;
        step(&mut trainer, &p, &q)?;
        trainer.save(&to)?;
        trainer.store().sha256()
    }));
    let checkpoint = run.join("step-00000001");
    let files: Vec<PathBuf> = fs::read_dir(&checkpoint)
        .expect("a folder")
        .flatten()
        .map(|e| e.path())
        .collect();
    assert_eq!(files.len(), 3);
    let originals: Vec<Vec<u8>> = files.iter().map(|f| fs::read(f).expect("a file")).collect();
    let latest = run.clone();
    // One world for all attempts: ranks meet before and after each damage.
    ranks(2, move |rank| {
        let (p, q, mut trainer) = model(Sharding::Zero1, &rank)?;
        step(&mut trainer, &p, &q)?;
        step(&mut trainer, &p, &q)?;
        let before = trainer.store().sha256()?;
        let (mut refused, mut next) = (0, numbers(1));
        for attempt in 0..600 {
            let file = next(3);
            let mut bytes = originals[file].clone();
            for _ in 0..=next(3) {
                mutate(&mut bytes, &mut next);
            }
            let swapped = attempt % 50 == 49;
            if rank.rank() == 0 {
                fs::write(&files[file], &bytes).expect("writable");
                if swapped {
                    fs::write(&files[file], &originals[(file + 1) % 3]).expect("writable");
                }
            }
            rank.comm().barrier()?;
            match trainer.load(&latest) {
                Ok(_) => {
                    assert!(bytes == originals[file] && !swapped, "attempt {attempt}");
                    assert_eq!(trainer.store().sha256()?, expected, "attempt {attempt}");
                    step(&mut trainer, &p, &q)?;
                }
                Err(Error::Checkpoint { .. }) => refused += 1,
                Err(other) => panic!("attempt {attempt}: {other:?}"),
            }
            if refused == attempt + 1 {
                assert_eq!(trainer.store().sha256()?, before);
            }
            rank.comm().barrier()?;
            if rank.rank() == 0 {
                fs::write(&files[file], &originals[file]).expect("writable");
            }
        }
        assert!(refused > 500, "{refused}");
        trainer.load(&latest).map(drop)
    });
}

/// A shard whose pieces leave a gap, overlap, or are of another parameter, with checksums that fit.
#[test]
fn pieces_that_do_not_fit_together_are_refused() {
    let (_guard, run) = folder();
    let to = run.clone();
    ranks(2, move |rank| model(Sharding::Zero2, &rank)?.2.save(&to));
    let checkpoint = run.join("step-00000000");
    let (manifest, shard) = (
        checkpoint.join("manifest.json"),
        checkpoint.join("rank-00001-of-00002.safetensors"),
    );
    let (text, bytes) = (
        fs::read_to_string(&manifest).expect("text"),
        fs::read(&shard).expect("a file"),
    );
    let digest = |bytes: &[u8]| -> String {
        Sha256::digest(bytes)
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect()
    };
    for (from, to) in [
        ("p@3..5/value", "p@2..4/value"),
        ("p@3..5/exp_avg\"", "p@4..6/exp_avg\""),
        ("q@2..3/value", "r@2..3/value"),
    ] {
        let found = bytes.windows(from.len()).position(|w| w == from.as_bytes());
        let header = found.unwrap_or_else(|| panic!("no {from}"));
        let mut changed = bytes.clone();
        changed[header..header + from.len()].copy_from_slice(to.as_bytes());
        fs::write(&shard, &changed).expect("writable");
        fs::write(
            &manifest,
            sign(&text.replace(&digest(&bytes), &digest(&changed))),
        )
        .expect("writable");
        let run = run.clone();
        ranks(2, move |rank| {
            let (_, problem, message) = parts(model(Sharding::Zero1, &rank)?.2.load(&run));
            assert_eq!(problem, CheckpointProblem::Corrupt);
            assert!(
                message.contains("exactly once") || message.contains("does not list"),
                "{message}"
            );
            Ok(())
        });
    }
    // Settings that no trainer takes.
    fs::write(&shard, &bytes).expect("writable");
    fs::write(
        &manifest,
        sign(&text.replace("\"lr\": 0.1", "\"lr\": -0.1")),
    )
    .expect("writable");
    ranks(2, move |rank| {
        let saved = LoadOptions::new().with_hyper_parameters(dp_core::HyperParameters::Saved);
        let (_, problem, message) = parts(model(Sharding::Zero1, &rank)?.2.load_with(&run, &saved));
        assert_eq!(problem, CheckpointProblem::HyperParameters);
        assert!(message.contains("lr"), "{message}");
        Ok(())
    });
}

/// Damage with fitting checksums, which only the checks behind them can see: no panic, the same answer on all ranks.
#[test]
fn damage_that_is_signed_does_not_panic() {
    let (_guard, run) = folder();
    let to = run.clone();
    ranks(2, move |rank| {
        let (p, q, mut trainer) = model(Sharding::Zero2, &rank)?;
        step(&mut trainer, &p, &q)?;
        trainer.save(&to)
    });
    let checkpoint = run.join("step-00000001");
    let (manifest, shard) = (
        checkpoint.join("manifest.json"),
        checkpoint.join("rank-00001-of-00002.safetensors"),
    );
    let text = fs::read_to_string(&manifest).expect("text");
    let bytes = fs::read(&shard).expect("a file");
    let old = Checkpoint::open(&run).expect("complete").manifest().ranks[1].clone();
    let header_len =
        8 + usize::try_from(u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")))
            .expect("small");
    ranks(2, move |rank| {
        let (mut refused, mut next) = (0, numbers(2));
        for attempt in 0..400 {
            let (mut text, mut shard_bytes) = (text.clone(), bytes.clone());
            if attempt % 2 == 0 {
                let mut mutated = text.into_bytes();
                mutate(&mut mutated, &mut next);
                text = String::from_utf8_lossy(&mutated).into_owned();
            } else {
                let mut header = shard_bytes[..header_len].to_vec();
                mutate(&mut header, &mut next);
                shard_bytes.splice(..header_len, header);
                let digest: String = Sha256::digest(&shard_bytes)
                    .iter()
                    .map(|b| format!("{b:02x}"))
                    .collect();
                text = text.replace(&old.sha256, &digest);
                text = text.replace(
                    &format!("\"bytes\": {}", old.bytes),
                    &format!("\"bytes\": {}", shard_bytes.len()),
                );
            }
            if rank.rank() == 0 {
                fs::write(&manifest, sign(&text)).expect("writable");
                fs::write(&shard, &shard_bytes).expect("writable");
            }
            rank.comm().barrier()?;
            let (_, _, mut trainer) = model(Sharding::Zero1, &rank)?;
            match trainer.load(&run) {
                Ok(_) => {}
                Err(Error::Checkpoint { .. }) => refused += 1,
                Err(other) => panic!("attempt {attempt}: {other:?}"),
            }
            rank.comm().barrier()?;
        }
        assert!(
            (200..400).contains(&refused),
            "{refused}: some damage is signed well, e.g. another step number"
        );
        Ok(())
    });
}
