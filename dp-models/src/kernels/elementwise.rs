//! Loops over elements.

use multiversion::multiversion;

use super::vector::exp;

/// `2 sqrt(2 / pi)`
const TWICE_SQRT_2_PI: f32 = 1.595_769;
const CUBIC: f32 = 0.044_715;

/// `sigmoid(2 u)` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`, which is `0.5 (1 + tanh(u))`.
#[inline(always)]
fn gate(x: f32) -> f32 {
    let twice_u = TWICE_SQRT_2_PI * (x + CUBIC * x * x * x);
    1.0 / (1.0 + exp(-twice_u))
}

/// GELU in its tanh form.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn gelu(x: &[f32], out: &mut [f32]) {
    for (o, x) in out.iter_mut().zip(x) {
        *o = x * gate(*x);
    }
}

/// Replaces each `x` by `grad` times the derivative of GELU at `x`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn gelu_backward(x: &mut [f32], grad: &[f32]) {
    for (x, g) in x.iter_mut().zip(grad) {
        let gate = gate(*x);
        let slope = TWICE_SQRT_2_PI * (1.0 + 3.0 * CUBIC * *x * *x);
        *x = g * (gate + *x * gate * (1.0 - gate) * slope);
    }
}

/// Sums over the rows of `x` `[.., out.len()]`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn column_sums(x: &[f32], out: &mut [f32]) {
    for row in x.chunks_exact(out.len().max(1)) {
        for (o, x) in out.iter_mut().zip(row) {
            *o += x;
        }
    }
}

/// `out = a + b`
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn add_rows(a: &[f32], b: &[f32], out: &mut [f32]) {
    for (o, (a, b)) in out.iter_mut().zip(a.iter().zip(b)) {
        *o = a + b;
    }
}
