//! The process that the user has started and may kill: it has the supervisor do everything, and sees to it that nothing is left
//! if that one is killed.

use std::process::ExitCode;

use anyhow::Context;
use nix::sys::signal::kill;
use nix::unistd::{ForkResult, Pid, fork};

use crate::children::{self, End};
use crate::options::Options;
use crate::output::say;
use crate::signals::{Event, Signals};
use crate::supervisor;

/// The whole program.
pub fn run(options: &Options) -> ExitCode {
    match fork_supervisor(options) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            say(&format!("{error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn fork_supervisor(options: &Options) -> anyhow::Result<u8> {
    children::adopt_orphans()?;
    // Before the supervisor is there, so that no signal is lost.
    let signals = Signals::keep()?;
    let front = Pid::this();
    // SAFETY: this process has no other thread, so the child may do whatever this process may.
    match unsafe { fork() }.context("cannot start the supervisor")? {
        ForkResult::Parent { child } => guard(child, &signals),
        ForkResult::Child => {
            drop(signals);
            supervisor::run(options, front)
        }
    }
}

/// Passes signals on until the supervisor has ended, and returns its exit code.
fn guard(supervisor: Pid, signals: &Signals) -> anyhow::Result<u8> {
    loop {
        match signals.wait(None, None)? {
            // It cannot be another process: it has not been reaped.
            Event::End(signal) => kill(supervisor, signal)?,
            Event::Child | Event::Ready | Event::Timeout => {
                let ended = children::reap();
                let Some((_, end)) = ended.into_iter().find(|(pid, _)| *pid == supervisor) else {
                    continue;
                };
                if let End::Signal(signal) = end {
                    say(&format!(
                        "its supervising process was ended by {signal}; ending all ranks"
                    ));
                }
                children::report_left(&children::kill_all()?);
                return Ok(end.code());
            }
        }
    }
}
