//! Settings that all strategies share.

use crate::bucket::BucketCaps;
use crate::non_finite::NonFinite;

/// Settings that all strategies share.
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
}

impl EngineConfig {
    /// What must be the same on all ranks, in words.
    pub(crate) fn shared(&self) -> Vec<(&'static str, String)> {
        let caps = self.bucket_caps;
        vec![
            (
                "bucket_caps",
                format!("{} and {} bytes", caps.first(), caps.rest()),
            ),
            ("broadcast_buffers", self.broadcast_buffers.to_string()),
            ("unused_parameters", format!("{:?}", self.unused_parameters)),
            ("non_finite", format!("{:?}", self.non_finite)),
            (
                "compare_replicas_every",
                self.compare_replicas_every.to_string(),
            ),
        ]
    }
}

/// What to do about trained parameters that no rank has used in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
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
        }
    }
}
