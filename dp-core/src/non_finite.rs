//! Finding NaN and infinity in gradients, so that all ranks skip the step together.

use std::sync::Arc;

use crate::buffer::Buffer;
use crate::comm::{Collective, Communicator, Request};
use crate::error::Result;

/// What to do about gradients that are NaN or infinite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[non_exhaustive]
pub enum NonFinite {
    /// Nothing: they reach the parameters, alike on all ranks, as in PyTorch.
    #[default]
    Keep,
    /// All ranks skip the step: parameters, optimizer state, step count and schedule stay as they are. The report names
    /// the parameter. Costs a pass over the gradients and one small all-gather per step.
    SkipStep,
}

/// Agrees over all ranks on the first parameter that some rank has found something about, and on the first rank that has.
/// `mine`: a position in the order that ranks share. `reused`: the buffer of an earlier call.
pub(crate) fn first_over_ranks(
    mine: Option<usize>,
    label: &Arc<str>,
    comm: &dyn Communicator,
    reused: &mut Option<Buffer>,
) -> Result<Option<(usize, usize)>> {
    let (rank, n) = (comm.rank(), comm.world_size());
    let mut found = match reused.take() {
        Some(buffer) => buffer,
        None => Buffer::from_vec(vec![0i64; n]),
    };
    found.as_mut_slice()?[rank] = mine.map_or(-1, |position| position as i64);
    let request = Request::new(Collective::AllGather, Arc::clone(label));
    let found = reused.insert(comm.start(request, found)?.wait()?);
    let ranks = found.as_slice::<i64>()?.iter().enumerate();
    let first = ranks.filter(|(_, p)| **p >= 0).min_by_key(|(_, p)| **p);
    Ok(first.map(|(rank, position)| (*position as usize, rank)))
}
