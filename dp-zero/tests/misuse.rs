use std::sync::{Arc, Mutex};
use std::time::Duration;

use candle_core::Tensor;
use candle_nn::Module;
use dp_core::{
    AdamW, EngineConfig, Error, Loss, LrSchedule, NonFinite, ParamGroups, ParamStore, Rank, Result,
    Sgd, SkipReason, Trainer, UnusedParameters, World,
};
use dp_zero::Sharding;

use crate::support::{AnyTrainer, STRATEGIES, caps, noise, ones, ranks, same_on_all, values};

fn probe(
    strategy: Sharding,
    rank: &Rank,
    change: impl FnOnce(&mut EngineConfig),
) -> Result<(Tensor, Tensor, AnyTrainer<Sgd>)> {
    let store = ParamStore::new(rank.device());
    let (p, q) = (ones(&store, 3, "p")?, ones(&store, 5, "q")?);
    let trainer = AnyTrainer::with_settings(strategy, store, rank, Sgd::new(0.25), |engine| {
        engine.bucket_caps = caps(4);
        change(engine);
    })?;
    Ok((p, q, trainer))
}

/// Runs ranks of which some must fail: their errors by rank, with those of the ranks that went down with them.
fn failing(world_size: usize, f: impl Fn(Rank) -> Result<()> + Send + Sync + 'static) -> String {
    let world = World::threads(world_size)
        .expect("ranks")
        .with_timeout(Duration::from_secs(10))
        .with_threads_per_rank(1);
    match world.run(f) {
        Err(error) => error.to_string(),
        Ok(()) => panic!("expected a failure"),
    }
}

#[test]
fn c34_a_rate_that_one_rank_changes_after_clipping() {
    type Change = fn(&mut AnyTrainer<Sgd>) -> Result<()>;
    let changes: [Change; 2] = [
        |t| {
            t.set_learning_rate(0.5);
            Ok(())
        },
        |t| t.set_lr_schedule(LrSchedule::LinearWarmup { warmup: 9 }),
    ];
    for strategy in STRATEGIES {
        for change in changes {
            for everywhere in [true, false] {
                let train = move |rank: Rank| -> Result<f32> {
                    let (p, q, mut trainer) = probe(strategy, &rank, |_| {})?;
                    trainer.backward(&(p.sum_all()? + q.sum_all()?)?)?;
                    trainer.clip_grad_norm(100.0)?;
                    if everywhere || rank.rank() == 1 {
                        change(&mut trainer)?;
                    }
                    trainer.step()?;
                    Ok(values(&p)[0])
                };
                if everywhere {
                    let value = same_on_all(ranks(3, train));
                    assert!(value == 0.5 || value == 1.0, "{value}"); // rate 0.5, or none in the first step of a warm-up
                } else {
                    let error = failing(3, move |rank| train(rank).map(drop));
                    assert!(
                        error.contains("changed after clip_grad_norm")
                            || error.contains("finished"),
                        "{error}"
                    );
                }
            }
        }
    }
}

/// Two trainers of models with the same names: their collectives are told apart.
#[test]
fn twin_models_are_never_mixed() {
    for strategy in STRATEGIES {
        for twisted in [false, true] {
            let train = move |rank: Rank| -> Result<(f32, f32)> {
                let (p1, q1, mut first) = probe(strategy, &rank, |_| {})?;
                let (p2, q2, mut second) = probe(strategy, &rank, |_| {})?;
                let mut one = || -> Result<()> {
                    first.backward(&(p1.sum_all()? + q1.sum_all()?)?)?;
                    first.step().map(drop)
                };
                let mut two = || -> Result<()> {
                    second.backward(&((p2.sum_all()? + q2.sum_all()?)? * 3.0)?)?;
                    second.step().map(drop)
                };
                if twisted && rank.rank() == 1 {
                    two()?;
                    one()?;
                } else {
                    one()?;
                    two()?;
                }
                Ok((values(&p1)[0], values(&p2)[0]))
            };
            if twisted {
                let error = failing(2, move |rank| train(rank).map(drop));
                assert!(
                    error.contains("[bucket 0: q]") && error.contains("[trainer 2, bucket 0: q]"),
                    "{error}"
                );
            } else {
                assert_eq!(same_on_all(ranks(2, train)), (0.75, 0.25));
            }
        }
    }
}

