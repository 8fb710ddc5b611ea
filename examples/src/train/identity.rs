//! What a run is about: whoever goes on from its checkpoint must mean the same.

use anyhow::{Context, bail};
use dp_core::checkpoint::Checkpoint;
use dp_models::ModelConfig;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::dataset::Fingerprint;

/// The model, and the data in the order in which it comes. Saved in each checkpoint, as the state of rank 0.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Identity {
    /// The model: weights of the same shapes can belong to several.
    pub model: ModelConfig,
    /// The data.
    pub data: DataIdentity,
}

/// What decides the order of the data, named as in the configuration.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DataIdentity {
    /// `run.seed`.
    pub seed: u64,
    /// Tokens of a sequence.
    pub context: usize,
    /// Tokens to train on.
    pub train: Fingerprint,
    /// Held-out tokens.
    pub validation: Option<Fingerprint>,
}

impl Identity {
    /// Refuses a checkpoint that is of another run; with `restart_data` other data and another seed are fine. `steps` is the length
    /// of this run. True if the data is the same.
    ///
    /// # Errors
    /// The first difference, and what to do.
    pub fn check(
        &self,
        checkpoint: &Checkpoint,
        steps: u64,
        restart_data: bool,
    ) -> anyhow::Result<bool> {
        let manifest = checkpoint.manifest();
        if manifest.step > steps {
            bail!(
                "run.steps is {steps}, but the checkpoint is of step {}",
                manifest.step
            );
        }
        let state = manifest.ranks.first().map(|rank| rank.rank_state.clone());
        let saved: Self = serde_json::from_value(state.unwrap_or_default()).with_context(|| {
            format!(
                "{} is no checkpoint of a run of this program",
                checkpoint.folder().display()
            )
        })?;
        if let Some((key, there, here)) = difference("model", &saved.model, &self.model)? {
            bail!("the checkpoint is of another model: {key} is {there} there, and {here} here");
        }
        match difference("data", &saved.data, &self.data)? {
            Some((key, there, here)) if !restart_data => bail!(
                "the checkpoint is of a run on other data: {key} is {there} there, and {here} here; --restart-data goes on with the \
                 model, and begins with the data anew"
            ),
            other => Ok(other.is_none()),
        }
    }
}

/// The first key whose values differ, and these.
fn difference<T: Serialize>(
    path: &str,
    saved: &T,
    own: &T,
) -> anyhow::Result<Option<(String, Value, Value)>> {
    fn below(path: &str, saved: &Value, own: &Value) -> Option<(String, Value, Value)> {
        if saved == own {
            return None;
        }
        if let (Value::Object(a), Value::Object(b)) = (saved, own) {
            let keys = a.keys().chain(b.keys());
            let mut found = keys.filter_map(|key| {
                let path = format!("{path}.{key}");
                below(&path, &saved[key], &own[key])
            });
            return found.next();
        }
        Some((path.to_string(), saved.clone(), own.clone()))
    }
    let (saved, own) = (serde_json::to_value(saved)?, serde_json::to_value(own)?);
    Ok(below(path, &saved, &own))
}
