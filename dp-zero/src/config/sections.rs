//! The sections of a configuration. The doc comments are the descriptions on the reference page, which is made from these types.

use dp_core::WarmupType;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// ZeRO, and the sizes of its buckets.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[non_exhaustive]
pub struct ZeroSection {
    /// What is sharded over the ranks: 0 nothing (plain data parallelism), 1 optimizer state, 2 optimizer state and gradients. DeepSpeed's 3 is not there yet.
    pub stage: u64,
    /// Elements of gradients that are reduced at a time, the size of a bucket. Left out: 25 MiB of gradients, the first bucket 1 MiB, as in PyTorch; or an eighth of all gradients if that is less, but at least 1 MiB. (DeepSpeed: 5e8 elements.)
    pub reduce_bucket_size: Option<u64>,
    /// Elements of parameters that are gathered at a time. Parameters are gathered by the buckets in which gradients are reduced, so it must not be below `reduce_bucket_size`; given alone, it is the size of both.
    pub allgather_bucket_size: Option<u64>,
    /// Reduce gradients while backward goes on. (DeepSpeed's default is false below stage 3.)
    pub overlap_comm: bool,
    /// False: a step fails on all ranks if no rank has used a trained parameter.
    pub ignore_unused_parameters: bool,
}

impl Default for ZeroSection {
    fn default() -> Self {
        Self {
            stage: 0,
            reduce_bucket_size: None,
            allgather_bucket_size: None,
            overlap_comm: true,
            ignore_unused_parameters: true,
        }
    }
}

/// Training in bf16: parameters of 16 bits, with f32 masters where they are updated.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[non_exhaustive]
pub struct Bf16Section {
    /// Parameters are bf16.
    pub enabled: bool,
    /// Skip a step, on all ranks, in which a gradient is NaN or infinite.
    pub check_grad_overflow: bool,
}

impl Default for Bf16Section {
    fn default() -> Self {
        Self {
            enabled: false,
            check_grad_overflow: true,
        }
    }
}

/// Training in f16, with a scaled loss.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[non_exhaustive]
pub struct Fp16Section {
    /// Parameters are f16.
    pub enabled: bool,
    /// What losses are multiplied by; 0 adapts it to the gradients.
    pub loss_scale: f64,
    /// The first scale is 2 to this power.
    pub initial_scale_power: i32,
    /// Steps without an overflow before the scale is doubled.
    pub loss_scale_window: u64,
    /// The overflow from which on the scale is halved; 1 for the first.
    pub hysteresis: u64,
    /// Count overflows for `hysteresis` anew after each good step.
    pub consecutive_hysteresis: bool,
    /// The least scale. A run that is at it goes on skipping steps. (DeepSpeed ends it.)
    pub min_loss_scale: f64,
}

impl Default for Fp16Section {
    fn default() -> Self {
        Self {
            enabled: false,
            loss_scale: 0.0,
            initial_scale_power: 16,
            loss_scale_window: 1000,
            hysteresis: 2,
            consecutive_hysteresis: false,
            min_loss_scale: 1.0,
        }
    }
}

/// A dtype by DeepSpeed's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum FloatType {
    /// 32 bits.
    Fp32,
    /// 16 bits, 11 of them for the fraction.
    Fp16,
    /// 16 bits, 8 of them for the fraction.
    Bf16,
}

/// Dtypes of what a 16-bit model keeps.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[non_exhaustive]
pub struct DataTypesSection {
    /// What gradients are kept and added in: fp32, or the dtype of the parameters. Left out: fp32. (DeepSpeed with ZeRO: the dtype of the parameters.)
    pub grad_accum_dtype: Option<FloatType>,
}

/// The optimizer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", content = "params")]
#[non_exhaustive]
pub enum OptimizerSection {
    /// Adam with decoupled weight decay, `FusedAdam` in DeepSpeed. DeepSpeed's name `Adam` means the same.
    AdamW(AdamWParams),
    /// Stochastic gradient descent, `torch.optim.SGD`.
    #[serde(rename = "SGD")]
    Sgd(SgdParams),
}

impl Default for OptimizerSection {
    fn default() -> Self {
        Self::AdamW(AdamWParams::default())
    }
}

