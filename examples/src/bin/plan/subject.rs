//! What is planned: a number of parameters, or a model.

use candle_core::DType;
use dp_core::{AdamW, EngineConfig, Optimizer, ParamKind, ParamShapes, ParamSpec, Sgd};
use dp_models::{Activations, ModelConfig};
use dp_zero::{BytesPerElement, Sharding, TrainerPlan};
use serde::Serialize;

/// What is planned.
#[derive(Debug, Clone)]
pub enum Subject {
    /// Of the model nothing else is known.
    Count(u64),
    /// A model that can be built, and `batch` sequences of its context per rank and micro-batch.
    Model { config: ModelConfig, batch: usize },
}

/// How it is trained.
#[derive(Debug, Clone)]
pub struct Settings {
    pub dtype: DType,
    pub optimizer: OptimizerName,
    pub engine: EngineConfig,
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
        activations: Activations,
    },
}

impl Subject {
    /// Finds the parameters of a model, without allocating it.
    pub fn look(&self, dtype: DType) -> anyhow::Result<Looked> {
        Ok(match self {
            Self::Count(num_params) => Looked::Count(*num_params),
            Self::Model { config, batch } => Looked::Model {
                specs: ParamShapes::record(dtype, |vb| config.build(vb))?,
                activations: config.activations(*batch, config.context(), dtype),
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

    /// Bytes at the fullest moment of a micro-batch; `None` from a count.
    pub fn activations(&self) -> Option<u64> {
        match self {
            Self::Count(_) => None,
            Self::Model { activations, .. } => Some(activations.peak),
        }
    }

    /// What each of `world_size` ranks holds and sends.
    pub fn plan(
        &self,
        settings: &Settings,
        world_size: usize,
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
            Self::Model { specs, .. } => {
                TrainerPlan::of_specs(specs, world_size, sharding, num_states, &settings.engine)
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
