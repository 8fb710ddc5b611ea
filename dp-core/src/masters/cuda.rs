//! Masters on CUDA devices: the same loops as kernels.

use std::ops::Range;

use candle_core::{DType, Tensor};

use crate::bucket::Segment;
use crate::buffer::Buffer;
use crate::cuda::Kernels;
use crate::error::Result;
use crate::param::{Param, with_cuda};
use crate::param_flags::ParamFlags;
use crate::precision::with_trainable;

/// Makes the masters that are not what the parameter's elements are, rounded, what these are.
pub(super) fn refresh_altered(
    masters: &mut Buffer,
    tensor: &Tensor,
    dtype: DType,
    segment: Segment,
) -> Result<()> {
    let mut masters = masters.cuda_mut()?.view_mut::<f32>(segment.in_owned)?;
    with_trainable!(dtype, T => with_cuda::<T, _>(tensor, |device, values| {
        Kernels::of(device)?.refresh_altered(&mut masters, &values.slice(segment.in_param))
    }))
}

/// Raises the parameter's flag if an element of it is not its master rounded.
pub(super) fn find_altered(
    masters: &Buffer,
    tensor: &Tensor,
    dtype: DType,
    segment: Segment,
    altered: &mut ParamFlags,
) -> Result<()> {
    let masters = masters.cuda()?.view::<f32>(segment.in_owned)?;
    let mut flag = altered.on_cuda(segment.param_idx)?;
    with_trainable!(dtype, T => with_cuda::<T, _>(tensor, |device, values| {
        Kernels::of(device)?.find_altered(&masters, &values.slice(segment.in_param), &mut flag)
    }))
}

/// Makes the masters `at` what elements `range` of the parameter are.
pub(super) fn take_value(
    param: &Param,
    range: Range<usize>,
    masters: &mut Buffer,
    at: Range<usize>,
) -> Result<()> {
    let mut masters = masters.cuda_mut()?.view_mut::<f32>(at)?;
    with_trainable!(param.tensor().dtype(), T => with_cuda::<T, _>(param.tensor(), |device, values| {
        Kernels::of(device)?.convert(&values.slice(range), &mut masters)
    }))
}
