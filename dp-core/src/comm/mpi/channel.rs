//! Messages between two ranks over MPI: the only file that sends and receives.
//!
//! Nothing here waits. A message is begun, and [`Channel::completed`] says later which are through. Each carries a *token*,
//! which comes back then, and keeps alive what the message needs.

use std::os::raw::{c_char, c_int};

use mpi::ffi;

use crate::error::{Error, Result};

/// The tag of control messages. Those of data are above it.
const CONTROL: c_int = 0;

/// The tags of data that messages under way must not share; MPI promises tags up to 32767.
const NUM_DATA_TAGS: u64 = 32_000;

/// The tag of the data of collective `seq` in its first (`phase` 0) or second (1) half.
pub(super) fn data_tag(seq: u64, phase: u64) -> c_int {
    1 + ((2 * seq + phase) % NUM_DATA_TAGS) as c_int
}

/// One rank's end of a communicator of MPI, and the messages under way.
pub(super) struct Channel<T> {
    comm: ffi::MPI_Comm,
    rank: usize,
    world_size: usize,
    /// Parallel to `tokens`, as MPI wants them.
    requests: Vec<ffi::MPI_Request>,
    tokens: Vec<T>,
    /// Where MPI writes which requests are complete.
    indices: Vec<c_int>,
    /// The control message that is being received.
    incoming: Option<Incoming>,
}

struct Incoming {
    from: usize,
    request: ffi::MPI_Request,
    text: Vec<u8>,
}

// SAFETY: the raw pointers in it are handles of MPI, and those of `Incoming` point to its own block on the heap. MPI was
// initialised for calls from any thread, one at a time (`session.rs` checks the level), and `&mut self` sees to the latter,
// since there is one channel per process.
unsafe impl<T: Send> Send for Channel<T> {}

impl<T> Channel<T> {
    /// A channel over `comm`, which nobody else uses.
    pub fn new(comm: ffi::MPI_Comm, rank: usize, world_size: usize) -> Self {
        Self {
            comm,
            rank,
            world_size,
            requests: Vec::new(),
            tokens: Vec::new(),
            indices: Vec::new(),
            incoming: None,
        }
    }

