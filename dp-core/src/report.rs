//! What a step did, the same on all ranks, and what it took on this one.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use crate::memory::LedgerSnapshot;

/// What one optimizer step did. The same on all ranks.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct StepReport {
    /// Number of steps taken, this one included unless it was skipped.
    pub step: u64,
    /// Why nothing was changed; `None` after an ordinary step.
    pub skipped: Option<SkipReason>,
    /// Micro-batches on each rank.
    pub num_micro_batches: usize,
    /// The weights of all micro-batches of all ranks together: their number, or the number of samples or tokens.
    pub weight: f64,
    /// The mean loss over all ranks and micro-batches, each with its weight, as gradients are averaged (see [`Loss`](crate::Loss)); as the
    /// program has passed it, without the loss scale. NaN or infinite if one of them is. `None` if the total weight is 0, or
    /// with [`EngineConfig::report_loss`](crate::EngineConfig::report_loss) turned off.
    pub loss: Option<f64>,
    /// The learning rate of each parameter group, as it was applied: with the schedule's factor.
    pub learning_rates: Arc<[f64]>,
    /// The gradient norm before clipping, if [`Trainer::clip_grad_norm`](crate::Trainer::clip_grad_norm) was called.
    pub grad_norm: Option<f64>,
    /// Names of trained parameters that no rank used in the whole window. They were left alone: no update, no weight
    /// decay, no change of moments.
    pub unused: Vec<String>,
    /// What the losses of this step were multiplied by, if the trainer scales them
    /// ([`LossScaling`](crate::LossScaling)).
    pub loss_scale: Option<f64>,
}

/// Why a step was skipped, on all ranks alike: parameters, optimizer state, step count and schedule are as before. Buffers
/// (batch-norm statistics), which the forward writes, become rank 0's as after any step.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SkipReason {
    /// No rank had any sample: all weights were 0.
    NoSamples,
    /// A gradient was NaN or infinite, and the trainer skips such steps ([`NonFinite::SkipStep`](crate::NonFinite::SkipStep),
    /// or a [dynamic](crate::LossScaling::Dynamic) loss scale).
    NonFinite {
        /// The first such parameter in rank 0's creation order.
        parameter: String,
        /// The first rank that computed such a gradient of it; if each rank's was finite but their sum was not, the
        /// first rank that saw the sum.
        rank: usize,
    },
}

impl fmt::Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSamples => write!(f, "no samples"),
            Self::NonFinite { parameter, rank } => {
                write!(f, "non-finite gradient of {parameter} on rank {rank}")
            }
        }
    }
}

/// What the last step took on this rank: [`Trainer::local_report`](crate::Trainer::local_report). Unlike [`StepReport`] it differs between ranks.
///
/// Time in the communicator counts as `exposed_communication` and nowhere else. The four parts add up to `total`, but for what
/// the program itself did between backward and step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LocalReport {
    /// From the end of the last step or micro-batch to backward, over all micro-batches. Where the program does other things in
    /// between, [`Trainer::begin_forward`](crate::Trainer::begin_forward) tells them apart.
    pub forward: Duration,
    /// Backward of all micro-batches, without the time in the communicator.
    pub backward: Duration,
    /// Time in the communicator during backward, clipping and step: waits for reductions, for gathers and for slower ranks, and
    /// the work on them where ranks do it themselves, as ranks that are threads do.
    pub exposed_communication: Duration,
    /// Clipping and step, without the time in the communicator.
    pub optimizer: Duration,
    /// The whole step, from the begin of its first forward.
    pub total: Duration,
    /// Time in which the reduction of at least one bucket was under way, from its launch to its completion.
    pub reduction: Duration,
    /// The part of `exposed_communication` that went to reductions: all of it during backward, and what is waited for them then.
    pub exposed_reduction: Duration,
    /// Bytes that this rank has sent from the first backward to the end of the step.
    pub bytes_sent: u64,
    /// Bytes that trainer and parameters hold after the step.
    pub memory: LedgerSnapshot,
    /// The greatest since the start or [`Ledger::reset_peak`](crate::Ledger::reset_peak).
    pub peak_memory: LedgerSnapshot,
}

