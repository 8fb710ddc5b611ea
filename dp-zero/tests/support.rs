use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor};
use candle_nn::{Init, Linear, Module, VarBuilder};
use dp_core::engine::Engine;
use dp_core::{
    Backend, BucketCaps, Communicator, DdpConfig, DistributedDataParallel, EngineConfig, Optimizer,
    ParamGroups, ParamStore, Rank, Result, Trainer, World,
};
use dp_zero::{Sharding, ZeroConfig, ZeroOptimizer, ZeroStage};

/// The strategies that have a trainer.
pub const STRATEGIES: [Sharding; 3] = [Sharding::Ddp, Sharding::Zero1, Sharding::Zero2];

/// Runs `f` on `world_size` ranks and returns what they return, in rank order; panics if that takes over 30 s.
pub fn ranks<T, F>(world_size: usize, f: F) -> Vec<T>
where
    T: Send + 'static,
    F: Fn(Rank) -> Result<T> + Send + Sync + 'static,
{
    ranks_on(Backend::SharedMemory, world_size, f)
}

/// [`ranks`] on a backend.
pub fn ranks_on<T, F>(backend: Backend, world_size: usize, f: F) -> Vec<T>
where
    T: Send + 'static,
    F: Fn(Rank) -> Result<T> + Send + Sync + 'static,
{
    let results: Arc<Mutex<Vec<Option<T>>>> = Arc::default();
    results
        .lock()
        .expect("not poisoned")
        .resize_with(world_size, || None);
    let slots = Arc::clone(&results);
    run_guarded(
        backend,
        world_size,
        Box::new(move |rank| {
            let index = rank.rank();
            let result = f(rank)?;
            slots.lock().expect("not poisoned")[index] = Some(result);
            Ok(())
        }),
    );
    let results = std::mem::take(&mut *results.lock().expect("not poisoned"));
    results
        .into_iter()
        .map(|r| r.expect("no rank failed"))
        .collect()
}

/// The one place where tests run a world: not generic, so that it is compiled once.
fn run_guarded(
    backend: Backend,
    world_size: usize,
    f: Box<dyn Fn(Rank) -> Result<()> + Send + Sync>,
) {
    let world = World::threads(world_size)
        .expect("a positive world size")
        .with_backend(backend)
        .with_timeout(Duration::from_secs(10))
        .with_threads_per_rank(1);
    let (done, finished) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        // The receiver is gone only if the test has failed by deadline.
        let _ = done.send(world.run(f));
    });
    match finished.recv_timeout(Duration::from_secs(30)) {
        Ok(result) => result.unwrap_or_else(|e| panic!("{e}")),
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("hangs: not finished after 30 s"),
        Err(mpsc::RecvTimeoutError::Disconnected) => match thread.join() {
            Err(panic) => std::panic::resume_unwind(panic),
            Ok(()) => unreachable!("the thread sends before it ends"),
        },
    }
}

/// What all ranks return, which must be the same.
#[track_caller]
pub fn same_on_all<T: PartialEq + std::fmt::Debug>(all: Vec<T>) -> T {
    let mut all = all.into_iter();
    let first = all.next().expect("at least one rank");
    for (i, other) in all.enumerate() {
        assert_eq!(first, other, "ranks 0 and {} differ", i + 1);
    }
    first
}

/// A trainer of any strategy.
#[derive(Debug)]
pub enum AnyTrainer<O: Optimizer> {
    Ddp(DistributedDataParallel<O>),
    Zero(ZeroOptimizer<O>),
}

impl<O: Optimizer> AnyTrainer<O> {
    pub fn new(
        strategy: Sharding,
        store: ParamStore,
        rank: &Rank,
        optimizer: impl Into<ParamGroups<O>>,
        caps: BucketCaps,
    ) -> Result<Self> {
        Self::with_settings(strategy, store, rank, optimizer, |engine| {
            engine.bucket_caps = caps;
        })
    }

    /// With settings of the engine changed by `change`.
    pub fn with_settings(
        strategy: Sharding,
        store: ParamStore,
        rank: &Rank,
        optimizer: impl Into<ParamGroups<O>>,
        change: impl FnOnce(&mut EngineConfig),
    ) -> Result<Self> {
        Self::over(rank.comm(), strategy, store, optimizer, change)
    }

