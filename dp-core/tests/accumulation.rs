use candle_core::Tensor;
use dp_core::{
    BucketCaps, DdpConfig, DistributedDataParallel, Error, ParamStore, Rank, Result, Sgd, Trainer,
};

use crate::support::{builder, expect_error, ones, ranks, values};

fn probe(rank: &Rank) -> Result<(Tensor, DistributedDataParallel<Sgd>)> {
    let store = ParamStore::new(rank.device());
    let w = ones(&builder(&store), (), "w")?;
    Ok((
        w,
        DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.25))?,
    ))
}

/// One window over micro-batches with these gradients, ended by `finish`.
fn window(
    trainer: &mut DistributedDataParallel<Sgd>,
    w: &Tensor,
    planned: usize,
    grads: &[f64],
) -> Result<()> {
    let mut window = trainer.accumulate(planned)?;
    for (i, g) in grads.iter().enumerate() {
        assert_eq!(window.num_done(), i);
        window.backward(&(w * *g)?)?;
    }
    window.finish()
}

#[test]
fn c20_the_mean_is_over_ranks_and_micro_batches() {
    ranks(2, |rank| {
        let (w, mut trainer) = probe(&rank)?;
        window(
            &mut trainer,
            &w,
            2,
            [[1.0, 3.0], [5.0, 7.0]][rank.rank()].as_slice(),
        )?;
        assert_eq!(trainer.step()?.num_micro_batches, 2);
        assert_eq!(values(&w), [0.0]);
        Ok(())
    });
}

#[test]
fn c23_a_window_that_ends_early_divides_by_what_there_was() {
    for world_size in [1, 2] {
        ranks(world_size, |rank| {
            let (w, mut trainer) = probe(&rank)?;
            for epoch in 1..=2 {
                for grads in [[1.0, 2.0, 3.0, 4.0].as_slice(), &[5.0, 6.0]] {
                    window(&mut trainer, &w, 4, grads)?;
                    assert_eq!(trainer.step()?.num_micro_batches, grads.len());
                }
                assert_eq!(values(&w), [1.0 - 2.0 * epoch as f32]);
            }
            Ok(())
        });
    }
}

#[test]
fn one_micro_batch_is_plain_backward() {
    ranks(2, |rank| {
        let (w, mut trainer) = probe(&rank)?;
        window(&mut trainer, &w, 1, &[3.0])?;
        trainer.step()?;
        trainer.backward(&(&w * 1.0)?)?;
        assert_eq!(trainer.step()?.num_micro_batches, 1);
        assert_eq!(values(&w), [0.0]);
        Ok(())
    });
}

#[test]
fn gradients_travel_once_per_window() {
    ranks(3, |rank| {
        let (w, mut trainer) = probe(&rank)?;
        let calls = || rank.comm().traffic().all_reduce.calls;
        let before = calls();
        let mut window = trainer.accumulate(4)?;
        for _ in 0..3 {
            window.backward(&w)?;
            assert_eq!(calls(), before);
        }
        window.backward(&w)?;
        window.finish()?;
        trainer.step()?;
        // One bucket, and the flags of used parameters.
        assert_eq!(calls(), before + 2);
        Ok(())
    });
}

#[test]
fn parameters_of_different_micro_batches_meet_in_one_step() {
    // q is used by rank 0 in the first micro-batch only, p by rank 1 in the last only; r by nobody.
    ranks(2, |rank| {
        let store = ParamStore::new(rank.device());
        let vb = builder(&store);
        let [p, q, r] = ["p", "q", "r"].map(|n| ones(&vb, (), n).expect("a new name"));
        let config = DdpConfig::default().with_bucket_caps(BucketCaps::new(1)?);
        let mut trainer =
            DistributedDataParallel::with_config(store, rank.comm(), Sgd::new(0.25), config)?;
        let nothing = Tensor::new(0f32, rank.device())?;
        let mut window = trainer.accumulate(2)?;
        window.backward(&if rank.rank() == 0 {
            (&q * 4.0)?
        } else {
            nothing.clone()
        })?;
        window.backward(&if rank.rank() == 1 {
            (&p * 8.0)?
        } else {
            nothing
        })?;
        window.finish()?;
        assert_eq!(trainer.step()?.unused, ["r"]);
        assert_eq!([&p, &q, &r].map(values), [[0.5], [0.75], [1.0]]);
        Ok(())
    });
}

#[test]
fn misuse_of_the_guard() {
    ranks(2, |rank| {
        let (w, mut trainer) = probe(&rank)?;
        let misuse = |e: Error| assert!(matches!(e, Error::Misuse { .. }), "{e}");
        expect_error(trainer.accumulate(0).map(drop), &["num_micro_batches", "0"]);

        let mut window = trainer.accumulate(2)?;
        window.backward(&w)?;
        window.backward(&w)?;
        misuse(expect_error(window.backward(&w), &["all 2 micro-batches"]));
        window.finish()?;
        trainer.step()?;
        assert_eq!(values(&w), [0.75]);

        // Nothing done: nothing to step.
        trainer.accumulate(3)?.finish()?;
        misuse(expect_error(trainer.step(), &["no gradients"]));

        // Dropped half way.
        let mut window = trainer.accumulate(3)?;
        window.backward(&(&w * 100.0)?)?;
        drop(window);
        misuse(expect_error(
            trainer.step(),
            &["dropped after 1 micro-batches", "zero_grad"],
        ));
        misuse(expect_error(trainer.backward(&w), &["dropped after 1"]));
        misuse(expect_error(
            trainer.clip_grad_norm(1.0),
            &["dropped after 1"],
        ));
        misuse(expect_error(
            trainer.accumulate(2).map(drop),
            &["dropped after 1"],
        ));
        trainer.zero_grad()?;
        trainer.backward(&w)?;
        trainer.step()?;
        assert_eq!(values(&w), [0.5]);

        // Dropped when all was done: that is a whole window.
        let mut window = trainer.accumulate(2)?;
        window.backward(&w)?;
        window.backward(&(&w * 3.0)?)?;
        drop(window);
        assert_eq!(trainer.step()?.num_micro_batches, 2);
        assert_eq!(values(&w), [0.0]);
        Ok(())
    });
}