#[test]
fn what_was_computed_before_the_parameters_changed_is_refused() {
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let store = ParamStore::new(rank.device()).with_seed(rank.rank() as u64);
            let layer = candle_nn::linear(3, 2, store.var_builder(candle_core::DType::F32))?;
            let w = ones(&store, (2, 2), "w")?;
            let x = noise(1, (4, 3));
            // Views made with the model are as good as the parameter.
            let (row, transposed) = (w.narrow(0, 0, 1)?, w.t()?);
            let early = layer.forward(&x)?.sqr()?.sum_all()?;
            let mut trainer = AnyTrainer::new(strategy, store, &rank, Sgd::new(0.25), caps(3))?;
            let refused =
                |trainer: &mut AnyTrainer<Sgd>, loss: &Tensor| match trainer.backward(loss) {
                    Err(Error::Misuse { message, .. }) => {
                        assert!(message.contains("before the last change"), "{message}")
                    }
                    other => panic!("{other:?}"),
                };
            // From before rank 0's values were given to all.
            refused(&mut trainer, &early);
            let mut state = Tensor::zeros((4, 2), candle_core::DType::F32, rank.device())?;
            for step in 0..3 {
                let h = (layer.forward(&x)? + &state)?.matmul(&transposed)?.tanh()?;
                if step > 0 {
                    // A state that was carried over without detach; the trainer is as it was after the refusal.
                    refused(&mut trainer, &(h.sqr()?.sum_all()? + state.sum_all()?)?);
                    state = state.detach();
                }
                let h = (layer.forward(&x)? + &state)?.matmul(&transposed)?.tanh()?;
                trainer.backward(&(h.sqr()?.sum_all()? + row.sum_all()?)?)?;
                trainer.step()?;
                state = h;
            }
            Ok(())
        });
    }
}

#[test]
fn a_constant_loss_and_a_view_as_the_loss_are_no_stale_graphs() {
    for strategy in STRATEGIES {
        let last = same_on_all(ranks(2, move |rank| {
            let store = ParamStore::new(rank.device());
            let w = ones(&store, 1, "w")?;
            let (view, zero) = (w.squeeze(0)?, Tensor::new(0f32, rank.device())?);
            let mut trainer = AnyTrainer::new(strategy, store, &rank, Sgd::new(0.25), caps(3))?;
            for _ in 0..3 {
                // Rank 1 has no data, and says so with a loss of 0.
                trainer.backward(if rank.rank() == 0 { &view } else { &zero })?;
                trainer.step()?;
            }
            Ok(values(&w))
        }));
        assert_eq!(last, [1.0 - 3.0 * 0.125]);
    }
}

#[test]
fn after_a_failure_every_call_names_the_rank_that_failed() {
    for strategy in STRATEGIES {
        let error = failing(3, move |rank| {
            let (p, q, mut trainer) = probe(strategy, &rank, |_| {})?;
            let loss = || -> Result<Tensor> { Ok((p.sum_all()? + q.sum_all()?)?) };
            if rank.rank() == 1 {
                return Err(Error::invalid("disk", "it is on fire"));
            }
            // The backward itself may still pass: nobody waits in it.
            let backward = trainer.backward(&loss()?);
            let settled = trainer.clip_grad_norm(1.0).map(drop);
            let later = [
                backward.and(settled),
                trainer.clip_grad_norm(1.0).map(drop),
                trainer.step().map(drop),
                trainer.zero_grad(),
                trainer.backward(&loss()?),
                trainer.backward(&loss()?),
                trainer.step().map(drop),
            ];
            for (i, outcome) in later.into_iter().enumerate() {
                match outcome {
                    Err(Error::RankFailed {
                        failed: 1, reason, ..
                    }) => assert!(reason.contains("on fire"), "{reason}"),
                    other => panic!("call {i}: {other:?}"),
                }
            }
            Ok(())
        });
        assert!(
            error.contains("rank 1") && error.contains("it is on fire"),
            "{error}"
        );
    }
}

