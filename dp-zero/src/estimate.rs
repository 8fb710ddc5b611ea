//! Bytes per rank, predicted: for a real bucket layout to the byte, for a parameter count by the paper's formulas.

use std::fmt;
use std::str::FromStr;

use dp_core::{BucketLayout, EngineConfig, Error, GradAccumDType, LedgerSnapshot, ParamSpec};
use serde::{Deserialize, Serialize};

use crate::optimizer::ZeroStage;

/// How model states are spread over the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Sharding {
    /// Everything on every rank.
    Ddp,
    /// Optimizer state sharded.
    Zero1,
    /// Optimizer state and gradients sharded.
    Zero2,
    /// Optimizer state, gradients and parameters sharded. Estimated only: no trainer here does it yet.
    Zero3,
}

impl Sharding {
    /// All of them, from most memory to least.
    pub const ALL: [Sharding; 4] = [Self::Ddp, Self::Zero1, Self::Zero2, Self::Zero3];

    /// `ddp`, `zero1`, `zero2`, `zero3`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ddp => "ddp",
            Self::Zero1 => "zero1",
            Self::Zero2 => "zero2",
            Self::Zero3 => "zero3",
        }
    }
}

impl fmt::Display for Sharding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Sharding {
    type Err = Error;

    /// Reads [`name`](Self::name).
    fn from_str(name: &str) -> Result<Self, Error> {
        let known = Self::ALL.into_iter().find(|s| s.name() == name);
        known.ok_or_else(|| {
            Error::invalid(
                "sharding",
                format!("{name:?} is none of ddp, zero1, zero2 and zero3"),
            )
        })
    }
}

impl From<ZeroStage> for Sharding {
    fn from(stage: ZeroStage) -> Self {
        match stage {
            ZeroStage::One => Self::Zero1,
            ZeroStage::Two => Self::Zero2,
        }
    }
}

/// Bytes per parameter element before sharding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct BytesPerElement {
    /// Of the parameter.
    pub parameters: u64,
    /// Of its gradient.
    pub gradients: u64,
    /// Of the optimizer state: moments, and the f32 master copy if there is one.
    pub optimizer: u64,
}

impl BytesPerElement {
    /// All in f32, with `num_states` numbers of optimizer state per element: 4 + 4 + 4 `num_states`; AdamW keeps 2.
    pub const fn f32(num_states: u64) -> Self {
        Self {
            parameters: 4,
            gradients: 4,
            optimizer: 4 * num_states,
        }
    }

    /// 16-bit parameters with f32 masters: 2 + 4 + (4 + 4 `num_states`) with gradients in f32, 2 + 2 + ... with
    /// [`GradAccumDType::Parameter`].
    pub const fn mixed(num_states: u64, grad_accum: GradAccumDType) -> Self {
        Self {
            parameters: 2,
            gradients: match grad_accum {
                GradAccumDType::F32 => 4,
                GradAccumDType::Parameter => 2,
            },
            optimizer: 4 + 4 * num_states,
        }
    }

    /// The paper's mixed precision with Adam: 2 + 2 + (4 master + 8 moments).
    pub const MIXED_ADAM: Self = Self::mixed(2, GradAccumDType::Parameter);
}

/// Bytes of model states on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ModelStates {
    /// Parameters, frozen ones and buffers included.
    pub parameters: u64,
    /// Gradients.
    pub gradients: u64,
    /// Optimizer state.
    pub optimizer: u64,
}

impl From<LedgerSnapshot> for ModelStates {
    /// Of what a ledger has counted, to compare it with what was predicted.
    fn from(counted: LedgerSnapshot) -> Self {
        Self {
            parameters: counted.parameters,
            gradients: counted.gradients,
            optimizer: counted.optimizer,
        }
    }
}

impl ModelStates {
    /// The sum.
    pub fn total(&self) -> u64 {
        self.parameters + self.gradients + self.optimizer
    }

    /// What each rank holds of a model with `num_params` trained elements, by the formulas of arXiv 1910.02054,
    /// section 5: sharded categories are divided by `world_size`, elements rounded up.
    pub fn estimate(
        num_params: u64,
        world_size: u64,
        sharding: Sharding,
        bytes: BytesPerElement,
    ) -> Self {
        let shard = num_params.div_ceil(world_size.max(1));
        let held = |sharded_from: Sharding| {
            if sharding as u8 >= sharded_from as u8 {
                shard
            } else {
                num_params
            }
        };
        Self {
            parameters: bytes.parameters * held(Sharding::Zero3),
            gradients: bytes.gradients * held(Sharding::Zero2),
            optimizer: bytes.optimizer * held(Sharding::Zero1),
        }
    }

