//! Activation functions: GELU in its tanh and in its exact form, and the gate of a SwiGLU.

use multiversion::multiversion;

use super::vector::exp;

/// `2 sqrt(2 / pi)`
const TWICE_SQRT_2_PI: f32 = 1.595_769;
const CUBIC: f32 = 0.044_715;
/// `1 / sqrt(2 pi)`
const INVERSE_SQRT_2_PI: f32 = 0.398_942_3;

/// `sigmoid(2 u)` with `u = sqrt(2 / pi) (x + 0.044715 x^3)`, which is `0.5 (1 + tanh(u))`.
#[inline(always)]
fn gate(x: f32) -> f32 {
    let twice_u = TWICE_SQRT_2_PI * (x + CUBIC * x * x * x);
    1.0 / (1.0 + exp(-twice_u))
}

/// GELU in its tanh form.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn gelu_tanh(x: &[f32], out: &mut [f32]) {
    for (o, x) in out.iter_mut().zip(x) {
        *o = x * gate(*x);
    }
}

/// Replaces each `x` by `grad` times the derivative of the tanh form at `x`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn gelu_tanh_backward(x: &mut [f32], grad: &[f32]) {
    for (x, g) in x.iter_mut().zip(grad) {
        let gate = gate(*x);
        let slope = TWICE_SQRT_2_PI * (1.0 + 3.0 * CUBIC * *x * *x);
        *x = g * (gate + *x * gate * (1.0 - gate) * slope);
    }
}

/// [`gelu_tanh`] of `x` to `out`, and [`gelu_tanh_backward`] on `grad`, which becomes the gradient of `x`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn gelu_tanh_both(x: &[f32], grad: &mut [f32], out: &mut [f32]) {
    for ((x, g), o) in x.iter().zip(grad).zip(out) {
        let gate = gate(*x);
        *o = x * gate;
        let slope = TWICE_SQRT_2_PI * (1.0 + 3.0 * CUBIC * x * x);
        *g *= gate + x * gate * (1.0 - gate) * slope;
    }
}

/// The distribution function of the standard normal, `(1 + erf(x / sqrt(2))) / 2`, exact to 3e-7.
///
/// By `erfc(z)` for `z >= 0` as in Press et al., "Numerical Recipes in C", 2nd edition, section 6.2, whose error is relative:
/// so the left tail does not drown in a difference of nearly equal numbers.
#[inline(always)]
fn normal_cdf(x: f32) -> f32 {
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / (1.0 + 0.5 * z);
    let mut p = 0.170_872_77;
    p = p * t - 0.822_152_23;
    p = p * t + 1.488_515_9;
    p = p * t - 1.135_204;
    p = p * t + 0.278_868_07;
    p = p * t - 0.186_288_06;
    p = p * t + 0.096_784_18;
    p = p * t + 0.374_091_96;
    p = p * t + 1.000_023_7;
    p = p * t - 1.265_512_2;
    let tail = 0.5 * t * exp(p - z * z);
    if x > 0.0 { 1.0 - tail } else { tail }
}

/// GELU in its exact form: `x` times the distribution function of the standard normal.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn gelu_erf(x: &[f32], out: &mut [f32]) {
    for (o, x) in out.iter_mut().zip(x) {
        *o = x * normal_cdf(*x);
    }
}

/// Replaces each `x` by `grad` times the derivative of the exact GELU at `x`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn gelu_erf_backward(x: &mut [f32], grad: &[f32]) {
    for (x, g) in x.iter_mut().zip(grad) {
        // Beyond 13 the density is 0 in f32, but `exp` stops at a number that is not, and a large x would bring it back.
        let near = clamp(*x, 13.0);
        let density = INVERSE_SQRT_2_PI * exp(-0.5 * near * near);
        *x = g * (normal_cdf(*x) + near * density);
    }
}

