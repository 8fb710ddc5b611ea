//! One communicator of NCCL, and the only file that calls its library.
//!
//! Not cudarc's `nccl::Comm`: that one is made by a call that blocks until all ranks have come, and cannot move to another
//! thread. This one is *non-blocking* (`ncclConfig_t::blocking = 0`): each call returns at once, and is asked for until it is
//! through. So every wait has a deadline, and what it has given up is ended by `ncclCommAbort`.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use candle_core::DType;
use candle_core::cuda_backend::cudarc::driver::CudaStream;
use candle_core::cuda_backend::cudarc::nccl::sys;
use parking_lot::Mutex;

use crate::comm::{Collective, ReduceOp, Request};
use crate::error::{Error, Result};

/// What ranks must know to find each other; made by one of them.
pub(super) type UniqueId = [u8; 128];

/// `ncclGetUniqueId`: for rank 0, once per group.
pub(super) fn unique_id() -> Result<UniqueId> {
    let mut id = sys::ncclUniqueId { internal: [0; 128] };
    // SAFETY: it writes to the local.
    let code = unsafe { sys::ncclGetUniqueId(&raw mut id) };
    check(0, "ncclGetUniqueId", code, ptr::null_mut())?;
    Ok(id.internal.map(|c| c as u8))
}

/// Refuses an NCCL without communicators that do not block, or whose `ncclCommAbort` is not safe at any time.
pub(super) fn check_version(rank: usize) -> Result<()> {
    // As NCCL counts: 22809 is 2.28.9.
    const OLDEST: c_int = 21800;
    let mut version: c_int = 0;
    // SAFETY: it writes to the local.
    let code = unsafe { sys::ncclGetVersion(&raw mut version) };
    check(rank, "ncclGetVersion", code, ptr::null_mut())?;
    tracing::debug!("NCCL {version}");
    if version >= OLDEST {
        return Ok(());
    }
    Err(Error::Nccl {
        rank,
        call: "ncclGetVersion",
        message: format!(
            "the library is version {version}, and {OLDEST} (2.18) is the oldest that works; put a newer libnccl.so.2 first in \
             LD_LIBRARY_PATH"
        ),
    })
}

/// Calls of `f` go to NCCL together: without it, one thread that begins the communicators of several ranks would wait in the
/// first for the second.
pub(super) fn group<R>(f: impl FnOnce() -> Result<R>) -> Result<R> {
    // SAFETY: no arguments.
    let code = unsafe { sys::ncclGroupStart() };
    check(0, "ncclGroupStart", code, ptr::null_mut())?;
    let result = f();
    // In any case, since it closes what was opened.
    // SAFETY: no arguments.
    let code = unsafe { sys::ncclGroupEnd() };
    let ended = check(0, "ncclGroupEnd", code, ptr::null_mut());
    let result = result?;
    ended?;
    Ok(result)
}

/// How far the last call has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Progress {
    Done,
    UnderWay,
}

/// Where NCCL puts its handle. On the heap, since it may write it when the call that makes a communicator has long returned.
///
/// A communicator may be used by any thread, by one at a time (NCCL's guide, "Thread Safety"): the mutex of [`Library`] sees
/// to that.
type Handle = Box<AtomicPtr<sys::ncclComm>>;

/// A communicator of one rank.
#[derive(Debug)]
pub(super) struct Library {
    rank: usize,
    /// `None` once it is aborted.
    handle: Mutex<Option<Handle>>,
    /// The abort has not ended.
    is_stuck: AtomicBool,
}

impl Library {
    /// Begins to make a communicator; it is made when [`progress`](Self::progress) says so. The CUDA context of the rank's device
    /// must be bound to this thread: that is how NCCL knows the device.
    pub fn begin(rank: usize, world_size: usize, id: &UniqueId) -> Result<Self> {
        let id = sys::ncclUniqueId {
            internal: id.map(|b| b as c_char),
        };
        let mut config = non_blocking();
        let handle = Handle::default();
        // SAFETY: NCCL copies id and config before it returns, and the handle stays where it is until the communicator is gone.
        let code = unsafe {
            sys::ncclCommInitRankConfig(
                handle.as_ptr(),
                world_size as c_int,
                id,
                rank as c_int,
                &raw mut config,
            )
        };
        check(rank, "ncclCommInitRankConfig", code, ptr::null_mut())?;
        Ok(Self {
            rank,
            handle: Mutex::new(Some(handle)),
            is_stuck: AtomicBool::new(false),
        })
    }

