//! The second half of a training step: from reduced gradients to new parameters.

#[cfg(feature = "cuda")]
mod cuda;

use std::ops::Range;
use std::sync::{Arc, LazyLock};

use smallvec::SmallVec;

use crate::agreement::Agreement;
use crate::buffer::Buffer;
use crate::comm::{Collective, Request};
use crate::config::UnusedParameters;
use crate::engine::{Clipping, Engine};
use crate::error::{Error, Result};
use crate::mean_gradient::MeanGradient;
use crate::non_finite::first_over_ranks;
use crate::norm::{ForEachPart, GradNorm, clip_factor, global_norm};
use crate::optim::Optimizer;
use crate::param::with_values_mut;
use crate::param::{Param, ParamKind};
use crate::precision::{narrow, with_trainable};
use crate::replica::broadcast_values;
use crate::report::{SkipReason, StepReport};
use crate::sentinel::compare_replicas;
use crate::strategy::Strategy;
use crate::summary::Summary;
use crate::trace::phase;

static NON_FINITE: LazyLock<Arc<str>> =
    LazyLock::new(|| "parameters with non-finite gradients".into());

impl<O: Optimizer> Engine<O> {
    pub(crate) fn clip_grad_norm(&mut self, kind: GradNorm, max_norm: f64) -> Result<f64> {
        let begin = self.clock.now();
        let outcome = self.clip(kind, max_norm);
        self.clock.end_optimizer(begin);
        self.reducer.remember_failure(outcome)
    }

