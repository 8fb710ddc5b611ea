//! The part of a trainer that is the same for data parallelism and all ZeRO stages.

use std::fmt;
use std::sync::{Arc, Weak};

use candle_core::{DType, Tensor};

use crate::bucket::{BucketCaps, BucketLayout};
use crate::buffer::Buffer;
use crate::comm::Communicator;
use crate::error::{Error, Result};
use crate::memory::Category;
use crate::norm::{clip_factor, global_l2_norm};
use crate::optim::{Optimizer, ParamGroups};
use crate::param::{GradientSink, with_values_mut};
use crate::reducer::Reducer;
use crate::replica::{ParamSpec, broadcast_values, check_replicas, check_trainable};
use crate::store::{Param, ParamKind, ParamStore};
use crate::strategy::Strategy;

/// Settings that all strategies share.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EngineConfig {
    /// Sizes of the gradient buckets.
    pub bucket_caps: BucketCaps,
    /// Give all ranks rank 0's buffers (batch-norm statistics) after each step, as PyTorch's `broadcast_buffers` does
    /// before each forward.
    pub broadcast_buffers: bool,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            bucket_caps: BucketCaps::default(),
            broadcast_buffers: true,
        }
    }
}

/// What one optimizer step did. The same on all ranks.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct StepReport {
    /// Number of steps taken, this one included.
    pub step: u64,
    /// Micro-batches that were averaged on each rank.
    pub num_micro_batches: usize,
    /// Learning rate of each parameter group.
    pub learning_rates: Vec<f64>,
    /// The gradient norm before clipping, if [`Trainer::clip_grad_norm`](crate::Trainer::clip_grad_norm) was called.
    pub grad_norm: Option<f64>,
    /// Names of trained parameters that no rank used in the whole window. They were left alone: no update, no weight
    /// decay, no change of moments.
    pub unused: Vec<String>,
}

/// Where the current window of micro-batches stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Window {
    /// No gradients.
    Empty,
    /// Some micro-batches of an accumulation are done, the last one is not.
    Open { done: usize },
    /// All done, reductions launched.
    Complete { done: usize },
    /// A backward failed: gradients are a mixture.
    Broken,
}

/// Parameters, gradients, optimizer state and the order of work of one rank's trainer; a [`Strategy`] says who owns
/// what. User code sees it through [`Trainer`](crate::Trainer).
pub struct Engine<O: Optimizer> {
    store: ParamStore,
    params: Arc<[Param]>,
    /// Positions in `params` in rank 0's creation order, which all ranks share.
    order: Vec<usize>,
    comm: Arc<dyn Communicator>,
    layout: Arc<BucketLayout>,
    strategy_name: &'static str,
    reducer: Arc<Reducer>,
    groups: ParamGroups<O>,
    /// Per parameter: position of its group.
    group_of: Vec<usize>,
    /// Per bucket and state: the numbers of the owned range.
    states: Vec<Vec<Buffer>>,
    /// Per parameter: updates so far (`state['step']` in PyTorch).
    param_steps: Vec<u64>,
    /// Buffers to broadcast after each step, in canonical order.
    buffers: Vec<usize>,
    window: Window,
    clipping: Option<(f64, f32)>,
    steps: u64,
    warned_unused: bool,
}

impl<O: Optimizer> Engine<O> {
    /// Checks the replicas, lays out the buckets, allocates what `strategy` decides on. Collective.
    ///
    /// # Errors
    /// See [`DistributedDataParallel::new`](crate::DistributedDataParallel::new).
    pub fn new(
        store: ParamStore,
        comm: Arc<dyn Communicator>,
        groups: ParamGroups<O>,
        config: &EngineConfig,
        strategy: impl FnOnce(
            &BucketLayout,
            &ParamStore,
            &dyn Communicator,
        ) -> Result<Box<dyn Strategy>>,
    ) -> Result<Self> {
        groups.validate()?;
        let params: Arc<[Param]> = store.params().into();
        let specs: Vec<ParamSpec> = params.iter().map(ParamSpec::of).collect();
        let order = check_replicas(&specs, comm.as_ref())?;
        // After the comparison: then a dtype that only one rank cannot train is named on all of them.
        check_trainable(&params)?;
        broadcast_values(
            &params,
            order.iter().copied(),
            comm.as_ref(),
            store.ledger(),
        )?;
        let unused_values = store.unused_initial_values();
        if !unused_values.is_empty() {
            tracing::warn!(names = ?unused_values, "the file of initial values has tensors that the model does not use");
        }

        let layout = BucketLayout::new(&params, &order, config.bucket_caps, comm.world_size());
        let strategy = strategy(&layout, &store, comm.as_ref())?;
        let states = (0..layout.buckets().len())
            .map(|bucket| {
                let len = strategy.owned(bucket).len();
                let state =
                    |_| Buffer::reserved(DType::F32, len, store.ledger(), Category::Optimizer);
                (0..groups.num_states()).map(state).collect()
            })
            .collect::<Result<_>>()?;
        let is_buffer = |i: &usize| params[*i].kind() == ParamKind::Buffer;
        let buffers = match config.broadcast_buffers {
            true => order.iter().copied().filter(is_buffer).collect(),
            false => Vec::new(),
        };
        let layout = Arc::new(layout);
        let strategy_name = strategy.name();
        let reducer = Arc::new(Reducer::new(
            Arc::clone(&comm),
            Arc::clone(&layout),
            Arc::clone(&params),
            order.clone(),
            strategy,
        ));
        let sink: Weak<Reducer> = Arc::downgrade(&reducer);
        store.seal(sink as Weak<dyn GradientSink>);
        Ok(Self {
            group_of: params.iter().map(|p| groups.group_of(p.name())).collect(),
            param_steps: vec![0; params.len()],
            store,
            params,
            order,
            comm,
            layout,
            strategy_name,
            reducer,
            groups,
            states,
            buffers,
            window: Window::Empty,
            clipping: None,
            steps: 0,
            warned_unused: false,
        })
    }

