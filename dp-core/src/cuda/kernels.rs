//! [`Kernels`]: compiled kernels and the stream that they run on.

use std::sync::Arc;

use candle_core::cuda_backend::CudaDevice;
use candle_core::cuda_backend::cudarc::driver::{
    CudaStream, DeviceRepr, LaunchConfig, PushKernelArg,
};

use super::compile::{Functions, functions_of};
use super::sources::Kernel;
use crate::error::{Error, Result};
use crate::precision::Trainable;

/// The floats that kernels compute with: f32, f16, bf16.
pub(crate) trait CudaFloat: Trainable + DeviceRepr {}

impl<T: Trainable + DeviceRepr> CudaFloat for T {}

/// Threads of a block. The sources know it by the same name.
const THREADS: u32 = 256;

/// Elements that a thread takes at a time. The sources know it as `WIDTH`.
const WIDTH: usize = 4;

/// Blocks per multiprocessor: as many as can be resident with 256 threads each.
const BLOCKS_PER_MULTIPROCESSOR: u32 = 8;

/// The kernels of one device, to be run on one stream, in the order of the calls. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Kernels {
    stream: Arc<CudaStream>,
    functions: Arc<Functions>,
}

impl Kernels {
    /// Kernels that run on the stream of a Candle device, between the operations on its tensors. The first call for a device
    /// compiles them, which takes about a second.
    ///
    /// # Errors
    /// [`Error::Cuda`] if NVRTC does not compile a source, with its log, or the driver does not load the result.
    pub fn of(device: &CudaDevice) -> Result<Self> {
        Self::on(&device.cuda_stream())
    }

    /// [`of`](Self::of), on any stream of a device.
    pub fn on(stream: &Arc<CudaStream>) -> Result<Self> {
        Ok(Self {
            stream: Arc::clone(stream),
            functions: functions_of(stream.context())?,
        })
    }

    /// The stream.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Starts a kernel over `len` elements; nothing for 0.
    ///
    /// # Safety
    /// `args` is the structure that the kernel takes. Its addresses are valid for as many elements as the kernel reads and
    /// writes, in order on this stream, and what it writes is not read or written elsewhere meanwhile.
    pub(super) unsafe fn launch<A: DeviceRepr>(
        &self,
        kernel: Kernel,
        len: usize,
        args: &A,
    ) -> Result<()> {
        if len == 0 {
            return Ok(());
        }
        let function = self.functions.get(kernel)?;
        let needed = len.div_ceil(WIDTH).div_ceil(THREADS as usize);
        let resident = self.functions.num_multiprocessors() * BLOCKS_PER_MULTIPROCESSOR;
        let blocks = needed.min(resident as usize) as u32;
        let config = LaunchConfig {
            grid_dim: (blocks, 1, 1),
            block_dim: (THREADS, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: the caller's promise.
        let launched = unsafe {
            self.stream
                .launch_builder(function)
                .arg(args)
                .launch(config)
        };
        let ordinal = self.stream.context().ordinal();
        launched
            .map(drop)
            .map_err(|e| Error::cuda(ordinal, "cuLaunchKernel", e))
    }
}

/// All slices of a call have the length of the first one.
pub(super) fn same_len(call: &'static str, expected: usize, got: usize) -> Result<()> {
    if expected == got {
        return Ok(());
    }
    let message = format!("{call}: slices of {expected} and {got} elements; give equal lengths");
    Err(Error::invalid("device slices", message))
}
