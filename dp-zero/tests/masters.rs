use std::path::Path;

use candle_core::{DType, Tensor};
use dp_core::checkpoint::Checkpoint;
use dp_core::{
    AdamW, Error, LoadOptions, LossScaling, Optimizer, ParamStore, Rank, Result, Sgd, Trainer,
};
use dp_zero::Sharding;

use crate::checkpoint::folder;
use crate::mixed_precision::{constant, slope, widened};
use crate::support::{AnyTrainer, STRATEGIES, caps, ranks};

/// Seven bf16 numbers; the value 1 + 1/1024 of their masters cannot be seen in them.
fn model(strategy: Sharding, rank: &Rank) -> Result<(Tensor, AnyTrainer<Sgd>)> {
    let store = ParamStore::new(rank.device());
    let w = constant(&store, DType::BF16, 7, 1.0)?;
    let trainer = AnyTrainer::new(strategy, store, rank, Sgd::new(1.0), caps(3))?;
    Ok((w, trainer))
}

/// The masters, as they are in a checkpoint.
fn masters(trainer: &AnyTrainer<impl Optimizer>, folder: &Path) -> Result<Vec<f32>> {
    trainer.save(folder)?;
    Checkpoint::open(folder)?.read_f32("w", "master")
}

fn step(trainer: &mut AnyTrainer<Sgd>, w: &Tensor, g: f64) -> Result<()> {
    trainer.backward(&slope(w, g)?)?;
    trainer.step().map(drop)
}

const TINY: f32 = 1.0 / 1024.0;

#[test]
fn a_change_behind_the_trainers_back_is_an_error_on_all_ranks() {
    for strategy in STRATEGIES {
        // Everywhere, or where the element has its owner (rank 2 owns the last one).
        for by_all in [true, false] {
            let (_guard, run) = folder();
            ranks(3, move |rank| {
                let (w, mut trainer) = model(strategy, &rank)?;
                step(&mut trainer, &w, f64::from(TINY))?;
                let before = masters(&trainer, &run)?;
                assert_eq!(before, [1.0 - TINY; 7]);
                let param = trainer.store().get("w").expect("it is there");
                trainer.backward(&slope(&w, 1.0)?)?;
                if by_all || rank.rank() == 2 {
                    param.write(6..7, &[8.0])?;
                }
                let error = trainer.step().expect_err("the parameter is another one");
                assert!(matches!(&error, Error::Altered { parameter } if parameter == "w"));
                assert!(error.to_string().contains("refresh_masters"), "{error}");
                // It comes again until somebody decides, and nothing has been changed by it.
                assert!(trainer.clip_grad_norm(1.0).is_err());
                assert_eq!(trainer.num_steps(), 1);
                assert_eq!(widened(&w)[..6], [1.0; 6]);
                // Rank 0's values count; the others keep the masters that round to them.
                trainer.refresh_masters()?;
                trainer.step()?;
                let kept = if by_all { 7.0 } else { -TINY };
                let expected = [-TINY, -TINY, -TINY, -TINY, -TINY, -TINY, kept];
                assert_eq!(masters(&trainer, &run)?, expected, "{strategy:?}");
                assert_eq!(widened(&w), expected);
                Ok(())
            });
        }
    }
}

#[test]
fn a_change_between_clipping_and_step_is_an_error_on_all_ranks() {
    for strategy in STRATEGIES {
        ranks(3, move |rank| {
            let (w, mut trainer) = model(strategy, &rank)?;
            trainer.backward(&slope(&w, 0.5)?)?;
            trainer.clip_grad_norm(100.0)?;
            if rank.rank() == 2 {
                let param = trainer.store().get("w").expect("it is there");
                param.write(6..7, &[8.0])?;
            }
            let error = trainer.step().expect_err("the parameter is another one");
            assert!(matches!(&error, Error::Altered { parameter } if parameter == "w"));
            trainer.refresh_masters()?;
            trainer.step()?;
            assert_eq!(widened(&w), [0.5; 7], "{strategy:?}");
            Ok(())
        });
    }
}

