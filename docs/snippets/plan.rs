//! Plans a model before there is one, and checks the plan against the trainer.

use candle_core::{DType, Device};
use dp_core::{AdamW, EngineConfig, ParamShapes, ParamStore, Result, World};
use dp_models::{Gpt, GptConfig};
use dp_zero::{Sharding, TrainerPlan};

fn main() -> Result<()> {
    let plan = plan()?;
    World::threads(plan.world_size)?.run(move |rank| {
        let store = ParamStore::new(&Device::Cpu);
        Gpt::new(&GptConfig::mini(), store.var_builder(DType::BF16))?;
        let config = EngineConfig::default();
        let (sharding, adamw) = (plan.sharding, AdamW::default());
        let trainer = dp_zero::trainer(sharding, store, rank.comm(), adamw, config)?;
        let held = trainer.ledger().current();
        assert_eq!(held.model_states(), plan.states.total());
        assert_eq!(Some(held.communication), plan.communication);
        Ok(())
    })
}

// ANCHOR: plan
fn plan() -> Result<TrainerPlan> {
    // Any model that takes a VarBuilder; nothing of it is allocated.
    let specs = ParamShapes::record(DType::BF16, |vb| Gpt::new(&GptConfig::mini(), vb))?;
    let adamw = 2; // numbers of optimizer state per element
    TrainerPlan::of_specs(&specs, 4, Sharding::Zero2, adamw, &EngineConfig::default())
}
// ANCHOR_END: plan
