//! Cross-entropy of rows of logits.

use multiversion::multiversion;

use super::vector::{exp, max, sum};

/// Rows that are worked on at a time, of so many logits.
pub(crate) fn cross_entropy_rows(classes: usize) -> usize {
    const LOGITS: usize = 1 << 16;
    (LOGITS / classes.max(1)).max(1)
}

/// `log(sum(exp(logits)))` of each row.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn log_sum_exp(logits: &[f32], log_sums: &mut [f32]) {
    let classes = logits.len() / log_sums.len().max(1);
    for (row, log_sum) in logits.chunks_exact(classes).zip(log_sums) {
        let max = max(row);
        *log_sum = max + sum(row, |x| exp(x - max)).ln();
    }
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