/// Wherever it is: beyond the first chunk of a parameter, in the last bucket, in any rank's part.
#[test]
fn a_single_changed_element_is_found() {
    for strategy in STRATEGIES {
        for world_size in [1, 3] {
            ranks(world_size, move |rank| {
                let store = ParamStore::new(rank.device());
                let vb = store.var_builder(DType::BF16);
                let ones = candle_nn::Init::Const(1.0);
                let (a, b) = (
                    vb.get_with_hints(7001, "a", ones)?,
                    vb.get_with_hints(11, "b", ones)?,
                );
                let sgd = Sgd::new(1.0);
                let mut trainer = AnyTrainer::new(strategy, store, &rank, sgd, caps(100))?;
                for (name, at) in [("a", 0), ("a", 2500), ("a", 7000), ("b", 0), ("b", 10)] {
                    let param = trainer.store().get(name).expect("it is there");
                    param.write(at..at + 1, &[3.0])?;
                    trainer.backward(&(slope(&a, 0.0)? + slope(&b, 0.0)?)?)?;
                    let error = trainer.step().expect_err("an element is another one");
                    assert!(matches!(&error, Error::Altered { parameter } if parameter == name));
                    trainer.refresh_masters()?;
                    trainer.step()?;
                    assert_eq!(widened(param.tensor())[at], 3.0);
                }
                Ok(())
            });
        }
    }
}

/// What nobody has changed keeps the part of the master that cannot be seen; so do other parameters, and model buffers.
#[test]
fn refreshing_touches_only_what_has_changed() {
    for strategy in STRATEGIES {
        let (_guard, run) = folder();
        ranks(2, move |rank| {
            let (w, mut trainer) = model(strategy, &rank)?;
            step(&mut trainer, &w, f64::from(TINY))?;
            let param = trainer.store().get("w").expect("it is there");
            param.write(2..3, &[2.0])?;
            trainer.refresh_masters()?;
            let low = 1.0 - TINY;
            let expected = [low, low, 2.0, low, low, low, low];
            assert_eq!(masters(&trainer, &run)?, expected, "{strategy:?}");
            // NaN is what it is, not a change.
            trainer.set_parameter("w", &Tensor::full(f32::NAN, 7, rank.device())?)?;
            step(&mut trainer, &w, 1.0)?;
            Ok(())
        });
    }
}

#[test]
fn graphs_from_before_a_change_are_refused() {
    ranks(1, |rank| {
        let (w, mut trainer) = model(Sharding::Zero1, &rank)?;
        let old = slope(&w.sqr()?, 1.0)?;
        trainer.refresh_masters()?;
        assert!(trainer.backward(&old).is_err());
        let old = slope(&w.sqr()?, 1.0)?;
        trainer.set_parameter("w", &Tensor::ones(7, DType::F32, rank.device())?)?;
        assert!(trainer.backward(&old).is_err());
        // Views of the parameter show its new values; and between backward and step no value is set.
        let view = w.reshape((7, 1))?;
        step(&mut trainer, &w, 0.5)?;
        trainer.backward(&slope(&view, 0.25)?)?;
        let set = trainer.set_parameter("w", &Tensor::ones(7, DType::F32, rank.device())?);
        assert!(matches!(set, Err(Error::Misuse { .. })));
        trainer.step()?;
        assert_eq!(widened(&w), [0.25; 7]);
        Ok(())
    });
}

#[test]
fn a_value_that_one_rank_cannot_set_is_named_on_all() {
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let (w, mut trainer) = model(strategy, &rank)?;
            let len = 7 - rank.rank();
            let values = Tensor::full(3f32, len, rank.device())?;
            let error = trainer.set_parameter("w", &values).expect_err("a shape");
            assert!(error.to_string().contains("[6]"), "{error}");
            // Nothing has happened, and the group goes on.
            assert_eq!(widened(&w), [1.0; 7]);
            step(&mut trainer, &w, 1.0)?;
            assert_eq!(widened(&w), [0.0; 7]);

            let store = ParamStore::new(rank.device());
            let h = constant(&store, DType::F16, 7, 1.0)?;
            let mut trainer = AnyTrainer::new(strategy, store, &rank, Sgd::new(1.0), caps(3))?;
            let large = Tensor::full(1e6f32, 7, rank.device())?;
            let error = trainer.set_parameter("w", &large).expect_err("a range");
            assert!(error.to_string().contains("f16"), "{error}");
            assert_eq!(widened(&h), [1.0; 7]);
            Ok(())
        });
    }
}

#[test]
fn a_parameter_that_was_written_is_not_saved_with_another_master() {
    let (_guard, run) = folder();
    ranks(2, move |rank| {
        let (_w, mut trainer) = model(Sharding::Zero2, &rank)?;
        if rank.rank() == 1 {
            let param = trainer.store().get("w").expect("it is there");
            param.write(6..7, &[8.0])?;
        }
        let error = trainer.save(&run).expect_err("value and master differ");
        assert!(error.to_string().contains("refresh_masters"), "{error}");
        trainer.refresh_masters()?;
        trainer.save(&run).map(drop)
    });
}

