//! Loading: checked on all ranks before anything is changed, then each rank reads what it owns.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::agree::{agree, rank_0};
use super::folder::{self, MANIFEST};
use super::manifest::{DataPosition, Manifest, ParamRecord};
use super::options::{HyperParameters, LoadOptions};
use super::read::read_manifest;
use super::shards::{Shards, Wanted};
use super::{CheckpointProblem as Problem, VALUE, problem};
use crate::buffer::with_element;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::masters::{MASTER, take_value};
use crate::optim::{LrSchedule, Optimizer};
use crate::param::ParamKind;
use crate::param_spec::ParamSpec;
use crate::replica::broadcast_values;
use crate::trace::phase;

/// What a load has found, apart from what went into the trainer.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LoadedCheckpoint {
    /// The checkpoint's folder.
    pub folder: PathBuf,
    /// Optimizer steps taken.
    pub step: u64,
    /// The number of ranks that saved it.
    pub world_size: usize,
    /// Where the run stood in its data.
    pub data: DataPosition,
    /// Parameters of the model that it did not have; see [`LoadOptions::with_new_params`].
    pub new_params: Vec<String>,
    /// Parameters in it that the model does not have; see [`LoadOptions::with_dropped_params`].
    pub dropped_params: Vec<String>,
    rank_state: Option<Value>,
}

impl LoadedCheckpoint {
    /// What this rank gave to [`SaveOptions::with_rank_state`](super::SaveOptions::with_rank_state). `None` if it gave
    /// nothing, or if another number of ranks saved: then there is no rank whose random generators could be
    /// continued.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] if it is not a `T`.
    pub fn rank_state<T: DeserializeOwned>(&self) -> Result<Option<T>> {
        let Some(state) = self.rank_state.clone() else {
            return Ok(None);
        };
        let state = serde_json::from_value(state);
        state.map(Some).map_err(|e| {
            problem(
                &self.folder.join(MANIFEST),
                Problem::Model,
                format!("rank_state: {e}"),
            )
        })
    }
}

/// A checkpoint that has passed all checks.
struct Checked<O> {
    /// The optimizers of the groups, if those of the checkpoint shall replace the trainer's.
    optimizers: Option<Vec<O>>,
    manifest: Manifest,
    shards: Shards,
    new_params: Vec<String>,
    dropped_params: Vec<String>,
}

impl<O: Optimizer> Engine<O> {
    /// The latest checkpoint of a run, if there is any.
    pub(crate) fn load_latest(
        &mut self,
        run: &Path,
        options: &LoadOptions,
    ) -> Result<Option<LoadedCheckpoint>> {
        let is_new = || folder::find(run).map(|found| found.is_none());
        match rank_0(self.comm.as_ref(), "load_latest", run, is_new)? {
            true => Ok(None),
            false => self.load(run, options).map(Some),
        }
    }

