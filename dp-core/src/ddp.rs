//! Plain data parallelism: every rank keeps everything; gradients are all-reduced.

use std::ops::Range;
use std::sync::Arc;

use crate::bucket::BucketCaps;
use crate::buffer::Buffer;
use crate::comm::{Collective, Communicator, ReduceOp};
use crate::config::EngineConfig;
use crate::engine::Engine;
use crate::error::Result;
use crate::optim::{Optimizer, ParamGroups};
use crate::store::ParamStore;
use crate::strategy::{FullBuckets, Strategy};
use crate::trainer::Trainer;

/// Settings of [`DistributedDataParallel`].
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct DdpConfig {
    /// Settings common to all strategies.
    pub engine: EngineConfig,
}

impl DdpConfig {
    /// Sets the sizes of the gradient buckets (`bucket_cap_mb` in PyTorch).
    #[must_use]
    pub fn with_bucket_caps(mut self, caps: BucketCaps) -> Self {
        self.engine.bucket_caps = caps;
        self
    }
}

impl From<EngineConfig> for DdpConfig {
    fn from(engine: EngineConfig) -> Self {
        Self { engine }
    }
}

/// Data parallel training: each rank holds a replica, gradients are averaged over the ranks bucket by bucket while
/// backward is still running, each rank updates all parameters. `torch.nn.parallel.DistributedDataParallel`.
///
/// Bytes per parameter with AdamW: 4 parameters + 4 gradients + 8 optimizer state. Bytes sent per step and rank:
/// `2 (N-1)/N` times the gradients.
///
/// ```
/// use candle_core::{DType, Tensor};
/// use candle_nn::Module;
/// use dp_core::{AdamW, DistributedDataParallel, ParamStore, Result, Trainer, World};
///
/// fn main() -> Result<()> {
///     World::threads(2)?.run(|rank| {
///         let store = ParamStore::new(rank.device());
///         let model = candle_nn::linear(3, 1, store.var_builder(DType::F32))?;
///         let mut trainer = DistributedDataParallel::new(store, rank.comm(), AdamW::default())?;
///         let x = Tensor::full(rank.rank() as f32, (4, 3), rank.device())?; // this rank's part of the batch
///         let loss = model.forward(&x)?.sqr()?.mean_all()?;
///         trainer.backward(&loss)?;
///         trainer.step()?;
///         Ok(())
///     })
/// }
/// ```
///
/// A trainer owns its store, so a second trainer over the same parameters does not compile:
///
/// ```compile_fail,E0382
/// # use dp_core::{DistributedDataParallel, ParamStore, Rank, Result, Sgd};
/// fn two_trainers(rank: &Rank, store: ParamStore) -> Result<()> {
///     let first = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.1))?;
///     let second = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.1))?;
///     Ok(())
/// }
/// ```
#[derive(Debug)]
pub struct DistributedDataParallel<O: Optimizer> {
    engine: Engine<O>,
}

impl<O: Optimizer> DistributedDataParallel<O> {
    /// Takes over the parameters of `store`, with default settings. Collective: checks that the ranks hold the same
    /// model, and gives all of them rank 0's values.
    ///
    /// # Errors
    /// [`Error::ReplicaMismatch`](crate::Error::ReplicaMismatch) on every rank if the models differ; those of the
    /// collectives; [`Error::InvalidArgument`](crate::Error::InvalidArgument) for bad hyper-parameters.
    pub fn new(
        store: ParamStore,
        comm: Arc<dyn Communicator>,
        optimizer: impl Into<ParamGroups<O>>,
    ) -> Result<Self> {
        Self::with_config(store, comm, optimizer, DdpConfig::default())
    }

    /// Like [`new`](Self::new), with settings: a [`DdpConfig`], or the [`EngineConfig`] that is all it has.
    ///
    /// # Errors
    /// See [`new`](Self::new).
    pub fn with_config(
        store: ParamStore,
        comm: Arc<dyn Communicator>,
        optimizer: impl Into<ParamGroups<O>>,
        config: impl Into<DdpConfig>,
    ) -> Result<Self> {
        let config = config.into();
        let engine = Engine::new(
            store,
            comm,
            optimizer.into(),
            &config.engine,
            |layout, store, _| {
                Ok(Box::new(Replicated {
                    lens: layout.buckets().iter().map(|b| b.padded_len).collect(),
                    gradients: FullBuckets::new(layout, store)?,
                }))
            },
        )?;
        Ok(Self { engine })
    }
}

impl<O: Optimizer> Trainer for DistributedDataParallel<O> {
    type Optimizer = O;

    fn engine(&self) -> &Engine<O> {
        &self.engine
    }

    fn engine_mut(&mut self) -> &mut Engine<O> {
        &mut self.engine
    }
}

#[derive(Debug)]
struct Replicated {
    lens: Vec<usize>,
    gradients: FullBuckets,
}

impl Strategy for Replicated {
    fn name(&self) -> &'static str {
        "ddp"
    }

    fn owned(&self, bucket: usize) -> Range<usize> {
        0..self.lens[bucket]
    }

    fn is_sharded(&self) -> bool {
        false
    }

    fn reduction(&self, op: ReduceOp) -> Collective {
        Collective::AllReduce(op)
    }

    fn buffer(&mut self, bucket: usize) -> Result<&mut Buffer> {
        self.gradients.get_mut(bucket)
    }

    fn take(&mut self, bucket: usize) -> Result<Buffer> {
        self.gradients.take(bucket)
    }

    fn reduced(&mut self, bucket: usize, buffer: Buffer, _first: bool) -> Result<()> {
        self.gradients.put(bucket, buffer);
        Ok(())
    }

    fn gradient(&self, bucket: usize) -> Result<(&Buffer, Range<usize>)> {
        Ok((self.gradients.get(bucket)?, self.owned(bucket)))
    }
}
