//! The memory that NCCL works on, and the order of that work on the device.
//!
//! **Streams.** The communicator has a stream of its own, so that reductions go on beside the kernels of backward, and another one
//! for copies of host buffers. Nothing on the copy stream ever waits for another rank.
//!
//! **Before.** What a buffer holds was computed on Candle's stream. The communicator's stream waits for an event that is
//! recorded there when the collective is started, so NCCL reads after everything that was put on Candle's stream before.
//!
//! **After.** The buffer is given back only when the host has seen the event behind NCCL's work. What is put on any stream later
//! comes after that. So Candle's stream never waits for another rank: a hanging collective would hang it, without a
//! deadline.
//!
//! **Between.** The buffer is owned by the collective: nobody can name its memory. A [`Pending`](crate::comm::Pending) that is
//! dropped leaves its memory with the communicator until the event has come.

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaEvent, CudaSlice, CudaStream, DevicePtrMut, DriverError,
};
use candle_core::{CudaDevice, DeviceLocation};

use super::library::Library;
use crate::buffer::{Buffer, Element, with_element};
use crate::comm::Request;
use crate::error::{Error, Result};

/// The streams of one rank's communicator.
#[derive(Debug)]
pub(super) struct Streams {
    context: Arc<CudaContext>,
    work: Arc<CudaStream>,
    copies: Arc<CudaStream>,
}

/// A collective that the device has been given.
#[derive(Debug)]
pub(super) struct Work {
    memory: Memory,
    /// Behind NCCL's kernels, on their stream; `None` if they may not be there, since it has failed to put them there.
    done: Option<CudaEvent>,
}

#[derive(Debug)]
enum Memory {
    InPlace(Buffer),
    /// The host's buffer, and its bytes on the device.
    Staged(Buffer, CudaSlice<u8>),
}

impl Streams {
    pub fn new(device: &CudaDevice) -> Result<Self> {
        let context = Arc::clone(device.cuda_stream().context());
        let failed = |e| failed(&context, "cuStreamCreate", e);
        Ok(Self {
            work: context.new_stream().map_err(failed)?,
            copies: context.new_stream().map_err(failed)?,
            context,
        })
    }

    /// NCCL's calls are about the device whose context is bound to the calling thread.
    pub fn bind(&self) -> Result<()> {
        let bound = self.context.bind_to_thread();
        bound.map_err(|e| failed(&self.context, "cuCtxSetCurrent", e))
    }

    pub fn ordinal(&self) -> usize {
        self.context.ordinal()
    }

    /// Gives a collective to the device. `settle` returns when NCCL has put it on the stream.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a buffer on another device; [`Error::Cuda`], [`Error::Nccl`]; what `settle` says. If NCCL may
    /// have the buffer's address then, the work comes with the error, to be kept until the communicator is aborted.
    pub fn start(
        &self,
        library: &Library,
        request: &Request,
        buffer: Buffer,
        world_size: usize,
        settle: &dyn Fn() -> Result<()>,
    ) -> Result<Work, Box<(Error, Option<Work>)>> {
        let shape = (buffer.dtype(), buffer.len());
        let placed = self.bind().and_then(|()| self.place(buffer));
        let mut memory = placed.map_err(|e| Box::new((e, None)))?;
        let enqueue = |pointer| {
            // SAFETY: the pointer is that of memory with these elements, which `Work` owns; it is kept until the work is done, or the
            // communicator aborted. The module's text says why nobody else touches it.
            unsafe { library.enqueue(request, pointer, shape, world_size, &self.work)? };
            settle()
        };
        let put = match &mut memory {
            Memory::InPlace(buffer) => with_element!(shape.0, T => {
                buffer.cuda_mut().and_then(|memory| {
                    let mut view = memory.view_mut::<T>(0..shape.1)?;
                    // The guard notes NCCL's work on the memory, once it is on the stream: cudarc frees it behind that.
                    let (pointer, _guard) = view.device_ptr_mut(&self.work);
                    enqueue(pointer)
                })
            }),
            Memory::Staged(_, bytes) => {
                let (pointer, _guard) = bytes.device_ptr_mut(&self.work);
                enqueue(pointer)
            }
        };
        let done = put.and_then(|()| {
            let recorded = self.work.record_event(None);
            recorded.map_err(|e| failed(&self.context, "cuEventRecord", e))
        });
        match done {
            Ok(done) => Ok(Work {
                memory,
                done: Some(done),
            }),
            Err(e) => Err(Box::new((e, Some(Work { memory, done: None })))),
        }
    }

    /// Makes the buffer's elements reachable for NCCL, behind all that was to be done with them before.
    fn place(&self, buffer: Buffer) -> Result<Memory> {
        match buffer.location() {
            DeviceLocation::Cpu => {
                let bytes = with_element!(buffer.dtype(), T => bytes_of(buffer.as_slice::<T>()?));
                let copied = self.copies.clone_htod(bytes);
                // The copy is through, so the other stream need not wait for it.
                let copied = copied.and_then(|b| self.copies.synchronize().map(|()| b));
                let copied = copied.map_err(|e| failed(&self.context, "cuMemcpyHtoDAsync", e))?;
                Ok(Memory::Staged(buffer, copied))
            }
            DeviceLocation::Cuda { gpu_id } if gpu_id == self.ordinal() => {
                let joined = self.work.join(&buffer.cuda()?.stream());
                joined.map_err(|e| failed(&self.context, "cuStreamWaitEvent", e))?;
                Ok(Memory::InPlace(buffer))
            }
            other => Err(Error::invalid(
                "buffer",
                format!(
                    "it lies on {other:?}, but this rank's GPU is number {}; make it on Rank::device",
                    self.ordinal()
                ),
            )),
        }
    }

    /// Gives the buffer back. The work must be done.
    pub fn finish(&self, work: Work) -> Result<Buffer> {
        match work.memory {
            Memory::InPlace(buffer) => Ok(buffer),
            Memory::Staged(mut buffer, bytes) => {
                let target =
                    with_element!(buffer.dtype(), T => bytes_of_mut(buffer.as_mut_slice::<T>()?));
                let copied = self.copies.memcpy_dtoh(&bytes, target);
                let copied = copied.and_then(|()| self.copies.synchronize());
                copied.map_err(|e| failed(&self.context, "cuMemcpyDtoHAsync", e))?;
                Ok(buffer)
            }
        }
    }
}

impl Work {
    /// True once NCCL's kernels have ended.
    ///
    /// # Errors
    /// [`Error::Cuda`] for what has gone wrong on the device.
    pub fn is_done(&self) -> Result<bool> {
        let Some(event) = &self.done else {
            return Ok(false);
        };
        let done = event.try_is_complete();
        done.map_err(|e| failed(event.context(), "cuEventQuery", e))
    }
}

fn bytes_of<T: Element>(values: &[T]) -> &[u8] {
    // SAFETY: elements are plain numbers, without padding, and bytes have no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

fn bytes_of_mut<T: Element>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and every bit pattern is a number.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

fn failed(context: &CudaContext, call: &'static str, error: DriverError) -> Error {
    Error::cuda(context.ordinal(), call, error)
}
