//! The part of a trainer that is the same for data parallelism and all ZeRO stages.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Weak};

use candle_core::{DType, Device};
use sha2::{Digest, Sha256};

use crate::agreement::Agreement;
use crate::bucket::{Bucket, BucketLayout};
use crate::buffer::Buffer;
use crate::comm::{Communicator, TimedComm};
use crate::config::{EngineConfig, UnusedParameters};
use crate::error::{Error, Result};
use crate::hook::GradientSink;
use crate::loss::{Loss, WeightKind};
use crate::loss_graph::LossGraph;
use crate::loss_scale::{LossScale, LossScaling};
use crate::masters::Masters;
use crate::memory::Category;
use crate::norm::NormBuffers;
use crate::optim::{LrSchedule, Optimizer, ParamGroup, ParamGroups};
use crate::param::{Param, ParamKind};
use crate::param_flags::ParamFlags;
use crate::param_spec::ParamSpec;
use crate::reducer::Reducer;
use crate::replica::{broadcast_values, check_replicas, check_settings, check_trainable};
use crate::step_clock::StepClock;
use crate::store::ParamStore;
use crate::strategy::Strategy;
use crate::trace::phase;

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
    /// A load failed in the middle: parameters are a mixture.
    HalfLoaded,
}

/// What `clip_grad_norm` leaves for the step.
pub(crate) struct Clipping {
    /// Before clipping.
    pub norm: f64,
    pub factor: f32,
    /// What all ranks have agreed on.
    pub agreed: Arc<str>,
}

/// Parameters, gradients, optimizer state and the order of work of one rank's trainer; a [`Strategy`] says who owns
/// what. User code sees it through [`Trainer`](crate::Trainer).
pub struct Engine<O: Optimizer> {
    pub(crate) store: ParamStore,
    pub(crate) params: Arc<[Param]>,
    /// Positions in `params` in rank 0's creation order, which all ranks share.
    pub(crate) order: Vec<usize>,
    pub(crate) comm: Arc<dyn Communicator>,
    pub(crate) clock: StepClock,
    pub(crate) layout: Arc<BucketLayout>,
    pub(crate) strategy_name: &'static str,
    pub(crate) reducer: Arc<Reducer>,
    /// Per bucket: the elements that this rank owns.
    pub(crate) owned: Vec<Range<usize>>,
    pub(crate) groups: ParamGroups<O>,
    /// Per parameter: position of its group.
    pub(crate) group_of: Vec<usize>,
    /// A digest of `group_of` in the order that ranks share.
    pub(crate) groups_digest: u64,
    /// Per bucket and state: the numbers of the owned range.
    pub(crate) states: Vec<Vec<Buffer>>,
    /// Per parameter: updates so far (`state['step']` in PyTorch).
    pub(crate) param_steps: Vec<u64>,
    /// Buffers to broadcast after each step, in canonical order.
    pub(crate) buffers: Vec<usize>,
    window: Window,
    pub(crate) clipping: Option<Clipping>,
    pub(crate) steps: u64,
    pub(crate) warned_unused: bool,
    graph: LossGraph,
    pub(crate) unused_parameters: UnusedParameters,
    pub(crate) skips_non_finite: bool,
    pub(crate) reports_loss: bool,
    pub(crate) compare_replicas_every: u64,
    pub(crate) schedule: LrSchedule,
    pub(crate) masters: Masters,
    pub(crate) loss_scale: LossScale,
    /// Gradients are kept or sent in f16, so that their sum must not weigh by counts.
    counts_overflow: bool,
    pub(crate) agreement: Option<Agreement<O>>,
    pub(crate) scratch: Scratch<O>,
}

/// Memory that steps use one after the other, so that they allocate nothing.
pub(crate) struct Scratch<O> {
    pub norm: NormBuffers,
    /// What each rank has found first.
    pub first_of_rank: Option<Buffer>,
    /// Per parameter.
    pub flags: ParamFlags,
    /// With the schedule's learning rates.
    pub optimizers: Vec<O>,
    pub learning_rates: Arc<[f64]>,
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
        config.validate()?;
        let timed = Arc::new(TimedComm::new(comm));
        let comm: Arc<dyn Communicator> = timed.clone();
        store.seal();
        let params: Arc<[Param]> = store.params().into();
        let specs = ParamSpec::of_all(&params);
        let order = check_replicas(&specs, comm.as_ref())?;
        let number = check_settings(&config.shared(), comm.as_ref())?;
        // After the comparison: then a dtype that only one rank cannot train is named on all of them.
        check_trainable(&params)?;
        check_fused(&groups, store.device())?;
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

