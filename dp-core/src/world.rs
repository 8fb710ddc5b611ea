//! Ranks: one closure, run `N` times side by side.

use std::error::Error as StdError;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use candle_core::Device;

use crate::backend::Backend;
use crate::candle_threads;
use crate::comm::{Connected, GroupControl, Patience, naive_group, shared_group};
use crate::devices::Devices;
use crate::error::{Error, Result};
use crate::launcher::Launched;
use crate::memory::set_thread_rank;
use crate::rank::Rank;
use crate::world_error::{Cause, RankError, WorldError, panic_message};

/// A fixed number of ranks that run the same closure.
///
/// ```
/// use dp_core::{ReduceOp, Buffer, Result, World};
///
/// fn main() -> Result<()> {
///     World::threads(3)?.run(|rank| {
///         let mine = Buffer::from_vec(vec![rank.rank() as f32; 5]);
///         let sum = rank.comm().all_reduce(mine, ReduceOp::Sum)?.wait()?;
///         assert_eq!(sum.as_slice::<f32>()?, [3.0; 5]);
///         Ok(())
///     })
/// }
/// ```
#[derive(Debug, Clone)]
pub struct World {
    pub(crate) world_size: usize,
    pub(crate) timeout: Duration,
    threads_per_rank: usize,
    stack_size: usize,
    pub(crate) backend: Backend,
    pub(crate) devices: Devices,
    /// This process' place, where ranks are processes.
    pub(crate) launched: Option<Launched>,
}

impl World {
    /// `world_size` ranks as threads of this process.
    ///
    /// Threads per rank: `RAYON_NUM_THREADS` if set, else the cores divided by the ranks, at least one. Each rank runs in
    /// a thread pool of its own. Candle takes its number of threads from `RAYON_NUM_THREADS`, too, at any time; where it
    /// is not set, it is set here, if the process has no other threads yet.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for 0 ranks.
    pub fn threads(world_size: usize) -> Result<Self> {
        if world_size == 0 {
            return Err(Error::invalid(
                "world_size",
                "a world has at least one rank",
            ));
        }
        Ok(Self::new(world_size, world_size, None))
    }

