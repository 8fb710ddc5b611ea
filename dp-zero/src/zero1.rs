//! Stage 1: optimizer state is sharded.

use std::ops::Range;

use dp_core::bucket::Bucket;
use dp_core::comm::Collective;
use dp_core::strategy::{BufferPools, FullBuckets, PoolSize, Strategy};
use dp_core::{BucketLayout, Buffer, Communicator, Param, ParamStore, ReduceOp, Result};

use crate::gather::{GatherBuffers, InFlight, finish_gathering, start_gathering};

/// Whole gradient buckets live on every rank; a reduce-scatter leaves the mean gradient of slice `r` on rank `r`, which
/// updates it; an all-gather in the same buckets makes the parameters whole again.
pub(crate) struct Zero1 {
    slices: Vec<Range<usize>>,
    gradients: FullBuckets,
    /// For parameters of another dtype than their gradients.
    pools: BufferPools,
    in_flight: InFlight,
}

impl Zero1 {
    pub(crate) fn new(layout: &BucketLayout, store: &ParamStore, rank: usize) -> Result<Self> {
        Ok(Self {
            slices: own_slices(layout, rank),
            gradients: FullBuckets::new(layout, store)?,
            pools: BufferPools::new(&PoolSize::to_gather(layout), store)?,
            in_flight: InFlight::new(),
        })
    }

    fn gather_buffers(&mut self) -> (GatherInGradients<'_>, &mut InFlight) {
        let buffers = GatherInGradients {
            gradients: &mut self.gradients,
            pools: &mut self.pools,
        };
        (buffers, &mut self.in_flight)
    }
}

/// The range of each bucket that `rank` owns.
pub(crate) fn own_slices(layout: &BucketLayout, rank: usize) -> Vec<Range<usize>> {
    let slice = |b: &Bucket| b.slice(rank, layout.world_size());
    layout.buckets().iter().map(slice).collect()
}

impl Strategy for Zero1 {
    fn name(&self) -> &'static str {
        "zero1"
    }

    fn owned(&self, bucket: usize) -> Range<usize> {
        self.slices[bucket].clone()
    }

    fn is_sharded(&self) -> bool {
        true
    }

    fn reduction(&self, op: ReduceOp) -> Collective {
        Collective::ReduceScatter(op)
    }

    fn buffer(&mut self, bucket: usize) -> Result<&mut Buffer> {
        self.gradients.get_mut(bucket)
    }

    fn take(&mut self, bucket: usize) -> Result<Buffer> {
        self.gradients.take(bucket)
    }

    fn reduced(&mut self, bucket: usize, buffer: Buffer, _first: bool) -> Result<()> {
        self.gradients.put(bucket, buffer);
        Ok(())
    }

    fn gradient(&self, bucket: usize) -> Result<(&Buffer, Range<usize>)> {
        Ok((self.gradients.get(bucket)?, self.owned(bucket)))
    }

    fn publish(
        &mut self,
        bucket: usize,
        layout: &BucketLayout,
        params: &[Param],
        comm: &dyn Communicator,
    ) -> Result<()> {
        let (mut buffers, in_flight) = self.gather_buffers();
        start_gathering(&mut buffers, in_flight, (layout, bucket), params, comm)
    }

    fn finish_publishing(&mut self, layout: &BucketLayout, params: &[Param]) -> Result<()> {
        let (mut buffers, in_flight) = self.gather_buffers();
        finish_gathering(&mut buffers, in_flight, layout, params)
    }
}

/// Parameters are gathered in their gradients' buffers where the dtype is the same: after the step these have served.
struct GatherInGradients<'a> {
    gradients: &'a mut FullBuckets,
    pools: &'a mut BufferPools,
}

impl GatherBuffers for GatherInGradients<'_> {
    fn has_room(&self, bucket: &Bucket) -> bool {
        bucket.grad_dtype == bucket.dtype || self.pools.has_room(bucket.dtype)
    }

    fn lend(&mut self, index: usize, bucket: &Bucket) -> Result<Buffer> {
        match bucket.grad_dtype == bucket.dtype {
            true => self.gradients.take(index),
            false => self.pools.lend(bucket.dtype, bucket.padded_len),
        }
    }

    fn give_back(&mut self, index: usize, bucket: &Bucket, buffer: Buffer) -> Result<()> {
        if bucket.grad_dtype == bucket.dtype {
            self.gradients.put(index, buffer);
            return Ok(());
        }
        self.pools.give_back(buffer)
    }
}
