//! The process that starts the ranks, relays their output and ends them.
//!
//! ```text
//! running --first failure, or a signal--> ending: SIGTERM; after the grace period, or another signal: SIGKILL
//!    |                                       |
//!    +---------all ranks have ended----------+--> leftovers: the same for what ranks have left --> the rest of the output
//! ```

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::Signal;
use nix::unistd::{Pid, getppid, setpgid};

use crate::children::{self, End, code_of_signal, report_left, signal_group};
use crate::command::{self, RankPipes};
use crate::options::Options;
use crate::output::{Output, Target, say};
use crate::port::ReservedPort;
use crate::signals::{Event, Signals};

/// How long the system may take to end a process that it has promised to end.
const AFTER_SIGKILL: Duration = Duration::from_secs(10);

/// Does everything, and returns the exit code. `front` is the parent.
pub fn run(options: &Options, front: Pid) -> anyhow::Result<u8> {
    // A front that is killed is the end of the job, as a signal is.
    set_pdeathsig(Signal::SIGTERM)?;
    if getppid() != front {
        return Ok(code_of_signal(Signal::SIGTERM));
    }
    // What is sent to the front's group, Ctrl-C or SIGKILL, is the front's to pass on.
    setpgid(Pid::this(), Pid::this())?;
    children::adopt_orphans()?;
    let signals = Signals::keep()?;
    let port = match options.master_port {
        Some(_) => None,
        None => Some(ReservedPort::new().context("cannot reserve a port for MASTER_PORT")?),
    };
    let pipes = options.mpi.then(RankPipes::new).transpose()?;

    let mut job = Job::new(options)?;
    let started = match &pipes {
        Some(pipes) => job.start_mpirun(pipes),
        None => {
            let free = port.as_ref().map(ReservedPort::port);
            job.start_ranks(options.master_port.or(free).unwrap_or_default())
        }
    };
    if let Err(error) = started {
        children::kill_all()?;
        let code = code_of_start(&error);
        say(&format!("{error:#}"));
        return Ok(code);
    }
    job.run(&signals)?;
    job.end_leftovers(&signals)?;
    job.finish(&signals)
}

/// As a shell reports a command that it cannot start.
fn code_of_start(error: &anyhow::Error) -> u8 {
    match error
        .downcast_ref::<std::io::Error>()
        .map(std::io::Error::kind)
    {
        Some(std::io::ErrorKind::NotFound) => 127,
        Some(_) => 126,
        None => 1,
    }
}

/// A process that this one has started.
struct Process {
    name: String,
    pid: Pid,
    end: Option<End>,
}

struct Job<'a> {
    options: &'a Options,
    output: Output,
    processes: Vec<Process>,
    started: Instant,
    /// The first that failed: its index, how, and after how many seconds.
    first: Option<(usize, End, f64)>,
    /// The signal that has ended the job, if one has.
    stopped_by: Option<Signal>,
    /// When the next stronger signal follows; `None` while nobody was told to end.
    deadline: Option<Instant>,
    /// SIGKILL was sent.
    killed: bool,
}

impl<'a> Job<'a> {
    fn new(options: &'a Options) -> anyhow::Result<Self> {
        Ok(Self {
            options,
            output: Output::new()?,
            processes: Vec::new(),
            started: Instant::now(),
            first: None,
            stopped_by: None,
            deadline: None,
            killed: false,
        })
    }

    fn start_ranks(&mut self, master_port: u16) -> anyhow::Result<()> {
        for rank in 0..self.options.ranks {
            let command = command::rank(self.options, rank, master_port);
            self.start(command, format!("rank {rank}"))?;
        }
        Ok(())
    }

    fn start_mpirun(&mut self, pipes: &RankPipes) -> anyhow::Result<()> {
        // They are source 1, 2, ...; mpirun itself is the only process here, number 0.
        for rank in 0..self.options.ranks {
            let [out, err] = pipes.open(rank)?;
            let (source, prefix) = (1 + usize::from(rank), format!("[rank {rank}] "));
            self.output.relay(source, &prefix, out, Target::Stdout)?;
            self.output.relay(source, &prefix, err, Target::Stderr)?;
        }
        let command = command::mpirun(self.options, pipes);
        self.start(command, "mpirun".to_string())
            .context("--mpi needs Open MPI's mpirun; Debian has it in openmpi-bin")
    }

    fn start(&mut self, mut command: Command, name: String) -> anyhow::Result<()> {
        let child = command.spawn();
        let mut child = child
            .with_context(|| format!("cannot start {}", command.get_program().to_string_lossy()))?;
        let (source, prefix) = (self.processes.len(), format!("[{name}] "));
        if let Some(out) = child.stdout.take() {
            self.output.relay(source, &prefix, out, Target::Stdout)?;
        }
        if let Some(err) = child.stderr.take() {
            self.output.relay(source, &prefix, err, Target::Stderr)?;
        }
        self.processes.push(Process {
            name,
            pid: Pid::from_raw(i32::try_from(child.id())?),
            end: None,
        });
        Ok(())
    }