    /// One micro-batch; `last`: its window ends with it.
    pub(crate) fn backward(&mut self, loss: &Tensor, num_before: usize, last: bool) -> Result<()> {
        if loss.elem_count() != 1 {
            let shape = loss.shape();
            return Err(Error::invalid(
                "loss",
                format!("must be one number, got shape {shape:?}"),
            ));
        }
        let expected = match num_before {
            0 => Window::Empty,
            done => Window::Open { done },
        };
        if self.window != expected {
            return Err(self.out_of_order("backward"));
        }
        let done = num_before + 1;
        self.window = Window::Broken;
        self.reducer.backward(loss, last, done)?;
        self.window = match last {
            true => Window::Complete { done },
            false => Window::Open { done },
        };
        Ok(())
    }

    /// Ends a window before its last micro-batch.
    pub(crate) fn end_window(&mut self) -> Result<()> {
        if let Window::Open { done } = self.window {
            self.window = Window::Broken;
            self.reducer.reduce_now(done)?;
            self.window = Window::Complete { done };
        }
        Ok(())
    }

    /// Drops the gradients of the window, however far it is.
    pub(crate) fn zero_grad(&mut self) -> Result<()> {
        self.reducer.discard()?;
        self.reducer.reset_window();
        self.window = Window::Empty;
        self.clipping = None;
        Ok(())
    }

    pub(crate) fn require_empty_window(&self, call: &'static str) -> Result<()> {
        if self.window == Window::Empty {
            Ok(())
        } else {
            Err(self.out_of_order(call))
        }
    }

    fn require_complete_window(&self, call: &'static str) -> Result<usize> {
        match self.window {
            Window::Complete { done } => Ok(done),
            _ => Err(self.out_of_order(call)),
        }
    }

    fn out_of_order(&self, call: &'static str) -> Error {
        let message = match self.window {
            Window::Empty => "there are no gradients; call backward first".to_string(),
            Window::Open { done } => format!(
                "an accumulation was dropped after {done} micro-batches without finish; call finish on it, or zero_grad \
                 to forget its gradients"
            ),
            Window::Complete { .. } => {
                "there are gradients that step has not used; call step, or zero_grad to forget them; to average several \
                 backward passes, use trainer.accumulate(n)"
                    .to_string()
            }
            Window::Broken => "an earlier backward failed, its gradients are incomplete; call zero_grad to forget them".to_string(),
        };
        Error::misuse(call, message)
    }

    pub(crate) fn clip_grad_norm(&mut self, max_norm: f64) -> Result<f64> {
        if !(max_norm.is_finite() && max_norm > 0.0) {
            return Err(Error::invalid(
                "max_norm",
                format!("{max_norm} is not finite and > 0"),
            ));
        }
        let done = self.require_complete_window("clip_grad_norm")?;
        if self.clipping.is_some() {
            return Err(Error::misuse(
                "clip_grad_norm",
                "the gradients are clipped already; call step",
            ));
        }
        self.reducer.settle(done)?;
        let num_buckets = self.layout.buckets().len();
        let norm = self.reducer.with_strategy(|strategy| {
            let gradients: Vec<&[f32]> = (0..num_buckets)
                .map(|bucket| strategy.gradient(bucket))
                .collect::<Result<_>>()?;
            let comm = strategy.is_sharded().then_some(self.comm.as_ref());
            global_l2_norm(&gradients, comm)
        })?;
        self.clipping = Some((norm, clip_factor(norm, max_norm)));
        Ok(norm)
    }

