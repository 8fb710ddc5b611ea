//! What a rank is given: its number, its end of the group, its device.

use std::sync::Arc;

use candle_core::Device;

use crate::comm::Communicator;

/// What a rank knows of itself; the argument of the closure that [`World::run`](crate::World::run) runs.
#[derive(Debug, Clone)]
pub struct Rank {
    comm: Arc<dyn Communicator>,
    device: Device,
    local_rank: usize,
}

impl Rank {
    /// The rank behind `comm`.
    pub(crate) fn new(comm: Arc<dyn Communicator>, local_rank: usize, device: Device) -> Self {
        let rank = Self {
            comm,
            device,
            local_rank,
        };
        // All CUDA devices of Candle begin with one constant seed, so ranks would draw the same dropout masks.
        if rank.device.is_cuda()
            && let Err(error) = rank.device.set_seed(rank.seed(0))
        {
            tracing::warn!(
                "rank {}: its GPU's generator has no seed: {error}",
                rank.rank()
            );
        }
        rank
    }

    /// This rank, `0 <= rank < world_size`.
    pub fn rank(&self) -> usize {
        self.comm.rank()
    }

    /// This rank among those of its machine, from 0: torchrun's `LOCAL_RANK`, which chooses a device. The rank itself, where
    /// the launcher does not say it.
    pub fn local_rank(&self) -> usize {
        self.local_rank
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.comm.world_size()
    }

    /// This rank's end of the group.
    pub fn comm(&self) -> Arc<dyn Communicator> {
        Arc::clone(&self.comm)
    }

    /// A seed of this rank's own, for random numbers that must differ between ranks, such as dropout masks: a function of
    /// `seed` and the rank. What must be equal on all ranks (initial values, the shuffled order) takes `seed` itself.
    pub fn seed(&self, seed: u64) -> u64 {
        // The finaliser of SplitMix64 is a bijection, so two ranks never share a seed.
        let mut z = seed.wrapping_add((self.rank() as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// The device this rank computes on: see [`World::with_devices`](crate::World::with_devices).
    pub fn device(&self) -> &Device {
        &self.device
    }
}
