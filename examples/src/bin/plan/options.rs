//! The command line.

use std::path::PathBuf;

use anyhow::Context;
use candle_core::DType;
use clap::{Parser, ValueEnum};
use dp_core::{BucketCaps, EngineConfig, GradAccumDType, LossScaling};
use dp_examples::memory_check::within_limits;
use dp_examples::options::{Head, dtype, grad_accum_dtype, one_line, positive, writable};
use dp_examples::sizes;
use dp_models::{GptConfig, LlamaConfig, ModelConfig};

use crate::configured::configured;
use crate::subject::{Batch, OptimizerName, Settings, Subject};

/// Predicts memory per card, bytes sent and buckets of each strategy, without training.
///
/// The model is a number of parameters (--params), a shape (--layers, --width, --heads, --context, --vocab), or that of a
/// configuration of train-gpt (--config), of which all else is taken, too.
#[derive(Debug, Clone, Parser)]
#[command(name = "plan", version, allow_negative_numbers = true)]
pub struct Options {
    /// Number of parameters, e.g. 7.5B, 350M, 1T or 120000: gives the formulas of the ZeRO paper
    #[arg(long, value_parser = sizes::count)]
    params: Option<u64>,
    /// Configuration of train-gpt: plans what it would do on so many ranks
    #[arg(long, conflicts_with_all = OF_A_CONFIGURATION)]
    config: Option<PathBuf>,
    /// Override one key of the configuration; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// What the shape is of
    #[arg(long, default_value = "gpt2")]
    architecture: Architecture,
    /// Blocks of the model
    #[arg(long, value_parser = positive)]
    layers: Option<usize>,
    /// Features per token
    #[arg(long, value_parser = positive)]
    width: Option<usize>,
    /// Attention heads; they divide the width
    #[arg(long, value_parser = positive)]
    heads: Option<usize>,
    /// Tokens per sequence
    #[arg(long, value_parser = positive)]
    context: Option<usize>,
    /// Number of different tokens
    #[arg(long, value_parser = positive)]
    vocab: Option<usize>,
    /// Hidden features of the MLP; only for llama, where about 8/3 of the width is usual
    #[arg(long, value_parser = positive)]
    hidden: Option<usize>,
    /// Heads of keys and of values; only for llama. Default: as many as --heads
    #[arg(long, value_parser = positive)]
    kv_heads: Option<usize>,
    /// The head's weight: the token embedding, or its own. Default: tied in gpt2, untied in llama
    #[arg(long)]
    head: Option<Head>,
    /// Sequences per rank and micro-batch
    #[arg(long, default_value_t = 1, value_parser = positive)]
    batch: usize,
    /// Numbers of ranks (cards)
    #[arg(long, value_delimiter = ',', default_value = "1,4,16,64", value_parser = positive)]
    ranks: Vec<usize>,
    /// Dtype of the parameters: f32, bf16 or f16; the last two have f32 masters, and f16 has a dynamic loss scale
    #[arg(long, default_value = "f32", value_parser = dtype)]
    dtype: DType,
    /// What gradients of 16-bit parameters are kept in: f32, or parameter (their own dtype). Default: f32, as that of the
    /// trainers; with --params parameter, as in the ZeRO paper
    #[arg(long, value_parser = grad_accum_dtype)]
    grad_accum_dtype: Option<GradAccumDType>,
    /// Dtype in which gradients travel; without it, the one they are kept in
    #[arg(long, value_parser = dtype)]
    communication_dtype: Option<DType>,
    /// The optimizer
    #[arg(long, default_value = "adamw")]
    optimizer: OptimizerName,
    /// Size of the gradient buckets; without it, the trainers' default: 25 MiB, or an eighth of all gradients if that is less (but 1 MiB at least); the first one 1 MiB
    #[arg(long, value_parser = positive)]
    bucket_kib: Option<usize>,
    /// Memory of a card, e.g. 80GiB, 24GB or 512MiB: which is the smallest stage that fits?
    #[arg(long, value_parser = sizes::bytes)]
    card: Option<u64>,
    /// File for the plan in JSON
    #[arg(long)]
    json: Option<PathBuf>,
    /// File for the plan as a page with bars
    #[arg(long)]
    html: Option<PathBuf>,
}

/// Options that say what a configuration says as well.
const OF_A_CONFIGURATION: [&str; 16] = [
    "params",
    "architecture",
    "layers",
    "width",
    "heads",
    "context",
    "vocab",
    "hidden",
    "kv_heads",
    "head",
    "batch",
    "dtype",
    "grad_accum_dtype",
    "communication_dtype",
    "optimizer",
    "bucket_kib",
];

/// A decoder of dp-models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Architecture {
    /// Learned positions, LayerNorm, GELU, biases
    Gpt2,
    /// Rotary positions, RMSNorm, SwiGLU, grouped-query attention, no biases
    Llama,
}

