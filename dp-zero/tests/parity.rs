use candle_core::{DType, Tensor};
use dp_core::{AdamW, Optimizer, Rank, Result, Sgd, Trainer};
use dp_zero::Sharding;

use crate::support::{AnyTrainer, Oddities, STRATEGIES, caps, noise, ranks, same_on_all, values};

const WORLD_SIZES: [usize; 6] = [1, 2, 3, 4, 5, 8];

/// How to train.
#[derive(Debug, Clone, Copy)]
struct Run {
    strategy: Sharding,
    world_size: usize,
    /// Micro-batches per step and rank.
    micro_batches: usize,
    /// Bucket cap in elements.
    cap: usize,
    clip: Option<f64>,
    momentum: bool,
    steps: usize,
}

const RUN: Run = Run {
    strategy: Sharding::Ddp,
    world_size: 1,
    micro_batches: 1,
    cap: 1 << 20,
    clip: None,
    momentum: false,
    steps: 5,
};

/// What a run leaves: the digest of the model, the norms by their bits, the values.
#[derive(Debug, PartialEq)]
struct Outcome {
    sha256: String,
    norms: Vec<u64>,
    values: Vec<(String, Vec<f32>)>,
}

impl Run {
    fn outcome(self) -> Outcome {
        same_on_all(ranks(self.world_size, move |rank| match self.momentum {
            true => self.train(
                &rank,
                Sgd {
                    momentum: 0.9,
                    weight_decay: 0.01,
                    ..Sgd::new(0.02)
                },
            ),
            false => self.train(&rank, AdamW::with_lr(0.01)),
        }))
    }

    /// The joined batch of each step has 120 samples, in equal parts for all ranks and micro-batches.
    fn train<O: Optimizer>(self, rank: &Rank, optimizer: O) -> Result<Outcome> {
        let store = Oddities::store();
        let model = Oddities::new(store.var_builder(DType::F32))?;
        let mut trainer = AnyTrainer::new(self.strategy, store, rank, optimizer, caps(self.cap))?;
        assert_eq!(trainer.strategy_name(), self.strategy.name());
        let mut norms = Vec::new();
        for step in 0..self.steps {
            let batch = noise(step as u64, (120, 5));
            let part = |i: usize| -> Result<Tensor> {
                let parts = self.world_size * self.micro_batches;
                let index = rank.rank() * self.micro_batches + i;
                Ok(batch.narrow(0, index * (120 / parts), 120 / parts)?)
            };
            if self.micro_batches == 1 {
                trainer.backward(&model.loss(&part(0)?)?)?;
            } else {
                let mut window = trainer.accumulate(self.micro_batches)?;
                (0..self.micro_batches)
                    .try_for_each(|i| window.backward(&model.loss(&part(i)?)?))?;
                window.finish()?;
            }
            if let Some(max_norm) = self.clip {
                let norm = trainer.clip_grad_norm(max_norm)?;
                assert!(norm > max_norm, "clipping has work to do: {norm}");
                norms.push(norm.to_bits());
            }
            assert_eq!(trainer.step()?.unused, ["unused"]);
        }
        let params = trainer.store().params();
        let values = params
            .iter()
            .map(|p| (p.name().to_string(), values(p.tensor())));
        Ok(Outcome {
            sha256: trainer.store().sha256()?,
            norms,
            values: values.collect(),
        })
    }
}

#[track_caller]
fn assert_close(a: &Outcome, b: &Outcome, what: &dyn std::fmt::Debug) {
    for ((name, a), (other, b)) in a.values.iter().zip(&b.values) {
        assert_eq!(name, other);
        for (x, y) in a.iter().zip(b) {
            assert!((x - y).abs() <= 1e-6, "{name}: {x} against {y} in {what:?}");
        }
    }
}

/// All strategies and caps against DDP with a bucket per parameter.
fn all_strategies_agree(world_size: usize) {
    for momentum in [false, true] {
        for clip in [None, Some(0.05)] {
            let base = Run {
                world_size,
                momentum,
                clip,
                ..RUN
            };
            let expected = Run { cap: 1, ..base }.outcome();
            for strategy in STRATEGIES {
                for cap in [1, 50, 1 << 20] {
                    let run = Run {
                        strategy,
                        cap,
                        ..base
                    };
                    assert_eq!(run.outcome(), expected, "{run:?}");
                }
            }
        }
    }
}

#[test]
fn strategies_agree_to_the_bit_on_1_2_and_3_ranks() {
    (1..=3).for_each(all_strategies_agree);
}

#[test]
fn strategies_agree_to_the_bit_on_4_ranks() {
    all_strategies_agree(4);
}

#[test]
fn strategies_agree_to_the_bit_on_5_and_8_ranks() {
    all_strategies_agree(5);
    all_strategies_agree(8);
}

#[test]
fn ranks_are_one_rank_on_the_joined_batch() {
    for momentum in [false, true] {
        let expected = Run { momentum, ..RUN }.outcome();
        for strategy in STRATEGIES {
            for world_size in WORLD_SIZES {
                let run = Run {
                    strategy,
                    world_size,
                    momentum,
                    ..RUN
                };
                assert_close(&run.outcome(), &expected, &run);
            }
        }
    }
}

/// The ranks' gradients are added in the order in which one rank adds micro-batches, and divided once; so this holds
/// for every world size, not only for powers of two.
#[test]
fn ranks_are_micro_batches_of_one_rank_to_the_bit() {
    for strategy in STRATEGIES {
        for n in [2, 3, 4, 8] {
            let side_by_side = Run {
                strategy,
                world_size: n,
                ..RUN
            }
            .outcome();
            let one_by_one = Run {
                strategy,
                micro_batches: n,
                ..RUN
            }
            .outcome();
            assert_eq!(side_by_side, one_by_one, "{strategy:?} {n}");
        }
    }
}

#[test]
fn accumulation_agrees_in_all_strategies() {
    let joined = Run {
        clip: Some(0.05),
        ..RUN
    }
    .outcome();
    for world_size in [1, 2, 3, 4] {
        let ddp = Run {
            world_size,
            micro_batches: 5,
            clip: Some(0.05),
            ..RUN
        };
        let expected = ddp.outcome();
        assert_close(&expected, &joined, &ddp);
        for cap in [1, 50] {
            let run = Run {
                strategy: Sharding::Zero1,
                cap,
                ..ddp
            };
            assert_eq!(run.outcome(), expected, "{run:?}");
        }
        // Stage 2 adds (micro-batch, rank) instead of (rank, micro-batch): close, and the same bits for all caps.
        let zero2 = Run {
            strategy: Sharding::Zero2,
            ..ddp
        };
        let outcome = zero2.outcome();
        assert_close(&outcome, &expected, &zero2);
        assert_eq!(Run { cap: 50, ..zero2 }.outcome(), outcome);
    }
}
