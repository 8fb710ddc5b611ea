//! Settings that all strategies share.

use candle_core::DType;

use crate::bucket::BucketCaps;
use crate::error::Result;
use crate::loss_scale::LossScaling;
use crate::non_finite::NonFinite;
use crate::precision::{GradAccumDType, is_trainable, not_trainable};

/// Settings that all strategies share. Start from the default and set what differs; `DdpConfig` and dp-zero's
/// `ZeroConfig` are made from it.
///
/// ```
/// use candle_core::DType;
/// use dp_core::{DdpConfig, EngineConfig, NonFinite};
///
/// let mut engine = EngineConfig::default();
/// engine.communication_dtype = Some(DType::BF16); // half the traffic
/// engine.non_finite = NonFinite::SkipStep;
/// let config = DdpConfig::from(engine);
/// # assert!(config.engine.overlap_comm);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct EngineConfig {
    /// Sizes of the gradient buckets.
    pub bucket_caps: BucketCaps,
    /// Give all ranks rank 0's buffers (batch-norm statistics) after each step, as PyTorch's `broadcast_buffers` does
    /// before each forward.
    pub broadcast_buffers: bool,
    /// Walk the graph of each loss before its backward, so that a parameter which the loss does not use does not hold up
    /// the reduction of its bucket (`find_unused_parameters` in PyTorch). Turn it off where parameters are used only
    /// inside recomputed (checkpointed) parts, which hide their graph: then each bucket waits for all its parameters.
    pub find_unused_parameters: bool,
    /// What to do about parameters that no rank has used.
    pub unused_parameters: UnusedParameters,
    /// What to do about NaN and infinite gradients.
    pub non_finite: NonFinite,
    /// Compare the parameters of all ranks after every so many steps; 0 never. Costs a SHA-256 of the parameters.
    pub compare_replicas_every: u64,
    /// What the gradients of 16-bit parameters are kept in.
    pub grad_accum_dtype: GradAccumDType,
    /// The dtype in which gradients travel (`communication_data_type` in DeepSpeed): f32, f16 or bf16. `None`: the one they are
    /// kept in. 16 bits halve the traffic of f32 gradients, and cost two roundings: each rank's gradient is rounded, they are
    /// added in f32, and the mean is rounded. With `u` = 2^-8 (bf16) or 2^-11 (f16), to first order
    ///
    /// ```text
    /// |error of the mean| <= u (mean over ranks of |g| + |mean of g|)
    /// ```
    ///
    /// In f16 numbers above 65504 become infinite, and those below 6e-8 are lost. Stage 2 reduces each micro-batch, so it rounds
    /// each. Two more buffers of the longest bucket's length are needed, in this dtype.
    pub communication_dtype: Option<DType>,
    /// Reduce gradients while backward goes on (`overlap_comm` in DeepSpeed). Off, backward waits for each bucket before it goes
    /// on: the same values, for comparison and for finding faults.
    pub overlap_comm: bool,
    /// What losses are multiplied by, for f16 models.
    pub loss_scaling: LossScaling,
    /// Read each loss, so that [`StepReport::loss`](crate::StepReport::loss) has the mean over all ranks. On the CPU that is free; where losses lie
    /// on another device each is a copy from there, which waits until it is computed. It travels with the summary of the step,
    /// so there is no further message.
    pub report_loss: bool,
}

impl EngineConfig {
    /// What must be the same on all ranks, in words.
    pub(crate) fn shared(&self) -> Vec<(&'static str, String)> {
        vec![
            ("bucket_caps", self.bucket_caps.to_string()),
            ("broadcast_buffers", self.broadcast_buffers.to_string()),
            ("unused_parameters", format!("{:?}", self.unused_parameters)),
            ("non_finite", format!("{:?}", self.non_finite)),
            (
                "compare_replicas_every",
                self.compare_replicas_every.to_string(),
            ),
            ("grad_accum_dtype", format!("{:?}", self.grad_accum_dtype)),
            (
                "communication_dtype",
                format!("{:?}", self.communication_dtype),
            ),
            ("overlap_comm", self.overlap_comm.to_string()),
            ("loss_scaling", format!("{:?}", self.loss_scaling)),
            ("report_loss", self.report_loss.to_string()),
        ]
    }

    /// Refuses values outside their range.
    pub(crate) fn validate(&self) -> Result<()> {
        match self.communication_dtype {
            Some(dtype) if !is_trainable(dtype) => Err(not_trainable("communication_dtype", dtype)),
            _ => self.loss_scaling.validate(),
        }
    }

    /// True if steps with NaN or infinite gradients are skipped: by [`NonFinite::SkipStep`], or for a dynamic loss scale.
    pub fn skips_non_finite(&self) -> bool {
        self.non_finite == NonFinite::SkipStep
            || matches!(self.loss_scaling, LossScaling::Dynamic(_))
    }
}

/// What to do about trained parameters that no rank has used in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[non_exhaustive]
pub enum UnusedParameters {
    /// Leave them alone, name them in each report, and warn once.
    #[default]
    Warn,
    /// Fail the step on all ranks with [`Error::NoGradient`](crate::Error::NoGradient).
    Error,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            bucket_caps: BucketCaps::default(),
            broadcast_buffers: true,
            find_unused_parameters: true,
            unused_parameters: UnusedParameters::default(),
            non_finite: NonFinite::default(),
            compare_replicas_every: 0,
            grad_accum_dtype: GradAccumDType::default(),
            communication_dtype: None,
            overlap_comm: true,
            loss_scaling: LossScaling::default(),
            report_loss: true,
        }
    }
}