    /// Whether the last call is through. Until then, no other one may be made, and the streams do not have its work yet.
    ///
    /// # Errors
    /// [`Error::Nccl`] for what NCCL has found meanwhile, such as a connection that broke.
    pub fn progress(&self) -> Result<Progress> {
        self.with(|handle| {
            let mut state = sys::ncclResult_t::ncclSuccess;
            // SAFETY: a live communicator, and a local.
            let code = unsafe { sys::ncclCommGetAsyncError(handle, &raw mut state) };
            check(self.rank, "ncclCommGetAsyncError", code, handle)?;
            check(self.rank, "NCCL", state, handle)
        })
    }

    /// Puts a collective on `stream`. `pointer` is the buffer of `len` elements on the device, in place, as
    /// [`Communicator`](crate::Communicator) has it.
    ///
    /// # Safety
    /// `pointer` must be valid for `len` elements of `dtype` on the communicator's device until the work is done or the
    /// communicator aborted, and until then nobody else may touch them.
    pub unsafe fn enqueue(
        &self,
        request: &Request,
        pointer: u64,
        (dtype, len): (DType, usize),
        world_size: usize,
        stream: &CudaStream,
    ) -> Result<()> {
        let (kind, part) = (data_type(dtype), len / world_size);
        let own = pointer + (self.rank * part * dtype.size_in_bytes()) as u64;
        let (whole, own) = (pointer as *mut c_void, own as *mut c_void);
        let stream = stream.cu_stream().cast();
        self.with(|comm| {
            // SAFETY: a live communicator; the caller answers for the memory. Slices are within it, since validated requests
            // have lengths that are multiples of the world size. These are the in-place forms of NCCL's documentation.
            let (call, code) = unsafe {
                match request.collective {
                    Collective::AllReduce(op) => (
                        "ncclAllReduce",
                        sys::ncclAllReduce(whole, whole, len, kind, reduction(op), comm, stream),
                    ),
                    Collective::ReduceScatter(op) => (
                        "ncclReduceScatter",
                        sys::ncclReduceScatter(whole, own, part, kind, reduction(op), comm, stream),
                    ),
                    Collective::AllGather => (
                        "ncclAllGather",
                        sys::ncclAllGather(own, whole, part, kind, comm, stream),
                    ),
                    Collective::Broadcast { root } => (
                        "ncclBroadcast",
                        sys::ncclBroadcast(whole, whole, len, kind, root as c_int, comm, stream),
                    ),
                    Collective::Barrier => return Ok(()),
                }
            };
            check(self.rank, call, code, comm).map(drop)
        })
    }

    /// Ends the communicator: kernels under way end, and afterwards nobody touches a buffer. False if it has not come to that within
    /// a deadline: then memory that NCCL has been given must not be freed, ever.
    ///
    /// It is also how a communicator ends whose work is done: `ncclCommDestroy` waits for other ranks, without a deadline. So may this
    /// call on one host, until the other ranks there abort, too ("intra-node collective"); therefore they are told first.
    pub fn abort(&self) -> bool {
        const LONGEST: Duration = Duration::from_secs(10);
        let Some(handle) = self.handle.lock().take() else {
            return !self.is_stuck.load(Ordering::Acquire);
        };
        let (through, ended) = mpsc::channel();
        let rank = self.rank;
        // A thread, since a call of C cannot be left. It takes the handle with it.
        let started = std::thread::Builder::new()
            .name("ncclCommAbort".to_string())
            .spawn(move || {
                // SAFETY: a live communicator, used by nobody any more, or null, which NCCL takes for nothing.
                let code = unsafe { sys::ncclCommAbort(handle.load(Ordering::Acquire)) };
                if let Err(e) = check(rank, "ncclCommAbort", code, ptr::null_mut()) {
                    tracing::warn!("{e}");
                }
                // Nobody listens after the deadline.
                let _ = through.send(());
            });
        if started.is_ok() && ended.recv_timeout(LONGEST).is_ok() {
            return true;
        }
        tracing::error!(
            "rank {rank}: ncclCommAbort has not ended within {LONGEST:?}; its memory is left as it is"
        );
        self.is_stuck.store(true, Ordering::Release);
        false
    }

