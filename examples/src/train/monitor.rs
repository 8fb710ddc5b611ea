//! What a run shows and writes while it trains, on rank 0.

use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use dp_core::{StepRecord, StepReport};
use indicatif::{HumanDuration, ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};

use super::job::Job;
use super::tensorboard::EventWriter;
use crate::table::thousands;

/// A line of `metrics.jsonl`, as it is written. Numbers that are not finite are null.
#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Line {
    /// An optimizer step, on rank 0.
    Train {
        /// Pass over the training data, from 0.
        epoch: u64,
        /// Tokens of all ranks together, per second.
        tokens_per_second: f64,
        #[serde(flatten)]
        step: Box<StepRecord>,
    },
    /// An evaluation.
    Evaluation {
        /// Optimizer steps taken.
        step: u64,
        /// Mean loss on the held-out text.
        loss: f64,
    },
}

/// What is read of a line of `metrics.jsonl`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Record {
    /// An optimizer step.
    Train(TrainRecord),
    /// An evaluation.
    Evaluation {
        /// Optimizer steps taken.
        step: u64,
        /// Mean loss on the held-out text.
        loss: Option<f64>,
    },
}

impl Record {
    /// Optimizer steps taken.
    pub fn step(&self) -> u64 {
        match self {
            Self::Train(record) => record.step,
            Self::Evaluation { step, .. } => *step,
        }
    }
}

/// What the report draws of a step; the names are those of [`StepRecord`].
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[allow(missing_docs)]
pub struct TrainRecord {
    pub step: u64,
    pub loss: Option<f64>,
    pub learning_rate: Option<f64>,
    pub grad_norm: Option<f64>,
    pub skipped: Option<String>,
    pub tokens_per_second: f64,
    pub forward_ms: f64,
    pub backward_ms: f64,
    pub exposed_communication_ms: f64,
    pub optimizer_ms: f64,
    pub total_ms: f64,
    pub reduction_ms: f64,
    pub hidden_share: Option<f64>,
}

/// Progress bar or lines, metrics file, TensorBoard.
pub struct Monitor {
    bar: Option<ProgressBar>,
    metrics: File,
    tensorboard: Option<EventWriter>,
    tokens_per_step: usize,
    steps: u64,
    steps_per_print: u64,
    wall_clock_breakdown: bool,
    /// Time and tokens since the last printed line.
    since_print: (Duration, usize),
    started: Instant,
    first_step: u64,
    /// Metrics could not be written; said once.
    broken: bool,
}

