//! What a trainer will hold and send, before there is one.

use dp_core::strategy::PoolSize;
use dp_core::{BucketLayout, EngineConfig, Error, ParamKind, ParamSpec, Result};
use serde::Serialize;

use crate::estimate::{BytesPerElement, ModelStates, Sharding};
use crate::training_step::TrainingStep;

/// What each rank's trainer will hold, and send in a step.
///
/// [`of_specs`](Self::of_specs) lays out the real buckets, by the code that trainers use, so its numbers are those that a trainer's
/// ledger and its communicator count, to the byte. [`of_count`](Self::of_count) knows a number of parameters only, and gives the
/// formulas of the ZeRO paper. Activations are the model's business, and in neither.
///
/// ```
/// use candle_core::DType;
/// use dp_core::{EngineConfig, ParamShapes, Result};
/// use dp_zero::{Sharding, TrainerPlan};
///
/// # fn main() -> Result<()> {
/// let specs = ParamShapes::record(DType::BF16, |vb| candle_nn::linear(4096, 4096, vb.pp("fc")))?;
/// let adamw = 2; // numbers of optimizer state per element
/// let plan = TrainerPlan::of_specs(&specs, 64, Sharding::Zero2, adamw, &EngineConfig::default())?;
/// assert_eq!(plan.states.parameters, 2 * (4096 * 4096 + 4096));
/// assert_eq!(plan.num_buckets, Some(2));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TrainerPlan {
    /// How model states are spread over the ranks.
    pub sharding: Sharding,
    /// Number of ranks.
    pub world_size: usize,
    /// Bytes of parameters, gradients and optimizer state.
    pub states: ModelStates,
    /// Bytes of the buffers that exist only to send or receive: their peak in steps ([`Category::Communication`](dp_core::memory::Category)).
    /// `None` where that is not known: from a count, and for [`Sharding::Zero3`].
    pub communication: Option<u64>,
    /// Bytes of the largest buffer in which rank 0's values come while the trainer is made. Gradients, optimizer state and
    /// the buffers above are not there yet. `None` as above.
    pub set_up: Option<u64>,
    /// Bytes that go from a rank to others in a step, without the comparison of replicas; of the rank that
    /// sends most. [`TrainingStep::bytes_sent`] and the broadcast of buffers, which is rank 0's.
    pub bytes_sent_per_step: u64,
    /// The same of rank 0, which often differs by a few bytes. `None` as above.
    pub bytes_sent_by_rank_0: Option<u64>,
    /// Number of gradient buckets. `None` as above.
    pub num_buckets: Option<usize>,
}

impl TrainerPlan {
    /// For a model of these parameters, in creation order ([`ParamShapes`](dp_core::ParamShapes) finds them), and an
    /// optimizer that keeps `num_states` f32 numbers per element: AdamW 2, SGD 1 with momentum and 0 without. Exact, but for
    /// [`Sharding::Zero3`], for which there is no trainer: there states are those of `Zero2` with the trained parameters divided by the
    /// ranks, too, and each micro-batch gathers these once more. A step is one micro-batch without clipping; see [`of_steps`](Self::of_steps).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no ranks; [`Error::UnsupportedDType`] for a trained parameter that is not f32, f16 or
    /// bf16.
    pub fn of_specs(
        specs: &[ParamSpec],
        world_size: usize,
        sharding: Sharding,
        num_states: usize,
        config: &EngineConfig,
    ) -> Result<Self> {
        let step = TrainingStep::default();
        Self::of_steps(specs, world_size, sharding, num_states, config, step)
    }

    /// As [`of_specs`](Self::of_specs), for a loop whose steps are `step`. Only what is sent depends on it.
    ///
    /// # Errors
    /// Those of [`of_specs`](Self::of_specs), or a step of no micro-batch.
    pub fn of_steps(
        specs: &[ParamSpec],
        world_size: usize,
        sharding: Sharding,
        num_states: usize,
        config: &EngineConfig,
        step: TrainingStep,
    ) -> Result<Self> {
        if step.num_micro_batches == 0 {
            return Err(Error::invalid(
                "num_micro_batches",
                "a step has at least 1 micro-batch, got 0",
            ));
        }
        check_world_size(world_size)?;
        ParamSpec::check_trainable(specs)?;
        let order: Vec<usize> = (0..specs.len()).collect();
        let (caps, accum) = (config.bucket_caps, config.grad_accum_dtype);
        let layout = BucketLayout::new(specs, &order, caps, accum, world_size);
        let Some(states) = ModelStates::of_layout(&layout, specs, sharding, num_states) else {
            return Ok(Self::zero3(specs, &layout, num_states, config, step));
        };
        let buffers = || specs.iter().filter(|s| s.kind == ParamKind::Buffer);
        let is_broadcast = |_: &&ParamSpec| config.broadcast_buffers && world_size > 1;
        let largest = |bytes: Option<u64>| bytes.unwrap_or(0);
        let all = specs.iter().filter(|_| world_size > 1);
        // Buffers go to all other ranks from rank 0; of the others the last one sends most.
        let sent = |rank| step.bytes_sent(&layout, sharding, config, specs.len(), rank);
        let broadcast: u64 = buffers()
            .filter(is_broadcast)
            .map(ParamSpec::num_bytes)
            .sum();
        let from_rank_0 = sent(0) + (world_size as u64 - 1) * broadcast;
        Ok(Self {
            sharding,
            world_size,
            states,
            communication: Some(
                pools(&layout, sharding, config)
                    .iter()
                    .map(PoolSize::num_bytes)
                    .sum::<u64>()
                    + largest(
                        buffers()
                            .filter(is_broadcast)
                            .map(ParamSpec::num_bytes)
                            .max(),
                    ),
            ),
            set_up: Some(largest(all.map(ParamSpec::num_bytes).max())),
            bytes_sent_per_step: from_rank_0.max(sent(world_size - 1)),
            bytes_sent_by_rank_0: Some(from_rank_0),
            num_buckets: Some(layout.buckets().len()),
        })
    }

