use candle_core::{DType, Tensor};
use dp_core::{Error, ParamStore, Rank, Result, Sgd, Trainer};
use dp_zero::Sharding;

use crate::support::{
    AnyTrainer, Probe, STRATEGIES, caps, noise, ones, ranks, same_on_all, values,
};

/// Parameters `w0, w1, ...` of `LEN` elements, a bucket each, multiplied up; `probe(i)` runs in backward before the
/// gradient of `w_i`.
fn chain(
    w: &[Tensor],
    probe: impl Fn(usize) -> candle_core::Result<()> + Send + Sync + Clone + 'static,
) -> Result<Tensor> {
    let mut h = Tensor::ones(LEN, DType::F32, &candle_core::Device::Cpu)?;
    for (i, w) in w.iter().enumerate() {
        let probe = probe.clone();
        h = (h * w)?.apply_op1(Probe(move || probe(i)))?;
    }
    Ok(h.sum_all()?)
}

const LEN: usize = 1001;

fn chain_trainer(strategy: Sharding, rank: &Rank) -> Result<(Vec<Tensor>, AnyTrainer<Sgd>)> {
    let store = ParamStore::new(rank.device());
    let w = (0..6)
        .map(|i| ones(&store, LEN, &format!("w{i}")))
        .collect::<Result<_>>()?;
    let sgd = Sgd {
        momentum: 0.5,
        ..Sgd::new(0.25)
    };
    Ok((w, AnyTrainer::new(strategy, store, rank, sgd, caps(LEN))?))
}

#[test]
fn a_failed_backward_is_forgotten_by_zero_grad() {
    for strategy in STRATEGIES {
        for fails_at in [0, 2, 5] {
            ranks(2, move |rank| {
                let (w, mut trainer) = chain_trainer(strategy, &rank)?;
                let at_rest = trainer.ledger().current();
                for micro_batches in [1, 3] {
                    let mut window = trainer.accumulate(micro_batches)?;
                    for _ in 1..micro_batches {
                        window.backward(&chain(&w, |_| Ok(()))?)?;
                    }
                    let fails = move |i| match i == fails_at {
                        true => Err(candle_core::Error::msg("out of luck")),
                        false => Ok(()),
                    };
                    let error = window
                        .backward(&(chain(&w, fails)? * 100.0)?)
                        .expect_err("a probe fails");
                    assert!(error.to_string().contains("out of luck"), "{error}");
                    assert!(matches!(trainer.step(), Err(Error::Misuse { .. })));
                    trainer.zero_grad()?;
                }
                trainer.backward(&chain(&w, |_| Ok(()))?)?;
                trainer.step()?;
                assert!(w.iter().all(|w| values(w) == vec![0.75; LEN]));
                let now = trainer.ledger().current();
                assert_eq!(now.model_states(), at_rest.model_states());
                assert!(now.communication <= 2 * 4 * trainer.layout().max_padded_len() as u64);
                Ok(())
            });
        }
    }
}

#[test]
fn c10_delays_in_backward_do_not_change_a_bit() {
    let run = |strategy: Sharding, delays: u64| {
        same_on_all(ranks(3, move |rank| {
            let (w, mut trainer) = chain_trainer(strategy, &rank)?;
            let r = rank.rank() as u64;
            for step in 0..10 {
                let late = move |i| {
                    if delays > 0 && (step * 31 + i as u64 * 7 + r * 13 + delays).is_multiple_of(5)
                    {
                        std::thread::sleep(std::time::Duration::from_micros(300 * delays));
                    }
                    Ok(())
                };
                let target = noise(100 * step + r, LEN);
                let loss = (chain(&w, late)? + (&w[2] * target)?.sum_all()?)?;
                trainer.backward(&(loss / 1e3)?)?;
                trainer.step()?;
            }
            trainer.store().sha256()
        }))
    };
    let expected = run(Sharding::Ddp, 0);
    for strategy in STRATEGIES {
        for delays in 0..3 {
            assert_eq!(run(strategy, delays), expected, "{strategy:?}");
        }
    }
}

