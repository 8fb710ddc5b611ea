//! Gradients on their way: from the hooks into buckets, and through the collectives while backward is running.
//!
//! States of a bucket within one backward: *filling* (gradients are copied in as their hooks fire) -> *in flight*
//! (taken by the communicator, in bucket order on all ranks) -> *reduced*. A bucket is launched when all its
//! gradients are there and all buckets before it are launched; what is left at the end of backward, because a
//! parameter was not used, is launched then, with zeros for what is missing.

mod in_flight;

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;

use candle_core::{DType, Tensor};
use parking_lot::Mutex;

use crate::bucket::BucketLayout;
use crate::buffer::Buffer;
use crate::comm::{Collective, Communicator, ReduceOp, Request, TimedComm};
use crate::config::EngineConfig;
use crate::error::{Error, Result};
use crate::hook::GradientSink;
use crate::loss::WeightedLoss;
use crate::param::Param;
use crate::param_flags::ParamFlags;
use crate::precision::read_gradient;
use crate::step_clock::Reductions;
use crate::store::ParamStore;
use crate::strategy::{BufferPool, PoolSize, Strategy};
use crate::summary::{Summary, Weights};
use crate::trace::phase;

use in_flight::InFlight;

/// The hook's end of a trainer: it owns the gradients between backward and step.
pub(crate) struct Reducer(Mutex<State>);

struct State {
    comm: Arc<TimedComm>,
    layout: Arc<BucketLayout>,
    params: Arc<[Param]>,
    /// Positions in `params` in the order that all ranks share: what ranks send each other per parameter goes in it.
    order: Vec<usize>,
    strategy: Box<dyn Strategy>,
    /// Some while backward runs: whether its gradients are reduced.
    running: Option<Run>,
    /// The error of a hook: Candle's backward would turn it into text.
    hook_error: Option<Error>,
    /// The first error of a collective: the gradients in it are lost, and the ranks cannot go on.
    failure: Option<Error>,
    /// Wait only for the parameters in the loss's graph.
    find_unused: bool,
    /// False: each reduction is waited for where it starts.
    overlap: bool,
    /// Per parameter: it is used by the loss of this backward, so its bucket waits for it.
    expected: Vec<bool>,
    /// Per parameter: its gradient has appeared in this backward.
    arrived: Vec<bool>,
    /// Per parameter: the open buffer holds a gradient of it.
    written: Vec<bool>,
    /// Per parameter: used by this rank in this window.
    used: Vec<bool>,
    /// Per parameter: a gradient of this rank in this window was not finite; looked at only if `watch_finite`.
    not_finite: ParamFlags,
    watch_finite: bool,
    /// The weights of this rank's micro-batches in this window.
    mine: Weights,
    /// Per bucket: expected gradients that have not appeared in this backward.
    missing: Vec<usize>,
    next_launch: usize,
    /// Number of the step and position of the micro-batch in it, for spans.
    at: (u64, usize),
    reductions: Reductions,
    in_flight: VecDeque<InFlight>,
    /// The dtype to reduce in, if not that of the gradients, and the buffers for it.
    wire: Option<(DType, BufferPool)>,
    warned_order: bool,
    /// Per bucket: it has been reduced in this window; a further micro-batch adds to it.
    reduced: Vec<bool>,
    /// The summary over all ranks, after `settle`.
    summary: Option<Arc<Summary>>,
    /// The summary of the window before, and what the ranks sent each other for it: kept for their memory.
    last_summary: Option<Arc<Summary>>,
    summary_buffer: Option<Buffer>,
    /// Per parameter, for `settle`.
    altered: ParamFlags,
}

#[derive(Clone, Copy)]
struct Run {
    reduce: bool,
    /// What gradients are multiplied by.
    factor: f32,
}

/// While it lives, gradients belong to this reducer's backward.
struct Running<'a>(&'a Reducer);

thread_local! {
    /// Backward passes of trainers that run on this thread, one inside the other.
    static NUM_RUNNING: Cell<usize> = const { Cell::new(0) };
}

impl<'a> Running<'a> {
    fn new(reducer: &'a Reducer) -> Self {
        NUM_RUNNING.set(NUM_RUNNING.get() + 1);
        Self(reducer)
    }

