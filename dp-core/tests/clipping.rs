use candle_core::Tensor;
use dp_core::{BucketCaps, DdpConfig, DistributedDataParallel, ParamStore, Sgd, Trainer};

use crate::ddp::probe;
use crate::optim::{fixture, floats, number};
use crate::support::{builder, expect_error, ones, ranks, values};

#[test]
fn c27_clipping_by_the_global_norm() {
    ranks(2, |rank| {
        let (w, mut trainer) = probe(&rank, &["p", "q"])?;
        let (p, q) = [(2.0, 6.0), (4.0, 2.0)][rank.rank()];
        trainer.backward(&((&w[0] * p)? + (&w[1] * q)?)?)?;
        assert_eq!(trainer.clip_grad_norm(1.0)?, 5.0);
        expect_error(trainer.clip_grad_norm(1.0), &["clip_grad_norm", "already"]);
        assert_eq!(trainer.step()?.grad_norm, Some(5.0));
        for (w, expected) in w.iter().zip([0.85, 0.80]) {
            assert!((values(w)[0] - expected).abs() < 1e-5, "{w}");
        }
        // A norm below the limit changes nothing; the clipping of the last step is over.
        trainer.backward(&(&w[0] * 1.0)?)?;
        assert_eq!(trainer.clip_grad_norm(1.5)?, 1.0);
        let before = values(&w[0])[0];
        trainer.step()?;
        assert_eq!(values(&w[0])[0], before - 0.25);
        trainer.backward(&(&w[0] * 1.0)?)?;
        assert_eq!(trainer.step()?.grad_norm, None);
        assert_eq!(values(&w[0])[0], before - 0.5);
        Ok(())
    });
}

#[test]
fn clipping_needs_gradients_and_a_positive_limit() {
    ranks(1, |rank| {
        let (w, mut trainer) = probe(&rank, &["p"])?;
        expect_error(
            trainer.clip_grad_norm(1.0),
            &["clip_grad_norm", "no gradients"],
        );
        trainer.backward(&w[0])?;
        for max_norm in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            expect_error(trainer.clip_grad_norm(max_norm), &["max_norm"]);
        }
        trainer.step().map(drop)
    });
}

#[test]
fn the_norm_is_the_same_bits_for_all_world_sizes_and_caps() {
    let norm = |world_size: usize, cap: usize| {
        ranks(world_size, move |rank| {
            let store = ParamStore::new(rank.device());
            let sizes = [(7, "a"), (1, "b"), (33, "c"), (0, "d"), (5, "e")];
            let vb = builder(&store);
            let w = sizes.map(|(n, name)| ones(&vb, n, name));
            let config = DdpConfig::default().with_bucket_caps(BucketCaps::new(cap)?);
            let mut trainer =
                DistributedDataParallel::with_config(store, rank.comm(), Sgd::new(0.1), config)?;
            let mut loss = Tensor::new(0f32, rank.device())?;
            for (i, w) in w.into_iter().enumerate() {
                let w = w?;
                // Few bits each, so that the sum over equal ranks is exact.
                let g: Vec<f32> = (0..w.elem_count())
                    .map(|j| (j * 37 + i * 11) as f32 / 64.0 - 3.0)
                    .collect();
                if !g.is_empty() {
                    let g = Tensor::from_vec(g, w.shape(), rank.device())?;
                    loss = (loss + (w * g)?.sum_all()?)?;
                }
            }
            trainer.backward(&loss)?;
            trainer.clip_grad_norm(1.0)
        })
    };
    let expected = norm(1, 1 << 20)[0];
    assert!(expected > 10.0);
    for world_size in [1, 2, 3, 4, 8] {
        for cap in [1, 20, 100, 1 << 20] {
            for n in norm(world_size, cap) {
                assert_eq!(
                    n.to_bits(),
                    expected.to_bits(),
                    "{world_size} ranks, cap {cap}"
                );
            }
        }
    }
}

#[test]
fn clipping_follows_pytorch() {
    let fixture = fixture();
    for case in fixture["clip"].as_array().expect("an array") {
        let (max_norm, total) = (number(case, "max_norm"), number(case, "total"));
        let clipped = floats(&case["clipped"]);
        ranks(1, move |rank| {
            let store = ParamStore::new(rank.device());
            let w = ones(&builder(&store), 4, "w")?;
            let mut trainer = DistributedDataParallel::new(store, rank.comm(), Sgd::new(1.0))?;
            let g = candle_core::Tensor::new(&[1f32, -2.0, 2.0, 4.0], rank.device())?;
            trainer.backward(&(&w * g)?.sum_all()?)?;
            assert_eq!(trainer.clip_grad_norm(max_norm)?, total);
            trainer.step()?;
            for (x, g) in values(&w).iter().zip(&clipped) {
                assert!((1.0 - x - g).abs() <= 1e-6, "{x}, gradient {g}");
            }
            Ok(())
        });
    }
}
