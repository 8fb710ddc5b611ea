//! Stochastic gradient descent: `torch.optim.SGD`.

use super::{FusedOptimizer, Optimizer, check, unknown};
use crate::error::Result;

/// SGD with momentum, weight decay and Nesterov's variant. Per element, with gradient `g`:
///
/// ```text
/// g <- g + weight_decay w
/// b <- momentum b + (1 - dampening) g        (at the parameter's first step: b <- g)
/// g <- g + momentum b if nesterov, else b    (only with momentum)
/// w <- w - lr g
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Sgd {
    /// Learning rate.
    pub lr: f64,
    /// Momentum factor; 0 keeps no state.
    pub momentum: f64,
    /// Dampening of the momentum.
    pub dampening: f64,
    /// L2 penalty, added to the gradient.
    pub weight_decay: f64,
    /// Nesterov momentum.
    pub nesterov: bool,
}

impl Sgd {
    /// Plain SGD.
    pub fn new(lr: f64) -> Self {
        Self {
            lr,
            momentum: 0.0,
            dampening: 0.0,
            weight_decay: 0.0,
            nesterov: false,
        }
    }

    /// For the update number `step` of a parameter, counted from 1, whose gradient is multiplied by `grad_scale`.
    pub(crate) fn factors(&self, step: u64, grad_scale: f32) -> SgdFactors {
        SgdFactors {
            lr: self.lr as f32,
            decay: self.weight_decay as f32,
            momentum: self.momentum as f32,
            keep: (1.0 - self.dampening) as f32,
            grad_scale,
            first: u32::from(step == 1),
            nesterov: u32::from(self.nesterov),
        }
    }
}

/// What all elements of an update have in common. CUDA kernels take it as it lies in memory.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct SgdFactors {
    lr: f32,
    decay: f32,
    pub momentum: f32,
    /// `1 - dampening`
    keep: f32,
    grad_scale: f32,
    /// 1 at the parameter's first step, else 0.
    first: u32,
    /// 1 or 0.
    nesterov: u32,
}

impl Optimizer for Sgd {
    fn name(&self) -> &'static str {
        "sgd"
    }

    fn state_names(&self) -> &'static [&'static str] {
        if self.momentum == 0.0 {
            &[]
        } else {
            &["momentum_buffer"]
        }
    }

    fn update(
        &self,
        step: u64,
        values: &mut [f32],
        grad: &[f32],
        grad_scale: f32,
        state: &mut [&mut [f32]],
    ) {
        let f = self.factors(step, grad_scale);
        let gradient = |g: f32, w: f32| {
            let g = g * f.grad_scale;
            if f.decay == 0.0 { g } else { g + f.decay * w }
        };
        if f.momentum == 0.0 {
            for (w, g) in values.iter_mut().zip(grad) {
                *w -= gradient(*g, *w) * f.lr;
            }
            return;
        }
        let [buffer, ..] = state else {
            unreachable!("SGD with momentum names one state, so its caller passes one");
        };
        let (first, nesterov) = (f.first == 1, f.nesterov == 1);
        for ((w, g), b) in values.iter_mut().zip(grad).zip(buffer.iter_mut()) {
            let g = gradient(*g, *w);
            *b = if first {
                g
            } else {
                *b * f.momentum + g * f.keep
            };
            let direction = if nesterov { g + f.momentum * *b } else { *b };
            *w -= direction * f.lr;
        }
    }

    fn fused(&self) -> Option<FusedOptimizer<'_>> {
        Some(FusedOptimizer::Sgd(self))
    }

    fn hyper_parameters(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("lr", self.lr),
            ("momentum", self.momentum),
            ("dampening", self.dampening),
            ("weight_decay", self.weight_decay),
            ("nesterov", f64::from(u8::from(self.nesterov))),
        ]
    }

    fn set_hyper_parameter(&mut self, name: &str, value: f64) -> Result<()> {
        match name {
            "lr" => self.lr = value,
            "momentum" => self.momentum = value,
            "dampening" => self.dampening = value,
            "weight_decay" => self.weight_decay = value,
            "nesterov" => self.nesterov = value != 0.0,
            other => return Err(unknown(self.name(), other)),
        }
        Ok(())
    }

    fn learning_rate(&self) -> f64 {
        self.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.lr = lr;
    }

    fn validate(&self) -> Result<()> {
        let at_least_0 = |x: f64| x.is_finite() && x >= 0.0;
        check("lr", at_least_0(self.lr), self.lr, "finite and >= 0")?;
        check(
            "momentum",
            at_least_0(self.momentum),
            self.momentum,
            "finite and >= 0",
        )?;
        check(
            "dampening",
            self.dampening.is_finite(),
            self.dampening,
            "finite",
        )?;
        let wd = self.weight_decay;
        check("weight_decay", at_least_0(wd), wd, "finite and >= 0")?;
        let possible = !self.nesterov || (self.momentum > 0.0 && self.dampening == 0.0);
        check(
            "nesterov",
            possible,
            self.momentum,
            "a momentum for Nesterov: it needs momentum > 0 and dampening 0",
        )
    }
}
