//! An operation without backward cuts the graph silently; the trainer names what it cut off.

use candle_core::{DType, Tensor};
use candle_nn::ops::layer_norm_slow;
use candle_nn::{LayerNorm, Linear, Module, layer_norm, linear};
use dp_core::{DistributedDataParallel, ParamStore, Result, Sgd, Trainer, World};

struct Model {
    hidden: Linear,
    norm: LayerNorm,
    out: Linear,
}

fn main() -> Result<()> {
    World::threads(2)?.run(|rank| {
        let store = ParamStore::new(rank.device());
        let vb = store.var_builder(DType::F32);
        let model = Model {
            hidden: linear(4, 4, vb.pp("hidden"))?,
            norm: layer_norm(4, 1e-5, vb.pp("norm"))?,
            out: linear(4, 1, vb.pp("out"))?,
        };
        let mut trainer = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.1))?;
        let x = Tensor::new(&[[1f32, 2.0, 3.0, 5.0]], rank.device())?;
        cut(&mut trainer, &model, &x)?;
        whole(&mut trainer, &model, &x)
    })
}

// ANCHOR: cut
fn cut(trainer: &mut impl Trainer, model: &Model, x: &Tensor) -> Result<()> {
    let h = model.norm.forward(&model.hidden.forward(x)?)?; // no backward here
    trainer.backward(&model.out.forward(&h)?.sum_all()?)?;
    let unused = ["hidden.weight", "hidden.bias", "norm.weight", "norm.bias"];
    assert_eq!(trainer.step()?.unused, unused);
    Ok(())
}
// ANCHOR_END: cut

// ANCHOR: whole
fn whole(trainer: &mut impl Trainer, model: &Model, x: &Tensor) -> Result<()> {
    let (weight, bias) = (model.norm.weight(), model.norm.bias());
    let bias = bias.expect("layer_norm makes one");
    let h = layer_norm_slow(&model.hidden.forward(x)?, weight, bias, 1e-5)?;
    trainer.backward(&model.out.forward(&h)?.sum_all()?)?;
    assert!(trainer.step()?.unused.is_empty());
    Ok(())
}
// ANCHOR_END: whole
