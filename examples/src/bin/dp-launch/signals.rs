//! Signals as events of a loop, in the place of handlers that interrupt it.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

/// What ends the job, as far as it can be caught.
const ENDS: [Signal; 5] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
    // Sent by the relay of the output when nobody reads it.
    Signal::SIGPIPE,
];

/// Signals of this process, kept from interrupting it until they are asked for.
pub struct Signals(SignalFd);

/// What [`Signals::wait`] has seen.
pub enum Event {
    /// At least one child has ended.
    Child,
    /// A signal that asks for the end.
    End(Signal),
    /// The other descriptor can be read, or will never be.
    Ready,
    /// The deadline has passed.
    Timeout,
}

impl Signals {
    /// Keeps the signals, from now on; for processes of one thread, since later threads inherit it. So do children: theirs has
    /// to be undone.
    pub fn keep() -> nix::Result<Self> {
        let mut set: SigSet = ENDS.into_iter().collect();
        set.add(Signal::SIGCHLD);
        let fd = SignalFd::with_flags(&set, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
        // A background process that writes to a terminal may be stopped for it.
        set.add(Signal::SIGTTOU);
        set.thread_block()?;
        Ok(Self(fd))
    }

    /// Waits for a signal, for `other` to be ready, or for the deadline.
    pub fn wait(
        &self,
        other: Option<BorrowedFd<'_>>,
        deadline: Option<Instant>,
    ) -> nix::Result<Event> {
        loop {
            match self.0.read_signal()? {
                Some(info) if info.ssi_signo == Signal::SIGCHLD as u32 => return Ok(Event::Child),
                Some(info) => {
                    let number = i32::try_from(info.ssi_signo).unwrap_or(Signal::SIGTERM as i32);
                    return Ok(Event::End(Signal::try_from(number)?));
                }
                None => {}
            }
            let mut fds = vec![PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
            fds.extend(other.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
            let timeout = match deadline {
                None => PollTimeout::NONE,
                Some(deadline) => timeout(deadline.saturating_duration_since(Instant::now())),
            };
            match poll(&mut fds, timeout) {
                Err(Errno::EINTR) => {}
                Err(e) => return Err(e),
                Ok(_) if fds.get(1).and_then(PollFd::any) == Some(true) => return Ok(Event::Ready),
                Ok(0) if deadline.is_some_and(|d| d <= Instant::now()) => {
                    return Ok(Event::Timeout);
                }
                Ok(_) => {}
            }
        }
    }
}

/// In whole milliseconds, rounded up: rounded down, the last one would be spent polling.
fn timeout(left: Duration) -> PollTimeout {
    PollTimeout::try_from(left + Duration::from_micros(999)).unwrap_or(PollTimeout::MAX)
}
