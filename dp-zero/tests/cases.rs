use candle_core::{DType, Tensor};
use dp_core::{AdamW, Error, GradAccumDType, Optimizer, ParamStore, Rank, Result, Sgd, Trainer};
use dp_zero::Sharding;

use crate::mixed_precision::{constant, slope, widened};
use crate::support::{AnyTrainer, STRATEGIES, caps, ones, ranks, same_on_all, values};

/// A trainer over one probe parameter per name, SGD with learning rate 0.25.
fn probe(
    strategy: Sharding,
    rank: &Rank,
    names: &[&str],
) -> Result<(Vec<Tensor>, AnyTrainer<Sgd>)> {
    let store = ParamStore::new(rank.device());
    let params = names
        .iter()
        .map(|n| ones(&store, (), n))
        .collect::<Result<_>>()?;
    Ok((
        params,
        AnyTrainer::new(strategy, store, rank, Sgd::new(0.25), caps(1 << 20))?,
    ))
}

#[test]
fn c04_tied_weights_count_once() {
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let (w, mut trainer) = probe(strategy, &rank, &["w", "w"])?;
            let (a, b) = [(1.0, 2.0), (3.0, 4.0)][rank.rank()];
            trainer.backward(&((&w[0] * a)? + (&w[1] * b)?)?)?;
            trainer.step()?;
            assert_eq!([&w[0], &w[1]].map(values), [[-0.25], [-0.25]]);
            trainer.backward(&((&w[0] * a)? + (&w[1] * b)?)?)?;
            assert_eq!(trainer.clip_grad_norm(1.0)?, 5.0);
            trainer.step()?;
            assert!((values(&w[0])[0] + 0.5).abs() < 1e-6);
            Ok(())
        });
    }
}

#[test]
fn c05_a_parameter_that_one_rank_does_not_use() {
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let (w, mut trainer) = probe(strategy, &rank, &["p", "q"])?;
            let loss = match rank.rank() {
                0 => ((&w[0] * 1.0)? + (&w[1] * 4.0)?)?,
                _ => (&w[0] * 3.0)?,
            };
            trainer.backward(&loss)?;
            assert!(trainer.step()?.unused.is_empty());
            assert_eq!([&w[0], &w[1]].map(values), [[0.5], [0.5]]);
            Ok(())
        });
    }
}

#[test]
fn c09_every_bucket_cap_reduces_every_parameter() {
    const SIZES: [usize; 5] = [16, 17, 1, 15, 64];
    let run = |strategy: Sharding, world_size: usize, cap: usize, wire: Option<DType>| {
        same_on_all(ranks(world_size, move |rank| {
            let store = ParamStore::new(rank.device()).with_seed(2);
            let vb = store.var_builder(DType::F32);
            let init = candle_nn::Init::Uniform { lo: -1.0, up: 1.0 };
            let w: Vec<Tensor> = SIZES
                .iter()
                .enumerate()
                .map(|(i, n)| vb.get_with_hints(*n, &format!("w{i}"), init))
                .collect::<candle_core::Result<_>>()?;
            let adamw = AdamW::with_lr(0.1);
            let mut trainer = AnyTrainer::with_settings(strategy, store, &rank, adamw, |engine| {
                engine.bucket_caps = caps(cap);
                engine.communication_dtype = wire;
            })?;
            for _ in 0..2 {
                let mut loss = Tensor::new(0f32, rank.device())?;
                for w in &w {
                    loss = (loss + (w.sqr()? * (1.0 + rank.rank() as f64))?.sum_all()?)?;
                }
                trainer.backward(&loss)?;
                assert!(trainer.step()?.unused.is_empty());
            }
            Ok(w.iter().map(values).collect::<Vec<_>>())
        }))
    };
    for (world_size, wire) in [2, 3].map(|n| [(n, None), (n, Some(DType::BF16))]).concat() {
        let expected = run(Sharding::Ddp, world_size, 1 << 28, wire);
        for cap in [1, 15, 16, 17, 64, 65, 1_000_000_000] {
            for strategy in STRATEGIES {
                assert!(
                    run(strategy, world_size, cap, wire) == expected,
                    "{strategy:?}, {world_size} ranks, cap {cap}, {wire:?}"
                );
            }
        }
    }
}

#[test]
fn c20_and_c23_accumulation_to_the_exact_value() {
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let (w, mut trainer) = probe(strategy, &rank, &["w"])?;
            let mut step = |planned: usize, grads: &[f64]| -> Result<()> {
                let mut window = trainer.accumulate(planned)?;
                grads
                    .iter()
                    .try_for_each(|g| window.backward(&(&w[0] * *g)?))?;
                window.finish()?;
                assert_eq!(trainer.step()?.num_micro_batches, grads.len());
                Ok(())
            };
            step(2, [[1.0, 3.0], [5.0, 7.0]][rank.rank()].as_slice())?;
            assert_eq!(values(&w[0]), [0.0]);
            for epoch in 1..=2 {
                step(4, &[1.0, 2.0, 3.0, 4.0])?;
                step(4, &[5.0, 6.0])?;
                assert_eq!(values(&w[0]), [-2.0 * epoch as f32]);
            }
            Ok(())
        });
    }
}

