//! The divergence sentinel: replicas are compared, now and then, while training.

use crate::buffer::Buffer;
use crate::comm::{Collective, Communicator, Request};
use crate::error::{Error, Result};
use crate::hashing::Hashing;
use crate::param::Param;

/// Compares 64 bits of the SHA-256 of each parameter's values over the ranks. `order`: the positions in `params` that
/// ranks share.
///
/// # Errors
/// [`Error::Diverged`], the same one on every rank.
pub(crate) fn compare_replicas(
    params: &[Param],
    order: &[usize],
    step: u64,
    comm: &dyn Communicator,
) -> Result<()> {
    let (rank, n) = (comm.rank(), comm.world_size());
    let mut hashes = vec![0i64; n * order.len()];
    for (hash, &index) in hashes[rank * order.len()..].iter_mut().zip(order) {
        let param = &params[index];
        let mut digest = Hashing::only();
        param.write_le(0..param.num_elements(), &mut digest)?;
        let digest = digest.finish().1;
        let mut first = [0; 8];
        first.copy_from_slice(&digest[..8]);
        *hash = i64::from_le_bytes(first);
    }
    let request = Request::new(Collective::AllGather, "hashes of the parameters");
    let hashes = comm.start(request, Buffer::from_vec(hashes))?.wait()?;
    let hashes = hashes.as_slice::<i64>()?;
    for (i, &index) in order.iter().enumerate() {
        let of_rank = |r: usize| hashes[r * order.len() + i];
        if let Some(rank) = (1..n).find(|r| of_rank(*r) != of_rank(0)) {
            return Err(Error::Diverged {
                parameter: params[index].name().to_string(),
                rank,
                step,
            });
        }
    }
    Ok(())
}
