//! A GPT in bf16, in f16, and with islands of f32.

use candle_core::{DType, Tensor};
use candle_nn::{Embedding, Module, VarBuilder};
use dp_core::{
    AdamW, Error, GradAccumDType, LossScaling, ParamStore, Rank, Result, Trainer, World,
};
use dp_models::{ByteTokens, Gpt, GptConfig, LayerNorm, linear};
use dp_zero::{ZeroConfig, ZeroOptimizer, ZeroStage};

fn main() -> Result<()> {
    World::threads(2)?.run(|rank| {
        in_bf16(&rank)?;
        in_f16(&rank)?;
        with_islands(&rank)?;
        in_the_papers_bytes(&rank)?;
        own_changes(&rank)
    })
}

// ANCHOR: bf16
fn in_bf16(rank: &Rank) -> Result<()> {
    let store = ParamStore::new(rank.device());
    let model = Gpt::new(&GptConfig::mini(), store.var_builder(DType::BF16))?; // this is all
    let config = ZeroConfig::stage(ZeroStage::Two);
    let mut trainer = ZeroOptimizer::new(store, rank.comm(), AdamW::default(), config)?;
    let (inputs, targets) = batch(rank)?;
    trainer.backward(&model.loss(&inputs, &targets)?)?;
    trainer.step()?;
    Ok(())
}
// ANCHOR_END: bf16

// ANCHOR: f16
fn in_f16(rank: &Rank) -> Result<()> {
    let store = ParamStore::new(rank.device());
    let model = Gpt::new(&GptConfig::mini(), store.var_builder(DType::F16))?;
    let mut config = ZeroConfig::stage(ZeroStage::Two);
    config.engine.loss_scaling = LossScaling::dynamic();
    let mut trainer = ZeroOptimizer::new(store, rank.comm(), AdamW::default(), config)?;
    let (inputs, targets) = batch(rank)?;
    trainer.backward(&model.loss(&inputs, &targets)?)?; // times 65536
    let report = trainer.step()?; //                       and the gradients over 65536
    if let Some(reason) = &report.skipped {
        println!("scale {:?} was too large: {reason:?}", report.loss_scale);
    }
    Ok(())
}
// ANCHOR_END: f16

// ANCHOR: islands
/// bf16 layers between a f32 norm and a f32 head.
struct Islands {
    table: Embedding,
    norm: LayerNorm,
    head: Tensor,
}

impl Islands {
    fn new(vb: VarBuilder) -> candle_core::Result<Self> {
        let wide = vb.clone().set_dtype(DType::F32);
        Ok(Self {
            table: candle_nn::embedding(256, 16, vb.pp("table"))?,
            norm: LayerNorm::new(16, 1e-5, wide.pp("norm"))?,
            head: wide.get((256, 16), "head")?,
        })
    }

    fn loss(&self, inputs: &Tensor, targets: &Tensor) -> candle_core::Result<Tensor> {
        let x = self.table.forward(inputs)?.to_dtype(DType::F32)?;
        let logits = linear(&self.norm.forward(&x)?, &self.head, None)?;
        dp_models::cross_entropy(&logits, targets)
    }
}
// ANCHOR_END: islands

fn with_islands(rank: &Rank) -> Result<()> {
    let store = ParamStore::new(rank.device());
    let model = Islands::new(store.var_builder(DType::BF16))?;
    let config = ZeroConfig::stage(ZeroStage::One);
    let mut trainer = ZeroOptimizer::new(store, rank.comm(), AdamW::default(), config)?;
    let dtypes: Vec<DType> = trainer.layout().buckets().iter().map(|b| b.dtype).collect();
    assert_eq!(dtypes, [DType::F32, DType::BF16]);
    let (inputs, targets) = batch(rank)?;
    trainer.backward(&model.loss(&inputs, &targets)?)?;
    trainer.step()?;
    Ok(())
}

// ANCHOR: paper
fn in_the_papers_bytes(rank: &Rank) -> Result<()> {
    let store = ParamStore::new(rank.device());
    Gpt::new(&GptConfig::mini(), store.var_builder(DType::BF16))?;
    let num_params = store.num_trained() as f64;
    let mut config = ZeroConfig::stage(ZeroStage::Two);
    config.engine.grad_accum_dtype = GradAccumDType::Parameter;
    let trainer = ZeroOptimizer::new(store, rank.comm(), AdamW::default(), config)?;
    let per_param = trainer.ledger().current().model_states() as f64 / num_params;
    assert!((per_param - (2.0 + 14.0 / 2.0)).abs() < 1e-3); // 2 + 14/N on 2 ranks
    Ok(())
}
// ANCHOR_END: paper

// ANCHOR: altered
fn own_changes(rank: &Rank) -> Result<()> {
    let store = ParamStore::new(rank.device());
    let w = store.var_builder(DType::BF16).get(4, "w")?;
    let config = ZeroConfig::stage(ZeroStage::Two);
    let mut trainer = ZeroOptimizer::new(store, rank.comm(), AdamW::default(), config)?;

    trainer.set_parameter("w", &Tensor::ones(4, DType::F32, rank.device())?)?; // keeps the master

    let param = trainer.store().get("w").expect("it was made above");
    param.write(0..4, &[2.0; 4])?; // does not
    trainer.backward(&w.sum_all()?)?;
    assert!(matches!(trainer.step(), Err(Error::Altered { .. })));
    trainer.refresh_masters()?; // 2.0 is what was meant
    trainer.step()?;
    Ok(())
}
// ANCHOR_END: altered

fn batch(rank: &Rank) -> Result<(Tensor, Tensor)> {
    let text =
        ByteTokens::from_bytes("sixteen bits hold a third of what thirty-two do. ".repeat(4))?;
    Ok(text.batch(&[rank.rank(), 31], 64, rank.device())?)
}
