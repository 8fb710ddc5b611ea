//! The numbers of CPU tensors, for the fused layers.

use std::ops::{Deref, Range};

use candle_core::{CpuStorage, DType, Layout, Result, Storage, Tensor, bail};
use parking_lot::RwLockReadGuard;

/// True if fused kernels can compute with `x`: f32 on the CPU.
pub(super) fn is_fusable(x: &Tensor) -> bool {
    x.dtype() == DType::F32 && x.device().is_cpu()
}

/// The numbers of a contiguous f32 tensor on the CPU, without a copy.
pub(super) struct Values<'a> {
    storage: RwLockReadGuard<'a, Storage>,
    range: Range<usize>,
}

impl<'a> Values<'a> {
    pub fn of(tensor: &'a Tensor) -> Result<Self> {
        let (storage, layout) = tensor.storage_and_layout();
        let range = match &*storage {
            Storage::Cpu(values) => {
                slice(values, layout)?;
                offsets(layout)?
            }
            _ => bail!("a fused layer got a tensor that is not on the CPU"),
        };
        Ok(Self { storage, range })
    }
}

impl Deref for Values<'_> {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        match &*self.storage {
            Storage::Cpu(CpuStorage::F32(values)) => &values[self.range.clone()],
            // `of` lets nothing else in.
            _ => &[],
        }
    }
}

/// The numbers behind a layout, as custom operations get them.
pub(super) fn slice<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    match storage {
        CpuStorage::F32(values) => Ok(&values[offsets(layout)?]),
        _ => bail!("a fused layer got a tensor that is not f32"),
    }
}

fn offsets(layout: &Layout) -> Result<Range<usize>> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(start..end),
        None => bail!("a fused layer got a tensor that is not contiguous"),
    }
}
