use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use candle_nn::{Module, ModuleT};
use dp_core::checkpoint::Checkpoint;
use dp_core::{
    AdamW, DataPosition, DistributedSampler, HyperParameters, LoadOptions, LrSchedule, ParamGroups,
    ParamStore, Rank, Remainder, Result, SaveOptions, Sgd, Trainer,
};
use dp_models::Dropout;
use dp_zero::Sharding;

use crate::checkpoint::{Shapes, folder};
use crate::support::{
    AnyTrainer, Oddities, STRATEGIES, caps, noise, ones, ranks, same_on_all, values,
};

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
            assert_eq!(*trainer.step()?.learning_rates, [0.125]);
            assert_eq!(values(&w), [0.125; 5]);
            Ok(())
        });
    }
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
                *trainer.step()?.learning_rates,
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
