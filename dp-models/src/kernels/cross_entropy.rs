//! Cross-entropy of rows of logits.

use multiversion::multiversion;

use super::vector::{exp, max, sum};

/// The summed loss of all rows, in f64, and `log(sum(exp(logits)))` of each.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn cross_entropy_forward(logits: &[f32], targets: &[u32]) -> (f64, Vec<f32>) {
    let classes = logits.len() / targets.len().max(1);
    let mut log_sums = Vec::with_capacity(targets.len());
    let mut total = 0f64;
    for (row, target) in logits.chunks_exact(classes).zip(targets) {
        let max = max(row);
        let log_sum = max + sum(row, |x| exp(x - max)).ln();
        total += f64::from(log_sum - row[*target as usize]);
        log_sums.push(log_sum);
    }
    (total, log_sums)
}

/// `scale (softmax(logits) - one_hot(target))` for each row.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn cross_entropy_backward(
    logits: &[f32],
    targets: &[u32],
    log_sums: &[f32],
    scale: f32,
    grad: &mut [f32],
) {
    let classes = logits.len() / targets.len().max(1);
    let rows = logits
        .chunks_exact(classes)
        .zip(grad.chunks_exact_mut(classes));
    for ((row, grad), (target, log_sum)) in rows.zip(targets.iter().zip(log_sums)) {
        for (g, x) in grad.iter_mut().zip(row) {
            *g = scale * exp(x - log_sum);
        }
        grad[*target as usize] -= scale;
    }
}
