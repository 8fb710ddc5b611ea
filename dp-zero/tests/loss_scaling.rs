use candle_core::{DType, Tensor};
use dp_core::{
    DynamicLossScale, EngineConfig, GradAccumDType, LossScaling, ParamStore, Rank, Result, Sgd,
    SkipReason, StepReport, Trainer,
};
use dp_zero::Sharding;

use crate::checkpoint::folder;
use crate::mixed_precision::{constant, slope, widened};
use crate::support::{AnyTrainer, STRATEGIES, caps, ranks};

fn model(
    strategy: Sharding,
    rank: &Rank,
    scaling: LossScaling,
) -> Result<(Tensor, AnyTrainer<Sgd>)> {
    let store = ParamStore::new(rank.device());
    let w = constant(&store, DType::F16, 7, 1.0)?;
    let sgd = Sgd {
        momentum: 0.5,
        ..Sgd::new(1.0)
    };
    let trainer = AnyTrainer::with_settings(strategy, store, rank, sgd, |engine| {
        engine.bucket_caps = caps(3);
        engine.loss_scaling = scaling;
    })?;
    Ok((w, trainer))
}

fn step(trainer: &mut AnyTrainer<Sgd>, w: &Tensor, g: f64) -> Result<StepReport> {
    // In f32, as losses are: only the gradient of the parameter is in f16.
    trainer.backward(&slope(&w.to_dtype(DType::F32)?, g)?)?;
    trainer.step()
}

/// The gradient 2^-26 is 0 in f16; times 65536 it is not.
#[test]
fn small_gradients_survive_with_a_scale() {
    let tiny = 2f64.powi(-26);
    for strategy in STRATEGIES {
        for (scaling, expected) in [
            (LossScaling::Off, 0.0),
            (LossScaling::dynamic(), tiny),
            (LossScaling::Static(1024.0), tiny),
        ] {
            let (_guard, run) = folder();
            ranks(2, move |rank| {
                let (w, mut trainer) = model(strategy, &rank, scaling)?;
                let report = step(&mut trainer, &w, tiny)?;
                assert_eq!(report.skipped, None);
                trainer.save(&run)?;
                let checkpoint = dp_core::checkpoint::Checkpoint::open(&run)?;
                let momentum = checkpoint.read_f32("w", "momentum_buffer")?;
                assert_eq!(momentum, [expected as f32; 7], "{strategy:?} {scaling:?}");
                Ok(())
            });
        }
    }
}

/// An overflow on one rank: all skip, nothing changes but the scale; after enough good steps the scale grows.
#[test]
fn all_ranks_skip_and_back_off_together() {
    let rule = DynamicLossScale {
        growth_interval: 2,
        ..DynamicLossScale::default()
    };
    for strategy in STRATEGIES {
        for world_size in [1, 2, 3, 4] {
            ranks(world_size, move |rank| {
                let scaling = LossScaling::Dynamic(rule);
                let (w, mut trainer) = model(strategy, &rank, scaling)?;
                assert_eq!(trainer.loss_scale(), Some(65536.0));
                step(&mut trainer, &w, 0.25)?;
                let (digest, steps) = (trainer.store().sha256()?, trainer.num_steps());

                let last = rank.world_size() - 1;
                let g = if rank.rank() == last { 2.0 } else { 0.25 };
                let report = step(&mut trainer, &w, g)?;
                let reason = SkipReason::NonFinite {
                    parameter: "w".to_string(),
                    rank: last,
                };
                assert_eq!(report.skipped, Some(reason), "{strategy:?}");
                assert_eq!(report.loss_scale, Some(65536.0));
                assert_eq!(trainer.loss_scale(), Some(32768.0));
                assert_eq!(trainer.store().sha256()?, digest);
                assert_eq!(trainer.num_steps(), steps);

                // The momentum goes on from 0.25: skipping has not touched it. 0.75 - (0.125 + 0.25).
                let report = step(&mut trainer, &w, 0.25)?;
                assert_eq!((report.skipped, report.loss_scale), (None, Some(32768.0)));
                assert_eq!(widened(&w), [0.375; 7]);
                assert_eq!(trainer.loss_scale(), Some(32768.0));
                step(&mut trainer, &w, 0.25)?;
                assert_eq!(trainer.loss_scale(), Some(65536.0), "two good steps");
                Ok(())
            });
        }
    }
}

/// A step without samples says nothing about the scale; clipping sees the gradients without it.
#[test]
fn the_scale_is_not_seen_by_anything_else() {
    let rule = DynamicLossScale {
        growth_interval: 1,
        ..DynamicLossScale::default()
    };
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let (w, mut trainer) = model(strategy, &rank, LossScaling::Dynamic(rule))?;
            trainer.backward_weighted(dp_core::Loss::Nothing)?;
            assert_eq!(trainer.step()?.skipped, Some(SkipReason::NoSamples));
            assert_eq!(trainer.loss_scale(), Some(65536.0));

            let wide = w.to_dtype(DType::F32)?;
            let mut window = trainer.accumulate(2)?;
            for count in [1, 3] {
                let loss = &slope(&wide, 0.125)?;
                window.backward_weighted(dp_core::Loss::Mean { loss, count })?;
            }
            window.finish()?;
            let norm = trainer.clip_grad_norm(100.0)?;
            assert!((norm - 0.125 * 7f64.sqrt()).abs() < 1e-12, "{norm}");
            trainer.step()?;
            assert_eq!(widened(&w), [0.875; 7]);
            assert_eq!(trainer.loss_scale(), Some(131072.0));
            Ok(())
        });
    }
}

