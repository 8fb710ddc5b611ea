//! MPI in this process: begun with the first run, ended when the process exits.
//!
//! States: *fresh* -> *busy* (a run goes on) -> *ready* (all ranks have ended alike; the next run may begin) or *failed*.
//! MPI can be initialised once per process, and after a failure nobody knows what is still under way: so there is no way back
//! from *failed*, and a job whose run has failed must be started anew.

use std::os::raw::c_int;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use mpi::Threading;
use mpi::environment::Universe;
use mpi::ffi;
use parking_lot::Mutex;

use super::channel::{Channel, check};
use super::engine::{Mail, Token};
use crate::error::{Error, Result};
use crate::launcher::Launched;

/// How long a process that is through waits, before it exits, for others that still write their results.
const LEAVE: Duration = Duration::from_secs(600);

/// Pause between two looks where nothing is urgent.
const PAUSE: Duration = Duration::from_millis(1);

enum Session {
    Fresh,
    Busy,
    Ready { channel: Channel<Token>, mail: Mail },
    Failed { leave: Option<Duration> },
}

static SESSION: Mutex<Session> = Mutex::new(Session::Fresh);

/// Finalises MPI when it is dropped.
static UNIVERSE: Mutex<Option<Universe>> = Mutex::new(None);

/// Begins a run: the channel to the other ranks, and what was heard of this run before.
///
/// # Errors
/// [`Error::Misuse`] during a run and after one that failed; what [`initialise`] says.
pub(super) fn begin(launched: &Launched, timeout: Duration) -> Result<(Channel<Token>, Mail)> {
    let mut session = SESSION.lock();
    match std::mem::replace(&mut *session, Session::Busy) {
        Session::Ready { channel, mail } => Ok((channel, mail)),
        Session::Fresh => {
            let channel = initialise(launched, timeout);
            if channel.is_err() {
                *session = Session::Failed { leave: None };
            }
            Ok((channel?, Mail::new()))
        }
        Session::Busy => Err(Error::misuse(
            "World::run",
            "this process is a rank of another run over MPI; end that one first",
        )),
        failed @ Session::Failed { .. } => {
            *session = failed;
            Err(Error::misuse(
                "World::run",
                "an earlier run over MPI has failed in this process; start the job again",
            ))
        }
    }
}

/// Ends a run after which another one may begin.
pub(super) fn end(channel: Channel<Token>, mail: Mail) {
    *SESSION.lock() = Session::Ready { channel, mail };
}

/// Ends a run that has failed. If all ranks have said so, they wait for each other before they exit, up to `leave`, so that
/// the launcher does not end one of them before it has shown its error.
pub(super) fn fail(leave: Option<Duration>) {
    *SESSION.lock() = Session::Failed { leave };
}

