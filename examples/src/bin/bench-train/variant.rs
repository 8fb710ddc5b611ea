//! What is compared: strategies, with and without overlap, with gradients sent in several dtypes.

use std::fmt;

use candle_core::DType;
use dp_core::{BucketCaps, EngineConfig};
use dp_zero::Sharding;

use crate::options::{Options, Overlap};

/// One way to train the same model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variant {
    pub sharding: Sharding,
    pub overlap_comm: Overlap,
    pub communication_dtype: DType,
}

impl Variant {
    /// All combinations that the options ask for.
    pub fn all(options: &Options) -> anyhow::Result<Vec<Self>> {
        let mut variants = Vec::new();
        for sharding in &options.strategies {
            for communication_dtype in &options.communication_dtype {
                for overlap_comm in &options.overlap_comm {
                    let variant = Self {
                        sharding: *sharding,
                        overlap_comm: *overlap_comm,
                        communication_dtype: *communication_dtype,
                    };
                    anyhow::ensure!(
                        !variants.contains(&variant),
                        "--overlap-comm, --communication-dtype: {variant} is there twice"
                    );
                    variants.push(variant);
                }
            }
        }
        Ok(variants)
    }

    pub fn engine(self, bucket_caps: BucketCaps) -> EngineConfig {
        let mut engine = EngineConfig::default();
        engine.bucket_caps = bucket_caps;
        engine.overlap_comm = self.overlap_comm == Overlap::On;
        // Parameters are f32, and so are gradients where they are kept.
        engine.communication_dtype = match self.communication_dtype {
            DType::F32 => None,
            other => Some(other),
        };
        engine
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let overlap = self.overlap_comm.name();
        let dtype = self.communication_dtype.as_str();
        write!(
            f,
            "{:6} overlap {overlap:3} {dtype:4}",
            self.sharding.name()
        )
    }
}
