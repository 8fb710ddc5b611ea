//! How a run over NCCL begins and ends.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use candle_core::Device;
use candle_core::cuda_backend::cudarc::driver::CudaContext;
use parking_lot::Mutex;

use super::library::{self, Library, Progress, UniqueId};
use super::work::Streams;
use super::{NcclComm, NcclRank};
use crate::comm::control::{Control, Hello, Place};
use crate::comm::failures::RemoteFailure;
use crate::comm::rendezvous::{GroupControl, Patience};
use crate::comm::traffic::TrafficCounters;
use crate::comm::{Communicator, Connected, ProcessGroup};
use crate::error::{Error, Result};
use crate::launcher::Launched;
use crate::world_error::{Cause, RankError};

/// GPUs that this process may use: those of `CUDA_VISIBLE_DEVICES`.
///
/// # Errors
/// [`Error::Cuda`] without a driver.
pub(crate) fn visible_gpus() -> Result<usize> {
    let count = CudaContext::device_count();
    let count = count.map_err(|e| {
        let message = format!("{e}; ranks over NCCL need a GPU each: see nvidia-smi");
        Error::cuda(0, "cuDeviceGetCount", message)
    })?;
    Ok(count as usize)
}

/// This process' rank in one run over NCCL.
pub(crate) struct NcclGroup(Arc<NcclRank>);

impl NcclGroup {
    /// Meets the other processes at `MASTER_ADDR:MASTER_PORT`, and makes a communicator with them, within `timeout` each.
    ///
    /// # Errors
    /// [`Error::Environment`] if the place is not said; [`Error::Rendezvous`]; [`Error::InvalidArgument`] for a device that is no
    /// GPU; [`Error::Nccl`], [`Error::Cuda`].
    pub fn begin(
        launched: &Launched,
        timeout: Duration,
        patience: Patience,
        device: &Device,
    ) -> Result<Arc<Self>> {
        /// Runs of this process, so that ranks that are in different ones find out.
        static RUNS: AtomicU64 = AtomicU64::new(0);
        let place = Place::from_variables(|name| std::env::var(name).ok())?;
        let gpu = gpu_of(device)?;
        let hello = Hello {
            run: RUNS.fetch_add(1, Ordering::Relaxed),
            device: Some(gpu),
            ..Hello::new(&place.job, launched.rank, launched.world_size)
        };
        let streams = streams_of(device)?;
        library::check_version(launched.rank)?;
        let id = || library::unique_id().map(|id| id.to_vec());
        let (control, id) = Control::meet(&place, &hello, timeout, id)?;
        let id = UniqueId::try_from(id.as_slice()).map_err(|_| {
            let message = format!("rank 0 has sent {} bytes as NCCL's unique id", id.len());
            Error::invalid("control message", message)
        })?;
        let begun = streams
            .bind()
            .and_then(|()| Library::begin(launched.rank, launched.world_size, &id));
        // The others hear why, and not only that a connection is gone.
        let tell = |control: &Control, error: &Error| {
            control.leave(Some(RemoteFailure {
                is_panic: false,
                message: error.to_string(),
                consequence: control.was_told(),
            }));
        };
        let library = begun.inspect_err(|e| tell(&control, e))?;
        let rank = NcclRank::new(control, library, streams, patience);
        let connected = rank.wait_for_library(Instant::now());
        connected.inspect_err(|e| tell(&rank.control, e))?;
        Ok(Arc::new(Self(Arc::new(rank))))
    }

    pub(super) fn control(&self) -> &Control {
        &self.0.control
    }
}

impl ProcessGroup for NcclGroup {
    fn comm(self: &Arc<Self>) -> Arc<dyn Communicator> {
        Arc::new(NcclComm(Arc::clone(&self.0)))
    }

    fn end<T>(&self, outcome: Result<T, RankError>) -> (Result<T, RankError>, Vec<RankError>) {
        let rank = &self.0;
        let own = |error: Error| RankError {
            rank: rank.control.rank(),
            consequence: rank.control.was_told(),
            cause: Cause::Error(error.into()),
            order: 0,
        };
        let mut outcome = outcome.and_then(|value| {
            rank.drain().map_err(own)?;
            Ok(value)
        });
        let ended = rank.control.end(outcome.as_ref().err());
        if let Err(error) = ended
            && outcome.is_ok()
        {
            outcome = Err(own(error));
        }
        // All ranks are through with all work and nobody reads this rank's memory any more, or it has failed, and all know. What
        // is still there is kept or freed by the drop of the rank.
        rank.library.abort();
        (outcome, rank.control.failures())
    }
}

