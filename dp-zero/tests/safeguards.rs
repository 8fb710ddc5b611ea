use candle_core::Tensor;
use dp_core::{
    AdamW, EngineConfig, Error, GradNorm, LrSchedule, NonFinite, ParamStore, Rank, Result, Sgd,
    SkipReason, Trainer, UnusedParameters,
};
use dp_zero::Sharding;

use crate::support::{AnyTrainer, STRATEGIES, caps, noise, ones, ranks, same_on_all, values};

/// Parameters `p` of 3 and `q` of 5 elements, a bucket each; the change is applied to the engine's settings.
fn two<O: dp_core::Optimizer>(
    strategy: Sharding,
    rank: &Rank,
    optimizer: O,
    change: impl FnOnce(&mut EngineConfig),
) -> Result<(Tensor, Tensor, AnyTrainer<O>)> {
    let store = ParamStore::new(rank.device());
    let (p, q) = (ones(&store, 3, "p")?, ones(&store, 5, "q")?);
    let trainer = AnyTrainer::with_settings(strategy, store, rank, optimizer, |engine| {
        engine.bucket_caps = caps(4);
        change(engine);
    })?;
    Ok((p, q, trainer))
}

fn skip_non_finite(engine: &mut EngineConfig) {
    engine.non_finite = NonFinite::SkipStep;
}

fn loss(p: &Tensor, q: &Tensor, step: u64, rank: u64) -> Result<Tensor> {
    let (a, b) = (
        noise(100 * step + rank, 3),
        noise(100 * step + 50 + rank, 5),
    );
    Ok(((p * a)?.sum_all()? + (q * b)?.sum_all()?)?)
}

#[test]
fn a_step_with_a_nan_is_skipped_on_all_ranks_and_leaves_no_trace() {
    for strategy in STRATEGIES {
        for world_size in [1, 2, 3] {
            let train = move |with_nan: bool| {
                same_on_all(ranks(world_size, move |rank| {
                    let (p, q, mut trainer) =
                        two(strategy, &rank, AdamW::with_lr(0.1), skip_non_finite)?;
                    trainer.set_lr_schedule(LrSchedule::Step {
                        step_size: 1,
                        gamma: 0.5,
                    })?;
                    let r = rank.rank() as u64;
                    for step in 0..3 {
                        if with_nan && step == 1 {
                            let bad = match rank.rank() + 1 == world_size {
                                true => (q.narrow(0, 4, 1)?.sum_all()? * f64::NAN)?,
                                false => q.sum_all()?,
                            };
                            trainer.backward(&(bad + p.sum_all()?)?)?;
                            trainer.clip_grad_norm(1.0)?;
                            let report = trainer.step()?;
                            let reason = SkipReason::NonFinite {
                                parameter: "q".to_string(),
                                rank: world_size - 1,
                            };
                            assert_eq!(report.skipped, Some(reason), "{strategy:?}");
                            assert_eq!(report.step, 1);
                        }
                        trainer.backward(&loss(&p, &q, step, r)?)?;
                        assert_eq!(trainer.step()?.skipped, None);
                    }
                    assert_eq!(trainer.num_steps(), 3);
                    trainer.store().sha256()
                }))
            };
            assert_eq!(train(true), train(false), "{strategy:?}");
        }
    }
}

#[test]
fn an_overflow_of_the_sum_is_seen_too() {
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let (p, _, mut trainer) = two(strategy, &rank, Sgd::new(0.25), skip_non_finite)?;
            trainer.backward(&(p.sum_all()? * f64::from(f32::MAX))?)?;
            let reason = SkipReason::NonFinite {
                parameter: "p".to_string(),
                rank: 0,
            };
            assert_eq!(trainer.step()?.skipped, Some(reason));
            assert_eq!(values(&p), [1.0; 3]);
            Ok(())
        });
    }
}

#[test]
fn without_the_option_the_nan_is_the_same_everywhere() {
    for strategy in STRATEGIES {
        let all = ranks(3, move |rank| {
            let (p, q, mut trainer) = two(strategy, &rank, Sgd::new(0.25), |_| {})?;
            let factor = if rank.rank() == 1 { f64::NAN } else { 1.0 };
            trainer.backward(&((p.sum_all()? * factor)? + q.sum_all()?)?)?;
            assert!(trainer.clip_grad_norm(1.0)?.is_nan());
            trainer.step()?;
            let bits = |t: &Tensor| values(t).iter().map(|v| v.is_nan()).collect::<Vec<_>>();
            Ok((bits(&p), bits(&q)))
        });
        // The norm is NaN, so clipping makes every gradient NaN, as in PyTorch.
        assert_eq!(same_on_all(all), (vec![true; 3], vec![true; 5]));
    }
}