/// `out = gate sigmoid(gate) up`
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn silu_gated(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for (o, (x, up)) in out.iter_mut().zip(gate.iter().zip(up)) {
        *o = x * (1.0 / (1.0 + exp(-x))) * up;
    }
}

/// The gradient of `gate`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn silu_gated_grad_gate(gate: &[f32], up: &[f32], grad: &[f32], out: &mut [f32]) {
    let inputs = gate.iter().zip(up).zip(grad);
    for (o, ((x, up), g)) in out.iter_mut().zip(inputs) {
        let sigmoid = 1.0 / (1.0 + exp(-x));
        // Beyond 88 either factor of the product is 0 in f32, or as small as `exp` gets.
        *o = g * up * (sigmoid * (1.0 + clamp(*x, 88.0) * (1.0 - sigmoid)));
    }
}

/// [`silu_gated`] to `product`, and the gradients: [`silu_gated_grad_gate`] to `dgate`, and that of `up`, `grad silu(gate)`, in
/// place of `grad`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn silu_gated_all(
    gate: &[f32],
    up: &[f32],
    grad: &mut [f32],
    dgate: &mut [f32],
    product: &mut [f32],
) {
    let inputs = gate.iter().zip(up).zip(grad);
    for (((x, up), g), (dgate, product)) in inputs.zip(dgate.iter_mut().zip(product)) {
        let sigmoid = 1.0 / (1.0 + exp(-x));
        *product = x * sigmoid * up;
        *dgate = *g * up * (sigmoid * (1.0 + clamp(*x, 88.0) * (1.0 - sigmoid)));
        *g *= x * sigmoid;
    }
}

/// `x` between `-limit` and `limit`; NaN stays NaN.
#[inline(always)]
fn clamp(x: f32, limit: f32) -> f32 {
    let x = if x < -limit { -limit } else { x };
    if x > limit { limit } else { x }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `candle`'s erf in f64, over the range where the function is neither 0 nor 1, and far out.
    #[test]
    fn the_exact_gelu_is_exact() {
        let x: Vec<f32> = (-1300..1300).map(|i| i as f32 / 100.0 + 0.003).collect();
        let mut y = vec![0f32; x.len()];
        gelu_erf(&x, &mut y);
        for (x, y) in x.iter().zip(y) {
            let wide = f64::from(*x);
            let erfc = candle_core::cpu::erf::erfc_f64(-wide * std::f64::consts::FRAC_1_SQRT_2);
            let want = wide * 0.5 * erfc;
            let (error, limit) = ((f64::from(y) - want).abs(), 3e-7 * wide.abs());
            assert!(error <= limit, "gelu_erf({x}) = {y}, not {want}");
            // The left tail has a small relative error, too.
            let relative = error / want.abs().max(1e-37);
            assert!(relative < 2e-5, "gelu_erf({x}) = {y}, not {want}");
        }
    }

    #[test]
    fn far_out_there_is_no_overflow() {
        let x = [-3e38f32, -1e20, -90.0, 90.0, 1e20, 3e38];
        let (ones, mut y) = ([1f32; 6], x);
        gelu_erf_backward(&mut y, &ones);
        assert_eq!(y.map(|y| y.round()), [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
        silu_gated_grad_gate(&x, &ones, &ones, &mut y);
        assert_eq!(y.map(|y| y.round()), [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
        gelu_erf(&x, &mut y);
        assert!(y[..3].iter().all(|y| y.abs() < 1e-37), "{y:?}");
        assert_eq!(y[3..], x[3..]);
    }

    #[test]
    fn nan_stays_nan() {
        let (nan, one, mut y) = ([f32::NAN], [1f32], [0f32]);
        gelu_erf(&nan, &mut y);
        assert!(y[0].is_nan());
        y = nan;
        gelu_erf_backward(&mut y, &one);
        assert!(y[0].is_nan());
        silu_gated(&nan, &one, &mut y);
        assert!(y[0].is_nan());
        silu_gated_grad_gate(&nan, &one, &one, &mut y);
        assert!(y[0].is_nan());
    }
}
