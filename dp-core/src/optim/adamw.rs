//! AdamW: "Decoupled weight decay regularization", arXiv 1711.05101; `torch.optim.AdamW`.

use super::{Optimizer, check, unknown};
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
        let t = i32::try_from(step).unwrap_or(i32::MAX);
        let decay = (1.0 - self.lr * self.weight_decay) as f32;
        let (b1, b2) = (self.beta1 as f32, self.beta2 as f32);
        let (c1, c2) = ((1.0 - self.beta1) as f32, (1.0 - self.beta2) as f32);
        let scale_m = (1.0 / (1.0 - self.beta1.powi(t))) as f32;
        let scale_v = (1.0 / (1.0 - self.beta2.powi(t))) as f32;
        let (lr, eps) = (self.lr as f32, self.eps as f32);
        // One length for all slices lets the compiler drop the bounds checks.
        let n = values.len();
        let (grad, m, v) = (&grad[..n], &mut exp_avg[..n], &mut exp_avg_sq[..n]);
        for i in 0..n {
            let g = grad[i] * grad_scale;
            m[i] = m[i] * b1 + g * c1;
            v[i] = v[i] * b2 + (g * g) * c2;
            let m_hat = m[i] * scale_m;
            let v_hat = v[i] * scale_v;
            values[i] = values[i] * decay - (m_hat / (v_hat.sqrt() + eps)) * lr;
        }
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
