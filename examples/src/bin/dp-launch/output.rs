//! Relays what ranks write, line by line, until they have ended.
//!
//! Each stream has a thread, so that a rank that writes much holds up nobody else. A stream usually ends when its last writer has
//! ended. Where somebody else has a copy of it, it never does; so once the job is over, [`Output::close`] has the threads take
//! what is still in the pipes, and end.

use std::fs::File;
use std::io::{ErrorKind, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::lines::Lines;

/// A message of dp-launch's own. Whether somebody can read it is not its concern.
pub fn say(message: &str) {
    let _ = writeln!(std::io::stderr(), "dp-launch: {message}");
}

/// Where a stream goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    Stdout,
    Stderr,
}

impl Target {
    fn write(self, lines: &[u8]) -> std::io::Result<()> {
        // Under a lock until the end of a line: lines of different ranks do not mix.
        match self {
            Self::Stdout => {
                let mut out = std::io::stdout().lock();
                out.write_all(lines)?;
                out.flush()
            }
            Self::Stderr => std::io::stderr().lock().write_all(lines),
        }
    }
}

/// The streams of all ranks.
pub struct Output {
    closing: Arc<PipeReader>,
    close: Option<PipeWriter>,
    /// Nothing is ever written: it ends when the threads have dropped the other end.
    done: PipeReader,
    working: Option<PipeWriter>,
    relays: Vec<(usize, Target, JoinHandle<Lines>)>,
}

impl Output {
    pub fn new() -> std::io::Result<Self> {
        let (closing, close) = std::io::pipe()?;
        let (done, working) = std::io::pipe()?;
        Ok(Self {
            closing: Arc::new(closing),
            close: Some(close),
            done,
            working: Some(working),
            relays: Vec::new(),
        })
    }

    /// Relays `stream`, which is source number `source`'s, from now on.
    pub fn relay(
        &mut self,
        source: usize,
        prefix: &str,
        stream: impl Into<OwnedFd>,
        target: Target,
    ) -> std::io::Result<()> {
        let stream = File::from(stream.into());
        // Ours alone: the ranks' ends still wait when a pipe is full.
        let flags = OFlag::from_bits_retain(fcntl(&stream, FcntlArg::F_GETFL)?);
        fcntl(&stream, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        let mut lines = Lines::new(prefix);
        let closing = Arc::clone(&self.closing);
        let working = self
            .working
            .as_ref()
            .map(PipeWriter::try_clone)
            .transpose()?;
        let thread = std::thread::Builder::new().name(format!("{target:?} of {prefix}"));
        let relay = thread.spawn(move || {
            relay(stream, &closing, &mut lines, target);
            drop(working);
            lines
        })?;
        self.relays.push((source, target, relay));
        Ok(())
    }

    /// All writers have ended: the threads end as soon as they have relayed what is left.
    pub fn close(&mut self) {
        self.close = None;
        self.working = None;
    }

    /// Can be read, or rather: has ended, when all threads have, after [`close`](Self::close).
    pub fn done(&self) -> BorrowedFd<'_> {
        self.done.as_fd()
    }

    /// The last lines that `source` has written to stderr; after [`done`](Self::done).
    pub fn last_lines(self, source: usize) -> Vec<String> {
        let own = |(s, target, _): &(usize, Target, _)| *s == source && *target == Target::Stderr;
        let relay = self.relays.into_iter().find(own);
        let lines = relay.and_then(|(.., relay)| relay.join().ok());
        lines.map(Lines::into_last).unwrap_or_default()
    }
}

fn relay(mut stream: File, closing: &PipeReader, lines: &mut Lines, target: Target) {
    let mut chunk = vec![0; 64 << 10];
    let mut somebody_reads = true;
    let mut write = |text: &[u8]| {
        if somebody_reads && !text.is_empty() && target.write(text).is_err() {
            // The ranks go on writing until they have ended, and must not wait for it.
            somebody_reads = false;
            let _ = kill(Pid::this(), Signal::SIGPIPE);
        }
    };
    loop {
        let mut fds = [
            PollFd::new(stream.as_fd(), PollFlags::POLLIN),
            PollFd::new(closing.as_fd(), PollFlags::POLLIN),
        ];
        if let Err(e) = poll(&mut fds, PollTimeout::NONE)
            && e != Errno::EINTR
        {
            break;
        }
        let closing = fds[1].any() == Some(true);
        let ended = loop {
            match stream.read(&mut chunk) {
                Ok(0) => break true,
                Ok(len) => write(&lines.push(&chunk[..len])),
                Err(e) if e.kind() == ErrorKind::WouldBlock => break false,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => break true,
            }
        };
        if ended || closing {
            break;
        }
    }
    write(&lines.finish());
}
