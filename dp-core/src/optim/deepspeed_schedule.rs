//! The learning-rate schedules that DeepSpeed configurations name.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// A warm-up, and what comes after it, with the formulas of `deepspeed.runtime.lr_schedules`. DeepSpeed's schedulers count steps
/// one later than PyTorch's do: the first step has the least rate, and step `t` that of `i = t - 1`. With `w` the warm-up, at
/// least 2:
///
/// ```text
/// i < w:   f = min + (1 - min) ln(i + 1) / ln(w)       WarmupType::Log, DeepSpeed's default
///          f = min + (1 - min) i / w                   WarmupType::Linear
/// i >= w:  f = 1                                       WarmupLR
///          f = min + (1 - min) max(0, (total - i) / (total - w))                                    WarmupDecayLR
///          f = end + (1 - end) (1 + cos(pi min(1, (i - w + 1) / (total - w)))) / 2                  WarmupCosineLR
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeepSpeedSchedule {
    /// `w`, steps until the full rate (`warmup_num_steps`).
    pub warmup: u64,
    /// `min`, the rate that the warm-up starts from, as a fraction of the full one: `warmup_min_lr / warmup_max_lr`, or
    /// `warmup_min_ratio`.
    pub min_factor: f64,
    /// How the rate grows (`warmup_type`).
    pub warmup_type: WarmupType,
    /// What comes after the warm-up.
    pub decay: LrDecay,
}

/// How the rate grows in the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Hash)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WarmupType {
    /// With the logarithm of the step.
    #[default]
    Log,
    /// In proportion to the step.
    Linear,
}

/// What comes after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LrDecay {
    /// The full rate: `WarmupLR`.
    Constant,
    /// A line down to the least rate: `WarmupDecayLR`.
    Linear {
        /// Steps until the least rate (`total_num_steps`).
        total: u64,
    },
    /// Half a cosine: `WarmupCosineLR`.
    Cosine {
        /// Steps until the last rate (`total_num_steps`).
        total: u64,
        /// `end`, the last rate as a fraction of the full one (`cos_min_ratio`).
        min_factor: f64,
    },
}

impl DeepSpeedSchedule {
    pub(super) fn factor(&self, t: u64) -> f64 {
        let Some(i) = t.checked_sub(1) else {
            return match self.decay {
                LrDecay::Cosine { .. } => 0.0,
                _ => self.min_factor,
            };
        };
        let warmup = self.warmup.max(2);
        let above_min = |fraction: f64| self.min_factor + (1.0 - self.min_factor) * fraction;
        if i < warmup {
            return above_min(match self.warmup_type {
                WarmupType::Log => ((i + 1) as f64).ln() / (warmup as f64).ln(),
                WarmupType::Linear => i as f64 / warmup as f64,
            });
        }
        match self.decay {
            LrDecay::Constant => 1.0,
            LrDecay::Linear { total } => {
                let left = total.saturating_sub(i) as f64;
                above_min(left / total.saturating_sub(warmup).max(1) as f64)
            }
            LrDecay::Cosine { total, min_factor } => {
                let decay_steps = total.saturating_sub(warmup).max(1) as f64;
                let progress = ((i - warmup + 1) as f64 / decay_steps).min(1.0);
                let cosine = (1.0 + (std::f64::consts::PI * progress).cos()) / 2.0;
                min_factor + (1.0 - min_factor) * cosine
            }
        }
    }

    pub(super) fn validate(&self) -> Result<()> {
        let fraction = |what, x: f64| match (0.0..=1.0).contains(&x) {
            true => Ok(()),
            false => Err(Error::invalid(what, format!("{x} is not in [0, 1]"))),
        };
        fraction("min_factor of the warm-up", self.min_factor)?;
        match self.decay {
            LrDecay::Linear { total } | LrDecay::Cosine { total, .. } if total <= self.warmup => {
                Err(Error::invalid(
                    "total",
                    format!(
                        "{total} steps must be more than the {} of the warm-up",
                        self.warmup
                    ),
                ))
            }
            LrDecay::Cosine { min_factor, .. } => fraction("min_factor of the cosine", min_factor),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(schedule: DeepSpeedSchedule, steps: u64) -> Vec<f64> {
        (0..steps)
            .map(|t| (schedule.factor(t) * 0.01 * 1e9).round() / 1e9)
            .collect()
    }

    /// What DeepSpeed 0.19.8 gives an optimizer with a rate of 0.01.
    #[test]
    fn rates_are_those_of_deepspeed() {
        let warmup_lr = DeepSpeedSchedule {
            warmup: 4,
            min_factor: 0.1,
            warmup_type: WarmupType::Log,
            decay: LrDecay::Constant,
        };
        assert_eq!(
            rates(warmup_lr, 8),
            [0.001, 0.001, 0.0055, 0.008132331, 0.01, 0.01, 0.01, 0.01]
        );
        let linear = DeepSpeedSchedule {
            min_factor: 0.0,
            warmup_type: WarmupType::Linear,
            ..warmup_lr
        };
        assert_eq!(
            rates(linear, 8),
            [0.0, 0.0, 0.0025, 0.005, 0.0075, 0.01, 0.01, 0.01]
        );
        let decay = DeepSpeedSchedule {
            decay: LrDecay::Linear { total: 10 },
            ..linear
        };
        assert_eq!(
            rates(decay, 14)[5..],
            [
                0.01,
                0.008333333,
                0.006666667,
                0.005,
                0.003333333,
                0.001666667,
                0.0,
                0.0,
                0.0
            ]
        );
        let cosine = DeepSpeedSchedule {
            decay: LrDecay::Cosine {
                total: 10,
                min_factor: 0.05,
            },
            ..warmup_lr
        };
        assert_eq!(
            rates(cosine, 14),
            [
                0.0,
                0.001,
                0.0055,
                0.008132331,
                0.01,
                0.009363621,
                0.007625,
                0.00525,
                0.002875,
                0.001136379,
                0.0005,
                0.0005,
                0.0005,
                0.0005
            ]
        );
        // A warm-up of 1 step counts as 2.
        let short = DeepSpeedSchedule {
            warmup: 1,
            min_factor: 0.0,
            warmup_type: WarmupType::Linear,
            decay: LrDecay::Cosine {
                total: 3,
                min_factor: 0.0001,
            },
        };
        assert_eq!(rates(short, 6), [0.0, 0.0, 0.005, 1e-6, 1e-6, 1e-6]);
    }

    #[test]
    fn bad_values_are_named() {
        let bad = DeepSpeedSchedule {
            warmup: 5,
            min_factor: 0.0,
            warmup_type: WarmupType::Log,
            decay: LrDecay::Linear { total: 5 },
        };
        assert!(
            bad.validate()
                .is_err_and(|e| e.to_string().contains("5 steps"))
        );
        let bad = DeepSpeedSchedule {
            min_factor: 2.0,
            decay: LrDecay::Constant,
            ..bad
        };
        assert!(
            bad.validate()
                .is_err_and(|e| e.to_string().contains("warm-up"))
        );
    }
}