    pub(crate) fn step(&mut self) -> Result<StepReport> {
        let done = self.require_complete_window("step")?;
        self.check_groups()?;
        let used = self.reducer.settle(done)?;
        let unused = self.unused_names(&used);
        let grad_scale = self.clipping.map_or(1.0, |(_, factor)| factor);
        for (steps, used) in self.param_steps.iter_mut().zip(&used) {
            *steps += u64::from(*used);
        }
        let reducer = Arc::clone(&self.reducer);
        reducer.with_strategy(|strategy| -> Result<()> {
            for bucket in 0..self.layout.buckets().len() {
                self.update_owned(strategy, bucket, &used, grad_scale)?;
            }
            strategy.publish(&self.layout, &self.params, self.comm.as_ref())
        })?;
        let buffers = self.buffers.iter().copied();
        broadcast_values(
            &self.params,
            buffers,
            self.comm.as_ref(),
            self.store.ledger(),
        )?;
        self.reducer.reset_window();
        self.window = Window::Empty;
        self.steps += 1;
        let groups = self.groups.groups();
        Ok(StepReport {
            step: self.steps,
            num_micro_batches: done,
            learning_rates: groups.iter().map(|g| g.optimizer.learning_rate()).collect(),
            grad_norm: self.clipping.take().map(|(norm, _)| norm),
            unused,
        })
    }

    /// Hyper-parameters may have been changed since the last step.
    fn check_groups(&self) -> Result<()> {
        self.groups.validate()?;
        let (needed, kept) = (
            self.groups.num_states(),
            self.states.first().map_or(usize::MAX, Vec::len),
        );
        if needed > kept {
            return Err(Error::invalid(
                "parameter groups",
                format!(
                    "{needed} numbers of optimizer state per element are needed now, but the trainer was created with \
                     {kept}; an optimizer that keeps no state (momentum 0) cannot be given one later"
                ),
            ));
        }
        Ok(())
    }

    /// Updates the elements of `bucket` that this rank owns, in the parameters' own memory.
    fn update_owned(
        &mut self,
        strategy: &dyn Strategy,
        bucket: usize,
        used: &[bool],
        grad_scale: f32,
    ) -> Result<()> {
        let gradient = strategy.gradient(bucket)?;
        let mut states: Vec<&mut [f32]> = self.states[bucket]
            .iter_mut()
            .map(Buffer::as_mut_slice::<f32>)
            .collect::<Result<_>>()?;
        let owned = strategy.owned(bucket);
        for segment in self.layout.buckets()[bucket].segments(owned) {
            let index = segment.param_idx;
            if !used[index] {
                continue;
            }
            let optimizer = &self.groups.groups()[self.group_of[index]].optimizer;
            let mut state: Vec<&mut [f32]> = states
                .iter_mut()
                .map(|s| &mut s[segment.in_owned.clone()])
                .collect();
            let grad = &gradient[segment.in_owned.clone()];
            with_values_mut::<f32, _>(self.params[index].tensor(), |values| {
                let values = &mut values[segment.in_param.clone()];
                optimizer.update(
                    self.param_steps[index],
                    values,
                    grad,
                    grad_scale,
                    &mut state,
                );
            })?;
        }
        Ok(())
    }

    fn unused_names(&mut self, used: &[bool]) -> Vec<String> {
        let trained = |p: &Param| p.kind() == ParamKind::Trained && p.num_elements() > 0;
        let unused = |i: &&usize| !used[**i] && trained(&self.params[**i]);
        let unused: Vec<String> = self
            .order
            .iter()
            .filter(unused)
            .map(|i| self.params[*i].name().to_string())
            .collect();
        if !unused.is_empty() && !self.warned_unused && self.comm.rank() == 0 {
            self.warned_unused = true;
            tracing::warn!(
                parameters = ?unused,
                "no rank computed a gradient for these parameters; they stay as they are. If they should be trained, \
                 look for a candle_nn op without backward between them and the loss (LayerNorm and RmsNorm on \
                 contiguous input, softmax_last_dim, rope). This is said once."
            );
        }
        unused
    }

    pub(crate) fn store(&self) -> &ParamStore {
        &self.store
    }

    pub(crate) fn comm(&self) -> &Arc<dyn Communicator> {
        &self.comm
    }

    pub(crate) fn layout(&self) -> &BucketLayout {
        &self.layout
    }

    pub(crate) fn strategy_name(&self) -> &'static str {
        self.strategy_name
    }

    pub(crate) fn groups(&self) -> &ParamGroups<O> {
        &self.groups
    }

    pub(crate) fn groups_mut(&mut self) -> &mut ParamGroups<O> {
        &mut self.groups
    }

    pub(crate) fn num_steps(&self) -> u64 {
        self.steps
    }
}

impl<O: Optimizer> fmt::Debug for Engine<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("strategy", &self.strategy_name)
            .field("params", &self.params.len())
            .field("buckets", &self.layout.buckets().len())
            .field("steps", &self.steps)
            .field("window", &self.window)
            .finish()
    }
}
