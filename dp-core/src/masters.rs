//! fp32 masters: what the optimizer updates where parameters are 16-bit numbers.
//!
//! A step often changes a weight by less than half the distance between two bf16 numbers. Such changes add up in the master,
//! and the parameter is the master rounded.

#[cfg(feature = "cuda")]
mod cuda;

use std::ops::Range;

use candle_core::DType;

use crate::bucket::{Bucket, BucketLayout};
use crate::buffer::Buffer;
use crate::error::Result;
use crate::memory::Category;
use crate::param::{Param, with_values};
use crate::param_flags::ParamFlags;
use crate::precision::{CHUNK, Trainable, narrow, widen, with_trainable};
use crate::store::ParamStore;

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
        store: &ParamStore,
    ) -> Result<Self> {
        let master = |(bucket, owned): (&Bucket, &Range<usize>)| {
            let buffer = || store.reserve(DType::F32, owned.len(), Category::Optimizer);
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
    pub fn of(&self, bucket: usize) -> Option<&Buffer> {
        self.0[bucket].as_ref()
    }

    /// [`of`](Self::of), to be written.
    pub fn of_mut(&mut self, bucket: usize) -> Option<&mut Buffer> {
        self.0[bucket].as_mut()
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
                let tensor = params[segment.param_idx].tensor();
                #[cfg(feature = "cuda")]
                if masters.is_cuda() {
                    cuda::refresh_altered(masters, tensor, bucket.dtype, segment)?;
                    continue;
                }
                let masters = &mut masters.as_mut_slice::<f32>()?[segment.in_owned];
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
                    take_value(param, segment.in_param, masters, segment.in_owned)?;
                }
            }
        }
        Ok(())
    }

    /// Raises in `altered` the flags of the parameters of which an owned element is not its master rounded. Then somebody else
    /// has written it.
    pub fn find_altered(
        &self,
        layout: &BucketLayout,
        params: &[Param],
        owned: &[Range<usize>],
        altered: &mut ParamFlags,
    ) -> Result<()> {
        for (index, bucket) in layout.buckets().iter().enumerate() {
            let Some(masters) = self.of(index) else {
                continue;
            };
            for segment in bucket.segments(owned[index].clone()) {
                let tensor = params[segment.param_idx].tensor();
                #[cfg(feature = "cuda")]
                if masters.is_cuda() {
                    cuda::find_altered(masters, tensor, bucket.dtype, segment, altered)?;
                    continue;
                }
                let masters = &masters.as_slice::<f32>()?[segment.in_owned];
                let same = with_trainable!(bucket.dtype, T => {
                    with_values(tensor, |values: &[T]| are_rounded(masters, &values[segment.in_param]))
                })?;
                if !same {
                    altered.raise(segment.param_idx);
                }
            }
        }
        Ok(())
    }
}

/// Makes the masters `at` what elements `range` of the parameter are.
pub(crate) fn take_value(
    param: &Param,
    range: Range<usize>,
    masters: &mut Buffer,
    at: Range<usize>,
) -> Result<()> {
    #[cfg(feature = "cuda")]
    if masters.is_cuda() {
        return cuda::take_value(param, range, masters, at);
    }
    param.read(range, &mut masters.as_mut_slice::<f32>()?[at])
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
