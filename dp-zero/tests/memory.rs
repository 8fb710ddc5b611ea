use std::sync::{Arc, Mutex};

use candle_core::{DType, Tensor};
use dp_core::memory::LedgerSnapshot;
use dp_core::{AdamW, Optimizer, ParamStore, Rank, Result, Sgd, Trainer};
use dp_zero::{BytesPerElement, ModelStates, Sharding, bytes_sent_per_step};

use crate::support::{AnyTrainer, Oddities, Probe, STRATEGIES, caps, noise, ones, ranks};

/// Predicted against counted, in each category, at rest.
fn check_counted<O: Optimizer>(
    strategy: Sharding,
    rank: &Rank,
    optimizer: O,
    cap: usize,
) -> Result<()> {
    let store = Oddities::store();
    let model = Oddities::new(store.var_builder(DType::F32))?;
    let num_states = optimizer.state_names().len();
    let mut trainer = AnyTrainer::new(strategy, store, rank, optimizer, caps(cap))?;
    let params = trainer.store().params();
    let predicted = ModelStates::of_layout(trainer.layout(), &params, strategy, num_states);
    let predicted = predicted.expect("a strategy with a trainer");
    for step in 0..2 {
        let now = trainer.ledger().current();
        let counted = ModelStates {
            parameters: now.parameters,
            gradients: now.gradients,
            optimizer: now.optimizer,
        };
        assert_eq!(
            counted,
            predicted,
            "{strategy:?}, {} ranks, cap {cap}",
            rank.world_size()
        );
        assert_eq!(now.model_states(), predicted.total());
        let transient = match strategy {
            Sharding::Zero2 => 2 * 4 * trainer.layout().max_padded_len() as u64,
            _ => 0,
        };
        assert!(now.communication <= transient, "{now:?}");
        trainer.backward(&model.loss(&noise(step, (2, 5)))?)?;
        trainer.step()?;
    }
    Ok(())
}

#[test]
fn counted_bytes_are_the_predicted_bytes() {
    for strategy in STRATEGIES {
        for world_size in [1, 2, 3, 4, 8] {
            ranks(world_size, move |rank| {
                for cap in [1, 50, 1 << 20] {
                    check_counted(strategy, &rank, AdamW::default(), cap)?;
                    check_counted(
                        strategy,
                        &rank,
                        Sgd {
                            momentum: 0.9,
                            ..Sgd::new(0.1)
                        },
                        cap,
                    )?;
                    check_counted(strategy, &rank, Sgd::new(0.1), cap)?;
                }
                Ok(())
            });
        }
    }
}

#[test]
fn sharding_divides_by_the_world_size() {
    let at_rest = |strategy: Sharding, world_size: usize| {
        ranks(world_size, move |rank| {
            let store = ParamStore::new(rank.device());
            ones(&store, (40, 100), "w")?;
            let trainer = AnyTrainer::new(strategy, store, &rank, AdamW::default(), caps(1 << 20))?;
            Ok(trainer.ledger().current())
        })
    };
    for (strategy, bytes) in STRATEGIES.into_iter().zip([16, 10, 7]) {
        for now in at_rest(strategy, 4) {
            assert_eq!(now.model_states(), bytes * 4000, "{strategy:?}");
        }
        assert_eq!(at_rest(strategy, 1)[0].model_states(), 16 * 4000);
    }
}

const LAYERS: usize = 8;
const LEN: usize = 1001;

/// `LAYERS` parameters of `LEN` elements, multiplied up; `probe` runs in backward between all of them.
fn tower<P>(store: &ParamStore, probe: P) -> Result<impl Fn() -> Result<Tensor> + use<P>>
where
    P: Fn() + Send + Sync + Clone + 'static,
{
    let layers = (0..LAYERS)
        .map(|i| ones(store, LEN, &format!("layer{i}")))
        .collect::<Result<Vec<_>>>()?;
    Ok(move || {
        let mut h = Tensor::ones(LEN, DType::F32, &candle_core::Device::Cpu)?;
        for layer in &layers {
            let probe = probe.clone();
            let probe = Probe(move || {
                probe();
                Ok(())
            });
            h = (h.apply_op1(probe)? * layer)?;
        }
        Ok(h.sum_all()?)
    })
}