impl LocalReport {
    /// The share of the reductions that is hidden behind backward, from 0 to 1:
    ///
    /// ```text
    /// 1 - exposed_reduction / reduction
    /// ```
    ///
    /// and at least 0. `None` if nothing was reduced.
    pub fn hidden_share(&self) -> Option<f64> {
        let hidden = self.reduction.saturating_sub(self.exposed_reduction);
        (!self.reduction.is_zero()).then(|| hidden.div_duration_f64(self.reduction))
    }
}

/// A step as one flat JSON object, e.g. a line of a metrics file: [`Trainer::record`](crate::Trainer::record). Each rank has its own; fields
/// down to `loss_scale` are the same on all.
///
/// JSON has no NaN and no infinity: `serde_json` writes them as `null`, as it does what is `None`.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct StepRecord {
    /// Number of steps taken; a skipped one does not count.
    pub step: u64,
    /// Mean loss.
    pub loss: Option<f64>,
    /// Gradient norm before clipping.
    pub grad_norm: Option<f64>,
    /// `learning_rate` of the default group, and `learning_rate/NAME` of each other group.
    #[serde(flatten)]
    pub learning_rates: BTreeMap<String, f64>,
    /// Why nothing was changed, in words.
    pub skipped: Option<String>,
    /// Micro-batches on each rank.
    pub num_micro_batches: usize,
    /// Total weight of all losses: micro-batches, or samples or tokens.
    pub weight: f64,
    /// Trained parameters that no rank used.
    pub num_unused: usize,
    /// What losses were multiplied by.
    pub loss_scale: Option<f64>,
    /// This rank.
    pub rank: usize,
    /// [`LocalReport::forward`] in milliseconds, and so on.
    pub forward_ms: f64,
    /// Backward.
    pub backward_ms: f64,
    /// Time in the communicator.
    pub exposed_communication_ms: f64,
    /// Clipping and step.
    pub optimizer_ms: f64,
    /// The whole step.
    pub total_ms: f64,
    /// Time in which reductions were under way.
    pub reduction_ms: f64,
    /// [`LocalReport::hidden_share`].
    pub hidden_share: Option<f64>,
    /// Bytes sent.
    pub bytes_sent: u64,
    /// Bytes held, by category.
    pub parameters_bytes: u64,
    /// Gradients.
    pub gradients_bytes: u64,
    /// Optimizer state.
    pub optimizer_bytes: u64,
    /// Buffers to send and receive.
    pub communication_bytes: u64,
    /// The greatest that was ever held of the latter.
    pub communication_peak_bytes: u64,
    /// Copies that checkpoints are written from.
    pub checkpoint_bytes: u64,
    /// The greatest of these.
    pub checkpoint_peak_bytes: u64,
}

impl StepRecord {
    /// `groups`: the names of the parameter groups.
    pub(crate) fn new<'a>(
        report: &StepReport,
        local: &LocalReport,
        rank: usize,
        groups: impl Iterator<Item = &'a str>,
    ) -> Self {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let key = |(i, name): (usize, &str)| match i {
            0 => "learning_rate".to_string(),
            _ => format!("learning_rate/{name}"),
        };
        let (held, peak) = (local.memory, local.peak_memory);
        Self {
            step: report.step,
            loss: report.loss,
            grad_norm: report.grad_norm,
            learning_rates: groups
                .enumerate()
                .map(key)
                .zip(report.learning_rates.iter().copied())
                .collect(),
            skipped: report.skipped.as_ref().map(SkipReason::to_string),
            num_micro_batches: report.num_micro_batches,
            weight: report.weight,
            num_unused: report.unused.len(),
            loss_scale: report.loss_scale,
            rank,
            forward_ms: ms(local.forward),
            backward_ms: ms(local.backward),
            exposed_communication_ms: ms(local.exposed_communication),
            optimizer_ms: ms(local.optimizer),
            total_ms: ms(local.total),
            reduction_ms: ms(local.reduction),
            hidden_share: local.hidden_share(),
            bytes_sent: local.bytes_sent,
            parameters_bytes: held.parameters,
            gradients_bytes: held.gradients,
            optimizer_bytes: held.optimizer,
            communication_bytes: held.communication,
            communication_peak_bytes: peak.communication,
            checkpoint_bytes: held.checkpoint,
            checkpoint_peak_bytes: peak.checkpoint,
        }
    }
}