#[test]
fn strict_trainers_refuse_parameters_without_gradient() {
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let strict =
                |engine: &mut EngineConfig| engine.unused_parameters = UnusedParameters::Error;
            let (p, q, mut trainer) = two(strategy, &rank, Sgd::new(0.25), strict)?;
            trainer.backward(&p.sum_all()?)?;
            match trainer.step() {
                Err(Error::NoGradient { names }) => assert_eq!(names, ["q"]),
                other => panic!("expected NoGradient, got {other:?}"),
            }
            assert_eq!(values(&p), [1.0; 3]);
            trainer.zero_grad()?;
            // Used by one rank only is used.
            let q_too = (p.sum_all()? + q.sum_all()?)?;
            let used = if rank.rank() == 0 {
                q_too
            } else {
                p.sum_all()?
            };
            trainer.backward(&used)?;
            trainer.step()?;
            assert_eq!((values(&p), values(&q)), (vec![0.75; 3], vec![0.875; 5]));
            Ok(())
        });
    }
}

#[test]
fn c34_rates_follow_schedule_and_setting_alike_on_all_ranks() {
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let (p, q, mut trainer) = two(strategy, &rank, Sgd::new(0.25), |_| {})?;
            trainer.set_lr_schedule(LrSchedule::Step {
                step_size: 2,
                gamma: 0.5,
            })?;
            let mut applied = Vec::new();
            for _ in 0..4 {
                trainer.backward(&(p.sum_all()? + q.sum_all()?)?)?;
                applied.extend_from_slice(&trainer.step()?.learning_rates);
            }
            assert_eq!(applied, [0.25, 0.25, 0.125, 0.125]);
            assert_eq!(values(&p), [1.0 - 0.75; 3]);
            trainer.set_learning_rate(0.5);
            trainer.backward(&p.sum_all()?)?;
            assert_eq!(*trainer.step()?.learning_rates, [0.125]);
            assert_eq!(values(&p), [0.125; 3]);
            let bad = LrSchedule::Linear {
                warmup: 3,
                total: 2,
            };
            assert!(matches!(
                trainer.set_lr_schedule(bad),
                Err(Error::InvalidArgument { what: "total", .. })
            ));
            Ok(())
        });
    }
}

/// What rank 1 of two does differently, given its trainer and `p`; all of it would let the replicas drift apart.
type Deviation = fn(&mut AnyTrainer<Sgd>, &Tensor) -> Result<()>;

/// One step on two ranks, in which rank 1 deviates; both must get an error that has `words`.
fn disagree(usual: Deviation, deviation: Deviation, words: [&'static str; 2]) {
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let (p, _, mut trainer) = two(strategy, &rank, Sgd::new(0.25), |_| {})?;
            let act = if rank.rank() == 1 { deviation } else { usual };
            let error = act(&mut trainer, &p).expect_err("the ranks disagree");
            let text = error.to_string();
            assert!(
                words.iter().all(|w| text.contains(w)),
                "{strategy:?}: {text}"
            );
            Ok(())
        });
    }
}

fn ordinary(trainer: &mut AnyTrainer<Sgd>, p: &Tensor) -> Result<()> {
    trainer.backward(&p.sum_all()?)?;
    trainer.step().map(drop)
}

fn clipped(trainer: &mut AnyTrainer<Sgd>, p: &Tensor) -> Result<()> {
    trainer.backward(&p.sum_all()?)?;
    trainer.clip_grad_norm(1.0)?;
    trainer.step().map(drop)
}

#[test]
fn c34_ranks_with_different_rates() {
    let before: Deviation = |trainer, p| {
        trainer.set_learning_rate(0.75);
        ordinary(trainer, p)
    };
    disagree(ordinary, before, ["lr 0.25", "lr 0.75"]);
    let between: Deviation = |trainer, p| {
        trainer.backward(&p.sum_all()?)?;
        trainer.set_learning_rate(0.75);
        trainer.step().map(drop)
    };
    disagree(ordinary, between, ["lr 0.25", "lr 0.75"]);
}

#[test]
fn ranks_with_different_schedules() {
    let scheduled: Deviation = |trainer, p| {
        trainer.set_lr_schedule(LrSchedule::LinearWarmup { warmup: 2 })?;
        ordinary(trainer, p)
    };
    disagree(ordinary, scheduled, ["Constant", "LinearWarmup"]);
}

