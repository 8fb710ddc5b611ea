//! AdamW: "Decoupled weight decay regularization", arXiv 1711.05101; `torch.optim.AdamW`.

use multiversion::multiversion;

use super::{FusedOptimizer, Optimizer, check, unknown};
use crate::error::Result;

/// AdamW with PyTorch's defaults. Per element, with gradient `g` and step `t`:
///
/// ```text
/// w <- w (1 - lr weight_decay)
/// m <- beta1 m + (1 - beta1) g
/// v <- beta2 v + (1 - beta2) g^2
/// w <- w - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)
/// ```
///
/// The operations are rounded in the order of `candle_nn::AdamW`, so one rank computes its very bits.
#[derive(Debug, Clone, PartialEq)]
pub struct AdamW {
    /// Learning rate.
    pub lr: f64,
    /// Decay rate of the first moment.
    pub beta1: f64,
    /// Decay rate of the second moment.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

impl Default for AdamW {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
        }
    }
}

impl AdamW {
    /// The defaults with another learning rate.
    pub fn with_lr(lr: f64) -> Self {
        Self {
            lr,
            ..Self::default()
        }
    }

    /// For the update number `step` of a parameter, counted from 1, whose gradient is multiplied by `grad_scale`.
    pub(crate) fn factors(&self, step: u64, grad_scale: f32) -> AdamWFactors {
        let t = i32::try_from(step).unwrap_or(i32::MAX);
        AdamWFactors {
            decay: (1.0 - self.lr * self.weight_decay) as f32,
            beta1: self.beta1 as f32,
            beta2: self.beta2 as f32,
            rest1: (1.0 - self.beta1) as f32,
            rest2: (1.0 - self.beta2) as f32,
            correction1: (1.0 / (1.0 - self.beta1.powi(t))) as f32,
            correction2: (1.0 / (1.0 - self.beta2.powi(t))) as f32,
            lr: self.lr as f32,
            eps: self.eps as f32,
            grad_scale,
        }
    }
}

/// What all elements of an update have in common. CUDA kernels take it as it lies in memory.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct AdamWFactors {
    decay: f32,
    beta1: f32,
    beta2: f32,
    rest1: f32,
    rest2: f32,
    correction1: f32,
    correction2: f32,
    lr: f32,
    eps: f32,
    grad_scale: f32,
}

/// Rust contracts nothing to fused operations, so all versions give the same bits.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2"))]
fn update(f: &AdamWFactors, values: &mut [f32], grad: &[f32], m: &mut [f32], v: &mut [f32]) {
    // One length for all slices lets the compiler drop the bounds checks.
    let n = values.len();
    let (grad, m, v) = (&grad[..n], &mut m[..n], &mut v[..n]);
    for i in 0..n {
        let g = grad[i] * f.grad_scale;
        m[i] = m[i] * f.beta1 + g * f.rest1;
        v[i] = v[i] * f.beta2 + (g * g) * f.rest2;
        let m_hat = m[i] * f.correction1;
        let v_hat = v[i] * f.correction2;
        values[i] = values[i] * f.decay - (m_hat / (v_hat.sqrt() + f.eps)) * f.lr;
    }
}

impl Optimizer for AdamW {
    fn name(&self) -> &'static str {
        "adamw"
    }

    fn state_names(&self) -> &'static [&'static str] {
        &["exp_avg", "exp_avg_sq"]
    }

    fn update(
        &self,
        step: u64,
        values: &mut [f32],
        grad: &[f32],
        grad_scale: f32,
        state: &mut [&mut [f32]],
    ) {
        let [exp_avg, exp_avg_sq, ..] = state else {
            unreachable!("AdamW names two states, so its caller passes two");
        };
        let factors = self.factors(step, grad_scale);
        update(&factors, values, grad, exp_avg, exp_avg_sq);
    }

    fn fused(&self) -> Option<FusedOptimizer<'_>> {
        Some(FusedOptimizer::AdamW(self))
    }

    fn hyper_parameters(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("lr", self.lr),
            ("beta1", self.beta1),
            ("beta2", self.beta2),
            ("eps", self.eps),
            ("weight_decay", self.weight_decay),
        ]
    }

    fn set_hyper_parameter(&mut self, name: &str, value: f64) -> Result<()> {
        match name {
            "lr" => self.lr = value,
            "beta1" => self.beta1 = value,
            "beta2" => self.beta2 = value,
            "eps" => self.eps = value,
            "weight_decay" => self.weight_decay = value,
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
        let below_1 = |x: f64| (0.0..1.0).contains(&x);
        check("lr", at_least_0(self.lr), self.lr, "finite and >= 0")?;
        check("beta1", below_1(self.beta1), self.beta1, "in [0, 1)")?;
        check("beta2", below_1(self.beta2), self.beta2, "in [0, 1)")?;
        check("eps", at_least_0(self.eps), self.eps, "finite and >= 0")?;
        let wd = self.weight_decay;
        check("weight_decay", at_least_0(wd), wd, "finite and >= 0")
    }
}
