//! A few numbers from PyTorch 2.15 on the CPU, for layers that have no fixture.
//!
//! Unless a test says otherwise, in float64 by
//!
//! ```python
//! def grads(f, *ts):
//!     ts = [t.double().requires_grad_() for t in ts]
//!     y = f(*ts)
//!     (y * torch.arange(1, y.numel() + 1).reshape(y.shape) / 4).sum().backward()
//!     return [y] + [t.grad for t in ts]
//! ```

use std::collections::HashMap;

use candle_core::{DType, Module, Result, Tensor, Var};
use candle_nn::VarBuilder;
use dp_models::{
    LayerNorm, RmsNorm, Rotary, RotaryPairs, SwiGlu, cross_entropy, gelu_erf, gelu_tanh, linear,
    silu_gated,
};

use crate::support::{CPU, assert_close_within};

fn tensor(numbers: &[f64], shape: &[usize]) -> Tensor {
    Tensor::from_slice(numbers, shape, &CPU).unwrap()
}

fn builder<const N: usize>(tensors: [(&str, &Tensor); N]) -> VarBuilder<'static> {
    let dtype = tensors[0].1.dtype();
    let tensors: HashMap<String, Tensor> = tensors
        .map(|(name, tensor)| (name.to_string(), tensor.clone()))
        .into();
    VarBuilder::from_tensors(tensors, dtype, &CPU)
}

/// Compares the result and all gradients with `want`; `dy` is the gradient of the result.
fn compare(
    what: &str,
    layer: impl Fn(&[Tensor]) -> Result<Tensor>,
    inputs: &[Tensor],
    dy: &[f64],
    want: &[&[f64]],
    tolerance: f64,
) {
    let vars: Vec<Var> = inputs
        .iter()
        .map(|t| Var::from_tensor(t).unwrap())
        .collect();
    let tensors: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let y = layer(&tensors).unwrap();
    let dy = tensor(dy, y.dims()).to_dtype(y.dtype()).unwrap();
    let grads = (&y * dy).unwrap().sum_all().unwrap().backward().unwrap();
    let gradients = vars.iter().map(|var| grads.get(var).unwrap());
    assert_eq!(want.len(), 1 + inputs.len());
    for (i, (got, want)) in std::iter::once(&y).chain(gradients).zip(want).enumerate() {
        let want = tensor(want, got.dims());
        assert_close_within(&format!("{what}[{i}]"), got, &want, tolerance);
    }
}

/// In f64, composed, and in f32, fused.
fn check(
    what: &str,
    layer: impl Fn(&[Tensor]) -> Result<Tensor>,
    inputs: &[Tensor],
    want: &[&[f64]],
) {
    let dy: Vec<f64> = (1..=want[0].len()).map(|i| i as f64 / 4.).collect();
    for (dtype, tolerance) in [(DType::F64, 1e-6), (DType::F32, 3e-6)] {
        let inputs: Vec<Tensor> = inputs.iter().map(|t| t.to_dtype(dtype).unwrap()).collect();
        let what = format!("{what} in {dtype:?}");
        compare(&what, &layer, &inputs, &dy, want, tolerance);
    }
}

fn rms_norm(t: &[Tensor]) -> Result<Tensor> {
    RmsNorm::new(3, 1e-5, builder([("weight", &t[1])]))?.forward(&t[0])
}

/// `grads(lambda x, w: F.rms_norm(x, (3,), w, 1e-5), x, w)`
#[test]
fn rms_norm_values() {
    let x = tensor(&[0.5, -1.5, 2., 3., 0.25, -0.75], &[2, 3]);
    let weight = tensor(&[1.5, -0.5, 2.], &[3]);
    let want: [&[f64]; 3] = [
        &[
            0.5095235, 0.5095235, 2.7174586, 2.5123035, -0.0697862, -0.8374345,
        ],
        &[
            0.0685906, 0.3886724, 0.2743622, 0.4730972, -0.3792925, 1.7659533,
        ],
        &[1.7597896, -0.335058, 0.3909711],
    ];
    check("rms_norm", rms_norm, &[x, weight], &want);
}

/// `grads(F.gelu, x)`
#[test]
fn gelu_erf_values() {
    let x = tensor(&[-4., -1.5, -0.5, 0., 0.5, 1.5, 4.], &[7]);
    let want: [&[f64]; 2] = [
        &[
            -0.0001267, -0.1002108, -0.1542688, 0., 0.3457312, 1.3997892, 3.9998733,
        ],
        &[
            -0.0001259, -0.0637346, 0.0993787, 0.5, 1.0843689, 1.6912038, 1.7508814,
        ],
    ];
    check("gelu_erf", |t| gelu_erf(&t[0]), &[x], &want);
}

