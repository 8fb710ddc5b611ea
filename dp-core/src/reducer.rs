//! Gradients on their way: from the hooks into buckets, and through the collectives while backward is running.
//!
//! States of a bucket within one backward: *filling* (gradients are copied in as their hooks fire) -> *in flight*
//! (taken by the communicator, in bucket order on all ranks) -> *reduced*. A bucket is launched when all its
//! gradients are there and all buckets before it are launched; what is left at the end of backward, because a
//! parameter was not used, is launched then, with zeros for what is missing.

use std::collections::VecDeque;
use std::sync::Arc;

use candle_core::Tensor;
use parking_lot::Mutex;

use crate::bucket::BucketLayout;
use crate::buffer::Buffer;
use crate::comm::{Collective, Communicator, Pending, ReduceOp, Request};
use crate::error::{Error, Result};
use crate::param::{GradientSink, read_values};
use crate::store::Param;
use crate::strategy::Strategy;

/// The hook's end of a trainer: it owns the gradients between backward and step.
pub(crate) struct Reducer(Mutex<State>);

struct State {
    comm: Arc<dyn Communicator>,
    layout: Arc<BucketLayout>,
    params: Arc<[Param]>,
    /// Positions in `params` in the order that all ranks share: what ranks send each other per parameter goes in it.
    order: Vec<usize>,
    strategy: Box<dyn Strategy>,
    /// Some while backward runs: whether its gradients are reduced, and the divisor of their sum.
    running: Option<Run>,
    /// The error of a hook: Candle's backward would turn it into text.
    hook_error: Option<Error>,
    /// Per parameter: its gradient has appeared in this backward.
    arrived: Vec<bool>,
    /// Per parameter: the open buffer holds a gradient of it.
    written: Vec<bool>,
    /// Per parameter: used by this rank in this window; after `settle`, by any rank.
    used: Vec<bool>,
    /// Per bucket: gradients that have not appeared in this backward.
    missing: Vec<usize>,
    next_launch: usize,
    in_flight: VecDeque<(usize, Pending)>,
    /// Per bucket: it has been reduced in this window; a further micro-batch adds to it.
    reduced: Vec<bool>,
    used_flags: Option<Pending>,
}

#[derive(Clone, Copy)]
struct Run {
    reduce: bool,
    divisor: f64,
}

impl GradientSink for Reducer {
    fn gradient_ready(&self, param_idx: usize, grad: &Tensor) -> Result<()> {
        let mut state = self.0.lock();
        let result = state.accept(param_idx, grad);
        if let Err(error) = &result {
            state.hook_error = Some(error.clone());
        }
        result
    }
}

impl Reducer {
    pub fn new(
        comm: Arc<dyn Communicator>,
        layout: Arc<BucketLayout>,
        params: Arc<[Param]>,
        order: Vec<usize>,
        strategy: Box<dyn Strategy>,
    ) -> Self {
        let (num_params, num_buckets) = (params.len(), layout.buckets().len());
        Self(Mutex::new(State {
            comm,
            layout,
            params,
            order,
            strategy,
            running: None,
            hook_error: None,
            arrived: vec![false; num_params],
            written: vec![false; num_params],
            used: vec![false; num_params],
            missing: vec![0; num_buckets],
            next_launch: 0,
            in_flight: VecDeque::new(),
            reduced: vec![false; num_buckets],
            used_flags: None,
        }))
    }

    /// Runs `loss.backward()`, with hooks that fill the buckets. `reduce`: the last micro-batch of its window.
    pub fn backward(&self, loss: &Tensor, reduce: bool, num_micro_batches: usize) -> Result<()> {
        let each_time = {
            let mut state = self.0.lock();
            state.begin(reduce, num_micro_batches);
            state.strategy.reduces_every_micro_batch()
        };
        let outcome = loss.backward();
        let mut state = self.0.lock();
        let run = state.running.take();
        if let Err(error) = outcome {
            return Err(state.hook_error.take().unwrap_or_else(|| error.into()));
        }
        let divisor = run.map_or(1.0, |r| r.divisor);
        if reduce || each_time {
            state.launch_rest(divisor)?;
        }
        if reduce {
            state.start_used_flags()?;
        }
        Ok(())
    }

    /// Reduces what a window that ended early has gathered.
    pub fn reduce_now(&self, num_micro_batches: usize) -> Result<()> {
        let mut state = self.0.lock();
        if !state.strategy.reduces_every_micro_batch() {
            let divisor = state.divisor(num_micro_batches);
            state.next_launch = 0;
            state.launch_rest(divisor)?;
        }
        state.start_used_flags()
    }

    /// Waits for all reductions of the window. Then gradients are means, and the result tells per parameter whether any
    /// rank used it.
    pub fn settle(&self, num_micro_batches: usize) -> Result<Vec<bool>> {
        let mut state = self.0.lock();
        while state.collect_oldest()? {}
        if let Some(flags) = state.used_flags.take() {
            let flags = flags.wait()?;
            let State { order, used, .. } = &mut *state;
            for (&param_idx, flag) in order.iter().zip(flags.as_slice::<u8>()?) {
                used[param_idx] = *flag != 0;
            }
            if state.strategy.reduces_every_micro_batch() && num_micro_batches > 1 {
                // The ranks' sums were divided by N each time; the number of micro-batches is known only now.
                for bucket in 0..state.layout.buckets().len() {
                    let gradient = state.strategy.gradient_mut(bucket)?;
                    gradient
                        .iter_mut()
                        .for_each(|g| *g /= num_micro_batches as f32);
                }
            }
        }
        Ok(state.used.clone())
    }

    /// Waits for the reductions under way, and drops their results.
    pub fn discard(&self) -> Result<()> {
        let mut state = self.0.lock();
        while state.collect_oldest()? {}
        if let Some(flags) = state.used_flags.take() {
            flags.wait()?;
        }
        Ok(())
    }

