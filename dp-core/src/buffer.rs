//! Flat, owned blocks of numbers: what collectives take, fill and give back.

use std::ops::Range;

use candle_core::{CpuStorage, DType};
use half::{bf16, f16};

use crate::error::{Error, Result};
use crate::memory::{Category, Ledger, Reservation};
use crate::precision::{add, with_trainable};
use crate::sixteen_bits;

mod sealed {
    pub trait Sealed {}
}

/// A number type that a [`Buffer`] holds: f32, f64, f16, bf16, u8, u32, i64.
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

/// Runs `$body` with the type parameter `$t` bound to the element type of `$dtype`, which a [`Buffer`] guarantees.
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

/// A flat block of `len` elements of one dtype, owned by one rank at a time.
///
/// A collective takes the buffer, and its [`Pending`](crate::comm::Pending) gives the same block back: nothing is
/// copied on the way in or out. A buffer made with [`Buffer::reserved`] is entered in a [`Ledger`] as long as it lives.
#[derive(Debug)]
pub struct Buffer {
    // Declared before the reservation, so that it is freed before the ledger forgets it.
    storage: CpuStorage,
    reservation: Option<Reservation>,
}

impl Buffer {
    /// Zeros.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for dtypes that are no [`Element`].
    pub fn zeros(dtype: DType, len: usize) -> Result<Self> {
        let storage = match dtype {
            DType::F32 => CpuStorage::F32(vec![0.0; len]),
            DType::F64 => CpuStorage::F64(vec![0.0; len]),
            DType::F16 => CpuStorage::F16(vec![f16::ZERO; len]),
            DType::BF16 => CpuStorage::BF16(vec![bf16::ZERO; len]),
            DType::U8 => CpuStorage::U8(vec![0; len]),
            DType::U32 => CpuStorage::U32(vec![0; len]),
            DType::I64 => CpuStorage::I64(vec![0; len]),
            other => return Err(unsupported(other)),
        };
        Ok(Self {
            storage,
            reservation: None,
        })
    }

    /// Zeros, entered in `ledger` under `category` with exactly `len` times the element size.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for dtypes that are no [`Element`].
    pub fn reserved(dtype: DType, len: usize, ledger: &Ledger, category: Category) -> Result<Self> {
        let reservation = ledger.reserve(category, (len * dtype.size_in_bytes()) as u64);
        let mut buffer = Self::zeros(dtype, len)?;
        buffer.reservation = Some(reservation);
        Ok(buffer)
    }

    /// Takes over `values` without a copy.
    pub fn from_vec<T: Element>(values: Vec<T>) -> Self {
        Self {
            storage: T::storage(values),
            reservation: None,
        }
    }

    /// The elements' dtype.
    pub fn dtype(&self) -> DType {
        with_element!(self.storage_dtype(), T => T::DTYPE)
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        with_element!(self.storage_dtype(), T => T::vec(&self.storage).map_or(0, Vec::len))
    }