/// `grads(lambda gate, up: F.silu(gate) * up, gate, up)`
#[test]
fn silu_gated_values() {
    let gate = tensor(&[-3., -1., 0., 0.5, 2.], &[5]);
    let up = tensor(&[0.5, -2., 3., 1., -1.5], &[5]);
    let want: [&[f64]; 3] = [
        &[-0.0711388, 0.5378828, 0., 0.3112297, -2.6423912],
        &[-0.011013, -0.0723295, 1.125, 0.7399612, -2.0452205],
        &[-0.0355694, -0.1344707, 0., 0.3112297, 2.2019927],
    ];
    check(
        "silu_gated",
        |t| silu_gated(&t[0], &t[1]),
        &[gate, up],
        &want,
    );
}

/// `grads(lambda x, g, u, d: F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d), x, gate, up, down)`
#[test]
fn swiglu_values() {
    let inputs = [
        tensor(&[1., -2., 0.5, 3.], &[2, 2]),
        tensor(&[0.5, -1., 1., 0.25, -0.75, 2.], &[3, 2]),
        tensor(&[1., 1., -0.5, 0.5, 0.25, -2.], &[3, 2]),
        tensor(&[1., -1., 0.5, 0.25, 2., -0.5], &[2, 3]),
    ];
    let want: [&[f64]; 5] = [
        &[-1.930089, -1.4246986, -18.2569239, 18.7485374],
        &[-0.3003257, 1.2108743, -0.1215628, 4.0577154],
        &[
            -0.5789157, -0.1752909, -0.0561432, 6.3227916, 0.3901659, 2.2057772,
        ],
        &[
            0.7837638, -2.2284808, 0.8406878, 3.1767486, -0.3452062, -2.1119805,
        ],
        &[
            -1.0113391,
            0.7941872,
            -24.7393777,
            -1.7335113,
            0.9811088,
            -33.0146967,
        ],
    ];
    let layer = |t: &[Tensor]| {
        let weights = [
            ("gate_proj.weight", &t[1]),
            ("up_proj.weight", &t[2]),
            ("down_proj.weight", &t[3]),
        ];
        SwiGlu::new(2, 3, builder(weights))?.forward(&t[0])
    };
    check("swiglu", layer, &inputs, &want);
}

/// ```python
/// f = 100. ** (-torch.arange(0, 4, 2).double() / 4)
/// a = torch.arange(3)[:, None] * f
/// def halves(x):  # apply_rotary_pos_emb of Hugging Face's Llama
///     cos, sin = [torch.cat([t, t], -1) for t in (a.cos(), a.sin())]
///     x1, x2 = x.chunk(2, -1)
///     return x * cos + torch.cat([-x2, x1], -1) * sin
/// def interleaved(x):  # apply_rotary_emb of Meta's Llama
///     z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(a), a)
///     return torch.view_as_real(z).flatten(-2)
/// grads(halves, x); grads(interleaved, x)
/// ```
#[test]
fn rotary_values() {
    let x = tensor(
        &[1., 2., 3., 4., -1., 0.5, 0.25, 2., 0., 1., -2., -0.5],
        &[1, 1, 3, 4],
    );
    let halves: [&[f64]; 2] = [
        &[
            1., 2., 3., 4., -0.7506701, 0.2978352, -0.7063954, 2.039925, 1.8185949, 1.0794012,
            0.8322937, -0.291364,
        ],
        &[
            0.25, 0.5, 0.75, 1., 2.1479521, 1.6921731, -0.1063097, 1.8402582, 1.5642375, 3.0461744,
            -3.190323, 2.4435264,
        ],
    ];
    let interleaved: [&[f64]; 2] = [
        &[
            1., 2., 3., 4., -0.9610378, -0.5713198, 0.0490842, 2.0149667, -0.9092974, -0.4161468,
            -1.8607985, -0.887372,
        ],
        &[
            0.25, 0.5, 0.75, 1., 1.9375844, -0.2413853, 1.9409241, 1.8152999, 1.3369132,
            -3.0862863, 3.2911911, 2.3938591,
        ],
    ];
    for (pairs, want) in [
        (RotaryPairs::Halves, halves),
        (RotaryPairs::Interleaved, interleaved),
    ] {
        let layer =
            |t: &[Tensor]| Rotary::new(4, 3, 100., pairs, t[0].dtype(), &CPU)?.forward(&t[0], 0);
        check("rotary", layer, std::slice::from_ref(&x), &want);
    }
}

