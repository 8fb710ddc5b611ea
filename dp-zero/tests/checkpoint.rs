use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use dp_core::checkpoint::Checkpoint;
use dp_core::{AdamW, BucketCaps, LoadOptions, ParamStore, Rank, Result, SaveOptions, Trainer};
use dp_zero::Sharding;

use crate::support::{AnyTrainer, STRATEGIES, caps, noise, ranks, same_on_all, values};

pub fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let run = folder.path().join("run");
    (folder, run)
}

/// The shapes of case C31: 57 elements in 5 tensors, which no world size divides.
const SHAPES: [(&str, &[usize]); 5] = [
    ("a", &[3, 5]),
    ("b", &[7]),
    ("c", &[1]),
    ("d", &[11, 3]),
    ("e", &[1]),
];

pub struct Shapes {
    pub params: Vec<Tensor>,
    pub trainer: AnyTrainer<AdamW>,
}

impl Shapes {
    pub fn new(strategy: Sharding, rank: &Rank, caps: BucketCaps) -> Result<Self> {
        let store = ParamStore::new(rank.device()).with_seed(5);
        let vb = store.var_builder(DType::F32);
        let init = candle_nn::init::DEFAULT_KAIMING_NORMAL;
        let create = |(name, shape): &(&str, &[usize])| vb.get_with_hints(*shape, name, init);
        let params = SHAPES
            .iter()
            .map(create)
            .collect::<candle_core::Result<_>>()?;
        let trainer = AnyTrainer::new(strategy, store, rank, AdamW::with_lr(0.1), caps)?;
        Ok(Self { params, trainer })
    }

    /// A step whose gradients are the same on all ranks, and short numbers: their mean over any number of ranks is exact.
    fn step(&mut self, step: u64) -> Result<()> {
        let mut loss = Tensor::zeros((), DType::F32, &candle_core::Device::Cpu)?;
        for (i, p) in self.params.iter().enumerate() {
            let gradient = ((noise(10 * step + i as u64, p.shape()) * 64.0)?.round()? / 64.0)?;
            loss = (loss + (p * gradient)?.sum_all()?)?;
        }
        self.trainer.backward(&loss)?;
        self.trainer.step()?;
        Ok(())
    }

    fn values(&self) -> Vec<Vec<f32>> {
        self.params.iter().map(values).collect()
    }
}

/// Values and both moments of all parameters, as they are on disk.
fn on_disk(path: &Path) -> Result<Vec<Vec<f32>>> {
    let checkpoint = Checkpoint::open(path)?;
    checkpoint.verify()?;
    let mut all = Vec::new();
    for (name, _) in SHAPES {
        for state in ["value", "exp_avg", "exp_avg_sq"] {
            all.push(checkpoint.read_f32(name, state)?);
        }
    }
    Ok(all)
}

