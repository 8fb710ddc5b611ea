//! fp32 masters: what the optimizer updates where parameters are 16-bit numbers.
//!
//! A step often changes a weight by less than half the distance between two bf16 numbers. Such changes add up in the master,
//! and the parameter is the master rounded.

use std::ops::Range;

use candle_core::DType;

use crate::bucket::{Bucket, BucketLayout};
use crate::buffer::Buffer;
use crate::error::Result;
use crate::memory::{Category, Ledger};
use crate::param::{Param, with_values};
use crate::precision::{CHUNK, Trainable, narrow, widen, with_trainable};

/// The state's name in checkpoints.
pub(crate) const MASTER: &str = "master";

/// Per bucket the f32 values of the owned range; nothing where the parameters are f32 themselves.
pub(crate) struct Masters(Vec<Option<Buffer>>);

impl Masters {
    /// Takes the parameters' values. `owned`: per bucket, what this rank updates.
    pub fn new(
        layout: &BucketLayout,
        params: &[Param],
        owned: &[Range<usize>],
        ledger: &Ledger,
    ) -> Result<Self> {
        let master = |(bucket, owned): (&Bucket, &Range<usize>)| {
            let buffer = || Buffer::reserved(DType::F32, owned.len(), ledger, Category::Optimizer);
            bucket.has_masters().then(buffer).transpose()
        };
        let buckets = layout.buckets().iter().zip(owned);
        let mut masters = Self(buckets.map(master).collect::<Result<_>>()?);
        masters.refresh(layout, params, owned, |_| true)?;
        Ok(masters)
    }

    /// True if there is none: all parameters are f32.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    /// The masters of a bucket's owned range.
    pub fn of(&self, bucket: usize) -> Option<&[f32]> {
        self.0[bucket].as_ref()?.as_slice().ok()
    }

    /// [`of`](Self::of), to be written.
    pub fn of_mut(&mut self, bucket: usize) -> Option<&mut [f32]> {
        self.0[bucket].as_mut()?.as_mut_slice().ok()
    }

    /// Makes the masters of those owned elements that are not their masters rounded what these are now. The others keep the
    /// part of the master that cannot be seen in the parameter.
    pub fn refresh_altered(
        &mut self,
        layout: &BucketLayout,
        params: &[Param],
        owned: &[Range<usize>],
    ) -> Result<()> {
        for (index, bucket) in layout.buckets().iter().enumerate() {
            let Some(masters) = self.of_mut(index) else {
                continue;
            };
            for segment in bucket.segments(owned[index].clone()) {
                let masters = &mut masters[segment.in_owned];
                let tensor = params[segment.param_idx].tensor();
                with_trainable!(bucket.dtype, T => {
                    with_values(tensor, |values: &[T]| refresh_altered(masters, &values[segment.in_param]))
                })?;
            }
        }
        Ok(())
    }

    /// Makes the masters of the parameters that satisfy `wanted` what these are now.
    pub fn refresh(
        &mut self,
        layout: &BucketLayout,
        params: &[Param],
        owned: &[Range<usize>],
        wanted: impl Fn(usize) -> bool,
    ) -> Result<()> {
        for (index, bucket) in layout.buckets().iter().enumerate() {
            let Some(masters) = self.of_mut(index) else {
                continue;
            };
            for segment in bucket.segments(owned[index].clone()) {
                if wanted(segment.param_idx) {
                    let param = &params[segment.param_idx];
                    param.read(segment.in_param, &mut masters[segment.in_owned])?;
                }
            }
        }
        Ok(())
    }

    /// Sets in `altered`, per parameter, whether an owned element of it is not its master rounded. Then somebody else has
    /// written it.
    pub fn find_altered(
        &self,
        layout: &BucketLayout,
        params: &[Param],
        owned: &[Range<usize>],
        altered: &mut [bool],
    ) -> Result<()> {
        for (index, bucket) in layout.buckets().iter().enumerate() {
            let Some(masters) = self.of(index) else {
                continue;
            };
            for segment in bucket.segments(owned[index].clone()) {
                let masters = &masters[segment.in_owned];
                let tensor = params[segment.param_idx].tensor();
                let same = with_trainable!(bucket.dtype, T => {
                    with_values(tensor, |values: &[T]| are_rounded(masters, &values[segment.in_param]))
                })?;
                altered[segment.param_idx] |= !same;
            }
        }
        Ok(())
    }
}

/// Makes the masters of those `values` that are not their masters rounded what these are.
pub(crate) fn refresh_altered<T: Trainable>(masters: &mut [f32], values: &[T]) {
    for (master, value) in masters.iter_mut().zip(values) {
        let (rounded, value) = (T::from_acc(*master).to_acc(), value.to_acc());
        if !same(&rounded, &value) {
            *master = value;
        }
    }
}

/// True if all `values` are their masters rounded.
pub(crate) fn are_rounded<T: Trainable>(masters: &[f32], values: &[T]) -> bool {
    let (mut rounded, mut wide) = ([0f32; CHUNK], [0f32; CHUNK]);
    let mut sixteen = [T::ZERO; CHUNK];
    masters
        .chunks(CHUNK)
        .zip(values.chunks(CHUNK))
        .all(|(m, v)| {
            let n = m.len();
            narrow(m, &mut sixteen[..n]);
            widen(&sixteen[..n], &mut rounded[..n]);
            widen(v, &mut wide[..n]);
            let mut pairs = rounded[..n].iter().zip(&wide[..n]);
            pairs.all(|(a, b)| same(a, b))
        })
}

/// A NaN is a NaN, whatever its bits.
fn same(a: &f32, b: &f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}
