use std::sync::Arc;

use candle_core::{DType, Device, Tensor};
use candle_nn::Module;
use dp_core::{
    AdamW, BucketCaps, DdpConfig, DistributedDataParallel, Error, ParamStore, Rank, Result, Sgd,
    Trainer,
};

use crate::support::{builder, expect_error, linear_loss, ones, ranks, values};

/// A trainer over one probe parameter per name, SGD with learning rate 0.25.
pub fn probe(rank: &Rank, names: &[&str]) -> Result<(Vec<Tensor>, DistributedDataParallel<Sgd>)> {
    let store = ParamStore::new(rank.device());
    let vb = builder(&store);
    let params = names
        .iter()
        .map(|n| ones(&vb, (), n))
        .collect::<Result<_>>()?;
    Ok((
        params,
        DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.25))?,
    ))
}

#[test]
fn c04_tied_weights_are_one_parameter() {
    let run = |clip: Option<f64>| {
        ranks(2, move |rank| {
            let store = ParamStore::new(rank.device());
            let (first, second) = (
                ones(&builder(&store), (), "w")?,
                ones(&builder(&store), (), "w")?,
            );
            assert_eq!(store.params().len(), 1);
            let mut trainer = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.25))?;
            let (a, b) = [(1.0, 2.0), (3.0, 4.0)][rank.rank()];
            trainer.backward(&((&first * a)? + (&second * b)?)?)?;
            if let Some(max_norm) = clip {
                assert_eq!(trainer.clip_grad_norm(max_norm)?, 5.0);
            }
            let report = trainer.step()?;
            assert_eq!(report.grad_norm, clip.map(|_| 5.0));
            assert_eq!(values(&first), values(&second));
            Ok(first.to_scalar::<f32>()?)
        })
    };
    assert_eq!(run(None), [-0.25; 2]);
    let clipped = run(Some(1.0));
    assert!(
        (clipped[0] - 0.75).abs() < 1e-6 && clipped[0] == clipped[1],
        "{clipped:?}"
    );
}

#[test]
fn c04_tied_weights_have_one_adamw_state() {
    let store_bytes = ranks(2, |rank| {
        let store = ParamStore::new(rank.device());
        let (w, again) = (
            ones(&builder(&store), (), "w")?,
            ones(&builder(&store), (), "w")?,
        );
        let adamw = AdamW {
            weight_decay: 0.0,
            ..AdamW::with_lr(0.25)
        };
        let mut trainer = DistributedDataParallel::new(store, rank.comm(), adamw)?;
        for _ in 0..3 {
            trainer.backward(&((&w * 3.0)? + (&again * 4.0)?)?)?;
            trainer.step()?;
        }
        // A constant gradient moves AdamW by the learning rate each step; twice that if the update came twice.
        assert!((w.to_scalar::<f32>()? - 0.25).abs() < 1e-5);
        Ok(trainer.ledger().current().optimizer)
    });
    // Two moments of one element, padded to two.
    assert_eq!(store_bytes, [16, 16]);
}

#[test]
fn c05_a_parameter_that_one_rank_does_not_use() {
    ranks(2, |rank| {
        let (w, mut trainer) = probe(&rank, &["p", "q"])?;
        let loss = match rank.rank() {
            0 => ((&w[0] * 1.0)? + (&w[1] * 4.0)?)?,
            _ => (&w[0] * 3.0)?,
        };
        trainer.backward(&loss)?;
        let report = trainer.step()?;
        assert_eq!([&w[0], &w[1]].map(values), [[0.5], [0.5]]);
        assert!(report.unused.is_empty(), "{report:?}");
        Ok(())
    });
}

#[test]
fn a_rank_without_any_gradient_counts_as_zero() {
    ranks(2, |rank| {
        let (w, mut trainer) = probe(&rank, &["p", "q"])?;
        let loss = match rank.rank() {
            0 => Tensor::new(5f32, &Device::Cpu)?,
            _ => (&w[0] * 2.0)?,
        };
        trainer.backward(&loss)?;
        assert_eq!(trainer.clip_grad_norm(100.0)?, 1.0);
        assert_eq!(trainer.step()?.unused, ["q"]);
        assert_eq!([&w[0], &w[1]].map(values), [[0.75], [1.0]]);
        Ok(())
    });
}

