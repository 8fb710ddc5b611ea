//! The command line.

use std::path::{Path, PathBuf};

use anyhow::Context;
use candle_core::{DType, Device};
use clap::{Parser, ValueEnum};
use dp_core::{AdamW, BucketCaps, Devices, Optimizer, ParamStore, World};
use dp_examples::memory_check::Demand;
use dp_examples::options::{
    Head, devices, distinct, dtype, one_line, positive, strategy, writable,
};
use dp_models::{ByteTokens, Gpt, GptConfig};
use dp_zero::Sharding;
use serde::{Deserialize, Serialize};

use crate::variant::Variant;

/// Measures training: tokens per second, and the parts of a step, of each strategy.
#[derive(Debug, Clone, Parser)]
#[command(
    name = "bench-train",
    version,
    allow_negative_numbers = true,
    args_override_self = true
)]
pub struct Options {
    /// Number of ranks that are threads; under a launcher its number of processes counts
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub ranks: u16,
    /// Threads that each rank computes with
    #[arg(long, default_value_t = 1, value_parser = positive)]
    pub threads: usize,
    /// Where ranks compute: cpu; cuda, the first GPU for all of them; or GPUs in turn, as in cuda:0,1. A GPU works on while the
    /// host goes on, so there only the time of a whole step means something
    #[arg(long, default_value = "cpu", value_parser = devices)]
    pub device: Devices,
    /// Strategies to run, in this order
    #[arg(long, value_delimiter = ',', default_value = "ddp,zero1,zero2", value_parser = strategy)]
    pub strategies: Vec<Sharding>,
    /// Reduce gradients while backward goes on, or have it wait for each bucket; on,off compares them
    #[arg(long, value_delimiter = ',', default_value = "on")]
    pub overlap_comm: Vec<Overlap>,
    /// What gradients travel in, f32, bf16 or f16; f32,bf16 compares them
    #[arg(long, value_delimiter = ',', default_value = "f32", value_parser = dtype)]
    pub communication_dtype: Vec<DType>,
    /// Optimizer steps per variant (strategy, overlap and communication dtype) and round
    #[arg(long, default_value_t = 40, value_parser = positive)]
    pub steps: usize,
    /// First steps of each run that the times leave out
    #[arg(long, default_value_t = 10)]
    pub warmup: usize,
    /// How often all variants are run, in turns, so that a machine that drifts is the same for all
    #[arg(long, default_value_t = 1, value_parser = positive)]
    pub rounds: usize,
    /// Sequences per step over all ranks; a multiple of the ranks
    #[arg(long, alias = "global-batch", default_value_t = 16, value_parser = positive)]
    pub batch: usize,
    /// Tokens per sequence
    #[arg(long, alias = "ctx", default_value_t = 128, value_parser = positive)]
    pub context: usize,
    /// Features per token
    #[arg(long, alias = "dim", default_value_t = 256, value_parser = positive)]
    pub width: usize,
    /// Attention heads; they divide the width
    #[arg(long, default_value_t = 4, value_parser = positive)]
    pub heads: usize,
    /// Blocks of the GPT
    #[arg(long, default_value_t = 4, value_parser = positive)]
    pub layers: usize,
    /// Whether the head's weight is the token embedding
    #[arg(long, default_value = "tied")]
    pub head: Head,
    /// Learning rate of AdamW
    #[arg(long, default_value_t = 3e-4)]
    pub lr: f64,
    /// Weight decay of AdamW, applied to every parameter
    #[arg(long, alias = "wd", default_value_t = 0.1)]
    pub weight_decay: f64,
    /// Decay rate of AdamW's first moment
    #[arg(long, default_value_t = 0.9)]
    pub beta1: f64,
    /// Decay rate of AdamW's second moment
    #[arg(long, default_value_t = 0.999)]
    pub beta2: f64,
    /// Added to AdamW's denominator
    #[arg(long, default_value_t = 1e-8)]
    pub eps: f64,
    /// Seed of the batches, and of the initial values unless --init gives them
    #[arg(long, default_value_t = 1234, value_parser = clap::value_parser!(u64).range(..1 << 32))]
    pub seed: u64,
    /// Size of the gradient buckets in KiB; the library's own sizes unless given
    #[arg(long, value_parser = positive)]
    pub bucket_kib: Option<usize>,
    /// Initial weights, a safetensors file such as gpt_train.py --save-init writes
    #[arg(long)]
    pub init: Option<PathBuf>,
    /// Text to train on; without it, the first book of Cicero's De finibus, which comes with the program
    #[arg(long)]
    pub data: Option<PathBuf>,
    /// JSON with the "losses" that must come out, such as gpt_train.py prints
    #[arg(long)]
    pub expect: Option<PathBuf>,
    /// File for the report
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// File for a timeline of all steps; for one variant and one round. Over MPI rank R > 0 writes to FILE.R
    #[arg(long)]
    pub trace: Option<PathBuf>,
}

/// `EngineConfig::overlap_comm`, as an option has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Overlap {
    /// Reductions run during backward
    On,
    /// Backward waits for each
    Off,
}

impl Overlap {
    /// As the option has it.
    pub fn name(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::Off => "off",
        }
    }
}

/// Options that have been checked, and what they lead to.
#[derive(Debug, Clone)]
pub struct Job {
    pub options: Options,
    pub world_size: usize,
    /// What is trained, in this order.
    pub variants: Vec<Variant>,
    pub model: GptConfig,
    pub text: ByteTokens,
    pub bucket_caps: BucketCaps,
    pub optimizer: AdamW,
    pub expected: Option<Vec<f64>>,
}