    pub(crate) fn load(&mut self, path: &Path, options: &LoadOptions) -> Result<LoadedCheckpoint> {
        let span = phase!("load", self.comm.rank(), self.steps);
        self.require_window_for_load()?;
        // Rank 0 decides which checkpoint it is, so that all ranks load the same.
        let (name, text): (Option<String>, String) =
            rank_0(self.comm.as_ref(), "load: manifest", path, || {
                let folder = folder::resolve(path)?;
                let text = read_manifest(&folder)?;
                let name = (folder != path).then(|| {
                    folder
                        .file_name()
                        .unwrap_or_default()
                        .to_string_lossy()
                        .into_owned()
                });
                Ok((name, text))
            })?;
        let folder = name.map_or(path.to_path_buf(), |name| path.join(name));
        let checked = self.check(&folder, &text, options);
        let (checked, outcome) = match checked {
            Ok(checked) => (Some(checked), Ok(())),
            Err(e) => (None, Err(e)),
        };
        agree(self.comm.as_ref(), "load: check", path, outcome)?;
        let Some(checked) = checked else {
            return Err(problem(&folder, Problem::Io, "not checked"));
        };
        // From here on a failure leaves a mixture, which must not be trained.
        self.begin_load();
        let applied = self.apply(&checked);
        agree(self.comm.as_ref(), "load: read", path, applied)?;
        self.reducer.with_strategy(|strategy| {
            for bucket in 0..self.layout.buckets().len() {
                strategy.publish(bucket, &self.layout, &self.params, self.comm.as_ref())?;
            }
            strategy.finish_publishing(&self.layout, &self.params)
        })?;
        let fixed = |i: &usize| self.params[*i].kind() != ParamKind::Trained;
        let fixed = self.order.iter().copied().filter(fixed);
        broadcast_values(&self.params, fixed, self.comm.as_ref(), self.store.ledger())?;
        self.end_load()?;
        drop(span);
        self.clock.forget(self.steps + 1);
        let Checked {
            manifest,
            new_params,
            dropped_params,
            ..
        } = checked;
        let same_ranks = manifest.world_size == self.comm.world_size();
        let rank_state = manifest
            .ranks
            .into_iter()
            .nth(self.comm.rank())
            .map(|r| r.rank_state);
        Ok(LoadedCheckpoint {
            folder,
            step: manifest.step,
            world_size: manifest.world_size,
            data: manifest.data,
            new_params,
            dropped_params,
            rank_state: rank_state.filter(|state| same_ranks && !state.is_null()),
        })
    }

    /// Everything that can be known before anything is changed.
    fn check(&self, folder: &Path, text: &str, options: &LoadOptions) -> Result<Checked<O>> {
        let path = folder.join(MANIFEST);
        let manifest = Manifest::parse(text, &path)?;
        let (new_params, dropped_params) = self.check_model(&manifest, &path, options)?;
        self.check_states(&manifest, &path)?;
        let mut optimizers = None;
        match options.hyper_parameters {
            HyperParameters::MustMatch => self.check_hyper_parameters(&manifest, &path)?,
            HyperParameters::Saved => optimizers = Some(self.saved_optimizers(&manifest, &path)?),
            HyperParameters::Current => {}
        }
        let shards = Shards::open(folder, &manifest, &self.wanted())?;
        shards.verify(&manifest, self.comm.rank(), self.comm.world_size())?;
        Ok(Checked {
            optimizers,
            manifest,
            shards,
            new_params,
            dropped_params,
        })
    }

    fn check_model(
        &self,
        manifest: &Manifest,
        path: &Path,
        options: &LoadOptions,
    ) -> Result<(Vec<String>, Vec<String>)> {
        let wrong = |message: String| Err(problem(path, Problem::Model, message));
        let saved = by_name(manifest);
        let (mut new, mut dropped) = (Vec::new(), Vec::new());
        for &i in &self.order {
            let own = ParamSpec::from(&self.params[i]);
            match saved.get(own.name.as_str()) {
                Some(record) if record.is_of(&own) => {}
                Some(record) => {
                    let (theirs, own_text) = (record.describe(), own.describe());
                    let hint = match record.dtype == own.dtype.as_str() {
                        true => "",
                        false => {
                            "; export_safetensors and import_safetensors carry weights alone over to another dtype"
                        }
                    };
                    return wrong(format!(
                        "parameter `{}` is {theirs} there, but {own_text} in the model{hint}",
                        own.name
                    ));
                }
                None if options.allows_new(&own.name) => new.push(own.name),
                None => {
                    let message = format!(
                        "parameter `{}` of the model is not there; LoadOptions::with_new_params lets it keep its value",
                        own.name
                    );
                    return wrong(message);
                }
            }
        }
        let own: HashSet<&str> = self.params.iter().map(|p| p.name()).collect();
        for record in manifest
            .parameters
            .iter()
            .filter(|r| !own.contains(r.name.as_str()))
        {
            if !options.allows_dropped(&record.name) {
                let message = format!(
                    "parameter `{}` is not in the model; LoadOptions::with_dropped_params leaves it out",
                    record.name
                );
                return wrong(message);
            }
            dropped.push(record.name.clone());
        }
        Ok((new, dropped))
    }