#[test]
fn ranks_that_clip_differently() {
    disagree(ordinary, clipped, ["clipped", "step 1"]);
    let tighter: Deviation = |trainer, p| {
        trainer.backward(&p.sum_all()?)?;
        trainer.clip_grad_norm(0.5)?;
        trainer.step().map(drop)
    };
    disagree(clipped, tighter, ["L2 norm 1", "L2 norm 0.5"]);
}

#[test]
fn a_rank_that_leaves_a_step_out() {
    let twice: Deviation = |trainer, p| {
        ordinary(trainer, p)?;
        ordinary(trainer, p)
    };
    let skips: Deviation = |trainer, p| {
        trainer.backward(&p.sum_all()?)?;
        trainer.zero_grad()?;
        ordinary(trainer, p)?;
        ordinary(trainer, p)
    };
    disagree(twice, skips, ["step 1", "bucket"]);
}

#[test]
fn ranks_with_different_numbers_of_micro_batches() {
    let two_micro_batches: Deviation = |trainer, p| {
        let mut window = trainer.accumulate(2)?;
        window.backward(&p.sum_all()?)?;
        window.backward(&p.sum_all()?)?;
        window.finish()?;
        trainer.step().map(drop)
    };
    disagree(
        ordinary,
        two_micro_batches,
        ["step 1 of 1 micro-batches", "rank 1"],
    );
}

#[test]
fn ranks_with_different_parameter_groups() {
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let special = ["p", "q"][rank.rank()];
            let groups = dp_core::ParamGroups::new(Sgd::new(0.25)).with_group(
                "special",
                move |name| name == special,
                Sgd::new(0.5),
            );
            let store = ParamStore::new(rank.device());
            let (p, _) = (ones(&store, 3, "p")?, ones(&store, 5, "q")?);
            let mut trainer = AnyTrainer::new(strategy, store, &rank, groups, caps(4))?;
            let error = ordinary(&mut trainer, &p)
                .expect_err("other groups")
                .to_string();
            assert!(error.contains("parameters in groups"), "{error}");
            Ok(())
        });
    }
}

/// Rank 2 changes what rank 1 owns in the sharded stages: there the owner's values come back with the next gather.
#[test]
fn replicas_that_drift_apart_are_found_or_healed() {
    for strategy in STRATEGIES {
        let digests = ranks(3, move |rank| {
            let every_2 = |engine: &mut EngineConfig| engine.compare_replicas_every = 2;
            let (p, _, mut trainer) = two(strategy, &rank, Sgd::new(0.25), every_2)?;
            let step = |trainer: &mut AnyTrainer<Sgd>| -> Result<()> {
                trainer.backward(&p.sum_all()?)?;
                trainer.step().map(drop)
            };
            for _ in 0..4 {
                step(&mut trainer)?;
            }
            if rank.rank() == 2 {
                let q = trainer.store().get("q").expect("a parameter");
                q.write(3..4, &[1.5])?;
            }
            step(&mut trainer)?;
            match (strategy, step(&mut trainer)) {
                (
                    Sharding::Ddp,
                    Err(Error::Diverged {
                        parameter,
                        rank,
                        step,
                    }),
                ) => {
                    assert_eq!((parameter.as_str(), rank, step), ("q", 2, 6));
                    Ok(None)
                }
                (Sharding::Zero1 | Sharding::Zero2, Ok(())) => Ok(Some(trainer.store().sha256()?)),
                (_, other) => panic!("{strategy:?}: {other:?}"),
            }
        });
        same_on_all(digests);
    }
}

#[test]
fn clipping_by_the_greatest_element() {
    for strategy in STRATEGIES {
        for world_size in [1, 2, 4] {
            ranks(world_size, move |rank| {
                let (p, q, mut trainer) = two(strategy, &rank, Sgd::new(1.0), |_| {})?;
                trainer.backward(&((p.sum_all()? * 3.0)? - (q.sum_all()? * 4.0)?)?)?;
                assert_eq!(trainer.clip_grad_norm_by(GradNorm::Inf, 1.0)?, 4.0);
                trainer.step()?;
                let close = |t: &Tensor, e: f32| values(t).iter().all(|v| (v - e).abs() < 1e-5);
                assert!(close(&p, 0.25) && close(&q, 2.0));
                Ok(())
            });
        }
    }
}
