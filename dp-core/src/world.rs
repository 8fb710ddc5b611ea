//! Ranks: one closure, run `N` times side by side.

use std::error::Error as StdError;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use candle_core::Device;

use crate::candle_threads;
use crate::comm::{Communicator, GroupControl, Patience, naive_group, shared_group};
use crate::error::{Error, Result};
use crate::memory::set_thread_rank;
use crate::world_error::{Cause, RankError, WorldError, panic_message};

/// How the ranks of a [`World`] talk to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Backend {
    /// Threads of one process over shared memory: the default.
    #[default]
    SharedMemory,
    /// Threads of one process over the slow, obvious implementation, to check the other one against.
    Naive,
}

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
    world_size: usize,
    timeout: Duration,
    threads_per_rank: usize,
    stack_size: usize,
    backend: Backend,
}

/// Variables by which launchers tell a process its world size: torchrun, Open MPI, MPICH, Slurm's srun. (Slurm's
/// `SLURM_NTASKS` is also set in a plain allocation, where one process runs.)
const WORLD_SIZE_VARIABLES: [&str; 4] = [
    "WORLD_SIZE",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "SLURM_STEP_NUM_TASKS",
];

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
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let fair_share = (cores / world_size).max(1);
        let world = Self {
            world_size,
            timeout: Duration::from_secs(60),
            threads_per_rank: 1,
            stack_size: 256 << 20,
            backend: Backend::default(),
        };
        Ok(world.with_threads_per_rank(candle_threads::requested().unwrap_or(fair_share)))
    }

    /// The world that a launcher describes in the environment, or `world_size` threads where there is no launcher.
    ///
    /// # Errors
    /// [`Error::Environment`] if a launcher (torchrun, mpirun, srun) has started several processes: this version runs
    /// ranks as threads only, and would otherwise train that many separate models. [`Error::InvalidArgument`] for 0.
    pub fn from_env_or_threads(world_size: usize) -> Result<Self> {
        for variable in WORLD_SIZE_VARIABLES {
            let Ok(value) = std::env::var(variable) else {
                continue;
            };
            match value.trim().parse::<usize>() {
                Ok(1) => {}
                Ok(0) => {
                    return Err(Error::Environment {
                        variable,
                        value,
                        message: "a world has at least one rank; unset it or correct it"
                            .to_string(),
                    });
                }
                Ok(_) => {
                    return Err(Error::Environment {
                        variable,
                        value,
                        message: "ranks in several processes are not supported yet, only threads of one process; \
                                  start the program once, without the launcher"
                            .to_string(),
                    });
                }
                Err(e) => {
                    return Err(Error::Environment {
                        variable,
                        value,
                        message: format!("not a number of processes ({e}); unset it or correct it"),
                    });
                }
            }
        }
        Self::threads(world_size)
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

    /// How the ranks talk.
    #[must_use]
    pub fn with_backend(mut self, backend: Backend) -> Self {
        self.backend = backend;
        self
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Threads that each rank computes with.
    pub fn threads_per_rank(&self) -> usize {
        self.threads_per_rank
    }

    /// Runs `f` on every rank and returns when all have ended.
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

    /// Like [`run`](Self::run), and returns what the ranks return, in rank order.
    ///
    /// # Errors
    /// See [`run`](Self::run).
    pub fn map<T, E, F>(&self, f: F) -> Result<Vec<T>, E>
    where
        F: Fn(Rank) -> Result<T, E> + Sync,
        T: Send,
        E: Into<Box<dyn StdError + Send + Sync>> + From<WorldError> + Send,
    {
        let (comms, control) = self.connect();
        let order = AtomicUsize::new(0);
        let outcomes: Vec<Result<T, RankError>> = std::thread::scope(|scope| {
            let supervisors: Vec<_> = comms
                .into_iter()
                .enumerate()
                .map(|(index, comm)| {
                    let (f, control, order) = (&f, control.as_ref(), &order);
                    scope.spawn(move || {
                        let rank = Rank {
                            comm,
                            device: Device::Cpu,
                        };
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

    fn connect(&self) -> (Vec<Arc<dyn Communicator>>, Arc<dyn GroupControl>) {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let patience = Patience::new(self.world_size * self.threads_per_rank > cores);
        match self.backend {
            Backend::SharedMemory => shared_group(self.world_size, self.timeout, patience),
            Backend::Naive => naive_group(self.world_size, self.timeout),
        }
    }

    /// Runs one rank in its own thread pool, and tells the group how it ended.
    fn supervise<T: Send, E: Into<Box<dyn StdError + Send + Sync>> + Send>(
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

/// What a rank knows of itself; the argument of the closure that [`World::run`] runs.
#[derive(Debug, Clone)]
pub struct Rank {
    comm: Arc<dyn Communicator>,
    device: Device,
}

impl Rank {
    /// This rank, `0 <= rank < world_size`.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    /// This rank's end of the group.
    pub fn comm(&self) -> Arc<dyn Communicator> {
        Arc::clone(&self.comm)
    }

    /// A seed of this rank's own, for random numbers that must differ between ranks, such as dropout masks: a function of
    /// `seed` and the rank. What must be equal on all ranks (initial values, the shuffled order) takes `seed` itself.
    pub fn seed(&self, seed: u64) -> u64 {
        // The finaliser of SplitMix64 is a bijection, so two ranks never share a seed.
        let mut z = seed.wrapping_add((self.rank() as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// The device this rank computes on.
    pub fn device(&self) -> &Device {
        &self.device
    }
}