#[test]
fn settings_that_differ_are_named_when_the_trainer_is_made() {
    type Change = fn(&mut EngineConfig);
    let changes: [(&str, Change); 5] = [
        ("non_finite", |e| e.non_finite = NonFinite::SkipStep),
        ("compare_replicas_every", |e| e.compare_replicas_every = 7),
        ("broadcast_buffers", |e| e.broadcast_buffers = false),
        ("unused_parameters", |e| {
            e.unused_parameters = UnusedParameters::Error
        }),
        ("bucket_caps", |e| e.bucket_caps = caps(9)),
    ];
    for strategy in STRATEGIES {
        for (name, change) in changes {
            ranks(3, move |rank| {
                let made = probe(strategy, &rank, |engine| {
                    if rank.rank() == 2 {
                        change(engine);
                    }
                });
                match made {
                    Err(Error::InvalidArgument { what, message }) => {
                        assert_eq!(what, name);
                        assert!(message.contains("on rank 2"), "{message}");
                        Ok(())
                    }
                    other => panic!("{name}: {other:?}"),
                }
            });
        }
    }
}

/// Batch norm on ranks that see different data, without a broadcast: the statistics differ, and that is meant.
#[test]
fn buffers_that_may_differ_are_not_compared() {
    ranks(2, |rank| {
        let store = ParamStore::new(rank.device());
        let norm = candle_nn::batch_norm(2, 1e-5, store.var_builder(candle_core::DType::F32))?;
        let mut trainer =
            AnyTrainer::with_settings(Sharding::Zero1, store, &rank, Sgd::new(0.1), |engine| {
                engine.broadcast_buffers = false;
                engine.compare_replicas_every = 1;
            })?;
        for _ in 0..2 {
            let x = noise(rank.rank() as u64, (4, 2));
            trainer.backward(&norm.forward_train(&x)?.sqr()?.sum_all()?)?;
            trainer.step()?;
        }
        Ok(())
    });
}

/// The forward of a step that is skipped has written NaN into one rank's statistics: they do not stay different.
#[test]
fn a_skipped_step_leaves_the_ranks_equal() {
    for strategy in STRATEGIES {
        let (_, finite) = same_on_all(ranks(2, move |rank| {
            let store = ParamStore::new(rank.device());
            let norm = candle_nn::batch_norm(2, 1e-5, store.var_builder(candle_core::DType::F32))?;
            let mut trainer =
                AnyTrainer::with_settings(strategy, store, &rank, Sgd::new(0.1), |engine| {
                    engine.non_finite = NonFinite::SkipStep;
                })?;
            let x = (noise(1, (4, 2)) * if rank.rank() == 1 { f64::NAN } else { 1.0 })?;
            trainer.backward(&norm.forward_train(&x)?.sqr()?.sum_all()?)?;
            assert!(matches!(
                trainer.step()?.skipped,
                Some(SkipReason::NonFinite { rank: 1, .. })
            ));
            let mean = trainer
                .store()
                .get("running_mean")
                .expect("batch norm has one");
            Ok((
                trainer.store().sha256()?,
                values(mean.tensor()).iter().all(|v| v.is_finite()),
            ))
        }));
        assert!(finite);
    }
}