impl Options {
    /// Checks what the parser cannot see, and loads the files. The error is one line for the user.
    pub fn into_job(self, world: &World) -> anyhow::Result<Job> {
        let ranks = world.world_size();
        distinct(&self.strategies)?;
        let variants = Variant::all(&self)?;
        anyhow::ensure!(
            self.batch.is_multiple_of(ranks),
            "--batch: {} sequences cannot be dealt out equally to {ranks} ranks",
            self.batch
        );
        anyhow::ensure!(
            self.warmup < self.steps,
            "--warmup: no step is left to measure, {} of {} are warm-up",
            self.warmup,
            self.steps
        );
        let optimizer = AdamW {
            lr: self.lr,
            beta1: self.beta1,
            beta2: self.beta2,
            eps: self.eps,
            weight_decay: self.weight_decay,
        };
        optimizer
            .validate()
            .context("--lr, --beta1, --beta2, --eps, --weight-decay")?;
        let model = GptConfig {
            vocab_size: ByteTokens::VOCAB_SIZE,
            context: self.context,
            width: self.width,
            heads: self.heads,
            layers: self.layers,
            tied_head: self.head == Head::Tied,
        };
        model
            .validate()
            .map_err(|e| anyhow::anyhow!("--width, --heads: {}", one_line(&e)))?;
        let bucket_caps = match self.bucket_kib {
            Some(kib) => BucketCaps::new(kib * 1024)?,
            None => BucketCaps::default(),
        };
        for variant in &variants {
            Demand {
                model: &model.clone().into(),
                dtype: DType::F32,
                batch: self.batch / ranks,
                context: self.context,
                ranks,
                strategies: &[variant.sharding],
                num_states: optimizer.state_names().len(),
                engine: &variant.engine(bucket_caps),
            }
            .check(world)
            .context("--ranks, --layers, --width, --batch, --context")?;
        }
        let (flag, text) = match &self.data {
            Some(path) => ("--data", ByteTokens::from_file(path)),
            None => (
                "the built-in text",
                ByteTokens::from_bytes(lipsum::LIBER_PRIMUS),
            ),
        };
        let text = text.map_err(|e| anyhow::anyhow!("{flag}: {}", one_line(&e)))?;
        text.num_windows(self.context)
            .map_err(|e| anyhow::anyhow!("{flag}, --context: {}", one_line(&e)))?;
        if let Some(path) = &self.init {
            check_weights(path, &model).context("--init")?;
        }
        let expected = self.expect.as_deref().map(read_losses).transpose()?;
        anyhow::ensure!(
            expected.is_none() || variants[0].communication_dtype == DType::F32,
            "--expect: the first variant is compared, so f32 has to be the first of --communication-dtype"
        );
        if let Some(path) = &self.json {
            writable("--json", path)?;
        }
        if let Some(path) = &self.trace {
            anyhow::ensure!(
                variants.len() == 1 && self.rounds == 1,
                "--trace: a timeline shows one run; choose one of --strategies, --overlap-comm and --communication-dtype, and no \
                 --rounds"
            );
            writable("--trace", path)?;
        }
        Ok(Job {
            options: self,
            world_size: ranks,
            variants,
            model,
            text,
            bucket_caps,
            optimizer,
            expected,
        })
    }
}

impl Job {
    /// A rank's store and the model on it, with the job's initial values.
    pub fn build(&self, device: &Device) -> anyhow::Result<(ParamStore, Gpt)> {
        let store = ParamStore::new(device).with_seed(self.options.seed);
        match &self.options.init {
            Some(path) => build_from(path, &self.model, store),
            None => {
                let model = Gpt::new(&self.model, store.var_builder(DType::F32))?;
                Ok((store, model))
            }
        }
    }
}

/// The model with the weights of a file that PyTorch has written.
fn build_from(
    path: &Path,
    model: &GptConfig,
    store: ParamStore,
) -> anyhow::Result<(ParamStore, Gpt)> {
    let store = store.with_initial_values(path)?;
    // All names of the file, since nothing has been asked for yet. Of the two names of a tied weight PyTorch's `save_model`
    // keeps one, the head's.
    let names = store.unused_initial_values();
    let has = |name: &str| names.iter().any(|n| n == name);
    let mut vb = store.var_builder(DType::F32);
    if model.tied_head && has(HEAD) && !has(EMBEDDING) {
        vb = vb.rename_f(|name| match name {
            EMBEDDING => HEAD.to_string(),
            other => other.to_string(),
        });
    }
    let gpt = Gpt::new(model, vb).map_err(|e| anyhow::anyhow!("{}", one_line(&e)))?;
    Ok((store, gpt))
}

const EMBEDDING: &str = "wte.weight";
const HEAD: &str = "head.weight";

/// Refuses weights that are not exactly those of the model.
fn check_weights(path: &Path, model: &GptConfig) -> anyhow::Result<()> {
    let (store, _) = build_from(path, model, ParamStore::new(&Device::Cpu))?;
    let unused = store.unused_initial_values();
    anyhow::ensure!(
        unused.is_empty(),
        "{} has weights that the model does not: {}; see --layers and --head",
        path.display(),
        unused.join(", ")
    );
    Ok(())
}

/// The losses that another program has printed.
fn read_losses(path: &Path) -> anyhow::Result<Vec<f64>> {
    #[derive(Deserialize)]
    struct Curve {
        losses: Vec<f64>,
    }
    let text = std::fs::read_to_string(path)
        .with_context(|| format!("--expect: cannot read {}", path.display()))?;
    let curve: Curve =
        serde_json::from_str(&text).with_context(|| format!("--expect: {}", path.display()))?;
    anyhow::ensure!(
        !curve.losses.is_empty(),
        "--expect: {} has no losses",
        path.display()
    );
    Ok(curve.losses)
}
