//! Loss scaling, which keeps the gradients of f16 models in the range of f16.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// What losses are multiplied by before backward, and gradients divided by before the update.
///
/// f16 has no numbers below `6e-8`, and many gradients are smaller. bf16 has the range of f32 and needs no scaling; a trainer
/// of a model without f16 parameters warns about it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
#[non_exhaustive]
pub enum LossScaling {
    /// No scaling.
    #[default]
    Off,
    /// Always this number (`loss_scale` in DeepSpeed). What overflows is treated as [`NonFinite`](crate::NonFinite) says.
    Static(f64),
    /// As large as the gradients allow.
    Dynamic(DynamicLossScale),
}

/// The rules of `torch.amp.GradScaler`, with its defaults. After a step whose gradients have a NaN or an infinity on any rank,
/// all ranks skip the update and multiply the scale by `backoff_factor`; after `growth_interval` good steps in a row they
/// multiply it by `growth_factor`, unless the product is no finite f32. It does not fall below `min_scale`.
///
/// DeepSpeed's rules are these with a `hysteresis`: so many overflows, since the scale has last grown, leave the scale as it
/// is, but the last one; each of these steps is skipped.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DynamicLossScale {
    /// The first scale.
    pub init_scale: f64,
    /// More than 1.
    pub growth_factor: f64,
    /// Between 0 and 1.
    pub backoff_factor: f64,
    /// Good steps in a row before the scale grows.
    pub growth_interval: u64,
    /// The overflow from which on the scale falls (`hysteresis` in DeepSpeed); 1 for the first.
    pub hysteresis: u64,
    /// Count the overflows of the hysteresis anew after each good step, not only when the scale has grown
    /// (`consecutive_hysteresis` in DeepSpeed).
    pub consecutive_hysteresis: bool,
    /// The least scale (`min_loss_scale` in DeepSpeed), 2^-24 or more: with that one, the greatest f16 number stands for 10^12.
    pub min_scale: f64,
}

impl Default for DynamicLossScale {
    fn default() -> Self {
        Self {
            init_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            hysteresis: 1,
            consecutive_hysteresis: false,
            min_scale: MIN_SCALE,
        }
    }
}

impl LossScaling {
    /// Dynamic scaling with PyTorch's defaults.
    pub fn dynamic() -> Self {
        Self::Dynamic(DynamicLossScale::default())
    }

    /// Refuses values outside their range.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming the field.
    pub fn validate(&self) -> Result<()> {
        let check = |what, ok: bool, value: f64, range: &str| match ok {
            true => Ok(()),
            false => Err(Error::invalid(what, format!("{value} is not {range}"))),
        };
        let positive = |x: f64| x >= MIN_SCALE && (x as f32).is_finite();
        match *self {
            Self::Off => Ok(()),
            Self::Static(scale) => check(
                "loss scale",
                positive(scale),
                scale,
                "a f32 number from 2^-24 on",
            ),
            Self::Dynamic(d) => {
                let (init, growth, backoff) = (d.init_scale, d.growth_factor, d.backoff_factor);
                check(
                    "init_scale",
                    positive(init),
                    init,
                    "a f32 number from 2^-24 on",
                )?;
                let grows = growth > 1.0 && growth.is_finite();
                check("growth_factor", grows, growth, "above 1")?;
                let shrinks = backoff > 0.0 && backoff < 1.0;
                check("backoff_factor", shrinks, backoff, "between 0 and 1")?;
                let at_least_1 =
                    |what, count: u64| check(what, count > 0, count as f64, "at least 1");
                at_least_1("growth_interval", d.growth_interval)?;
                at_least_1("hysteresis", d.hysteresis)?;
                let min = d.min_scale;
                let in_range = positive(min) && min <= init;
                check("min_scale", in_range, min, "from 2^-24 to init_scale")
            }
        }
    }
}

/// The loss scale of a run at one moment: what checkpoints keep of it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct LossScaleState {
    /// The scale of the next step.
    pub scale: f64,
    /// Good steps since the scale has changed (`_growth_tracker` in PyTorch).
    pub growth_tracker: u64,
    /// Overflows that the hysteresis has absorbed.
    #[serde(default)]
    pub absorbed: u64,
}

/// No smaller scale would help, and near 0 there is nothing to divide by: PyTorch's scale goes on to 0.
pub(crate) const MIN_SCALE: f64 = 1.0 / (1u64 << 24) as f64;

/// The scale and its rule.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LossScale {
    rule: LossScaling,
    pub state: Option<LossScaleState>,
}

impl LossScale {
    pub fn new(rule: LossScaling) -> Result<Self> {
        rule.validate()?;
        let scale = match rule {
            LossScaling::Off => None,
            LossScaling::Static(scale) => Some(scale),
            LossScaling::Dynamic(d) => Some(d.init_scale),
        };
        let state = |scale| LossScaleState {
            scale,
            growth_tracker: 0,
            absorbed: 0,
        };
        Ok(Self {
            rule,
            state: scale.map(state),
        })
    }

    pub fn scale(&self) -> f64 {
        self.state.map_or(1.0, |s| s.scale)
    }

    /// Goes on from a checkpoint. Without a scale in it, or with none here, nothing changes.
    pub fn resume(&mut self, saved: Option<LossScaleState>) {
        if let (LossScaling::Dynamic(_), Some(own), Some(saved)) =
            (self.rule, &mut self.state, saved)
        {
            *own = saved;
        }
    }