    /// Over any communicator.
    pub fn over(
        comm: Arc<dyn Communicator>,
        strategy: Sharding,
        store: ParamStore,
        optimizer: impl Into<ParamGroups<O>>,
        change: impl FnOnce(&mut EngineConfig),
    ) -> Result<Self> {
        let stage = match strategy {
            Sharding::Ddp => {
                let mut config = DdpConfig::default();
                change(&mut config.engine);
                let ddp = DistributedDataParallel::with_config(store, comm, optimizer, config)?;
                return Ok(Self::Ddp(ddp));
            }
            Sharding::Zero1 => ZeroStage::One,
            Sharding::Zero2 => ZeroStage::Two,
            other => unreachable!("{other} has no trainer"),
        };
        let mut config = ZeroConfig::stage(stage);
        change(&mut config.engine);
        Ok(Self::Zero(ZeroOptimizer::new(
            store, comm, optimizer, config,
        )?))
    }
}

impl<O: Optimizer> Trainer for AnyTrainer<O> {
    type Optimizer = O;

    fn engine(&self) -> &Engine<O> {
        match self {
            Self::Ddp(t) => t.engine(),
            Self::Zero(t) => t.engine(),
        }
    }

    fn engine_mut(&mut self) -> &mut Engine<O> {
        match self {
            Self::Ddp(t) => t.engine_mut(),
            Self::Zero(t) => t.engine_mut(),
        }
    }
}

/// Buckets of at most `elements` f32 elements, the first one too.
pub fn caps(elements: usize) -> BucketCaps {
    BucketCaps::with_first(4 * elements, 4 * elements).expect("a positive cap")
}

/// A parameter of the probe model: starts at 1.0 everywhere.
pub fn ones(store: &ParamStore, shape: impl Into<Shape>, name: &str) -> Result<Tensor> {
    let vb = store.var_builder(DType::F32);
    Ok(vb.get_with_hints(shape.into(), name, Init::Const(1.0))?)
}

/// All elements of a tensor, in row-major order.
pub fn values(t: &Tensor) -> Vec<f32> {
    t.flatten_all()
        .and_then(|t| t.to_vec1())
        .expect("an f32 tensor on the CPU")
}

/// The identity, which runs a closure in the middle of backward; its error is that of the backward.
pub struct Probe<F>(pub F);

impl<F: Fn() -> candle_core::Result<()> + Send + Sync> CustomOp1 for Probe<F> {
    fn name(&self) -> &'static str {
        "probe"
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((s.clone(), l.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        (self.0)()?;
        Ok(Some(grad.clone()))
    }
}

/// Numbers in [-1, 1), a function of `seed` (splitmix64).
pub fn noise(seed: u64, shape: impl Into<Shape>) -> Tensor {
    let shape = shape.into();
    let mut state = seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ 0xd1b5_4a32_d192_ed03;
    let draw = |_| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    let v: Vec<f32> = (0..shape.elem_count()).map(draw).collect();
    Tensor::from_vec(v, shape, &Device::Cpu).expect("as many values as the shape has")
}

/// A small network with every kind of parameter that needs care: tied, frozen, scalar, empty, unused, one of a single
/// element, and sizes that no world size divides.
pub struct Oddities {
    first: Linear,
    tied: Tensor,
    tied_again: Tensor,
    frozen: Tensor,
    scale: Tensor,
    empty: Tensor,
    single: Tensor,
    second: Linear,
}

impl Oddities {
    /// A store whose initial values are a function of the seed, with what `new` wants frozen.
    pub fn store() -> ParamStore {
        ParamStore::new(&Device::Cpu)
            .with_seed(11)
            .with_frozen(|name| name == "frozen")
    }

    pub fn new(vb: VarBuilder) -> Result<Self> {
        let tied = || vb.get_with_hints((7, 7), "tied", candle_nn::init::DEFAULT_KAIMING_NORMAL);
        let constant = |shape: &[usize], name, c| vb.get_with_hints(shape, name, Init::Const(c));
        constant(&[3], "unused", 5.0)?;
        Ok(Self {
            first: candle_nn::linear(5, 7, vb.pp("first"))?,
            tied: tied()?,
            frozen: constant(&[7], "frozen", 0.5)?,
            scale: constant(&[], "scale", 1.5)?,
            tied_again: tied()?,
            empty: constant(&[0, 7], "empty", 1.0)?,
            single: constant(&[1], "single", -0.25)?,
            second: candle_nn::linear(7, 3, vb.pp("second"))?,
        })
    }

    /// The mean over the samples of `batch`, `[n, 5]`.
    pub fn loss(&self, batch: &Tensor) -> Result<Tensor> {
        let h = self.first.forward(batch)?.tanh()?;
        let h = h.matmul(&self.tied)?.broadcast_mul(&self.frozen)?.tanh()?;
        let h = Tensor::cat(&[&self.empty, &h.matmul(&self.tied_again.t()?)?], 0)?.tanh()?;
        let y = self.second.forward(&h)?.broadcast_mul(&self.scale)?;
        let y = y.broadcast_add(&self.single)?;
        Ok((y - batch.narrow(1, 0, 3)?)?.sqr()?.mean_all()?)
    }
}
