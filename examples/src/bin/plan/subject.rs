//! What is planned: a number of parameters, or a model.

use candle_core::DType;
use dp_core::{AdamW, EngineConfig, Optimizer, ParamKind, ParamShapes, ParamSpec, Sgd};
use dp_models::{Activations, ModelConfig};
use dp_zero::{BytesPerElement, Sharding, TrainerPlan, TrainingStep};
use serde::Serialize;

/// What is planned.
#[derive(Debug, Clone)]
pub enum Subject {
    /// Of the model nothing else is known.
    Count(u64),
    /// A model that can be built, and what each rank takes of sequences of `context` tokens, for each number of ranks.
    Model {
        config: ModelConfig,
        context: usize,
        batches: Vec<Batch>,
    },
}

/// What a rank takes at a time, and how often in a step.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Batch {
    /// Sequences per rank and micro-batch.
    #[serde(rename = "micro_batch_size")]
    pub size: usize,
    /// Micro-batches per step.
    pub accumulation_steps: usize,
}

impl Batch {
    /// One micro-batch per step.
    pub fn of(size: usize) -> Self {
        Self {
            size,
            accumulation_steps: 1,
        }
    }
}

/// How it is trained.
#[derive(Debug, Clone)]
pub struct Settings {
    pub dtype: DType,
    pub optimizer: OptimizerName,
    pub engine: EngineConfig,
    /// Whether gradients are clipped.
    pub clips_norm: bool,
    /// The strategy of the configuration, if there is one.
    pub configured: Option<Sharding>,
}

/// An optimizer of dp-core, by what it keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum OptimizerName {
    /// Two numbers per element
    #[value(name = "adamw")]
    #[serde(rename = "adamw")]
    AdamW,
    /// None
    Sgd,
    /// One number per element
    SgdMomentum,
}

/// A subject, looked at once: then it is planned for any strategy and number of ranks.
pub enum Looked {
    Count(u64),
    Model {
        specs: Vec<ParamSpec>,
        /// In the order of the numbers of ranks.
        batches: Vec<(Batch, Activations)>,
    },
}

impl Subject {
    /// Finds the parameters of a model, without allocating it.
    pub fn look(&self, dtype: DType) -> anyhow::Result<Looked> {
        Ok(match self {
            Self::Count(num_params) => Looked::Count(*num_params),
            Self::Model {
                config,
                context,
                batches,
            } => Looked::Model {
                specs: ParamShapes::record(dtype, |vb| config.build(vb))?,
                batches: batches
                    .iter()
                    .map(|b| (*b, config.activations(b.size, *context, dtype)))
                    .collect(),
            },
        })
    }
}

impl Looked {
    /// Trained elements.
    pub fn num_params(&self) -> u64 {
        match self {
            Self::Count(num_params) => *num_params,
            Self::Model { specs, .. } => {
                let trained = specs.iter().filter(|s| s.kind == ParamKind::Trained);
                trained.map(|s| s.num_elements() as u64).sum()
            }
        }
    }

    /// What each rank takes with the `i`-th number of ranks, and the bytes at the fullest moment of a micro-batch; `None` from a count.
    pub fn batch(&self, i: usize) -> Option<(Batch, u64)> {
        match self {
            Self::Count(_) => None,
            Self::Model { batches, .. } => Some((batches[i].0, batches[i].1.peak)),
        }
    }

    /// What each of `world_size` ranks, the `i`-th number of them, holds and sends.
    pub fn plan(
        &self,
        settings: &Settings,
        (i, world_size): (usize, usize),
        sharding: Sharding,
    ) -> dp_core::Result<TrainerPlan> {
        let num_states = settings.optimizer.num_states();
        match self {
            Self::Count(num_params) => {
                let engine = &settings.engine;
                let bytes = match settings.dtype {
                    DType::F32 => BytesPerElement::f32(num_states as u64),
                    _ => BytesPerElement::mixed(num_states as u64, engine.grad_accum_dtype),
                };
                let sent = engine.communication_dtype;
                let sent = sent.map_or(bytes.gradients, |d| d.size_in_bytes() as u64);
                TrainerPlan::of_count(*num_params, world_size, sharding, bytes, sent)
            }
            Self::Model { specs, batches } => {
                let step = TrainingStep {
                    num_micro_batches: batches[i].0.accumulation_steps,
                    clips_norm: settings.clips_norm,
                };
                let engine = &settings.engine;
                TrainerPlan::of_steps(specs, world_size, sharding, num_states, engine, step)
            }
        }
    }
}

impl OptimizerName {
    /// In words.
    pub fn text(self) -> &'static str {
        match self {
            Self::AdamW => "AdamW",
            Self::Sgd => "SGD",
            Self::SgdMomentum => "SGD with momentum",
        }
    }

    /// f32 numbers of optimizer state per element.
    pub fn num_states(self) -> usize {
        match self {
            Self::AdamW => AdamW::default().state_names(),
            Self::Sgd => Sgd::new(0.1).state_names(),
            Self::SgdMomentum => {
                let momentum = 0.9;
                Sgd {
                    momentum,
                    ..Sgd::new(0.1)
                }
                .state_names()
            }
        }
        .len()
    }
}
