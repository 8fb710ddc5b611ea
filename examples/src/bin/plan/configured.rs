//! What `train-gpt` would do with a configuration, on so many ranks.

use std::path::Path;

use anyhow::Context;
use dp_core::Optimizer;
use dp_examples::train::config::TrainConfig;
use dp_examples::train::subject;
use dp_zero::config::ConfiguredOptimizer;

use crate::subject::{Batch, OptimizerName, Settings, Subject};

/// Reads the configuration, but no data: the vocabulary is the model's, or else the tokenizer's.
///
/// # Errors
/// What `train-gpt` would refuse before it reads data; batch sizes that do not divide on one of these numbers of ranks.
pub fn configured(
    path: &Path,
    overrides: &[String],
    ranks: &[usize],
) -> anyhow::Result<(Subject, Settings)> {
    let config = TrainConfig::from_file(path, overrides, None)?;
    let in_file = || path.display().to_string();
    let subject = subject::Subject::of(&config).with_context(in_file)?;
    let deepspeed = &config.deepspeed;
    let mut batches = Vec::new();
    for &n in ranks {
        let sizes = deepspeed
            .batch_sizes(n)
            .with_context(|| format!("--ranks {n}: {}", path.display()))?;
        subject.check_limits(&sizes).with_context(in_file)?;
        batches.push(Batch {
            size: sizes.micro_batch_size,
            accumulation_steps: sizes.accumulation_steps,
        });
    }
    let optimizer = deepspeed.optimizer()?;
    let settings = Settings {
        dtype: deepspeed.dtype(),
        optimizer: match &optimizer {
            ConfiguredOptimizer::Sgd(_) if optimizer.state_names().is_empty() => OptimizerName::Sgd,
            ConfiguredOptimizer::Sgd(_) => OptimizerName::SgdMomentum,
            _ => OptimizerName::AdamW,
        },
        engine: deepspeed.engine_config()?,
        clips_norm: deepspeed.gradient_clipping > 0.0,
        configured: Some(deepspeed.sharding()),
    };
    let subject = Subject::Model {
        config: subject.model,
        context: subject.context,
        batches,
    };
    Ok((subject, settings))
}