impl NcclRank {
    fn new(control: Control, library: Library, streams: Streams, patience: Patience) -> Self {
        Self {
            control,
            library,
            streams,
            patience,
            traffic: TrafficCounters::default(),
            abandoned: Mutex::new(Vec::new()),
        }
    }

    /// Waits until all ranks have made their communicators.
    fn wait_for_library(&self, start: Instant) -> Result<()> {
        let timeout = self.control.timeout();
        let hope = || {
            self.control.check_open("the beginning of the run")?;
            if start.elapsed() < timeout {
                return Ok(());
            }
            Err(Error::Nccl {
                rank: self.control.rank(),
                call: "ncclCommInitRankConfig",
                message: format!(
                    "the GPUs have not connected within {timeout:?}; NCCL_DEBUG=INFO shows what NCCL waits for, and \
                     NCCL_SOCKET_IFNAME chooses its network"
                ),
            })
        };
        self.poll(|| Ok(self.library.progress()? == Progress::Done), hope)
    }
}

/// Ranks that are threads of this process, the one of rank `r` on `devices[r]`.
///
/// # Errors
/// [`Error::InvalidArgument`] for a device that is no GPU, or is another rank's, too; [`Error::Nccl`], [`Error::Cuda`].
pub(crate) fn nccl_group(
    devices: &[Device],
    timeout: Duration,
    patience: Patience,
) -> Result<Connected> {
    let mut ranks_of = HashMap::new();
    for (rank, device) in devices.iter().enumerate() {
        let gpu = gpu_of(device)?;
        if let Some(other) = ranks_of.insert(gpu.clone(), rank) {
            return Err(Error::invalid(
                "devices",
                format!(
                    "ranks {other} and {rank} both have {gpu}; NCCL needs a GPU for each rank. Ranks that share one talk over \
                     the default backend"
                ),
            ));
        }
    }
    library::check_version(0)?;
    let id = library::unique_id()?;
    let n = devices.len();
    let streams: Vec<Streams> = devices.iter().map(streams_of).collect::<Result<_>>()?;
    let libraries = library::group(|| {
        let begin = |(rank, streams): (usize, &Streams)| {
            streams.bind()?;
            Library::begin(rank, n, &id)
        };
        streams
            .iter()
            .enumerate()
            .map(begin)
            .collect::<Result<Vec<_>>>()
    })?;
    let start = Instant::now();
    let parts = Control::in_process(n, timeout)
        .into_iter()
        .zip(libraries)
        .zip(streams);
    let ranks = parts.map(|((control, library), streams)| {
        Arc::new(NcclRank::new(control, library, streams, patience))
    });
    let threads = Threads(ranks.collect());
    for rank in &threads.0 {
        rank.streams.bind()?;
        rank.wait_for_library(start)?;
    }
    let comm = |rank: &Arc<NcclRank>| Arc::new(NcclComm(Arc::clone(rank))) as _;
    let comms: Vec<Arc<dyn Communicator>> = threads.0.iter().map(comm).collect();
    Ok((comms, Arc::new(threads)))
}

/// Keeps the communicators of all ranks until all have ended: until then one rank's GPU may read another one's memory.
struct Threads(Vec<Arc<NcclRank>>);

impl Drop for Threads {
    fn drop(&mut self) {
        // At the same time: one may wait for the others.
        std::thread::scope(|scope| {
            for rank in &self.0 {
                scope.spawn(|| rank.library.abort());
            }
        });
    }
}

impl GroupControl for Threads {
    fn rank_failed(&self, rank: usize, reason: String) {
        self.0[rank].control.leave(Some(RemoteFailure {
            is_panic: false,
            message: reason,
            consequence: false,
        }));
    }

    fn rank_left(&self, rank: usize) {
        self.0[rank].control.leave(None);
    }

    fn was_told(&self, rank: usize) -> bool {
        self.0[rank].control.was_told()
    }
}

fn streams_of(device: &Device) -> Result<Streams> {
    Streams::new(device.as_cuda_device()?)
}

/// What no two ranks may have: the GPU, by its UUID, which is another one on every machine.
fn gpu_of(device: &Device) -> Result<String> {
    let Device::Cuda(cuda) = device else {
        let message = format!(
            "NCCL needs a GPU, and this rank computes on {:?}",
            device.location()
        );
        return Err(Error::invalid("devices", message));
    };
    let stream = cuda.cuda_stream();
    let context = stream.context();
    let uuid = context
        .uuid()
        .map_err(|e| Error::cuda(context.ordinal(), "cuDeviceGetUuid", e))?;
    let digits: String = uuid
        .bytes
        .iter()
        .map(|b| format!("{:02x}", *b as u8))
        .collect();
    Ok(format!("GPU {} ({digits})", context.ordinal()))
}