#[test]
fn stage_2_never_holds_more_than_two_buckets_and_the_shards() {
    // Also with a head that nothing uses: its bucket comes first, and must not hold up the others.
    for (world_size, unused_head) in [
        (1, false),
        (2, false),
        (3, false),
        (4, false),
        (2, true),
        (3, true),
    ] {
        for micro_batches in [1, 3] {
            ranks(world_size, move |rank| {
                let store = ParamStore::new(rank.device());
                let ledger = store.ledger().clone();
                let seen: Arc<Mutex<Vec<LedgerSnapshot>>> = Arc::default();
                let loss = {
                    let (seen, ledger) = (Arc::clone(&seen), ledger.clone());
                    tower(&store, move || {
                        seen.lock().expect("not poisoned").push(ledger.current())
                    })?
                };
                if unused_head {
                    ones(&store, LEN, "unused_head")?;
                }
                let mut trainer =
                    AnyTrainer::new(Sharding::Zero2, store, &rank, AdamW::default(), caps(LEN))?;
                let layout = trainer.layout().clone();
                assert_eq!(layout.buckets().len(), LAYERS + usize::from(unused_head));
                let two_buckets = 2 * 4 * layout.max_padded_len() as u64;
                let shards = 4 * (layout.padded_len() / world_size) as u64;
                ledger.reset_peak();
                for _ in 0..2 {
                    let mut window = trainer.accumulate(micro_batches)?;
                    (0..micro_batches).try_for_each(|_| window.backward(&loss()?))?;
                    window.finish()?;
                    trainer.clip_grad_norm(1.0)?;
                    trainer.step()?;
                }
                let seen = seen.lock().expect("not poisoned");
                // The input of the first layer needs no gradient, so its probe does not run.
                assert_eq!(seen.len(), 2 * micro_batches * (LAYERS - 1));
                for now in seen.iter() {
                    assert_eq!(now.gradients, shards);
                    assert!(
                        now.communication <= two_buckets,
                        "{now:?}, two buckets are {two_buckets}"
                    );
                }
                let peak = ledger.peak();
                assert_eq!(peak.gradients, shards);
                assert!(peak.communication <= two_buckets, "{peak:?}");
                // A bound that means something: all full gradients would be four times as much.
                assert!(4 * two_buckets <= 4 * layout.padded_len() as u64);
                Ok(())
            });
        }
    }
}

#[test]
fn bytes_sent_in_a_step_are_the_predicted_bytes() {
    for strategy in STRATEGIES {
        for world_size in [1, 2, 3, 4, 8] {
            ranks(world_size, move |rank| {
                let store = Oddities::store();
                let model = Oddities::new(store.var_builder(DType::F32))?;
                let num_named = store.params().len();
                let mut trainer =
                    AnyTrainer::new(strategy, store, &rank, AdamW::default(), caps(50))?;
                for step in 0..2 {
                    let before = rank.comm().traffic();
                    trainer.backward(&model.loss(&noise(step, (2, 5)))?)?;
                    trainer.step()?;
                    let after = rank.comm().traffic();
                    let sent = after.bytes_sent() - before.bytes_sent();
                    assert_eq!(
                        sent,
                        bytes_sent_per_step(
                            trainer.layout(),
                            strategy,
                            None,
                            num_named,
                            rank.rank()
                        )
                    );

                    let (n, s) = (world_size as u64, 4 * trainer.layout().padded_len() as u64);
                    let buckets = trainer.layout().buckets().len() as u64;
                    let scattered =
                        after.reduce_scatter.bytes_sent - before.reduce_scatter.bytes_sent;
                    let gathered = after.all_gather.bytes_sent - before.all_gather.bytes_sent;
                    let reduced = after.all_reduce.calls - before.all_reduce.calls;
                    if strategy == Sharding::Ddp {
                        assert_eq!((scattered, gathered, reduced), (0, 0, buckets + 1));
                    } else {
                        // No gradient is all-reduced: the one call is the summary of the step.
                        assert_eq!((scattered, gathered), ((n - 1) * s / n, (n - 1) * s / n));
                        assert_eq!(reduced, 1);
                        let calls = after.reduce_scatter.calls - before.reduce_scatter.calls;
                        assert_eq!(calls, buckets);
                    }
                    assert_eq!(after.broadcast, before.broadcast);
                }
                Ok(())
            });
        }
    }
}

#[test]
fn the_estimator_gives_the_papers_table() {
    let per_param = |n: u64, ranks: u64, bytes| {
        Sharding::ALL.map(|s| ModelStates::estimate(n, ranks, s, bytes).total() as f64 / n as f64)
    };
    let f32 = BytesPerElement::f32(2);
    assert_eq!(per_param(4000, 4, f32), [16.0, 10.0, 7.0, 4.0]);
    assert_eq!(per_param(6400, 64, f32), [16.0, 8.125, 4.1875, 0.25]);
    assert_eq!(per_param(4000, 1, f32), [16.0; 4]);
    assert_eq!(
        per_param(4000, 4, BytesPerElement::MIXED_ADAM),
        [16.0, 7.0, 5.5, 4.0]
    );
    // Rounded up: nobody holds less than its share.
    let odd = ModelStates::estimate(10, 4, Sharding::Zero2, f32);
    assert_eq!(
        (odd.parameters, odd.gradients, odd.optimizer, odd.total()),
        (40, 12, 24, 76)
    );
    let names = Sharding::ALL.map(Sharding::name);
    assert_eq!(names, ["ddp", "zero1", "zero2", "zero3"]);
}

#[test]
fn a_layout_of_divisible_parameters_is_the_estimate() {
    ranks(4, |rank| {
        let store = ParamStore::new(rank.device());
        ones(&store, (10, 40), "a")?;
        ones(&store, 80, "b")?;
        let trainer = AnyTrainer::new(Sharding::Zero1, store, &rank, AdamW::default(), caps(100))?;
        let params = trainer.store().params();
        for sharding in STRATEGIES {
            let exact = ModelStates::of_layout(trainer.layout(), &params, sharding, 2);
            assert_eq!(
                exact,
                Some(ModelStates::estimate(
                    480,
                    4,
                    sharding,
                    BytesPerElement::f32(2)
                ))
            );
        }
        assert_eq!(
            ModelStates::of_layout(trainer.layout(), &params, Sharding::Zero3, 2),
            None
        );
        Ok(())
    });
}
