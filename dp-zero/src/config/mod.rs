//! DeepSpeed's JSON configuration: the same keys, with the same meaning.
//!
//! ```
//! use dp_core::{ParamStore, World};
//! use dp_zero::DeepSpeedConfig;
//!
//! let config = DeepSpeedConfig::from_json(
//!     r#"{
//!         "train_batch_size": 16,
//!         "gradient_accumulation_steps": 2,
//!         "zero_optimization": { "stage": 2, "reduce_bucket_size": 5e6 },
//!         "optimizer": { "type": "AdamW", "params": { "lr": 3e-4, "weight_decay": 0.1 } },
//!         "scheduler": { "type": "WarmupLR", "params": { "warmup_num_steps": 10 } }
//!     }"#,
//! )?;
//! let sizes = config.batch_sizes(4)?;
//! assert_eq!((sizes.micro_batch_size, sizes.divisor()), (2, 8));
//! World::threads(4)?.run(|rank| -> dp_core::Result<()> {
//!     let store = ParamStore::new(rank.device());
//!     candle_nn::linear(3, 1, store.var_builder(config.dtype()))?;
//!     let trainer = config.trainer(store, rank.comm(), None)?;
//!     assert_eq!(trainer.strategy_name(), "zero2");
//!     Ok(())
//! })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A key that DeepSpeed does not have is an error that names the nearest one. A key that DeepSpeed has, but that asks for what
//! is not there, is an error, too: nothing is quietly done otherwise. [`reference`](reference()) lists all keys.

mod batch;
mod error;
mod expected;
mod json;
mod keys;
mod optimizer;
mod reference;
mod schedule;
mod schema;
mod sections;
mod spelling;
mod unknown;
mod unsupported;

use std::path::Path;
use std::sync::Arc;