    /// Until all processes that were started have ended.
    fn run(&mut self, signals: &Signals) -> anyhow::Result<()> {
        while self.processes.iter().any(|p| p.end.is_none()) {
            match signals.wait(None, self.deadline)? {
                Event::Child | Event::Ready => self.reap(),
                Event::End(signal) => self.stop(signal),
                // The front names what is left.
                Event::Timeout if self.killed => bail!("not all ranks end by SIGKILL"),
                Event::Timeout => self.kill(),
            }
        }
        Ok(())
    }

    fn reap(&mut self) {
        for (pid, end) in children::reap() {
            let Some(index) = self.processes.iter().position(|p| p.pid == pid) else {
                continue;
            };
            self.processes[index].end = Some(end);
            // After a signal to all, ends are what was asked for.
            if end != End::Exit(0) && self.deadline.is_none() {
                self.first = Some((index, end, self.started.elapsed().as_secs_f64()));
                let name = &self.processes[index].name;
                say(&format!("{name} failed: {end}; ending all others"));
                self.terminate();
            }
        }
    }

    /// A signal has come.
    fn stop(&mut self, signal: Signal) {
        self.stopped_by.get_or_insert(signal);
        match self.deadline {
            None => {
                say(&format!("{signal}; ending all ranks"));
                self.terminate();
            }
            // Ctrl-C once more.
            Some(_) => self.kill(),
        }
    }

    /// SIGTERM for all that are there; SIGKILL after the grace period.
    fn terminate(&mut self) {
        self.deadline = Some(Instant::now() + self.options.grace);
        for process in self.processes.iter().filter(|p| p.end.is_none()) {
            signal_group(process.pid, Signal::SIGTERM);
        }
    }

    fn kill(&mut self) {
        let late = || self.processes.iter().filter(|p| p.end.is_none());
        let names: Vec<&str> = late().map(|p| p.name.as_str()).collect();
        say(&format!("SIGKILL for {}", names.join(", ")));
        for process in late() {
            signal_group(process.pid, Signal::SIGKILL);
        }
        self.killed = true;
        self.deadline = Some(Instant::now() + AFTER_SIGKILL);
    }

    /// Ends what the ranks have left running: orphans, which have become children of this process.
    fn end_leftovers(&mut self, signals: &Signals) -> anyhow::Result<()> {
        let deadline = *self
            .deadline
            .get_or_insert_with(|| Instant::now() + self.options.grace);
        let mut told: Vec<Pid> = Vec::new();
        while !self.killed {
            children::reap();
            let left = children::list()?;
            if left.is_empty() {
                return Ok(());
            }
            // Also those that have lost their parent by the signals just sent.
            for child in left {
                if !told.contains(&child) {
                    signal_group(child, Signal::SIGTERM);
                    told.push(child);
                }
            }
            match signals.wait(None, Some(deadline))? {
                Event::Child | Event::Ready => {}
                Event::Timeout => break,
                Event::End(signal) => {
                    self.stopped_by.get_or_insert(signal);
                    break;
                }
            }
        }
        report_left(&children::kill_all()?);
        Ok(())
    }

    /// Relays the rest of the output, says how it went, and returns the exit code.
    fn finish(mut self, signals: &Signals) -> anyhow::Result<u8> {
        self.output.close();
        // Whoever reads our output may take their time. A signal ends the wait.
        loop {
            match signals.wait(Some(self.output.done()), None)? {
                Event::Ready => break,
                Event::End(Signal::SIGPIPE) => {
                    self.stopped_by.get_or_insert(Signal::SIGPIPE);
                }
                Event::End(signal) => return Ok(code_of_signal(signal)),
                Event::Child | Event::Timeout => {}
            }
        }
        let Some((index, end, seconds)) = self.first else {
            return Ok(self.stopped_by.map_or(0, code_of_signal));
        };
        let mut text = format!(
            "{} failed first, after {seconds:.1} s: {end}",
            self.processes[index].name
        );
        for (other, process) in self.processes.iter().enumerate() {
            match process.end {
                Some(End::Signal(Signal::SIGTERM | Signal::SIGKILL) | End::Exit(0)) | None => {}
                Some(end) if other != index => text += &format!("\n  {} then: {end}", process.name),
                Some(_) => {}
            }
        }
        let last = self.output.last_lines(index);
        match last.is_empty() {
            true => text += "\n  it has written nothing to stderr",
            false => text += "\n  its last lines on stderr:",
        }
        for line in last {
            text += &format!("\n  | {line}");
        }
        say(&text);
        Ok(end.code())
    }
}
