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
                // Rank 0's values count.
                trainer.refresh_masters()?;
                trainer.step()?;
                let kept = if by_all { 7.0 } else { 0.0 };
                let expected = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, kept];
                assert_eq!(masters(&trainer, &run)?, expected, "{strategy:?}");
                assert_eq!(widened(&w), expected);
                Ok(())
            });
        }
    }
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