    /// Forgets the window's gradients.
    pub fn reset_window(&self) {
        let mut state = self.0.lock();
        state.written.fill(false);
        state.used.fill(false);
        state.reduced.fill(false);
    }

    /// Access to the strategy between backward and the next one.
    pub fn with_strategy<R>(&self, f: impl FnOnce(&mut dyn Strategy) -> R) -> R {
        f(self.0.lock().strategy.as_mut())
    }
}

impl State {
    /// The mean rule: the sum over ranks and micro-batches is divided here, and nowhere else, except that a strategy
    /// which reduces every micro-batch learns their number at the end (see `settle`).
    fn divisor(&self, num_micro_batches: usize) -> f64 {
        let ranks = self.comm.world_size();
        if self.strategy.reduces_every_micro_batch() {
            ranks as f64
        } else {
            (ranks * num_micro_batches) as f64
        }
    }

    fn begin(&mut self, reduce: bool, num_micro_batches: usize) {
        self.hook_error = None;
        self.arrived.fill(false);
        if self.strategy.reduces_every_micro_batch() {
            self.written.fill(false);
        }
        for (missing, bucket) in self.missing.iter_mut().zip(self.layout.buckets()) {
            *missing = bucket.slots.len();
        }
        self.next_launch = 0;
        self.running = Some(Run {
            reduce: reduce || self.strategy.reduces_every_micro_batch(),
            divisor: self.divisor(num_micro_batches),
        });
    }

    fn accept(&mut self, param_idx: usize, grad: &Tensor) -> Result<()> {
        let params = Arc::clone(&self.params);
        let name = params[param_idx].name();
        let run = self.running.ok_or_else(|| {
            Error::misuse(
                "backward",
                format!("the gradient of `{name}` arrived outside the trainer's backward; call trainer.backward(&loss)"),
            )
        })?;
        let Some((bucket, slot)) = self.layout.place(param_idx) else {
            return Ok(());
        };
        self.comm.progress();
        self.collect_done()?;
        if bucket < self.next_launch && run.reduce {
            return Err(Error::parameter(
                name,
                "its gradient arrived again after its bucket was reduced; a parameter that several recomputed \
                 (checkpointed) parts of the model share is not supported",
            ));
        }
        self.make_room(bucket)?;
        let range = self.layout.buckets()[bucket].slots[slot].range.clone();
        let written = self.written[param_idx];
        let expected = params[param_idx].tensor().shape();
        if grad.shape() != expected {
            let got = grad.shape();
            return Err(Error::parameter(
                name,
                format!("gradient of shape {got:?}, expected {expected:?}"),
            ));
        }
        let out = &mut self.strategy.buffer(bucket)?.as_mut_slice::<f32>()?[range];
        read_values(grad, out, written)?;
        self.written[param_idx] = true;
        self.used[param_idx] = true;
        if !std::mem::replace(&mut self.arrived[param_idx], true) {
            self.missing[bucket] -= 1;
        }
        while run.reduce && self.missing.get(self.next_launch) == Some(&0) {
            self.launch_next(run.divisor)?;
        }
        Ok(())
    }

    fn launch_rest(&mut self, divisor: f64) -> Result<()> {
        while self.next_launch < self.layout.buckets().len() {
            self.launch_next(divisor)?;
        }
        Ok(())
    }

    fn launch_next(&mut self, divisor: f64) -> Result<()> {
        let index = self.next_launch;
        self.make_room(index)?;
        let bucket = &self.layout.buckets()[index];
        let values = self.strategy.buffer(index)?.as_mut_slice::<f32>()?;
        for slot in bucket.slots.iter().filter(|s| !self.written[s.param_idx]) {
            values[slot.range.clone()].fill(0.0);
        }
        values[bucket.len()..].fill(0.0);
        let buffer = self.strategy.take(index)?;
        let collective = self.strategy.reduction(ReduceOp::Scaled { divisor });
        let request = Request::new(collective, Arc::clone(&bucket.label));
        self.in_flight
            .push_back((index, self.comm.start(request, buffer)?));
        self.next_launch += 1;
        Ok(())
    }

    /// Keeps the strategy's memory bound: waits for earlier buckets before another one is opened. Where gradients
    /// appear in another order than the buckets', there may be none to wait for; then the bound gives way.
    fn make_room(&mut self, bucket: usize) -> Result<()> {
        while !self.strategy.has_room(bucket) {
            if !self.collect_oldest()? {
                tracing::debug!(
                    bucket,
                    "gradients appear out of bucket order: one more bucket is open"
                );
                break;
            }
        }
        Ok(())
    }

    /// Takes back finished buckets, without waiting.
    fn collect_done(&mut self) -> Result<()> {
        while self.in_flight.front().is_some_and(|(_, p)| p.is_done()) {
            self.collect_oldest()?;
        }
        Ok(())
    }

    /// Waits for the oldest bucket in flight; false if there is none.
    fn collect_oldest(&mut self) -> Result<bool> {
        let Some((bucket, pending)) = self.in_flight.pop_front() else {
            return Ok(false);
        };
        let buffer = pending.wait()?;
        let first = !std::mem::replace(&mut self.reduced[bucket], true);
        self.strategy.reduced(bucket, buffer, first)?;
        Ok(true)
    }

    fn start_used_flags(&mut self) -> Result<()> {
        let flags: Vec<u8> = self.order.iter().map(|i| u8::from(self.used[*i])).collect();
        let request = Request::new(Collective::AllReduce(ReduceOp::Max), "used parameters");
        self.used_flags = Some(self.comm.start(request, Buffer::from_vec(flags))?);
        Ok(())
    }
}