/// Initialises MPI and makes a communicator of our own.
fn initialise(launched: &Launched, timeout: Duration) -> Result<Channel<Token>> {
    let rank = launched.rank;
    let (done, watched) = mpsc::channel::<()>();
    let watchdog = std::thread::spawn(move || {
        if watched.recv_timeout(timeout) == Err(mpsc::RecvTimeoutError::Timeout) {
            // The only call of MPI that cannot be asked again later; nothing but the end of the process ends it.
            eprintln!(
                "rank {rank} waited {timeout:?} for MPI_Init; look for a rank that has not started, or raise the timeout \
                 of the World"
            );
            // SAFETY: ends the process at once; there is no state worth saving.
            unsafe { libc::_exit(1) };
        }
    });
    let initialised = mpi::initialize_with_threading(Threading::Serialized);
    drop(done);
    // It sees the closed channel and returns.
    let _ = watchdog.join();
    let Some((universe, threading)) = initialised else {
        return Err(Error::misuse(
            "World::run",
            "this program has initialised MPI by itself; leave it to the World",
        ));
    };
    *UNIVERSE.lock() = Some(universe);
    if threading < Threading::Serialized {
        return Err(Error::Mpi {
            rank,
            call: "MPI_Init_thread",
            message: format!(
                "the library supports MPI_THREAD_{threading:?} only, but a rank needs MPI_THREAD_SERIALIZED; use a build of \
                 MPI with support for threads"
            ),
        });
    }
    // SAFETY: a handler that is registered once per process and calls what is there until the process ends.
    unsafe { libc::atexit(leave) };

    // SAFETY: MPI is initialised; constants of the library; all pointers are to locals.
    let (world, places) = unsafe {
        let world = ffi::RSMPI_COMM_WORLD;
        let code = ffi::MPI_Comm_set_errhandler(world, ffi::RSMPI_ERRORS_RETURN);
        check(rank, "MPI_Comm_set_errhandler", code)?;
        let (mut own, mut size) = (0, 0);
        check(
            rank,
            "MPI_Comm_rank",
            ffi::MPI_Comm_rank(world, &raw mut own),
        )?;
        check(
            rank,
            "MPI_Comm_size",
            ffi::MPI_Comm_size(world, &raw mut size),
        )?;
        (world, (own as usize, size as usize))
    };
    if places != (rank, launched.world_size) {
        return Err(launched.refused(format!(
            "this process is rank {rank} by {}, but MPI says rank {} of {}; use the launcher of the MPI that the program was \
             built with (mpirun, or srun --mpi=pmix)",
            launched.launcher, places.0, places.1
        )));
    }

    // A communicator of our own: messages of other users of MPI cannot be taken for ours.
    // SAFETY: constants of the library, overwritten by the call.
    let handles = unsafe { (ffi::RSMPI_COMM_NULL, ffi::RSMPI_REQUEST_NULL) };
    // SAFETY: both handles stay where they are until the request is done, or the process ends (the error below leaks them).
    let comm = unsafe {
        let handles = Box::leak(Box::new(handles));
        let code = ffi::MPI_Comm_idup(world, &raw mut handles.0, &raw mut handles.1);
        check(rank, "MPI_Comm_idup", code)?;
        wait(rank, &mut handles.1, timeout)?;
        handles.0
    };
    // SAFETY: the new communicator is complete.
    let code = unsafe { ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN) };
    check(rank, "MPI_Comm_set_errhandler", code)?;
    Ok(Channel::new(comm, rank, launched.world_size))
}

/// Waits for a request of MPI itself.
fn wait(rank: usize, request: &mut ffi::MPI_Request, timeout: Duration) -> Result<()> {
    let start = Instant::now();
    loop {
        let mut done: c_int = 0;
        // SAFETY: a request that is under way, or null when it is done.
        let code = unsafe { ffi::MPI_Test(request, &raw mut done, ffi::RSMPI_STATUS_IGNORE) };
        check(rank, "MPI_Test", code)?;
        if done != 0 {
            return Ok(());
        }
        if start.elapsed() >= timeout {
            return Err(Error::Timeout {
                rank,
                seq: 0,
                operation: "meeting of all ranks over MPI".to_string(),
                missing: Vec::new(),
                waited: start.elapsed(),
            });
        }
        std::thread::sleep(PAUSE);
    }
}

/// Called when the process exits, by `return` from `main` or by `exit`.
///
/// `MPI_Finalize` waits for all ranks, without a deadline. So all meet before it in a barrier that has one.
extern "C" fn leave() {
    let Some(mut session) = SESSION.try_lock() else {
        return;
    };
    let (deadline, finalise) = match std::mem::replace(&mut *session, Session::Busy) {
        Session::Ready { .. } => (LEAVE, true),
        Session::Failed { leave: Some(leave) } => (leave, false),
        // Exit in the middle of a run, or after a failure that not all ranks know: without MPI_Finalize, the launcher ends the
        // others, and with an exit code that is not 0.
        _ => return,
    };
    // SAFETY: constants of the library, as long as it is not finalised.
    let (world, mut request) = unsafe { (ffi::RSMPI_COMM_WORLD, ffi::RSMPI_REQUEST_NULL) };
    // SAFETY: the request outlives the wait; where that fails, the process ends.
    let code = unsafe { ffi::MPI_Ibarrier(world, &raw mut request) };
    let met = check(0, "MPI_Ibarrier", code).and_then(|()| wait(0, &mut request, deadline));
    match met {
        Ok(()) if finalise => drop(UNIVERSE.lock().take()),
        Ok(()) => {}
        Err(_) => eprintln!(
            "not all ranks have come to their end within {deadline:?}; exiting without them"
        ),
    }
}
