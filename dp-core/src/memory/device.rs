//! Memory of a GPU, as its driver counts it.

use candle_core::Device;
use serde::{Deserialize, Serialize};

use crate::error::Result;

/// Bytes of this process in the memory of one GPU: of all its ranks there, and of all purposes. The ledgers of the ranks
/// ([`Ledger`](super::Ledger)) say what part of it the trainers hold; the rest is activations and temporaries.
///
/// PyTorch's `torch.cuda.memory_allocated`, `max_memory_allocated`, `memory_reserved` and `max_memory_reserved`, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct DeviceMemory {
    /// Allocated and not yet freed. What is freed counts until the device has done the work before it.
    pub used: u64,
    /// Highest `used` since [`reset_device_peak`].
    pub used_peak: u64,
    /// Taken from the GPU, including what the driver keeps to allocate again.
    pub reserved: u64,
    /// Highest `reserved` since [`reset_device_peak`].
    pub reserved_peak: u64,
    /// The GPU's memory.
    pub total: u64,
    /// True if the driver counts for this process (`cuMemPoolGetAttribute`). False on GPUs without memory pools: then all
    /// numbers are those of the whole GPU, other processes included (`cuMemGetInfo`), and peaks are the present values.
    pub of_this_process: bool,
}

/// What this process has allocated on `device`; `None` for the CPU, whose heap is [`HeapUsage`](super::HeapUsage).
///
/// It does not wait for the device.
///
/// # Errors
/// [`Error::Cuda`](crate::Error::Cuda) if the driver does not tell.
pub fn device_memory(device: &Device) -> Result<Option<DeviceMemory>> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => cuda::memory(device).map(Some),
        _ => Ok(None),
    }
}

/// Makes the present values of [`device_memory`] the peaks. Of the whole GPU: ranks that share one agree on who calls it.
///
/// # Errors
/// See [`device_memory`].
pub fn reset_device_peak(device: &Device) -> Result<()> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => cuda::reset_peak(device),
        _ => Ok(()),
    }
}

/// Lets the process keep what it frees on `device`, as PyTorch's caching allocator does. Otherwise the driver gives it back
/// whenever somebody waits for the device, which each step does, and takes it anew in the next one.
pub(crate) fn keep_freed_memory(device: &Device) -> Result<()> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(device) => cuda::keep_freed(device),
        _ => Ok(()),
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use candle_core::CudaDevice;
    use candle_core::cuda_backend::cudarc::driver::sys::{CUmemPool_attribute, CUmemoryPool};
    use candle_core::cuda_backend::cudarc::driver::{CudaContext, DriverError, result};

    use super::DeviceMemory;
    use crate::error::{Error, Result};

    pub fn memory(device: &CudaDevice) -> Result<DeviceMemory> {
        let stream = device.cuda_stream();
        let context = stream.context();
        read(context).map_err(|e| Error::cuda(context.ordinal(), "memory statistics", e))
    }

    pub fn reset_peak(device: &CudaDevice) -> Result<()> {
        let stream = device.cuda_stream();
        let context = stream.context();
        let peaks = [
            CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH,
            CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH,
        ];
        // The only value that a high-water mark may be set to. It then is what is in use.
        let reset = set(context, &peaks, 0);
        reset.map_err(|e| Error::cuda(context.ordinal(), "cuMemPoolSetAttribute", e))
    }

    pub fn keep_freed(device: &CudaDevice) -> Result<()> {
        let stream = device.cuda_stream();
        let context = stream.context();
        let kept = set(
            context,
            &[CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD],
            u64::MAX,
        );
        kept.map_err(|e| Error::cuda(context.ordinal(), "cuMemPoolSetAttribute", e))
    }

    fn read(context: &CudaContext) -> Result<DeviceMemory, DriverError> {
        let (free, total) = context.mem_get_info()?;
        if !context.has_async_alloc() {
            let used = (total - free) as u64;
            return Ok(DeviceMemory {
                used,
                used_peak: used,
                reserved: used,
                reserved_peak: used,
                total: total as u64,
                of_this_process: false,
            });
        }
        let pool = pool(context)?;
        let get = |attribute| attribute_of(pool, attribute);
        Ok(DeviceMemory {
            used: get(CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
            used_peak: get(CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
            reserved: get(CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
            reserved_peak: get(CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)?,
            total: total as u64,
            of_this_process: true,
        })
    }

    /// Sets attributes of the pool, where there is one.
    fn set(
        context: &CudaContext,
        attributes: &[CUmemPool_attribute],
        mut value: u64,
    ) -> Result<(), DriverError> {
        context.bind_to_thread()?;
        if !context.has_async_alloc() {
            return Ok(());
        }
        let pool = pool(context)?;
        attributes.iter().try_for_each(|attribute| {
            // SAFETY: the pool is the device's, which lives as long as its context; the value is a cuuint64_t, as the attributes
            // of this file ask for.
            unsafe { result::mem_pool::set_attribute(pool, *attribute, (&raw mut value).cast()) }
        })
    }

    /// The pool that `cuMemAllocAsync` takes from, and with it all allocations of Candle's.
    fn pool(context: &CudaContext) -> Result<CUmemoryPool, DriverError> {
        // SAFETY: the context's own device.
        unsafe { result::device::get_mem_pool(context.cu_device()) }
    }

    fn attribute_of(
        pool: CUmemoryPool,
        attribute: CUmemPool_attribute,
    ) -> Result<u64, DriverError> {
        let mut value = 0u64;
        // SAFETY: as in `set`.
        unsafe { result::mem_pool::get_attribute(pool, attribute, (&raw mut value).cast()) }?;
        Ok(value)
    }
}
