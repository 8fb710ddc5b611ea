//! f16 and bf16: from their bits to f32, which is exact, and back, rounded to nearest, ties to even.
//!
//! The loops have no branches, so that they are compiled to vector instructions; f16 needs no support by the processor.

use multiversion::multiversion;

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn widen_bf16(x: &[u16], out: &mut [f32]) {
    for (o, x) in out.iter_mut().zip(x) {
        *o = f32::from_bits(u32::from(*x) << 16);
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn narrow_bf16(x: &[f32], out: &mut [u16]) {
    for (o, x) in out.iter_mut().zip(x) {
        let bits = x.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        // Rounding could carry a NaN over to infinity or zero; the quiet bit keeps it one.
        let nan = (bits >> 16) | 0x40;
        let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
        *o = if is_nan { nan } else { rounded } as u16;
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn widen_f16(x: &[u16], out: &mut [f32]) {
    // 2^112 moves the exponent from the bias 15 to 127; exact, for subnormal numbers, too.
    let rebias = f32::from_bits((127 + 112) << 23);
    for (o, x) in out.iter_mut().zip(x) {
        let sign = (u32::from(*x) & 0x8000) << 16;
        let magnitude = (u32::from(*x) & 0x7fff) << 13;
        let finite = (f32::from_bits(magnitude) * rebias).to_bits();
        let is_finite = magnitude < 0x7c00 << 13;
        let bits = if is_finite {
            finite
        } else {
            magnitude | 0x7f80_0000
        };
        *o = f32::from_bits(bits | sign);
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512vl+avx512dq", "x86_64+avx2"))]
pub(crate) fn narrow_f16(x: &[f32], out: &mut [u16]) {
    // To 2^112 times its value and on to 4 times: what f16 cannot hold becomes infinite on the way.
    let (up, down) = (
        f32::from_bits((127 + 112) << 23),
        f32::from_bits((127 - 110) << 23),
    );
    for (o, x) in out.iter_mut().zip(x) {
        let bits = x.to_bits();
        let sign = (bits >> 16) & 0x8000;
        let magnitude = bits & 0x7fff_ffff;
        // Adding a power of two so much greater than the number rounds it to the bits that f16 has: 10 after the leading
        // one, and fewer below 2^-14, where f16 numbers are subnormal.
        let exponent = (magnitude & 0x7f80_0000).max((127 - 14) << 23);
        let shift = f32::from_bits(exponent + (15 << 23));
        let rounded = (f32::from_bits(magnitude) * up * down + shift).to_bits();
        let finite = ((rounded >> 13) & 0x7c00) + (rounded & 0x0fff);
        let is_nan = magnitude > 0x7f80_0000;
        *o = (sign | if is_nan { 0x7e00 } else { finite }) as u16;
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device, Tensor};

    use super::*;

    fn candle(x: &[f32], dtype: DType) -> Vec<f32> {
        let x = Tensor::new(x, &Device::Cpu).unwrap();
        let x = x.to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap();
        x.to_vec1().unwrap()
    }

    fn same(a: f32, b: f32) -> bool {
        a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
    }

    /// All 65536 numbers of each type, and for each the f32 numbers halfway to its neighbour and just beside that.
    #[test]
    fn conversions_are_those_of_candle() {
        type Widen = fn(&[u16], &mut [f32]);
        type Narrow = fn(&[f32], &mut [u16]);
        let types: [(DType, Widen, Narrow, u32); 2] = [
            (DType::F16, widen_f16, narrow_f16, 12),
            (DType::BF16, widen_bf16, narrow_bf16, 15),
        ];
        for (dtype, widen, narrow, half_bit) in types {
            let all: Vec<u16> = (0..=u16::MAX).collect();
            let mut wide = vec![0f32; all.len()];
            widen(&all, &mut wide);
            let mut back = vec![0u16; all.len()];
            narrow(&wide, &mut back);
            for ((bits, back), wide) in all.iter().zip(&back).zip(&wide) {
                assert!(bits == back || wide.is_nan(), "{dtype:?} {bits:x} {back:x}");
            }
            // Exact, so candle's conversion of the result changes nothing.
            let unchanged = candle(&wide, dtype);
            assert!(wide.iter().zip(&unchanged).all(|(a, b)| same(*a, *b)));

            for offset in [-1i32, 0, 1] {
                let between: Vec<f32> = wide
                    .iter()
                    .map(|x| x.to_bits() | 1 << half_bit)
                    .map(|bits| f32::from_bits(bits.wrapping_add_signed(offset)))
                    .chain([1e-8, 2.98e-8, 2.981e-8, 65519.0, 65520.0, 1e6, 3.39e38])
                    .chain([f32::MIN_POSITIVE, 1e-42, 6e-8, 9e-8, 1.5e-5])
                    .collect();
                let mut rounded = vec![0u16; between.len()];
                narrow(&between, &mut rounded);
                let mut got = vec![0f32; between.len()];
                widen(&rounded, &mut got);
                let want = candle(&between, dtype);
                for ((x, got), want) in between.iter().zip(got).zip(want) {
                    assert!(same(got, want), "{dtype:?} of {x:e}: {got:e}, not {want:e}");
                }
            }
        }
    }
}
