//! The children of this process, and how to leave none.
//!
//! A process that adopts orphans gets every descendant whose own parent has ended, whatever session or group it has gone
//! to. So killing children until there are none kills all descendants. Only this loop reaps them: a process id belongs to a
//! child until it is reaped, so no other process is ever hit.

use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::prctl::set_child_subreaper;
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{Pid, getpgid, getpgrp};

use crate::output::say;

/// How a process has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Exit(i32),
    Signal(Signal),
}

impl End {
    /// As a shell reports it.
    pub fn code(self) -> u8 {
        match self {
            Self::Exit(code) => u8::try_from(code & 0xff).unwrap_or(1),
            Self::Signal(signal) => code_of_signal(signal),
        }
    }
}

impl std::fmt::Display for End {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exit(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => write!(f, "signal {} ({signal})", *signal as i32),
        }
    }
}

/// 128 + N, as shells have it.
pub fn code_of_signal(signal: Signal) -> u8 {
    128 + signal as u8
}

/// From now on orphans among the descendants become children of this process.
pub fn adopt_orphans() -> nix::Result<()> {
    set_child_subreaper(true)
}

/// Children that have ended since the last call.
pub fn reap() -> Vec<(Pid, End)> {
    let mut ended = Vec::new();
    loop {
        match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::Exited(pid, code)) => ended.push((pid, End::Exit(code))),
            Ok(WaitStatus::Signaled(pid, signal, _)) => ended.push((pid, End::Signal(signal))),
            Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => return ended,
            // Stops are not asked for, and a wait that does not block is not interrupted.
            Ok(_) | Err(_) => return ended,
        }
    }
}

/// The children that are there, zombies included.
pub fn list() -> std::io::Result<Vec<Pid>> {
    let me = std::process::id().to_string();
    let mut children = Vec::new();
    for entry in std::fs::read_dir("/proc")? {
        let name = entry?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // One that has ended meanwhile is none.
        let Ok(stat) = std::fs::read(format!("/proc/{pid}/stat")) else {
            continue;
        };
        // PID (NAME) STATE PARENT; a name may have anything in it.
        let stat = String::from_utf8_lossy(&stat);
        let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
        if after_name.split_ascii_whitespace().nth(1) == Some(me.as_str()) {
            children.push(Pid::from_raw(pid));
        }
    }
    Ok(children)
}

/// Sends a signal to a child that has not been reaped, and to its process group unless that is ours.
pub fn signal_group(child: Pid, signal: Signal) {
    // Errors say that it has just ended, or has become another user: then nothing can be done.
    let _ = match getpgid(Some(child)) {
        Ok(group) if group != getpgrp() => killpg(group, signal),
        _ => kill(child, signal),
    };
    // One that has joined the group of another child is not the leader of its own.
    let _ = kill(child, signal);
}

/// Kills children until there are none. Returns those that do not even end then, since the system is busy for them.
pub fn kill_all() -> std::io::Result<Vec<Pid>> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        reap();
        let children = list()?;
        if children.is_empty() || Instant::now() > deadline {
            return Ok(children);
        }
        for child in children {
            signal_group(child, Signal::SIGKILL);
        }
        // A killed process ends within microseconds; this only keeps the loop from taking a core.
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Names what could not be ended.
pub fn report_left(left: &[Pid]) {
    for pid in left {
        say(&format!(
            "process {pid} does not end by SIGKILL; look at what it waits for"
        ));
    }
}
