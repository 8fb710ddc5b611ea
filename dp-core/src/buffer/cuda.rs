//! The memory of a [`Buffer`](super::Buffer) on a CUDA device.
//!
//! **Order.** All work on it is put on the stream of its device (a Candle [`CudaDevice`] has one), in the order of the calls,
//! without waiting for it. So two operations of one rank need no synchronisation between them, and the memory is freed, on
//! that stream too, after what was put there before. What other streams do with it is the business of the communicators,
//! which order it with events.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::cudarc::driver::{CudaSlice, CudaStream, CudaView, CudaViewMut};
use candle_core::{CudaDevice, CudaStorage, DType, DeviceLocation};

use super::{unsupported, wrong_type};
use crate::cuda::Kernels;
use crate::element::{Element, is_element, with_element};
use crate::error::{Error, Result};
use crate::precision::with_trainable;

/// Bytes that are copied between host and device at a time.
const PIECE: usize = 4 << 20;

/// A block of memory of a CUDA device, of which the first `len` elements are in use.
#[derive(Debug)]
pub(crate) struct CudaMemory {
    /// It may be longer than `len`.
    storage: CudaStorage,
    len: usize,
}

impl CudaMemory {
    /// Zeros.
    pub fn zeros(dtype: DType, len: usize, device: &CudaDevice) -> Result<Self> {
        if !is_element(dtype) {
            return Err(unsupported(dtype));
        }
        let storage = with_element!(dtype, T => {
            // Not every driver gives out blocks of no bytes.
            let zeros = device.cuda_stream().alloc_zeros::<T>(len.max(1));
            let zeros = zeros.map_err(|e| {
                let message = format!("{len} elements of {}: {e}", dtype.as_str());
                failed(device, "allocation", message)
            })?;
            CudaStorage::wrap_cuda_slice(zeros, device.clone())
        });
        Ok(Self { storage, len })
    }

    pub fn dtype(&self) -> DType {
        self.storage.dtype()
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn location(&self) -> DeviceLocation {
        self.storage.device.location()
    }

    pub fn device(&self) -> &CudaDevice {
        &self.storage.device
    }

    /// The stream on which all its work is.
    pub fn stream(&self) -> Arc<CudaStream> {
        self.storage.device.cuda_stream()
    }

    /// Elements `range`.
    pub fn view<T: Element>(&self, range: Range<usize>) -> Result<CudaView<'_, T>> {
        check_range(&range, self.len)?;
        Ok(self.slice()?.slice(range))
    }

    /// Elements `range`, to be written.
    pub fn view_mut<T: Element>(&mut self, range: Range<usize>) -> Result<CudaViewMut<'_, T>> {
        check_range(&range, self.len)?;
        Ok(self.slice_mut()?.slice_mut(range))
    }

    pub fn resize(&mut self, len: usize) -> Result<()> {
        let own = 0..self.len;
        with_element!(self.dtype(), T => {
            if len > self.slice::<T>()?.len() {
                let mut longer = Self::zeros(self.dtype(), len, self.device())?;
                let values = self.view::<T>(own.clone())?;
                copy(&self.stream(), &values, &mut longer.view_mut(own)?)?;
                *self = longer;
                return Ok(());
            }
        });
        self.len = len;
        self.fill_zero(own.end..len)
    }

    pub fn fill_zero(&mut self, range: Range<usize>) -> Result<()> {
        let device = self.device().clone();
        if range.is_empty() {
            return Ok(());
        }
        with_element!(self.dtype(), T => {
            let zeroed = device.cuda_stream().memset_zeros(&mut self.view_mut::<T>(range)?);
            zeroed.map_err(|e| failed(&device, "cuMemsetD8Async", e))
        })
    }

    /// Becomes a copy of elements `range` of `other`.
    pub fn copy_from(&mut self, other: &Self, range: Range<usize>) -> Result<()> {
        let (stream, own) = (self.stream(), 0..self.len);
        check_lengths(range.len(), own.len())?;
        with_element!(self.dtype(), T => {
            copy(&stream, &other.view::<T>(range)?, &mut self.view_mut::<T>(own)?)
        })
    }

    /// Adds elements `range` of `other`, in f32 and rounded once.
    pub fn add_from(&mut self, other: &Self, range: Range<usize>) -> Result<()> {
        let (kernels, own) = (Kernels::of(self.device())?, 0..self.len);
        with_trainable!(self.dtype(), T => {
            kernels.add::<T, T>(&other.view(range)?, &mut self.view_mut(own)?)
        })
    }

    /// A copy of elements `range`, once all work on them is done.
    pub fn to_vec<T: Element>(&self, range: Range<usize>) -> Result<Vec<T>> {
        let mut values = vec![T::ZERO; range.len()];
        download(self.device(), &self.view(range)?, &mut values)?;
        Ok(values)
    }

    /// Calls `f` with one piece of elements `range` after the other, copied to the host, and its positions in `range`.
    pub fn for_each_piece<T: Element>(
        &self,
        range: Range<usize>,
        f: impl FnMut(Range<usize>, &[T]) -> io::Result<()>,
    ) -> io::Result<()> {
        let values = self.view(range).map_err(io::Error::other)?;
        for_each_piece(self.device(), &values, f)
    }

    /// See [`Buffer::write_with`](super::Buffer::write_with).
    pub fn write_with<T: Element>(
        &mut self,
        range: Range<usize>,
        f: impl FnMut(Range<usize>, &mut [T]) -> Result<()>,
    ) -> Result<()> {
        let device = self.device().clone();
        write_with(&device, self.view_mut(range)?, f)
    }

    fn slice<T: Element>(&self) -> Result<&CudaSlice<T>> {
        let slice = self.storage.as_cuda_slice::<T>();
        slice.map_err(|_| wrong_type::<T>(self.dtype()))
    }

    fn slice_mut<T: Element>(&mut self) -> Result<&mut CudaSlice<T>> {
        let dtype = self.dtype();
        let slice = self.storage.as_cuda_slice_mut::<T>();
        slice.map_err(|_| wrong_type::<T>(dtype))
    }
}

