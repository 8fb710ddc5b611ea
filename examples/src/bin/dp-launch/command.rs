//! The commands to start: the program once per rank, or mpirun once for all.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use anyhow::Context;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, getppid, mkfifo};
use tempfile::TempDir;

use crate::options::Options;

/// What launchers say to the processes that they start; dp-launch's ranks are none of theirs.
const OF_OTHER_LAUNCHERS: [&str; 8] = [
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
];
/// What dp-launch says, in torchrun's words.
const RANK: &str = "RANK";
const WORLD_SIZE: &str = "WORLD_SIZE";
const LOCAL_RANK: &str = "LOCAL_RANK";
const LOCAL_WORLD_SIZE: &str = "LOCAL_WORLD_SIZE";
const MASTER_ADDR: &str = "MASTER_ADDR";
const MASTER_PORT: &str = "MASTER_PORT";

/// Rank `rank`'s process.
pub fn rank(options: &Options, rank: u16, master_port: u16) -> Command {
    let mut command = Command::new(&options.program[0]);
    command.args(&options.program[1..]);
    for name in OF_OTHER_LAUNCHERS {
        command.env_remove(name);
    }
    // One machine, so a rank's number among all is that on its host.
    for name in [RANK, LOCAL_RANK] {
        command.env(name, rank.to_string());
    }
    for name in [WORLD_SIZE, LOCAL_WORLD_SIZE] {
        command.env(name, options.ranks.to_string());
    }
    command.env(MASTER_ADDR, &options.master_addr);
    command.env(MASTER_PORT, master_port.to_string());
    supervised(&mut command);
    command
}

/// mpirun's process. What it relays of its ranks it cuts in the middle of lines, so they write to pipes of ours instead.
pub fn mpirun(options: &Options, pipes: &RankPipes) -> Command {
    let mut command = Command::new("mpirun");
    command.arg("-n").arg(options.ranks.to_string());
    command.arg("--oversubscribe").args(&options.mpi_arg);
    command.args(["sh", "-c", RankPipes::SCRIPT]);
    command.arg(pipes.dir.path()).args(&options.program);
    for name in [
        RANK,
        WORLD_SIZE,
        LOCAL_RANK,
        LOCAL_WORLD_SIZE,
        MASTER_ADDR,
        MASTER_PORT,
    ] {
        command.env_remove(name);
    }
    supervised(&mut command);
    command
}

/// A process group of its own, no stdin, pipes for the rest; killed when the supervisor ends, however it does.
fn supervised(command: &mut Command) {
    command.process_group(0).stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let supervisor = Pid::this();
    let prepare = move || {
        SigSet::empty().thread_set_mask()?;
        set_pdeathsig(Signal::SIGKILL)?;
        // It may have ended before the line above.
        if getppid() != supervisor {
            return Err(Errno::ESRCH.into());
        }
        Ok(())
    };
    // SAFETY: `prepare` only makes system calls, which a child of a process with threads may do between fork and exec; it
    // allocates nothing and takes no lock.
    unsafe { command.pre_exec(prepare) };
}

/// Named pipes for the output of ranks that somebody else starts.
pub struct RankPipes {
    dir: TempDir,
}

impl RankPipes {
    /// Becomes the program, in a process of mpirun's. `$0` is the folder.
    const SCRIPT: &'static str = "\
        exec \"$@\" >\"$0/$OMPI_COMM_WORLD_RANK.stdout\" 2>\"$0/$OMPI_COMM_WORLD_RANK.stderr\"";

    pub fn new() -> anyhow::Result<Self> {
        let dir = tempfile::Builder::new().prefix("dp-launch-").tempdir();
        let dir = dir.context("cannot create a folder for the ranks' output")?;
        Ok(Self { dir })
    }

    /// Our ends of rank `rank`'s stdout and stderr.
    pub fn open(&self, rank: u16) -> anyhow::Result<[File; 2]> {
        let open = |name: &str| {
            let path = self.dir.path().join(format!("{rank}.{name}"));
            mkfifo(&path, Mode::S_IRUSR | Mode::S_IWUSR)?;
            // Does not wait for a writer.
            let mut options = OpenOptions::new();
            options.read(true).custom_flags(OFlag::O_NONBLOCK.bits());
            options.open(&path)
        };
        let both = open("stdout").and_then(|out| Ok([out, open("stderr")?]));
        both.with_context(|| format!("cannot create pipes in {}", self.dir.path().display()))
    }
}
