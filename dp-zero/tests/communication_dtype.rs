use candle_core::{DType, Tensor};
use candle_nn::Init;
use dp_core::{EngineConfig, ParamStore, Rank, Result, Sgd, Trainer};
use dp_zero::{Sharding, bytes_sent_per_step};

use crate::support::{AnyTrainer, STRATEGIES, caps, noise, ranks, same_on_all, values};

/// One step of w <- w - g from 0: the parameter is the negative mean gradient.
fn mean_gradient(
    strategy: Sharding,
    rank: &Rank,
    wire: Option<DType>,
    scale: f64,
) -> Result<Vec<f32>> {
    let store = ParamStore::new(rank.device());
    let vb = store.var_builder(DType::F32);
    let a = vb.get_with_hints((13, 7), "a", Init::Const(0.0))?;
    let b = vb.get_with_hints(5, "b", Init::Const(0.0))?;
    let mut config = EngineConfig::default();
    config.bucket_caps = caps(40);
    config.communication_dtype = wire;
    let mut trainer = AnyTrainer::with_settings(strategy, store, rank, Sgd::new(1.0), |engine| {
        *engine = config.clone();
    })?;
    let before = rank.comm().traffic().bytes_sent();
    let loss = |w: &Tensor, seed| (w * (noise(seed, w.shape()) * scale)?)?.sum_all();
    let (seed, other) = (rank.rank() as u64, 100 + rank.rank() as u64);
    trainer.backward(&(loss(&a, seed)? + loss(&b, other)?)?)?;
    trainer.step()?;
    let sent = rank.comm().traffic().bytes_sent() - before;
    let layout = trainer.layout();
    let predicted = bytes_sent_per_step(layout, strategy, &config, 2, rank.rank());
    assert_eq!(sent, predicted, "{strategy:?} {wire:?}");
    Ok([values(&a), values(&b)].concat())
}

/// The bound that `EngineConfig::communication_dtype` states.
#[test]
fn the_error_of_16_bit_traffic_is_within_the_stated_bound() {
    for world_size in [1, 2, 3, 4] {
        for (wire, u, scale) in [
            (DType::BF16, 2f64.powi(-8), 1.0),
            (DType::BF16, 2f64.powi(-8), 1e30),
            (DType::F16, 2f64.powi(-11), 1.0),
        ] {
            let run = |strategy, wire| {
                same_on_all(ranks(world_size, move |rank| {
                    mean_gradient(strategy, &rank, wire, scale)
                }))
            };
            let exact = run(Sharding::Ddp, None);
            let narrow = run(Sharding::Ddp, Some(wire));
            let gradients = (0..world_size as u64)
                .map(|r| [values(&noise(r, (13, 7))), values(&noise(100 + r, 5))].concat());
            let mut mean_of_abs = vec![0f64; exact.len()];
            for g in gradients {
                let shares = g.iter().map(|x| f64::from(x.abs()) * scale);
                let shares = shares.map(|x| x / world_size as f64);
                mean_of_abs
                    .iter_mut()
                    .zip(shares)
                    .for_each(|(m, x)| *m += x);
            }
            let mut differ = 0;
            for ((e, n), m) in exact.iter().zip(&narrow).zip(&mean_of_abs) {
                let error = (f64::from(*e) - f64::from(*n)).abs();
                // To first order; f16 has an absolute floor, its smallest number.
                let bound = u * (m + f64::from(e.abs())) * 1.01 + 2f64.powi(-24);
                assert!(error <= bound, "{wire:?}: {error} > {bound}");
                differ += usize::from(error > 0.0);
            }
            assert!(differ > exact.len() / 2, "it is really sent in 16 bits");
            for strategy in STRATEGIES {
                assert_eq!(run(strategy, Some(wire)), narrow, "{strategy:?}");
            }
        }
    }
}

#[test]
fn dtypes_that_gradients_cannot_travel_in_are_refused() {
    ranks(2, |rank| {
        for dtype in [DType::U8, DType::F64] {
            let store = ParamStore::new(rank.device());
            crate::support::ones(&store, 3, "w")?;
            let made =
                AnyTrainer::with_settings(Sharding::Zero2, store, &rank, Sgd::new(1.0), |engine| {
                    engine.communication_dtype = Some(dtype)
                });
            let message = made.err().map(|e| e.to_string()).unwrap_or_default();
            for part in ["communication_dtype", dtype.as_str(), "bf16"] {
                assert!(message.contains(part), "{message}");
            }
        }
        Ok(())
    });
}
