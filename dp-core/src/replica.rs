//! Replicas: all ranks hold the same model, by name.

use std::cell::Cell;
use std::collections::HashMap;

use crate::buffer::Buffer;
use crate::comm::{Collective, Communicator, Request};
use crate::error::{Error, Result};
use crate::memory::Ledger;
use crate::param::{Param, ParamKind};
use crate::param_spec::ParamSpec;
use crate::precision::is_trainable;

/// Checks on every rank that all ranks' parameters agree, and returns the positions of `mine` in rank 0's order: the
/// one canonical order, also where models create their parameters in another order on each rank.
///
/// # Errors
/// [`Error::ReplicaMismatch`], the same one on every rank.
pub(crate) fn check_replicas(mine: &[ParamSpec], comm: &dyn Communicator) -> Result<Vec<usize>> {
    let all: Vec<Vec<ParamSpec>> = comm.all_gather_object(&mine, "parameter list")?;
    let by_name: Vec<HashMap<&str, &ParamSpec>> = all
        .iter()
        .map(|specs| specs.iter().map(|s| (s.name.as_str(), s)).collect())
        .collect();
    let reference = &all[0];
    // Parameter first, then rank: the answer is the same whichever rank computes it.
    for spec in reference {
        for (rank, specs) in by_name.iter().enumerate() {
            let other = specs.get(spec.name.as_str()).copied();
            if other != Some(spec) {
                let other = other.map_or("missing".to_string(), ParamSpec::describe);
                return Err(Error::ReplicaMismatch {
                    parameter: spec.name.clone(),
                    rank,
                    detail: format!("{other} there, {} on rank 0", spec.describe()),
                });
            }
        }
    }
    for (rank, specs) in all.iter().enumerate() {
        let extra = specs
            .iter()
            .find(|s| !by_name[0].contains_key(s.name.as_str()));
        if let Some(extra) = extra {
            return Err(Error::ReplicaMismatch {
                parameter: extra.name.clone(),
                rank,
                detail: format!("{} there, missing on rank 0", extra.describe()),
            });
        }
    }
    let positions: HashMap<&str, usize> = mine
        .iter()
        .zip(0..)
        .map(|(s, i)| (s.name.as_str(), i))
        .collect();
    Ok(reference
        .iter()
        .filter_map(|r| positions.get(r.name.as_str()).copied())
        .collect())
}

thread_local! {
    /// Trainers made by this thread, which is one rank's.
    static NUM_TRAINERS: Cell<u64> = const { Cell::new(0) };
}

/// Checks on every rank that all ranks' settings agree, and returns the trainer's number: how many rank 0 has made
/// before it.
///
/// # Errors
/// [`Error::InvalidArgument`] naming the first setting that differs, the same on every rank.
pub(crate) fn check_settings(
    mine: &[(&'static str, String)],
    comm: &dyn Communicator,
) -> Result<u64> {
    let number = NUM_TRAINERS.replace(NUM_TRAINERS.get() + 1);
    let all: Vec<(u64, Vec<(String, String)>)> =
        comm.all_gather_object(&(number, mine), "settings of the trainer")?;
    for (i, (name, _)) in mine.iter().enumerate() {
        let value = |rank: usize| all[rank].1.get(i).map(|(_, value)| value.as_str());
        if let Some(rank) = (1..all.len()).find(|r| value(*r) != value(0)) {
            let (theirs, first) = (
                value(rank).unwrap_or("missing"),
                value(0).unwrap_or("missing"),
            );
            let message =
                format!("{theirs} on rank {rank}, {first} on rank 0; all ranks need the same");
            return Err(Error::invalid(name, message));
        }
    }
    Ok(all[0].0)
}

/// Gives every rank the values that rank 0 holds, in `order`.
pub(crate) fn broadcast_values(
    params: &[Param],
    order: impl IntoIterator<Item = usize>,
    comm: &dyn Communicator,
    ledger: &Ledger,
) -> Result<()> {
    if comm.world_size() == 1 {
        return Ok(());
    }
    for param in order.into_iter().map(|i| &params[i]) {
        let label = format!("value of {}", param.name());
        let request = Request::new(Collective::Broadcast { root: 0 }, label);
        let buffer: Buffer = comm.start(request, param.to_buffer(ledger)?)?.wait()?;
        if comm.rank() != 0 {
            param.copy_from(0..param.num_elements(), &buffer, 0)?;
        }
    }
    Ok(())
}

/// Refuses what the trainers cannot train.
pub(crate) fn check_trainable(params: &[Param]) -> Result<()> {
    for param in params.iter().filter(|p| p.kind() == ParamKind::Trained) {
        let tensor = param.tensor();
        let device = tensor.device();
        if !is_trainable(tensor.dtype()) || !(device.is_cpu() || device.is_cuda()) {
            return Err(Error::UnsupportedDType {
                what: format!(
                    "training parameter `{}` on {:?}",
                    param.name(),
                    tensor.device().location()
                ),
                dtype: tensor.dtype().as_str(),
                supported: "f32, f16 or bf16, on the CPU and on CUDA",
            });
        }
    }
    Ok(())
}
