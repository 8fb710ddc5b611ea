//! Which samples each rank sees: `torch.utils.data.DistributedSampler`.

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

use crate::error::{Error, Result};

/// What happens when the number of samples is no multiple of the world size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
#[non_exhaustive]
pub enum Remainder {
    /// Repeat samples from the start of the order, so that all ranks have equally many: for training (PyTorch's
    /// default).
    #[default]
    Pad,
    /// Leave the tail of the order out this epoch (`drop_last=True` in PyTorch).
    Drop,
    /// Every sample once; some ranks have one more: for exact evaluation. Combine the ranks' results with
    /// [`weighted_mean`](crate::weighted_mean).
    Keep,
}

/// Deals the indices `0..len` of a dataset to the ranks, a new order each epoch.
///
/// The order is the identity, or with [`with_shuffle`](Self::with_shuffle) a permutation that depends on seed and epoch
/// only; it is made a multiple of the world size as [`Remainder`] says, and rank `r` takes elements `r, r + N,
/// r + 2N, ...` of it.
///
/// ```
/// use dp_core::{DistributedSampler, Remainder};
///
/// # fn main() -> dp_core::Result<()> {
/// let sampler = DistributedSampler::new(5, 2, 1)?; // 5 samples, 2 ranks, this is rank 1
/// assert_eq!(sampler.indices(0), [1, 3, 0]); // padded with sample 0
/// assert_eq!(sampler.with_remainder(Remainder::Keep).indices(0), [1, 3]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct DistributedSampler {
    len: usize,
    world_size: usize,
    rank: usize,
    shuffle: Option<u64>,
    remainder: Remainder,
}

impl DistributedSampler {
    /// Samples in order, padded.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an empty dataset, or a rank that is not below `world_size`.
    pub fn new(len: usize, world_size: usize, rank: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::invalid("dataset", "it has no samples"));
        }
        if rank >= world_size {
            return Err(Error::invalid(
                "rank",
                format!("{rank} is not below the world size {world_size}"),
            ));
        }
        Ok(Self {
            len,
            world_size,
            rank,
            shuffle: None,
            remainder: Remainder::default(),
        })
    }

    /// Shuffles with `seed`, which must be the same on all ranks.
    #[must_use]
    pub fn with_shuffle(mut self, seed: u64) -> Self {
        self.shuffle = Some(seed);
        self
    }

    /// What to do with a remainder.
    #[must_use]
    pub fn with_remainder(mut self, remainder: Remainder) -> Self {
        self.remainder = remainder;
        self
    }

    /// Number of samples of this rank per epoch; the same on all ranks unless [`Remainder::Keep`].
    pub fn num_samples(&self) -> usize {
        self.share(self.len)
    }

    /// How many of `len` samples this rank gets.
    fn share(&self, len: usize) -> usize {
        match self.remainder {
            Remainder::Pad => len.div_ceil(self.world_size),
            Remainder::Drop => len / self.world_size,
            Remainder::Keep => (len + self.world_size - 1 - self.rank) / self.world_size,
        }
    }

    /// This rank's samples in `epoch` (`set_epoch` in PyTorch), in order.
    pub fn indices(&self, epoch: u64) -> Vec<usize> {
        self.indices_after(epoch, 0)
    }

    /// [`indices`](Self::indices) after all ranks together have used the first `consumed` of the epoch's samples: how a
    /// resumed run goes on, also on another number of ranks. The rest of the order is dealt as a whole epoch is; it is
    /// empty when the epoch is over.
    pub fn indices_after(&self, epoch: u64, consumed: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.len).collect();
        if let Some(seed) = self.shuffle {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            rng.set_stream(epoch);
            order.shuffle(&mut rng);
        }
        let position = |i: usize| consumed + self.rank + i * self.world_size;
        // Beyond the end the order begins again: that is the padding, also where it is longer than the dataset.
        (0..self.share(self.len.saturating_sub(consumed)))
            .map(|i| order[position(i) % self.len])
            .collect()
    }
}
