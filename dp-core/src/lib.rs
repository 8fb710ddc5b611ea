//! Data parallel training for [Candle](candle_core).
//!
//! One training step, on every rank at the same time, in the order of the modules below:
//!
//! 1. A [`World`] runs the same closure on `N` ranks; each [`Rank`] has a [`Communicator`] to the others.
//! 2. The model is built from unmodified candle_nn layers on a [`ParamStore`]. Its parameters carry gradient hooks.
//! 3. A trainer ([`DistributedDataParallel`], or `ZeroOptimizer` of dp-zero) takes the store, gives all ranks rank 0's
//!    values, and lays the gradients out in [buckets](bucket).
//! 4. [`Trainer::backward`] runs Candle's backward. As each gradient appears, it is copied into its bucket; a full bucket
//!    is reduced over the ranks while backward goes on.
//! 5. [`Trainer::clip_grad_norm`] scales the gradients, if wanted.
//! 6. [`Trainer::step`] waits for the reductions and updates the parameters in place, with an [`optim`] rule on flat
//!    slices. What each rank updates, and how the others learn of it, is the [`Strategy`](strategy::Strategy).
//!
//! A whole program:
//!
//! ```
//! use candle_core::{DType, Tensor};
//! use candle_nn::Module;
//! use dp_core::{DistributedDataParallel, ParamStore, Result, Sgd, Trainer, World};
//!
//! fn main() -> Result<()> {
//!     World::threads(2)?.run(|rank| {
//!         let store = ParamStore::new(rank.device()).with_seed(1);
//!         let model = candle_nn::linear(2, 1, store.var_builder(DType::F32))?;
//!         let mut trainer = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.1))?;
//!         for step in 0..20 {
//!             let x = Tensor::full((rank.rank() + step) as f32 * 0.1, (4, 2), rank.device())?;
//!             let loss = (model.forward(&x)? - 1.0)?.sqr()?.mean_all()?;
//!             trainer.backward(&loss)?;
//!             trainer.step()?;
//!         }
//!         assert_eq!(trainer.num_steps(), 20);
//!         Ok(())
//!     })
//! }
//! ```

mod backend;
mod candle_threads;
mod devices;
mod launcher;
mod rank;
mod world;
mod world_error;
#[cfg(any(feature = "mpi", feature = "nccl"))]
mod world_processes;

pub mod buffer;
pub mod comm;
mod element;
mod sixteen_bits;

mod hashing;
mod hook;
mod init;
mod initial_values;
mod little_endian;
mod param;
mod param_flags;
mod param_kinds;
mod param_shapes;
mod param_spec;
mod store;

mod precision;

// The kernels' sources are tested on the host, too.
#[cfg(any(test, feature = "cuda"))]
#[cfg_attr(not(feature = "cuda"), allow(dead_code, unused_imports))]
pub(crate) mod cuda;

pub mod bucket;
mod buffer_pool;
mod loss;
mod loss_graph;
mod loss_scale;
mod reducer;
mod replica;
pub mod strategy;

pub mod optim;

mod agreement;
mod masters;
mod mean_gradient;
mod non_finite;
mod norm;
mod parameter_writes;
mod summary;

mod config;
mod ddp;
pub mod engine;
mod report;
mod sentinel;
mod step;
mod step_clock;
mod trainer;

pub mod checkpoint;

mod varmap_sync;

mod metrics;
mod sampler;

mod timeline;
pub mod trace;

mod error;
pub mod memory;

pub use backend::Backend;
pub use bucket::{BucketCaps, BucketLayout};
pub use buffer::{Buffer, Element};
pub use checkpoint::{DataPosition, HyperParameters, LoadOptions, LoadedCheckpoint, SaveOptions};
pub use comm::{Communicator, ReduceOp};
pub use config::{EngineConfig, UnusedParameters};
pub use ddp::{DdpConfig, DistributedDataParallel};
pub use devices::Devices;
pub use error::{Error, Result};
pub use loss::Loss;
pub use loss_scale::{DynamicLossScale, LossScaleState, LossScaling};
pub use memory::{Ledger, LedgerSnapshot};
pub use metrics::{max_over_ranks, weighted_mean};
pub use non_finite::NonFinite;
pub use norm::GradNorm;
pub use optim::{
    AdamW, DeepSpeedSchedule, FusedOptimizer, LrDecay, LrSchedule, Optimizer, ParamGroup,
    ParamGroups, Sgd, WarmupType,
};
pub use param::{Param, ParamKind};
pub use param_shapes::ParamShapes;
pub use param_spec::ParamSpec;
pub use precision::GradAccumDType;
pub use rank::Rank;
pub use report::{LocalReport, SkipReason, StepRecord, StepReport};
pub use sampler::{DistributedSampler, Remainder};
pub use store::ParamStore;
pub use timeline::Timeline;
pub use trainer::{Accumulation, Trainer};
pub use varmap_sync::VarMapSync;
pub use world::World;
pub use world_error::{RankError, WorldError};
