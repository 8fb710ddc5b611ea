//! Optimizers that work on flat slices, so that a rank can update just the elements it owns.

mod adamw;
mod deepspeed_schedule;
mod groups;
mod schedule;
mod sgd;

pub use adamw::AdamW;
#[cfg(any(test, feature = "cuda"))]
pub(crate) use adamw::AdamWFactors;
pub use deepspeed_schedule::{DeepSpeedSchedule, LrDecay, WarmupType};
pub use groups::{ParamGroup, ParamGroups};
pub use schedule::LrSchedule;
pub use sgd::Sgd;
#[cfg(any(test, feature = "cuda"))]
pub(crate) use sgd::SgdFactors;

use crate::error::Result;

/// An update rule that there are GPU kernels for.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum FusedOptimizer<'a> {
    /// [`AdamW`].
    AdamW(&'a AdamW),
    /// [`Sgd`].
    Sgd(&'a Sgd),
}

/// Hyper-parameters of an elementwise optimizer, and its update rule.
pub trait Optimizer: Clone + PartialEq + Send + std::fmt::Debug + 'static {
    /// The kind of optimizer, e.g. `adamw`: checkpoints name it.
    fn name(&self) -> &'static str;

    /// Names of the f32 numbers kept per element: the optimizer state. AdamW keeps `exp_avg` and `exp_avg_sq`.
    fn state_names(&self) -> &'static [&'static str];

    /// Updates `values` in place. `grad` and each slice of `state` have the same length as `values`; `state` starts
    /// as zeros and has one slice per [`state_names`](Self::state_names), or more. `step` counts the updates of this
    /// parameter from 1. The gradient counts as `grad[i] * grad_scale`.
    fn update(
        &self,
        step: u64,
        values: &mut [f32],
        grad: &[f32],
        grad_scale: f32,
        state: &mut [&mut [f32]],
    );

    /// The rule that [`update`](Self::update) applies, as one that GPUs have a kernel for (`fused=True` in PyTorch). `None`, the
    /// default: parameters on a GPU cannot be trained with it.
    fn fused(&self) -> Option<FusedOptimizer<'_>> {
        None
    }

    /// The hyper-parameters by name. Ranks compare them in every step, so all that influences the update belongs here.
    fn hyper_parameters(&self) -> Vec<(&'static str, f64)>;

    /// Sets one of [`hyper_parameters`](Self::hyper_parameters).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) if there is none of this name.
    fn set_hyper_parameter(&mut self, name: &str, value: f64) -> Result<()>;

    /// The learning rate.
    fn learning_rate(&self) -> f64;

    /// Sets the learning rate.
    fn set_learning_rate(&mut self, lr: f64);

    /// Refuses values outside their range.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) naming the hyper-parameter.
    fn validate(&self) -> Result<()>;
}

fn unknown(optimizer: &str, name: &str) -> crate::Error {
    crate::Error::invalid(
        "hyper-parameter",
        format!("{optimizer} has none called `{name}`"),
    )
}

fn check(what: &'static str, ok: bool, value: f64, range: &str) -> Result<()> {
    if ok {
        Ok(())
    } else {
        Err(crate::Error::invalid(
            what,
            format!("{value} is not {range}"),
        ))
    }
}
