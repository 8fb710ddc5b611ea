//! How to save and load.

use std::sync::Arc;

use serde::Serialize;
use serde_json::Value;

use super::manifest::DataPosition;
use crate::error::{Error, Result};
use crate::param_kinds::NamePredicate;

/// Settings of [`Trainer::save_with`](crate::Trainer::save_with). All but the rank state are the same on all ranks.
#[derive(Debug, Clone, Default)]
pub struct SaveOptions {
    pub(crate) keep_last: Option<usize>,
    pub(crate) data: DataPosition,
    pub(crate) rank_state: Value,
}

impl SaveOptions {
    /// Keeps all checkpoints, says nothing of the data.
    pub fn new() -> Self {
        Self::default()
    }

    /// Once the new checkpoint is complete, removes all but the `n` that were saved last, it included.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0.
    pub fn keep_last(mut self, n: usize) -> Result<Self> {
        if n == 0 {
            return Err(Error::invalid(
                "keep_last",
                "at least the new checkpoint is kept, got 0",
            ));
        }
        self.keep_last = Some(n);
        Ok(self)
    }

    /// Saves where the run stands in its data.
    #[must_use]
    pub fn with_data(mut self, position: DataPosition) -> Self {
        self.data = position;
        self
    }

    /// Saves what belongs to this rank alone, above all the state of its random generators. It comes back, if the number
    /// of ranks is the same, from [`LoadedCheckpoint::rank_state`](super::LoadedCheckpoint::rank_state).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if `state` cannot be written as JSON.
    pub fn with_rank_state(mut self, state: &impl Serialize) -> Result<Self> {
        self.rank_state =
            serde_json::to_value(state).map_err(|e| Error::invalid("rank_state", e))?;
        Ok(self)
    }
}

/// What a load does about hyper-parameters, parameter groups and schedules that differ from the checkpoint's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum HyperParameters {
    /// An error that names the first difference.
    #[default]
    MustMatch,
    /// The checkpoint's replace the trainer's, as in PyTorch's `Optimizer.load_state_dict`.
    Saved,
    /// The trainer's stay.
    Current,
}

/// Settings of [`Trainer::load_with`](crate::Trainer::load_with), the same on all ranks. By default everything must
/// match.
#[derive(Clone, Default)]
pub struct LoadOptions {
    pub(crate) hyper_parameters: HyperParameters,
    pub(crate) may_be_new: Option<NamePredicate>,
    pub(crate) may_be_dropped: Option<NamePredicate>,
}

impl LoadOptions {
    /// Everything must match.
    pub fn new() -> Self {
        Self::default()
    }

    /// What to do about hyper-parameters that differ.
    #[must_use]
    pub fn with_hyper_parameters(mut self, rule: HyperParameters) -> Self {
        self.hyper_parameters = rule;
        self
    }

    /// Parameters of the model that the file does not have may be new, if their name satisfies `predicate`: they keep the
    /// value they have, and start without optimizer state.
    #[must_use]
    pub fn with_new_params(
        mut self,
        predicate: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.may_be_new = Some(Arc::new(predicate));
        self
    }

    /// Parameters of the file that the model does not have are left out, if their name satisfies `predicate`.
    #[must_use]
    pub fn with_dropped_params(
        mut self,
        predicate: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.may_be_dropped = Some(Arc::new(predicate));
        self
    }

    pub(crate) fn allows_new(&self, name: &str) -> bool {
        self.may_be_new.as_ref().is_some_and(|p| p(name))
    }

    pub(crate) fn allows_dropped(&self, name: &str) -> bool {
        self.may_be_dropped.as_ref().is_some_and(|p| p(name))
    }
}

impl std::fmt::Debug for LoadOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LoadOptions")
            .field("hyper_parameters", &self.hyper_parameters)
            .field("new_params", &self.may_be_new.is_some())
            .field("dropped_params", &self.may_be_dropped.is_some())
            .finish()
    }
}