/// Ranks may create their parameters in different orders; what is used and what is not goes by name.
#[test]
fn unused_parameters_are_known_by_name_whatever_the_creation_order() {
    let reports = ranks(2, |rank| {
        let names = if rank.rank() == 0 {
            ["p", "q", "r"]
        } else {
            ["r", "p", "q"]
        };
        let (w, mut trainer) = probe(&rank, &names)?;
        let w: Vec<&Tensor> = ["p", "q", "r"]
            .iter()
            .map(|n| &w[names.iter().position(|m| m == n).expect("one of them")])
            .collect();
        // Only rank 0 uses p, only rank 1 uses q, nobody uses r.
        trainer.backward(&(w[rank.rank()] * 4.0)?)?;
        let report = trainer.step()?;
        assert_eq!(
            [values(w[0]), values(w[1]), values(w[2])],
            [[0.5], [0.5], [1.0]]
        );
        Ok(report)
    });
    assert_eq!(reports[0].unused, ["r"]);
    assert_eq!(reports[0], reports[1]);
}

#[test]
fn c19_a_layer_cut_off_the_graph_is_reported_and_left_alone() {
    ranks(2, |rank| {
        let store = ParamStore::new(rank.device()).with_seed(3);
        let vb = builder(&store);
        let a = candle_nn::linear(4, 4, vb.pp("a"))?;
        let norm = candle_nn::rms_norm(4, 1e-5, vb.pp("norm"))?;
        let b = candle_nn::linear(4, 1, vb.pp("b"))?;
        let before = values(a.weight());
        let mut trainer = DistributedDataParallel::new(store, rank.comm(), AdamW::with_lr(0.1))?;
        let x = Tensor::full(1f32 + rank.rank() as f32, (2, 4), rank.device())?;
        for _ in 0..2 {
            let loss = b.forward(&norm.forward(&a.forward(&x)?)?)?.mean_all()?;
            trainer.backward(&loss)?;
            assert_eq!(
                trainer.step()?.unused,
                ["a.weight", "a.bias", "norm.weight"]
            );
        }
        // Not even decayed, unlike the layer that has gradients.
        assert_eq!(values(a.weight()), before);
        assert_ne!(values(b.bias().expect("linear has one")), [0.0]);
        Ok(())
    });
}

#[test]
fn c31_awkward_shapes_at_every_world_size() {
    fn run(world_size: usize) -> Vec<Vec<f32>> {
        let all = ranks(world_size, |rank| {
            let store = ParamStore::new(rank.device()).with_seed(5);
            let vb = builder(&store);
            let shapes: [(&str, &[usize]); 5] = [
                ("a", &[3, 5]),
                ("b", &[7]),
                ("c", &[1]),
                ("d", &[11, 3]),
                ("e", &[1]),
            ];
            let init = candle_nn::Init::Uniform { lo: -1.0, up: 1.0 };
            let w = shapes.map(|(name, shape)| vb.get_with_hints(shape, name, init));
            let w = w.into_iter().collect::<candle_core::Result<Vec<_>>>()?;
            assert_eq!(store.num_trained(), 57);
            let config = DdpConfig::default().with_bucket_caps(BucketCaps::new(64)?);
            let mut trainer = DistributedDataParallel::with_config(
                store,
                rank.comm(),
                AdamW::with_lr(0.1),
                config,
            )?;
            for step in 0..3 {
                let mut loss = Tensor::new(0f32, rank.device())?;
                for w in &w {
                    let n = w.elem_count();
                    let g = Tensor::arange(0u32, n as u32, rank.device())?.to_dtype(DType::F32)?;
                    let g = (g + (step + 1) as f64)?.reshape(w.shape())?;
                    loss = (loss + (w * g)?.sum_all()?)?;
                }
                trainer.backward(&loss)?;
                trainer.step()?;
            }
            Ok(w.iter().map(values).collect::<Vec<_>>())
        });
        assert!(all.iter().all(|w| *w == all[0]));
        all.into_iter().next().expect("at least one rank")
    }
    let single = run(1);
    for world_size in [2, 3, 4, 5, 8] {
        assert!(run(world_size) == single, "{world_size} ranks");
    }
}

#[test]
fn awkward_parameters_get_the_right_values() {
    for world_size in [1, 2, 3, 4] {
        ranks(world_size, move |rank| {
            let store = ParamStore::new(rank.device());
            let vb = builder(&store);
            let scalar = ones(&vb, (), "scalar")?;
            let empty = ones(&vb, (0, 3), "empty")?;
            let small = ones(&vb, 2, "small")?;
            let large = ones(&vb, (10, 10), "large")?;
            let frozen = Tensor::new(2f32, rank.device())?;
            // A cap of 5 elements: `large` has a bucket of its own.
            let config = DdpConfig::default().with_bucket_caps(BucketCaps::new(20)?);
            let mut trainer =
                DistributedDataParallel::with_config(store, rank.comm(), Sgd::new(0.25), config)?;
            let used_empty = Tensor::cat(&[&empty, &large.narrow(1, 0, 3)?], 0)?.sum_all()?;
            let loss = ((&scalar * &frozen)? + linear_loss(&small, 3.0)?)?;
            let loss = ((loss + linear_loss(&large, 4.0)?)? + (used_empty * 0.5)?)?;
            trainer.backward(&loss)?;
            let report = trainer.step()?;
            assert!(report.unused.is_empty(), "{report:?}");
            assert_eq!(values(&scalar), [0.5]);
            assert_eq!(values(&empty), [0f32; 0]);
            assert_eq!(values(&small), [0.25; 2]);
            let row = [[-0.125; 3].to_vec(), [0.0; 7].to_vec()].concat();
            assert_eq!(values(&large), row.repeat(10));
            Ok(())
        });
    }
}

