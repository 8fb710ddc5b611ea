//! Starts a program `N` times on this machine, as `N` ranks, and ends all when one fails.
//!
//! ```text
//! dp-launch -n 4 -- program --its --arguments
//! dp-launch -n 4 --mpi target/release/quickstart     # built with --features dp-core/mpi
//! ```
//!
//! The ranks find torchrun's variables in their environment. Each line of their output gets its rank in front. Two processes
//! are at work, so that whichever of them is killed, the other ends everything that the ranks have started:
//!
//! ```text
//! front        what the user has started; passes signals on, and the exit code back
//! supervisor   its child: starts the ranks, relays their output, ends them
//! rank 0 ..    its children, each the leader of a process group
//! ```

#[cfg(target_os = "linux")]
mod children;
#[cfg(target_os = "linux")]
mod command;
#[cfg(target_os = "linux")]
mod front;
#[cfg(target_os = "linux")]
mod lines;
#[cfg(target_os = "linux")]
mod options;
#[cfg(target_os = "linux")]
mod output;
#[cfg(target_os = "linux")]
mod port;
#[cfg(target_os = "linux")]
mod signals;
#[cfg(target_os = "linux")]
mod supervisor;

use std::process::ExitCode;

#[cfg(target_os = "linux")]
fn main() -> ExitCode {
    use clap::Parser;
    front::run(&options::Options::parse())
}

#[cfg(not(target_os = "linux"))]
fn main() -> ExitCode {
    eprintln!(
        "dp-launch: only Linux ends a process with its parent and adopts orphans, which this launcher relies on; use mpirun"
    );
    ExitCode::from(2)
}
