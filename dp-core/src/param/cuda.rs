//! Values of parameters on CUDA devices. Everything is put on the stream of the tensor's device, in the order of the calls.

use std::io::{self, Write};
use std::ops::Range;

use candle_core::cuda_backend::cudarc::driver::{CudaView, CudaViewMut};
use candle_core::{CpuStorage, CudaDevice, CudaStorage, InplaceOp1, Layout, Storage, Tensor};
use parking_lot::Mutex;

use super::{contiguous, no_access};
use crate::buffer::{Buffer, Element, cuda_copy, cuda_pieces, cuda_upload, cuda_write_with};
use crate::error::Result;
use crate::little_endian;
use crate::precision::{Trainable, widen};

/// Gives `f` the values of a contiguous CUDA tensor.
pub(crate) fn with_cuda<T: Element, R>(
    tensor: &Tensor,
    f: impl FnOnce(&CudaDevice, CudaView<'_, T>) -> Result<R>,
) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else {
        return Err(no_access::<T>(tensor));
    };
    let (start, end) = contiguous(layout)?;
    let values = storage.as_cuda_slice::<T>();
    let values = values.map_err(|_| no_access::<T>(tensor))?;
    f(&storage.device, values.slice(start..end))
}

/// Gives `f` the values of a contiguous CUDA tensor, to be written in place.
pub(crate) fn with_cuda_mut<T: Element, R>(
    tensor: &Tensor,
    f: impl FnOnce(&CudaDevice, CudaViewMut<'_, T>) -> Result<R>,
) -> Result<R> {
    /// The closure before the call, its result after.
    struct Edit<F, R, T>(
        Mutex<(Option<F>, Option<Result<R>>)>,
        std::marker::PhantomData<T>,
    );

    impl<T, F, R> InplaceOp1 for Edit<F, R, T>
    where
        T: Element,
        F: FnOnce(&CudaDevice, CudaViewMut<'_, T>) -> Result<R>,
    {
        fn name(&self) -> &'static str {
            "edit-in-place"
        }

        fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
            Ok(()) // The caller sees that nothing was done.
        }

        fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
            let (start, end) = contiguous(layout)?;
            let device = storage.device.clone();
            let mut state = self.0.lock();
            if let (Ok(values), Some(f)) = (storage.as_cuda_slice_mut::<T>(), state.0.take()) {
                state.1 = Some(f(&device, values.slice_mut(start..end)));
            }
            Ok(())
        }
    }

    let edit = Edit(Mutex::new((Some(f), None)), std::marker::PhantomData::<T>);
    tensor.inplace_op1(&edit)?;
    let (_, result) = edit.0.into_inner();
    result.unwrap_or_else(|| Err(no_access::<T>(tensor)))
}

/// Copies elements `range` to the host, in f32.
pub(super) fn read<T: Trainable>(
    tensor: &Tensor,
    range: Range<usize>,
    out: &mut [f32],
) -> Result<()> {
    with_cuda::<T, _>(tensor, |device, values| {
        let widened = cuda_pieces(device, &values.slice(range), |at, piece| {
            widen(piece, &mut out[at]);
            Ok(())
        });
        Ok(widened.map_err(candle_core::Error::wrap)?)
    })
}

/// Copies elements `range` to a buffer on the same device.
pub(super) fn copy_to<T: Element>(
    tensor: &Tensor,
    range: Range<usize>,
    buffer: &mut Buffer,
    at: usize,
) -> Result<()> {
    let mut out = buffer.cuda_mut()?.view_mut::<T>(at..at + range.len())?;
    with_cuda(tensor, |device, values| {
        cuda_copy(&device.cuda_stream(), &values.slice(range), &mut out)
    })
}

/// Overwrites elements `range` by those of a buffer on the same device, or on the host.
pub(super) fn copy_from<T: Element>(
    tensor: &Tensor,
    range: Range<usize>,
    buffer: &Buffer,
    at: usize,
) -> Result<()> {
    let there = at..at + range.len();
    with_cuda_mut::<T, _>(tensor, |device, mut values| {
        let mut own = values.slice_mut(range);
        match buffer.is_cuda() {
            true => {
                let from = buffer.cuda()?.view(there)?;
                cuda_copy(&device.cuda_stream(), &from, &mut own)
            }
            false => cuda_upload(device, &buffer.as_slice()?[there], &mut own),
        }
    })
}

/// Writes elements `range` as little-endian bytes, piece by piece.
pub(super) fn write_le<T: Element>(
    tensor: &Tensor,
    range: Range<usize>,
    out: &mut dyn Write,
) -> io::Result<()> {
    let written = with_cuda::<T, _>(tensor, |device, values| {
        let values = values.slice(range);
        Ok(cuda_pieces(device, &values, |_, piece| {
            little_endian::write_le(piece, out)
        }))
    });
    written.map_err(io::Error::other)?
}

/// See [`Param::write_with`](super::Param::write_with).
pub(super) fn write_with<T: Element>(
    tensor: &Tensor,
    range: Range<usize>,
    f: impl FnMut(Range<usize>, &mut [T]) -> Result<()>,
) -> Result<()> {
    with_cuda_mut::<T, _>(tensor, |device, mut values| {
        cuda_write_with(device, values.slice_mut(range), f)
    })
}
