//! After the step: every rank's updated slices to all ranks.

use std::collections::VecDeque;
use std::sync::Arc;

use dp_core::bucket::Bucket;
use dp_core::comm::Gathering;
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

/// Buckets that are being gathered, oldest first.
pub(crate) type InFlight = VecDeque<(usize, Gathering)>;

/// Starts to gather the parameters of bucket `index` from the ranks that own its slices.
pub(crate) fn start_gathering(
    buffers: &mut dyn GatherBuffers,
    in_flight: &mut InFlight,
    (layout, index): (&BucketLayout, usize),
    params: &[Param],
    comm: &dyn Communicator,
) -> Result<()> {
    let (rank, world_size) = (comm.rank(), layout.world_size());
    if world_size == 1 {
        return Ok(());
    }
    // What is left of a step that failed: nobody waits for it.
    in_flight.retain(|(earlier, _)| *earlier < index);
    let bucket = &layout.buckets()[index];
    while !buffers.has_room(bucket) && finish_oldest(buffers, in_flight, layout, params)? {}
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
    let gathering = comm.all_gather_reading(buffer, Arc::clone(&bucket.label))?;
    in_flight.push_back((index, gathering));
    comm.progress();
    Ok(())
}

/// Waits for all buckets that are being gathered: after that the parameters are whole.
pub(crate) fn finish_gathering(
    buffers: &mut dyn GatherBuffers,
    in_flight: &mut InFlight,
    layout: &BucketLayout,
    params: &[Param],
) -> Result<()> {
    while finish_oldest(buffers, in_flight, layout, params)? {}
    Ok(())
}

/// False if none is in flight.
fn finish_oldest(
    buffers: &mut dyn GatherBuffers,
    in_flight: &mut InFlight,
    layout: &BucketLayout,
    params: &[Param],
) -> Result<bool> {
    let Some((index, gathering)) = in_flight.pop_front() else {
        return Ok(false);
    };
    let bucket = &layout.buckets()[index];
    // The own slice is there already: it was updated in place.
    let buffer = gathering.wait(|slice, values| {
        for segment in bucket.segments(slice) {
            let param = &params[segment.param_idx];
            param.copy_from(segment.in_param, values, segment.in_bucket.start)?;
        }
        Ok(())
    })?;
    buffers.give_back(index, bucket, buffer)?;
    Ok(true)
}
