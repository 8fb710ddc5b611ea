use candle_core::DType;
use dp_core::{DistributedDataParallel, ParamStore, Result, Sgd, Trainer, World};

#[test]
fn c05_unused_on_one_rank() -> Result<()> {
    World::threads(2)?.run(|rank| {
        let store = ParamStore::new(rank.device());
        let vb = store.var_builder(DType::F32);
        let p = vb.get_with_hints((), "p", candle_nn::Init::Const(1.0))?;
        let q = vb.get_with_hints((), "q", candle_nn::Init::Const(1.0))?;
        let mut trainer = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.25))?;
        let loss = if rank.rank() == 0 {
            ((&p * 1.0)? + (&q * 4.0)?)?
        } else {
            (&p * 3.0)?
        };
        trainer.backward(&loss)?;
        trainer.step()?;
        assert_eq!(p.to_scalar::<f32>()?, 0.5);
        assert_eq!(q.to_scalar::<f32>()?, 0.5);
        Ok(())
    })
}
