//! Each layer: odd shapes, more elements than a block of threads has, and views.

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::{Linear, ModuleT, VarBuilder};
use dp_models::{
    CausalMask, CausalSelfAttention, Dropout, LayerNorm, RmsNorm, Rotary, RotaryPairs, SwiGlu,
    attention, cross_entropy, embed, embedding, gelu_erf, gelu_tanh, linear, silu_gated, softmax,
};

use crate::compare::{check, random};

/// A builder that gives these tensors.
fn builder(named: &[(&str, &Tensor)]) -> VarBuilder<'static> {
    let (dtype, device) = (named[0].1.dtype(), named[0].1.device().clone());
    let tensors = named.iter().map(|(n, t)| (n.to_string(), (*t).clone()));
    VarBuilder::from_tensors(tensors.collect(), dtype, &device)
}

/// Weights of a linear layer, small enough for results near 1.
fn weight(seed: u64, out: usize, width: usize) -> Result<Tensor> {
    random(seed, &[out, width]) * (width as f64).powf(-0.5)
}

#[test]
fn linear_layers() -> Result<()> {
    for (rows, width, out) in [(1, 1, 1), (3, 5, 7), (130, 16, 9)] {
        let inputs = [
            random(1, &[rows, width]),
            weight(2, out, width)?,
            random(3, &[out]),
        ];
        check("linear", &|t| linear(&t[0], &t[1], Some(&t[2])), &inputs)?;
        check(
            "linear, no bias",
            &|t| linear(&t[0], &t[1], None),
            &inputs[..2],
        )?;
    }
    let inputs = [random(1, &[4, 3, 5]), weight(2, 7, 5)?, random(3, &[7])];
    check(
        "linear of a transposed batch",
        &|t| linear(&t[0].transpose(0, 1)?, &t[1], Some(&t[2])),
        &inputs,
    )
}

#[test]
fn norms() -> Result<()> {
    for shape in [&[1, 2][..], &[3, 5], &[2, 3, 33], &[70, 17], &[2, 1030]] {
        let width = shape[shape.len() - 1];
        let inputs = [random(4, shape), random(5, &[width]), random(6, &[width])];
        check(
            "layer norm",
            &|t| {
                let vb = builder(&[("weight", &t[1]), ("bias", &t[2])]);
                LayerNorm::new(width, 1e-5, vb)?.forward(&t[0])
            },
            &inputs,
        )?;
        check(
            "rms norm",
            &|t| RmsNorm::new(width, 1e-5, builder(&[("weight", &t[1])]))?.forward(&t[0]),
            &inputs[..2],
        )?;
    }
    Ok(())
}

#[test]
fn activations() -> Result<()> {
    for shape in [&[1][..], &[5, 7], &[2, 3, 370]] {
        let inputs = [random(7, shape), random(8, shape)];
        check("gelu tanh", &|t| gelu_tanh(&t[0]), &inputs[..1])?;
        check("gelu erf", &|t| gelu_erf(&t[0]), &inputs[..1])?;
        check("silu gated", &|t| silu_gated(&t[0], &t[1]), &inputs)?;
        check("softmax", &|t| softmax(&t[0]), &inputs[..1])?;
    }
    check(
        "gelu tanh of a view",
        &|t| gelu_tanh(&t[0].t()?),
        &[random(7, &[5, 7])],
    )
}

#[test]
fn swiglu() -> Result<()> {
    let (width, hidden) = (33, 5);
    let inputs = [
        random(1, &[17, width]),
        weight(2, hidden, width)?,
        weight(3, hidden, width)?,
        weight(4, width, hidden)?,
    ];
    let layer = |t: &[Tensor]| {
        let vb = builder(&[
            ("gate_proj.weight", &t[1]),
            ("up_proj.weight", &t[2]),
            ("down_proj.weight", &t[3]),
        ]);
        SwiGlu::new(width, hidden, vb)?.forward(&t[0])
    };
    check("swiglu", &layer, &inputs)
}

