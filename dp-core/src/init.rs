//! Reproducible initial values: a function of seed and parameter name alone.
//!
//! Candle's CPU generator cannot be seeded. Here each parameter has its own ChaCha8 stream, keyed by the store's seed
//! and the parameter's name, so values depend neither on the order of creation nor on the rank nor on the process.

use candle_core::{CpuStorage, DType, Shape};
use candle_nn::Init;
use candle_nn::init::NormalOrUniform;
use half::{bf16, f16};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal, Uniform};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result};

/// Values for a parameter of `shape` drawn as `init` says (the distributions of `torch.nn.init`), on the CPU.
pub(crate) fn initial_values(
    seed: u64,
    name: &str,
    init: Init,
    shape: &Shape,
    dtype: DType,
) -> Result<CpuStorage> {
    let values = sample(seed, name, init, shape)?;
    Ok(match dtype {
        DType::F32 => CpuStorage::F32(values),
        DType::F64 => CpuStorage::F64(values.into_iter().map(f64::from).collect()),
        DType::F16 => CpuStorage::F16(values.into_iter().map(f16::from_f32).collect()),
        DType::BF16 => CpuStorage::BF16(values.into_iter().map(bf16::from_f32).collect()),
        other => {
            return Err(Error::UnsupportedDType {
                what: format!("parameter `{name}`"),
                dtype: other.as_str(),
                supported: "f32, f64, f16, bf16",
            });
        }
    })
}

fn sample(seed: u64, name: &str, init: Init, shape: &Shape) -> Result<Vec<f32>> {
    let count = shape.elem_count();
    let bad =
        |e: &dyn std::fmt::Display| Error::parameter(name, format!("initialisation {init:?}: {e}"));
    let normal = |mean: f64, std: f64| -> Result<Vec<f32>> {
        let normal = Normal::new(mean as f32, std as f32).map_err(|e| bad(&e))?;
        Ok(normal.sample_iter(stream(seed, name)).take(count).collect())
    };
    let uniform = |low: f64, up: f64| -> Result<Vec<f32>> {
        let uniform = Uniform::new(low as f32, up as f32).map_err(|e| bad(&e))?;
        Ok(uniform
            .sample_iter(stream(seed, name))
            .take(count)
            .collect())
    };
    match init {
        Init::Const(c) => Ok(vec![c as f32; count]),
        Init::Randn { mean, stdev } => normal(mean, stdev),
        Init::Uniform { lo, up } => uniform(lo, up),
        Init::Kaiming {
            dist,
            fan,
            non_linearity,
        } => {
            let std = non_linearity.gain() / (fan.for_shape(shape) as f64).sqrt();
            match dist {
                NormalOrUniform::Normal => normal(0.0, std),
                NormalOrUniform::Uniform => {
                    let bound = 3f64.sqrt() * std;
                    uniform(-bound, bound)
                }
            }
        }
    }
}

fn stream(seed: u64, name: &str) -> ChaCha8Rng {
    let mut hash = Sha256::new();
    hash.update(seed.to_le_bytes());
    hash.update(name.as_bytes());
    ChaCha8Rng::from_seed(hash.finalize().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_depend_on_seed_and_name_only() -> Result<()> {
        let init = Init::Randn {
            mean: 0.0,
            stdev: 1.0,
        };
        let shape = Shape::from((3, 5));
        let a = sample(7, "w", init, &shape)?;
        assert_eq!(a, sample(7, "w", init, &shape)?);
        assert_ne!(a, sample(8, "w", init, &shape)?);
        assert_ne!(a, sample(7, "v", init, &shape)?);
        Ok(())
    }

    #[test]
    fn kaiming_uniform_stays_in_its_bound() -> Result<()> {
        let values = sample(
            0,
            "w",
            candle_nn::init::DEFAULT_KAIMING_UNIFORM,
            &Shape::from((64, 24)),
        )?;
        // gain sqrt(2), fan 24: bound = sqrt(3) * sqrt(2 / 24) = 0.5
        assert!(values.iter().all(|v| v.abs() <= 0.5));
        assert!(values.iter().any(|v| v.abs() > 0.49));
        Ok(())
    }
}
