//! After the step: every rank's updated slices to all ranks.

use std::collections::VecDeque;
use std::sync::Arc;

use dp_core::comm::{Collective, Pending, Request};
use dp_core::strategy::FullBuckets;
use dp_core::{BucketLayout, Buffer, Communicator, Param, Result};

/// Lends the flat buffers that parameters are gathered in.
pub(crate) trait GatherBuffers {
    /// How many may be lent at a time.
    fn capacity(&self) -> usize;
    /// A buffer of the bucket's padded length.
    fn lend(&mut self, bucket: usize) -> Result<Buffer>;
    /// Ends the loan.
    fn give_back(&mut self, bucket: usize, buffer: Buffer);
}

/// The gradient buckets themselves: after the step their gradients have served, and they have the right length.
impl GatherBuffers for FullBuckets {
    fn capacity(&self) -> usize {
        usize::MAX
    }

    fn lend(&mut self, bucket: usize) -> Result<Buffer> {
        self.take(bucket)
    }

    fn give_back(&mut self, bucket: usize, buffer: Buffer) {
        self.put(bucket, buffer);
    }
}

/// All-gathers the parameters of each bucket from the ranks that own its slices, several buckets under way at a time.
pub(crate) fn gather_parameters(
    buffers: &mut dyn GatherBuffers,
    layout: &BucketLayout,
    params: &[Param],
    comm: &dyn Communicator,
) -> Result<()> {
    let (rank, world_size) = (comm.rank(), layout.world_size());
    let mut in_flight: VecDeque<(usize, Pending)> = VecDeque::new();
    for (index, bucket) in layout.buckets().iter().enumerate() {
        if in_flight.len() >= buffers.capacity() {
            finish_oldest(&mut in_flight, buffers, layout, params)?;
        }
        let mut buffer = buffers.lend(index)?;
        let values = buffer.as_mut_slice::<f32>()?;
        let owned = bucket.slice(rank, world_size);
        // Padding travels too; zeros keep what is sent defined.
        values[bucket.len()..].fill(0.0);
        for segment in bucket.segments(owned) {
            params[segment.param_idx].read(segment.in_param, &mut values[segment.in_bucket])?;
        }
        let request = Request::new(Collective::AllGather, Arc::clone(&bucket.label));
        in_flight.push_back((index, comm.start(request, buffer)?));
        comm.progress();
    }
    while !in_flight.is_empty() {
        finish_oldest(&mut in_flight, buffers, layout, params)?;
    }
    Ok(())
}

fn finish_oldest(
    in_flight: &mut VecDeque<(usize, Pending)>,
    buffers: &mut dyn GatherBuffers,
    layout: &BucketLayout,
    params: &[Param],
) -> Result<()> {
    let Some((index, pending)) = in_flight.pop_front() else {
        return Ok(());
    };
    let buffer = pending.wait()?;
    let values = buffer.as_slice::<f32>()?;
    for slot in &layout.buckets()[index].slots {
        let param = &params[slot.param_idx];
        param.write(0..param.num_elements(), &values[slot.range.clone()])?;
    }
    buffers.give_back(index, buffer);
    Ok(())
}
