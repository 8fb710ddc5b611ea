//! Parameter groups: other hyper-parameters for some parameters (`param_groups` in PyTorch).

use std::fmt;
use std::sync::Arc;

use super::Optimizer;
use crate::checkpoint::VALUE;
use crate::error::{Error, Result};
use crate::masters::MASTER;
use crate::param_kinds::NamePredicate;

/// Parameters that share hyper-parameters.
#[derive(Clone)]
pub struct ParamGroup<O> {
    name: String,
    matches: Option<NamePredicate>,
    /// The group's hyper-parameters; may be changed between steps, alike on all ranks.
    pub optimizer: O,
}

impl<O> ParamGroup<O> {
    /// The group's name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }
}

impl<O: fmt::Debug> fmt::Debug for ParamGroup<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParamGroup")
            .field("name", &self.name)
            .field("optimizer", &self.optimizer)
            .finish()
    }
}

/// One or several parameter groups. A parameter belongs to the first group whose predicate accepts its name, else to
/// the default group. Settings hold for each element, wherever shard boundaries fall.
///
/// ```
/// use dp_core::{AdamW, ParamGroups};
///
/// let groups = ParamGroups::new(AdamW::with_lr(3e-4)).with_group(
///     "no decay",
///     |name| name.ends_with("bias"),
///     AdamW { weight_decay: 0.0, ..AdamW::with_lr(3e-4) },
/// );
/// assert_eq!(groups.groups()[0].name(), "default");
/// ```
#[derive(Debug, Clone)]
pub struct ParamGroups<O> {
    /// The default group is the first.
    groups: Vec<ParamGroup<O>>,
}

impl<O: Optimizer> From<O> for ParamGroups<O> {
    fn from(optimizer: O) -> Self {
        Self::new(optimizer)
    }
}

impl<O: Optimizer> ParamGroups<O> {
    /// All parameters in one group, called `default`.
    pub fn new(optimizer: O) -> Self {
        Self {
            groups: vec![ParamGroup {
                name: "default".to_string(),
                matches: None,
                optimizer,
            }],
        }
    }

    /// Adds a group of the parameters whose full names satisfy `predicate` and that no earlier group has taken.
    #[must_use]
    pub fn with_group(
        mut self,
        name: &str,
        predicate: impl Fn(&str) -> bool + Send + Sync + 'static,
        optimizer: O,
    ) -> Self {
        self.groups.push(ParamGroup {
            name: name.to_string(),
            matches: Some(Arc::new(predicate)),
            optimizer,
        });
        self
    }

    /// The groups; the first is the default group.
    pub fn groups(&self) -> &[ParamGroup<O>] {
        &self.groups
    }

    /// The groups, to change hyper-parameters between steps.
    pub fn groups_mut(&mut self) -> &mut [ParamGroup<O>] {
        &mut self.groups
    }

    /// Position of the group that `param_name` belongs to.
    pub fn group_of(&self, param_name: &str) -> usize {
        let accepts = |g: &ParamGroup<O>| g.matches.as_ref().is_some_and(|m| m(param_name));
        self.groups.iter().position(accepts).unwrap_or(0)
    }

    /// Most states that any group keeps per element: state is allocated for all alike.
    pub fn num_states(&self) -> usize {
        let counts = self.groups.iter().map(|g| g.optimizer.state_names().len());
        counts.max().unwrap_or(0)
    }

    pub(crate) fn validate(&self) -> Result<()> {
        for group in &self.groups {
            let states = group.optimizer.state_names();
            let bad = |(i, name): (usize, &&str)| {
                [VALUE, MASTER].contains(name) || name.contains('/') || states[..i].contains(name)
            };
            if states.iter().enumerate().any(bad) {
                let message = format!(
                    "{states:?} of {}: names must differ, have no `/` and not be `{VALUE}` or `{MASTER}`",
                    group.optimizer.name()
                );
                return Err(Error::invalid("state names", message));
            }
            group.optimizer.validate().map_err(|e| match e {
                Error::InvalidArgument { what, message } => Error::InvalidArgument {
                    what,
                    message: format!("{message} (parameter group `{}`)", group.name),
                },
                other => other,
            })?;
        }
        Ok(())
    }
}
