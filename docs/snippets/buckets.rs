//! The bucket that the book's picture shows: four parameters, eleven elements, four ranks.

use candle_core::DType;
use candle_nn::{VarBuilder, linear};
use dp_core::{AdamW, ParamStore, Result, Trainer, World};
use dp_zero::{ZeroConfig, ZeroOptimizer, ZeroStage};

fn main() -> Result<()> {
    World::threads(4)?.run(|rank| {
        let store = ParamStore::new(rank.device());
        create_parameters(store.var_builder(DType::F32))?;
        let config = ZeroConfig::stage(ZeroStage::Two);
        let trainer = ZeroOptimizer::new(store, rank.comm(), AdamW::default(), config)?;
        check_layout(&trainer);
        Ok(())
    })
}

// ANCHOR: layout
fn create_parameters(vb: VarBuilder) -> Result<()> {
    linear(3, 2, vb.pp("hidden"))?; // weight: 6 elements, bias: 2
    linear(2, 1, vb.pp("out"))?; // weight: 2 elements, bias: 1
    Ok(())
}

fn check_layout(trainer: &impl Trainer) {
    let params = trainer.store().params();
    let bucket = &trainer.layout().buckets()[0];
    let expected = [
        ("out.bias", 0..1),
        ("out.weight", 1..3),
        ("hidden.bias", 3..5),
        ("hidden.weight", 5..11),
    ];
    for (slot, (name, range)) in bucket.slots.iter().zip(expected) {
        assert_eq!(params[slot.param_idx].name(), name);
        assert_eq!(slot.range, range);
    }
    assert_eq!(bucket.padded_len, 12);
    assert_eq!(bucket.slice(1, 4), 3..6); // rank 1 of 4
}
// ANCHOR_END: layout
