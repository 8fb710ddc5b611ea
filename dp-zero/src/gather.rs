//! After the step: every rank's updated slices to all ranks.

use std::collections::VecDeque;
use std::sync::Arc;

use dp_core::bucket::Bucket;
use dp_core::comm::{Collective, Pending, Request};
use dp_core::{BucketLayout, Buffer, Communicator, Param, Result};

/// Lends the flat buffers that parameters are gathered in.
pub(crate) trait GatherBuffers {
    /// True if the bucket can be lent a buffer within the memory bound.
    fn has_room(&self, bucket: &Bucket) -> bool;
    /// A buffer of the parameters' dtype and the bucket's padded length.
    fn lend(&mut self, index: usize, bucket: &Bucket) -> Result<Buffer>;
    /// Ends the loan.
    fn give_back(&mut self, index: usize, bucket: &Bucket, buffer: Buffer) -> Result<()>;
}

/// Buckets that are being gathered.
pub(crate) type InFlight = VecDeque<(usize, Pending)>;

/// All-gathers the parameters of each bucket from the ranks that own its slices, several buckets under way at a time.
pub(crate) fn gather_parameters(
    buffers: &mut dyn GatherBuffers,
    in_flight: &mut InFlight,
    layout: &BucketLayout,
    params: &[Param],
    comm: &dyn Communicator,
) -> Result<()> {
    let (rank, world_size) = (comm.rank(), layout.world_size());
    if world_size == 1 {
        return Ok(());
    }
    // After an error: nobody waits for what is left of it.
    in_flight.clear();
    for (index, bucket) in layout.buckets().iter().enumerate() {
        while !buffers.has_room(bucket) && finish_oldest(in_flight, buffers, layout, params, rank)?
        {
        }
        let mut buffer = buffers.lend(index, bucket)?;
        // Padding travels too; zeros keep what is sent defined.
        buffer.fill_zero(bucket.len()..bucket.padded_len)?;
        for segment in bucket.segments(bucket.slice(rank, world_size)) {
            params[segment.param_idx].copy_to(
                segment.in_param,
                &mut buffer,
                segment.in_bucket.start,
            )?;
        }
        let request = Request::new(Collective::AllGather, Arc::clone(&bucket.label));
        in_flight.push_back((index, comm.start(request, buffer)?));
        comm.progress();
    }
    while finish_oldest(in_flight, buffers, layout, params, rank)? {}
    Ok(())
}

/// False if none is in flight.
fn finish_oldest(
    in_flight: &mut InFlight,
    buffers: &mut dyn GatherBuffers,
    layout: &BucketLayout,
    params: &[Param],
    rank: usize,
) -> Result<bool> {
    let Some((index, pending)) = in_flight.pop_front() else {
        return Ok(false);
    };
    let (bucket, buffer) = (&layout.buckets()[index], pending.wait()?);
    // The own slice is there already: it was updated in place.
    let own = bucket.slice(rank, layout.world_size());
    let others = [0..own.start, own.end..bucket.padded_len];
    for segment in others.into_iter().flat_map(|range| bucket.segments(range)) {
        let param = &params[segment.param_idx];
        param.copy_from(segment.in_param, &buffer, segment.in_bucket.start)?;
    }
    buffers.give_back(index, bucket, buffer)?;
    Ok(true)
}
