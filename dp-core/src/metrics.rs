//! Averages over all ranks, exact whatever each rank holds.

use crate::buffer::Buffer;
use crate::comm::{Collective, Communicator, ReduceOp, Request};
use crate::error::{Error, Result};

/// `sum over ranks of sum / sum over ranks of weight`: the mean of a quantity of which each rank has a part, e.g. the
/// summed loss and the number of samples. A rank without samples passes `(0.0, 0.0)`. Summed in f64, the same bits on
/// every rank.
///
/// # Errors
/// [`Error::InvalidArgument`] on every rank if the weights add up to zero; those of the collectives.
pub fn weighted_mean(comm: &dyn Communicator, sum: f64, weight: f64) -> Result<f64> {
    let request = Request::new(Collective::AllReduce(ReduceOp::Sum), "weighted mean");
    let total = comm
        .start(request, Buffer::from_vec(vec![sum, weight]))?
        .wait()?;
    let total = total.as_slice::<f64>()?;
    if total[1] == 0.0 {
        return Err(Error::invalid(
            "weight",
            "the weights of all ranks add up to zero: there is nothing to average",
        ));
    }
    Ok(total[0] / total[1])
}

/// The greatest of all ranks' numbers, e.g. of batches: so that ranks with fewer of them join the others to the end, with
/// [`Loss::Nothing`](crate::Loss::Nothing).
///
/// # Errors
/// Those of the collectives.
pub fn max_over_ranks(comm: &dyn Communicator, number: usize) -> Result<usize> {
    let request = Request::new(Collective::AllReduce(ReduceOp::Max), "greatest number");
    let greatest = comm
        .start(request, Buffer::from_vec(vec![number as i64]))?
        .wait()?;
    Ok(greatest.as_slice::<i64>()?[0] as usize)
}