    /// True without elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] if the buffer holds another type than `T`.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        let dtype = self.dtype();
        T::vec(&self.storage)
            .map(Vec::as_slice)
            .ok_or_else(|| wrong_type::<T>(dtype))
    }

    /// The elements, to be written.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] if the buffer holds another type than `T`.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        let dtype = self.dtype();
        T::vec_mut(&mut self.storage)
            .map(Vec::as_mut_slice)
            .ok_or_else(|| wrong_type::<T>(dtype))
    }

    /// Gives the elements out without a copy.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] if the buffer holds another type than `T`.
    pub fn into_vec<T: Element>(mut self) -> Result<Vec<T>> {
        let dtype = self.dtype();
        T::vec_mut(&mut self.storage)
            .map(std::mem::take)
            .ok_or_else(|| wrong_type::<T>(dtype))
    }

    /// Makes the buffer `len` elements long; it grows with zeros. Within the length it was created with, nothing is
    /// allocated.
    pub fn resize(&mut self, len: usize) {
        with_element!(self.storage_dtype(), T => if let Some(v) = T::vec_mut(&mut self.storage) {
            v.resize(len, T::ZERO);
        })
    }

    /// Sets elements `range` to zero.
    pub fn fill_zero(&mut self, range: Range<usize>) {
        with_element!(self.storage_dtype(), T => if let Some(v) = T::vec_mut(&mut self.storage) {
            v[range].fill(T::ZERO);
        })
    }

    /// Becomes a copy of elements `range` of `other`, which has the same dtype.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for another dtype.
    pub fn copy_from(&mut self, other: &Self, range: Range<usize>) -> Result<()> {
        with_element!(self.dtype(), T => {
            self.as_mut_slice::<T>()?.copy_from_slice(&other.as_slice::<T>()?[range]);
        });
        Ok(())
    }

    /// Adds elements `range` of `other`, floats of the same dtype. 16-bit sums are rounded once.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for another dtype, and for what is not trained.
    pub fn add_from(&mut self, other: &Self, range: Range<usize>) -> Result<()> {
        with_trainable!(self.dtype(), T => {
            add::<T, T>(&other.as_slice::<T>()?[range], self.as_mut_slice::<T>()?);
            Ok(())
        })
    }

    /// Start of the elements, for the backends that let several ranks work on one buffer.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        with_element!(self.storage_dtype(), T => T::vec_mut(&mut self.storage)
            .map_or(std::ptr::null_mut(), |v| v.as_mut_ptr().cast()))
    }

    fn storage_dtype(&self) -> DType {
        match &self.storage {
            CpuStorage::F32(_) => DType::F32,
            CpuStorage::F64(_) => DType::F64,
            CpuStorage::F16(_) => DType::F16,
            CpuStorage::BF16(_) => DType::BF16,
            CpuStorage::U8(_) => DType::U8,
            CpuStorage::U32(_) => DType::U32,
            _ => DType::I64,
        }
    }
}

fn unsupported(dtype: DType) -> Error {
    Error::UnsupportedDType {
        what: "a buffer".to_string(),
        dtype: dtype.as_str(),
        supported: "f32, f64, f16, bf16, u8, u32, i64",
    }
}

fn wrong_type<T: Element>(dtype: DType) -> Error {
    Error::UnsupportedDType {
        what: format!("access as {}", T::DTYPE.as_str()),
        dtype: dtype.as_str(),
        supported: T::DTYPE.as_str(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_know_their_type_and_length() -> Result<()> {
        let mut b = Buffer::zeros(DType::BF16, 3)?;
        b.as_mut_slice::<bf16>()?[1] = bf16::ONE;
        assert_eq!((b.dtype(), b.len()), (DType::BF16, 3));
        assert!(b.as_slice::<f32>().is_err());
        assert_eq!(b.into_vec::<bf16>()?, [bf16::ZERO, bf16::ONE, bf16::ZERO]);
        assert!(Buffer::zeros(DType::F8E4M3, 1).is_err());
        Ok(())
    }

    #[test]
    fn reserved_bytes_are_the_allocated_bytes() -> Result<()> {
        let ledger = Ledger::new();
        let b = Buffer::reserved(DType::F16, 5, &ledger, Category::Communication)?;
        assert_eq!(ledger.current().communication, 10);
        drop(b);
        assert_eq!(ledger.current().communication, 0);
        Ok(())
    }

    #[test]
    fn nan_wins_max_and_min() {
        assert!(<f32 as Element>::max(f32::NAN, 1.0).is_nan());
        assert!(<f32 as Element>::max(1.0, f32::NAN).is_nan());
        assert!(<f32 as Element>::min(1.0, f32::NAN).is_nan());
        assert_eq!(<f32 as Element>::max(2.0, 1.0), 2.0);
        assert_eq!(<f32 as Element>::min(2.0, 1.0), 1.0);
    }
}
