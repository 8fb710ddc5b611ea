//! The ZeRO trainer.

use std::sync::Arc;

use dp_core::engine::Engine;
use dp_core::{
    BucketCaps, Communicator, EngineConfig, Optimizer, ParamGroups, ParamStore, Result, Trainer,
};

use crate::zero1::Zero1;
use crate::zero2::Zero2;

/// How much is sharded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ZeroStage {
    /// Optimizer state: `P_os` in the paper, `ZeroRedundancyOptimizer` in PyTorch, stage 1 in DeepSpeed.
    One,
    /// Optimizer state and gradients: `P_os+g` in the paper, `SHARD_GRAD_OP` in FSDP, stage 2 in DeepSpeed.
    Two,
}

/// Settings of [`ZeroOptimizer`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ZeroConfig {
    /// What is sharded.
    pub stage: ZeroStage,
    /// Settings common to all strategies.
    pub engine: EngineConfig,
}

impl ZeroConfig {
    /// The given stage, with default settings.
    pub fn stage(stage: ZeroStage) -> Self {
        Self {
            stage,
            engine: EngineConfig::default(),
        }
    }

    /// Sets the settings common to all strategies.
    #[must_use]
    pub fn with_engine(mut self, engine: EngineConfig) -> Self {
        self.engine = engine;
        self
    }

    /// Sets the sizes of the gradient buckets (`reduce_bucket_size` in DeepSpeed). Stage 2 holds up to two buckets of
    /// full gradients, so smaller ones save memory.
    #[must_use]
    pub fn with_bucket_caps(mut self, caps: BucketCaps) -> Self {
        self.engine.bucket_caps = caps;
        self
    }
}

impl From<ZeroStage> for ZeroConfig {
    fn from(stage: ZeroStage) -> Self {
        Self::stage(stage)
    }
}

/// Data parallel training without the redundant copies of optimizer state (stage 1) and gradients (stage 2).
///
/// "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054. Bytes per parameter in
/// f32 with AdamW on each of `N` ranks: `8 + 8/N` in stage 1, `4 + 12/N` in stage 2, against 16 in plain data
/// parallelism. Bytes sent are the same: a reduce-scatter and an all-gather, `(N-1)/N` each. Results are the same bits as
/// [`DistributedDataParallel`](dp_core::DistributedDataParallel)'s; with several micro-batches per step stage 2 adds
/// them in another order, (micro-batch, rank) instead of (rank, micro-batch), and may differ in the last bits.
///
/// ```
/// use candle_core::{DType, Tensor};
/// use candle_nn::Module;
/// use dp_core::{AdamW, ParamStore, Result, Trainer, World};
/// use dp_zero::{ZeroOptimizer, ZeroStage};
///
/// fn main() -> Result<()> {
///     World::threads(2)?.run(|rank| {
///         let store = ParamStore::new(rank.device());
///         let model = candle_nn::linear(3, 1, store.var_builder(DType::F32))?;
///         let mut trainer = ZeroOptimizer::new(store, rank.comm(), AdamW::default(), ZeroStage::Two)?;
///         let x = Tensor::full(rank.rank() as f32, (4, 3), rank.device())?; // this rank's part of the batch
///         let loss = model.forward(&x)?.sqr()?.mean_all()?;
///         trainer.backward(&loss)?;
///         trainer.step()?;
///         Ok(())
///     })
/// }
/// ```
#[derive(Debug)]
pub struct ZeroOptimizer<O: Optimizer> {
    engine: Engine<O>,
}

impl<O: Optimizer> ZeroOptimizer<O> {
    /// Takes over the parameters of `store`. Collective: checks that the ranks hold the same model, and gives all of
    /// them rank 0's values. `config` is a [`ZeroConfig`], or a [`ZeroStage`] with default settings.
    ///
    /// # Errors
    /// [`Error::ReplicaMismatch`](dp_core::Error::ReplicaMismatch) on every rank if the models differ; those of the
    /// collectives; [`Error::InvalidArgument`](dp_core::Error::InvalidArgument) for bad hyper-parameters.
    pub fn new(
        store: ParamStore,
        comm: Arc<dyn Communicator>,
        optimizer: impl Into<ParamGroups<O>>,
        config: impl Into<ZeroConfig>,
    ) -> Result<Self> {
        let config = config.into();
        let stage = config.stage;
        let engine = Engine::new(
            store,
            comm,
            optimizer.into(),
            &config.engine,
            |layout, store, comm| {
                Ok(match stage {
                    ZeroStage::One => Box::new(Zero1::new(layout, store, comm.rank())?),
                    ZeroStage::Two => Box::new(Zero2::new(layout, store, comm.rank())?),
                })
            },
        )?;
        Ok(Self { engine })
    }
}

impl<O: Optimizer> Trainer for ZeroOptimizer<O> {
    type Optimizer = O;

    fn engine(&self) -> &Engine<O> {
        &self.engine
    }

    fn engine_mut(&mut self) -> &mut Engine<O> {
        &mut self.engine
    }
}
