//! An optimizer whose kind is known at run time only.

use dp_core::{AdamW, FusedOptimizer, Optimizer, Result, Sgd};

/// The optimizer that a configuration names.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum ConfiguredOptimizer {
    /// AdamW.
    AdamW(AdamW),
    /// SGD.
    Sgd(Sgd),
}

/// The same call on whichever it is.
macro_rules! either {
    ($self:expr, $optimizer:ident => $call:expr) => {
        match $self {
            ConfiguredOptimizer::AdamW($optimizer) => $call,
            ConfiguredOptimizer::Sgd($optimizer) => $call,
        }
    };
}

impl Optimizer for ConfiguredOptimizer {
    fn name(&self) -> &'static str {
        either!(self, o => o.name())
    }

    fn state_names(&self) -> &'static [&'static str] {
        either!(self, o => o.state_names())
    }

    fn update(
        &self,
        step: u64,
        values: &mut [f32],
        grad: &[f32],
        grad_scale: f32,
        state: &mut [&mut [f32]],
    ) {
        either!(self, o => o.update(step, values, grad, grad_scale, state));
    }

    fn hyper_parameters(&self) -> Vec<(&'static str, f64)> {
        either!(self, o => o.hyper_parameters())
    }

    fn set_hyper_parameter(&mut self, name: &str, value: f64) -> Result<()> {
        either!(self, o => o.set_hyper_parameter(name, value))
    }

    fn fused(&self) -> Option<FusedOptimizer<'_>> {
        either!(self, o => o.fused())
    }

    fn learning_rate(&self) -> f64 {
        either!(self, o => o.learning_rate())
    }

    fn set_learning_rate(&mut self, lr: f64) {
        either!(self, o => o.set_learning_rate(lr));
    }

    fn validate(&self) -> Result<()> {
        either!(self, o => o.validate())
    }
}
