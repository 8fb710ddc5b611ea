//! Which parameters are trained: by name.

use std::sync::Arc;

use crate::param::ParamKind;

/// Chooses parameters by their full names.
pub(crate) type NamePredicate = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// Decides by its name whether a parameter is trained, frozen or a buffer: the one rule of
/// [`ParamStore`](crate::ParamStore) and [`ParamShapes`](crate::ParamShapes).
#[derive(Clone)]
pub(crate) struct ParamKinds {
    pub frozen: Option<NamePredicate>,
    pub is_buffer: NamePredicate,
}

impl Default for ParamKinds {
    /// Nothing is frozen; names that end in `running_mean` or `running_var` are buffers.
    fn default() -> Self {
        Self {
            frozen: None,
            is_buffer: Arc::new(is_batch_norm_statistic),
        }
    }
}

impl ParamKinds {
    /// A buffer is a buffer also where it would be frozen.
    pub fn of(&self, name: &str) -> ParamKind {
        if (self.is_buffer)(name) {
            ParamKind::Buffer
        } else if self.frozen.as_ref().is_some_and(|frozen| frozen(name)) {
            ParamKind::Frozen
        } else {
            ParamKind::Trained
        }
    }
}

fn is_batch_norm_statistic(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    matches!(last, "running_mean" | "running_var")
}
