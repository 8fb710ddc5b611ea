use candle_core::{DType, Tensor};
use dp_core::{
    DynamicLossScale, LossScaling, ParamStore, Rank, Result, Sgd, SkipReason, StepReport, Trainer,
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