use candle_core::DType;
use dp_core::{
    AdamW, BucketCaps, Communicator, DynamicLossScale, EngineConfig, GradAccumDType, LossScaling,
    NonFinite, ParamStore, Sgd, Trainer, UnusedParameters,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use batch::BatchSizes;
pub use error::ConfigError;
pub use json::{check_is_object, parse_json, set};
pub use keys::{paths_of, read_section};
pub use optimizer::ConfiguredOptimizer;
pub use reference::{reference, reference_of};
pub use sections::{
    AdamWParams, Bf16Section, DataTypesSection, FloatType, Fp16Section, OptimizerSection,
    SchedulerSection, SgdParams, TensorBoardSection, WarmupCosineParams, WarmupDecayParams,
    WarmupParams, ZeroSection,
};

use crate::Sharding;

/// A DeepSpeed configuration; see the [module page](self). It is read by [`from_json`](Self::from_json), which checks keys and
/// values and knows DeepSpeed's spellings; `Deserialize` alone takes this type's own form only.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
#[non_exhaustive]
pub struct DeepSpeedConfig {
    /// Samples of one optimizer step, on all ranks together. Two of the three batch sizes give the third.
    pub train_batch_size: Option<u64>,
    /// Samples of one forward and backward on one rank.
    pub train_micro_batch_size_per_gpu: Option<u64>,
    /// Micro-batches of one optimizer step, on each rank.
    pub gradient_accumulation_steps: Option<u64>,
    /// What is sharded over the ranks.
    pub zero_optimization: ZeroSection,
    /// Training in bf16.
    pub bf16: Bf16Section,
    /// Training in f16.
    pub fp16: Fp16Section,
    /// Other dtypes of a 16-bit model.
    pub data_types: DataTypesSection,
    /// Dtype in which gradients travel. Left out: the one they are kept in.
    pub communication_data_type: Option<FloatType>,
    /// Greatest 2-norm of the gradients of a step; longer ones are scaled down. 0 switches it off.
    pub gradient_clipping: f64,
    /// The optimizer.
    pub optimizer: OptimizerSection,
    /// The learning-rate schedule. Left out: a constant rate.
    pub scheduler: Option<SchedulerSection>,
    /// Steps between two printed lines.
    pub steps_per_print: u64,
    /// Print where the time of a step goes.
    pub wall_clock_breakdown: bool,
    /// TensorBoard event files.
    pub tensorboard: TensorBoardSection,
}

impl Default for DeepSpeedConfig {
    fn default() -> Self {
        Self {
            train_batch_size: None,
            train_micro_batch_size_per_gpu: None,
            gradient_accumulation_steps: None,
            zero_optimization: ZeroSection::default(),
            bf16: Bf16Section::default(),
            fp16: Fp16Section::default(),
            data_types: DataTypesSection::default(),
            communication_data_type: None,
            gradient_clipping: 1.0,
            optimizer: OptimizerSection::default(),
            scheduler: None,
            steps_per_print: 10,
            wall_clock_breakdown: false,
            tensorboard: TensorBoardSection::default(),
        }
    }
}

impl DeepSpeedConfig {
    /// Reads a JSON text.
    ///
    /// # Errors
    /// [`ConfigError`], the first one found.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        Self::from_value(parse_json(text)?, &[])
    }

    /// Reads a JSON file.
    ///
    /// # Errors
    /// As [`from_json`](Self::from_json), and [`ConfigError::Read`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        let text = std::fs::read_to_string(path).map_err(|source| ConfigError::Read {
            path: path.to_path_buf(),
            source,
        })?;
        Self::from_json(&text)
    }

    /// From parsed JSON. `own_keys`: paths of the sections and keys that the program has taken out of it ([`paths_of`]), for
    /// suggestions to a mistyped key. Null is what is not there, as in Python.
    ///
    /// # Errors
    /// As [`from_json`](Self::from_json).
    pub fn from_value(mut value: Value, own_keys: &[String]) -> Result<Self, ConfigError> {
        json::check_is_object(&value)?;
        spelling::normalize(&mut value)?;
        unsupported::take_out(&mut value)?;
        let mut others = own_keys.to_vec();
        others.extend(unsupported::paths());
        let config: Self = keys::read_deepspeed(value, &others)?;
        config.validate()?;
        Ok(config)
    }

    /// Refuses what cannot be, as far as it depends neither on the number of ranks nor on that of steps.
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn validate(&self) -> Result<(), ConfigError> {
        let zero = &self.zero_optimization;
        match zero.stage {
            0..=2 => {}
            3 => {
                return Err(ConfigError::Unsupported {
                    key: "zero_optimization.stage".to_string(),
                    value: "3".to_string(),
                    reason: "stage 3 is estimated only, there is no trainer for it; 0, 1 and 2 are there".to_string(),
                });
            }
            stage => {
                let message = format!("{stage} is no stage; 0, 1 and 2 are");
                return Err(ConfigError::invalid("zero_optimization.stage", message));
            }
        }
        let (reduce, gather) = (zero.reduce_bucket_size, zero.allgather_bucket_size);
        for (key, size) in [
            ("reduce_bucket_size", reduce),
            ("allgather_bucket_size", gather),
        ] {
            if size == Some(0) {
                let key = format!("zero_optimization.{key}");
                return Err(ConfigError::invalid(
                    key,
                    "a bucket holds at least one element, got 0",
                ));
            }
        }
        if let (Some(reduce), Some(gather)) = (reduce, gather)
            && gather < reduce
        {
            return Err(ConfigError::contradiction(
                "zero_optimization.allgather_bucket_size",
                "zero_optimization.reduce_bucket_size",
                "parameters are gathered by the buckets in which gradients are reduced; lower reduce_bucket_size",
            ));
        }
        if self.bf16.enabled && self.fp16.enabled {
            return Err(ConfigError::contradiction(
                "bf16.enabled",
                "fp16.enabled",
                "parameters have one dtype",
            ));
        }
        if self.gradient_clipping.is_sign_negative() || !self.gradient_clipping.is_finite() {
            return Err(ConfigError::invalid(
                "gradient_clipping",
                "must be a norm, or 0 for none",
            ));
        }
        if self.steps_per_print == 0 {
            return Err(ConfigError::invalid(
                "steps_per_print",
                "must be at least 1",
            ));
        }
        if self.fp16.enabled {
            self.validate_fp16()?;
        }
        self.grad_accum_dtype()?;
        let optimizer = self.optimizer()?;
        dp_core::Optimizer::validate(&optimizer)
            .map_err(|e| ConfigError::invalid("optimizer.params", e.to_string()))?;
        self.engine_config().map(drop)
    }

    /// Of an `fp16` that is enabled.
    fn validate_fp16(&self) -> Result<(), ConfigError> {
        let (fp16, defaults) = (&self.fp16, Fp16Section::default());
        let dynamic = Fp16Section {
            enabled: true,
            loss_scale: fp16.loss_scale,
            ..defaults
        };
        if fp16.loss_scale != 0.0 && *fp16 != dynamic {
            return Err(ConfigError::contradiction(
                "fp16.loss_scale",
                "fp16.initial_scale_power, loss_scale_window, hysteresis, consecutive_hysteresis or min_loss_scale",
                "a fixed scale does not follow the rules of a dynamic one; 0 makes it dynamic",
            ));
        }
        self.loss_scaling()
            .validate()
            .map_err(|e| ConfigError::invalid("fp16", e.to_string()))
    }

    /// The three batch sizes on `world_size` ranks.
    ///
    /// # Errors
    /// [`ConfigError::Contradiction`] naming the keys that do not fit together; [`ConfigError::Invalid`] if none is there.
    pub fn batch_sizes(&self, world_size: usize) -> Result<BatchSizes, ConfigError> {
        BatchSizes::resolve(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            world_size,
        )
    }

    /// Dtype of the parameters.
    pub fn dtype(&self) -> DType {
        match (self.bf16.enabled, self.fp16.enabled) {
            (true, _) => DType::BF16,
            (_, true) => DType::F16,
            _ => DType::F32,
        }
    }

    /// `zero_optimization.stage`.
    pub fn sharding(&self) -> Sharding {
        match self.zero_optimization.stage {
            0 => Sharding::Ddp,
            1 => Sharding::Zero1,
            2 => Sharding::Zero2,
            _ => Sharding::Zero3,
        }
    }

    /// The optimizer. Its learning rate is the full one, which the schedule is a fraction of.
    ///
    /// # Errors
    /// [`ConfigError::Contradiction`] if scheduler and optimizer name two rates.
    pub fn optimizer(&self) -> Result<ConfiguredOptimizer, ConfigError> {
        let lr = self.full_learning_rate()?;
        Ok(match &self.optimizer {
            OptimizerSection::AdamW(p) => ConfiguredOptimizer::AdamW(AdamW {
                lr,
                beta1: p.betas[0],
                beta2: p.betas[1],
                eps: p.eps,
                weight_decay: p.weight_decay,
            }),
            OptimizerSection::Sgd(p) => ConfiguredOptimizer::Sgd(Sgd {
                lr,
                momentum: p.momentum,
                dampening: p.dampening,
                weight_decay: p.weight_decay,
                nesterov: p.nesterov,
            }),
        })
    }

    fn grad_accum_dtype(&self) -> Result<GradAccumDType, ConfigError> {
        let parameter = match self.dtype() {
            DType::BF16 => FloatType::Bf16,
            DType::F16 => FloatType::Fp16,
            _ => FloatType::Fp32,
        };
        match self.data_types.grad_accum_dtype {
            None | Some(FloatType::Fp32) => Ok(GradAccumDType::F32),
            Some(dtype) if dtype == parameter => Ok(GradAccumDType::Parameter),
            Some(_) => Err(ConfigError::contradiction(
                "data_types.grad_accum_dtype",
                "bf16.enabled, fp16.enabled",
                "gradients are kept in fp32 or in the dtype of the parameters",
            )),
        }
    }

    fn loss_scaling(&self) -> LossScaling {
        let fp16 = &self.fp16;
        if !fp16.enabled {
            return LossScaling::Off;
        }
        if fp16.loss_scale != 0.0 {
            return LossScaling::Static(fp16.loss_scale);
        }
        LossScaling::Dynamic(DynamicLossScale {
            init_scale: 2f64.powi(fp16.initial_scale_power),
            growth_interval: fp16.loss_scale_window,
            hysteresis: fp16.hysteresis,
            consecutive_hysteresis: fp16.consecutive_hysteresis,
            min_scale: fp16.min_loss_scale,
            ..DynamicLossScale::default()
        })
    }

    /// The settings of the engine: buckets, dtypes, loss scale, what to do about overflows.
    ///
    /// # Errors
    /// [`ConfigError::Contradiction`] for dtypes that do not fit together.
    pub fn engine_config(&self) -> Result<EngineConfig, ConfigError> {
        let zero = &self.zero_optimization;
        let mut engine = EngineConfig::default();
        engine.grad_accum_dtype = self.grad_accum_dtype()?;
        if let Some(elements) = zero.reduce_bucket_size.or(zero.allgather_bucket_size) {
            let bytes = engine.grad_accum_dtype.of(self.dtype()).size_in_bytes() as u64;
            let cap = usize::try_from(elements.saturating_mul(bytes)).unwrap_or(usize::MAX);
            engine.bucket_caps = BucketCaps::new(cap).map_err(|e| {
                ConfigError::invalid("zero_optimization.reduce_bucket_size", e.to_string())
            })?;
        }
        engine.overlap_comm = zero.overlap_comm;
        if !zero.ignore_unused_parameters {
            engine.unused_parameters = UnusedParameters::Error;
        }
        engine.communication_dtype = self.communication_data_type.map(|dtype| match dtype {
            FloatType::Fp32 => DType::F32,
            FloatType::Fp16 => DType::F16,
            FloatType::Bf16 => DType::BF16,
        });
        engine.loss_scaling = self.loss_scaling();
        if self.fp16.enabled || self.bf16.enabled && self.bf16.check_grad_overflow {
            engine.non_finite = NonFinite::SkipStep;
        }
        Ok(engine)
    }

    /// The trainer that the configuration describes, over the parameters of `store`: `deepspeed.initialize`. Its model is to be
    /// made with [`dtype`](Self::dtype). `total_steps` is the length of the run, for a schedule that does not say it. Collective.
    ///
    /// The batch sizes and `gradient_clipping` are the loop's: [`batch_sizes`](Self::batch_sizes),
    /// [`Trainer::clip_grad_norm`].
    ///
    /// # Errors
    /// [`ConfigError`] as [`dp_core::Error::InvalidArgument`]; those of [`crate::trainer`].
    pub fn trainer(
        &self,
        store: ParamStore,
        comm: Arc<dyn Communicator>,
        total_steps: Option<u64>,
    ) -> dp_core::Result<Box<dyn Trainer<Optimizer = ConfiguredOptimizer>>> {
        let invalid = |e: ConfigError| dp_core::Error::InvalidArgument {
            what: "configuration",
            message: e.to_string(),
        };
        let (optimizer, engine) = (
            self.optimizer().map_err(invalid)?,
            self.engine_config().map_err(invalid)?,
        );
        let schedule = self.schedule(total_steps).map_err(invalid)?;
        let mut trainer = crate::trainer(self.sharding(), store, comm, optimizer, engine)?;
        trainer.set_lr_schedule(schedule)?;
        Ok(trainer)
    }
}