    /// One on which nothing can be sent.
    pub fn closed(rank: usize, world_size: usize) -> Self {
        // SAFETY: a constant of the library.
        Self::new(unsafe { ffi::RSMPI_COMM_NULL }, rank, world_size)
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Begins to send `len` bytes.
    ///
    /// # Safety
    /// They stay valid and unchanged until the token comes back, or forever if it never does.
    pub unsafe fn send(
        &mut self,
        start: *const u8,
        len: usize,
        to: usize,
        tag: c_int,
        token: T,
    ) -> Result<()> {
        let mut request = null_request();
        // SAFETY: the caller keeps the bytes; the handle outlives the call.
        let code = unsafe {
            ffi::MPI_Isend(
                start.cast(),
                count(len),
                byte(),
                to as c_int,
                tag,
                self.comm,
                &raw mut request,
            )
        };
        self.check("MPI_Isend", code)?;
        self.requests.push(request);
        self.tokens.push(token);
        Ok(())
    }

    /// Begins to receive `len` bytes.
    ///
    /// # Safety
    /// They stay valid, and nobody reads or writes them, until the token comes back, or forever if it never does.
    pub unsafe fn receive(
        &mut self,
        start: *mut u8,
        len: usize,
        from: usize,
        tag: c_int,
        token: T,
    ) -> Result<()> {
        let mut request = null_request();
        // SAFETY: the caller keeps the bytes; the handle outlives the call.
        let code = unsafe {
            ffi::MPI_Irecv(
                start.cast(),
                count(len),
                byte(),
                from as c_int,
                tag,
                self.comm,
                &raw mut request,
            )
        };
        self.check("MPI_Irecv", code)?;
        self.requests.push(request);
        self.tokens.push(token);
        Ok(())
    }

    /// Begins to send a control message, which the token keeps alive.
    ///
    /// # Safety
    /// `text` is what `token` holds, at the same place on the heap.
    pub unsafe fn send_control(&mut self, text: *const [u8], to: usize, token: T) -> Result<()> {
        // SAFETY: the caller's promise, passed on.
        unsafe { self.send(text.cast(), text.len(), to, CONTROL, token) }
    }

    /// The next control message that has come, with its sender. Those of one sender come in the order they were sent.
    pub fn next_control(&mut self) -> Result<Option<(usize, Vec<u8>)>> {
        if self.incoming.is_none() {
            self.incoming = self.probe()?;
        }
        let Some(incoming) = &mut self.incoming else {
            return Ok(None);
        };
        let mut done = 0;
        // SAFETY: the request is under way, and is looked at until it is done, and never after.
        let code = unsafe {
            ffi::MPI_Test(
                &raw mut incoming.request,
                &raw mut done,
                ffi::RSMPI_STATUS_IGNORE,
            )
        };
        self.check("MPI_Test", code)?;
        let finished = self.incoming.take_if(|_| done != 0);
        Ok(finished.map(|i| (i.from, i.text)))
    }

    /// Begins to receive the next control message, if one has come.
    fn probe(&self) -> Result<Option<Incoming>> {
        let (mut found, mut len) = (0, 0);
        // SAFETY: a status is a plain C struct; MPI fills it before it is read.
        let mut status: ffi::MPI_Status = unsafe { std::mem::zeroed() };
        // SAFETY: handles of MPI, read once each.
        let mut message = unsafe { ffi::RSMPI_MESSAGE_NULL };
        // SAFETY: all pointers are to locals that outlive the call.
        let code = unsafe {
            ffi::MPI_Improbe(
                ffi::RSMPI_ANY_SOURCE,
                CONTROL,
                self.comm,
                &raw mut found,
                &raw mut message,
                &raw mut status,
            )
        };
        self.check("MPI_Improbe", code)?;
        if found == 0 {
            return Ok(None);
        }
        // SAFETY: the status is that of the message found.
        let code = unsafe { ffi::MPI_Get_count(&raw const status, byte(), &raw mut len) };
        self.check("MPI_Get_count", code)?;
        let mut incoming = Incoming {
            from: status.MPI_SOURCE as usize,
            request: null_request(),
            text: vec![0; len as usize],
        };
        // SAFETY: the block on the heap has `len` bytes and does not move when `incoming` does. It is freed when the request
        // is done; else `Drop` leaks it.
        let code = unsafe {
            ffi::MPI_Imrecv(
                incoming.text.as_mut_ptr().cast(),
                len,
                byte(),
                &raw mut message,
                &raw mut incoming.request,
            )
        };
        self.check("MPI_Imrecv", code)?;
        Ok(Some(incoming))
    }

    /// Moves the tokens of messages that are through to `out`. This is where MPI makes progress.
    pub fn completed(&mut self, out: &mut Vec<T>) -> Result<()> {
        if self.requests.is_empty() {
            return Ok(());
        }
        self.indices.resize(self.requests.len(), 0);
        let mut num_done = 0;
        // SAFETY: both arrays have the length that is given; statuses are not asked for.
        let code = unsafe {
            ffi::MPI_Testsome(
                count(self.requests.len()),
                self.requests.as_mut_ptr(),
                &raw mut num_done,
                self.indices.as_mut_ptr(),
                ffi::RSMPI_STATUSES_IGNORE,
            )
        };
        self.check("MPI_Testsome", code)?;
        // MPI_UNDEFINED, which is negative, if no request was active: then none is done.
        let done = &mut self.indices[..usize::try_from(num_done).unwrap_or(0)];
        // From the back, so that what is swapped in was looked at already.
        done.sort_unstable_by(|a, b| b.cmp(a));
        for index in done {
            self.requests.swap_remove(*index as usize);
            out.push(self.tokens.swap_remove(*index as usize));
        }
        Ok(())
    }

    /// What is under way.
    pub fn tokens(&self) -> &[T] {
        &self.tokens
    }

    /// True while a control message is received.
    pub fn is_receiving(&self) -> bool {
        self.incoming.is_some()
    }

    /// True if no message is under way.
    pub fn is_idle(&self) -> bool {
        self.requests.is_empty() && !self.is_receiving()
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<()> {
        check(self.rank, call, code)
    }
}

impl<T> Drop for Channel<T> {
    fn drop(&mut self) {
        // MPI may still read and write what these hold. A send cannot be taken back, so it is kept until the process ends.
        std::mem::forget(std::mem::take(&mut self.tokens));
        std::mem::forget(self.incoming.take());
    }
}

/// The error of a call that MPI says has failed.
pub(super) fn check(rank: usize, call: &'static str, code: c_int) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text: Vec<c_char> = vec![0; ffi::MPI_MAX_ERROR_STRING as usize];
    let mut len = 0;
    // SAFETY: the text has the room that the standard asks for.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr(), &raw mut len) };
    let text: Vec<u8> = text[..len as usize].iter().map(|c| *c as u8).collect();
    Err(Error::Mpi {
        rank,
        call,
        message: String::from_utf8_lossy(&text).into_owned(),
    })
}

fn byte() -> ffi::MPI_Datatype {
    // SAFETY: a constant of the library.
    unsafe { ffi::RSMPI_UINT8_T }
}

fn null_request() -> ffi::MPI_Request {
    // SAFETY: a constant of the library.
    unsafe { ffi::RSMPI_REQUEST_NULL }
}

fn count(len: usize) -> c_int {
    // Pieces are cut far below it, see `transfer.rs`.
    c_int::try_from(len).expect("no message of 2 GiB")
}