    fn check_hyper_parameters(&self, manifest: &Manifest, path: &Path) -> Result<()> {
        let differs = |what: String, here: String, there: String| {
            let message = format!(
                "{what} is {here} in the trainer, but {there} in the checkpoint; LoadOptions::with_hyper_parameters takes \
                 the saved ones or keeps the current ones"
            );
            Err(problem(path, Problem::HyperParameters, message))
        };
        let own = self.groups.groups();
        let names = |names: Vec<&str>| names.join(", ");
        let (here, there) = (
            names(own.iter().map(|g| g.name()).collect()),
            names(manifest.groups.iter().map(|g| g.name.as_str()).collect()),
        );
        if here != there || own.len() != manifest.groups.len() {
            return differs("the list of parameter groups".to_string(), here, there);
        }
        for (group, saved) in own.iter().zip(&manifest.groups) {
            for (name, value) in group.optimizer.hyper_parameters() {
                let there = saved.hyper_parameters.get(name).copied();
                if there.map(f64::to_bits) != Some(value.to_bits()) {
                    let there = there.map_or("missing".to_string(), |v| v.to_string());
                    return differs(
                        format!("`{name}` of parameter group `{}`", group.name()),
                        value.to_string(),
                        there,
                    );
                }
            }
        }
        if self.schedule != manifest.schedule {
            let text = |s: &LrSchedule| format!("{s:?}");
            return differs(
                "the learning-rate schedule".to_string(),
                text(&self.schedule),
                text(&manifest.schedule),
            );
        }
        Ok(())
    }

    /// Optimizers, and the groups of parameters, which no option makes fit.
    fn check_states(&self, manifest: &Manifest, path: &Path) -> Result<()> {
        let wrong = |message: String| Err(problem(path, Problem::HyperParameters, message));
        let saved = by_name(manifest);
        for (i, param) in self.params.iter().enumerate() {
            let record = saved.get(param.name()).and_then(|r| Some((r, r.group?)));
            let Some((_, saved_group)) = record else {
                continue;
            };
            let (own, theirs) = (
                &self.groups.groups()[self.group_of[i]],
                &manifest.groups[saved_group],
            );
            let (name, kind) = (param.name(), own.optimizer.name());
            if own.name() != theirs.name {
                return wrong(format!(
                    "parameter `{name}` is in group `{}`, but in `{}` there",
                    own.name(),
                    theirs.name
                ));
            }
            if kind != theirs.optimizer {
                return wrong(format!(
                    "the optimizer of group `{}` is {kind}, but {} there",
                    own.name(),
                    theirs.optimizer
                ));
            }
            if own.optimizer.state_names() != theirs.states {
                return wrong(format!(
                    "the optimizer of group `{}` keeps {:?} per element, but {:?} there",
                    own.name(),
                    own.optimizer.state_names(),
                    theirs.states
                ));
            }
        }
        Ok(())
    }

    /// The trainer's optimizers with the checkpoint's hyper-parameters.
    fn saved_optimizers(&self, manifest: &Manifest, path: &Path) -> Result<Vec<O>> {
        let wrong = |e: Error| problem(path, Problem::HyperParameters, e);
        manifest.schedule.validate().map_err(wrong)?;
        let mut optimizers = Vec::new();
        for group in self.groups.groups() {
            let name = group.name();
            let Some(saved) = manifest.groups.iter().find(|g| g.name == name) else {
                return Err(wrong(Error::invalid(
                    "parameter groups",
                    format!("group `{name}` is not there"),
                )));
            };
            let mut optimizer = group.optimizer.clone();
            for (name, value) in &saved.hyper_parameters {
                optimizer.set_hyper_parameter(name, *value).map_err(wrong)?;
            }
            optimizer.validate().map_err(wrong)?;
            optimizers.push(optimizer);
        }
        Ok(optimizers)
    }

