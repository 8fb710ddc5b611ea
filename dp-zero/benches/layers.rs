//! Forward and backward of each layer of a GPT, at the shapes of 16 sequences of 128 tokens and width 256. Candle's threads:
//! `RAYON_NUM_THREADS`.
//!
//! ```text
//! RAYON_NUM_THREADS=1 cargo bench --workspace --bench layers
//! ```

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{Linear, VarBuilder, VarMap};
use criterion::{Criterion, criterion_group, criterion_main};
use dp_models::{
    CausalMask, CausalSelfAttention, Gpt, GptConfig, LayerNorm, cross_entropy, gelu_linear, linear,
};

const SEQUENCES: usize = 16;
const CONTEXT: usize = 128;
const ROWS: usize = SEQUENCES * CONTEXT;
const WIDTH: usize = 256;
const VOCAB_SIZE: usize = 256;

/// A variable, so that backward computes its gradient.
fn var(shape: (usize, usize)) -> Result<Tensor> {
    Ok(Var::randn(0f32, 0.02, shape, &Device::Cpu)?.into_inner())
}

fn forward_and_backward(c: &mut Criterion, name: &str, forward: impl Fn() -> Result<Tensor>) {
    c.bench_function(name, |b| {
        b.iter(|| {
            let outputs = forward().expect("shapes fit");
            outputs.backward().expect("each layer has a backward pass")
        });
    });
}

fn layers(c: &mut Criterion) {
    add_all(c).expect("shapes fit");
}

fn add_all(c: &mut Criterion) -> Result<()> {
    let device = &Device::Cpu;
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, device);
    let x = var((ROWS, WIDTH))?;

    let (weight, bias) = (var((WIDTH, WIDTH))?, var((1, WIDTH))?.squeeze(0)?);
    forward_and_backward(c, "linear", || linear(&x, &weight, Some(&bias)));
    let (wide, wide_bias) = (var((4 * WIDTH, WIDTH))?, var((1, 4 * WIDTH))?.squeeze(0)?);
    forward_and_backward(c, "gelu_linear", || gelu_linear(&x, &wide, &wide_bias));
    let norm = LayerNorm::new(WIDTH, 1e-5, vb.pp("norm"))?;
    forward_and_backward(c, "layer_norm", || norm.forward(&x));

    let qkv = Linear::new(var((3 * WIDTH, WIDTH))?, None);
    let proj = Linear::new(var((WIDTH, WIDTH))?, None);
    let attention = CausalSelfAttention::new(qkv, proj, 4)?;
    let mask = CausalMask::new(DType::F32, device).get(CONTEXT)?;
    forward_and_backward(c, "causal_self_attention", || attention.forward(&x, &mask));

    let logits = var((ROWS, VOCAB_SIZE))?;
    let targets: Vec<u32> = (0..ROWS)
        .map(|row| (row * 37 % VOCAB_SIZE) as u32)
        .collect();
    let targets = Tensor::new(targets, device)?;
    forward_and_backward(c, "cross_entropy", || cross_entropy(&logits, &targets));

    let config = GptConfig {
        vocab_size: VOCAB_SIZE,
        context: CONTEXT,
        width: WIDTH,
        heads: 4,
        layers: 4,
        tied_head: true,
    };
    let gpt = Gpt::new(&config, vb.pp("gpt"))?;
    let tokens = targets.reshape((SEQUENCES, CONTEXT))?;
    forward_and_backward(c, "gpt", || gpt.loss(&tokens, &tokens));
    Ok(())
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10);
    targets = layers
}
criterion_main!(benches);