/// A parameter that the checkpoint does not have keeps its value, and its master is that.
#[test]
fn new_parameters_have_masters_of_their_own() {
    let (_guard, run) = folder();
    let from = run.clone();
    ranks(2, move |rank| {
        let (w, mut trainer) = model(Sharding::Zero1, &rank)?;
        step(&mut trainer, &w, 0.5)?;
        trainer.save(&from).map(drop)
    });
    ranks(2, move |rank| {
        let store = ParamStore::new(rank.device());
        let w = constant(&store, DType::BF16, 7, 1.0)?;
        let vb = store.var_builder(DType::BF16);
        let new = vb.get_with_hints(5, "new", candle_nn::Init::Const(2.0))?;
        let mut trainer = AnyTrainer::new(Sharding::Zero2, store, &rank, Sgd::new(1.0), caps(3))?;
        trainer.backward(&(slope(&w, 1.0)? + slope(&new, 1.0)?)?)?;
        trainer.step()?;
        let param = trainer.store().get("new").expect("it is there");
        param.write(0..5, &[4.0; 5])?;
        trainer.load_with(&run, &LoadOptions::new().with_new_params(|n| n == "new"))?;
        trainer.backward(&(slope(&w, 0.25)? + slope(&new, 0.25)?)?)?;
        trainer.step()?;
        assert_eq!((widened(&w), widened(&new)), (vec![0.25; 7], vec![3.75; 5]));
        Ok(())
    });
}

/// The names that checkpoints use for values and masters are taken.
#[test]
fn optimizer_states_cannot_be_called_as_masters_are() {
    #[derive(Debug, Clone, PartialEq)]
    struct Odd(Sgd);
    impl Optimizer for Odd {
        fn name(&self) -> &'static str {
            "odd"
        }
        fn state_names(&self) -> &'static [&'static str] {
            &["master"]
        }
        fn update(&self, n: u64, w: &mut [f32], g: &[f32], s: f32, state: &mut [&mut [f32]]) {
            self.0.update(n, w, g, s, state);
        }
        fn hyper_parameters(&self) -> Vec<(&'static str, f64)> {
            self.0.hyper_parameters()
        }
        fn set_hyper_parameter(&mut self, name: &str, value: f64) -> Result<()> {
            self.0.set_hyper_parameter(name, value)
        }
        fn learning_rate(&self) -> f64 {
            self.0.learning_rate()
        }
        fn set_learning_rate(&mut self, lr: f64) {
            self.0.set_learning_rate(lr);
        }
        fn validate(&self) -> Result<()> {
            self.0.validate()
        }
    }
    ranks(1, |rank| {
        let store = ParamStore::new(rank.device());
        constant(&store, DType::BF16, 7, 1.0)?;
        let made = AnyTrainer::new(Sharding::Ddp, store, &rank, Odd(Sgd::new(0.1)), caps(3));
        let message = made.err().map(|e| e.to_string()).unwrap_or_default();
        assert!(message.contains("`master`"), "{message}");
        Ok(())
    });
}

#[test]
fn values_set_through_the_trainer_refresh_the_masters() {
    for strategy in STRATEGIES {
        for world_size in [1, 2, 3] {
            let (_guard, run) = folder();
            ranks(world_size, move |rank| {
                let (w, mut trainer) = model(strategy, &rank)?;
                step(&mut trainer, &w, f64::from(TINY))?;
                // Rank 0's count; 3.001 is rounded to bf16.
                let values = Tensor::full(3.001f32 + rank.rank() as f32, 7, rank.device())?;
                trainer.set_parameter("w", &values)?;
                assert_eq!(widened(&w), [3.0; 7]);
                assert_eq!(masters(&trainer, &run)?, [3.0; 7]);
                step(&mut trainer, &w, 1.0)?;
                assert_eq!(widened(&w), [2.0; 7]);

                let unknown = trainer.set_parameter("v", &values);
                assert!(unknown.is_err_and(|e| e.to_string().contains("`v`")));
                let short = trainer.set_parameter("w", &values.narrow(0, 0, 2)?);
                assert!(short.is_err_and(|e| e.to_string().contains("[2]")));

                let weights = run.with_file_name("weights.safetensors");
                trainer.export_safetensors(&weights)?;
                step(&mut trainer, &w, f64::from(TINY))?;
                trainer.import_safetensors(&weights, &LoadOptions::new())?;
                assert_eq!(masters(&trainer, &run)?, [2.0; 7]);
                step(&mut trainer, &w, 1.0)?;
                assert_eq!(widened(&w), [1.0; 7]);
                Ok(())
            });
        }
    }
}