impl Monitor {
    /// Opens all files. Of a run that goes on after step `resumed`, metrics of later steps are dropped: they are of steps that
    /// are done again.
    ///
    /// # Errors
    /// A file that cannot be opened.
    pub fn start(job: &Job, resumed: Option<u64>) -> anyhow::Result<Self> {
        let from = resumed.unwrap_or(0);
        let path = job.folder.metrics();
        let kept = match resumed {
            Some(step) => lines_until(&path, step, job.config.run.steps)?,
            None => String::new(),
        };
        // As a whole: a process that is killed here leaves the old file.
        let draft = path.with_extension("part");
        std::fs::write(&draft, kept)
            .and_then(|()| std::fs::rename(&draft, &path))
            .with_context(|| format!("cannot write {}", path.display()))?;
        let metrics = File::options()
            .append(true)
            .open(&path)
            .with_context(|| format!("cannot write {}", path.display()))?;
        let config = serde_json::to_string_pretty(&job.config.json)?;
        std::fs::write(job.folder.config(), config)
            .with_context(|| format!("cannot write {}", job.folder.config().display()))?;
        let board = &job.config.deepspeed.tensorboard;
        let tensorboard = match board.enabled {
            true => {
                let folder = match &board.output_path {
                    Some(path) => Path::new(path).join(&board.job_name),
                    None => job.folder.tensorboard(),
                };
                Some(EventWriter::create(&folder, from)?)
            }
            false => None,
        };
        let steps = job.config.run.steps;
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(steps).with_position(from);
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} ETA {eta}");
            if let Ok(style) = style {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(200));
            bar
        });
        Ok(Self {
            bar,
            metrics,
            tensorboard,
            tokens_per_step: job.tokens_per_step(),
            steps,
            steps_per_print: job.config.deepspeed.steps_per_print,
            wall_clock_breakdown: job.config.deepspeed.wall_clock_breakdown,
            since_print: (Duration::ZERO, 0),
            started: Instant::now(),
            first_step: from,
            broken: false,
        })
    }

    /// After each step.
    pub fn step(&mut self, report: &StepReport, record: StepRecord, elapsed: Duration, epoch: u64) {
        self.since_print.0 += elapsed;
        self.since_print.1 += self.tokens_per_step;
        let line = self.line(report);
        self.show(report, &record, &line);
        let tokens_per_second = self.tokens_per_step as f64 / elapsed.as_secs_f64().max(1e-9);
        if report.skipped.is_none() {
            let mut scalars = vec![("train/tokens_per_second", tokens_per_second)];
            let more = [
                ("train/loss", report.loss),
                (
                    "train/learning_rate",
                    report.learning_rates.first().copied(),
                ),
                ("train/grad_norm", report.grad_norm),
                ("train/loss_scale", report.loss_scale),
            ];
            scalars.extend(
                more.into_iter()
                    .filter_map(|(tag, value)| Some((tag, value?))),
            );
            self.tensorboard_scalars(report.step, &scalars);
        }
        if report.step.is_multiple_of(self.steps_per_print) {
            self.flush();
        }
        self.write(&Line::Train {
            epoch,
            tokens_per_second,
            step: Box::new(record),
        });
    }

    /// After an evaluation.
    pub fn evaluation(&mut self, step: u64, loss: f64) {
        self.say(&format!("step {step}  validation loss {loss:.4}"));
        self.tensorboard_scalars(step, &[("validation/loss", loss)]);
        self.write(&Line::Evaluation { step, loss });
        self.flush();
    }

    /// A line for people, above the bar if there is one.
    pub fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| println!("{line}")),
            None => println!("{line}"),
        }
    }

    /// At the end.
    pub fn finish(mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        self.flush();
    }

    /// A step in one line, with the speed since the last printed one.
    fn line(&self, report: &StepReport) -> String {
        let (elapsed, tokens) = self.since_print;
        let speed = tokens as f64 / elapsed.as_secs_f64().max(1e-9);
        let loss = report.loss.unwrap_or(f64::NAN);
        let lr = report.learning_rates.first().copied().unwrap_or(0.0);
        let norm = report.grad_norm.map(|norm| format!("  norm {norm:.2}"));
        format!(
            "loss {loss:.4}  lr {lr:.2e}{}  {} tokens/s",
            norm.unwrap_or_default(),
            thousands(speed as u64)
        )
    }

    fn show(&mut self, report: &StepReport, record: &StepRecord, line: &str) {
        let step = report.step;
        if let Some(reason) = &report.skipped {
            return self.say(&format!("step {} skipped: {reason}", step + 1));
        }
        if let Some(bar) = &self.bar {
            bar.set_position(step);
            bar.set_message(line.to_string());
        }
        if !step.is_multiple_of(self.steps_per_print) && step != self.steps {
            return;
        }
        self.since_print = (Duration::ZERO, 0);
        if self.bar.is_none() {
            let done = (step - self.first_step).max(1) as f64;
            let per_step = self.started.elapsed().div_f64(done);
            let left = per_step.mul_f64(self.steps.saturating_sub(step) as f64);
            println!(
                "step {step}/{}  {line}  ETA {}",
                self.steps,
                HumanDuration(left)
            );
        }
        if self.wall_clock_breakdown {
            self.say(&format!(
                "  forward {:.1} ms, backward {:.1} ms, exposed communication {:.1} ms, optimizer {:.1} ms; {:.0} % of the \
                 reductions hidden",
                record.forward_ms,
                record.backward_ms,
                record.exposed_communication_ms,
                record.optimizer_ms,
                100.0 * record.hidden_share.unwrap_or(0.0)
            ));
        }
    }

    /// So that a TensorBoard that is open shows it.
    fn flush(&mut self) {
        if let Some(Err(error)) = self.tensorboard.as_mut().map(EventWriter::flush) {
            self.give_up(&error);
        }
    }

    fn tensorboard_scalars(&mut self, step: u64, scalars: &[(&str, f64)]) {
        let written = self.tensorboard.as_mut().map(|t| t.scalars(step, scalars));
        if let Some(Err(error)) = written {
            self.give_up(&error);
        }
    }

    fn write(&mut self, line: &Line) {
        if let Err(error) = write_line(&mut self.metrics, line) {
            self.give_up(&error);
        }
    }

    /// Training is worth more than its metrics: it goes on without them.
    fn give_up(&mut self, error: &anyhow::Error) {
        if !std::mem::replace(&mut self.broken, true) {
            self.say(&format!("metrics are incomplete from here on: {error:#}"));
        }
    }
}

fn write_line(file: &mut File, line: &Line) -> anyhow::Result<()> {
    let mut text = serde_json::to_string(line)?;
    text.push('\n');
    file.write_all(text.as_bytes())
        .context("cannot write metrics.jsonl")
}

/// The records of a metrics file; none if there is no file. Lines that are no records are left out.
///
/// # Errors
/// The file cannot be read.
pub fn read_metrics(path: &Path) -> anyhow::Result<Vec<Record>> {
    Ok(lines_of(path)?
        .into_iter()
        .map(|(_, record)| record)
        .collect())
}

/// The lines of a metrics file up to a step; without the evaluation at the end of the run, which is done again.
fn lines_until(path: &Path, step: u64, last: u64) -> anyhow::Result<String> {
    let is_again = |r: &Record| matches!(r, Record::Evaluation { step, .. } if *step == last);
    let kept = lines_of(path)?
        .into_iter()
        .filter(|(_, record)| record.step() <= step && !is_again(record));
    Ok(kept.map(|(line, _)| line).collect())
}

/// Lines and what they say. One may have been cut off by a full disk or by the end of a process: metrics are worth no error.
fn lines_of(path: &Path) -> anyhow::Result<Vec<(String, Record)>> {
    let bytes = match std::fs::read(path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e).with_context(|| format!("cannot read {}", path.display())),
    };
    let text = String::from_utf8_lossy(&bytes);
    let (mut lines, mut bad) = (Vec::new(), 0);
    for line in text.lines() {
        match serde_json::from_str(line) {
            Ok(record) => lines.push((format!("{line}\n"), record)),
            Err(_) => bad += 1,
        }
    }
    if bad > 0 {
        tracing::warn!(
            "{}: {bad} lines are no records, and are left out",
            path.display()
        );
    }
    Ok(lines)
}