/// A frozen parameter that one rank changes behind our back.
#[test]
fn the_sentinel_looks_at_frozen_parameters() {
    let error = failing(2, move |rank| {
        let store = ParamStore::new(rank.device()).with_frozen(|n| n == "frozen");
        let (w, frozen) = (ones(&store, 3, "w")?, "frozen");
        ones(&store, 2, frozen)?;
        let mut trainer =
            AnyTrainer::with_settings(Sharding::Zero2, store, &rank, Sgd::new(0.1), |engine| {
                engine.compare_replicas_every = 2;
            })?;
        for _ in 0..2 {
            trainer.backward(&w.sum_all()?)?;
            if rank.rank() == 1 {
                trainer
                    .store()
                    .get(frozen)
                    .expect("created")
                    .write(0..1, &[7.0])?;
            }
            trainer.step()?;
        }
        Ok(())
    });
    assert!(
        error.contains("after step 2 parameter `frozen` of rank 1 differs"),
        "{error}"
    );
}

/// Strict: what only an early micro-batch uses is used; what none uses is named, with what it may come from.
#[test]
fn strict_trainers_look_at_the_whole_window() {
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let (p, q, mut trainer) = probe(strategy, &rank, |e| {
                e.unused_parameters = UnusedParameters::Error
            })?;
            let mut window = trainer.accumulate(3)?;
            window.backward(&q.sum_all()?)?;
            window.backward(&p.sum_all()?)?;
            window.backward(&p.sum_all()?)?;
            window.finish()?;
            trainer.step()?;
            let mut window = trainer.accumulate(2)?;
            window.backward(&p.sum_all()?)?;
            window.backward(&p.sum_all()?)?;
            window.finish()?;
            let before = trainer.store().sha256()?;
            match trainer.step() {
                Err(error @ Error::NoGradient { .. }) => {
                    let text = error.to_string();
                    for part in [
                        "for: q;",
                        "candle_nn op without backward",
                        "softmax_last_dim",
                        "with_frozen",
                    ] {
                        assert!(text.contains(part), "no {part:?} in {text:?}");
                    }
                }
                other => panic!("{other:?}"),
            }
            assert_eq!(trainer.store().sha256()?, before);
            Ok(())
        });
    }
}