/// Operands the other way round, and Candle hands out the gradients from the model's input to its output: the opposite of
/// the buckets' order. Stage 2 then needs more than two buckets at a time, but values stay right, and the memory goes
/// back.
#[test]
fn gradients_out_of_bucket_order_change_no_bits() {
    let run = |strategy: Sharding| {
        same_on_all(ranks(3, move |rank| {
            let (w, mut trainer) = chain_trainer(strategy, &rank)?;
            for step in 0..3 {
                let mut h = noise(10 * step + rank.rank() as u64, LEN);
                for w in &w {
                    h = (w * h)?;
                }
                trainer.backward(&h.sum_all()?)?;
                assert!(trainer.clip_grad_norm(0.5)? > 0.5);
                trainer.step()?;
                let two_buckets = 2 * 4 * trainer.layout().max_padded_len() as u64;
                assert!(trainer.ledger().current().communication <= two_buckets);
            }
            trainer.store().sha256()
        }))
    };
    let expected = run(Sharding::Ddp);
    assert_eq!(run(Sharding::Zero1), expected);
    assert_eq!(run(Sharding::Zero2), expected);
}

/// A generator's loss goes through the discriminator: the other trainer's gradients of it are dropped.
#[test]
fn two_trainers_may_share_a_graph() {
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let trainer = |name: &str| -> Result<(Tensor, AnyTrainer<Sgd>)> {
                let store = ParamStore::new(rank.device());
                let w = ones(&store, 3, name)?;
                Ok((
                    w,
                    AnyTrainer::new(strategy, store, &rank, Sgd::new(0.25), caps(LEN))?,
                ))
            };
            let (generator, mut generator_trainer) = trainer("generator")?;
            let (critic, mut critic_trainer) = trainer("critic")?;
            for _ in 0..2 {
                generator_trainer.backward(&(&generator * critic.detach())?.sum_all()?)?;
                generator_trainer.step()?;
            }
            assert_eq!(values(&generator), [0.5; 3]);
            generator_trainer.backward(&(&generator * &critic)?.sum_all()?)?;
            generator_trainer.step()?;
            assert_eq!(
                (values(&generator), values(&critic)),
                (vec![0.25; 3], vec![1.0; 3])
            );
            critic_trainer.backward(&(&generator * &critic)?.sum_all()?)?;
            critic_trainer.step()?;
            assert_eq!(values(&critic), [1.0 - 0.25 * 0.25; 3]);
            // Outside of any trainer's backward it is still a mistake.
            assert!(critic.sum_all()?.backward().is_err());
            Ok(())
        });
    }
}

#[test]
fn a_panic_in_backward_that_is_caught_leaves_no_gradient_behind() {
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let (w, mut trainer) = chain_trainer(strategy, &rank)?;
            let loss = chain(&w, |i| match i {
                2 => panic!("out of luck"),
                _ => Ok(()),
            })?;
            let caught =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| trainer.backward(&loss)));
            assert!(caught.is_err());
            // A stray backward now is a stray backward.
            assert!(w[0].sum_all()?.backward().is_err());
            trainer.zero_grad()?;
            trainer.backward(&chain(&w, |_| Ok(()))?)?;
            trainer.step()?;
            assert!(w.iter().all(|w| values(w) == vec![0.75; LEN]));
            Ok(())
        });
    }
}

#[test]
fn a_loss_from_before_the_last_step_is_refused() {
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let (w, mut trainer) = chain_trainer(strategy, &rank)?;
            let (first, stale) = (chain(&w, |_| Ok(()))?, chain(&w, |_| Ok(()))?);
            trainer.backward(&first)?;
            trainer.step()?;
            let error = trainer.backward(&stale).expect_err("its values are gone");
            assert!(matches!(error, Error::Misuse { .. }), "{error}");
            assert!(
                error.to_string().contains("run the forward again"),
                "{error}"
            );
            // Nothing is spoiled, and losses of one window may all be computed before it.
            let losses = [chain(&w, |_| Ok(()))?, chain(&w, |_| Ok(()))?];
            let mut window = trainer.accumulate(2)?;
            losses.iter().try_for_each(|loss| window.backward(loss))?;
            window.finish()?;
            trainer.step()?;
            Ok(())
        });
    }
}