    fn any_on_this_thread() -> bool {
        NUM_RUNNING.get() > 0
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        NUM_RUNNING.set(NUM_RUNNING.get() - 1);
        self.0.0.lock().running = None;
    }
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
        comm: Arc<TimedComm>,
        layout: Arc<BucketLayout>,
        params: Arc<[Param]>,
        order: Vec<usize>,
        strategy: Box<dyn Strategy>,
        config: &EngineConfig,
        store: &ParamStore,
    ) -> Result<Self> {
        let (num_params, num_buckets) = (params.len(), layout.buckets().len());
        let watch_finite = config.skips_non_finite();
        let (device, ledger) = (store.device(), store.ledger());
        let convert = |dtype| PoolSize::to_convert(&layout, dtype);
        let wire = match config.communication_dtype.and_then(convert) {
            Some(size) => Some((size.dtype, BufferPool::new(size, device, ledger)?)),
            None => None,
        };
        Ok(Self(Mutex::new(State {
            comm,
            layout,
            params,
            order,
            strategy,
            running: None,
            hook_error: None,
            failure: None,
            find_unused: config.find_unused_parameters,
            overlap: config.overlap_comm,
            expected: vec![true; num_params],
            arrived: vec![false; num_params],
            written: vec![false; num_params],
            used: vec![false; num_params],
            missing: vec![0; num_buckets],
            next_launch: 0,
            at: (0, 0),
            reductions: Reductions::default(),
            in_flight: VecDeque::new(),
            wire,
            warned_order: false,
            reduced: vec![false; num_buckets],
            not_finite: ParamFlags::new(num_params, device)?,
            watch_finite,
            mine: Weights::default(),
            summary: None,
            last_summary: None,
            summary_buffer: None,
            altered: ParamFlags::new(num_params, device)?,
        })))
    }

    /// Runs backward on `loss`, with hooks that fill the buckets. `used`: positions of the parameters in its graph; `at`:
    /// number of the step and position of the micro-batch in it; `last`: the last one of its window.
    pub fn backward(
        &self,
        loss: &WeightedLoss,
        used: &[usize],
        at: (u64, usize),
        last: bool,
    ) -> Result<()> {
        let mut state = self.0.lock();
        state.at = at;
        let reduce = state.begin(loss, used, last)?;
        drop(state);
        // Also when a panic passes through: no gradient may be taken for one of this backward after it.
        let running = Running::new(self);
        let outcome = match &loss.tensor {
            Some(tensor) => tensor.backward().map(drop),
            None => Ok(()),
        };
        drop(running);
        state = self.0.lock();
        if let Err(error) = outcome {
            return Err(state.hook_error.take().unwrap_or_else(|| error.into()));
        }
        if reduce {
            state.launch_rest()?;
        }
        Ok(())
    }

    /// Adds a micro-batch's loss, times its weight.
    pub fn add_loss(&self, loss: f64) {
        self.0.lock().mine.loss += loss;
    }

    /// The reductions since the last call.
    pub fn take_reductions(&self) -> Reductions {
        std::mem::take(&mut self.0.lock().reductions)
    }

    /// Reduces what a window that ended early has gathered.
    pub fn reduce_now(&self) -> Result<()> {
        let mut state = self.0.lock();
        if !state.strategy.reduces_every_micro_batch() {
            state.next_launch = 0;
            state.launch_rest()?;
        }
        Ok(())
    }

    /// Waits for all reductions of the window, and sums up what the ranks did. Then gradients are weighted means.
    ///
    /// `agreement`: what all ranks must be about to do alike. It is the label of the summary's collective, so a rank that
    /// differs is a mismatch, which names both sides. `find_altered` raises the flags of the parameters whose values are not
    /// those that this rank has given them.
    pub fn settle(
        &self,
        agreement: Arc<str>,
        step: u64,
        find_altered: impl FnOnce(&mut ParamFlags) -> Result<()>,
    ) -> Result<Arc<Summary>> {
        let mut state = self.0.lock();
        state.refuse_after_failure()?;
        if let Some(summary) = &state.summary {
            return Ok(Arc::clone(summary));
        }
        let _span = phase!("wait", state.comm.rank(), step);
        let request = Request::new(Collective::AllReduce(ReduceOp::Sum), agreement).of_step(step);
        let State {
            mine,
            order,
            used,
            altered,
            summary_buffer,
            ..
        } = &mut *state;
        altered.clear()?;
        find_altered(altered)?;
        let mut buffer = match summary_buffer.take() {
            Some(buffer) => buffer,
            None => Weights::buffer(order),
        };
        mine.write(order, used, altered.read()?, &mut buffer)?;
        let pending = state.comm.start(request, buffer);
        let pending = state.remember(pending)?;
        let before = state.comm.clock().spent();
        while state.collect_oldest()? {}
        let waited = state.comm.clock().spent() - before;
        state.reductions.waited += waited;
        let sum = state.remember(pending.wait())?;
        // The last one is still held by nobody but this, unless a step has failed.
        let mut summary = state.last_summary.take().unwrap_or_default();
        match Arc::get_mut(&mut summary) {
            Some(summary) => summary.read(&sum, &state.order, &state.params)?,
            None => {
                let mut new = Summary::default();
                new.read(&sum, &state.order, &state.params)?;
                summary = Arc::new(new);
            }
        }
        state.summary_buffer = Some(sum);
        state.summary = Some(Arc::clone(&summary));
        Ok(summary)
    }

    /// Waits for the reductions under way, and drops their results.
    pub fn discard(&self) -> Result<()> {
        let mut state = self.0.lock();
        state.refuse_after_failure()?;
        while state.collect_oldest()? {}
        Ok(())
    }

    /// Forgets the window's gradients.
    pub fn reset_window(&self) -> Result<()> {
        let mut state = self.0.lock();
        state.written.fill(false);
        state.used.fill(false);
        state.not_finite.clear()?;
        state.mine = Weights::default();
        if let Some(summary) = state.summary.take() {
            state.last_summary = Some(summary);
        }
        state.reduced.fill(false);
        Ok(())
    }

    /// Remembers an error that ends the group of ranks.
    pub fn remember_failure<T>(&self, outcome: Result<T>) -> Result<T> {
        match outcome {
            Err(error) if error.ends_the_group() => self.0.lock().remember(Err(error)),
            other => other,
        }
    }

    /// The error of the first collective that failed.
    pub fn failure(&self) -> Option<Error> {
        self.0.lock().failure.clone()
    }

    /// Shows `f`, per parameter, whether a gradient that this rank computed in this window was not finite.
    pub fn with_not_finite<R>(&self, f: impl FnOnce(&[bool]) -> R) -> Result<R> {
        Ok(f(self.0.lock().not_finite.read()?))
    }

    /// Access to the strategy between backward and the next one.
    pub fn with_strategy<R>(&self, f: impl FnOnce(&mut dyn Strategy) -> R) -> R {
        f(self.0.lock().strategy.as_mut())
    }
}

