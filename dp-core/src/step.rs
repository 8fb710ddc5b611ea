//! The second half of a training step: from reduced gradients to new parameters.

use std::sync::Arc;

use crate::buffer::Buffer;
use crate::comm::{Collective, Request};
use crate::config::UnusedParameters;
use crate::engine::{Clipping, Engine};
use crate::error::{Error, Result};
use crate::non_finite::{self, NonFinite};
use crate::norm::{GradNorm, clip_factor, global_norm};
use crate::optim::Optimizer;
use crate::param::with_values_mut;
use crate::param::{Param, ParamKind};
use crate::replica::broadcast_values;
use crate::sentinel::compare_replicas;
use crate::strategy::Strategy;

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
    /// The learning rate of each parameter group, as it was applied: with the schedule's factor.
    pub learning_rates: Vec<f64>,
    /// The gradient norm before clipping, if [`Trainer::clip_grad_norm`](crate::Trainer::clip_grad_norm) was called.
    pub grad_norm: Option<f64>,
    /// Names of trained parameters that no rank used in the whole window. They were left alone: no update, no weight
    /// decay, no change of moments.
    pub unused: Vec<String>,
}

/// Why a step was skipped, on all ranks alike: parameters, optimizer state, step count and schedule are as before. Buffers
/// (batch-norm statistics), which the forward writes, become rank 0's as after any step.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum SkipReason {
    /// No rank had any sample: all weights were 0.
    NoSamples,
    /// A gradient was NaN or infinite, and the trainer skips such steps ([`NonFinite::SkipStep`]).
    NonFinite {
        /// The first such parameter in rank 0's creation order.
        parameter: String,
        /// The first rank that computed such a gradient of it; if each rank's was finite but their sum was not, the
        /// first rank that saw the sum.
        rank: usize,
    },
}

impl<O: Optimizer> Engine<O> {
    pub(crate) fn clip_grad_norm(&mut self, kind: GradNorm, max_norm: f64) -> Result<f64> {
        let outcome = self.clip(kind, max_norm);
        self.reducer.remember_failure(outcome)
    }

    pub(crate) fn step(&mut self) -> Result<StepReport> {
        let outcome = self.settle_and_update();
        self.reducer.remember_failure(outcome)
    }

    fn clip(&mut self, kind: GradNorm, max_norm: f64) -> Result<f64> {
        if !(max_norm.is_finite() && max_norm > 0.0) {
            return Err(Error::invalid(
                "max_norm",
                format!("{max_norm} is not finite and > 0"),
            ));
        }
        let num_micro_batches = self.require_complete_window("clip_grad_norm")?;
        if self.clipping.is_some() {
            return Err(Error::misuse(
                "clip_grad_norm",
                "the gradients are clipped already; call step",
            ));
        }
        let settings = self.agreement(num_micro_batches);
        let label = format!("{settings}, clipped to {kind:?} norm {max_norm}");
        self.reducer.settle(&label)?;
        let num_buckets = self.layout.buckets().len();
        let norm = self.reducer.with_strategy(|strategy| {
            let gradients: Vec<&[f32]> = (0..num_buckets)
                .map(|bucket| strategy.gradient(bucket))
                .collect::<Result<_>>()?;
            let comm = strategy.is_sharded().then_some(self.comm.as_ref());
            global_norm(kind, &gradients, comm)
        })?;
        self.clipping = Some(Clipping {
            norm,
            factor: clip_factor(norm, max_norm),
            agreed: settings,
        });
        Ok(norm)
    }

    fn settle_and_update(&mut self) -> Result<StepReport> {
        let num_micro_batches = self.require_complete_window("step")?;
        self.check_groups()?;
        let settings = self.agreement(num_micro_batches);
        let summary = self.reducer.settle(&settings)?;
        if self.clipping.as_ref().is_some_and(|c| c.agreed != settings) {
            // Changed since clip_grad_norm; on all ranks alike, or the label differs or a rank does not come.
            let label = format!("changed after clip_grad_norm to {settings}");
            let nothing = Buffer::from_vec::<u8>(Vec::new());
            self.comm
                .start(Request::new(Collective::Barrier, label), nothing)?
                .wait()?;
        }
        let unused = self.unused_names(&summary.used);
        let skipped = match summary.weight == 0.0 {
            true => Some(SkipReason::NoSamples),
            false => self.find_non_finite(&summary.used)?,
        };
        let factor = self.schedule.factor(self.steps);
        let optimizers = self.groups.groups().iter().map(|group| {
            let mut optimizer = group.optimizer.clone();
            optimizer.set_learning_rate(optimizer.learning_rate() * factor);
            optimizer
        });
        let optimizers: Vec<O> = optimizers.collect();
        if skipped.is_none() {
            self.handle_unused(&unused)?;
            self.update(&optimizers, &summary.used)?;
        }
        // Also after a skipped step: the forward has changed them.
        let buffers = self.buffers.iter().copied();
        broadcast_values(
            &self.params,
            buffers,
            self.comm.as_ref(),
            self.store.ledger(),
        )?;
        self.reducer.reset_window();
        self.forget_window();
        let report = StepReport {
            step: self.steps,
            skipped,
            num_micro_batches,
            weight: summary.weight,
            learning_rates: optimizers.iter().map(O::learning_rate).collect(),
            grad_norm: self.clipping.take().map(|c| c.norm),
            unused,
        };
        let every = self.compare_replicas_every;
        if report.skipped.is_none() && every > 0 && self.steps.is_multiple_of(every) {
            let same =
                |i: &usize| self.params[*i].kind() != ParamKind::Buffer || self.buffers.contains(i);
            let order: Vec<usize> = self.order.iter().copied().filter(same).collect();
            compare_replicas(&self.params, &order, self.steps, self.comm.as_ref())?;
        }
        Ok(report)
    }

