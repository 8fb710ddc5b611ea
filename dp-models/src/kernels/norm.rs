//! Layer normalisation of rows.

use multiversion::multiversion;
use rayon::prelude::*;

use super::vector::{sum, sum2};

/// Rows that are worked on by one thread at a time; also the grain of the sums over rows, so that these do not depend
/// on the number of threads.
const ROWS: usize = 128;

#[inline(always)]
fn mean_and_rstd(x: &[f32], eps: f32) -> (f32, f32) {
    let scale = 1.0 / x.len() as f32;
    let mean = sum(x, |x| x) * scale;
    let variance = sum(x, |x| (x - mean) * (x - mean)) * scale;
    (mean, 1.0 / (variance + eps).sqrt())
}

/// `y = (x - mean) / sqrt(var + eps) * weight + bias` for each row of `x`.
pub(crate) fn layer_norm_forward(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, y: &mut [f32]) {
    let chunk = ROWS * weight.len().max(1);
    let parts = y.par_chunks_mut(chunk).zip(x.par_chunks(chunk));
    parts.for_each(|(y, x)| forward_rows(x, weight, bias, eps, y));
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
fn forward_rows(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, y: &mut [f32]) {
    let width = weight.len();
    for (x, y) in x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
        let (mean, rstd) = mean_and_rstd(x, eps);
        let (y, bias) = (&mut y[..width], &bias[..width]);
        for i in 0..width {
            y[i] = (x[i] - mean) * rstd * weight[i] + bias[i];
        }
    }
}

/// The gradients of `x`, weight and bias; mean and deviation are computed again.
pub(crate) fn layer_norm_backward(
    x: &[f32],
    weight: &[f32],
    grad: &[f32],
    eps: f32,
    grad_x: &mut [f32],
) -> (Vec<f32>, Vec<f32>) {
    let width = weight.len();
    let chunk = ROWS * width.max(1);
    let parts = grad_x
        .par_chunks_mut(chunk)
        .zip(x.par_chunks(chunk))
        .zip(grad.par_chunks(chunk));
    let parts = parts.map(|((dx, x), grad)| {
        let mut sums = vec![0f32; 2 * width];
        let (dw, db) = sums.split_at_mut(width);
        backward_rows(x, weight, grad, eps, dx, dw, db);
        sums
    });
    let parts: Vec<Vec<f32>> = parts.collect();
    let mut total = vec![0f32; 2 * width];
    for part in parts {
        total.iter_mut().zip(part).for_each(|(t, p)| *t += p);
    }
    let bias = total.split_off(width);
    (total, bias)
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
fn backward_rows(
    x: &[f32],
    weight: &[f32],
    grad: &[f32],
    eps: f32,
    dx: &mut [f32],
    dw: &mut [f32],
    db: &mut [f32],
) {
    let width = weight.len();
    let scale = 1.0 / width as f32;
    let (dw, db) = (&mut dw[..width], &mut db[..width]);
    let rows = x.chunks_exact(width).zip(grad.chunks_exact(width));
    for ((x, g), dx) in rows.zip(dx.chunks_exact_mut(width)) {
        let (mean, rstd) = mean_and_rstd(x, eps);
        // dx holds g * weight in between.
        for i in 0..width {
            let normal = (x[i] - mean) * rstd;
            dw[i] += g[i] * normal;
            db[i] += g[i];
            dx[i] = g[i] * weight[i];
        }
        let mean_g = sum(dx, |g| g) * scale;
        let mean_gx = sum2(dx, x, |g, x| g * ((x - mean) * rstd)) * scale;
        for i in 0..width {
            dx[i] = rstd * (dx[i] - mean_g - (x[i] - mean) * rstd * mean_gx);
        }
    }
}
