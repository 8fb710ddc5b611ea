//! What distinguishes plain data parallelism from the ZeRO stages.

use std::ops::Range;

use crate::bucket::{Bucket, BucketLayout};
use crate::buffer::Buffer;
use crate::comm::{Collective, Communicator, ReduceOp};
use crate::error::Result;
use crate::memory::Category;
use crate::param::Param;
use crate::store::ParamStore;

pub use crate::buffer_pool::{BufferPool, BufferPools, PoolSize};

/// Decides where gradients lie, how they are reduced, which part of each bucket this rank updates, and how the updated
/// parameters reach the other ranks. The [`Engine`](crate::engine::Engine) does the rest, the same for all.
///
/// A bucket of full local gradients is *open* (being filled), then taken and reduced, then handed back:
/// `buffer` -> `take` -> (collective) -> `reduced` -> `gradient`.
pub trait Strategy: Send {
    /// Name for reports: `ddp`, `zero1`, `zero2`.
    fn name(&self) -> &'static str;

    /// The elements of `bucket` whose optimizer state this rank keeps, and whose parameters it updates.
    fn owned(&self, bucket: usize) -> Range<usize>;

    /// True if `owned` is a part: then norms are summed over ranks.
    fn is_sharded(&self) -> bool;

    /// The collective that reduces a bucket.
    fn reduction(&self, op: ReduceOp) -> Collective;

    /// True if full gradients do not survive a micro-batch, so each is reduced as it appears.
    fn reduces_every_micro_batch(&self) -> bool {
        false
    }

    /// True if `buffer(bucket)` is within the strategy's memory bound right now. If not, the engine waits for an
    /// earlier bucket first.
    fn has_room(&self, bucket: usize) -> bool {
        let _ = bucket;
        true
    }

    /// The full local gradients of `bucket`, opened if need be. The contents of a newly opened buffer are unspecified.
    ///
    /// # Errors
    /// If the buffer cannot be allocated.
    fn buffer(&mut self, bucket: usize) -> Result<&mut Buffer>;

    /// Gives the open buffer away, to be reduced.
    ///
    /// # Errors
    /// If the bucket is not open.
    fn take(&mut self, bucket: usize) -> Result<Buffer>;

    /// Takes the buffer back: its owned range holds the reduced gradient. `first`: of the first micro-batch that is
    /// reduced in this window, later ones add up.
    ///
    /// # Errors
    /// If the buffer does not fit.
    fn reduced(&mut self, bucket: usize, buffer: Buffer, first: bool) -> Result<()>;

    /// A buffer with the reduced gradient, and where in it that of the owned range lies.
    ///
    /// # Errors
    /// If the bucket is not reduced.
    fn gradient(&self, bucket: usize) -> Result<(&Buffer, Range<usize>)>;

    /// Called when this rank has updated the parameter elements of `bucket` that it owns: sends them on their way to the other
    /// ranks. For all buckets, in their order.
    ///
    /// # Errors
    /// Those of the collectives.
    fn publish(
        &mut self,
        bucket: usize,
        layout: &BucketLayout,
        params: &[Param],
        comm: &dyn Communicator,
    ) -> Result<()> {
        let _ = (bucket, layout, params, comm);
        Ok(())
    }

    /// Waits for all that is [published](Self::publish): then all parameters are whole on all ranks.
    ///
    /// # Errors
    /// Those of the collectives.
    fn finish_publishing(&mut self, layout: &BucketLayout, params: &[Param]) -> Result<()> {
        let _ = (layout, params);
        Ok(())
    }
}

/// Whole gradient buckets that live as long as the trainer: for data parallelism and ZeRO stage 1.
#[derive(Debug)]
pub struct FullBuckets {
    buffers: Vec<Option<Buffer>>,
}

impl FullBuckets {
    /// Allocates all buckets of `layout` on the device of `store`, entered as gradients in its ledger.
    ///
    /// # Errors
    /// If a buffer cannot be allocated.
    pub fn new(layout: &BucketLayout, store: &ParamStore) -> Result<Self> {
        let allocate = |bucket: &Bucket| {
            let (dtype, len) = (bucket.grad_dtype, bucket.padded_len);
            store.reserve(dtype, len, Category::Gradients).map(Some)
        };
        let buffers = layout
            .buckets()
            .iter()
            .map(allocate)
            .collect::<Result<_>>()?;
        Ok(Self { buffers })
    }

    /// The bucket's buffer.
    ///
    /// # Errors
    /// [`Error::Misuse`](crate::Error::Misuse) while it is being reduced.
    pub fn get(&self, bucket: usize) -> Result<&Buffer> {
        self.buffers[bucket].as_ref().ok_or_else(|| away(bucket))
    }

    /// The bucket's buffer, to be written.
    ///
    /// # Errors
    /// [`Error::Misuse`](crate::Error::Misuse) while it is being reduced.
    pub fn get_mut(&mut self, bucket: usize) -> Result<&mut Buffer> {
        self.buffers[bucket].as_mut().ok_or_else(|| away(bucket))
    }

    /// Gives the bucket's buffer away.
    ///
    /// # Errors
    /// [`Error::Misuse`](crate::Error::Misuse) while it is being reduced.
    pub fn take(&mut self, bucket: usize) -> Result<Buffer> {
        self.buffers[bucket].take().ok_or_else(|| away(bucket))
    }

    /// Takes the bucket's buffer back.
    pub fn put(&mut self, bucket: usize, buffer: Buffer) {
        self.buffers[bucket] = Some(buffer);
    }
}

fn away(bucket: usize) -> crate::Error {
    crate::Error::misuse(
        "gradient bucket",
        format!("bucket {bucket} is with the communicator: an earlier reduction failed"),
    )
}