/// PyTorch rounds some of what is in between, here we do not: a few units in the last place of bf16.
///
/// ```python
/// x = torch.tensor([[0.1, -1.3, 2.7], [3.3, 0.7, -0.9]]).bfloat16()
/// w = torch.tensor([[1.1, -0.3, 0.7], [0.2, 0.9, -1.7]]).bfloat16(); b = torch.tensor([0.3, -0.6]).bfloat16()
/// y = F.linear(x, w, b); y.backward(torch.tensor([[1., -2.], [0.5, 3.]]).bfloat16())
/// w = torch.tensor([1.5, -0.5, 2.0]).bfloat16(); b = torch.tensor([0.25, 1., -1.]).bfloat16()
/// dy = torch.tensor([[1., -2., .5], [0.5, 3., -1.]]).bfloat16()
/// y = F.rms_norm(x, (3,), w, 1e-5); y.backward(dy)
/// y = F.layer_norm(x, (3,), w.float(), b.float(), 1e-5); y.backward(dy)  # y is bfloat16
/// y = F.gelu(x); y = F.gelu(x, approximate="tanh"); y = F.silu(x)  # each with y.sum().backward()
/// loss = F.cross_entropy(x.float(), torch.tensor([2, 0])); loss.backward()
/// ```
#[test]
fn bf16_values() {
    const TOLERANCE: f64 = 8e-3;
    let half =
        |numbers: &[f64], shape: &[usize]| tensor(numbers, shape).to_dtype(DType::BF16).unwrap();
    let x = half(&[0.1, -1.3, 2.7, 3.3, 0.7, -0.9], &[2, 3]);
    let weight = half(&[1.1, -0.3, 0.7, 0.2, 0.9, -1.7], &[2, 3]);
    let want: [&[f64]; 4] = [
        &[2.6875, -6.34375, 3.09375, 2.21875],
        &[0.703125, -2.09375, 4.09375, 1.1484375, 2.546875, -4.75],
        &[1.75, -0.9453125, 2.25, 9.6875, 4.6875, -8.125],
        &[1.5, 1.],
    ];
    compare(
        "linear",
        |t| linear(&t[0], &t[1], Some(&t[2])),
        &[x.clone(), weight, half(&[0.3, -0.6], &[2])],
        &[1., -2., 0.5, 3.],
        &want,
        TOLERANCE,
    );

    let (weight, dy) = (half(&[1.5, -0.5, 2.], &[3]), [1., -2., 0.5, 0.5, 3., -1.]);
    let want: [&[f64]; 3] = [
        &[0.0869141, 0.375, 3.125, 2.453125, -0.1738281, -0.890625],
        &[
            0.8554688, 0.7070312, 0.3066406, -0.0610352, -0.8359375, -0.875,
        ],
        &[0.875, 2.546875, 1.2265625],
    ];
    let inputs = [x.clone(), weight.clone()];
    compare("rms_norm", rms_norm, &inputs, &dy, &want, TOLERANCE);

    let single = |t: &Tensor| t.to_dtype(DType::F32).unwrap();
    let inputs = [
        x.clone(),
        single(&weight),
        single(&half(&[0.25, 1., -1.], &[3])),
    ];
    let want: [&[f64]; 4] = [
        &[-0.1137695, 1.5390625, 1.65625, 2.21875, 1.09375, -3.234375],
        &[
            0.1953125, -0.1269531, -0.0683594, 0.0791016, -0.2070312, 0.1279297,
        ],
        &[0.4140625, 1.59375, 1.78125],
        &[1.5, 1., -0.5],
    ];
    let layer_norm = |t: &[Tensor]| {
        let norm = LayerNorm::new(3, 1e-5, builder([("weight", &t[1]), ("bias", &t[2])]))?;
        norm.forward(&t[0])
    };
    compare("layer_norm", layer_norm, &inputs, &dy, &want, TOLERANCE);

    let ones = x.ones_like().unwrap();
    type Activation<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;
    let activations: [(&str, Activation<'_>, [&[f64]; 2]); 3] = [
        (
            "gelu_erf",
            &gelu_erf,
            [
                &[0.0539551, -0.1259766, 2.6875, 3.296875, 0.53125, -0.1660156],
                &[
                    0.578125, -0.1259766, 1.0234375, 1.0078125, 0.9765625, -0.0549316,
                ],
            ],
        ),
        (
            "gelu_tanh",
            &gelu_tanh,
            [
                &[0.0539551, -0.1259766, 2.6875, 3.296875, 0.53125, -0.1660156],
                &[
                    0.578125, -0.1259766, 1.0234375, 1.0078125, 0.9765625, -0.0546875,
                ],
            ],
        ),
        (
            "silu",
            &|x| silu_gated(x, &ones),
            [
                &[
                    0.0524902, -0.2792969, 2.53125, 3.171875, 0.4667969, -0.2597656,
                ],
                &[
                    0.5507812, -0.0039673, 1.09375, 1.078125, 0.8242188, 0.1044922,
                ],
            ],
        ),
    ];
    for (what, activation, want) in activations {
        // One rounding each, on both sides: equal to the bit, as far as seven digits tell.
        let inputs = std::slice::from_ref(&x);
        compare(what, |t| activation(&t[0]), inputs, &[1.; 6], &want, 1e-6);
    }

    let targets = Tensor::new(&[2u32, 0], &CPU).unwrap();
    let want: [&[f64]; 2] = [
        &[0.0870382],
        &[
            0.0339355, 0.0083618, -0.0422363, -0.0410156, 0.0341797, 0.0069275,
        ],
    ];
    compare(
        "cross_entropy",
        |t| cross_entropy(&t[0], &targets),
        &[x],
        &[1.],
        &want,
        1e-6,
    );
}
