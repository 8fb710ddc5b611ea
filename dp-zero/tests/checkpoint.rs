use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use candle_nn::{Module, ModuleT};
use dp_core::checkpoint::Checkpoint;
use dp_core::{
    AdamW, BucketCaps, DataPosition, DistributedSampler, HyperParameters, LoadOptions, LrSchedule,
    ParamGroups, ParamStore, Rank, Remainder, Result, SaveOptions, Sgd, Trainer,
};
use dp_models::Dropout;
use dp_zero::Sharding;

use crate::support::{
    AnyTrainer, Oddities, STRATEGIES, caps, noise, ones, ranks, same_on_all, values,
};

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

struct Shapes {
    params: Vec<Tensor>,
    trainer: AnyTrainer<AdamW>,
}

impl Shapes {
    fn new(strategy: Sharding, rank: &Rank, caps: BucketCaps) -> Result<Self> {
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

/// A model with every kind of parameter, batch norm included, that is trained with everything that has a state.
struct Run {
    model: Oddities,
    norm: candle_nn::BatchNorm,
    dropout: Dropout,
    sampler: DistributedSampler,
    data: Tensor,
    position: DataPosition,
    trainer: AnyTrainer<Sgd>,
}

impl Run {
    const SAMPLES: usize = 37;

    fn new(strategy: Sharding, rank: &Rank, cap: usize) -> Result<Self> {
        let store = Oddities::store();
        let vb = store.var_builder(DType::F32);
        let norm = candle_nn::batch_norm(5, 1e-5, vb.pp("norm"))?;
        let model = Oddities::new(vb)?;
        let sgd = Sgd {
            momentum: 0.9,
            ..Sgd::new(0.05)
        };
        let slow = Sgd {
            lr: 0.01,
            ..sgd.clone()
        };
        let groups =
            ParamGroups::new(sgd).with_group("slow", |name| name.starts_with("second"), slow);
        let mut trainer = AnyTrainer::new(strategy, store, rank, groups, caps(cap))?;
        trainer.set_lr_schedule(LrSchedule::Cosine {
            warmup: 2,
            total: 12,
            min_factor: 0.1,
        })?;
        Ok(Self {
            model,
            norm,
            dropout: Dropout::new(0.3, rank.seed(3))?,
            sampler: DistributedSampler::new(Self::SAMPLES, rank.world_size(), rank.rank())?
                .with_shuffle(4)
                .with_remainder(Remainder::Drop),
            data: noise(9, (Self::SAMPLES, 5)),
            position: DataPosition {
                seed: 4,
                ..DataPosition::default()
            },
            trainer,
        })
    }

    /// One step on the next two micro-batches of 2 samples per rank.
    fn step(&mut self, world_size: usize) -> Result<f64> {
        let mut rows = self
            .sampler
            .indices_after(self.position.epoch, self.position.samples);
        if rows.len() < 4 {
            self.position.epoch += 1;
            self.position.samples = 0;
            rows = self.sampler.indices_after(self.position.epoch, 0);
        }
        let mut window = self.trainer.accumulate(2)?;
        for rows in rows[..4].chunks(2) {
            let rows = Tensor::from_iter(rows.iter().map(|i| *i as u32), self.data.device())?;
            let x = self
                .norm
                .forward_train(&self.data.index_select(&rows, 0)?)?;
            let x = self.dropout.forward_t(&x, true)?;
            window.backward(&self.model.loss(&x)?)?;
        }
        window.finish()?;
        self.position.samples += 4 * world_size;
        let norm = self.trainer.clip_grad_norm(0.5)?;
        self.trainer.step()?;
        Ok(norm)
    }

    fn save(&self, run: &Path) -> Result<PathBuf> {
        let options = SaveOptions::new()
            .with_data(self.position)
            .with_rank_state(&self.dropout.position())?;
        self.trainer.save_with(run, &options)
    }

    fn load(&mut self, run: &Path) -> Result<()> {
        let loaded = self.trainer.load(run)?;
        self.position = loaded.data;
        if let Some(position) = loaded.rank_state()? {
            self.dropout.seek(position);
        }
        Ok(())
    }
}

/// Data order, dropout masks, batch-norm statistics, momentum, groups, schedule: a resumed run is the uninterrupted one.
#[test]
fn a_resumed_run_is_the_uninterrupted_one_bit_for_bit() {
    for strategy in STRATEGIES {
        for world_size in [1, 2, 3] {
            let (_guard, run) = folder();
            let to = run.clone();
            let straight = ranks(world_size, move |rank| {
                let mut run = Run::new(strategy, &rank, 16)?;
                let mut norms = Vec::new();
                for step in 0..10 {
                    if step == 5 {
                        run.save(&to)?;
                    }
                    norms.push(run.step(world_size)?.to_bits());
                }
                Ok((
                    norms[5..].to_vec(),
                    run.trainer.store().sha256()?,
                    run.dropout.position(),
                    run.position,
                ))
            });
            let resumed = ranks(world_size, move |rank| {
                let mut resumed = Run::new(strategy, &rank, 40)?;
                resumed.load(&run)?;
                let norms = (5..10)
                    .map(|_| Ok(resumed.step(world_size)?.to_bits()))
                    .collect::<Result<Vec<_>>>()?;
                Ok((
                    norms,
                    resumed.trainer.store().sha256()?,
                    resumed.dropout.position(),
                    resumed.position,
                ))
            });
            assert_eq!(
                straight,
                resumed,
                "{} on {world_size} ranks",
                strategy.name()
            );
        }
    }
}

/// At another number of ranks no sample is lost or seen twice, and nobody gets another rank's random numbers.
#[test]
fn a_resumed_run_on_other_ranks_goes_on_in_the_data() {
    let (_guard, run) = folder();
    let to = run.clone();
    let position = same_on_all(ranks(4, move |rank| {
        let mut run = Run::new(Sharding::Zero2, &rank, 16)?;
        run.step(4)?;
        run.save(&to)?;
        Ok(run.position)
    }));
    assert_eq!(
        (position.epoch, position.samples, position.seed),
        (0, 16, 4)
    );
    let rest = ranks(3, move |rank| {
        let mut resumed = Run::new(Sharding::Zero2, &rank, 16)?;
        let loaded = resumed.trainer.load(&run)?;
        assert_eq!(loaded.world_size, 4);
        assert_eq!(loaded.rank_state::<u64>()?, None);
        Ok(resumed
            .sampler
            .indices_after(loaded.data.epoch, loaded.data.samples))
    });
    let whole = DistributedSampler::new(Run::SAMPLES, 1, 0)
        .expect("valid")
        .with_shuffle(4)
        .indices(0);
    let mut rest = rest.concat();
    rest.sort_unstable();
    let mut expected = whole[16..].to_vec();
    expected.sort_unstable();
    assert_eq!(rest, expected);
}

/// Case C40: 10 steps up, saved, a new trainer with other betas, one step down.
#[test]
fn c40_the_optimizer_state_and_the_saved_betas_come_back() {
    let adamw = |beta1| AdamW {
        lr: 0.01,
        beta1,
        weight_decay: 0.0,
        ..AdamW::default()
    };
    for strategy in STRATEGIES {
        let (_guard, run) = folder();
        let to = run.clone();
        ranks(2, move |rank| {
            let store = ParamStore::new(rank.device());
            let w = ones(&store, 3, "w")?;
            let mut trainer = AnyTrainer::new(strategy, store, &rank, adamw(0.9), caps(2))?;
            for _ in 0..10 {
                trainer.backward(&w.sum_all()?)?;
                trainer.step()?;
            }
            trainer.save(&to)
        });
        ranks(2, move |rank| {
            let store = ParamStore::new(rank.device());
            let w = ones(&store, 3, "w")?;
            let mut trainer = AnyTrainer::new(strategy, store, &rank, adamw(0.5), caps(2))?;
            let error = trainer.load(&run).expect_err("other betas").to_string();
            assert!(
                error.contains(
                    "`beta1` of parameter group `default` is 0.5 in the trainer, but 0.9"
                ),
                "{error}"
            );
            assert_eq!(values(&w), [1.0; 3], "nothing has changed");
            let saved = LoadOptions::new().with_hyper_parameters(HyperParameters::Saved);
            trainer.load_with(&run, &saved)?;
            assert_eq!(trainer.param_groups()[0].optimizer.beta1, 0.9);
            trainer.backward(&(w.sum_all()? * -1.0)?)?;
            trainer.step()?;
            for w in values(&w) {
                assert!((w - 0.892915).abs() < 1e-5, "{w}");
            }
            Ok(())
        });
    }
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

/// Case C34: rates changed by hand between steps; the getter, the applied and the saved one agree.
#[test]
fn c34_the_learning_rate_of_the_moment_is_saved() {
    for strategy in STRATEGIES {
        let (_guard, run) = folder();
        ranks(2, move |rank| {
            let new = |rank: &Rank| -> Result<_> {
                let store = ParamStore::new(rank.device());
                let w = ones(&store, 5, "w")?;
                Ok((
                    w,
                    AnyTrainer::new(strategy, store, rank, Sgd::new(0.25), caps(2))?,
                ))
            };
            let (w, mut trainer) = new(&rank)?;
            trainer.backward(&w.sum_all()?)?;
            trainer.step()?;
            trainer.set_learning_rate(0.5);
            trainer.backward(&w.sum_all()?)?;
            trainer.step()?;
            trainer.save(&run)?;
            let (w, mut trainer) = new(&rank)?;
            let saved = LoadOptions::new().with_hyper_parameters(HyperParameters::Saved);
            trainer.load_with(&run, &saved)?;
            assert_eq!(trainer.param_groups()[0].optimizer.lr, 0.5);
            trainer.set_learning_rate(0.125);
            trainer.backward(&w.sum_all()?)?;
            assert_eq!(trainer.step()?.learning_rates, [0.125]);
            assert_eq!(values(&w), [0.125; 5]);
            Ok(())
        });
    }
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

#[test]
fn parameters_may_come_and_go_where_that_is_allowed() {
    let (_guard, run) = folder();
    let to = run.clone();
    ranks(2, move |rank| {
        let store = ParamStore::new(rank.device());
        let layer = candle_nn::linear(3, 5, store.var_builder(DType::F32).pp("old"))?;
        let w = ones(&store, 4, "w")?;
        let mut trainer =
            AnyTrainer::new(Sharding::Zero2, store, &rank, AdamW::default(), caps(7))?;
        trainer.backward(&(layer.forward(&noise(1, (2, 3)))?.sqr()?.sum_all()? + w.sum_all()?)?)?;
        trainer.step()?;
        trainer.save(&to)
    });
    ranks(3, move |rank| {
        let store = ParamStore::new(rank.device());
        let (w, new) = (ones(&store, 4, "w")?, ones(&store, 2, "new")?);
        let mut trainer =
            AnyTrainer::new(Sharding::Zero1, store, &rank, AdamW::default(), caps(7))?;
        let options = LoadOptions::new();
        let load = |trainer: &mut AnyTrainer<AdamW>, options: &LoadOptions| {
            trainer.load_with(&run, options).map_err(|e| e.to_string())
        };
        let error = load(&mut trainer, &options).expect_err("`new` is not there");
        assert!(error.contains("`new` of the model is not there"), "{error}");
        let options = options.with_new_params(|name| name == "new");
        let error = load(&mut trainer, &options).expect_err("`old` is there");
        assert!(
            error.contains("`old.weight` is not in the model"),
            "{error}"
        );
        let loaded = load(
            &mut trainer,
            &options.with_dropped_params(|name| name.starts_with("old")),
        )
        .expect("allowed");
        assert_eq!(
            (loaded.new_params, loaded.dropped_params),
            (
                vec!["new".to_string()],
                vec!["old.weight".to_string(), "old.bias".to_string()]
            )
        );
        assert_eq!(values(&new), [1.0; 2]);
        assert_ne!(values(&w), [1.0; 4]);
        // Bias correction of the new one begins at step 1: the first step is lr, plus weight decay.
        trainer.backward(&new.sum_all()?)?;
        trainer.step()?;
        for v in values(&new) {
            assert!((v - (1.0 - 1e-3 - 1e-5)).abs() < 1e-6, "{v}");
        }
        Ok(())
    });
}

/// An unused parameter has its own count of updates, and so its own bias correction, also after a load.
#[test]
fn updates_are_counted_per_parameter() {
    for strategy in STRATEGIES {
        let (_guard, run) = folder();
        ranks(2, move |rank| {
            let new = || -> Result<_> {
                let store = ParamStore::new(rank.device());
                let (p, q) = (ones(&store, 3, "p")?, ones(&store, 3, "q")?);
                let trainer =
                    AnyTrainer::new(strategy, store, &rank, AdamW::with_lr(0.1), caps(4))?;
                Ok((p, q, trainer))
            };
            let step = |p: &Tensor,
                        q: Option<&Tensor>,
                        trainer: &mut AnyTrainer<AdamW>,
                        g: f64|
             -> Result<()> {
                let mut loss = (p.sum_all()? * g)?;
                if let Some(q) = q {
                    loss = (loss + (q.sum_all()? * g)?)?;
                }
                trainer.backward(&loss)?;
                trainer.step().map(drop)
            };
            let (p, q, mut trainer) = new()?;
            step(&p, Some(&q), &mut trainer, 1.0)?;
            step(&p, None, &mut trainer, 2.0)?;
            step(&p, None, &mut trainer, 3.0)?;
            trainer.save(&run)?;
            let (p2, q2, mut resumed) = new()?;
            resumed.load(&run)?;
            step(&p, Some(&q), &mut trainer, -1.0)?;
            step(&p2, Some(&q2), &mut resumed, -1.0)?;
            assert_eq!((values(&p), values(&q)), (values(&p2), values(&q2)));
            let updates: Vec<u64> = Checkpoint::open(&run)?
                .manifest()
                .parameters
                .iter()
                .map(|p| p.updates)
                .collect();
            assert_eq!(updates, [3, 1]);
            Ok(())
        });
    }
}

/// Right after a load all ranks hold the saved values, also of frozen parameters and buffers; and what was computed before
/// is refused.
#[test]
fn everything_is_the_saved_one_on_all_ranks() {
    for strategy in STRATEGIES {
        let (_guard, run) = folder();
        ranks(3, move |rank| {
            let new = |seed: u64| -> Result<_> {
                let store = ParamStore::new(rank.device())
                    .with_seed(seed)
                    .with_frozen(|n| n == "frozen");
                let vb = store.var_builder(DType::F32);
                let norm = candle_nn::batch_norm(5, 1e-5, vb.pp("norm"))?;
                let layer = candle_nn::linear(5, 2, vb.pp("layer"))?;
                let tied = vb.get_with_hints((2, 5), "layer.weight", candle_nn::init::ZERO)?;
                vb.get_with_hints(7, "frozen", candle_nn::init::DEFAULT_KAIMING_NORMAL)?;
                let trainer =
                    AnyTrainer::with_settings(strategy, store, &rank, AdamW::default(), |e| {
                        e.bucket_caps = caps(4);
                        e.broadcast_buffers = false;
                    })?;
                Ok((norm, layer, tied, trainer))
            };
            let loss = |norm: &candle_nn::BatchNorm, layer: &candle_nn::Linear| -> Result<Tensor> {
                let x = noise(rank.rank() as u64, (4, 5));
                Ok(layer.forward(&norm.forward_train(&x)?)?.sqr()?.sum_all()?)
            };
            let (norm, layer, _tied, mut trainer) = new(1)?;
            trainer.backward(&loss(&norm, &layer)?)?;
            trainer.step()?;
            trainer.save(&run)?;
            // Ranks have other statistics; rank 0's are saved.
            let mean = |t: &AnyTrainer<AdamW>| {
                values(t.store().get("norm.running_mean").expect("made").tensor())
            };
            let manifest = Checkpoint::open(&run)?;
            assert!(
                manifest
                    .manifest()
                    .parameters
                    .iter()
                    .any(|p| p.name == "layer.weight" && p.tied)
            );
            let saved = manifest.read_f32("norm.running_mean", "value")?;
            assert_eq!(saved == mean(&trainer), rank.rank() == 0);

            let (norm, layer, _tied, mut trainer) = new(2)?;
            let early = loss(&norm, &layer)?;
            trainer.load(&run)?;
            assert!(
                trainer.backward(&early).is_err(),
                "computed before the load"
            );
            assert_eq!(mean(&trainer), saved);
            for name in ["frozen", "layer.weight", "norm.running_var"] {
                let own = values(trainer.store().get(name).expect("made").tensor());
                assert_eq!(own, manifest.read_f32(name, "value")?, "{name}");
            }
            let early = loss(&norm, &layer)?;
            let file = run.join("weights.safetensors");
            trainer.export_safetensors(&file)?;
            trainer.import_safetensors(&file, &LoadOptions::new())?;
            assert!(
                trainer.backward(&early).is_err(),
                "computed before the import"
            );
            Ok(())
        });
    }
}

/// `Saved` goes by the groups' names, and takes the schedule, too.
#[test]
fn saved_hyper_parameters_find_their_groups() {
    let (_guard, run) = folder();
    ranks(2, move |rank| {
        let new = |groups: ParamGroups<Sgd>| -> Result<_> {
            let store = ParamStore::new(rank.device());
            let (p, q) = (ones(&store, 3, "p")?, ones(&store, 3, "q")?);
            Ok((
                p,
                q,
                AnyTrainer::new(Sharding::Zero2, store, &rank, groups, caps(4))?,
            ))
        };
        let base = || ParamGroups::new(Sgd::new(1.0));
        let (_, _, mut trainer) = new(base()
            .with_group("a", |n| n == "p", Sgd::new(0.5))
            .with_group("b", |n| n == "q", Sgd::new(0.25)))?;
        let schedule = LrSchedule::Step {
            step_size: 1,
            gamma: 0.5,
        };
        trainer.set_lr_schedule(schedule)?;
        trainer.save(&run)?;
        let options = LoadOptions::new().with_hyper_parameters(HyperParameters::Saved);
        // Declared the other way around, and with a group that nobody is in.
        let (_, _, mut trainer) = new(base()
            .with_group("b", |n| n == "q", Sgd::new(9.0))
            .with_group("a", |n| n == "p", Sgd::new(9.0)))?;
        assert!(
            trainer
                .load(&run)
                .is_err_and(|e| e.to_string().contains("the list of parameter groups"))
        );
        trainer.load_with(&run, &options)?;
        let rates: Vec<(String, f64)> = trainer
            .param_groups()
            .iter()
            .map(|g| (g.name().to_string(), g.optimizer.lr))
            .collect();
        assert_eq!(
            rates,
            [
                ("default".into(), 1.0),
                ("b".into(), 0.25),
                ("a".into(), 0.5)
            ]
        );
        // The schedule came along: the rate halves.
        let (p, q) = (trainer.store().get("p"), trainer.store().get("q"));
        let (p, q) = (
            p.expect("made").tensor().clone(),
            q.expect("made").tensor().clone(),
        );
        for factor in [1.0, 0.5] {
            trainer.backward(&(p.sum_all()? + q.sum_all()?)?)?;
            assert_eq!(
                trainer.step()?.learning_rates,
                [factor, 0.25 * factor, 0.5 * factor]
            );
        }
        let (_, _, mut trainer) = new(base()
            .with_group("c", |_| false, Sgd::new(9.0))
            .with_group("a", |n| n == "p", Sgd::new(9.0))
            .with_group("b", |n| n == "q", Sgd::new(9.0)))?;
        assert!(
            trainer
                .load_with(&run, &options)
                .is_err_and(|e| e.to_string().contains("group `c` is not there"))
        );
        assert_eq!(trainer.param_groups()[1].optimizer.lr, 9.0);
        Ok(())
    });
}

/// Each rank gets back what it gave.
#[test]
fn rank_states_are_each_ranks_own() {
    let (_guard, run) = folder();
    ranks(3, move |rank| {
        let mut model = Shapes::new(Sharding::Zero1, &rank, caps(16))?;
        let mine = (rank.rank(), "of my own".to_string());
        model
            .trainer
            .save_with(&run, &SaveOptions::new().with_rank_state(&mine)?)?;
        let loaded = model.trainer.load(&run)?;
        assert_eq!(loaded.rank_state()?, Some(mine));
        assert!(
            loaded
                .rank_state::<u64>()
                .is_err_and(|e| e.to_string().contains("rank_state"))
        );
        Ok(())
    });
}

/// A parameter that is new in the checkpoint's eyes, but was trained before the load: it starts without state.
#[test]
fn new_parameters_start_without_state() {
    for strategy in STRATEGIES {
        let (_guard, run) = folder();
        ranks(2, move |rank| {
            let store = ParamStore::new(rank.device());
            ones(&store, 3, "w")?;
            AnyTrainer::new(strategy, store, &rank, AdamW::with_lr(0.5), caps(4))?.save(&run)?;
            let train = |steps_before: usize| -> Result<Vec<f32>> {
                let store = ParamStore::new(rank.device());
                let (w, new) = (ones(&store, 3, "w")?, ones(&store, 5, "new")?);
                let mut trainer =
                    AnyTrainer::new(strategy, store, &rank, AdamW::with_lr(0.5), caps(4))?;
                let step = |trainer: &mut AnyTrainer<AdamW>, g: f64| -> Result<()> {
                    trainer.backward(&((w.sum_all()? + new.sum_all()?)? * g)?)?;
                    trainer.step().map(drop)
                };
                for _ in 0..steps_before {
                    step(&mut trainer, 7.0)?;
                }
                trainer
                    .store()
                    .get("new")
                    .expect("made")
                    .write(0..5, &[1.0; 5])?;
                trainer.load_with(&run, &LoadOptions::new().with_new_params(|n| n == "new"))?;
                step(&mut trainer, -1.0)?;
                Ok(values(&new))
            };
            assert_eq!(train(0)?, train(3)?);
            Ok(())
        });
    }
}
