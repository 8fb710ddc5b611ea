//! Loops over elements.

use multiversion::multiversion;

/// Sums over the rows of `x` `[.., out.len()]`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn column_sums(x: &[f32], out: &mut [f32]) {
    for row in x.chunks_exact(out.len().max(1)) {
        for (o, x) in out.iter_mut().zip(row) {
            *o += x;
        }
    }
}

/// `out = out + x`
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn add(x: &[f32], out: &mut [f32]) {
    for (o, x) in out.iter_mut().zip(x) {
        *o += x;
    }
}

/// `out = x` times `scale` where the bit of `kept` is set, and times 0 elsewhere: the first element's is the lowest bit of the
/// first word. A product, so that infinity and NaN are not lost where they are dropped.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn multiply_kept(x: &[f32], kept: &[u32], scale: f32, out: &mut [f32]) {
    let words = x.chunks(32).zip(out.chunks_mut(32)).zip(kept);
    for ((x, out), word) in words {
        for (i, (o, x)) in out.iter_mut().zip(x).enumerate() {
            let factor = if word >> i & 1 == 1 { scale } else { 0.0 };
            *o = x * factor;
        }
    }
}