#[test]
fn c20_accumulation_in_16_bits() {
    for strategy in STRATEGIES {
        for accum in [GradAccumDType::F32, GradAccumDType::Parameter] {
            ranks(2, move |rank| {
                let store = ParamStore::new(rank.device());
                let w = constant(&store, DType::BF16, 1, 4.0)?;
                let sgd = Sgd::new(1.0);
                let mut trainer = AnyTrainer::with_settings(strategy, store, &rank, sgd, |e| {
                    e.grad_accum_dtype = accum;
                })?;
                let mut window = trainer.accumulate(2)?;
                for g in [[1.0, 3.0], [5.0, 7.0]][rank.rank()] {
                    window.backward(&slope(&w, g)?)?;
                }
                window.finish()?;
                trainer.step()?;
                assert_eq!(widened(&w), [0.0], "{strategy:?} {accum:?}");
                Ok(())
            });
        }
    }
}

#[test]
fn parameters_of_different_micro_batches_meet_in_one_step() {
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let (w, mut trainer) = probe(strategy, &rank, &["p", "q", "r"])?;
            let nothing = Tensor::new(0f32, rank.device())?;
            let mut window = trainer.accumulate(3)?;
            window.backward(&if rank.rank() == 0 {
                (&w[1] * 8.0)?
            } else {
                nothing.clone()
            })?;
            window.backward(&if rank.rank() == 1 {
                (&w[0] * 16.0)?
            } else {
                nothing
            })?;
            // Ended early: two micro-batches on two ranks.
            window.finish()?;
            assert_eq!(trainer.step()?.unused, ["r"]);
            assert_eq!([&w[0], &w[1], &w[2]].map(values), [[0.0], [0.5], [1.0]]);
            Ok(())
        });
    }
}

#[test]
fn c27_clipping_by_the_norm_over_all_shards() {
    for strategy in STRATEGIES {
        for world_size in [2, 3, 4] {
            ranks(world_size, move |rank| {
                let (w, mut trainer) = probe(strategy, &rank, &["p", "q"])?;
                let off = rank.rank() as f64 - (world_size - 1) as f64 / 2.0;
                trainer.backward(&((&w[0] * (3.0 + off))? + (&w[1] * (4.0 - off))?)?)?;
                assert_eq!(trainer.clip_grad_norm(1.0)?, 5.0);
                assert_eq!(trainer.step()?.grad_norm, Some(5.0));
                for (w, expected) in w.iter().zip([0.85, 0.80]) {
                    assert!((values(w)[0] - expected).abs() < 1e-5, "{w}");
                }
                Ok(())
            });
        }
    }
}

#[test]
fn c31_awkward_shapes_at_every_world_size() {
    const SHAPES: [&[usize]; 5] = [&[3, 5], &[7], &[1], &[11, 3], &[1]];
    let run = |strategy: Sharding, world_size: usize, cap: usize| {
        same_on_all(ranks(world_size, move |rank| {
            let store = ParamStore::new(rank.device()).with_seed(5);
            let vb = store.var_builder(DType::F32);
            let init = candle_nn::Init::Uniform { lo: -1.0, up: 1.0 };
            let w: Vec<Tensor> = SHAPES
                .iter()
                .enumerate()
                .map(|(i, shape)| vb.get_with_hints(*shape, &format!("w{i}"), init))
                .collect::<candle_core::Result<_>>()?;
            assert_eq!(store.num_trained(), 57);
            let mut trainer =
                AnyTrainer::new(strategy, store, &rank, AdamW::with_lr(0.1), caps(cap))?;
            let mut norms = Vec::new();
            // The third step shows the moments of the first two.
            for step in 0..3 {
                let mut loss = Tensor::new(0f32, rank.device())?;
                for w in &w {
                    let g = Tensor::arange(0u32, w.elem_count() as u32, rank.device())?
                        .to_dtype(DType::F32)?;
                    let g = (g + (step + 1) as f64)?.reshape(w.shape())?;
                    loss = (loss + (w * g)?.sum_all()?)?;
                }
                trainer.backward(&loss)?;
                norms.push(trainer.clip_grad_norm(1.0)?.to_bits());
                trainer.step()?;
            }
            Ok((norms, w.iter().map(values).collect::<Vec<_>>()))
        }))
    };
    let single = run(Sharding::Ddp, 1, 1 << 20);
    for world_size in [1, 2, 3, 4, 5, 8] {
        for strategy in STRATEGIES {
            for cap in [16, 1 << 20] {
                let got = run(strategy, world_size, cap);
                assert!(
                    got == single,
                    "{strategy:?} on {world_size} ranks, cap {cap}"
                );
            }
        }
    }
}

