//! From DeepSpeed's schedulers to [`LrSchedule`].

use dp_core::{DeepSpeedSchedule, LrDecay, LrSchedule, WarmupType};

use super::{ConfigError, DeepSpeedConfig, OptimizerSection, SchedulerSection, WarmupCosineParams};

const DEFAULT_LR: f64 = 1e-3;

impl DeepSpeedConfig {
    /// The schedule of the learning rate; `total_steps` is the length of the run, for a scheduler without `total_num_steps`.
    ///
    /// # Errors
    /// [`ConfigError`] naming the keys that are missing or do not fit together.
    pub fn schedule(&self, total_steps: Option<u64>) -> Result<LrSchedule, ConfigError> {
        let Some(scheduler) = &self.scheduler else {
            return Ok(LrSchedule::Constant);
        };
        let params = |key: &str| format!("scheduler.params.{key}");
        let min_factor = |min: f64, full: f64| {
            let key = params("warmup_min_lr");
            match (min, full) {
                (min, _) if min.is_nan() || min < 0.0 => {
                    Err(ConfigError::invalid(key, format!("{min} is no rate")))
                }
                (min, full) if min > full => Err(ConfigError::contradiction(
                    key,
                    params("warmup_max_lr"),
                    format!("the rate grows from {min} to {full}"),
                )),
                (0.0, _) => Ok(0.0),
                (min, full) => Ok(min / full),
            }
        };
        let total = |given: Option<u64>, warmup: u64| {
            let key = params("total_num_steps");
            let Some(total) = given.or(total_steps) else {
                return Err(ConfigError::invalid(
                    key,
                    "is not there, and nothing else says how long the run is",
                ));
            };
            if total <= warmup.max(2) {
                let end = match given {
                    Some(_) => key,
                    None => "the steps of the run".to_string(),
                };
                let reason = format!("a run of {total} steps ends in the warm-up of {warmup}");
                return Err(ConfigError::contradiction(
                    params("warmup_num_steps"),
                    end,
                    reason,
                ));
            }
            Ok(total)
        };
        let full = self.full_learning_rate()?;
        let (warmup, min_factor, warmup_type, decay) = match scheduler {
            SchedulerSection::WarmupLR(p) => (
                p.warmup_num_steps,
                min_factor(p.warmup_min_lr, full)?,
                p.warmup_type,
                LrDecay::Constant,
            ),
            SchedulerSection::WarmupDecayLR(p) => (
                p.warmup_num_steps,
                min_factor(p.warmup_min_lr, full)?,
                p.warmup_type,
                LrDecay::Linear {
                    total: total(p.total_num_steps, p.warmup_num_steps)?,
                },
            ),
            SchedulerSection::WarmupCosineLR(p) => {
                cosine(p, total(p.total_num_steps, p.warmup_num_steps)?)?
            }
        };
        if warmup == 0 {
            return Err(ConfigError::invalid(
                params("warmup_num_steps"),
                "must be at least 1",
            ));
        }
        Ok(LrSchedule::DeepSpeed(DeepSpeedSchedule {
            warmup,
            min_factor,
            warmup_type,
            decay,
        }))
    }

    /// The rate that the schedule is a fraction of: the scheduler's `warmup_max_lr`, else the optimizer's.
    pub(super) fn full_learning_rate(&self) -> Result<f64, ConfigError> {
        let own = match &self.optimizer {
            OptimizerSection::AdamW(p) => p.lr,
            OptimizerSection::Sgd(p) => p.lr,
        };
        let max = match &self.scheduler {
            Some(SchedulerSection::WarmupLR(p)) => p.warmup_max_lr,
            Some(SchedulerSection::WarmupDecayLR(p)) => p.warmup_max_lr,
            Some(SchedulerSection::WarmupCosineLR(_)) | None => None,
        };
        match (own, max) {
            (Some(own), Some(max)) if own != max => Err(ConfigError::contradiction(
                "optimizer.params.lr",
                "scheduler.params.warmup_max_lr",
                format!(
                    "the full rate cannot be both {own} and {max} (DeepSpeed takes the scheduler's)"
                ),
            )),
            (own, max) => Ok(max.or(own).unwrap_or(DEFAULT_LR)),
        }
    }
}

type Parts = (u64, f64, WarmupType, LrDecay);

fn cosine(p: &WarmupCosineParams, total: u64) -> Result<Parts, ConfigError> {
    for (key, ratio) in [
        ("warmup_min_ratio", p.warmup_min_ratio),
        ("cos_min_ratio", p.cos_min_ratio),
    ] {
        if !(0.0..=1.0).contains(&ratio) {
            let message = format!("{ratio} is not in [0, 1]");
            return Err(ConfigError::invalid(
                format!("scheduler.params.{key}"),
                message,
            ));
        }
    }
    let decay = LrDecay::Cosine {
        total,
        min_factor: p.cos_min_ratio,
    };
    Ok((p.warmup_num_steps, p.warmup_min_ratio, p.warmup_type, decay))
}
