//! What a step of a training loop sends beyond one of a single micro-batch.

use dp_core::{BucketLayout, EngineConfig};

use crate::estimate::{Sharding, all_reduce_bytes, bytes_sent_per_step};

/// An optimizer step, as a training loop takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainingStep {
    /// Micro-batches of it on each rank (`gradient_accumulation_steps`).
    pub num_micro_batches: usize,
    /// Whether the 2-norm of the gradients is clipped ([`clip_grad_norm`](dp_core::Trainer::clip_grad_norm)).
    pub clips_norm: bool,
}

impl Default for TrainingStep {
    /// One micro-batch, without clipping.
    fn default() -> Self {
        Self {
            num_micro_batches: 1,
            clips_norm: false,
        }
    }
}

impl TrainingStep {
    /// Bytes that `rank` sends: [`bytes_sent_per_step`], and
    ///
    /// - the reduce-scatter of stage 2, `(N-1)/N G`, for each further micro-batch. The others add micro-batches up before they reduce;
    /// - for clipping, where gradients are sharded, two small all-reduces: the greatest gradient (one f32) and the sum of squares (four i64);
    ///   where parameters have masters, one i64 of each rank besides.
    pub fn bytes_sent(
        &self,
        layout: &BucketLayout,
        sharding: Sharding,
        config: &EngineConfig,
        num_named: usize,
        rank: usize,
    ) -> u64 {
        let (n, r) = (layout.world_size() as u64, rank as u64);
        let mut bytes = bytes_sent_per_step(layout, sharding, config, num_named, rank);
        if sharding == Sharding::Zero2 {
            let slices = layout.buckets().iter().map(|bucket| {
                let dtype = config.communication_dtype.unwrap_or(bucket.grad_dtype);
                (bucket.padded_len * dtype.size_in_bytes()) as u64 / n
            });
            let once = (n - 1) * slices.sum::<u64>();
            bytes += (self.num_micro_batches as u64 - 1) * once;
        }
        if self.clips_norm {
            if sharding != Sharding::Ddp {
                bytes += all_reduce_bytes(1, 4, n, r) + all_reduce_bytes(4, 8, n, r);
            }
            if layout.buckets().iter().any(|b| b.has_masters()) {
                bytes += 8 * (n - 1);
            }
        }
        bytes
    }
}
