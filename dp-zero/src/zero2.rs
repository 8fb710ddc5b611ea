//! Stage 2: optimizer state and gradients are sharded.

use std::ops::Range;

use candle_core::DType;
use dp_core::comm::Collective;
use dp_core::memory::{Category, Ledger};
use dp_core::strategy::Strategy;
use dp_core::{BucketLayout, Buffer, Communicator, Error, Param, ReduceOp, Result};

use crate::gather::{GatherBuffers, gather_parameters};
use crate::zero1::own_slices;

/// Buckets of full gradients that may exist at a time: one being filled, one being reduced.
const MAX_BUCKETS: usize = 2;

/// A full gradient lives only until its bucket is reduced: two transient bucket buffers serve all buckets in turn, and
/// of each reduction only the own slice is kept, in a shard. With several micro-batches each one is reduced and added to
/// the shards, as in DeepSpeed. The same buffers gather the parameters.
pub(crate) struct Zero2 {
    slices: Vec<Range<usize>>,
    shards: Vec<Buffer>,
    open: Vec<Option<Buffer>>,
    transient: TransientBuffers,
}

struct TransientBuffers {
    free: Vec<Buffer>,
    allocated: usize,
    padded_lens: Vec<usize>,
    ledger: Ledger,
}

impl Zero2 {
    pub(crate) fn new(layout: &BucketLayout, ledger: &Ledger, rank: usize) -> Result<Self> {
        let slices = own_slices(layout, rank);
        let shard =
            |s: &Range<usize>| Buffer::reserved(DType::F32, s.len(), ledger, Category::Gradients);
        Ok(Self {
            shards: slices.iter().map(shard).collect::<Result<_>>()?,
            slices,
            open: layout.buckets().iter().map(|_| None).collect(),
            transient: TransientBuffers {
                free: Vec::new(),
                allocated: 0,
                padded_lens: layout.buckets().iter().map(|b| b.padded_len).collect(),
                ledger: ledger.clone(),
            },
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
        self.open[bucket].is_some() || self.transient.has_room()
    }

    fn buffer(&mut self, bucket: usize) -> Result<&mut Buffer> {
        let slot = &mut self.open[bucket];
        match slot {
            Some(buffer) => Ok(buffer),
            None => Ok(slot.insert(self.transient.lend(bucket)?)),
        }
    }

    fn take(&mut self, bucket: usize) -> Result<Buffer> {
        self.open[bucket]
            .take()
            .ok_or_else(|| Error::misuse("gradient bucket", format!("bucket {bucket} is not open")))
    }

    fn reduced(&mut self, bucket: usize, buffer: Buffer, first: bool) -> Result<()> {
        let own = &buffer.as_slice::<f32>()?[self.slices[bucket].clone()];
        let shard = self.shards[bucket].as_mut_slice::<f32>()?;
        match first {
            true => shard.copy_from_slice(own),
            false => shard.iter_mut().zip(own).for_each(|(s, g)| *s += g),
        }
        self.transient.give_back(bucket, buffer);
        Ok(())
    }

    fn gradient(&self, bucket: usize) -> Result<&[f32]> {
        self.shards[bucket].as_slice()
    }

    fn gradient_mut(&mut self, bucket: usize) -> Result<&mut [f32]> {
        self.shards[bucket].as_mut_slice()
    }

    fn publish(
        &mut self,
        layout: &BucketLayout,
        params: &[Param],
        comm: &dyn Communicator,
    ) -> Result<()> {
        gather_parameters(&mut self.transient, layout, params, comm)
    }
}

impl TransientBuffers {
    fn has_room(&self) -> bool {
        !self.free.is_empty() || self.allocated < MAX_BUCKETS
    }
}

impl GatherBuffers for TransientBuffers {
    fn capacity(&self) -> usize {
        MAX_BUCKETS
    }

    fn lend(&mut self, bucket: usize) -> Result<Buffer> {
        let mut buffer = match self.free.pop() {
            Some(buffer) => buffer,
            None => {
                // Every buffer can hold the largest bucket, so that steps after the first allocate nothing.
                let capacity = self.padded_lens.iter().copied().max().unwrap_or(0);
                self.allocated += 1;
                Buffer::reserved(DType::F32, capacity, &self.ledger, Category::Communication)?
            }
        };
        buffer.resize(self.padded_lens[bucket]);
        Ok(buffer)
    }

    fn give_back(&mut self, _bucket: usize, buffer: Buffer) {
        if self.allocated > MAX_BUCKETS {
            // One more than usual was needed, because gradients appeared out of bucket order.
            self.allocated -= 1;
            drop(buffer);
        } else {
            self.free.push(buffer);
        }
    }
}