/// Puts a copy on a stream of the device. Both have the same length.
pub(crate) fn copy<T: Element>(
    stream: &Arc<CudaStream>,
    from: &CudaView<'_, T>,
    to: &mut CudaViewMut<'_, T>,
) -> Result<()> {
    check_lengths(from.len(), to.len())?;
    if from.is_empty() {
        return Ok(());
    }
    let copied = stream.memcpy_dtod(from, to);
    copied.map_err(|e| Error::cuda(stream.context().ordinal(), "cuMemcpyDtoDAsync", e))
}

/// Copies to the host and waits for it, and so for all that the device's stream has to do before.
pub(crate) fn download<T: Element>(
    device: &CudaDevice,
    from: &CudaView<'_, T>,
    to: &mut [T],
) -> Result<()> {
    check_lengths(from.len(), to.len())?;
    if from.is_empty() {
        return Ok(());
    }
    let stream = device.cuda_stream();
    let copied = stream.memcpy_dtoh(from, to);
    // An asynchronous copy to pageable memory has ended when it returns, but CUDA promises so only for some devices.
    let copied = copied.and_then(|()| stream.synchronize());
    copied.map_err(|e| failed(device, "cuMemcpyDtoHAsync", e))
}

/// Copies to the device. `from` may be changed as soon as this returns.
pub(crate) fn upload<T: Element>(
    device: &CudaDevice,
    from: &[T],
    to: &mut CudaViewMut<'_, T>,
) -> Result<()> {
    check_lengths(from.len(), to.len())?;
    if from.is_empty() {
        return Ok(());
    }
    let stream = device.cuda_stream();
    let copied = stream.memcpy_htod(from, to);
    // As in `download`: nobody may change `from` while the device still reads it.
    let copied = copied.and_then(|()| stream.synchronize());
    copied.map_err(|e| failed(device, "cuMemcpyHtoDAsync", e))
}

/// See [`CudaMemory::for_each_piece`].
pub(crate) fn for_each_piece<T: Element>(
    device: &CudaDevice,
    from: &CudaView<'_, T>,
    mut f: impl FnMut(Range<usize>, &[T]) -> io::Result<()>,
) -> io::Result<()> {
    let mut piece = vec![T::ZERO; from.len().min(PIECE / size_of::<T>())];
    for at in pieces::<T>(from.len()) {
        let piece = &mut piece[..at.len()];
        download(device, &from.slice(at.clone()), piece).map_err(io::Error::other)?;
        f(at, piece)?;
    }
    Ok(())
}

/// See [`Buffer::write_with`](super::Buffer::write_with).
pub(crate) fn write_with<T: Element>(
    device: &CudaDevice,
    mut to: CudaViewMut<'_, T>,
    mut f: impl FnMut(Range<usize>, &mut [T]) -> Result<()>,
) -> Result<()> {
    let mut piece = vec![T::ZERO; to.len().min(PIECE / size_of::<T>())];
    for at in pieces::<T>(to.len()) {
        let piece = &mut piece[..at.len()];
        f(at.clone(), piece)?;
        upload(device, piece, &mut to.slice_mut(at))?;
    }
    Ok(())
}

/// The ranges of [`PIECE`] bytes that `len` elements consist of.
fn pieces<T>(len: usize) -> impl Iterator<Item = Range<usize>> {
    let step = PIECE / size_of::<T>();
    (0..len)
        .step_by(step)
        .map(move |start| start..(start + step).min(len))
}

fn check_range(range: &Range<usize>, len: usize) -> Result<()> {
    match range.start <= range.end && range.end <= len {
        true => Ok(()),
        false => Err(Error::invalid("range", format!("{range:?} of {len}"))),
    }
}

fn check_lengths(from: usize, to: usize) -> Result<()> {
    match from == to {
        true => Ok(()),
        false => Err(Error::invalid("copy", format!("{from} elements to {to}"))),
    }
}

pub(crate) fn failed(
    device: &CudaDevice,
    call: &'static str,
    error: impl std::fmt::Display,
) -> Error {
    Error::cuda(device.cuda_stream().context().ordinal(), call, error)
}
