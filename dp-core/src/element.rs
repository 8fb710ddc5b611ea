//! The number types that buffers hold: how each of them adds and rounds.

use candle_core::{CpuStorage, DType};
use half::{bf16, f16};

use crate::sixteen_bits;

mod sealed {
    /// What a number type must be for Candle to keep it on a device, too.
    #[cfg(feature = "cuda")]
    pub trait OnDevice: CudaDType + DeviceRepr + ValidAsZeroBits {}
    #[cfg(feature = "cuda")]
    impl<T: CudaDType + DeviceRepr + ValidAsZeroBits> OnDevice for T {}
    #[cfg(feature = "cuda")]
    use candle_core::cuda_backend::{
        CudaDType,
        cudarc::driver::{DeviceRepr, ValidAsZeroBits},
    };

    /// Without devices, any type will do.
    #[cfg(not(feature = "cuda"))]
    pub trait OnDevice {}
    #[cfg(not(feature = "cuda"))]
    impl<T> OnDevice for T {}

    pub trait Sealed: OnDevice {}
}

/// A number type that a [`Buffer`](crate::Buffer) holds: f32, f64, f16, bf16, u8, u32, i64.
pub trait Element: sealed::Sealed + Copy + Send + Sync + std::fmt::Debug + 'static {
    /// Candle's name of the type.
    const DTYPE: DType;
    /// The type in which reductions accumulate: f32 for the 16-bit floats, otherwise the type itself.
    type Acc: Copy + Send + Sync + 'static;
    /// Zero.
    const ZERO: Self;

    /// Widens to the accumulator.
    fn to_acc(self) -> Self::Acc;
    /// Rounds the accumulator to the type, once, to nearest even.
    fn from_acc(acc: Self::Acc) -> Self;
    /// `a + b`; integers wrap, as in NCCL.
    fn add(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    /// The greater one; a NaN wins, so that it is not lost.
    fn max(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    /// The lesser one; a NaN wins, so that it is not lost.
    fn min(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    /// `a / divisor`. Integers never get here: averaging them is refused before.
    fn divide(a: Self::Acc, divisor: f64) -> Self::Acc;

    /// [`to_acc`](Self::to_acc) of each; `out` is as long as `values`.
    #[doc(hidden)]
    #[inline(always)]
    fn widen(values: &[Self], out: &mut [Self::Acc]) {
        for (o, v) in out.iter_mut().zip(values) {
            *o = v.to_acc();
        }
    }
    /// [`from_acc`](Self::from_acc) of each; `out` is as long as `values`.
    #[doc(hidden)]
    #[inline(always)]
    fn narrow(values: &[Self::Acc], out: &mut [Self]) {
        for (o, v) in out.iter_mut().zip(values) {
            *o = Self::from_acc(*v);
        }
    }
    #[doc(hidden)]
    fn vec(storage: &CpuStorage) -> Option<&Vec<Self>>;
    #[doc(hidden)]
    fn vec_mut(storage: &mut CpuStorage) -> Option<&mut Vec<Self>>;
    #[doc(hidden)]
    fn storage(values: Vec<Self>) -> CpuStorage;
    /// The values as little-endian bytes; `bytes` is as long as they are.
    #[doc(hidden)]
    fn to_le(values: &[Self], bytes: &mut [u8]);
    /// The values of little-endian bytes; `bytes` is as long as they are.
    #[doc(hidden)]
    fn from_le(bytes: &[u8], values: &mut [Self]);
}

macro_rules! storage_access {
    ($t:ty, $variant:ident) => {
        const DTYPE: DType = DType::$variant;
        fn vec(storage: &CpuStorage) -> Option<&Vec<Self>> {
            match storage {
                CpuStorage::$variant(v) => Some(v),
                _ => None,
            }
        }
        fn vec_mut(storage: &mut CpuStorage) -> Option<&mut Vec<Self>> {
            match storage {
                CpuStorage::$variant(v) => Some(v),
                _ => None,
            }
        }
        fn storage(values: Vec<Self>) -> CpuStorage {
            CpuStorage::$variant(values)
        }
        fn to_le(values: &[Self], bytes: &mut [u8]) {
            let (out, _) = bytes.as_chunks_mut::<{ size_of::<$t>() }>();
            for (o, v) in out.iter_mut().zip(values) {
                *o = v.to_le_bytes();
            }
        }
        fn from_le(bytes: &[u8], values: &mut [Self]) {
            let (chunks, _) = bytes.as_chunks::<{ size_of::<$t>() }>();
            for (v, b) in values.iter_mut().zip(chunks) {
                *v = <$t>::from_le_bytes(*b);
            }
        }
    };
}

macro_rules! float_element {
    ($t:ty, $variant:ident, $acc:ty, $zero:expr, $to:expr, $from:expr $(, $widen:expr, $narrow:expr)?) => {
        impl sealed::Sealed for $t {}
        impl Element for $t {
            type Acc = $acc;
            const ZERO: Self = $zero;
            storage_access!($t, $variant);
            $(
                #[inline(always)]
                fn widen(values: &[Self], out: &mut [$acc]) {
                    for (o, v) in out.iter_mut().zip(values) {
                        *o = $widen(v.to_bits());
                    }
                }
                #[inline(always)]
                fn narrow(values: &[$acc], out: &mut [Self]) {
                    for (o, v) in out.iter_mut().zip(values) {
                        *o = <$t>::from_bits($narrow(*v));
                    }
                }
            )?
            #[inline(always)]
            fn to_acc(self) -> $acc {
                $to(self)
            }
            #[inline(always)]
            fn from_acc(acc: $acc) -> Self {
                $from(acc)
            }
            #[inline(always)]
            fn add(a: $acc, b: $acc) -> $acc {
                a + b
            }
            #[inline(always)]
            fn max(a: $acc, b: $acc) -> $acc {
                if a.is_nan() || a > b { a } else { b }
            }
            #[inline(always)]
            fn min(a: $acc, b: $acc) -> $acc {
                if a.is_nan() || a < b { a } else { b }
            }
            #[inline(always)]
            fn divide(a: $acc, divisor: f64) -> $acc {
                a / divisor as $acc
            }
        }
    };
}

macro_rules! int_element {
    ($t:ty, $variant:ident) => {
        impl sealed::Sealed for $t {}
        impl Element for $t {
            type Acc = $t;
            const ZERO: Self = 0;
            storage_access!($t, $variant);
            #[inline(always)]
            fn to_acc(self) -> $t {
                self
            }
            #[inline(always)]
            fn from_acc(acc: $t) -> Self {
                acc
            }
            #[inline(always)]
            fn add(a: $t, b: $t) -> $t {
                a.wrapping_add(b)
            }
            #[inline(always)]
            fn max(a: $t, b: $t) -> $t {
                Ord::max(a, b)
            }
            #[inline(always)]
            fn min(a: $t, b: $t) -> $t {
                Ord::min(a, b)
            }
            #[inline(always)]
            fn divide(a: $t, _divisor: f64) -> $t {
                a
            }
        }
    };
}

float_element!(f32, F32, f32, 0.0, |x| x, |a| a);
float_element!(f64, F64, f64, 0.0, |x| x, |a| a);
float_element!(
    f16,
    F16,
    f32,
    f16::ZERO,
    f16::to_f32,
    f16::from_f32,
    sixteen_bits::f16_to_f32,
    sixteen_bits::f16_from_f32
);
float_element!(
    bf16,
    BF16,
    f32,
    bf16::ZERO,
    bf16::to_f32,
    bf16::from_f32,
    sixteen_bits::bf16_to_f32,
    sixteen_bits::bf16_from_f32
);
int_element!(u8, U8);
int_element!(u32, U32);
int_element!(i64, I64);

/// True for the dtypes that have an [`Element`].
pub(crate) fn is_element(dtype: DType) -> bool {
    matches!(
        dtype,
        DType::F32 | DType::F64 | DType::F16 | DType::BF16 | DType::U8 | DType::U32 | DType::I64
    )
}

/// Runs `$body` with the type parameter `$t` bound to the element type of `$dtype`, which a [`Buffer`](crate::Buffer) guarantees.
macro_rules! with_element {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $t = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $t = f64;
                $body
            }
            candle_core::DType::F16 => {
                type $t = half::f16;
                $body
            }
            candle_core::DType::BF16 => {
                type $t = half::bf16;
                $body
            }
            candle_core::DType::U8 => {
                type $t = u8;
                $body
            }
            candle_core::DType::U32 => {
                type $t = u32;
                $body
            }
            candle_core::DType::I64 => {
                type $t = i64;
                $body
            }
            other => unreachable!("a Buffer never holds {other:?}"),
        }
    };
}
pub(crate) use with_element;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nan_wins_max_and_min() {
        assert!(<f32 as Element>::max(f32::NAN, 1.0).is_nan());
        assert!(<f32 as Element>::max(1.0, f32::NAN).is_nan());
        assert!(<f32 as Element>::min(1.0, f32::NAN).is_nan());
        assert_eq!(<f32 as Element>::max(2.0, 1.0), 2.0);
        assert_eq!(<f32 as Element>::min(2.0, 1.0), 1.0);
    }
}
