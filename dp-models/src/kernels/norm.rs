//! Layer normalisation and root-mean-square normalisation of rows.

use multiversion::multiversion;

use super::vector::{sum, sum2};

/// Rows that are worked on at a time; also the grain of the sums over rows, so that these do not depend on the number of
/// threads.
pub(crate) const NORM_ROWS: usize = 128;

#[inline(always)]
fn mean_and_rstd(x: &[f32], eps: f32) -> (f32, f32) {
    let scale = 1.0 / x.len() as f32;
    let mean = sum(x, |x| x) * scale;
    let variance = sum(x, |x| (x - mean) * (x - mean)) * scale;
    (mean, 1.0 / (variance + eps).sqrt())
}

/// `1 / sqrt(mean(x^2) + eps)`
#[inline(always)]
fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    let mean = sum(x, |x| x * x) * (1.0 / x.len() as f32);
    1.0 / (mean + eps).sqrt()
}

/// `y = (x - mean) / sqrt(var + eps) * weight + bias` for each row of `x`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn layer_norm(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, y: &mut [f32]) {
    let width = weight.len();
    for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
        let (mean, rstd) = mean_and_rstd(x, eps);
        let (y, bias) = (&mut y[..width], &bias[..width]);
        for i in 0..width {
            y[i] = (x[i] - mean) * rstd * weight[i] + bias[i];
        }
    }
}

/// The gradients of `x`, weight and bias; mean and deviation are computed again. Those of weight and bias are added to what
/// is there. An empty `dx` is not computed, nor are empty `dw` and `db`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn layer_norm_backward(
    x: &[f32],
    weight: &[f32],
    grad: &[f32],
    eps: f32,
    dx: &mut [f32],
    (dw, db): (&mut [f32], &mut [f32]),
) {
    let width = weight.len();
    let scale = 1.0 / width as f32;
    let rows = x.chunks_exact(width).zip(grad.chunks_exact(width));
    for (row, (x, g)) in rows.enumerate() {
        let (mean, rstd) = mean_and_rstd(x, eps);
        if !dw.is_empty() {
            let (dw, db) = (&mut dw[..width], &mut db[..width]);
            for i in 0..width {
                dw[i] += g[i] * ((x[i] - mean) * rstd);
                db[i] += g[i];
            }
        }
        if !dx.is_empty() {
            // dx holds g * weight in between.
            let dx = &mut dx[row * width..][..width];
            for i in 0..width {
                dx[i] = g[i] * weight[i];
            }
            let mean_g = sum(dx, |g| g) * scale;
            let mean_gx = sum2(dx, x, |g, x| g * ((x - mean) * rstd)) * scale;
            for i in 0..width {
                dx[i] = rstd * (dx[i] - mean_g - (x[i] - mean) * rstd * mean_gx);
            }
        }
    }
}

/// `y = x / sqrt(mean(x^2) + eps) * weight` for each row of `x`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, y: &mut [f32]) {
    let width = weight.len();
    for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
        let inverse = inverse_rms(x, eps);
        let y = &mut y[..width];
        for i in 0..width {
            y[i] = x[i] * inverse * weight[i];
        }
    }
}

/// The gradients of `x` and weight, as those of [`layer_norm_backward`].
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn rms_norm_backward(
    x: &[f32],
    weight: &[f32],
    grad: &[f32],
    eps: f32,
    dx: &mut [f32],
    dw: &mut [f32],
) {
    let width = weight.len();
    let scale = 1.0 / width as f32;
    let rows = x.chunks_exact(width).zip(grad.chunks_exact(width));
    for (row, (x, g)) in rows.enumerate() {
        let inverse = inverse_rms(x, eps);
        if !dw.is_empty() {
            let dw = &mut dw[..width];
            for i in 0..width {
                dw[i] += g[i] * (x[i] * inverse);
            }
        }
        if !dx.is_empty() {
            let dx = &mut dx[row * width..][..width];
            for i in 0..width {
                dx[i] = g[i] * weight[i];
            }
            let mean_gx = sum2(dx, x, |g, x| g * (x * inverse)) * scale;
            for i in 0..width {
                dx[i] = inverse * (dx[i] - x[i] * inverse * mean_gx);
            }
        }
    }
}
