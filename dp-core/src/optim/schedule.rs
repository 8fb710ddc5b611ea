//! Learning-rate schedules: a factor on each group's learning rate, as a function of the optimizer steps taken.

use super::DeepSpeedSchedule;
use crate::error::{Error, Result};

/// A learning-rate schedule. The rate of step `t = 0, 1, 2, ...` is the group's learning rate times [`factor(t)`]
/// (`LambdaLR` in PyTorch, whose `t` counts the same way). It advances with optimizer steps: neither the number of ranks
/// nor of micro-batches matters, and a skipped step does not count.
///
/// [`factor(t)`]: LrSchedule::factor
#[derive(Debug, Clone, Copy, PartialEq, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LrSchedule {
    /// `1`
    #[default]
    Constant,
    /// `t / warmup` below `warmup`, then `1`: `get_constant_schedule_with_warmup` of Hugging Face.
    LinearWarmup {
        /// Steps until the full rate.
        warmup: u64,
    },
    /// Linear warm-up, then linear decay to 0 at `total`: `get_linear_schedule_with_warmup` of Hugging Face.
    Linear {
        /// Steps until the full rate.
        warmup: u64,
        /// Steps until the rate is 0.
        total: u64,
    },
    /// Linear warm-up, then half a cosine from 1 to `min_factor` at `total`, constant after it. With `min_factor` 0 it is
    /// `get_cosine_schedule_with_warmup` of Hugging Face; without warm-up, `CosineAnnealingLR` of PyTorch.
    Cosine {
        /// Steps until the full rate.
        warmup: u64,
        /// Steps until the least rate.
        total: u64,
        /// The least rate as a fraction of the full one.
        min_factor: f64,
    },
    /// `gamma ^ floor(t / step_size)`: `StepLR` of PyTorch.
    Step {
        /// Steps between two decays.
        step_size: u64,
        /// Factor of each decay.
        gamma: f64,
    },
    /// `WarmupLR`, `WarmupDecayLR` and `WarmupCosineLR` of DeepSpeed, to the step.
    DeepSpeed(DeepSpeedSchedule),
}

impl LrSchedule {
    /// The factor for the step after `t` steps.
    pub fn factor(&self, t: u64) -> f64 {
        match *self {
            Self::Constant => 1.0,
            Self::LinearWarmup { warmup } => warm(t, warmup).unwrap_or(1.0),
            Self::Linear { warmup, total } => {
                warm(t, warmup).unwrap_or_else(|| 1.0 - progress(t, warmup, total))
            }
            Self::Cosine {
                warmup,
                total,
                min_factor,
            } => warm(t, warmup).unwrap_or_else(|| {
                let cosine = (std::f64::consts::PI * progress(t, warmup, total)).cos();
                min_factor + (1.0 - min_factor) * 0.5 * (1.0 + cosine)
            }),
            Self::Step { step_size, gamma } => {
                gamma.powi(i32::try_from(t / step_size.max(1)).unwrap_or(i32::MAX))
            }
            Self::DeepSpeed(schedule) => schedule.factor(t),
        }
    }

    /// Refuses values outside their range.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the field.
    pub fn validate(&self) -> Result<()> {
        let fraction = |what, x: f64| match (0.0..=1.0).contains(&x) {
            true => Ok(()),
            false => Err(Error::invalid(what, format!("{x} is not in [0, 1]"))),
        };
        match *self {
            Self::Linear { warmup, total } | Self::Cosine { warmup, total, .. }
                if total <= warmup =>
            {
                Err(Error::invalid(
                    "total",
                    format!("{total} steps must be more than the {warmup} of the warm-up"),
                ))
            }
            Self::Cosine { min_factor, .. } => fraction("min_factor", min_factor),
            Self::Step { step_size: 0, .. } => {
                Err(Error::invalid("step_size", "must be at least 1, got 0"))
            }
            Self::Step { gamma, .. } => fraction("gamma", gamma),
            Self::DeepSpeed(schedule) => schedule.validate(),
            _ => Ok(()),
        }
    }
}

/// The factor during the warm-up; `None` after it.
fn warm(t: u64, warmup: u64) -> Option<f64> {
    (t < warmup).then(|| t as f64 / warmup as f64)
}

/// From 0 at the end of the warm-up to 1 at `total` and after it.
fn progress(t: u64, warmup: u64, total: u64) -> f64 {
    (t.min(total).saturating_sub(warmup)) as f64 / total.saturating_sub(warmup).max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn factors(schedule: LrSchedule, steps: &[u64]) -> Vec<f64> {
        steps
            .iter()
            .map(|t| (schedule.factor(*t) * 1e6).round() / 1e6)
            .collect()
    }

    #[test]
    fn values_by_hand() {
        let warm = LrSchedule::LinearWarmup { warmup: 4 };
        assert_eq!(factors(warm, &[0, 1, 4, 9]), [0.0, 0.25, 1.0, 1.0]);
        let linear = LrSchedule::Linear {
            warmup: 2,
            total: 10,
        };
        assert_eq!(
            factors(linear, &[1, 2, 6, 10, 11]),
            [0.5, 1.0, 0.5, 0.0, 0.0]
        );
        let cosine = LrSchedule::Cosine {
            warmup: 0,
            total: 8,
            min_factor: 0.1,
        };
        assert_eq!(
            factors(cosine, &[0, 2, 4, 8, 100]),
            [1.0, 0.868198, 0.55, 0.1, 0.1]
        );
        // get_cosine_schedule_with_warmup(optimizer, 2, 10): 0.5 (1 + cos(pi (t - 2) / 8)) after the warm-up.
        let warm_cosine = LrSchedule::Cosine {
            warmup: 2,
            total: 10,
            min_factor: 0.0,
        };
        assert_eq!(
            factors(warm_cosine, &[0, 1, 2, 4, 6, 10, 11]),
            [0.0, 0.5, 1.0, 0.853553, 0.5, 0.0, 0.0]
        );
        let step = LrSchedule::Step {
            step_size: 3,
            gamma: 0.5,
        };
        assert_eq!(factors(step, &[0, 2, 3, 6]), [1.0, 1.0, 0.5, 0.25]);
    }

    #[test]
    fn bad_values_name_the_field() {
        let message = |s: LrSchedule| {
            s.validate()
                .err()
                .map(|e| e.to_string())
                .unwrap_or_default()
        };
        assert!(
            message(LrSchedule::Linear {
                warmup: 5,
                total: 5
            })
            .contains("total")
        );
        let zero = LrSchedule::Step {
            step_size: 0,
            gamma: 0.5,
        };
        assert!(message(zero).contains("step_size"));
        let above = LrSchedule::Cosine {
            warmup: 0,
            total: 5,
            min_factor: 1.5,
        };
        assert!(message(above).contains("min_factor"));
    }
}
