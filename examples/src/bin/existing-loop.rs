//! A training loop with `VarMap` and `candle_nn::AdamW`, as it is, made data parallel: the lines marked `+`.
//!
//! ```text
//! cargo run --release --bin existing-loop
//! cargo run --release --bin existing-loop -- --ranks 4
//! ```
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{AdamW, Optimizer, VarBuilder, VarMap};
use clap::Parser;
use dp_core::{VarMapSync, World};
use dp_examples::closed_pipe;

#[derive(Parser)]
struct Options {
    /// Number of ranks
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    ranks: u16,
}

const SAMPLES: usize = 240; // a multiple of 1 to 6 ranks
const STEPS: usize = 1500;

fn main() -> Result<()> {
    closed_pipe::end_quietly();
    let ranks = usize::from(Options::parse().ranks);
    let world = World::from_env_or_threads(ranks)?;
    // Those of all ranks, as each rank of this process knows them.
    let mut weights: Vec<Vec<Vec<f32>>> = world.map(|rank| -> Result<_> {
        let varmap = VarMap::new();
        let model = candle_nn::linear(
            3,
            1,
            VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu),
        )?;
        let ddp = VarMapSync::new(&varmap, rank.comm())?; // + same weights everywhere
        let mut optimizer = AdamW::new_lr(varmap.all_vars(), 0.05)?;

        let (x, y) = samples(rank.rank(), rank.world_size())?; // + this rank's part of the data
        for _ in 0..STEPS {
            let loss = (model.forward(&x)? - &y)?.sqr()?.mean_all()?;
            let mut grads = loss.backward()?;
            ddp.all_reduce(&mut grads)?; // + mean gradients over the ranks
            optimizer.step(&grads)?;
        }
        let mine = model.weight().flatten_all()?.to_vec1::<f32>()?;
        Ok(rank.comm().all_gather_object(&mine, "weights")?)
    })?;
    let weights = weights.swap_remove(0);
    if world.is_main_process() {
        println!(
            "weights of rank 0: {:?}, true ones: [1.0, -2.0, 0.5]",
            weights[0]
        );
    }
    let close = |w: &[f32]| {
        w.iter()
            .zip([1.0, -2.0, 0.5])
            .all(|(w, t)| (w - t).abs() < 0.02)
    };
    if !close(&weights[0]) || weights.iter().any(|w| w != &weights[0]) {
        candle_core::bail!("wrong weights, or not the same on all ranks: {weights:?}");
    }
    Ok(())
}

/// Points of the plane `y = x0 - 2 x1 + x2 / 2 + 3`; rank `r` of `n` takes every `n`-th from `r`.
fn samples(rank: usize, world_size: usize) -> Result<(Tensor, Tensor)> {
    let x: Vec<f32> = (rank..SAMPLES)
        .step_by(world_size)
        .flat_map(|i| [0.1, 0.23, 0.37].map(|f| (i as f32 * f).sin()))
        .collect();
    let x = Tensor::from_vec(x.clone(), (x.len() / 3, 3), &Device::Cpu)?;
    let w = Tensor::new(&[[1f32], [-2.0], [0.5]], &Device::Cpu)?;
    let y = (x.matmul(&w)? + 3.0)?;
    Ok((x, y))
}
