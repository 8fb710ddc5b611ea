//! A VarMap and a candle_nn optimizer, made data parallel with two lines.

mod task;

use candle_core::{DType, Result};
use candle_nn::loss::mse;
use candle_nn::{AdamW, Module, Optimizer, VarBuilder, VarMap};
use dp_core::{DistributedSampler, VarMapSync, World};
use task::{NUM_SAMPLES, build_model, load};

fn main() -> Result<()> {
    let replicas = train(4)?;
    for name in replicas[0].keys() {
        for other in &replicas[1..] {
            assert_eq!(
                replicas[0][name], other[name],
                "{name} is the same on all ranks"
            );
        }
    }
    println!("{} variables, the same on all ranks", replicas[0].len());
    Ok(())
}

// ANCHOR: loop
fn train(world_size: usize) -> Result<Vec<Values>> {
    World::threads(world_size)?.map(|rank| {
        let varmap = VarMap::new(); // one per rank
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, rank.device());
        let model = build_model(vb)?;
        let ddp = VarMapSync::new(&varmap, rank.comm())?; // first line
        let mut optimizer = AdamW::new_lr(varmap.all_vars(), 1e-2)?;

        let sampler = DistributedSampler::new(NUM_SAMPLES, rank.world_size(), rank.rank())?;
        for indices in sampler.indices(0).chunks(8) {
            let (x, y) = load(indices, rank.device())?;
            let loss = mse(&model.forward(&x)?, &y)?;
            let mut grads = loss.backward()?;
            ddp.all_reduce(&mut grads)?; // second line
            optimizer.step(&grads)?;
        }
        values(&varmap)
    })
}
// ANCHOR_END: loop

type Values = std::collections::BTreeMap<String, Vec<f32>>;

fn values(varmap: &VarMap) -> Result<Values> {
    let vars = varmap
        .data()
        .lock()
        .expect("no rank panicked with the lock");
    vars.iter()
        .map(|(name, var)| Ok((name.clone(), var.flatten_all()?.to_vec1()?)))
        .collect()
}
