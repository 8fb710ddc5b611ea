//! Building blocks that are inlined into the loops of the other modules.

/// Sums are taken in so many lanes, whatever the width of the processor's vectors.
const LANES: usize = 16;

/// `e^x`, exact to 2 units in the last place; at least `e^-87.3`, at most `e^88`; NaN stays NaN. The polynomial is that of
/// the Cephes library.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    // Adding and taking away 1.5 * 2^23 rounds to an integer, without a call.
    const ROUND: f32 = 12_582_912.0;
    // Written so that NaN passes.
    let x = if x < -87.3 { -87.3 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    // ln 2 in two parts, of which the first has few digits: its product with n is exact.
    let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let mantissa = p * r * r + r + 1.0;
    // The low bits of `shifted` are n: moved to the exponent they are 2^n.
    mantissa * f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23))
}

#[inline(always)]
fn lanes(mut total: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            total[i] += total[i + width];
        }
        width /= 2;
    }
    total[0]
}

/// The sum of `f(x[i])`.
#[inline(always)]
pub(super) fn sum(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut total = [0f32; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (t, x) in total.iter_mut().zip(chunk) {
            *t += f(*x);
        }
    }
    for (t, x) in total.iter_mut().zip(rest) {
        *t += f(*x);
    }
    lanes(total)
}

/// The sum of `f(x[i], y[i])`; equal lengths.
#[inline(always)]
pub(super) fn sum2(x: &[f32], y: &[f32], f: impl Fn(f32, f32) -> f32) -> f32 {
    let mut total = [0f32; LANES];
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>());
    for (x, y) in x.iter().zip(y) {
        for i in 0..LANES {
            total[i] += f(x[i], y[i]);
        }
    }
    for (t, (x, y)) in total.iter_mut().zip(x_rest.iter().zip(y_rest)) {
        *t += f(*x, *y);
    }
    lanes(total)
}

/// The greatest element; NaN is passed over.
#[inline(always)]
pub(super) fn max(x: &[f32]) -> f32 {
    let greater = |a: f32, b: f32| if b > a { b } else { a };
    let mut best = [f32::NEG_INFINITY; LANES];
    let (chunks, rest) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (b, x) in best.iter_mut().zip(chunk) {
            *b = greater(*b, *x);
        }
    }
    for (b, x) in best.iter_mut().zip(rest) {
        *b = greater(*b, *x);
    }
    best.into_iter().fold(f32::NEG_INFINITY, greater)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_exact_to_two_units_in_the_last_place() {
        for i in -8730..8800 {
            let x = i as f32 / 100.0 + 0.003;
            let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
            assert!(
                (got / want - 1.0).abs() < 2.4e-7,
                "exp({x}) = {got}, not {want}"
            );
        }
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(-1000.0) < 2e-38 && exp(1000.0) > 1e38 && exp(f32::NEG_INFINITY) < 2e-38);
    }

    #[test]
    fn sums_and_maxima_of_awkward_lengths() {
        for len in [0, 1, 15, 16, 17, 33, 100] {
            let x: Vec<f32> = (0..len).map(|i| i as f32).collect();
            assert_eq!(sum(&x, |x| x), (len * len - len) as f32 / 2.0, "{len}");
            assert_eq!(sum2(&x, &x, |a, b| a - b), 0.0);
            assert_eq!(
                max(&x),
                if len == 0 {
                    f32::NEG_INFINITY
                } else {
                    len as f32 - 1.0
                }
            );
        }
        assert_eq!(max(&[1.0, f32::NAN, 0.0]), 1.0);
        assert!(sum(&[1.0, f32::NAN], |x| x).is_nan());
    }
}