/// Trains `p` in every step and `q` in the steps with `q_used`; returns the values of `q` after each step. Weight decay,
/// momentum and step count must not see the steps in between.
fn train_with_pauses<O: Optimizer + Sync>(
    strategy: Sharding,
    optimizer: O,
    q_used: &'static [bool],
) -> Vec<Vec<f32>> {
    same_on_all(ranks(3, move |rank| {
        let store = ParamStore::new(rank.device());
        let (p, q) = (ones(&store, 4, "p")?, ones(&store, 5, "q")?);
        let mut trainer =
            AnyTrainer::new(strategy, store, &rank, optimizer.clone(), caps(1 << 20))?;
        let mut uses = 0.0;
        let mut trace = Vec::new();
        for used in q_used {
            let mut loss = p.sqr()?.sum_all()?;
            // Only rank 1 has it, and its gradient depends on how often it was used so far.
            if *used && rank.rank() == 1 {
                loss = (loss + (q.sum_all()? * (4.0 - uses))?)?;
            }
            uses += f64::from(u8::from(*used));
            trainer.backward(&loss)?;
            let report = trainer.step()?;
            assert_eq!(report.unused.is_empty(), *used, "{report:?}");
            trace.push(values(&q));
        }
        Ok(trace)
    }))
}

#[test]
fn an_unused_parameter_keeps_its_value_moments_and_step_count() {
    const PAUSES: [bool; 8] = [true, true, false, false, false, true, false, true];
    const NONE: [bool; 4] = [true; 4];
    fn check<O: Optimizer + Sync>(strategy: Sharding, optimizer: O) {
        let with = train_with_pauses(strategy, optimizer.clone(), &PAUSES);
        let without = train_with_pauses(strategy, optimizer, &NONE);
        for i in [2, 3, 4, 6] {
            assert_eq!(with[i], with[i - 1], "step {i}");
        }
        assert_eq!(
            [0, 1, 5, 7].map(|i| &with[i]),
            [0, 1, 2, 3].map(|i| &without[i])
        );
        assert_ne!(without[2], without[3]);
    }
    for strategy in STRATEGIES {
        check(
            strategy,
            AdamW {
                weight_decay: 0.1,
                ..AdamW::with_lr(0.05)
            },
        );
        check(
            strategy,
            Sgd {
                momentum: 0.9,
                weight_decay: 0.1,
                ..Sgd::new(0.05)
            },
        );
    }
}

#[test]
fn misuse_is_the_same_error_in_all_strategies() {
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let (w, mut trainer) = probe(strategy, &rank, &["w"])?;
            let misuse = |r: Result<()>| assert!(matches!(r, Err(Error::Misuse { .. })), "{r:?}");
            misuse(trainer.step().map(drop));
            misuse(trainer.clip_grad_norm(1.0).map(drop));
            trainer.backward(&w[0])?;
            misuse(trainer.backward(&w[0]));
            trainer.zero_grad()?;
            let mut window = trainer.accumulate(3)?;
            window.backward(&(&w[0] * 100.0)?)?;
            drop(window);
            misuse(trainer.step().map(drop));
            trainer.zero_grad()?;
            trainer.backward(&w[0])?;
            assert_eq!(trainer.step()?.step, 1);
            assert_eq!(values(&w[0]), [0.75]);
            Ok(())
        });
    }
}

#[test]
fn parameter_groups_hold_across_shard_boundaries() {
    use dp_core::ParamGroups;
    for strategy in STRATEGIES {
        for world_size in [1, 2, 3, 4] {
            ranks(world_size, move |rank| {
                let store = ParamStore::new(rank.device());
                // One bucket of 12 elements; rank boundaries cut through both parameters.
                let (slow, fast) = (ones(&store, 5, "slow")?, ones(&store, 7, "fast")?);
                let groups = ParamGroups::new(Sgd::new(0.25)).with_group(
                    "fast",
                    |n| n == "fast",
                    Sgd::new(1.0),
                );
                let mut trainer = AnyTrainer::new(strategy, store, &rank, groups, caps(1 << 20))?;
                trainer.backward(&(slow.sum_all()? + fast.sum_all()?)?)?;
                assert_eq!(*trainer.step()?.learning_rates, [0.25, 1.0]);
                assert_eq!(
                    (values(&slow), values(&fast)),
                    (vec![0.75; 5], vec![0.0; 7])
                );
                trainer.param_groups_mut()[1].optimizer.lr = 0.5;
                trainer.backward(&(slow.sum_all()? + fast.sum_all()?)?)?;
                trainer.step()?;
                assert_eq!(
                    (values(&slow), values(&fast)),
                    (vec![0.5; 5], vec![-0.5; 7])
                );
                Ok(())
            });
        }
    }
}
