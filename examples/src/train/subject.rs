//! What is trained, as far as it is known before any data is read.

use anyhow::{Context, anyhow, ensure};
use dp_core::{Optimizer, World};
use dp_models::ModelConfig;
use dp_zero::BatchSizes;

use super::config::TrainConfig;
use super::dataset::is_token_file;
use super::tokenizer::Tokenizer;
use crate::memory_check::{Demand, within_limits};
use crate::options::one_line;

/// The model, its vocabulary known, and the sequences that it is trained on.
#[derive(Debug)]
pub struct Subject {
    /// From text to tokens and back.
    pub tokenizer: Tokenizer,
    /// The model.
    pub model: ModelConfig,
    /// Tokens of a sequence, at most the model's context.
    pub context: usize,
}

impl Subject {
    /// Opens the tokenizer, and checks that the model fits it.
    ///
    /// # Errors
    /// What cannot be, by the key in the configuration.
    pub fn of(config: &TrainConfig) -> anyhow::Result<Self> {
        let data = &config.data;
        let is_tokens = is_token_file(&data.train);
        let tokenizer = match &data.tokenizer {
            Some(name) => Tokenizer::open(name)?,
            None if is_tokens => Tokenizer::Numbers,
            None => Tokenizer::Bytes,
        };
        let model = model_for(config, &tokenizer)?;
        let positions = model.context();
        let context = data.context.unwrap_or(positions);
        ensure!(context > 0, "data.context: must be at least 1");
        ensure!(
            context <= positions,
            "data.context: {context} tokens are more than the {positions} positions of the model"
        );
        Ok(Self {
            tokenizer,
            model,
            context,
        })
    }

    /// Refuses a job that does not fit into this machine.
    ///
    /// # Errors
    /// Bytes needed and bytes there.
    pub fn check_memory(
        &self,
        config: &TrainConfig,
        sizes: &BatchSizes,
        world: &World,
    ) -> anyhow::Result<()> {
        let deepspeed = &config.deepspeed;
        Demand {
            model: &self.model,
            dtype: deepspeed.dtype(),
            batch: sizes.micro_batch_size,
            context: self.context,
            ranks: sizes.world_size,
            strategies: &[deepspeed.sharding()],
            num_states: deepspeed.optimizer()?.state_names().len(),
            engine: &deepspeed.engine_config()?,
        }
        .check(world)
        .context("model, data.context, train_micro_batch_size_per_gpu, --ranks")
    }

    /// Refuses sizes that cannot be computed with.
    ///
    /// # Errors
    /// What is too large.
    pub fn check_limits(&self, sizes: &BatchSizes) -> anyhow::Result<()> {
        within_limits(&self.model, sizes.micro_batch_size, self.context)
            .context("model, data.context, train_micro_batch_size_per_gpu")
    }
}

/// The model with the tokenizer's vocabulary.
fn model_for(config: &TrainConfig, tokenizer: &Tokenizer) -> anyhow::Result<ModelConfig> {
    let model = config.model.clone();
    let named = |e: candle_core::Error| anyhow!("model: {}", one_line(&e));
    let model = match (tokenizer.vocab_size(), &config.pretrained) {
        (Some(size), Some(pretrained)) => {
            ensure!(
                size <= model.vocab_size(),
                "data.tokenizer: it has {size} tokens, but the model in {} has a vocabulary of {}; use the tokenizer that the \
                 model was trained with",
                pretrained.folder().display(),
                model.vocab_size()
            );
            model
        }
        (Some(size), None) => model.with_vocab_size(size).map_err(named)?,
        (None, _) => {
            ensure!(
                model.vocab_size() > 0,
                "model.vocab_size: is not there, and a .bin file does not say it; give it, or data.tokenizer"
            );
            model
        }
    };
    model.validate().map_err(named)?;
    Ok(model)
}