    /// A world with `ranks_here` ranks on this machine.
    fn new(world_size: usize, ranks_here: usize, launched: Option<Launched>) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let fair_share = (cores / ranks_here.max(1)).max(1);
        let world = Self {
            world_size,
            timeout: Duration::from_secs(60),
            threads_per_rank: 1,
            stack_size: 256 << 20,
            backend: Backend::default(),
            devices: Devices::default(),
            launched,
        };
        world.with_threads_per_rank(candle_threads::requested().unwrap_or(fair_share))
    }

    /// The world that a launcher describes in the environment: this process is one of its ranks. `torchrun`'s `env://`.
    ///
    /// Launchers are torchrun, mpirun of Open MPI, mpiexec of MPICH, and srun of Slurm. A launcher that starts one process gives
    /// a world of one rank.
    ///
    /// In a build with the feature `nccl`, each process takes the GPU of its `LOCAL_RANK`, and all meet at
    /// `MASTER_ADDR:MASTER_PORT` when they [`run`](Self::run), as in PyTorch's `env://`. torchrun sets these variables; with other
    /// launchers they must be set for all processes. Where torchrun listens at that port itself, ranks meet at the next one.
    ///
    /// In a build with the feature `mpi` alone, or with [`Backend::Mpi`], the program must be started by the launcher of the MPI it
    /// was built with; torchrun is none. MPI is initialised by the first run, and ends with the process; the program does
    /// neither.
    ///
    /// Threads per rank: `RAYON_NUM_THREADS` if set, else the cores that this process may use, divided by the ranks on this
    /// host.
    ///
    /// # Errors
    /// [`Error::Environment`] if the variables of a launcher are incomplete, wrong or contradict those of another one, if
    /// this build cannot join its processes, and if there is no launcher.
    pub fn from_env() -> Result<Self> {
        match Launched::detect()? {
            Some(launched) => Self::of_processes(launched),
            None if Launched::is_alone()? => Self::threads(1),
            None => Err(Error::Environment {
                variable: "WORLD_SIZE",
                value: String::new(),
                message: "no launcher has set this variable or one like it; start the program by torchrun, mpirun or srun, or use \
                          World::from_env_or_threads"
                    .to_string(),
            }),
        }
    }

    /// The world that a launcher describes in the environment, as [`from_env`](Self::from_env), or `world_size` threads
    /// where no launcher has started more than one process.
    ///
    /// # Errors
    /// See [`from_env`](Self::from_env), but for the last. [`Error::InvalidArgument`] for 0.
    pub fn from_env_or_threads(world_size: usize) -> Result<Self> {
        match Launched::detect()? {
            Some(launched) => Self::of_processes(launched),
            None => Self::threads(world_size),
        }
    }

    fn of_processes(launched: Launched) -> Result<Self> {
        launched.check_supported()?;
        let (world_size, ranks_here) = (launched.world_size, launched.local_size());
        Ok(Self::new(world_size, ranks_here, Some(launched)))
    }

    /// The longest that a rank waits in a collective; 60 s unless set.
    #[must_use]
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Threads that each rank computes with; at least one.
    #[must_use]
    pub fn with_threads_per_rank(mut self, threads: usize) -> Self {
        self.threads_per_rank = threads.max(1);
        candle_threads::announce(self.threads_per_rank);
        self
    }

    /// Stack of each rank thread in bytes, 256 MiB unless set. Candle's backward recurses once per node of the graph,
    /// so deep models need more than a thread's usual 2 MiB; memory is taken only as the stack grows.
    #[must_use]
    pub fn with_stack_size(mut self, bytes: usize) -> Self {
        self.stack_size = bytes;
        self
    }

    /// How ranks talk. [`run`](Self::run) refuses a backend that this build has not, or that these ranks cannot use.
    #[must_use]
    pub fn with_backend(mut self, backend: Backend) -> Self {
        self.backend = backend;
        self
    }

    /// What the ranks compute on; the CPU unless set. [`Rank::device`] is what a rank gets of it.
    ///
    /// Ranks that are threads may share a GPU: then all their buffers must lie on it, and collectives are kernels that give the
    /// bits of the CPU's. [`run`](Self::run) fails if a device cannot be used.
    #[must_use]
    pub fn with_devices(mut self, devices: Devices) -> Self {
        self.devices = devices;
        self
    }

    /// What was chosen by [`with_devices`](Self::with_devices); the CPU unless it was called, also where ranks over
    /// [`Backend::Nccl`] get a GPU each: [`is_on_gpus`](Self::is_on_gpus) knows of these.
    pub fn devices(&self) -> &Devices {
        &self.devices
    }

    /// True if ranks compute on GPUs: on those of [`with_devices`](Self::with_devices), or with one each over
    /// [`Backend::Nccl`], as processes do in a build with the feature `nccl`.
    pub fn is_on_gpus(&self) -> bool {
        self.devices != Devices::Cpu || self.is_over_nccl()
    }

    fn is_over_nccl(&self) -> bool {
        #[cfg(any(feature = "mpi", feature = "nccl"))]
        if let Some(launched) = &self.launched {
            let backend = self.backend.of_processes(launched);
            return backend.is_ok_and(|backend| backend == Backend::Nccl);
        }
        self.backend == Backend::Nccl
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// The ranks that run in this process: all, where ranks are threads, else one.
    pub fn ranks_here(&self) -> Range<usize> {
        match &self.launched {
            Some(launched) => launched.rank..launched.rank + 1,
            None => 0..self.world_size,
        }
    }

    /// True in the process that rank 0 runs in: the one that should print, and write reports. Hugging Face Accelerate's
    /// `is_main_process`.
    pub fn is_main_process(&self) -> bool {
        self.ranks_here().contains(&0)
    }

    /// Threads that each rank computes with.
    pub fn threads_per_rank(&self) -> usize {
        self.threads_per_rank
    }

    /// Runs `f` on every rank and returns when all have ended.
    ///
    /// Where ranks are processes, each process runs its own rank, and returns when all ranks have ended, in whatever process:
    /// with an error if any of them failed. A rank that ends waits for the others no longer than the timeout, as in a
    /// collective; so what takes longer than that, on one rank only, belongs after this call.
    ///
    /// A failed rank is logged at once (`tracing::error!`), and ends the waits of the others. A rank that is stuck outside
    /// of collectives keeps this call from returning, since Rust cannot end a thread.
    ///
    /// # Errors
    /// A [`WorldError`], converted to `E`, if any rank returned an error or panicked. The ranks that wait for a failed
    /// rank get [`Error::RankFailed`] at once.
    pub fn run<E, F>(&self, f: F) -> Result<(), E>
    where
        F: Fn(Rank) -> Result<(), E> + Sync,
        E: Into<Box<dyn StdError + Send + Sync>> + From<WorldError> + Send,
    {
        self.map(f).map(drop)
    }

    /// Like [`run`](Self::run), and returns what the ranks of this process return, in rank order: those of
    /// [`ranks_here`](Self::ranks_here). So a program for threads and processes does not count on all of them; what one rank
    /// has to know of all others, they exchange in `f`
    /// ([`all_gather_object`](trait@crate::Communicator#method.all_gather_object)).
    ///
    /// # Errors
    /// See [`run`](Self::run).
    pub fn map<T, E, F>(&self, f: F) -> Result<Vec<T>, E>
    where
        F: Fn(Rank) -> Result<T, E> + Sync,
        T: Send,
        E: Into<Box<dyn StdError + Send + Sync>> + From<WorldError> + Send,
    {
        #[cfg(any(feature = "mpi", feature = "nccl"))]
        if let Some(launched) = &self.launched {
            return self.map_process(launched, f).map(|result| vec![result]);
        }
        let devices = self.devices_of_threads()?;
        let connected = self.connect(&devices);
        let (comms, control) = connected.map_err(|error| self.failure_of(0, error))?;
        let order = AtomicUsize::new(0);
        let outcomes: Vec<Result<T, RankError>> = std::thread::scope(|scope| {
            let supervisors: Vec<_> = comms
                .into_iter()
                .zip(devices)
                .enumerate()
                .map(|(index, (comm, device))| {
                    let (f, control, order) = (&f, control.as_ref(), &order);
                    scope.spawn(move || {
                        let rank = Rank::new(comm, index, device);
                        self.supervise(index, control, order, || f(rank))
                    })
                })
                .collect();
            let gone = |index| RankError {
                rank: index,
                cause: Cause::Panic("its supervising thread died".to_string()),
                consequence: false,
                order: usize::MAX,
            };
            supervisors
                .into_iter()
                .enumerate()
                .map(|(index, s)| s.join().unwrap_or_else(|_| Err(gone(index))))
                .collect()
        });
        let mut results = Vec::with_capacity(outcomes.len());
        let mut failures = Vec::new();
        for outcome in outcomes {
            match outcome {
                Ok(value) => results.push(value),
                Err(failure) => failures.push(failure),
            }
        }
        if failures.is_empty() {
            return Ok(results);
        }
        failures.sort_by_key(|f| (f.consequence, f.order));
        Err(E::from(WorldError {
            world_size: self.world_size,
            failures,
        }))
    }

    /// The devices of ranks that are threads.
    fn devices_of_threads(&self) -> Result<Vec<Device>, WorldError> {
        let built = self.backend.check_built();
        built.map_err(|error| self.failure_of(0, error))?;
        let devices = match (self.backend, &self.devices) {
            (Backend::Nccl, Devices::Cpu) => &Devices::Cuda((0..self.world_size).collect()),
            (_, devices) => devices,
        };
        let device = |rank| {
            let device = devices.of(rank);
            device.map_err(|error| self.failure_of(rank, error))
        };
        (0..self.world_size).map(device).collect()
    }

    /// The failure of one rank, before or beside the run.
    pub(crate) fn failure_of(&self, rank: usize, error: Error) -> WorldError {
        WorldError {
            world_size: self.world_size,
            failures: vec![RankError {
                rank,
                cause: Cause::Error(error.into()),
                consequence: false,
                order: 0,
            }],
        }
    }

    #[cfg_attr(not(feature = "nccl"), allow(unused_variables))]
    fn connect(&self, devices: &[Device]) -> Result<Connected> {
        let patience = self.patience(self.world_size);
        Ok(match self.backend {
            Backend::Naive => naive_group(self.world_size, self.timeout),
            #[cfg(feature = "nccl")]
            Backend::Nccl => crate::comm::nccl_group(devices, self.timeout, patience)?,
            Backend::Mpi => {
                let message = "ranks that are threads do not talk over MPI; start the program by mpirun, or leave the backend";
                return Err(Error::misuse("World::run", message));
            }
            _ => shared_group(self.world_size, self.timeout, patience),
        })
    }

    /// How ranks wait, of which `ranks_here` share this machine.
    pub(crate) fn patience(&self, ranks_here: usize) -> Patience {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Patience::new(ranks_here * self.threads_per_rank > cores)
    }

    /// Runs one rank in its own thread pool, and tells the group how it ended.
    pub(crate) fn supervise<T: Send, E: Into<Box<dyn StdError + Send + Sync>> + Send>(
        &self,
        rank: usize,
        control: &dyn GroupControl,
        order: &AtomicUsize,
        f: impl FnOnce() -> Result<T, E> + Send,
    ) -> Result<T, RankError> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(self.threads_per_rank)
            .stack_size(self.stack_size)
            .thread_name(move |i| format!("rank {rank}.{i}"));
        let outcome = pool.build_scoped(
            |thread| {
                set_thread_rank(Some(rank));
                thread.run();
            },
            |pool| pool.install(|| catch_unwind(AssertUnwindSafe(f))),
        );
        let cause = match outcome {
            Ok(Ok(Ok(value))) => {
                control.rank_left(rank);
                return Ok(value);
            }
            Ok(Ok(Err(error))) => Cause::Error(error.into()),
            Ok(Err(panic)) => Cause::Panic(panic_message(panic.as_ref())),
            Err(e) => Cause::Panic(format!("cannot start its threads: {e}")),
        };
        let failure = RankError {
            rank,
            consequence: control.was_told(rank),
            order: order.fetch_add(1, Ordering::Relaxed),
            cause,
        };
        if !failure.consequence {
            // Said now: a rank that never comes back would keep `run` from returning it.
            tracing::error!("{failure}");
        }
        control.rank_failed(rank, failure.cause.to_string());
        Err(failure)
    }
}