/// Options that have been checked, and what they lead to.
#[derive(Debug, Clone)]
pub struct Job {
    pub subject: Subject,
    pub settings: Settings,
    pub ranks: Vec<usize>,
    pub card: Option<u64>,
    pub json: Option<PathBuf>,
    pub html: Option<PathBuf>,
}

impl Options {
    /// Checks what the parser cannot see. The error is one line for the user.
    pub fn into_job(self) -> anyhow::Result<Job> {
        for (option, path) in [("--json", &self.json), ("--html", &self.html)] {
            path.iter().try_for_each(|path| writable(option, path))?;
        }
        // clap drops `requires` where another option excludes what is required.
        anyhow::ensure!(
            self.set.is_empty() || self.config.is_some(),
            "--set: there is no --config whose keys it could override"
        );
        let (subject, settings) = match &self.config {
            Some(path) => configured(path, &self.set, &self.ranks)?,
            None => self.described()?,
        };
        Ok(Job {
            subject,
            settings,
            ranks: self.ranks,
            card: self.card,
            json: self.json,
            html: self.html,
        })
    }

    /// What the other options describe.
    fn described(&self) -> anyhow::Result<(Subject, Settings)> {
        let subject = self.subject()?;
        let default_accum = match subject {
            Subject::Count(_) => GradAccumDType::Parameter,
            Subject::Model { .. } => GradAccumDType::F32,
        };
        let mut engine = EngineConfig::default();
        engine.grad_accum_dtype = self.grad_accum_dtype.unwrap_or(default_accum);
        engine.communication_dtype = self.communication_dtype;
        if let Some(kib) = self.bucket_kib {
            engine.bucket_caps = BucketCaps::new(kib * 1024)?;
        }
        if self.dtype == DType::F16 {
            engine.loss_scaling = LossScaling::dynamic();
        }
        let settings = Settings {
            dtype: self.dtype,
            optimizer: self.optimizer,
            engine,
            clips_norm: false,
            configured: None,
        };
        Ok((subject, settings))
    }

    fn subject(&self) -> anyhow::Result<Subject> {
        let is_llama = self.architecture == Architecture::Llama;
        let only_llama = [("--hidden", self.hidden), ("--kv-heads", self.kv_heads)];
        let sizes = [
            ("--layers", self.layers),
            ("--width", self.width),
            ("--heads", self.heads),
            ("--context", self.context),
            ("--vocab", self.vocab),
        ];
        let mut of_shape = sizes.iter().chain(&only_llama);
        let has_shape = of_shape.any(|(_, size)| size.is_some());
        if let Some(num_params) = self.params {
            anyhow::ensure!(
                !has_shape,
                "--params and a shape are two models; give one of them"
            );
            return Ok(Subject::Count(num_params));
        }
        let size = |name: &str| {
            let size = sizes.iter().find(|(n, _)| *n == name).and_then(|s| s.1);
            size.ok_or_else(|| match has_shape {
                true => anyhow::anyhow!(
                    "{name} is missing: a shape is --layers, --width, --heads, --context and --vocab"
                ),
                false => anyhow::anyhow!(
                    "there is no model to plan; give --params, or --layers, --width, --heads, --context and --vocab"
                ),
            })
        };
        let [layers, width, heads, context, vocab_size] = sizes
            .map(|(name, _)| size(name))
            .into_iter()
            .collect::<anyhow::Result<Vec<_>>>()?[..]
        else {
            unreachable!("five sizes");
        };
        let tied_head = self.head.map_or(!is_llama, |head| head == Head::Tied);
        let config = match (is_llama, self.hidden) {
            (true, Some(hidden)) => ModelConfig::from(LlamaConfig {
                layers,
                width,
                heads,
                context,
                vocab_size,
                tied_head,
                hidden,
                kv_heads: self.kv_heads,
                ..LlamaConfig::mini()
            }),
            (true, None) => anyhow::bail!("--hidden is missing: a llama has it besides"),
            (false, _) => {
                for (name, size) in only_llama {
                    anyhow::ensure!(size.is_none(), "{name} is for --architecture llama");
                }
                ModelConfig::from(GptConfig {
                    layers,
                    width,
                    heads,
                    context,
                    vocab_size,
                    tied_head,
                })
            }
        };
        config
            .validate()
            .map_err(|e| anyhow::anyhow!("--width, --heads, --kv-heads: {}", one_line(&e)))?;
        within_limits(&config, self.batch, context)
            .context("--layers, --width, --hidden, --vocab, --batch, --context")?;
        let batches = vec![Batch::of(self.batch); self.ranks.len()];
        Ok(Subject::Model {
            config,
            context,
            batches,
        })
    }
}
