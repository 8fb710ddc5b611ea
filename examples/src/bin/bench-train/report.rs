//! What is measured: the content of the JSON file, which the table shows.

use std::fmt;

use candle_core::DType;
use comfy_table::Table;
use dp_examples::machine::Provenance;
use dp_examples::options::Head;
use dp_examples::statistics::median;
use dp_examples::table::{add_row, mib, new_table, thousands};
use serde::Serialize;

use crate::options::{Job, Overlap};
use crate::training::{Run, StepTimes};
use crate::variant::Variant;

/// The largest difference to the expected losses: what rounding can do in 40 steps, and no mistake would stay below.
pub const TOLERANCE: f64 = 1e-4;

/// The whole report.
#[derive(Debug, Serialize)]
pub struct Report {
    pub rows: Vec<Row>,
    /// Mean loss over all ranks, per step, of the first variant's first run; the checks compare the others.
    pub losses: Vec<f64>,
    pub options: Settings,
    #[serde(flatten)]
    pub provenance: Provenance,
    #[serde(skip)]
    same_losses: bool,
    #[serde(skip)]
    same_params: bool,
}

/// One variant. Times are medians over all measured steps of means over the ranks, so parts need not add up exactly.
#[derive(Debug, Serialize)]
pub struct Row {
    pub strategy: &'static str,
    pub overlap_comm: Overlap,
    /// What gradients travel in.
    pub communication_dtype: &'static str,
    /// Tokens of the global batch over the median step.
    pub tokens_per_second: f64,
    /// Forward, backward and optimizer step, with reading the loss, but not drawing the batch.
    pub step_ms: f64,
    pub forward_ms: f64,
    /// Without the time spent in the communicator.
    pub backward_ms: f64,
    /// Time in the communicator during backward and step: working for collectives, and waiting for other ranks.
    pub exposed_communication_ms: f64,
    /// Time in which the reduction of at least one bucket was under way.
    pub reduction_ms: f64,
    /// The share of `reduction_ms` that is not exposed, from 0 to 1: hidden behind backward.
    pub hidden_share: Option<f64>,
    /// What a rank sends in a step; of the one that sends most.
    pub bytes_sent: u64,
    /// The trainer's step without the time spent in the communicator.
    pub optimizer_ms: f64,
    /// Growth of the heap up to its peak, of the rank with the greatest.
    pub peak_bytes: u64,
}

/// What was trained.
#[derive(Debug, Serialize)]
pub struct Settings {
    pub ranks: usize,
    pub threads: usize,
    pub steps: usize,
    pub warmup: usize,
    pub rounds: usize,
    pub global_batch: usize,
    pub context: usize,
    pub width: usize,
    pub heads: usize,
    pub layers: usize,
    pub head: Head,
    pub num_params: usize,
    pub dtype: &'static str,
    pub lr: f64,
    pub weight_decay: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub seed: u64,
    pub bucket_cap_bytes: [usize; 2],
    pub text_bytes: usize,
}

impl Row {
    /// The times of all `runs` of a variant together.
    pub fn new(job: &Job, variant: Variant, runs: &[&Run]) -> Self {
        // Of each step, the mean over the ranks.
        let means = |of: &dyn Fn(&StepTimes) -> f64| -> Vec<f64> {
            let steps = runs.iter().flat_map(|run| {
                (0..run.times[0].len()).map(|step| {
                    let sum: f64 = run.times.iter().map(|rank| of(&rank[step])).sum();
                    sum / run.times.len() as f64
                })
            });
            steps.collect()
        };
        let ms = |of: fn(&StepTimes) -> f64| median(means(&|t| of(t) * 1e3));
        let all = || runs.iter().flat_map(|run| run.times.iter().flatten());
        let reduces = all().all(|t| t.hidden_share.is_some());
        let step_ms = ms(|t| t.total);
        let tokens = job.options.batch * job.options.context;
        Self {
            strategy: variant.sharding.name(),
            overlap_comm: variant.overlap_comm,
            communication_dtype: variant.communication_dtype.as_str(),
            tokens_per_second: tokens as f64 / (step_ms / 1e3),
            step_ms,
            forward_ms: ms(|t| t.forward),
            backward_ms: ms(|t| t.backward),
            exposed_communication_ms: ms(|t| t.exposed_communication),
            reduction_ms: ms(|t| t.reduction),
            hidden_share: reduces.then(|| median(means(&|t| t.hidden_share.unwrap_or(0.0)))),
            bytes_sent: all().map(|t| t.bytes_sent).max().unwrap_or(0),
            optimizer_ms: ms(|t| t.optimizer),
            peak_bytes: runs.iter().map(|r| r.peak_bytes).max().unwrap_or(0),
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:.0} tokens/s, {:.1} ms per step",
            self.tokens_per_second, self.step_ms
        )
    }
}