#[test]
fn a_gradient_that_is_not_contiguous_arrives_in_order() {
    ranks(2, |rank| {
        let store = ParamStore::new(rank.device());
        let w = ones(&builder(&store), (2, 3), "w")?;
        let mut trainer = DistributedDataParallel::new(store, rank.comm(), Sgd::new(1.0))?;
        let c = Tensor::new(&[[1f32, 2.0], [3.0, 4.0], [5.0, 6.0]], rank.device())?;
        trainer.backward(&(w.t()? * c)?.sum_all()?)?;
        trainer.step()?;
        assert_eq!(values(&w), [0.0, -2.0, -4.0, -1.0, -3.0, -5.0]);
        Ok(())
    });
}

#[test]
fn calls_out_of_order_are_misuse_and_harm_nothing() {
    ranks(2, |rank| {
        let (w, mut trainer) = probe(&rank, &["w"])?;
        let w = &w[0];
        let misuse = |e: Error| assert!(matches!(e, Error::Misuse { .. }), "{e}");
        misuse(expect_error(trainer.step(), &["step", "no gradients"]));
        trainer.backward(&(w * 1.0)?)?;
        misuse(expect_error(
            trainer.backward(&(w * 9.0)?),
            &["backward", "zero_grad", "accumulate"],
        ));
        misuse(expect_error(
            trainer.accumulate(2).map(drop),
            &["accumulate"],
        ));
        trainer.step()?;
        assert_eq!(values(w), [0.75]);
        misuse(expect_error(trainer.step(), &["no gradients"]));
        // A gradient that is forgotten has no effect.
        trainer.backward(&(w * 9.0)?)?;
        trainer.clip_grad_norm(0.1)?;
        trainer.zero_grad()?;
        trainer.backward(&(w * 1.0)?)?;
        let report = trainer.step()?;
        assert_eq!((report.step, report.grad_norm), (2, None));
        assert_eq!(values(w), [0.5]);
        Ok(())
    });
}

#[test]
fn a_loss_is_one_number() {
    ranks(1, |rank| {
        let store = ParamStore::new(rank.device());
        let w = ones(&builder(&store), 2, "w")?;
        let mut trainer = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.25))?;
        expect_error(trainer.backward(&w), &["loss", "one number", "[2]"]);
        trainer.backward(&w.sum_keepdim(0)?)?;
        trainer.step().map(drop)
    });
}

#[test]
fn a_failed_backward_blocks_the_step_until_zero_grad() {
    use candle_core::{CpuStorage, CustomOp1, Layout, Shape};

    struct Fails;
    impl CustomOp1 for Fails {
        fn name(&self) -> &'static str {
            "fails"
        }
        fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
            Ok((s.clone(), l.shape().clone()))
        }
        fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
            candle_core::bail!("this op always fails")
        }
    }

    ranks(2, |rank| {
        let (w, mut trainer) = probe(&rank, &["p", "q"])?;
        let p = w[0].apply_op1_arc(Arc::new(Box::new(Fails)))?;
        expect_error(
            trainer.backward(&((p * 7.0)? + (&w[1] * 7.0)?)?),
            &["always fails"],
        );
        expect_error(trainer.step(), &["earlier backward failed", "zero_grad"]);
        trainer.zero_grad()?;
        trainer.backward(&((&w[0] * 1.0)? + (&w[1] * 2.0)?)?)?;
        trainer.step()?;
        assert_eq!([&w[0], &w[1]].map(values), [[0.75], [0.5]]);
        Ok(())
    });
}

#[test]
fn learning_rates_may_change_between_steps() {
    // C34 without checkpoints.
    ranks(2, |rank| {
        let (w, mut trainer) = probe(&rank, &["w"])?;
        for (lr, expected) in [(0.25, 0.75), (0.5, 0.25), (0.125, 0.125)] {
            trainer.set_learning_rate(lr);
            trainer.backward(&w[0])?;
            assert_eq!(*trainer.step()?.learning_rates, [lr]);
            assert_eq!(values(&w[0]), [expected]);
        }
        trainer.set_learning_rate(-1.0);
        trainer.backward(&w[0])?;
        expect_error(trainer.step(), &["lr", "-1", "default"]);
        assert_eq!((values(&w[0])[0], trainer.num_steps()), (0.125, 3));
        Ok(())
    });
}
