//! Conversions of 16-bit floats without branches, which the compiler turns into vector instructions.
//!
//! They give the bits that the `half` crate gives, whose own conversions take one number at a time. (A signalling NaN passes
//! [`f16_to_f32`] as it is; on the way back it becomes the same quiet one.)

/// Every f16 is an f32.
#[inline(always)]
pub(crate) fn f16_to_f32(bits: u16) -> f32 {
    /// An exponent of f32 is greater by so much: 127 - 15.
    const RESCALE: f32 = f32::from_bits((127 + 127 - 15) << 23);
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff) << 13;
    // The product also normalises what was subnormal. Infinity and NaN come out as 2^16 and more: their exponent follows.
    let finite = (f32::from_bits(magnitude) * RESCALE).to_bits();
    let special = if bits & 0x7c00 == 0x7c00 {
        0x7f80_0000
    } else {
        0
    };
    f32::from_bits(finite | special | sign)
}

/// Rounds to nearest even; NaN becomes quiet.
#[inline(always)]
pub(crate) fn f16_from_f32(x: f32) -> u16 {
    /// The least that rounds to a number with an exponent, 2^-14, and the least that is beyond all finite numbers, 2^16.
    const NORMAL: u32 = (127 - 14) << 23;
    const BEYOND: u32 = (127 + 16) << 23;
    /// A number whose last place is the last place of a subnormal f16, 2^-24.
    const SUBNORMAL: u32 = (127 - 1) << 23;
    let bits = x.to_bits();
    let sign = (bits >> 16) & 0x8000;
    let magnitude = bits & 0x7fff_ffff;
    // Adding it rounds to its last place.
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(SUBNORMAL))
        .to_bits()
        .wrapping_sub(SUBNORMAL);
    let odd = (magnitude >> 13) & 1;
    // Half a place up, less one where the place is even; a carry goes on into the exponent, up to infinity.
    let normal = magnitude
        .wrapping_sub((127 - 15) << 23)
        .wrapping_add(0xfff + odd)
        >> 13;
    let special = if magnitude > 0x7f80_0000 {
        0x7e00 | ((magnitude >> 13) & 0x3ff)
    } else {
        0x7c00
    };
    let finite = if magnitude < NORMAL {
        subnormal
    } else {
        normal
    };
    let rounded = if magnitude >= BEYOND { special } else { finite };
    (rounded | sign) as u16
}

/// Rounds to nearest even; NaN becomes quiet.
#[inline(always)]
pub(crate) fn bf16_from_f32(x: f32) -> u16 {
    let bits = x.to_bits();
    let odd = (bits >> 16) & 1;
    let rounded = bits.wrapping_add(0x7fff + odd) >> 16;
    let nan = (bits >> 16) | 0x40;
    let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
    (if is_nan { nan } else { rounded }) as u16
}

/// Every bf16 is an f32: its upper half.
#[inline(always)]
pub(crate) fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;

    /// f32 around every place where a rounding changes: each 16-bit number, halfway to the next one, and its neighbours.
    fn awkward(to_f32: impl Fn(u16) -> f32) -> impl Iterator<Item = f32> {
        (0..=u16::MAX).flat_map(move |bits| {
            let (this, next) = (to_f32(bits), to_f32(bits.wrapping_add(1)));
            let halfway = this + (next - this) / 2.0;
            [this, halfway].into_iter().flat_map(|x| {
                [-1i32, 0, 1].map(|d| f32::from_bits(x.to_bits().wrapping_add_signed(d)))
            })
        })
    }

    #[test]
    fn all_f16_widen_and_come_back() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (f16_to_f32(bits), f16::from_bits(bits).to_f32());
            if theirs.is_nan() {
                assert!(ours.is_nan(), "{bits:x}");
                assert_eq!(f16_from_f32(ours), bits | 0x200);
            } else {
                assert_eq!(ours.to_bits(), theirs.to_bits(), "{bits:x}");
                assert_eq!(f16_from_f32(ours), bits);
            }
        }
    }

    #[test]
    fn rounding_is_that_of_half() {
        for x in awkward(|b| f16::from_bits(b).to_f32()) {
            assert_eq!(f16_from_f32(x), f16::from_f32(x).to_bits(), "{x:e}");
        }
        for x in awkward(|b| bf16::from_bits(b).to_f32()) {
            assert_eq!(bf16_from_f32(x), bf16::from_f32(x).to_bits(), "{x:e}");
        }
        for x in [
            65519.9,
            65520.0,
            1e30,
            f32::INFINITY,
            f32::MIN_POSITIVE,
            1e-45,
        ] {
            assert_eq!(f16_from_f32(-x), f16::from_f32(-x).to_bits(), "{x:e}");
            assert_eq!(bf16_from_f32(-x), bf16::from_f32(-x).to_bits(), "{x:e}");
        }
    }
}
