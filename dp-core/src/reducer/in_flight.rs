//! Buckets from launch to completion.

use std::sync::Arc;
use std::time::Instant;

use tracing::Span;
use tracing::field::Empty;

use super::State;
use crate::buffer::Buffer;
use crate::comm::{Communicator, Pending, ReduceOp, Request};
use crate::error::Result;
use crate::precision::convert_buffer;
use crate::trace::{overlapping, phase};

/// A bucket that is being reduced.
pub(super) struct InFlight {
    bucket: usize,
    pending: Pending,
    launched: Instant,
    /// Open until the reduction is complete.
    span: Span,
    /// The bucket's own buffer, if a converted copy of it is on its way.
    kept: Option<Buffer>,
}

impl State {
    pub fn launch_rest(&mut self) -> Result<()> {
        while self.next_launch < self.layout.buckets().len() {
            self.launch_next()?;
        }
        Ok(())
    }

    pub fn launch_next(&mut self) -> Result<()> {
        let index = self.next_launch;
        self.make_room(index)?;
        self.collect_while(|state| state.wire.as_ref().is_some_and(|(_, p)| !p.has_room()))?;
        let bucket = &self.layout.buckets()[index];
        let values = self.strategy.buffer(index)?;
        for slot in bucket.slots.iter().filter(|s| !self.written[s.param_idx]) {
            values.fill_zero(slot.range.clone())?;
        }
        values.fill_zero(bucket.len()..bucket.padded_len)?;
        let (label, padded_len) = (Arc::clone(&bucket.label), bucket.padded_len);
        let own = self.strategy.take(index)?;
        let (buffer, kept) = match &mut self.wire {
            Some((dtype, pool)) if *dtype != own.dtype() => {
                let mut converted = pool.lend(padded_len)?;
                convert_buffer(&own, &mut converted)?;
                (converted, Some(own))
            }
            _ => (own, None),
        };
        let collective = self.strategy.reduction(ReduceOp::Mean);
        let launched = Instant::now();
        let span = overlapping!(
            "reduction",
            self.comm.rank(),
            self.at.0,
            micro_batch = self.at.1,
            bucket = index,
            bytes = padded_len * buffer.dtype().size_in_bytes(),
            op = %collective,
            completed_ns_ago = Empty
        );
        let pending = self.comm.start(Request::new(collective, label), buffer);
        let pending = self.remember(pending)?;
        self.in_flight.push_back(InFlight {
            bucket: index,
            pending,
            launched,
            span,
            kept,
        });
        self.next_launch += 1;
        self.collect_while(|state| !state.overlap)?;
        Ok(())
    }

    /// Keeps the strategy's memory bound: waits for earlier buckets before another one is opened. Where gradients
    /// appear in another order than the buckets', there may be none to wait for; then the bound gives way.
    pub fn make_room(&mut self, bucket: usize) -> Result<()> {
        self.collect_while(|state| !state.strategy.has_room(bucket))?;
        if !self.strategy.has_room(bucket) && !std::mem::replace(&mut self.warned_order, true) {
            tracing::warn!(
                "gradients appear in another order than the buckets', so {} holds more buckets than it means to; create \
                 the parameters in the order in which the model uses them. This is said once.",
                self.strategy.name()
            );
        }
        Ok(())
    }

    /// Waits for buckets in flight until `blocked` is false or none is left: backward cannot go on before.
    fn collect_while(&mut self, blocked: impl Fn(&Self) -> bool) -> Result<()> {
        if blocked(self) {
            let _span = phase!("wait_in_backward", self.comm.rank(), self.at.0);
            while blocked(self) && self.collect_oldest()? {}
        }
        Ok(())
    }

    /// Takes back finished buckets, without waiting.
    pub fn collect_done(&mut self) -> Result<()> {
        while self.in_flight.front().is_some_and(|f| f.pending.is_done()) {
            self.collect_oldest()?;
        }
        Ok(())
    }

    /// Waits for the oldest bucket in flight; false if there is none.
    pub fn collect_oldest(&mut self) -> Result<bool> {
        let Some(InFlight {
            bucket,
            pending,
            launched,
            span,
            kept,
        }) = self.in_flight.pop_front()
        else {
            return Ok(false);
        };
        let (outcome, completed) = pending.wait_and_when();
        span.record("completed_ns_ago", completed.elapsed().as_nanos() as u64);
        drop(span);
        self.reductions.add(launched, completed);
        let mut buffer = self.remember(outcome)?;
        if let (Some(mut own), Some((_, pool))) = (kept, &mut self.wire) {
            convert_buffer(&buffer, &mut own)?;
            pool.give_back(std::mem::replace(&mut buffer, own));
        }
        let first = !std::mem::replace(&mut self.reduced[bucket], true);
        self.strategy.reduced(bucket, buffer, first)?;
        Ok(true)
    }
}
