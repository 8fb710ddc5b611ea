//! Initial values and random numbers on a GPU, whose generator begins at one constant seed in every Candle device.

use candle_core::{DType, Tensor};
use candle_nn::{VarBuilder, VarMap};
use dp_core::{Rank, Result, VarMapSync};

use crate::harness::{Test, gpu_world};
use crate::support::ranks_of;

pub const TESTS: &[Test] = &[
    (
        "random: a VarMap's values are rank 0's (C02)",
        replicas_begin_equal,
    ),
    (
        "random: masks differ between ranks, not between runs (C53)",
        masks,
    ),
];

/// C02, with candle_nn's own initialisation.
fn replicas_begin_equal() {
    let all = ranks_of(gpu_world(3), |rank| {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, rank.device());
        // Other numbers on each rank.
        rank.device().set_seed(rank.seed(1))?;
        let layer = candle_nn::linear(4, 3, vb)?;
        let before = layer.weight().flatten_all()?.to_vec1::<f32>()?;
        let sync = VarMapSync::new(&varmap, rank.comm())?;
        let after = layer.weight().flatten_all()?.to_vec1::<f32>()?;
        let x = Tensor::full(rank.rank() as f32 + 1.0, (2, 4), rank.device())?;
        let loss = candle_nn::Module::forward(&layer, &x)?.sum_all()?;
        let mut grads = loss.backward()?;
        sync.all_reduce(&mut grads)?;
        let grad = grads.get(layer.weight()).expect("it is used");
        Ok((before, after, grad.flatten_all()?.to_vec1::<f32>()?))
    });
    assert_ne!(all[0].0, all[1].0, "seeds differ");
    for (_, after, grad) in &all {
        assert_eq!(*after, all[0].0);
        // 2 samples of the mean of 1, 2 and 3.
        assert_eq!(*grad, [4.0; 12]);
    }
}

fn mask(rank: &Rank, seed: Option<u64>) -> Result<Vec<f32>> {
    if let Some(seed) = seed {
        rank.device().set_seed(rank.seed(seed))?;
    }
    let ones = Tensor::ones(1000, DType::F32, rank.device())?;
    Ok(candle_nn::ops::dropout(&ones, 0.5)?.to_vec1::<f32>()?)
}

fn masks() {
    let mut all = Vec::new();
    for seed in [None, Some(42), Some(43)] {
        let run = || ranks_of(gpu_world(2), move |rank| mask(&rank, seed));
        let first = run();
        assert_eq!(first, run(), "{seed:?}");
        all.extend(first);
    }
    for (i, a) in all.iter().enumerate() {
        for b in &all[..i] {
            let num_alike = a.iter().zip(b).filter(|(a, b)| a == b).count();
            assert!((400..600).contains(&num_alike), "{num_alike} of 1000");
        }
    }
}
