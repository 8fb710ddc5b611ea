//! Stage 2: optimizer state and gradients are sharded.

use std::ops::Range;

use candle_core::DType;
use dp_core::bucket::Bucket;
use dp_core::comm::Collective;
use dp_core::memory::Category;
use dp_core::strategy::{BufferPools, PoolSize, Strategy};
use dp_core::{BucketLayout, Buffer, Communicator, Error, Param, ParamStore, ReduceOp, Result};

use crate::gather::{GatherBuffers, InFlight, finish_gathering, start_gathering};
use crate::zero1::own_slices;

/// A full gradient lives only until its bucket is reduced: two transient bucket buffers serve all buckets in turn, and
/// of each reduction only the own slice is kept, in a shard. With several micro-batches each one is reduced and added to
/// the shards, as in DeepSpeed. The same buffers gather the parameters.
pub(crate) struct Zero2 {
    slices: Vec<Range<usize>>,
    shards: Vec<Buffer>,
    open: Vec<Option<Buffer>>,
    /// The dtype of each bucket's gradients, and its length with padding.
    buckets: Vec<(DType, usize)>,
    transient: BufferPools,
    in_flight: InFlight,
}

impl Zero2 {
    pub(crate) fn new(layout: &BucketLayout, store: &ParamStore, rank: usize) -> Result<Self> {
        let slices = own_slices(layout, rank);
        let shards = layout
            .buckets()
            .iter()
            .zip(&slices)
            .map(|(b, slice)| store.reserve(b.grad_dtype, slice.len(), Category::Gradients));
        let bucket = |b: &Bucket| (b.grad_dtype, b.padded_len);
        Ok(Self {
            shards: shards.collect::<Result<_>>()?,
            slices,
            buckets: layout.buckets().iter().map(bucket).collect(),
            open: layout.buckets().iter().map(|_| None).collect(),
            transient: BufferPools::new(&PoolSize::to_reduce_and_gather(layout), store)?,
            in_flight: InFlight::new(),
        })
    }
}

impl Strategy for Zero2 {
    fn name(&self) -> &'static str {
        "zero2"
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

    fn reduces_every_micro_batch(&self) -> bool {
        true
    }

    fn has_room(&self, bucket: usize) -> bool {
        self.open[bucket].is_some() || self.transient.has_room(self.buckets[bucket].0)
    }

    fn buffer(&mut self, bucket: usize) -> Result<&mut Buffer> {
        let slot = &mut self.open[bucket];
        let (dtype, len) = self.buckets[bucket];
        match slot {
            Some(buffer) => Ok(buffer),
            None => Ok(slot.insert(self.transient.lend(dtype, len)?)),
        }
    }

    fn take(&mut self, bucket: usize) -> Result<Buffer> {
        self.open[bucket]
            .take()
            .ok_or_else(|| Error::misuse("gradient bucket", format!("bucket {bucket} is not open")))
    }

    fn reduced(&mut self, bucket: usize, buffer: Buffer, first: bool) -> Result<()> {
        let (own, shard) = (self.slices[bucket].clone(), &mut self.shards[bucket]);
        match first {
            true => shard.copy_from(&buffer, own)?,
            false => shard.add_from(&buffer, own)?,
        }
        self.transient.give_back(buffer)
    }

    fn gradient(&self, bucket: usize) -> Result<(&Buffer, Range<usize>)> {
        let shard = &self.shards[bucket];
        Ok((shard, 0..shard.len()))
    }

    fn publish(
        &mut self,
        bucket: usize,
        layout: &BucketLayout,
        params: &[Param],
        comm: &dyn Communicator,
    ) -> Result<()> {
        let (buffers, in_flight) = (&mut self.transient, &mut self.in_flight);
        start_gathering(buffers, in_flight, (layout, bucket), params, comm)
    }

    fn finish_publishing(&mut self, layout: &BucketLayout, params: &[Param]) -> Result<()> {
        finish_gathering(&mut self.transient, &mut self.in_flight, layout, params)
    }
}

/// Updated parameters are gathered in the same buffers that gradients were reduced in, or in others of their dtype.
impl GatherBuffers for BufferPools {
    fn has_room(&self, bucket: &Bucket) -> bool {
        BufferPools::has_room(self, bucket.dtype)
    }

    fn lend(&mut self, _index: usize, bucket: &Bucket) -> Result<Buffer> {
        BufferPools::lend(self, bucket.dtype, bucket.padded_len)
    }

    fn give_back(&mut self, _index: usize, _bucket: &Bucket, buffer: Buffer) -> Result<()> {
        BufferPools::give_back(self, buffer)
    }
}