/// Case C31, through files: whatever strategy, world size and cap has saved, any other loads it, saves the very same
/// numbers again, and takes the very same next step.
#[test]
fn c31_every_pair_of_strategy_and_world_size() {
    let (_guard, root) = folder();
    // What one process computes.
    let reference = root.join("reference");
    let expected = {
        let reference = reference.clone();
        ranks(1, move |rank| {
            let mut model = Shapes::new(Sharding::Ddp, &rank, caps(1_000))?;
            model.step(0)?;
            model.step(1)?;
            model.trainer.save(&reference)?;
            model.step(2)?;
            Ok(model.values())
        })
        .remove(0)
    };
    let numbers = on_disk(&reference).expect("a complete checkpoint");
    assert_eq!(
        numbers.iter().map(Vec::len).sum::<usize>(),
        3 * 57,
        "no padding in files"
    );

    let mut saved = Vec::new();
    for (s, strategy) in STRATEGIES.into_iter().enumerate() {
        for world_size in [1, 2, 3, 4, 8] {
            let run = root.join(format!("{}-{world_size}", strategy.name()));
            let cap = [16, 1, 1_000][(s + world_size) % 3];
            let to = run.clone();
            ranks(world_size, move |rank| {
                let mut model = Shapes::new(strategy, &rank, caps(cap))?;
                model.step(0)?;
                model.step(1)?;
                model.trainer.save(&to)
            });
            assert_eq!(
                on_disk(&run).expect("complete"),
                numbers,
                "{}",
                run.display()
            );
            saved.push(run);
        }
    }
    for strategy in STRATEGIES {
        for world_size in [1, 2, 3, 4, 8] {
            for (i, run) in saved.iter().enumerate() {
                let (from, again) = (run.clone(), root.join("again"));
                let to = again.clone();
                let cap = [1_000, 16, 3][(i + world_size) % 3];
                let after = same_on_all(ranks(world_size, move |rank| {
                    let mut model = Shapes::new(strategy, &rank, caps(cap))?;
                    model.step(7)?; // leaves other values and moments behind
                    let loaded = model.trainer.load(&from)?;
                    assert_eq!((loaded.step, model.trainer.num_steps()), (2, 2));
                    model
                        .trainer
                        .save_with(&to, &SaveOptions::new().keep_last(1)?)?;
                    model.step(2)?;
                    Ok(model.values())
                }));
                let what = format!(
                    "{} on {world_size} ranks from {}",
                    strategy.name(),
                    run.display()
                );
                assert_eq!(on_disk(&again).expect("complete"), numbers, "{what}");
                assert_eq!(after, expected, "{what}");
            }
        }
    }
}

#[test]
fn twelve_ranks() {
    let (_guard, run) = folder();
    let to = run.clone();
    ranks(12, move |rank| {
        let mut model = Shapes::new(Sharding::Zero2, &rank, caps(16))?;
        model.step(0)?;
        model.trainer.save(&to)
    });
    let from = run.clone();
    let values = same_on_all(ranks(2, move |rank| {
        let mut model = Shapes::new(Sharding::Zero1, &rank, caps(5))?;
        model.trainer.load(&from)?;
        Ok(model.values())
    }));
    let one = ranks(1, |rank| {
        let mut model = Shapes::new(Sharding::Ddp, &rank, caps(16))?;
        model.step(0)?;
        Ok(model.values())
    });
    assert_eq!(values, one[0]);
}

/// The second half of case C40: a save before the first step changes nothing.
#[test]
fn c40_a_save_at_step_0() {
    let (_guard, run) = folder();
    let train = |with_save: Option<PathBuf>| {
        same_on_all(ranks(2, move |rank| {
            let mut model = Shapes::new(Sharding::Zero2, &rank, caps(16))?;
            if let Some(run) = &with_save {
                model.trainer.save(run)?;
                model = Shapes::new(Sharding::Zero1, &rank, caps(3))?;
                assert_eq!(
                    model
                        .trainer
                        .load_latest(run, &LoadOptions::new())?
                        .map(|l| l.step),
                    Some(0)
                );
            }
            model.step(0)?;
            Ok(model.values())
        }))
    };
    assert_eq!(train(None), train(Some(run)));
}

/// Case C43: two saves by different worlds to one path; only the files of the newer one are read.
#[test]
fn c43_the_newest_of_two_worlds() {
    let (_guard, run) = folder();
    let save = |world_size, steps: u64, run: PathBuf| {
        same_on_all(ranks(world_size, move |rank| {
            let mut model = Shapes::new(Sharding::Zero1, &rank, caps(16))?;
            model.step(steps)?;
            Ok((model.trainer.save(&run)?, model.values()))
        }))
    };
    let (first, _) = save(4, 5, run.clone());
    let (second, values) = save(2, 6, run.clone()); // the same step number
    assert_ne!(first, second);
    for world_size in [2, 4] {
        let from = run.clone();
        let loaded = same_on_all(ranks(world_size, move |rank| {
            let mut model = Shapes::new(Sharding::Zero2, &rank, caps(16))?;
            model.trainer.load(&from)?;
            Ok(model.values())
        }));
        assert_eq!(loaded, values);
    }
    let shard = second.join("rank-00001-of-00002.safetensors");
    std::fs::remove_file(&shard).expect("it is there");
    let error = same_on_all(ranks(4, move |rank| {
        let mut model = Shapes::new(Sharding::Zero2, &rank, caps(16))?;
        let before = model.values();
        let error = model
            .trainer
            .load(&run)
            .expect_err("a file is missing")
            .to_string();
        assert_eq!(model.values(), before);
        Ok(error)
    }));
    assert!(
        error.contains("rank-00001-of-00002.safetensors: cannot be opened"),
        "{error}"
    );
}