/// The default: named in each report, a warning once.
#[test]
fn unused_parameters_are_warned_of_once() {
    let warnings: Vec<usize> = ranks(2, |rank| {
        let log = Log::default();
        let subscriber = tracing_subscriber::fmt().with_writer(log.clone()).finish();
        tracing::subscriber::with_default(subscriber, || -> Result<usize> {
            let (p, _, mut trainer) = probe(Sharding::Zero2, &rank, |_| {})?;
            for _ in 0..4 {
                trainer.backward(&p.sum_all()?)?;
                assert_eq!(trainer.step()?.unused, ["q"]);
            }
            let text =
                String::from_utf8(log.0.lock().expect("not poisoned").clone()).expect("text");
            Ok(text.matches("no rank computed a gradient for: q").count())
        })
    });
    assert_eq!(warnings, [1, 0], "rank 0 speaks for all");
}

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0
            .lock()
            .expect("not poisoned")
            .extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl<'a> tracing_subscriber::fmt::MakeWriter<'a> for Log {
    type Writer = Self;
    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// A NaN in an early micro-batch of one rank, seen by that rank alone: it is the one that is named.
#[test]
fn the_rank_that_made_the_nan_is_named() {
    for strategy in STRATEGIES {
        for culprit in [0, 2, 3] {
            let reason = same_on_all(ranks(4, move |rank| {
                let (p, q, mut trainer) =
                    probe(strategy, &rank, |e| e.non_finite = NonFinite::SkipStep)?;
                let mut window = trainer.accumulate(3)?;
                for micro_batch in 0..3 {
                    let bad = rank.rank() == culprit && micro_batch == 0;
                    let q = (q.narrow(0, 0, 1)?.sum_all()? * if bad { f64::NAN } else { 1.0 })?;
                    window.backward(&(p.sum_all()? + q)?)?;
                }
                window.finish()?;
                Ok(trainer.step()?.skipped)
            }));
            assert_eq!(
                reason,
                Some(SkipReason::NonFinite {
                    parameter: "q".to_string(),
                    rank: culprit
                }),
                "{strategy:?}"
            );
        }
    }
}

/// A rank that has nothing in one of several micro-batches, next to losses that weigh the same per rank.
#[test]
fn nothing_counts_as_nothing_beside_losses_per_rank() {
    for strategy in STRATEGIES {
        let w = same_on_all(ranks(2, move |rank| {
            let (p, q, mut trainer) = probe(strategy, &rank, |_| {})?;
            let loss = |g: f64| -> Result<Tensor> { Ok(((p.sum_all()? + q.sum_all()?)? * g)?) };
            let mut window = trainer.accumulate(2)?;
            window.backward(&loss(1.0 + rank.rank() as f64)?)?;
            match rank.rank() {
                0 => window.backward(&loss(3.0)?)?,
                _ => window.backward_weighted(Loss::Nothing)?,
            }
            window.finish()?;
            assert_eq!(trainer.step()?.weight, 3.0);
            Ok(values(&p)[0])
        }));
        assert_eq!(w, 1.0 - 0.25 * (1.0 + 2.0 + 3.0) / 3.0, "{strategy:?}");
    }
}

/// A schedule counts optimizer steps: neither micro-batches nor skipped steps.
#[test]
fn schedules_advance_with_optimizer_steps_only() {
    for strategy in STRATEGIES {
        for micro_batches in [1, 3] {
            let rates = same_on_all(ranks(3, move |rank| {
                let (p, q, mut trainer) = probe(strategy, &rank, |_| {})?;
                trainer.set_lr_schedule(LrSchedule::LinearWarmup { warmup: 4 })?;
                let mut rates = Vec::new();
                for step in 0..5 {
                    let mut window = trainer.accumulate(micro_batches)?;
                    for _ in 0..micro_batches {
                        let loss = (p.sum_all()? + q.sum_all()?)?;
                        // In step 2 nobody has data.
                        window.backward_weighted(if step == 2 {
                            Loss::Nothing
                        } else {
                            Loss::Mean {
                                loss: &loss,
                                count: 1,
                            }
                        })?;
                    }
                    window.finish()?;
                    rates.push(trainer.step()?.learning_rates[0]);
                }
                Ok(rates)
            }));
            assert_eq!(rates, [0.0, 0.0625, 0.125, 0.125, 0.1875], "{strategy:?}");
        }
    }
}

/// Weight decay of a group, where one shard spans two groups: no gradient, so decay is all that moves a value.
#[test]
fn weight_decay_holds_per_element() {
    for strategy in STRATEGIES {
        for world_size in [1, 2, 3, 4] {
            ranks(world_size, move |rank| {
                let store = ParamStore::new(rank.device());
                let (decayed, kept) = (ones(&store, 5, "decayed")?, ones(&store, 7, "kept")?);
                let adamw = |weight_decay| AdamW {
                    weight_decay,
                    ..AdamW::with_lr(0.5)
                };
                let groups =
                    ParamGroups::new(adamw(0.5)).with_group("kept", |n| n == "kept", adamw(0.0));
                let mut trainer = AnyTrainer::new(strategy, store, &rank, groups, caps(1 << 20))?;
                for _ in 0..2 {
                    // Not `* 0.0`, which candle takes for a constant.
                    let zero = |w: &Tensor| w.mul(&w.zeros_like()?)?.sum_all();
                    trainer.backward(&(zero(&decayed)? + zero(&kept)?)?)?;
                    trainer.step()?;
                }
                assert_eq!(
                    (values(&decayed), values(&kept)),
                    (vec![0.5625; 5], vec![1.0; 7])
                );
                Ok(())
            });
        }
    }
}