        let layout = BucketLayout::new(
            &specs,
            &order,
            config.bucket_caps,
            config.grad_accum_dtype,
            comm.world_size(),
        )
        .of_trainer(number);
        let loss_scale = LossScale::new(config.loss_scaling)?;
        let is_f16 = |p: &Param| p.tensor().dtype() == DType::F16;
        if config.loss_scaling != LossScaling::Off && !params.iter().any(is_f16) {
            tracing::warn!(
                "loss scaling is on, but no parameter is f16; bf16 and f32 have the range for small gradients without it"
            );
        }
        let strategy = strategy(&layout, &store, comm.as_ref())?;
        let owned: Vec<Range<usize>> = (0..layout.buckets().len())
            .map(|bucket| strategy.owned(bucket))
            .collect();
        let masters = Masters::new(&layout, &params, &owned, &store)?;
        let flags = ParamFlags::new(params.len(), store.device())?;
        let states = owned
            .iter()
            .map(|owned| {
                let len = owned.len();
                let state = |_| store.reserve(DType::F32, len, Category::Optimizer);
                (0..groups.num_states()).map(state).collect()
            })
            .collect::<Result<_>>()?;
        let is_buffer = |i: &usize| params[*i].kind() == ParamKind::Buffer;
        let buffers = match config.broadcast_buffers {
            true => order.iter().copied().filter(is_buffer).collect(),
            false => Vec::new(),
        };
        // Only now: what was computed before rank 0's values came does not count.
        let graph = LossGraph::new(&params)?;
        let sent_in = |b: &Bucket| config.communication_dtype.unwrap_or(b.grad_dtype);
        let counts_overflow = layout
            .buckets()
            .iter()
            .any(|b| b.grad_dtype == DType::F16 || sent_in(b) == DType::F16);
        let layout = Arc::new(layout);
        let strategy_name = strategy.name();
        let reducer = Arc::new(Reducer::new(
            Arc::clone(&timed),
            Arc::clone(&layout),
            Arc::clone(&params),
            order.clone(),
            strategy,
            config,
            &store,
        )?);
        let sink: Weak<Reducer> = Arc::downgrade(&reducer);
        store.listen(sink as Weak<dyn GradientSink>);
        let group_of: Vec<usize> = params.iter().map(|p| groups.group_of(p.name())).collect();
        Ok(Self {
            groups_digest: digest(order.iter().map(|i| group_of[*i])),
            group_of,
            param_steps: vec![0; params.len()],
            store,
            params,
            order,
            clock: StepClock::new(comm.rank(), Arc::clone(timed.clock())),
            comm,
            layout,
            strategy_name,
            reducer,
            owned,
            groups,
            states,
            buffers,
            window: Window::Empty,
            clipping: None,
            steps: 0,
            warned_unused: false,
            graph,
            unused_parameters: config.unused_parameters,
            skips_non_finite: config.skips_non_finite(),
            reports_loss: config.report_loss,
            compare_replicas_every: config.compare_replicas_every,
            schedule: LrSchedule::default(),
            masters,
            loss_scale,
            counts_overflow,
            agreement: None,
            scratch: Scratch {
                norm: NormBuffers::default(),
                first_of_rank: None,
                flags,
                optimizers: Vec::new(),
                learning_rates: Arc::new([]),
            },
        })
    }

    /// One micro-batch; `last`: its window ends with it.
    pub(crate) fn backward(&mut self, loss: Loss<'_>, num_before: usize, last: bool) -> Result<()> {
        let (rank, step) = (self.comm.rank(), self.steps + 1);
        let sent = self.comm.traffic().bytes_sent();
        let begin = self.clock.begin_backward(num_before, sent);
        let span = phase!("backward", rank, step, micro_batch = num_before);
        let outcome = self.run_backward(loss, num_before, last);
        drop(span);
        self.clock.end_backward(begin);
        if !last {
            self.clock.begin_forward(step, num_before + 1);
        }
        outcome
    }

    /// What came before is no part of the forward.
    pub(crate) fn begin_forward(&mut self) {
        let micro_batch = match self.window {
            Window::Open { done } => done,
            _ => 0,
        };
        self.clock.begin_forward(self.steps + 1, micro_batch);
    }

    fn run_backward(&mut self, loss: Loss<'_>, num_before: usize, last: bool) -> Result<()> {
        self.graph.visit(loss.tensor())?;
        let late = !self.masters.is_empty();
        let weighted = loss.weighted(self.loss_scale.scale(), late)?;
        if weighted.kind == Some(WeightKind::Counted) && self.counts_overflow {
            return Err(Error::misuse(
                "backward",
                "a loss that weighs by a count needs room for the count in what gradients are kept and sent in, and f16 has \
                 none; use GradAccumDType::F32 and another communication_dtype, or losses that weigh the same per rank",
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
        let (step, used) = (self.steps + 1, self.graph.used());
        self.reducer
            .backward(&weighted, used, (step, num_before), last)?;
        if self.reports_loss {
            // After backward: where the device works by itself, it has enough to do until here.
            self.reducer.add_loss(loss.weighted_value()?);
        }
        self.window = match last {
            true => Window::Complete { done },
            false => Window::Open { done },
        };
        Ok(())
    }

    /// Remembers that the parameters have changed just now.
    pub(crate) fn mark_update(&mut self) -> Result<()> {
        self.graph.mark_update()
    }

    /// Ends a window before its last micro-batch.
    pub(crate) fn end_window(&mut self) -> Result<()> {
        if let Window::Open { done } = self.window {
            self.window = Window::Broken;
            let begin = self.clock.now();
            self.reducer.reduce_now()?;
            self.clock.end_backward(begin);
            self.window = Window::Complete { done };
        }
        Ok(())
    }

    /// Drops the gradients of the window, however far it is.
    pub(crate) fn zero_grad(&mut self) -> Result<()> {
        self.reducer.discard()?;
        self.reducer.reset_window()?;
        self.reducer.take_reductions();
        self.clock.forget(self.steps + 1);
        self.forget_window();
        self.clipping = None;
        Ok(())
    }

    pub(crate) fn forget_window(&mut self) {
        if self.window != Window::HalfLoaded {
            self.window = Window::Empty;
        }
    }

    /// Refuses parameters that a failed load has left as a mixture.
    pub(crate) fn require_whole(&self, call: &'static str) -> Result<()> {
        match self.window {
            Window::HalfLoaded => Err(self.out_of_order(call)),
            _ => Ok(()),
        }
    }

    /// A load may follow one that failed.
    pub(crate) fn require_window_for_load(&self) -> Result<()> {
        match self.window {
            Window::HalfLoaded => Ok(()),
            _ => self.require_empty_window("load"),
        }
    }

    /// From now on parameters are a mixture, until `end_load`.
    pub(crate) fn begin_load(&mut self) {
        self.window = Window::HalfLoaded;
    }

    pub(crate) fn end_load(&mut self) -> Result<()> {
        self.window = Window::Empty;
        self.mark_update()
    }

    pub(crate) fn require_empty_window(&self, call: &'static str) -> Result<()> {
        if self.window == Window::Empty {
            Ok(())
        } else {
            Err(self.out_of_order(call))
        }
    }

    pub(crate) fn require_complete_window(&self, call: &'static str) -> Result<usize> {
        match self.window {
            Window::Complete { done } => Ok(done),
            _ => Err(self.out_of_order(call)),
        }
    }

    fn out_of_order(&self, call: &'static str) -> Error {
        if let Some(failure) = self.reducer.failure() {
            return failure;
        }
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
            Window::HalfLoaded => {
                "a load failed in the middle, and the parameters are a mixture; load a checkpoint".to_string()
            }
            Window::Broken => "an earlier backward failed, its gradients are incomplete; call zero_grad to forget them".to_string(),
        };
        Error::misuse(call, message)
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

    pub(crate) fn set_schedule(&mut self, schedule: LrSchedule) -> Result<()> {
        schedule.validate()?;
        self.schedule = schedule;
        Ok(())
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

/// Refuses optimizers that have no kernel for the device.
fn check_fused<O: Optimizer>(groups: &ParamGroups<O>, device: &Device) -> Result<()> {
    let unknown = |group: &&ParamGroup<O>| group.optimizer.fused().is_none();
    match groups.groups().iter().find(unknown) {
        Some(group) if device.is_cuda() => {
            let name = group.optimizer.name();
            let message = format!(
                "{name} has no CUDA kernel (Optimizer::fused); train on the CPU, or with AdamW or Sgd"
            );
            Err(Error::invalid("optimizer", message))
        }
        _ => Ok(()),
    }
}

/// 64 bits of the SHA-256 of some numbers.
fn digest(numbers: impl Iterator<Item = usize>) -> u64 {
    let mut hash = Sha256::new();
    numbers.for_each(|n| hash.update((n as u64).to_le_bytes()));
    let digest = hash.finalize();
    digest[..8]
        .iter()
        .fold(0, |bits, byte| bits << 8 | u64::from(*byte))
}
