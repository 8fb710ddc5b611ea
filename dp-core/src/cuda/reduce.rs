//! Collectives of ranks that share one device: their buffers are slices of the same memory.

use std::ops::Range;

use candle_core::DType;
use candle_core::cuda_backend::cudarc::driver::{CudaViewMut, DevicePtrMut, DeviceRepr};
use smallvec::SmallVec;

use super::args::{MAX_RANKS, ReduceArgs, op_code};
use super::kernels::{Kernels, same_len};
use super::sources::Kernel;
use crate::buffer::{Element, cuda_copy};
use crate::comm::ReduceOp;
use crate::error::{Error, Result};

impl Kernels {
    /// Reduces the slices of all ranks element by element, in rank order, and writes the results to the ranks `outputs`. f16 and
    /// bf16 are added in f32 and rounded once. All slices have the same length and do not overlap.
    ///
    /// All-reduce: the whole buffers, and all ranks as outputs. Reduce-scatter: for each rank `r` its slice of all buffers, and
    /// `r..r + 1`. One call serves all ranks; the others' streams must wait for it before they touch their buffers.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no rank or more than [`MAX_RANKS`], if lengths differ, and for the mean of integers;
    /// [`Error::Cuda`] if the driver refuses.
    pub fn reduce<T: Element + DeviceRepr>(
        &self,
        ranks: &mut [CudaViewMut<'_, T>],
        outputs: Range<usize>,
        op: ReduceOp,
    ) -> Result<()> {
        let len = ranks.first().map_or(0, |rank| rank.len());
        for rank in ranks.iter() {
            same_len("reduce", len, rank.len())?;
        }
        let stream = self.stream();
        let slices: SmallVec<[_; 8]> = ranks.iter_mut().map(|r| r.device_ptr_mut(stream)).collect();
        let addresses: SmallVec<[u64; 8]> = slices.iter().map(|(address, _)| *address).collect();
        // SAFETY: each rank's slice has `len` elements; exclusive views do not overlap; the guards live until the launch is
        // recorded.
        unsafe { self.reduce_at(T::DTYPE, &addresses, len, outputs, op) }
    }

    /// [`reduce`](Self::reduce) of `len` elements of `dtype` at the device addresses of all ranks, for callers that order the
    /// streams themselves.
    ///
    /// # Errors
    /// As [`reduce`](Self::reduce).
    ///
    /// # Safety
    /// The addresses are aligned for `dtype` and valid for reads and writes of `len` elements on this stream, from this call
    /// until the kernel has run; they do not overlap, and nobody else accesses them meanwhile.
    pub unsafe fn reduce_at(
        &self,
        dtype: DType,
        ranks: &[u64],
        len: usize,
        outputs: Range<usize>,
        op: ReduceOp,
    ) -> Result<()> {
        let world_size = ranks.len();
        if world_size == 0 || world_size > MAX_RANKS || outputs.end > world_size {
            let message = format!(
                "reduce of {world_size} ranks to ranks {outputs:?}: 1 to {MAX_RANKS} ranks can share a device"
            );
            return Err(Error::invalid("ranks on one device", message));
        }
        if op == ReduceOp::Mean && !dtype.is_float() {
            let message = format!("the mean of {} is no integer", dtype.as_str());
            return Err(Error::invalid("reduction", message));
        }
        let mut addresses = [0; MAX_RANKS];
        addresses[..world_size].copy_from_slice(ranks);
        let args = ReduceArgs {
            ranks: addresses,
            len: len as u64,
            world_size: world_size as u32,
            first_output: outputs.start as u32,
            end_output: outputs.end as u32,
            op: op_code(op),
        };
        // SAFETY: the caller's promise; the kernel reads and writes `len` elements of each rank.
        unsafe { self.launch(Kernel::of("reduce", dtype), len, &args) }
    }

    /// Copies the slice of the rank `source` to all others. All have the same length.
    ///
    /// Broadcast: the whole buffers. All-gather: for each rank `r` its slice of all buffers, from `r`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such rank or lengths differ; [`Error::Cuda`] if the driver refuses.
    pub fn broadcast<T: Element>(
        &self,
        ranks: &mut [CudaViewMut<'_, T>],
        source: usize,
    ) -> Result<()> {
        if source >= ranks.len() {
            let message = format!("broadcast from rank {source} of {}", ranks.len());
            return Err(Error::invalid("ranks on one device", message));
        }
        let (before, rest) = ranks.split_at_mut(source);
        let Some((from, after)) = rest.split_first_mut() else {
            return Ok(());
        };
        let from = from.as_view();
        for to in before.iter_mut().chain(after) {
            cuda_copy(self.stream(), &from, to)?;
        }
        Ok(())
    }
}