    /// What this rank reads: what it owns, and on rank 0 what is not trained.
    fn wanted(&self) -> Wanted {
        let mut ranges: HashMap<String, Vec<Range<usize>>> = HashMap::new();
        for (bucket, owned) in self.layout.buckets().iter().zip(&self.owned) {
            for segment in bucket.segments(owned.clone()) {
                let name = self.params[segment.param_idx].name().to_string();
                ranges.entry(name).or_default().push(segment.in_param);
            }
        }
        if self.comm.rank() == 0 {
            for param in self
                .params
                .iter()
                .filter(|p| p.kind() != ParamKind::Trained)
            {
                ranges
                    .entry(param.name().to_string())
                    .or_default()
                    .push(0..param.num_elements());
            }
        }
        Wanted::Ranges(ranges)
    }

    /// Reads what this rank owns.
    fn apply(&mut self, checked: &Checked<O>) -> Result<()> {
        let Checked {
            manifest, shards, ..
        } = checked;
        if let Some(optimizers) = &checked.optimizers {
            for (group, saved) in self.groups.groups_mut().iter_mut().zip(optimizers) {
                group.optimizer = saved.clone();
            }
            self.schedule = manifest.schedule;
        }
        let saved = by_name(manifest);
        let records: Vec<Option<&ParamRecord>> = self
            .params
            .iter()
            .map(|p| saved.get(p.name()).copied())
            .collect();
        self.steps = manifest.step;
        self.loss_scale.resume(manifest.loss_scale);
        for (updates, record) in self.param_steps.iter_mut().zip(&records) {
            *updates = record.map_or(0, |r| r.updates);
        }
        for (index, bucket) in self.layout.buckets().iter().enumerate() {
            for segment in bucket.segments(self.owned[index].clone()) {
                let param = &self.params[segment.param_idx];
                let saved = records[segment.param_idx].is_some();
                if saved {
                    let (name, range) = (param.name(), segment.in_param.clone());
                    with_element!(param.tensor().dtype(), T => {
                        param.write_with::<T>(range.clone(), |at, values| {
                            shards.read(name, VALUE, within(&range, at), values)
                        })?
                    });
                }
                let (range, owned) = (&segment.in_param, &segment.in_owned);
                if let Some(masters) = self.masters.of_mut(index) {
                    match saved {
                        true => masters.write_with::<f32>(owned.clone(), |at, masters| {
                            shards.read(param.name(), MASTER, within(range, at), masters)
                        })?,
                        false => take_value(param, range.clone(), masters, owned.clone())?,
                    }
                }
                let names = self.groups.groups()[self.group_of[segment.param_idx]]
                    .optimizer
                    .state_names();
                for (i, state) in self.states[index].iter_mut().enumerate() {
                    match names.get(i) {
                        Some(name) if saved => {
                            state.write_with::<f32>(owned.clone(), |at, numbers| {
                                shards.read(param.name(), name, within(range, at), numbers)
                            })?
                        }
                        _ => state.fill_zero(owned.clone())?,
                    }
                }
            }
        }
        // The others get them from rank 0.
        if self.comm.rank() == 0 {
            for (param, _) in self
                .params
                .iter()
                .zip(&records)
                .filter(|(p, r)| p.kind() != ParamKind::Trained && r.is_some())
            {
                let len = param.num_elements();
                with_element!(param.tensor().dtype(), T => {
                    param.write_with::<T>(0..len, |at, values| {
                        shards.read(param.name(), VALUE, at, values)
                    })?
                });
            }
        }
        Ok(())
    }
}

/// The part `at` of a range.
fn within(range: &Range<usize>, at: Range<usize>) -> Range<usize> {
    range.start + at.start..range.start + at.end
}

fn by_name(manifest: &Manifest) -> HashMap<&str, &ParamRecord> {
    manifest
        .parameters
        .iter()
        .map(|p| (p.name.as_str(), p))
        .collect()
}