    pub(crate) fn step(&mut self) -> Result<StepReport> {
        let begin = self.clock.now();
        let outcome = self.settle_and_update();
        self.clock.end_optimizer(begin);
        let report = self.reducer.remember_failure(outcome)?;
        let (sent, ledger) = (self.comm.traffic().bytes_sent(), self.store.ledger());
        let reductions = self.reducer.take_reductions();
        self.clock
            .end_step(self.steps + 1, reductions, sent, ledger);
        Ok(report)
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
        let agreement = self.agreement(num_micro_batches);
        let (settings, label) = (agreement.text(), agreement.clipped(kind, max_norm));
        let summary = self.settle(label)?;
        let _span = phase!("clip", self.comm.rank(), self.steps + 1);
        let divisor = self.divisor(&summary);
        let num_buckets = self.layout.buckets().len();
        let norm = self.reducer.with_strategy(|strategy| {
            let strategy: &dyn Strategy = strategy;
            let comm = strategy.is_sharded().then_some(self.comm.as_ref());
            let parts: ForEachPart<'_> = &|f| {
                let mut buckets = 0..num_buckets;
                buckets.try_for_each(|b| f(&MeanGradient::of(strategy, b, divisor)?))
            };
            global_norm(kind, parts, comm, &mut self.scratch.norm)
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
        let settings = self.agreement(num_micro_batches).text();
        let summary = self.settle(Arc::clone(&settings))?;
        let divisor = self.divisor(&summary);
        if self
            .clipping
            .as_ref()
            .is_some_and(|c| *c.agreed != *settings)
        {
            // Changed since clip_grad_norm; on all ranks alike, or the label differs or a rank does not come.
            let label = format!("changed after clip_grad_norm to {settings}");
            let nothing = Buffer::from_vec::<u8>(Vec::new());
            self.comm
                .start(Request::new(Collective::Barrier, label), nothing)?
                .wait()?;
        }
        if self.clipping.is_some() {
            // The summary is that of `clip_grad_norm`.
            self.check_masters_on_all_ranks()?;
        }
        let unused = self.unused_names(&summary.used);
        let skipped = match summary.weight == 0.0 {
            true => Some(SkipReason::NoSamples),
            false => self.find_non_finite(&summary.used, divisor)?,
        };
        let factor = self.schedule.factor(self.steps);
        let scheduled = self.groups.groups().iter().map(|group| {
            let mut optimizer = group.optimizer.clone();
            optimizer.set_learning_rate(optimizer.learning_rate() * factor);
            optimizer
        });
        let mut optimizers = std::mem::take(&mut self.scratch.optimizers);
        optimizers.clear();
        optimizers.extend(scheduled);
        if skipped.is_none() {
            self.handle_unused(&unused)?;
            self.update(&optimizers, &summary.used, divisor)?;
        }
        let loss_scale = self.loss_scale.state.map(|s| s.scale);
        if summary.weight != 0.0 {
            self.loss_scale.update(skipped.is_some());
        }
        // Also after a skipped step: the forward has changed them.
        if !self.buffers.is_empty() {
            // The step is counted by now, unless it was skipped.
            let step = self.steps + u64::from(skipped.is_some());
            let _span = phase!("broadcast_buffers", self.comm.rank(), step);
            let buffers = self.buffers.iter().copied();
            broadcast_values(
                &self.params,
                buffers,
                self.comm.as_ref(),
                self.store.ledger(),
            )?;
        }
        self.reducer.reset_window()?;
        self.forget_window();
        let report = StepReport {
            step: self.steps,
            skipped,
            num_micro_batches,
            weight: summary.weight,
            loss: match self.reports_loss && summary.weight != 0.0 {
                true => Some(summary.loss / summary.weight),
                false => None,
            },
            learning_rates: self.learning_rates(&optimizers),
            grad_norm: self.clipping.take().map(|c| c.norm),
            unused,
            loss_scale,
        };
        self.scratch.optimizers = optimizers;
        let every = self.compare_replicas_every;
        if report.skipped.is_none() && every > 0 && self.steps.is_multiple_of(every) {
            let same =
                |i: &usize| self.params[*i].kind() != ParamKind::Buffer || self.buffers.contains(i);
            let order: Vec<usize> = self.order.iter().copied().filter(same).collect();
            compare_replicas(&self.params, &order, self.steps, self.comm.as_ref())?;
        }
        Ok(report)
    }

    /// What all ranks must be about to do alike in this step.
    fn agreement(&mut self, num_micro_batches: usize) -> &mut Agreement<O> {
        let (groups, schedule) = (self.groups.groups(), self.schedule);
        let last = self.agreement.take();
        let agreement = match last.filter(|a| a.holds(groups, schedule, num_micro_batches)) {
            Some(agreement) => agreement,
            None => Agreement::new(groups, schedule, num_micro_batches, || {
                let (prefix, settings) = (self.layout.prefix(), self.settings());
                format!("{prefix}{num_micro_batches} micro-batches, {settings}")
            }),
        };
        self.agreement.insert(agreement)
    }

    /// In the memory of the last report's, if that is gone.
    fn learning_rates(&mut self, optimizers: &[O]) -> Arc<[f64]> {
        let rates = optimizers.iter().map(O::learning_rate);
        match Arc::get_mut(&mut self.scratch.learning_rates) {
            Some(last) if last.len() == optimizers.len() => {
                last.iter_mut()
                    .zip(rates)
                    .for_each(|(last, rate)| *last = rate);
            }
            _ => self.scratch.learning_rates = rates.collect(),
        }
        Arc::clone(&self.scratch.learning_rates)
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
    fn update(&mut self, optimizers: &[O], used: &[bool], divisor: f32) -> Result<()> {
        for (steps, used) in self.param_steps.iter_mut().zip(used) {
            *steps += u64::from(*used);
        }
        let reducer = Arc::clone(&self.reducer);
        let (rank, step) = (self.comm.rank(), self.steps + 1);
        reducer.with_strategy(|strategy| -> Result<()> {
            let span = phase!("optimizer", rank, step);
            for bucket in 0..self.layout.buckets().len() {
                self.update_owned(strategy, bucket, optimizers, used, divisor)?;
                // While the updated values are in the cache.
                strategy.publish(bucket, &self.layout, &self.params, self.comm.as_ref())?;
            }
            drop(span);
            let _span = strategy.is_sharded().then(|| phase!("gather", rank, step));
            strategy.finish_publishing(&self.layout, &self.params)
        })?;
        self.steps += 1;
        self.mark_update()
    }

    /// Updates the elements of `bucket` that this rank owns, in the parameters' own memory. One pass: each chunk is divided,
    /// clipped, applied, and rounded to the parameter while it is in the cache.
    fn update_owned(
        &mut self,
        strategy: &dyn Strategy,
        bucket: usize,
        optimizers: &[O],
        used: &[bool],
        divisor: f32,
    ) -> Result<()> {
        #[cfg(feature = "cuda")]
        if self.store.device().is_cuda() {
            return self.update_owned_on_cuda(strategy, bucket, optimizers, used, divisor);
        }
        let grad_scale = self.clipping.as_ref().map_or(1.0, |c| c.factor);
        let gradient = MeanGradient::of(strategy, bucket, divisor)?;
        let mut states: SmallVec<[&mut [f32]; 4]> = self.states[bucket]
            .iter_mut()
            .map(Buffer::as_mut_slice::<f32>)
            .collect::<Result<_>>()?;
        let masters = self.masters.of_mut(bucket);
        let mut masters = masters.map(Buffer::as_mut_slice::<f32>).transpose()?;
        let owned = self.owned[bucket].clone();
        let bucket = &self.layout.buckets()[bucket];
        for segment in bucket.segments(owned) {
            let index = segment.param_idx;
            if !used[index] {
                continue;
            }
            let (optimizer, step) = (&optimizers[self.group_of[index]], self.param_steps[index]);
            // `at`: the chunk's place in the owned range.
            let mut update = |at: Range<usize>, values: &mut [f32], grad: &[f32]| {
                let mut state: SmallVec<[&mut [f32]; 4]> =
                    states.iter_mut().map(|s| &mut s[at.clone()]).collect();
                optimizer.update(step, values, grad, grad_scale, &mut state);
            };
            let (in_param, in_owned) = (segment.in_param, segment.in_owned);
            let tensor = self.params[index].tensor();
            match &mut masters {
                None => with_values_mut::<f32, _>(tensor, |values| {
                    let values = &mut values[in_param];
                    gradient.for_each_chunk(in_owned.clone(), |at, grad| {
                        let chunk = at.start - in_owned.start..at.end - in_owned.start;
                        update(at, &mut values[chunk], grad);
                    })
                })??,
                Some(masters) => with_trainable!(bucket.dtype, T => {
                    with_values_mut(tensor, |values: &mut [T]| {
                        let values = &mut values[in_param];
                        gradient.for_each_chunk(in_owned.clone(), |at, grad| {
                            let chunk = at.start - in_owned.start..at.end - in_owned.start;
                            let masters = &mut masters[at.clone()];
                            update(at, masters, grad);
                            narrow(masters, &mut values[chunk]);
                        })
                    })?
                })?,
            }
        }
        Ok(())
    }

    /// What is left to divide reduced gradients by. Each reduction has divided the sum over ranks by N, in its accumulator; the
    /// weights are known only now. For one micro-batch of weight 1 on each rank, without loss scaling, it is 1.
    fn divisor(&self, summary: &Summary) -> f32 {
        let rest = summary.weight / self.comm.world_size() as f64 * self.loss_scale.scale();
        match rest == 0.0 {
            true => 1.0,
            false => rest as f32,
        }
    }

    /// Waits for the reductions, and hears from all ranks, unless `clip_grad_norm` has done so.
    fn settle(&self, agreement: Arc<str>) -> Result<Arc<Summary>> {
        let (layout, params, owned) = (&self.layout, &self.params, &self.owned);
        self.reducer.settle(agreement, self.steps + 1, |altered| {
            self.masters.find_altered(layout, params, owned, altered)
        })
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
    fn find_non_finite(&mut self, used: &[bool], divisor: f32) -> Result<Option<SkipReason>> {
        if !self.skips_non_finite {
            return Ok(None);
        }
        let reduced = &mut self.scratch.flags;
        reduced.clear()?;
        self.reducer.with_strategy(|strategy| -> Result<()> {
            for (index, bucket) in self.layout.buckets().iter().enumerate() {
                let gradient = MeanGradient::of(strategy, index, divisor)?;
                for segment in bucket.segments(self.owned[index].clone()) {
                    if used[segment.param_idx] {
                        gradient.find_non_finite(segment.in_owned, reduced, segment.param_idx)?;
                    }
                }
            }
            Ok(())
        })?;
        // Even numbers: computed here; odd ones: seen only in the sum. The least one wins.
        let (reduced, order) = (reduced.read()?, &self.order);
        let mine = self.reducer.with_not_finite(|computed| {
            let mut positions = order.iter().enumerate();
            positions.find_map(|(position, &index)| match computed[index] {
                true => Some(2 * position),
                false => reduced[index].then_some(2 * position + 1),
            })
        })?;
        let buffer = &mut self.scratch.first_of_rank;
        let first = first_over_ranks(mine, &NON_FINITE, self.comm.as_ref(), buffer)?;
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
