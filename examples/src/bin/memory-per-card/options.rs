//! The command line.

use std::path::PathBuf;

use anyhow::Context;
use candle_core::DType;
use clap::Parser;
use dp_core::{
    AdamW, BucketCaps, Devices, EngineConfig, GradAccumDType, LossScaling, Optimizer, World,
};
use dp_examples::memory_check::Demand;
use dp_examples::options::{
    devices, distinct, dtype, grad_accum_dtype, one_line, positive, strategy, writable,
};
use dp_models::{ByteTokens, GptConfig};
use dp_zero::Sharding;

/// Trains the same GPT with each strategy and compares the memory per card.
#[derive(Debug, Clone, Parser)]
#[command(name = "memory-per-card", version, allow_negative_numbers = true)]
pub struct Options {
    /// Number of ranks (cards)
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub ranks: u16,
    /// Where ranks compute: cpu; cuda, the first GPU for all of them; or GPUs in turn, as in cuda:0,1
    #[arg(long, default_value = "cpu", value_parser = devices)]
    pub device: Devices,
    /// Strategies to run, in this order
    #[arg(long, value_delimiter = ',', default_value = "ddp,zero1,zero2", value_parser = strategy)]
    pub strategies: Vec<Sharding>,
    /// Optimizer steps per strategy
    #[arg(long, default_value_t = 30, value_parser = positive)]
    pub steps: usize,
    /// Sequences per rank and step
    #[arg(long, default_value_t = 2, value_parser = positive)]
    pub batch: usize,
    /// Tokens per sequence
    #[arg(long, default_value_t = 64, value_parser = positive)]
    pub context: usize,
    /// Blocks of the GPT
    #[arg(long, default_value_t = 4, value_parser = positive)]
    pub layers: usize,
    /// Features per token
    #[arg(long, default_value_t = 256, value_parser = positive)]
    pub width: usize,
    /// Attention heads; they divide the width
    #[arg(long, default_value_t = 4, value_parser = positive)]
    pub heads: usize,
    /// Seed of the initial values and of the order of the data
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Text to train on; without it, the first book of Cicero's De finibus, which comes with the program
    #[arg(long)]
    pub data: Option<PathBuf>,
    /// Folder for report.html and report.json
    #[arg(long, default_value = "target/memory-per-card")]
    pub out: PathBuf,
    /// Size of the gradient buckets; zero2 holds up to two of them at a time
    #[arg(long, default_value_t = 1024, value_parser = positive)]
    pub bucket_kib: usize,
    /// Dtype of the parameters: f32, bf16 or f16; the last two have f32 masters, and f16 has a dynamic loss scale
    #[arg(long, default_value = "f32", value_parser = dtype)]
    pub dtype: DType,
    /// What gradients of 16-bit parameters are kept in: f32, or parameter (their own dtype, as in the ZeRO paper)
    #[arg(long, default_value = "f32", value_parser = grad_accum_dtype)]
    pub grad_accum_dtype: GradAccumDType,
    /// Dtype in which gradients travel; without it, the one they are kept in
    #[arg(long, value_parser = dtype)]
    pub communication_dtype: Option<DType>,
    /// Learning rate of AdamW
    #[arg(long, default_value_t = 5e-4)]
    pub lr: f64,
}

/// Options that have been checked, and what they lead to.
#[derive(Debug, Clone)]
pub struct Job {
    pub options: Options,
    pub model: GptConfig,
    pub text: ByteTokens,
    pub engine: EngineConfig,
}

impl Options {
    /// Checks what the parser cannot see, and loads the text. The error is one line for the user.
    pub fn into_job(self, world: &World) -> anyhow::Result<Job> {
        distinct(&self.strategies)?;
        anyhow::ensure!(
            self.lr.is_finite() && self.lr >= 0.0,
            "--lr: {} is not finite and >= 0",
            self.lr
        );
        let model = GptConfig {
            vocab_size: ByteTokens::VOCAB_SIZE,
            context: self.context,
            width: self.width,
            heads: self.heads,
            layers: self.layers,
            tied_head: false,
        };
        model
            .validate()
            .map_err(|e| anyhow::anyhow!("--width, --heads: {}", one_line(&e)))?;
        let mut engine = EngineConfig::default();
        engine.bucket_caps = BucketCaps::new(self.bucket_kib * 1024)?;
        engine.grad_accum_dtype = self.grad_accum_dtype;
        engine.communication_dtype = self.communication_dtype;
        if self.dtype == DType::F16 {
            engine.loss_scaling = LossScaling::dynamic();
        }
        Demand {
            model: &model.clone().into(),
            dtype: self.dtype,
            batch: self.batch,
            context: self.context,
            ranks: world.world_size(),
            strategies: &self.strategies,
            num_states: AdamW::default().state_names().len(),
            engine: &engine,
        }
        .check(world)
        .context("--ranks, --layers, --width, --batch, --context")?;
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
        std::fs::create_dir_all(&self.out)
            .map_err(|e| anyhow::anyhow!("--out: cannot create {}: {e}", self.out.display()))?;
        for name in ["report.json", "report.html"] {
            writable("--out", &self.out.join(name))?;
        }
        Ok(Job {
            options: self,
            model,
            text,
            engine,
        })
    }
}
