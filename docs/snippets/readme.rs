//! The code of README.md, which cannot include it: .ci/check-book-sources.py compares the two.

use candle_core::{DType, Result as CandleResult, Tensor};
use candle_nn::{Optimizer, VarBuilder, VarMap};
use dp_core::{AdamW, ParamStore, Rank, Result, Trainer, VarMapSync, World};
use dp_models::{Gpt, GptConfig};
use dp_zero::{ZeroConfig, ZeroOptimizer, ZeroStage};

fn main() -> Result<()> {
    zero(GptConfig::mini())?;
    existing_loop(GptConfig::mini())
}

fn zero(config: GptConfig) -> Result<()> {
    // ANCHOR: zero
    World::threads(4)?.run(|rank| {
        let store = ParamStore::new(rank.device());
        let model = Gpt::new(&config, store.var_builder(DType::F32))?; // any model that takes a VarBuilder
        let zero2 = ZeroConfig::stage(ZeroStage::Two);
        let mut trainer = ZeroOptimizer::new(store, rank.comm(), AdamW::default(), zero2)?;
        for (inputs, targets) in batches_of(&rank)? {
            let loss = model.loss(&inputs, &targets)?;
            trainer.backward(&loss)?; // gradients are reduced while backward runs
            trainer.step()?; // each rank updates its part, and all get the result
        }
        Ok(())
    })
    // ANCHOR_END: zero
}

fn existing_loop(config: GptConfig) -> Result<()> {
    World::threads(4)?.run(|rank| {
        let varmap = VarMap::new();
        let vb = VarBuilder::from_varmap(&varmap, DType::F32, rank.device());
        let model = Gpt::new(&config, vb)?;
        let mut optimizer = candle_nn::AdamW::new_lr(varmap.all_vars(), 1e-3)?;
        // ANCHOR: existing_loop
        let ddp = VarMapSync::new(&varmap, rank.comm())?; // rank 0's values everywhere
        for (inputs, targets) in batches_of(&rank)? {
            let loss = model.loss(&inputs, &targets)?;
            let mut grads = loss.backward()?;
            ddp.all_reduce(&mut grads)?; // mean gradients
            optimizer.step(&grads)?;
        }
        // ANCHOR_END: existing_loop
        Ok(())
    })
}

/// Two batches of token ids `[2, 8]`, others on each rank; the targets are the inputs one token later.
fn batches_of(rank: &Rank) -> CandleResult<Vec<(Tensor, Tensor)>> {
    let batch = |i: u32| {
        let first = 20 * (2 * rank.rank() as u32 + i);
        let tokens = Tensor::arange(first, first + 18, rank.device())?.reshape((2, 9))?;
        let inputs = tokens.narrow(1, 0, 8)?.contiguous()?;
        let targets = tokens.narrow(1, 1, 8)?.contiguous()?;
        Ok((inputs, targets))
    };
    (0..2).map(batch).collect()
}