    /// True once it is aborted, or about to be: what ends from now on may have ended early.
    pub fn is_aborted(&self) -> bool {
        self.handle.lock().is_none()
    }

    /// # Errors
    /// [`Error::Misuse`] once it is aborted.
    pub fn check_open(&self) -> Result<()> {
        match self.is_aborted() {
            true => Err(ended()),
            false => Ok(()),
        }
    }

    fn with<R>(&self, f: impl FnOnce(sys::ncclComm_t) -> Result<R>) -> Result<R> {
        match self.handle.lock().as_ref() {
            Some(handle) => f(handle.load(Ordering::Acquire)),
            None => Err(ended()),
        }
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        self.abort();
    }
}

fn ended() -> Error {
    Error::misuse(
        "a collective",
        "the group has failed or its run has ended; call collectives in the closure of the World only",
    )
}

/// NCCL's defaults but for `blocking`.
fn non_blocking() -> sys::ncclConfig_t {
    const UNDEFINED: c_int = c_int::MIN;
    sys::ncclConfig_t {
        size: size_of::<sys::ncclConfig_t>(),
        magic: 0xcafe_beef,
        // Of the first NCCL that has `blocking`. NCCL takes its defaults for what came later, so this works with any library
        // since then, be it older or newer than the header.
        version: 21400,
        blocking: 0,
        cgaClusterSize: UNDEFINED,
        minCTAs: UNDEFINED,
        maxCTAs: UNDEFINED,
        netName: ptr::null(),
        splitShare: UNDEFINED,
        trafficClass: UNDEFINED,
        commName: ptr::null(),
        collnetEnable: UNDEFINED,
        CTAPolicy: UNDEFINED,
        shrinkShare: UNDEFINED,
        nvlsCTAs: UNDEFINED,
        nChannelsPerNetPeer: UNDEFINED,
        nvlinkCentricSched: UNDEFINED,
        graphUsageMode: UNDEFINED,
        numRmaCtx: UNDEFINED,
        maxP2pPeers: UNDEFINED,
    }
}

fn data_type(dtype: DType) -> sys::ncclDataType_t {
    match dtype {
        DType::F32 => sys::ncclDataType_t::ncclFloat32,
        DType::F64 => sys::ncclDataType_t::ncclFloat64,
        DType::F16 => sys::ncclDataType_t::ncclFloat16,
        DType::BF16 => sys::ncclDataType_t::ncclBfloat16,
        DType::U8 => sys::ncclDataType_t::ncclUint8,
        DType::U32 => sys::ncclDataType_t::ncclUint32,
        DType::I64 => sys::ncclDataType_t::ncclInt64,
        other => unreachable!("a Buffer never holds {other:?}"),
    }
}

fn reduction(op: ReduceOp) -> sys::ncclRedOp_t {
    match op {
        ReduceOp::Sum => sys::ncclRedOp_t::ncclSum,
        ReduceOp::Mean => sys::ncclRedOp_t::ncclAvg,
        ReduceOp::Max => sys::ncclRedOp_t::ncclMax,
        ReduceOp::Min => sys::ncclRedOp_t::ncclMin,
    }
}

/// Turns NCCL's answer into ours, with its own words and what it logged last.
fn check(
    rank: usize,
    call: &'static str,
    code: sys::ncclResult_t,
    comm: sys::ncclComm_t,
) -> Result<Progress> {
    match code {
        sys::ncclResult_t::ncclSuccess => return Ok(Progress::Done),
        sys::ncclResult_t::ncclInProgress => return Ok(Progress::UnderWay),
        _ => {}
    }
    let text = |pointer: *const c_char| match pointer.is_null() {
        true => String::new(),
        // SAFETY: NCCL returns strings that end with a zero and live as long as the library or the communicator.
        false => unsafe { CStr::from_ptr(pointer) }
            .to_string_lossy()
            .trim()
            .to_string(),
    };
    // SAFETY: any code; a live communicator or null, which means the last error of any.
    let (what, last) = unsafe {
        (
            text(sys::ncclGetErrorString(code)),
            text(sys::ncclGetLastError(comm)),
        )
    };
    let last = match last.as_str() {
        "" => String::new(),
        last => format!(": {last}"),
    };
    Err(Error::Nccl {
        rank,
        call,
        message: format!("{what}{last}; NCCL_DEBUG=WARN shows more"),
    })
}
