//! ZeRO for Candle: data parallelism without redundant copies of optimizer state and gradients.
//!
//! One step, on rank `r` of `N`, in the order of the modules:
//!
//! 1. Backward runs; dp-core's hooks copy each gradient into its bucket as it appears. A full bucket is
//!    reduce-scattered while backward goes on: rank `r` receives the mean gradient of slice `r` of the bucket.
//! 2. Stage 1 ([`ZeroStage::One`]) keeps the whole buckets until the next step. Stage 2 ([`ZeroStage::Two`]) keeps the
//!    own slice only; two transient buffers serve all buckets.
//! 3. `step` updates the elements of slice `r` of every bucket, with the only copy of their optimizer state.
//! 4. An all-gather brings all slices to all ranks, and the parameters are whole again.
//!
//! A whole program:
//!
//! ```
//! use candle_core::{DType, Tensor};
//! use candle_nn::Module;
//! use dp_core::{AdamW, ParamStore, Result, Trainer, World};
//! use dp_zero::{ZeroOptimizer, ZeroStage};
//!
//! fn main() -> Result<()> {
//!     World::threads(4)?.run(|rank| {
//!         let store = ParamStore::new(rank.device()).with_seed(1);
//!         let model = candle_nn::linear(100, 100, store.var_builder(DType::F32))?;
//!         let mut trainer = ZeroOptimizer::new(store, rank.comm(), AdamW::default(), ZeroStage::Two)?;
//!         let x = Tensor::full(rank.rank() as f32, (8, 100), rank.device())?;
//!         let loss = model.forward(&x)?.sqr()?.mean_all()?;
//!         trainer.backward(&loss)?;
//!         trainer.step()?;
//!
//!         // 10,100 parameters, two moments of 4 bytes each, a quarter of them on each of the four ranks.
//!         assert_eq!(trainer.ledger().current().optimizer, 10_100 * 8 / 4);
//!         Ok(())
//!     })
//! }
//! ```
//!
//! The trainer is [`ZeroOptimizer`]; it is used through [`dp_core::Trainer`], as
//! [`dp_core::DistributedDataParallel`] is. [`TrainerPlan`] predicts the bytes that each rank will hold and send.

mod zero1;
mod zero2;

mod gather;

mod choose;
mod optimizer;

mod estimate;
mod plan;
mod training_step;

pub mod config;

pub use choose::trainer;
pub use config::{BatchSizes, ConfigError, DeepSpeedConfig};
pub use estimate::{BytesPerElement, ModelStates, Sharding, bytes_sent_per_step};
pub use optimizer::{ZeroConfig, ZeroOptimizer, ZeroStage};
pub use plan::TrainerPlan;
pub use training_step::TrainingStep;