/// Masters that a load must bring back, since they cannot be seen in the parameters.
#[test]
fn masters_come_back_at_any_world_size_and_stage() {
    let (_guard, root) = folder();
    for from in STRATEGIES {
        let run = root.join(from.name());
        let to = run.clone();
        ranks(3, move |rank| {
            let (w, mut trainer) = model(from, &rank)?;
            step(&mut trainer, &w, f64::from(TINY))?;
            trainer.save(&to).map(drop)
        });
        for strategy in STRATEGIES {
            for world_size in [1, 2, 4] {
                let run = run.clone();
                let again = root.join("again");
                ranks(world_size, move |rank| {
                    let (w, mut trainer) = model(strategy, &rank)?;
                    step(&mut trainer, &w, 5.0)?;
                    trainer.load(&run)?;
                    assert_eq!(widened(&w), [1.0; 7]);
                    assert_eq!(masters(&trainer, &again)?, [1.0 - TINY; 7]);
                    // Three more such steps, and half the distance to the next bf16 number is passed.
                    for _ in 0..2 {
                        step(&mut trainer, &w, f64::from(TINY))?;
                    }
                    assert_eq!(widened(&w), [1.0 - 1.0 / 256.0; 7]);
                    Ok(())
                });
            }
        }
    }
}

/// Stops and goes on after every third step, in f16 with a loss scale that grows and backs off: not a bit differs.
#[test]
fn a_run_with_stops_is_the_straight_run_bit_for_bit() {
    fn trainer(strategy: Sharding, rank: &Rank) -> Result<(Tensor, AnyTrainer<AdamW>)> {
        let store = ParamStore::new(rank.device());
        let w = constant(&store, DType::F16, 11, 0.5)?;
        let adamw = AdamW::with_lr(3e-4);
        let trainer = AnyTrainer::with_settings(strategy, store, rank, adamw, |engine| {
            engine.bucket_caps = caps(4);
            engine.loss_scaling = LossScaling::Dynamic(dp_core::DynamicLossScale {
                init_scale: 1024.0,
                growth_interval: 2,
                ..Default::default()
            });
        })?;
        Ok((w, trainer))
    }
    fn steps(
        steps: std::ops::Range<usize>,
        w: &Tensor,
        trainer: &mut AnyTrainer<AdamW>,
        scales: &mut Vec<Option<f64>>,
    ) -> Result<()> {
        for i in steps {
            // A gradient that overflows once the scale has grown.
            trainer.backward(&slope(w, 7.0 + i as f64)?)?;
            scales.push(trainer.step()?.loss_scale);
        }
        Ok(())
    }
    for strategy in STRATEGIES {
        for world_size in [1, 2, 3] {
            let (_guard, run) = folder();
            ranks(world_size, move |rank| {
                let (w, mut straight) = trainer(strategy, &rank)?;
                let mut expected = Vec::new();
                steps(0..12, &w, &mut straight, &mut expected)?;
                assert!(expected.windows(2).any(|s| s[1] < s[0]), "{expected:?}");
                assert!(expected.windows(2).any(|s| s[1] > s[0]), "{expected:?}");

                let mut scales = Vec::new();
                for part in 0..4 {
                    let (w, mut stopped) = trainer(strategy, &rank)?;
                    if part > 0 {
                        stopped.load(&run)?;
                    }
                    steps(3 * part..3 * part + 3, &w, &mut stopped, &mut scales)?;
                    stopped.save(&run)?;
                    if part == 3 {
                        assert_eq!(stopped.store().sha256()?, straight.store().sha256()?);
                        assert_eq!(stopped.num_steps(), straight.num_steps());
                        assert_eq!(stopped.loss_scale(), straight.loss_scale());
                        let resumed = masters(&stopped, &run)?;
                        assert_eq!(
                            resumed,
                            masters(&straight, &run.with_file_name("straight"))?
                        );
                    }
                }
                assert_eq!(scales, expected, "{strategy:?}");
                Ok(())
            });
        }
    }
}