#[test]
fn the_background_writes_what_was_there_at_the_call() {
    for strategy in STRATEGIES {
        for world_size in [1, 2, 3] {
            let (_guard, root) = folder();
            let (at_once, later) = (root.join("at once"), root.join("later"));
            let runs = (at_once.clone(), later.clone());
            ranks(world_size, move |rank| {
                let mut model = Shapes::new(strategy, &rank, caps(16))?;
                model.step(0)?;
                model.trainer.save(&runs.0)?;
                let before = model.trainer.ledger().current();
                let pending = model
                    .trainer
                    .save_in_background(&runs.1, &SaveOptions::new())?;
                let peak = model.trainer.ledger().peak().checkpoint;
                // 57 elements: value and two moments, shared out.
                let share = 4 * 3 * 57u64.div_ceil(rank.world_size() as u64);
                assert!(
                    peak > 0 && peak <= share + 4 * 3 * 8,
                    "{peak} bytes, a share is {share}"
                );
                model.step(1)?;
                model.step(2)?;
                assert!(
                    model
                        .trainer
                        .save(&runs.1)
                        .is_err_and(|e| e.to_string().contains("not waited for"))
                );
                pending.wait()?;
                assert_eq!(model.trainer.ledger().current(), before, "the copy is gone");
                model.trainer.save(&runs.1)?;
                Ok(())
            });
            assert_eq!(
                on_disk(&at_once).expect("complete"),
                on_disk(&later.join("step-00000001")).expect("complete")
            );
            assert_eq!(
                Checkpoint::open(&later).expect("complete").manifest().step,
                3
            );
        }
    }
}

#[test]
fn a_background_save_that_nobody_waits_for_leaves_nothing() {
    let (_guard, run) = folder();
    let to = run.clone();
    ranks(2, move |rank| {
        let mut model = Shapes::new(Sharding::Zero2, &rank, caps(16))?;
        drop(model.trainer.save_in_background(&to, &SaveOptions::new())?);
        rank.comm().barrier()?;
        assert_eq!(model.trainer.load_latest(&to, &LoadOptions::new())?, None);
        model.trainer.save(&to)?;
        Ok(())
    });
    let mut names: Vec<_> = std::fs::read_dir(&run)
        .expect("a folder")
        .flatten()
        .map(|e| e.file_name())
        .collect();
    names.sort();
    assert_eq!(names, [".lock", "latest", "step-00000000"]);
}

#[test]
fn keep_last_keeps_the_newest() {
    let (_guard, run) = folder();
    let to = run.clone();
    ranks(2, move |rank| {
        let mut model = Shapes::new(Sharding::Zero2, &rank, caps(16))?;
        for step in 0..5 {
            model.step(step)?;
            model
                .trainer
                .save_with(&to, &SaveOptions::new().keep_last(2)?)?;
        }
        // A run that goes back to an older step: what is saved last is newest.
        model.trainer.load(&to.join("step-00000004"))?;
        for _ in 0..2 {
            model
                .trainer
                .save_with(&to, &SaveOptions::new().keep_last(2)?)?;
        }
        Ok(())
    });
    let mut names: Vec<_> = std::fs::read_dir(&run)
        .expect("a folder")
        .flatten()
        .map(|e| e.file_name())
        .collect();
    names.sort();
    assert_eq!(
        names,
        [".lock", "latest", "step-00000004", "step-00000004-2"]
    );
    assert!(SaveOptions::new().keep_last(0).is_err());
}
