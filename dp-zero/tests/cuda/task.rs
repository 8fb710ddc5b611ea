//! A small GPT and its data: what all tests here train.

use std::sync::mpsc;
use std::time::Duration;

use candle_core::{DType, Tensor};
use dp_core::{
    AdamW, Backend, EngineConfig, Error, ParamStore, Rank, Result, Sgd, StepReport, Trainer, World,
};
use dp_models::{ByteTokens, Gpt, GptConfig};
use dp_zero::Sharding;
use dp_zero::config::ConfiguredOptimizer;

use crate::harness::gpu_world;
use crate::support::{AnyTrainer, caps};

/// The longest that the ranks of a test may take before it counts as a hang.
const HANG: Duration = Duration::from_secs(120);

const TEXT: &[u8] = include_bytes!("../../../LICENSE-APACHE");

/// Where ranks compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    Cpu,
    /// All ranks on the first one.
    SharedGpu,
    /// A GPU for each rank, and NCCL between them.
    OwnGpus,
}

/// How to train.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Task {
    pub place: Place,
    pub world_size: usize,
    pub strategy: Sharding,
    pub dtype: DType,
    /// Micro-batches per step and rank.
    pub micro_batches: usize,
    pub clip: Option<f64>,
    /// SGD with momentum instead of AdamW: its steps are as small as its gradients.
    pub sgd: bool,
}

impl Task {
    /// Plain data parallelism in f32 on ranks that share a GPU.
    pub fn on_gpu(world_size: usize) -> Self {
        Self {
            place: Place::SharedGpu,
            world_size,
            strategy: Sharding::Ddp,
            dtype: DType::F32,
            micro_batches: 1,
            clip: None,
            sgd: false,
        }
    }

    pub fn world(&self) -> World {
        let threads = World::threads(self.world_size)
            .expect("a positive world size")
            .with_threads_per_rank(1);
        match self.place {
            Place::Cpu => threads,
            Place::SharedGpu => gpu_world(self.world_size),
            Place::OwnGpus => threads.with_backend(Backend::Nccl),
        }
    }

    /// Runs `f` with a trainer on each rank, and returns what they return, in rank order.
    pub fn run<T: Send + 'static>(
        self,
        f: impl Fn(&mut Training) -> Result<T> + Send + Sync + 'static,
    ) -> Vec<T> {
        self.run_with(|_| {}, f)
            .unwrap_or_else(|e| panic!("{self:?}: {e}"))
    }

    /// [`run`](Self::run) with settings of the engine changed by `change`.
    pub fn run_with<T: Send + 'static>(
        self,
        change: impl Fn(&mut EngineConfig) + Send + Sync + 'static,
        f: impl Fn(&mut Training) -> Result<T> + Send + Sync + 'static,
    ) -> Result<Vec<T>> {
        let (done, finished) = mpsc::channel();
        std::thread::spawn(move || {
            let outcome = self.world().map(|rank| f(&mut self.start(rank, &change)?));
            // The receiver is gone only if the test has failed by deadline.
            let _ = done.send(outcome);
        });
        match finished.recv_timeout(HANG) {
            Ok(outcome) => outcome,
            Err(mpsc::RecvTimeoutError::Timeout) => panic!("hangs: not finished after {HANG:?}"),
            Err(mpsc::RecvTimeoutError::Disconnected) => panic!("the ranks' thread has panicked"),
        }
    }

    fn start(&self, rank: Rank, change: &dyn Fn(&mut EngineConfig)) -> Result<Training> {
        let config = GptConfig {
            context: 16,
            width: 16,
            heads: 2,
            layers: 2,
            ..GptConfig::mini()
        };
        let store = ParamStore::new(rank.device()).with_seed(3);
        let model = Gpt::new(&config, store.var_builder(self.dtype))?;
        let change = |engine: &mut EngineConfig| {
            engine.bucket_caps = caps(1500);
            engine.report_loss = true;
            change(engine);
        };
        let optimizer = match self.sgd {
            true => ConfiguredOptimizer::Sgd(Sgd {
                momentum: 0.9,
                weight_decay: 0.01,
                ..Sgd::new(0.05)
            }),
            false => ConfiguredOptimizer::AdamW(AdamW::with_lr(3e-3)),
        };
        let trainer = AnyTrainer::with_settings(self.strategy, store, &rank, optimizer, change)?;
        Ok(Training {
            task: *self,
            rank,
            model,
            trainer,
            text: ByteTokens::from_bytes(TEXT.to_vec())?,
            context: config.context,
        })
    }
}

/// A rank with its model and trainer.
pub struct Training {
    pub task: Task,
    pub rank: Rank,
    pub model: Gpt,
    trainer: AnyTrainer<ConfiguredOptimizer>,
    text: ByteTokens,
    context: usize,
}

/// What a run leaves.
#[derive(Debug, Clone, PartialEq)]
pub struct Outcome {
    pub sha256: String,
    pub losses: Vec<f64>,
    /// Of clipped runs.
    pub norms: Vec<f64>,
    pub values: Vec<f32>,
}

impl Training {
    pub fn trainer(&mut self) -> &mut AnyTrainer<ConfiguredOptimizer> {
        &mut self.trainer
    }

    /// One step from these losses.
    fn step(&mut self, losses: &[Tensor]) -> Result<StepReport> {
        let mut window = self.trainer.accumulate(losses.len())?;
        losses.iter().try_for_each(|loss| window.backward(loss))?;
        window.finish()?;
        if let Some(max_norm) = self.task.clip {
            let norm = self.trainer.clip_grad_norm(max_norm)?;
            if norm <= max_norm {
                return Err(Error::invalid(
                    "clip",
                    format!("norm {norm} has no need of it"),
                ));
            }
        }
        self.trainer.step()
    }

    /// The loss of this rank's part of the joined batch of `step`, which is the same for every number of ranks and
    /// micro-batches: 8 windows.
    pub fn loss(&self, step: usize, micro_batch: usize) -> Result<Tensor> {
        let parts = self.task.world_size * self.task.micro_batches;
        let part = self.rank.rank() * self.task.micro_batches + micro_batch;
        let windows = part * 8 / parts..(part + 1) * 8 / parts;
        // Long runs go round the text.
        let num_windows = self.text.num_windows(self.context)?;
        let offset = |w| 50 * (8 * step + w) % num_windows;
        let offsets: Vec<usize> = windows.map(offset).collect();
        let (inputs, targets) = self
            .text
            .batch(&offsets, self.context, self.rank.device())?;
        Ok(self.model.loss(&inputs, &targets)?)
    }

    /// Steps `steps`, from forward to update.
    pub fn steps(&mut self, steps: std::ops::Range<usize>) -> Result<Outcome> {
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in steps {
            let mine = (0..self.task.micro_batches).map(|i| self.loss(step, i));
            let report = self.step(&mine.collect::<Result<Vec<_>>>()?)?;
            losses.extend(report.loss);
            norms.extend(report.grad_norm);
        }
        let store = self.trainer.store();
        let mut values = Vec::new();
        for param in store.params() {
            let mut own = vec![0.0; param.num_elements()];
            param.read(0..own.len(), &mut own)?;
            values.extend(own);
        }
        Ok(Outcome {
            sha256: store.sha256()?,
            losses,
            norms,
            values,
        })
    }
}
