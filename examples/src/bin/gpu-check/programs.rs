//! Other programs: started, given a deadline, their output kept in a file.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;

use crate::Options;
use crate::measurement::Measurement;
use crate::report::{Outcome, Row};

/// Where they are, and until when they may run.
pub struct Programs {
    folder: PathBuf,
    logs: PathBuf,
    deadline: Instant,
    /// The longest that one may take.
    longest: Duration,
}

impl Programs {
    /// The budget of time begins now.
    pub fn new(options: &Options) -> anyhow::Result<Self> {
        let folder = match &options.programs {
            Some(folder) => folder.clone(),
            None => {
                let own = this_program()?;
                own.parent()
                    .context("a program lies in a folder")?
                    .to_path_buf()
            }
        };
        let logs = options.out.clone();
        std::fs::create_dir_all(&logs).with_context(|| logs.display().to_string())?;
        Ok(Self {
            folder,
            logs,
            deadline: Instant::now() + Duration::from_secs(options.budget),
            longest: Duration::from_secs(options.longest),
        })
    }

    /// The GPUs and their driver, in the words of nvidia-smi.
    pub fn machine(&self) -> String {
        let name = "nvidia-smi";
        let mut command = Command::new(name);
        let query = "--query-gpu=index,name,memory.total,driver_version";
        command.args([query, "--format=csv,noheader"]);
        let row = self.finish(name, vec![command]);
        match row.outcome {
            Outcome::Ok => self.printed(name).trim().to_string(),
            _ => format!("{name}: {}", row.detail),
        }
    }

    /// Runs a program of the folder.
    pub fn run(&self, name: &str, program: &str, arguments: &[&str]) -> Row {
        let path = self.folder.join(program);
        if !path.exists() {
            return Row::skipped(name, format!("{} is not there", path.display()));
        }
        let mut command = Command::new(path);
        command.args(arguments);
        self.finish(name, vec![command])
    }

    /// Runs this program once more, to measure something, and shows all that it prints.
    pub fn measure(&self, name: &str, measurement: Measurement) -> Row {
        let mut command = match this_program() {
            Ok(path) => Command::new(path),
            Err(e) => return Row::failed(name, format!("{e:#}")),
        };
        command.args(measurement.arguments());
        let row = self.finish(name, vec![command]);
        print!("{}", self.printed(name));
        row
    }

    /// Runs a script of the folder, if Python has torch with CUDA.
    pub fn run_python(&self, name: &str, options: &Options, arguments: &[&str]) -> Row {
        let probe = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)";
        let mut command = Command::new(&options.python);
        command.args(["-c", probe]);
        let row = self.finish("torch with CUDA", vec![command]);
        match row.outcome {
            Outcome::Ok => {}
            Outcome::Skipped => return Row::skipped(name, row.detail),
            Outcome::Failed => {
                let why = format!("{} has no torch with CUDA: {}", options.python, row.detail);
                return Row::skipped(name, why);
            }
        }
        let mut command = Command::new(&options.python);
        command
            .arg(self.folder.join(arguments[0]))
            .args(&arguments[1..]);
        self.finish(name, vec![command])
    }

    /// Runs a program as `n` ranks, as torchrun would start them.
    #[cfg_attr(not(feature = "nccl"), allow(dead_code))]
    pub fn run_ranks(&self, name: &str, n: usize, program: &str, arguments: &[&str]) -> Row {
        let command = |rank: usize| {
            let mut command = Command::new(self.folder.join(program));
            command
                .args(arguments)
                .env("RANK", rank.to_string())
                .env("LOCAL_RANK", rank.to_string())
                .env("WORLD_SIZE", n.to_string())
                .env("LOCAL_WORLD_SIZE", n.to_string())
                .env("MASTER_ADDR", "127.0.0.1")
                .env("MASTER_PORT", "29533");
            command
        };
        self.finish(name, (0..n).map(command).collect())
    }

    /// Waits for all of them; the first one that fails ends the others.
    fn finish(&self, name: &str, commands: Vec<Command>) -> Row {
        let start = Instant::now();
        let rest = self.deadline.saturating_duration_since(start);
        if rest < Duration::from_secs(5) {
            return Row::skipped(name, "no time is left; see --budget");
        }
        let log = self.log(name);
        let mut running = match start_all(commands, &log) {
            Ok(running) => running,
            Err(e) => return Row::failed(name, format!("cannot start: {e}")),
        };
        let outcome = wait_for_all(&mut running, start + rest.min(self.longest));
        for child in &mut running {
            // Those that are still there; the others are gone already.
            let _ = child.kill();
            let _ = child.wait();
        }
        let text = self.printed(name);
        let last = text.lines().rev().find(|l| !l.trim().is_empty());
        let last = last.unwrap_or("no output").trim().to_string();
        match outcome {
            Ok(()) => Row::ok(name, start.elapsed(), last),
            Err(why) => Row {
                seconds: start.elapsed().as_secs_f64(),
                ..Row::failed(name, format!("{why}; {}: {last}", log.display()))
            },
        }
    }

    fn log(&self, name: &str) -> PathBuf {
        self.logs.join(format!("{}.log", file_name(name)))
    }

    fn printed(&self, name: &str) -> String {
        std::fs::read_to_string(self.log(name)).unwrap_or_default()
    }
}

fn this_program() -> anyhow::Result<PathBuf> {
    std::env::current_exe().context("where is this program?")
}

fn start_all(commands: Vec<Command>, log: &Path) -> io::Result<Vec<Child>> {
    let file = File::create(log)?;
    let mut running: Vec<Child> = Vec::new();
    for mut command in commands {
        let started = file.try_clone().and_then(|out| {
            let err = file.try_clone()?;
            command.stdin(Stdio::null()).stdout(out).stderr(err).spawn()
        });
        match started {
            Ok(child) => running.push(child),
            Err(e) => {
                for child in &mut running {
                    let _ = child.kill();
                    let _ = child.wait();
                }
                return Err(e);
            }
        }
    }
    Ok(running)
}

fn wait_for_all(running: &mut [Child], until: Instant) -> Result<(), String> {
    loop {
        let mut all_done = true;
        for child in running.iter_mut() {
            let status: Option<ExitStatus> = child.try_wait().map_err(|e| e.to_string())?;
            match status {
                Some(status) if status.success() => {}
                Some(status) => return Err(status.to_string()),
                None => all_done = false,
            }
        }
        if all_done {
            return Ok(());
        }
        if Instant::now() >= until {
            return Err("it was ended by its deadline".to_string());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The name in letters, digits and dashes.
fn file_name(name: &str) -> String {
    name.chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
        .collect()
}