/// Hyper-parameters of AdamW.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[non_exhaustive]
pub struct AdamWParams {
    /// Learning rate. Left out: 1e-3, or the scheduler's `warmup_max_lr`.
    pub lr: Option<f64>,
    /// Decay rates of the two moments.
    pub betas: [f64; 2],
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

impl Default for AdamWParams {
    fn default() -> Self {
        Self {
            lr: None,
            betas: [0.9, 0.999],
            eps: 1e-8,
            weight_decay: 0.0,
        }
    }
}

/// Hyper-parameters of SGD.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[non_exhaustive]
pub struct SgdParams {
    /// Learning rate. Left out: 1e-3, or the scheduler's `warmup_max_lr`.
    pub lr: Option<f64>,
    /// Momentum; 0 keeps no state.
    pub momentum: f64,
    /// Dampening of the momentum.
    pub dampening: f64,
    /// L2 penalty.
    pub weight_decay: f64,
    /// Nesterov's momentum.
    pub nesterov: bool,
}

/// The learning-rate schedule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", content = "params")]
#[non_exhaustive]
pub enum SchedulerSection {
    /// A warm-up, then a constant rate.
    WarmupLR(WarmupParams),
    /// A warm-up, then a line down to the least rate.
    WarmupDecayLR(WarmupDecayParams),
    /// A warm-up, then half a cosine.
    WarmupCosineLR(WarmupCosineParams),
}

/// Settings of WarmupLR.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[non_exhaustive]
pub struct WarmupParams {
    /// Rate of the first two steps.
    pub warmup_min_lr: f64,
    /// Rate after the warm-up. Left out: the optimizer's.
    pub warmup_max_lr: Option<f64>,
    /// Steps of the warm-up.
    pub warmup_num_steps: u64,
    /// How the rate grows: `log`, with the logarithm of the step, or `linear`.
    #[schemars(with = "String", extend("enum" = ["log", "linear"]))]
    pub warmup_type: WarmupType,
}

impl Default for WarmupParams {
    fn default() -> Self {
        Self {
            warmup_min_lr: 0.0,
            warmup_max_lr: None,
            warmup_num_steps: 1000,
            warmup_type: WarmupType::Log,
        }
    }
}

/// Settings of WarmupDecayLR.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[non_exhaustive]
pub struct WarmupDecayParams {
    /// Steps until the least rate. Left out: the steps of the run.
    pub total_num_steps: Option<u64>,
    /// Rate of the first two steps, and of the last.
    pub warmup_min_lr: f64,
    /// Rate after the warm-up. Left out: the optimizer's, or 1e-3. (DeepSpeed: 1e-3, whatever the optimizer's is.)
    pub warmup_max_lr: Option<f64>,
    /// Steps of the warm-up.
    pub warmup_num_steps: u64,
    /// How the rate grows: `log`, with the logarithm of the step, or `linear`.
    #[schemars(with = "String", extend("enum" = ["log", "linear"]))]
    pub warmup_type: WarmupType,
}

impl Default for WarmupDecayParams {
    fn default() -> Self {
        let WarmupParams {
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
        } = WarmupParams::default();
        Self {
            total_num_steps: None,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
        }
    }
}

/// Settings of WarmupCosineLR.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[non_exhaustive]
pub struct WarmupCosineParams {
    /// Steps until the last rate. Left out: the steps of the run.
    pub total_num_steps: Option<u64>,
    /// Rate of the second step, as a fraction of the optimizer's, from which it grows; the first step has rate 0.
    pub warmup_min_ratio: f64,
    /// Steps of the warm-up.
    pub warmup_num_steps: u64,
    /// The last rate, as a fraction of the optimizer's.
    pub cos_min_ratio: f64,
    /// How the rate grows: `log`, with the logarithm of the step, or `linear`.
    #[schemars(with = "String", extend("enum" = ["log", "linear"]))]
    pub warmup_type: WarmupType,
}

impl Default for WarmupCosineParams {
    fn default() -> Self {
        Self {
            total_num_steps: None,
            warmup_min_ratio: 0.0,
            warmup_num_steps: 1000,
            cos_min_ratio: 1e-4,
            warmup_type: WarmupType::Log,
        }
    }
}

/// TensorBoard event files.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[non_exhaustive]
pub struct TensorBoardSection {
    /// Write them.
    pub enabled: bool,
    /// Folder for them; left out, the program chooses.
    pub output_path: Option<String>,
    /// Sub-folder of this run.
    pub job_name: String,
}

impl Default for TensorBoardSection {
    fn default() -> Self {
        Self {
            enabled: false,
            output_path: None,
            job_name: "DeepSpeedJobName".to_string(),
        }
    }
}
