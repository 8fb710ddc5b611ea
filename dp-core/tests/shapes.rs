use candle_core::{DType, Device};
use candle_nn::{BatchNormConfig, Conv2dConfig, LSTMConfig, VarBuilder};
use dp_core::{ParamKind, ParamShapes, ParamSpec, ParamStore, Result};

use crate::support::{builder, expect_error};

/// Layers of candle_nn of several kinds; in two dtypes, with a tied weight.
fn layers(vb: impl Fn(DType) -> VarBuilder<'static>) -> candle_core::Result<()> {
    let (narrow, wide) = (vb(DType::BF16), vb(DType::F32));
    candle_nn::embedding(11, 6, narrow.pp("tokens"))?;
    candle_nn::conv2d(3, 4, 5, Conv2dConfig::default(), narrow.pp("conv"))?;
    candle_nn::batch_norm(4, BatchNormConfig::default(), wide.pp("bn"))?;
    candle_nn::layer_norm(6, 1e-5, wide.pp("norm"))?;
    candle_nn::lstm(6, 5, LSTMConfig::default(), narrow.pp("lstm"))?;
    candle_nn::linear_no_bias(6, 11, narrow.pp("tokens"))?;
    candle_nn::linear(6, 2, wide.pp("frozen.head"))?;
    Ok(())
}

#[test]
fn recorded_parameters_are_those_of_a_store() -> Result<()> {
    let frozen = |name: &str| name.starts_with("frozen");
    let store = ParamStore::new(&Device::Cpu).with_frozen(frozen);
    layers(|dtype| store.var_builder(dtype))?;
    let shapes = ParamShapes::new().with_frozen(frozen);
    layers(|dtype| shapes.var_builder(dtype))?;
    assert_eq!(shapes.specs(), ParamSpec::of_all(&store.params()));

    let kind = |name: &str| {
        shapes
            .specs()
            .iter()
            .find(|s| s.name == name)
            .map(|s| s.kind)
    };
    assert_eq!(kind("bn.running_mean"), Some(ParamKind::Buffer));
    assert_eq!(kind("frozen.head.bias"), Some(ParamKind::Frozen));
    assert_eq!(kind("tokens.weight"), Some(ParamKind::Trained));
    let bytes: u64 = shapes.specs().iter().map(ParamSpec::num_bytes).sum();
    assert_eq!(bytes, store.ledger().current().parameters);
    Ok(())
}

#[test]
fn buffers_go_by_name_here_too() -> Result<()> {
    let shapes = ParamShapes::new().with_buffers(|name| name == "position");
    shapes.var_builder(DType::F32).get(3, "position")?;
    shapes.var_builder(DType::F32).get(3, "running_mean")?;
    let kinds: Vec<ParamKind> = shapes.specs().iter().map(|s| s.kind).collect();
    assert_eq!(kinds, [ParamKind::Buffer, ParamKind::Trained]);
    Ok(())
}

#[test]
fn a_name_has_one_shape_in_store_and_record() {
    let twice = |vb: VarBuilder<'static>| vb.get(3, "w").and_then(|_| vb.get((3, 1), "w"));
    // Candle adds a backtrace where RUST_BACKTRACE is set.
    let first_line = |e: dp_core::Error| e.to_string().lines().next().map(str::to_string);
    let recorded = ParamShapes::record(DType::F32, twice);
    let recorded = first_line(expect_error(recorded, &["`w`", "[3, 1]"]));
    let store = ParamStore::new(&Device::Cpu);
    let stored = twice(builder(&store)).map_err(dp_core::Error::from);
    assert_eq!(recorded, first_line(expect_error(stored, &[])));
}

#[test]
fn what_has_no_shape_cannot_be_recorded() {
    let error = ParamShapes::record(DType::F32, |vb| vb.get_unchecked("w"));
    expect_error(error, &["`w`", "shape"]);
}

/// A fault would be a process that is killed: these are 8 TiB.
#[test]
fn a_model_of_any_size_takes_no_memory() -> Result<()> {
    let specs = ParamShapes::record(DType::F32, |vb| {
        (0..2).try_for_each(|i| candle_nn::linear_no_bias(1 << 20, 1 << 20, vb.pp(i)).map(drop))
    })?;
    assert_eq!(specs.iter().map(ParamSpec::num_bytes).sum::<u64>(), 8 << 40);
    Ok(())
}