impl Report {
    /// `runs`: per variant, its runs.
    pub fn new(job: &Job, provenance: Provenance, runs: &[Vec<Run>]) -> Self {
        let options = &job.options;
        let bucket_caps = job.bucket_caps.fit(4 * job.model.num_params());
        let first = &runs[0][0];
        let bits = |run: &Run| run.losses.iter().map(|l| l.to_bits()).collect::<Vec<_>>();
        let rows = job.variants.iter().zip(runs);
        // Rounding to 16 bits is part of what is computed, so each dtype has its own bits.
        let same = |equal: &dyn Fn(&Run, &Run) -> bool| {
            let dtypes: Vec<DType> = job.variants.iter().map(|v| v.communication_dtype).collect();
            let first = |dtype: DType| dtypes.iter().position(|d| *d == dtype).map(|i| &runs[i][0]);
            let mut pairs = dtypes.iter().zip(runs);
            pairs.all(|(dtype, runs)| {
                let first = first(*dtype);
                runs.iter().all(|run| first.is_some_and(|f| equal(run, f)))
            })
        };
        Self {
            rows: rows
                .map(|(variant, runs)| Row::new(job, *variant, &runs.iter().collect::<Vec<_>>()))
                .collect(),
            losses: first.losses.clone(),
            same_losses: same(&|a, b| bits(a) == bits(b)),
            same_params: same(&|a, b| a.params_sha256 == b.params_sha256),
            options: Settings {
                ranks: job.world_size,
                threads: options.threads,
                steps: options.steps,
                warmup: options.warmup,
                rounds: options.rounds,
                global_batch: options.batch,
                context: options.context,
                width: options.width,
                heads: options.heads,
                layers: options.layers,
                head: options.head,
                num_params: job.model.num_params(),
                dtype: "f32",
                lr: options.lr,
                weight_decay: options.weight_decay,
                beta1: options.beta1,
                beta2: options.beta2,
                eps: options.eps,
                seed: options.seed,
                bucket_cap_bytes: [bucket_caps.first(), bucket_caps.rest()],
                text_bytes: job.text.len(),
            },
            provenance,
        }
    }

    /// The settings in words, and a row per strategy.
    pub fn table(&self) -> String {
        let o = &self.options;
        let mut table: Table = new_table(&[
            "strategy",
            "overlap",
            "sent in",
            "tokens/s",
            "step ms",
            "forward",
            "backward",
            "exposed comm.",
            "reduction",
            "hidden",
            "optimizer",
            "sent MiB",
            "peak MiB",
        ]);
        for row in &self.rows {
            let ms = |ms: f64| format!("{ms:.2}");
            add_row(
                &mut table,
                [
                    row.strategy.to_string(),
                    row.overlap_comm.name().to_string(),
                    row.communication_dtype.to_string(),
                    format!("{:.0}", row.tokens_per_second),
                    ms(row.step_ms),
                    ms(row.forward_ms),
                    ms(row.backward_ms),
                    ms(row.exposed_communication_ms),
                    ms(row.reduction_ms),
                    row.hidden_share
                        .map_or("-".to_string(), |share| format!("{:.0} %", share * 100.0)),
                    ms(row.optimizer_ms),
                    mib(row.bytes_sent),
                    mib(row.peak_bytes),
                ],
            );
        }
        format!(
            "{}\nGPT with {} parameters in {}, {} ranks x {} threads, {} x {} tokens per step; medians of {} steps; loss \
             {:.5} -> {:.5}\n{table}",
            self.provenance.summary(),
            thousands(o.num_params as u64),
            o.dtype,
            o.ranks,
            o.threads,
            o.global_batch,
            o.context,
            o.rounds * (o.steps - o.warmup),
            self.losses[0],
            self.losses[self.losses.len() - 1],
        )
    }

    /// What must hold, with whether it does.
    pub fn checks(&self, expected: Option<&[f64]>) -> Vec<(String, bool)> {
        let mut checks = vec![
            (
                "losses are finite".to_string(),
                self.losses.iter().all(|l| l.is_finite()),
            ),
            (
                "losses of all strategies and rounds are bit-identical in every step, for each communication dtype".to_string(),
                self.same_losses,
            ),
            (
                "final parameters of all strategies and rounds are bit-identical, for each communication dtype".to_string(),
                self.same_params,
            ),
        ];
        if let Some(expected) = expected {
            let pairs = || self.losses.iter().zip(expected);
            let off = pairs().map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            checks.push((
                format!(
                    "{} losses are the expected ones within {TOLERANCE:e}: at most {off:.1e} apart",
                    pairs().count()
                ),
                // Written so that NaN fails; `max` passes it over, the check above does not.
                off <= TOLERANCE,
            ));
        }
        checks
    }
}