/// A loss in f16 times 65536 would be infinite; it is widened first.
#[test]
fn a_loss_in_f16_is_scaled_in_f32() {
    ranks(1, |rank| {
        let scaling = LossScaling::Static(65536.0);
        let (w, mut trainer) = model(Sharding::Ddp, &rank, scaling)?;
        // f16 all the way: the gradient of the loss itself, 65536, is what overflows.
        trainer.backward(&slope(&w, 0.25)?)?;
        trainer.step()?;
        assert!(widened(&w).iter().all(|x| !x.is_finite()));
        let (w, mut trainer) = model(Sharding::Ddp, &rank, LossScaling::Static(32768.0))?;
        trainer.backward(&slope(&w, 0.25)?)?;
        trainer.step()?;
        assert_eq!(widened(&w), [0.75; 7]);
        Ok(())
    });
}

/// A count is no part of a 16-bit gradient: f16 would have no room for it.
#[test]
fn losses_that_weigh_by_large_counts_train_in_16_bits() {
    for strategy in STRATEGIES {
        for (dtype, scaling) in [
            (DType::F16, LossScaling::Off),
            (DType::F16, LossScaling::Static(1024.0)),
            (DType::BF16, LossScaling::Off),
        ] {
            ranks(2, move |rank| {
                let store = ParamStore::new(rank.device());
                let w = constant(&store, dtype, 7, 1.0)?;
                let sgd = Sgd::new(1.0);
                let mut trainer = AnyTrainer::with_settings(strategy, store, &rank, sgd, |e| {
                    e.loss_scaling = scaling;
                })?;
                // 200,000 samples with the mean gradient 0.5 on one rank, 600,000 with 0.25 on the other, in two parts.
                let (count, g) = [(100_000, 0.5), (300_000, 0.25)][rank.rank()];
                let wide = w.to_dtype(DType::F32)?;
                let mut window = trainer.accumulate(2)?;
                let loss = &slope(&wide, g)?;
                window.backward_weighted(dp_core::Loss::Mean { loss, count })?;
                let loss = &slope(&wide, g * count as f64)?;
                window.backward_weighted(dp_core::Loss::Sum { loss, count })?;
                window.finish()?;
                trainer.step()?;
                // (200,000 x 0.5 + 600,000 x 0.25) / 800,000 = 0.3125
                assert_eq!(
                    widened(&w),
                    [0.6875; 7],
                    "{strategy:?} {dtype:?} {scaling:?}"
                );
                Ok(())
            });
        }
    }
}

#[test]
fn counts_are_refused_where_f16_has_no_room_for_them() {
    ranks(2, |rank| {
        for accum in [GradAccumDType::F32, GradAccumDType::Parameter] {
            let store = ParamStore::new(rank.device());
            let w = constant(&store, DType::F16, 7, 1.0)?;
            let (strategy, sgd) = (Sharding::Zero1, Sgd::new(1.0));
            let mut trainer = AnyTrainer::with_settings(strategy, store, &rank, sgd, |engine| {
                engine.grad_accum_dtype = accum;
                if accum == GradAccumDType::F32 {
                    engine.communication_dtype = Some(DType::F16);
                }
            })?;
            let loss = &slope(&w, 0.5)?;
            let result = trainer.backward_weighted(dp_core::Loss::Mean { loss, count: 4 });
            let message = result.err().map(|e| e.to_string()).unwrap_or_default();
            assert!(message.contains("GradAccumDType::F32"), "{message}");
            // Losses that weigh the same have no count.
            trainer.backward(loss)?;
            trainer.step()?;
            assert_eq!(widened(&w), [0.5; 7]);
        }
        Ok(())
    });
}

#[test]
fn precision_must_be_the_same_on_all_ranks() {
    type Change = fn(&mut EngineConfig);
    let differ: [(&str, Change); 3] = [
        ("grad_accum_dtype", |e| {
            e.grad_accum_dtype = GradAccumDType::Parameter
        }),
        ("communication_dtype", |e| {
            e.communication_dtype = Some(DType::BF16)
        }),
        ("loss_scaling", |e| {
            e.loss_scaling = LossScaling::Static(2.0)
        }),
    ];
    for (name, change) in differ {
        ranks(2, move |rank| {
            let store = ParamStore::new(rank.device());
            constant(&store, DType::F16, 7, 1.0)?;
            let (strategy, sgd) = (Sharding::Zero2, Sgd::new(1.0));
            let made = AnyTrainer::with_settings(strategy, store, &rank, sgd, |engine| {
                if rank.rank() == 1 {
                    change(engine);
                }
            });
            let message = made.err().map(|e| e.to_string()).unwrap_or_default();
            assert!(
                message.contains(name) && message.contains("rank 1"),
                "{message}"
            );
            Ok(())
        });
    }
}

/// Clipping works on the masters as on f32 parameters.
#[test]
fn clipping_scales_the_update_of_masters() {
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let store = ParamStore::new(rank.device());
            let w = constant(&store, DType::BF16, 4, 1.0)?;
            let sgd = Sgd::new(1.0);
            let mut trainer = AnyTrainer::new(strategy, store, &rank, sgd, caps(3))?;
            trainer.backward(&slope(&w, 8.0)?)?;
            assert_eq!(trainer.clip_grad_norm(1.0)?, 16.0);
            trainer.step()?;
            // 8 / 16, but for the 1e-6 of the formula, which bf16 does not see.
            assert_eq!(widened(&w), [0.5; 4], "{strategy:?}");
            Ok(())
        });
    }
}