    /// What each rank's trainer holds for these parameters in this layout, padding included: gradients in the layout's
    /// dtypes, `num_states` f32 numbers of optimizer state per element, and a f32 master of each 16-bit element. `None`
    /// for [`Sharding::Zero3`], which has no trainer.
    pub fn of_layout(
        layout: &BucketLayout,
        params: &[ParamSpec],
        sharding: Sharding,
        num_states: usize,
    ) -> Option<Self> {
        let n = layout.world_size();
        let (shards_of_gradients, shards_of_states) = match sharding {
            Sharding::Ddp => (1, 1),
            Sharding::Zero1 => (1, n),
            Sharding::Zero2 => (n, n),
            Sharding::Zero3 => return None,
        };
        let mut states = Self {
            parameters: params.iter().map(ParamSpec::num_bytes).sum(),
            gradients: 0,
            optimizer: 0,
        };
        for bucket in layout.buckets() {
            let gradients = bucket.padded_len / shards_of_gradients;
            states.gradients += (gradients * bucket.grad_dtype.size_in_bytes()) as u64;
            let master = usize::from(bucket.has_masters());
            let numbers = bucket.padded_len / shards_of_states * (num_states + master);
            states.optimizer += 4 * numbers as u64;
        }
        Some(states)
    }
}

/// Bytes that `rank` sends in one step of one micro-batch, without clipping, buffers and the comparison of replicas. For each
/// bucket of `G` padded bytes of gradients, as they travel (`communication_dtype`, or else as they are kept), and `P` of
/// parameters: `2 (N-1)/N G` for an all-reduce, `(N-1)/N (G + P)` for a reduce-scatter and an all-gather. And a small
/// all-reduce of 8 bytes per named tensor and 32 more, which tells weight and loss of the step and who was used by any rank. And
/// `8 (N-1)` where steps with non-finite gradients are skipped.
pub fn bytes_sent_per_step(
    layout: &BucketLayout,
    sharding: Sharding,
    config: &EngineConfig,
    num_named: usize,
    rank: usize,
) -> u64 {
    let (n, r) = (layout.world_size() as u64, rank as u64);
    let slices = layout.buckets().iter().map(|bucket| {
        let gradients = config.communication_dtype.unwrap_or(bucket.grad_dtype);
        let published = match sharding {
            Sharding::Ddp => gradients,
            _ => bucket.dtype,
        };
        let bytes = gradients.size_in_bytes() + published.size_in_bytes();
        (bucket.padded_len * bytes) as u64 / n
    });
    let gradients_and_parameters = (n - 1) * slices.sum::<u64>();
    let summary = all_reduce_bytes(4 + num_named as u64, 8, n, r);
    let found = u64::from(config.skips_non_finite()) * (n - 1);
    gradients_and_parameters + summary + 8 * found
}

/// Bytes that rank `r` of `n` sends in an all-reduce. Its slices need not be equal: rank `r` reduces elements
/// `r L/N .. (r+1) L/N`.
pub(crate) fn all_reduce_bytes(elements: u64, size: u64, n: u64, r: u64) -> u64 {
    let own = (r + 1) * elements / n - r * elements / n;
    size * ((elements - own) + (n - 1) * own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figure_1_of_the_paper() {
        // 7.5B parameters on 64 ranks: 120 GB, 31.4 GB, 16.6 GB, 1.9 GB.
        let gb = |sharding| {
            let states =
                ModelStates::estimate(7_500_000_000, 64, sharding, BytesPerElement::MIXED_ADAM);
            (states.total() as f64 / 1e8).round() / 10.0
        };
        assert_eq!(Sharding::ALL.map(gb), [120.0, 31.4, 16.6, 1.9]);
    }

    #[test]
    fn bytes_per_parameter_in_16_bits() {
        // 16, 4 + 12/N, 2 + 14/N, 16/N in the paper's setting; 18, 6 + 12/N, 2 + 16/N, 18/N with f32 gradients.
        let per_param = |bytes| {
            Sharding::ALL.map(|s| ModelStates::estimate(4000, 4, s, bytes).total() as f64 / 4000.0)
        };
        assert_eq!(
            per_param(BytesPerElement::MIXED_ADAM),
            [16.0, 7.0, 5.5, 4.0]
        );
        let default = BytesPerElement::mixed(2, GradAccumDType::default());
        assert_eq!(per_param(default), [18.0, 9.0, 6.0, 4.5]);
    }

    #[test]
    fn bytes_per_parameter_at_4_ranks_in_f32() {
        let per_param = |sharding| {
            ModelStates::estimate(4000, 4, sharding, BytesPerElement::f32(2)).total() / 4000
        };
        assert_eq!(Sharding::ALL.map(per_param), [16, 10, 7, 4]);
    }
}