impl State {
    /// Prepares for a backward; true if its gradients are reduced, false if they wait for later micro-batches.
    fn begin(&mut self, loss: &WeightedLoss, used: &[usize], last: bool) -> Result<bool> {
        self.refuse_after_failure()?;
        self.hook_error = None;
        self.arrived.fill(false);
        let each_time = self.strategy.reduces_every_micro_batch();
        if each_time {
            self.written.fill(false);
        }
        if self.find_unused {
            self.expected.fill(false);
            used.iter().for_each(|i| self.expected[*i] = true);
        }
        for (missing, bucket) in self.missing.iter_mut().zip(self.layout.buckets()) {
            let expected = bucket.slots.iter().filter(|s| self.expected[s.param_idx]);
            *missing = expected.count();
        }
        self.next_launch = 0;
        self.mine.add(loss);
        let reduce = last || each_time;
        let factor = loss.factor;
        self.running = Some(Run { reduce, factor });
        Ok(reduce)
    }

    /// After a collective has failed, its error is the answer to everything.
    fn refuse_after_failure(&self) -> Result<()> {
        self.failure.clone().map_or(Ok(()), Err)
    }

    fn remember<T>(&mut self, outcome: Result<T>) -> Result<T> {
        if let (Err(error), None) = (&outcome, &self.failure) {
            self.failure = Some(error.clone());
        }
        outcome
    }

    fn accept(&mut self, param_idx: usize, grad: &Tensor) -> Result<()> {
        let params = Arc::clone(&self.params);
        let name = params[param_idx].name();
        let Some(run) = self.running else {
            if Running::any_on_this_thread() {
                // Another trainer's loss reaches into this one's model, as a generator's loss into its discriminator.
                return Ok(());
            }
            return Err(Error::misuse(
                "backward",
                format!(
                    "the gradient of `{name}` arrived outside the trainer's backward; call trainer.backward(&loss)"
                ),
            ));
        };
        let Some((bucket, slot)) = self.layout.place(param_idx) else {
            return Ok(());
        };
        self.comm.progress();
        self.collect_done()?;
        if bucket < self.next_launch && run.reduce {
            return Err(Error::parameter(
                name,
                "its gradient arrived after its bucket was reduced: several recomputed (checkpointed) parts of the model \
                 share it, or it is used only inside one; for the latter set find_unused_parameters to false",
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
        let out = self.strategy.buffer(bucket)?;
        let watch = self
            .watch_finite
            .then_some((&mut self.not_finite, param_idx));
        read_gradient(grad, out, range, run.factor, written, watch)?;
        self.written[param_idx] = true;
        self.used[param_idx] = true;
        if !std::mem::replace(&mut self.arrived[param_idx], true) && self.expected[param_idx] {
            self.missing[bucket] -= 1;
        }
        while run.reduce && self.missing.get(self.next_launch) == Some(&0) {
            self.launch_next()?;
        }
        Ok(())
    }
}
