//! A run that has been checked: everything that can be wrong before a rank starts is found here, in one line.

use std::path::PathBuf;

use anyhow::{Context, anyhow, ensure};
use candle_core::DType;
use dp_core::World;
use dp_models::ModelConfig;
use dp_zero::BatchSizes;

use super::config::TrainConfig;
use super::dataset::{Dataset, is_token_file};
use super::identity::{DataIdentity, Identity};
use super::run_folder::{Resume, RunFolder};
use super::subject::Subject;
use super::tokenizer::Tokenizer;
use crate::table::thousands;

/// What `train-gpt` or `finetune` is about to do.
#[derive(Debug)]
pub struct Job {
    /// The configuration.
    pub config: TrainConfig,
    /// The model, its vocabulary known.
    pub model: ModelConfig,
    /// Tokens of a sequence.
    pub context: usize,
    /// File with the values that parameters begin with, unless those are random.
    pub initial_values: Option<PathBuf>,
    /// The batch sizes on this number of ranks.
    pub sizes: BatchSizes,
    /// Sequences to train on.
    pub train: Dataset,
    /// Held-out sequences, unless there is no evaluation.
    pub validation: Option<Dataset>,
    /// From text to tokens and back.
    pub tokenizer: Tokenizer,
    /// Tokens of the sample's prompt; empty for no sample.
    pub prompt: Vec<u32>,
    /// Where the run writes.
    pub folder: RunFolder,
    /// What its checkpoints say of it.
    pub identity: Identity,
    /// The checkpoint that it goes on from.
    pub start: Option<Start>,
}

/// A checkpoint that a run goes on from.
#[derive(Debug, Clone)]
pub struct Start {
    /// Its folder.
    pub folder: PathBuf,
    /// It is one of this run's own.
    pub is_own: bool,
    /// It is of a run on the same data, which goes on where it was.
    pub same_data: bool,
}

impl Start {
    /// The checkpoint that `resume` means, if it is of this run; `None` if there is none yet.
    fn of(
        resume: &Resume,
        folder: &RunFolder,
        identity: &Identity,
        steps: u64,
        restart_data: bool,
    ) -> anyhow::Result<Option<Self>> {
        let Some(checkpoint) = resume.checkpoint(&folder.checkpoints())? else {
            return Ok(None);
        };
        let same_data = identity
            .check(&checkpoint, steps, restart_data)
            .context("--resume")?;
        Ok(Some(Self {
            folder: checkpoint.folder().to_path_buf(),
            is_own: *resume == Resume::Latest,
            same_data,
        }))
    }
}

impl Job {
    /// Checks a configuration for the ranks of `world`, and loads its data. `restart_data`: a checkpoint may be of a run on other data,
    /// which then begins anew.
    ///
    /// # Errors
    /// What cannot be, by the key in the configuration.
    pub fn new(
        config: TrainConfig,
        world: &World,
        resume: Option<Resume>,
        restart_data: bool,
    ) -> anyhow::Result<Self> {
        let sizes = config.deepspeed.batch_sizes(world.world_size())?;
        let subject = Subject::of(&config)?;
        // Before the data is read: a text of any length may have to be tokenized.
        subject.check_memory(&config, &sizes, world)?;
        let Subject {
            tokenizer,
            model,
            context,
        } = subject;
        let (data, run) = (&config.data, &config.run);
        let open = |key: &str, path| {
            Dataset::open(path, &tokenizer, context).map_err(|e| anyhow!("{key}: {e:#}"))
        };
        let train = open("data.train", &data.train)?;
        let (train, validation) = match (&data.validation, data.validation_fraction) {
            (Some(path), _) => {
                ensure!(
                    is_token_file(path) == is_token_file(&data.train),
                    "data.validation: {} must be a text if data.train is one, and a .bin file if it is not",
                    path.display()
                );
                (train, Some(open("data.validation", path)?))
            }
            (None, 0.0) => (train, None),
            (None, fraction) => {
                let (train, validation) = train
                    .split(fraction)
                    .map_err(|e| anyhow!("data.train: {}: {e}", data.train.display()))?;
                (train, Some(validation))
            }
        };
        for (path, part) in [
            (Some(&data.train), Some(&train)),
            (data.validation.as_ref(), validation.as_ref()),
        ] {
            if let (Some(path), Some(part)) = (path, part) {
                part.check_vocab(model.vocab_size())
                    .with_context(|| path.display().to_string())?;
            }
        }
        let prompt = match run.sample.tokens {
            0 => Vec::new(),
            _ => prompt(&config, &tokenizer, &model)?,
        };
        let identity = Identity {
            model: model.clone(),
            data: DataIdentity {
                seed: run.seed,
                context,
                train: train.fingerprint(),
                validation: validation.as_ref().map(Dataset::fingerprint),
            },
        };
        let folder = match world.is_main_process() {
            true => RunFolder::prepare(&run.out, resume.as_ref())?,
            false => RunFolder::of_other_process(&run.out),
        };
        let start = match resume {
            None => None,
            Some(resume) => Start::of(&resume, &folder, &identity, run.steps, restart_data)?,
        };
        let initial_values = config.pretrained.is_some().then(|| folder.initial_values());
        if let (Some(pretrained), Some(path)) = (&config.pretrained, &initial_values) {
            pretrained.convert(path)?;
        }
        Ok(Self {
            model,
            context,
            initial_values,
            sizes,
            train,
            validation,
            tokenizer,
            prompt,
            folder,
            identity,
            start,
            config,
        })
    }

    /// Dtype of the parameters.
    pub fn dtype(&self) -> DType {
        self.config.deepspeed.dtype()
    }

    /// Tokens of one optimizer step, on all ranks together.
    pub fn tokens_per_step(&self) -> usize {
        self.sizes.train_batch_size * self.context
    }

    /// What is about to happen, for people.
    pub fn summary(&self) -> String {
        let held_out = match &self.validation {
            Some(data) => format!("{} held out", thousands(data.num_tokens() as u64)),
            None => "none held out".to_string(),
        };
        let steps = self.config.run.steps;
        let epochs = steps as f64 * self.sizes.train_batch_size as f64 / self.train.len() as f64;
        format!(
            "{} with {} parameters in {}, {} on {} ranks\n\
             {}; {} tokens per step; {steps} steps are {epochs:.1} epochs\n\
             {} tokens to train on, {held_out}, vocabulary of {}",
            self.model.architecture(),
            thousands(self.model.num_params() as u64),
            self.dtype().as_str(),
            self.config.deepspeed.sharding().name(),
            self.sizes.world_size,
            self.sizes,
            thousands(self.tokens_per_step() as u64),
            thousands(self.train.num_tokens() as u64),
            thousands(self.model.vocab_size() as u64),
        )
    }
}

fn prompt(
    config: &TrainConfig,
    tokenizer: &Tokenizer,
    model: &ModelConfig,
) -> anyhow::Result<Vec<u32>> {
    let sample = &config.run.sample;
    let key = "run.sample.prompt";
    let prompt = match (tokenizer, sample.prompt.trim()) {
        // The default prompt is a line break, which is no number.
        (Tokenizer::Numbers, "") => vec![0],
        _ => tokenizer.encode(&sample.prompt).context(key)?,
    };
    ensure!(
        !prompt.is_empty(),
        "{key}: it has no token, and the model needs one to go on from"
    );
    if let Some(token) = prompt.iter().find(|t| **t as usize >= model.vocab_size()) {
        anyhow::bail!(
            "{key}: {token} is not below the vocabulary of {}",
            model.vocab_size()
        );
    }
    Ok(prompt)
}
