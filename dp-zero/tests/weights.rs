use candle_core::Tensor;
use dp_core::{Error, Loss, ParamStore, Rank, Result, Sgd, SkipReason, Trainer, max_over_ranks};
use dp_zero::Sharding;

use crate::support::{AnyTrainer, STRATEGIES, caps, ones, ranks, values};

fn probe(strategy: Sharding, rank: &Rank) -> Result<(Tensor, AnyTrainer<Sgd>)> {
    let store = ParamStore::new(rank.device());
    let w = ones(&store, (), "w")?;
    let trainer = AnyTrainer::new(strategy, store, rank, Sgd::new(0.25), caps(100))?;
    Ok((w, trainer))
}

/// For each strategy, one step on two ranks with these losses `(gradient, count)`; the new weight.
fn one_step(mean: bool, parts: [(f64, usize); 2], expected: f32) {
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let (w, mut trainer) = probe(strategy, &rank)?;
            let (gradient, count) = parts[rank.rank()];
            let loss = &(&w * gradient)?;
            trainer.backward_weighted(match mean {
                true => Loss::Mean { loss, count },
                false => Loss::Sum { loss, count },
            })?;
            let report = trainer.step()?;
            assert_eq!(values(&w), [expected], "{strategy:?}");
            assert_eq!(report.weight, (parts[0].1 + parts[1].1) as f64);
            Ok(())
        });
    }
}

#[test]
fn c22_tokens_weigh_the_same_wherever_they_are() {
    // 12 over 4 tokens; a mean of means would give 1 - (8 + 4/3) / 8.
    one_step(false, [(8.0, 1), (4.0, 3)], 0.25);
    // Means 8 of one token, 2 of three: (8 + 6) / 4.
    one_step(true, [(8.0, 1), (2.0, 3)], 1.0 - 0.25 * 3.5);
}

#[test]
fn c22_a_rank_without_tokens_does_not_matter() {
    one_step(false, [(8.0, 4), (0.0, 0)], 0.5);
    // The mean over no tokens is NaN.
    one_step(true, [(f64::NAN, 0), (2.0, 3)], 0.5);
}

#[test]
fn c22_no_tokens_anywhere_skips_the_step() {
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let (w, mut trainer) = probe(strategy, &rank)?;
            let loss = &(&w * f64::NAN)?;
            trainer.backward_weighted(Loss::Mean { loss, count: 0 })?;
            let report = trainer.step()?;
            assert_eq!(report.skipped, Some(SkipReason::NoSamples));
            assert_eq!((report.step, trainer.num_steps()), (0, 0));
            assert_eq!(values(&w), [1.0]);
            trainer.backward(&(&w * 2.0)?)?;
            assert_eq!(trainer.step()?.step, 1);
            assert_eq!(values(&w), [0.5]);
            Ok(())
        });
    }
}

/// C25: rank 0 has three batches, rank 1 has `fewer`. All take three steps and end alike.
#[test]
fn c25_ranks_with_fewer_batches_join_to_the_end() {
    for strategy in STRATEGIES {
        for fewer in [2, 0] {
            ranks(2, move |rank| {
                let (w, mut trainer) = probe(strategy, &rank)?;
                let mine = [3, fewer][rank.rank()];
                let steps = max_over_ranks(rank.comm().as_ref(), mine)?;
                let mut expected = 1.0;
                for step in 0..steps {
                    // Rank 0: gradient 1 of 1 sample; rank 1: gradient 3 of 3 samples.
                    let (gradient, count) = [(1.0, 1), (3.0, 3)][rank.rank()];
                    if step < mine {
                        let loss = &(&w * gradient)?;
                        trainer.backward_weighted(Loss::Mean { loss, count })?;
                    } else {
                        trainer.backward_weighted(Loss::Nothing)?;
                    }
                    trainer.step()?;
                    expected -= 0.25 * if step < fewer { 2.5 } else { 1.0 };
                }
                assert_eq!(trainer.num_steps(), 3);
                assert_eq!(values(&w), [expected], "{strategy:?}");
                Ok(())
            });
        }
    }
}

#[test]
fn micro_batches_of_different_sizes_are_weighed() {
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let (w, mut trainer) = probe(strategy, &rank)?;
            // Sums 1, 3 (rank 0) and 5, 7 (rank 1) over 1, 2, 2, 3 samples.
            let parts = [[(1.0, 1), (3.0, 2)], [(5.0, 2), (7.0, 3)]][rank.rank()];
            let mut window = trainer.accumulate(2)?;
            for (sum, count) in parts {
                let loss = &(&w * sum)?;
                window.backward_weighted(Loss::Sum { loss, count })?;
            }
            window.finish()?;
            assert_eq!(trainer.step()?.weight, 8.0);
            assert_eq!(values(&w), [1.0 - 0.25 * 16.0 / 8.0], "{strategy:?}");
            Ok(())
        });
    }
}

#[test]
fn kinds_of_weights_cannot_be_mixed() {
    for strategy in STRATEGIES {
        ranks(2, move |rank| {
            let (w, mut trainer) = probe(strategy, &rank)?;
            if rank.rank() == 0 {
                trainer.backward(&w)?;
            } else {
                trainer.backward_weighted(Loss::Sum { loss: &w, count: 5 })?;
            }
            let error = trainer.step().expect_err("a mixture");
            assert!(matches!(error, Error::Misuse { .. }), "{error}");
            assert_eq!(values(&w), [1.0]);
            Ok(())
        });
    }
}