#[test]
fn embeddings() -> Result<()> {
    let ids = Tensor::new(&[[1u32, 4, 1, 0], [1, 1, 2, 4]], &candle_core::Device::Cpu)?;
    let tables = [random(1, &[5, 6]), random(2, &[9, 6])];
    let embedded = |t: &[Tensor]| embed(&ids.to_device(t[0].device())?, &t[0], &t[1]);
    check("embed", &embedded, &tables)?;
    let looked_up = |t: &[Tensor]| embedding(&ids.to_device(t[0].device())?, &t[0]);
    check("embedding", &looked_up, &tables[..1])
}

#[test]
fn rotary_embeddings() -> Result<()> {
    for pairs in [RotaryPairs::Halves, RotaryPairs::Interleaved] {
        let layer = |t: &[Tensor]| {
            let rotary = Rotary::new(6, 40, 100., pairs, t[0].dtype(), t[0].device())?;
            rotary.forward(&t[0], 3)
        };
        check("rotary", &layer, &[random(8, &[2, 3, 17, 6])])?;
    }
    Ok(())
}

#[test]
fn attention_of_heads_and_groups() -> Result<()> {
    let inputs = [1, 2, 3].map(|seed| random(seed, &[2, 3, 5, 4]));
    let heads = |t: &[Tensor]| {
        let mask = CausalMask::new(t[0].dtype(), t[0].device()).get(5)?;
        attention(&t[0], &t[1], &t[2], &mask)
    };
    check("attention", &heads, &inputs)?;

    // Four heads of queries, two of keys and values, with positions.
    let (width, heads, kv_heads) = (16, 4, 2);
    let rows = width + 2 * kv_heads * (width / heads);
    let inputs = [
        random(1, &[2 * 7, width]),
        weight(2, rows, width)?,
        random(3, &[rows]),
        weight(4, width, width)?,
        random(5, &[width]),
    ];
    let layer = |t: &[Tensor]| {
        let mask = CausalMask::new(t[0].dtype(), t[0].device()).get(7)?;
        let qkv = Linear::new(t[1].clone(), Some(t[2].clone()));
        let proj = Linear::new(t[3].clone(), Some(t[4].clone()));
        let (dtype, device) = (t[0].dtype(), t[0].device());
        let rotary = Rotary::new(4, 7, 100., RotaryPairs::Halves, dtype, device)?;
        let attention = CausalSelfAttention::grouped(qkv, proj, heads, kv_heads)?;
        attention.with_rotary(rotary)?.forward(&t[0], &mask)
    };
    check("grouped attention", &layer, &inputs)
}

#[test]
fn cross_entropies() -> Result<()> {
    for (rows, classes) in [(1, 2), (5, 17), (40, 256)] {
        let targets: Vec<u32> = (0..rows).map(|i| (i * 7 % classes) as u32).collect();
        let loss =
            |t: &[Tensor]| cross_entropy(&t[0], &Tensor::new(targets.clone(), t[0].device())?);
        check("cross entropy", &loss, &[random(9, &[rows, classes])])?;
    }
    Ok(())
}

/// The masks are those of the CPU, since they are drawn there.
#[test]
fn dropout() -> Result<()> {
    let layer = |t: &[Tensor]| Dropout::new(0.25, 42)?.forward_t(&t[0], true);
    check("dropout", &layer, &[random(10, &[7, 33])])
}

#[test]
fn masks_have_the_dtype_asked_for() -> Result<()> {
    let Some(gpu) = crate::compare::gpu() else {
        return Ok(());
    };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let mask = CausalMask::new(dtype, &gpu).get(3)?;
        assert_eq!(mask.dtype(), dtype);
        let mask = mask.to_dtype(DType::F32)?.to_vec2::<f32>()?;
        for (row, values) in mask.iter().enumerate() {
            for (column, value) in values.iter().enumerate() {
                assert_eq!(*value == 0., column <= row, "{row}, {column} in {dtype:?}");
            }
        }
    }
    Ok(())
}