    fn zero3(
        specs: &[ParamSpec],
        layout: &BucketLayout,
        num_states: usize,
        config: &EngineConfig,
        step: TrainingStep,
    ) -> Self {
        let n = layout.world_size();
        let kept = specs.iter().filter(|s| s.kind != ParamKind::Trained);
        let mut plan = Self {
            sharding: Sharding::Zero3,
            world_size: n,
            states: ModelStates::of_layout(layout, specs, Sharding::Zero2, num_states)
                .expect("stage 2 has a trainer"),
            communication: None,
            set_up: None,
            bytes_sent_per_step: 0,
            bytes_sent_by_rank_0: None,
            num_buckets: None,
        };
        plan.states.parameters = kept.map(ParamSpec::num_bytes).sum();
        for bucket in layout.buckets() {
            let sent_in = config.communication_dtype.unwrap_or(bucket.grad_dtype);
            let (slice, size) = (
                (bucket.padded_len / n) as u64,
                bucket.dtype.size_in_bytes() as u64,
            );
            plan.states.parameters += slice * size;
            let each = 2 * size + sent_in.size_in_bytes() as u64;
            plan.bytes_sent_per_step +=
                step.num_micro_batches as u64 * (n as u64 - 1) * slice * each;
        }
        plan
    }

    /// By the formulas of arXiv 1910.02054, sections 5 and 7, for `num_params` trained elements. With `P` bytes of parameters and
    /// `G` of gradients as they travel (`bytes_sent` per element), a rank sends `2 (N-1)/N G` in plain data parallelism, `(N-1)/N (G + P)` in
    /// stages 1 and 2, and `(N-1)/N (G + 2 P)` in stage 3, which gathers parameters for forward and for backward.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no ranks.
    pub fn of_count(
        num_params: u64,
        world_size: usize,
        sharding: Sharding,
        bytes: BytesPerElement,
        bytes_sent: u64,
    ) -> Result<Self> {
        check_world_size(world_size)?;
        let n = world_size as u64;
        let per_element = bytes_sent
            + match sharding {
                Sharding::Ddp => bytes_sent,
                Sharding::Zero1 | Sharding::Zero2 => bytes.parameters,
                Sharding::Zero3 => 2 * bytes.parameters,
            };
        Ok(Self {
            sharding,
            world_size,
            states: ModelStates::estimate(num_params, n, sharding, bytes),
            communication: None,
            set_up: None,
            bytes_sent_per_step: (n - 1) * num_params.div_ceil(n) * per_element,
            bytes_sent_by_rank_0: None,
            num_buckets: None,
        })
    }

    /// True if a trainer counts the same bytes.
    pub fn is_exact(&self) -> bool {
        self.communication.is_some()
    }

    /// Bytes of the fullest moment: model states, communication buffers (as far as they are known) and `activations`; or
    /// parameters and what comes from rank 0 while the trainer is made.
    pub fn peak(&self, activations: u64) -> u64 {
        let in_a_step = self.states.total() + self.communication.unwrap_or(0) + activations;
        in_a_step.max(self.states.parameters + self.set_up.unwrap_or(0))
    }
}

fn check_world_size(world_size: usize) -> Result<()> {
    match world_size {
        0 => Err(Error::invalid(
            "world_size",
            "a plan is for at least 1 rank, got 0",
        )),
        _ => Ok(()),
    }
}

/// The buffers that serve buckets in turn, for all that the strategy does.
fn pools(layout: &BucketLayout, sharding: Sharding, config: &EngineConfig) -> Vec<PoolSize> {
    let mut pools = match sharding {
        Sharding::Ddp | Sharding::Zero3 => Vec::new(),
        Sharding::Zero1 => PoolSize::to_gather(layout),
        Sharding::Zero2 => PoolSize::to_reduce_and_gather(layout),
    };
    let wire = config.communication_dtype;
    pools.extend(wire.and_then(|dtype| PoolSize::to_convert(layout, dtype)));
    pools
}
