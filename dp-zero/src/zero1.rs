//! Stage 1: optimizer state is sharded.

use std::ops::Range;

use dp_core::comm::Collective;
use dp_core::memory::Ledger;
use dp_core::strategy::{FullBuckets, Strategy};
use dp_core::{BucketLayout, Buffer, Communicator, Param, ReduceOp, Result};

use crate::gather::gather_parameters;

/// Whole gradient buckets live on every rank; a reduce-scatter leaves the mean gradient of slice `r` on rank `r`, which
/// updates it; an all-gather in the same buckets makes the parameters whole again.
pub(crate) struct Zero1 {
    slices: Vec<Range<usize>>,
    gradients: FullBuckets,
}

impl Zero1 {
    pub(crate) fn new(layout: &BucketLayout, ledger: &Ledger, rank: usize) -> Result<Self> {
        Ok(Self {
            slices: own_slices(layout, rank),
            gradients: FullBuckets::new(layout, ledger)?,
        })
    }
}

/// The range of each bucket that `rank` owns.
pub(crate) fn own_slices(layout: &BucketLayout, rank: usize) -> Vec<Range<usize>> {
    let slice = |b: &dp_core::bucket::Bucket| b.slice(rank, layout.world_size());
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

    fn gradient(&self, bucket: usize) -> Result<&[f32]> {
        Ok(&self.gradients.get(bucket)?.as_slice()?[self.slices[bucket].clone()])
    }

    fn gradient_mut(&mut self, bucket: usize) -> Result<&mut [f32]> {
        let slice = self.slices[bucket].clone();
        Ok(&mut self.gradients.get_mut(bucket)?.as_mut_slice()?[slice])
    }

    fn publish(
        &mut self,
        layout: &BucketLayout,
        params: &[Param],
        comm: &dyn Communicator,
    ) -> Result<()> {
        gather_parameters(&mut self.gradients, layout, params, comm)
    }
}
