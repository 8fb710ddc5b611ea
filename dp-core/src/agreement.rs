//! What all ranks must be about to do alike, in words: it goes with the summary of the step as its label, so a difference is an
//! error that shows both sides, and not a drift.

use std::sync::Arc;

use crate::norm::GradNorm;
use crate::optim::{LrSchedule, Optimizer, ParamGroup};

/// The words of the last step, which are the same in the next one unless a setting has changed.
#[derive(Debug)]
pub(crate) struct Agreement<O> {
    optimizers: Vec<O>,
    schedule: LrSchedule,
    num_micro_batches: usize,
    text: Arc<str>,
    clipped: Option<(GradNorm, f64, Arc<str>)>,
}

impl<O: Optimizer> Agreement<O> {
    /// `text` makes the words of the settings.
    pub fn new(
        groups: &[ParamGroup<O>],
        schedule: LrSchedule,
        num_micro_batches: usize,
        text: impl FnOnce() -> String,
    ) -> Self {
        Self {
            optimizers: groups.iter().map(|g| g.optimizer.clone()).collect(),
            schedule,
            num_micro_batches,
            text: text().into(),
            clipped: None,
        }
    }

    /// True if the words still hold.
    pub fn holds(
        &self,
        groups: &[ParamGroup<O>],
        schedule: LrSchedule,
        num_micro_batches: usize,
    ) -> bool {
        self.num_micro_batches == num_micro_batches
            && self.schedule == schedule
            && self
                .optimizers
                .iter()
                .eq(groups.iter().map(|g| &g.optimizer))
    }

    pub fn text(&self) -> Arc<str> {
        Arc::clone(&self.text)
    }

    /// With the clipping that the step begins with.
    pub fn clipped(&mut self, kind: GradNorm, max_norm: f64) -> Arc<str> {
        match &self.clipped {
            Some((k, m, text)) if (*k, *m) == (kind, max_norm) => Arc::clone(text),
            _ => {
                let text = format!("{}, clipped to {kind:?} norm {max_norm}", self.text);
                let text: Arc<str> = text.into();
                self.clipped = Some((kind, max_norm, Arc::clone(&text)));
                text
            }
        }
    }
}
