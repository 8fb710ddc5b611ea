//! Rotation of pairs of features, by an angle per row and pair.

use multiversion::multiversion;

/// `y1 = x1 cos - x2 sin`, `y2 = x2 cos + x1 sin` for each row `[x1, x2]` of `x`, whose halves have the length of the rows of
/// `cos` and `sin`. Row `r` of `x` takes row `(first + r) % len` of these, which have `len` rows.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn rotate_halves(
    x: &[f32],
    (cos, sin): (&[f32], &[f32]),
    half: usize,
    first: usize,
    out: &mut [f32],
) {
    let len = cos.len() / half;
    let rows = x.chunks_exact(2 * half).zip(out.chunks_exact_mut(2 * half));
    for (row, (x, out)) in rows.enumerate() {
        let angles = (first + row) % len * half..((first + row) % len + 1) * half;
        let (cos, sin) = (&cos[angles.clone()], &sin[angles]);
        let ((x1, x2), (y1, y2)) = (x.split_at(half), out.split_at_mut(half));
        for i in 0..half {
            y1[i] = x1[i] * cos[i] - x2[i] * sin[i];
            y2[i] = x2[i] * cos[i] + x1[i] * sin[i];
        }
    }
}

/// As [`rotate_halves`], where `x1` are the even and `x2` the odd positions of a row.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn rotate_interleaved(
    x: &[f32],
    (cos, sin): (&[f32], &[f32]),
    half: usize,
    first: usize,
    out: &mut [f32],
) {
    let len = cos.len() / half;
    let rows = x.chunks_exact(2 * half).zip(out.chunks_exact_mut(2 * half));
    for (row, (x, out)) in rows.enumerate() {
        let angles = (first + row) % len * half..((first + row) % len + 1) * half;
        let pairs = x.as_chunks::<2>().0.iter().zip(out.as_chunks_mut::<2>().0);
        let angles = cos[angles.clone()].iter().zip(&sin[angles]);
        for ((x, y), (cos, sin)) in pairs.zip(angles) {
            *y = [x[0] * cos - x[1] * sin, x[1] * cos + x[0] * sin];
        }
    }
}
