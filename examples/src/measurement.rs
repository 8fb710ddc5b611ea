//! What a rank's training takes, on the host or on a GPU.

use candle_core::{Device, DeviceLocation};
use dp_core::Rank;
use dp_core::memory::{
    DeviceMemory, LedgerSnapshot, device_memory, heap_usage, reset_device_peak, reset_heap_peak,
};

/// Begins with the training, and knows what was allocated before it.
#[derive(Debug)]
pub struct Measurement {
    before: u64,
}

/// Bytes of one rank.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    /// Peak of what the ledger does not explain.
    pub activations_peak: u64,
    /// Peak of everything.
    pub peak: u64,
    /// The whole GPU at the end, with all its ranks.
    pub gpu: Option<DeviceMemory>,
}

impl Measurement {
    /// Begins. Collective where ranks compute on GPUs.
    ///
    /// # Errors
    /// Those of the driver and of the barrier.
    pub fn begin(rank: &Rank) -> anyhow::Result<Self> {
        if let Some(now) = settled(rank)? {
            reset_device_peak(rank.device())?;
            // Nobody goes on while another one still resets.
            rank.comm().barrier()?;
            return Ok(Self { before: now.used });
        }
        let heap_before = heap_usage(Some(rank.rank())).current;
        reset_heap_peak(Some(rank.rank()));
        Ok(Self {
            before: heap_before,
        })
    }

    /// Ends. Collective where ranks compute on GPUs. `held`: what the rank's ledger has counted, each category at its peak.
    ///
    /// A driver counts all ranks of its GPU together. What of it no ledger explains is divided among them equally. Without a
    /// [`CountingAllocator`](dp_core::memory::CountingAllocator) the numbers of a rank on the CPU are 0.
    ///
    /// # Errors
    /// Those of the driver and of the collectives.
    pub fn end(self, rank: &Rank, held: LedgerSnapshot) -> anyhow::Result<Measured> {
        let Some(gpu) = settled(rank)? else {
            let heap = heap_usage(Some(rank.rank()));
            return Ok(Measured {
                activations_peak: heap.untracked_peak.saturating_sub(self.before),
                peak: heap.peak.saturating_sub(self.before),
                gpu: None,
            });
        };
        let mine = (
            ordinal(rank.device()),
            held.model_states() + held.communication,
        );
        let all: Vec<(usize, u64)> = rank.comm().all_gather_object(&mine, "bytes of all ranks")?;
        let here = all.iter().filter(|(gpu, _)| *gpu == mine.0);
        let (num_here, held_here) = here.fold((0, 0), |(n, sum), (_, held)| (n + 1, sum + held));
        let peak_here = gpu.used_peak.saturating_sub(self.before);
        let activations_peak = peak_here.saturating_sub(held_here) / num_here;
        Ok(Measured {
            activations_peak,
            peak: mine.1 + activations_peak,
            gpu: Some(gpu),
        })
    }
}

/// The memory of the rank's GPU when all ranks have come to here and their kernels have ended; `None` on the CPU.
fn settled(rank: &Rank) -> anyhow::Result<Option<DeviceMemory>> {
    if rank.device().is_cpu() {
        return Ok(None);
    }
    rank.device().synchronize()?;
    rank.comm().barrier()?;
    let memory = device_memory(rank.device())?;
    // Nobody goes on before all have looked.
    rank.comm().barrier()?;
    Ok(memory)
}

fn ordinal(device: &Device) -> usize {
    match device.location() {
        DeviceLocation::Cuda { gpu_id } => gpu_id,
        _ => 0,
    }
}