    /// What all ranks must be about to do alike, in words: a difference is an error, and not a drift.
    fn agreement(&self, num_micro_batches: usize) -> String {
        format!(
            "{}step {} of {num_micro_batches} micro-batches, {}",
            self.layout.prefix(),
            self.steps + 1,
            self.settings()
        )
    }

    /// Hyper-parameters, groups and schedule, in words.
    pub(crate) fn settings(&self) -> String {
        let mut text = String::new();
        for group in self.groups.groups() {
            text += &format!("group {}", group.name());
            for (name, value) in group.optimizer.hyper_parameters() {
                text += &format!(" {name} {value}");
            }
            text += ", ";
        }
        text + &format!(
            "parameters in groups {:016x}, schedule {:?}",
            self.groups_digest, self.schedule
        )
    }

    /// Updates what this rank owns, and brings the results to all ranks.
    fn update(&mut self, optimizers: &[O], used: &[bool]) -> Result<()> {
        for (steps, used) in self.param_steps.iter_mut().zip(used) {
            *steps += u64::from(*used);
        }
        let reducer = Arc::clone(&self.reducer);
        reducer.with_strategy(|strategy| -> Result<()> {
            for bucket in 0..self.layout.buckets().len() {
                self.update_owned(strategy, bucket, optimizers, used)?;
            }
            strategy.publish(&self.layout, &self.params, self.comm.as_ref())
        })?;
        self.steps += 1;
        self.mark_update()
    }

    /// Updates the elements of `bucket` that this rank owns, in the parameters' own memory.
    fn update_owned(
        &mut self,
        strategy: &dyn Strategy,
        bucket: usize,
        optimizers: &[O],
        used: &[bool],
    ) -> Result<()> {
        let grad_scale = self.clipping.as_ref().map_or(1.0, |c| c.factor);
        let gradient = strategy.gradient(bucket)?;
        let mut states: Vec<&mut [f32]> = self.states[bucket]
            .iter_mut()
            .map(Buffer::as_mut_slice::<f32>)
            .collect::<Result<_>>()?;
        let owned = strategy.owned(bucket);
        for segment in self.layout.buckets()[bucket].segments(owned) {
            let index = segment.param_idx;
            if !used[index] {
                continue;
            }
            let optimizer = &optimizers[self.group_of[index]];
            let mut state: Vec<&mut [f32]> = states
                .iter_mut()
                .map(|s| &mut s[segment.in_owned.clone()])
                .collect();
            let grad = &gradient[segment.in_owned.clone()];
            with_values_mut::<f32, _>(self.params[index].tensor(), |values| {
                let values = &mut values[segment.in_param.clone()];
                optimizer.update(
                    self.param_steps[index],
                    values,
                    grad,
                    grad_scale,
                    &mut state,
                );
            })?;
        }
        Ok(())
    }

    /// Hyper-parameters may have been changed since the last step.
    pub(crate) fn check_groups(&self) -> Result<()> {
        self.groups.validate()?;
        let (needed, kept) = (
            self.groups.num_states(),
            self.states.first().map_or(usize::MAX, Vec::len),
        );
        if needed > kept {
            return Err(Error::invalid(
                "parameter groups",
                format!(
                    "{needed} numbers of optimizer state per element are needed now, but the trainer was created with \
                     {kept}; an optimizer that keeps no state (momentum 0) cannot be given one later"
                ),
            ));
        }
        Ok(())
    }

    /// Looks for gradients that are not finite, if the trainer skips such steps: in what this rank has computed, and in
    /// the reduced gradients that it owns.
    fn find_non_finite(&self, used: &[bool]) -> Result<Option<SkipReason>> {
        if self.non_finite == NonFinite::Keep {
            return Ok(None);
        }
        let mut reduced = vec![false; self.params.len()];
        self.reducer.with_strategy(|strategy| -> Result<()> {
            for (index, bucket) in self.layout.buckets().iter().enumerate() {
                let gradient = strategy.gradient(index)?;
                for segment in bucket.segments(strategy.owned(index)) {
                    let finite = gradient[segment.in_owned].iter().all(|g| g.is_finite());
                    reduced[segment.param_idx] |= !finite && used[segment.param_idx];
                }
            }
            Ok(())
        })?;
        // Even numbers: computed here; odd ones: seen only in the sum. The least one wins.
        let mine = self
            .order
            .iter()
            .enumerate()
            .find_map(|(position, &index)| {
                if self.reducer.was_not_finite(index) {
                    Some(2 * position)
                } else {
                    reduced[index].then_some(2 * position + 1)
                }
            });
        let first = non_finite::agree(mine, self.comm.as_ref())?;
        Ok(first.map(|(code, rank)| SkipReason::NonFinite {
            parameter: self.params[self.order[code / 2]].name().to_string(),
            rank,
        }))
    }

    /// Trained parameters that no rank has used, in rank 0's creation order.
    fn unused_names(&self, used: &[bool]) -> Vec<String> {
        let trained = |p: &Param| p.kind() == ParamKind::Trained && p.num_elements() > 0;
        let unused = |i: &&usize| !used[**i] && trained(&self.params[**i]);
        let names = self.order.iter().filter(unused);
        names.map(|i| self.params[*i].name().to_string()).collect()
    }

    fn handle_unused(&mut self, names: &[String]) -> Result<()> {
        if names.is_empty() {
            return Ok(());
        }
        let error = Error::NoGradient {
            names: names.to_vec(),
        };
        if self.unused_parameters == UnusedParameters::Error {
            return Err(error);
        }
        if !self.warned_unused && self.comm.rank() == 0 {
            self.warned_unused = true;
            tracing::warn!("{error}. They stay as they are. This is said once.");
        }
        Ok(())
    }
}