    /// After a step that had gradients.
    pub fn update(&mut self, overflow: bool) {
        let (LossScaling::Dynamic(rule), Some(state)) = (self.rule, &mut self.state) else {
            return;
        };
        if overflow {
            state.growth_tracker = 0;
            if state.absorbed + 1 < rule.hysteresis {
                state.absorbed += 1;
            } else {
                let shrunk = f64::from((state.scale * rule.backoff_factor) as f32);
                state.scale = shrunk.max(rule.min_scale);
            }
            return;
        }
        if rule.consecutive_hysteresis {
            state.absorbed = 0;
        }
        state.growth_tracker += 1;
        // A checkpoint may come from a run with a longer interval.
        if state.growth_tracker >= rule.growth_interval {
            let grown = (state.scale * rule.growth_factor) as f32;
            if grown.is_finite() {
                state.scale = f64::from(grown);
            }
            state.growth_tracker = 0;
            state.absorbed = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_and_backoff_follow_pytorch() -> Result<()> {
        let rule = DynamicLossScale {
            growth_interval: 3,
            ..DynamicLossScale::default()
        };
        let mut scale = LossScale::new(LossScaling::Dynamic(rule))?;
        // good, good, overflow, good, good, good, good: torch.amp.GradScaler gives these.
        let overflows = [false, false, true, false, false, false, false];
        let seen = overflows.map(|overflow| {
            scale.update(overflow);
            (scale.scale(), scale.state.map_or(0, |s| s.growth_tracker))
        });
        let expected = [
            (65536.0, 1),
            (65536.0, 2),
            (32768.0, 0),
            (32768.0, 1),
            (32768.0, 2),
            (65536.0, 0),
            (65536.0, 1),
        ];
        assert_eq!(seen, expected);
        Ok(())
    }

    #[test]
    fn the_scale_stays_a_finite_number() -> Result<()> {
        let rule = DynamicLossScale {
            init_scale: 2f64.powi(127),
            growth_interval: 1,
            ..DynamicLossScale::default()
        };
        let mut scale = LossScale::new(LossScaling::Dynamic(rule))?;
        scale.update(false);
        assert_eq!(scale.scale(), 2f64.powi(127));
        (0..200).for_each(|_| scale.update(true));
        assert_eq!(scale.scale(), MIN_SCALE);
        scale.update(false);
        assert_eq!(scale.scale(), 2.0 * MIN_SCALE);
        Ok(())
    }

    /// The scales of `DynamicLossScaler` of DeepSpeed 0.19.8 after these overflows, with a hysteresis of 2.
    #[test]
    fn hysteresis_follows_deepspeed() -> Result<()> {
        let overflows = [true, false, true, true, false, true];
        let scales = |consecutive_hysteresis, min_scale| -> Result<[f64; 6]> {
            let rule = DynamicLossScale {
                init_scale: 16.0,
                hysteresis: 2,
                consecutive_hysteresis,
                min_scale,
                ..DynamicLossScale::default()
            };
            let mut scale = LossScale::new(LossScaling::Dynamic(rule))?;
            Ok(overflows.map(|overflow| {
                scale.update(overflow);
                scale.scale()
            }))
        };
        assert_eq!(scales(false, 1.0)?, [16.0, 16.0, 8.0, 4.0, 4.0, 2.0]);
        assert_eq!(scales(true, 1.0)?, [16.0, 16.0, 16.0, 8.0, 8.0, 8.0]);
        assert_eq!(scales(false, 8.0)?, [16.0, 16.0, 8.0, 8.0, 8.0, 8.0]);
        Ok(())
    }

    #[test]
    fn a_tracker_beyond_the_interval_grows_at_once() -> Result<()> {
        let rule = DynamicLossScale {
            growth_interval: 3,
            ..DynamicLossScale::default()
        };
        let mut scale = LossScale::new(LossScaling::Dynamic(rule))?;
        let saved = LossScaleState {
            scale: 2.0,
            growth_tracker: 5,
            absorbed: 0,
        };
        scale.resume(Some(saved));
        scale.update(false);
        assert_eq!(scale.scale(), 4.0);
        // A static scale is the program's, not the checkpoint's.
        let mut fixed = LossScale::new(LossScaling::Static(8.0))?;
        fixed.resume(Some(saved));
        assert_eq!(fixed.scale(), 8.0);
        Ok(())
    }

    #[test]
    fn settings_out_of_range_are_named() {
        let d = DynamicLossScale::default();
        let cases = [
            (LossScaling::Static(0.0), "loss scale"),
            (LossScaling::Static(f64::NAN), "loss scale"),
            (
                LossScaling::Dynamic(DynamicLossScale {
                    init_scale: 1e39,
                    ..d
                }),
                "init_scale",
            ),
            (
                LossScaling::Dynamic(DynamicLossScale {
                    growth_factor: 1.0,
                    ..d
                }),
                "growth_factor",
            ),
            (
                LossScaling::Dynamic(DynamicLossScale {
                    backoff_factor: 1.0,
                    ..d
                }),
                "backoff_factor",
            ),
            (
                LossScaling::Dynamic(DynamicLossScale {
                    growth_interval: 0,
                    ..d
                }),
                "growth_interval",
            ),
            (
                LossScaling::Dynamic(DynamicLossScale { hysteresis: 0, ..d }),
                "hysteresis",
            ),
            (
                LossScaling::Dynamic(DynamicLossScale {
                    min_scale: 1e30,
                    ..d
                }),
                "min_scale",
            ),
        ];
        for (setting, name) in cases {
            let error = setting.validate().map_err(|e| e.to_string());
            assert!(error.is_err_and(|e| e.contains(name)), "{setting:?}");
        }
    }
}
