//! Dropout with a stream of random numbers of its own.

use std::sync::{Mutex, MutexGuard, PoisonError};

use candle_core::{CpuStorage, CustomOp1, Error, Layout, Result, Shape, Tensor, bail};
use candle_nn::ModuleT;
use rand::SeedableRng;
use rand::distr::{Bernoulli, Distribution};
use rand_chacha::ChaCha8Rng;

use super::chunks::{ELEMENTS, Output, map};
use super::values::{Numbers, Values, gradient, is_fusable};
use crate::kernels;

/// Dropout (Srivastava et al., 2014), as `torch.nn.Dropout`: in training each element is zero with probability `p`, and
/// the others are multiplied by `1 / (1 - p)`; otherwise the input is returned as it is.
///
/// `candle_nn::Dropout` draws from the device's generator, which cannot be seeded on the CPU. This one draws from its own
/// ChaCha8 stream: the same seed gives the same masks, on every machine. Data-parallel ranks need *different* masks, so
/// give each rank its own seed (in dp-core: `rank.seed(seed)`), and each layer its own, too.
///
/// On the CPU in f32, f16 and bf16 it is one node of the graph, which keeps one bit per element for the backward pass. A 16-bit
/// element is multiplied by the f32 factor and rounded once.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::ModuleT;
/// use dp_models::Dropout;
///
/// let x = Tensor::ones((2, 3), DType::F32, &Device::Cpu)?;
/// let dropout = Dropout::new(0.5, 42)?;
/// let y = dropout.forward_t(&x, true)?.flatten_all()?.to_vec1::<f32>()?;
/// assert!(y.iter().all(|y| *y == 0.0 || *y == 2.0));
/// assert_eq!(dropout.forward_t(&x, false)?.to_vec2::<f32>()?, x.to_vec2::<f32>()?);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Dropout {
    p: f64,
    rng: Mutex<ChaCha8Rng>,
}

impl Dropout {
    /// Drops with probability `p`; masks follow from `seed`.
    ///
    /// # Errors
    ///
    /// `p` is not in `[0, 1)`.
    pub fn new(p: f64, seed: u64) -> Result<Self> {
        if !(0. ..1.).contains(&p) {
            bail!("Dropout: p must be in [0, 1), got {p}")
        }
        Ok(Self {
            p,
            rng: Mutex::new(ChaCha8Rng::seed_from_u64(seed)),
        })
    }

    /// Where its stream of random numbers stands: what a checkpoint keeps of it.
    pub fn position(&self) -> u64 {
        // One word per element drawn or less: 2^64 are never reached.
        self.lock().get_word_pos() as u64
    }

    /// Goes on from a [`position`](Self::position) of a layer with the same seed.
    pub fn seek(&self, position: u64) {
        self.lock().set_word_pos(position.into());
    }

    /// A mask of `len` elements, each kept with probability `keep`.
    fn draw(&self, len: usize, keep: f64) -> Result<Vec<u32>> {
        let kept = Bernoulli::new(keep).map_err(Error::wrap)?;
        let mut rng = self.lock();
        let mut words = vec![0u32; len.div_ceil(32)];
        for i in 0..len {
            words[i / 32] |= u32::from(kept.sample(&mut *rng)) << (i % 32);
        }
        Ok(words)
    }

    fn lock(&self) -> MutexGuard<'_, ChaCha8Rng> {
        // The stream is whole between two draws, so a panic elsewhere does no harm.
        self.rng.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ModuleT for Dropout {
    /// Any shape, any float dtype. Advances the stream only with `train` and `p > 0`.
    fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        if !train || self.p == 0. {
            return Ok(x.clone());
        }
        let keep = 1. - self.p;
        let mask = Mask {
            kept: self.draw(x.elem_count(), keep)?,
            scale: (1. / keep) as f32,
        };
        match is_fusable(&[x]) {
            true => x.contiguous()?.apply_op1(mask),
            false => {
                let factors = mask.factors(x.elem_count());
                x * Tensor::from_vec(factors, x.shape(), x.device())?.to_dtype(x.dtype())?
            }
        }
    }
}

/// Which elements are kept, one bit each, from the lowest of the first word on; and what these are multiplied by.
struct Mask {
    kept: Vec<u32>,
    scale: f32,
}

impl Mask {
    fn factors(&self, len: usize) -> Vec<f32> {
        let factor = |i: usize| match self.kept[i / 32] >> (i % 32) & 1 {
            1 => self.scale,
            _ => 0.,
        };
        (0..len).map(factor).collect()
    }

    /// `x` times the factors.
    fn apply(&self, x: Numbers<'_>) -> Result<CpuStorage> {
        let (y, _) = map([(x, ELEMENTS)], Output::like(x), |idx, [x], y| {
            kernels::multiply_kept(x, &self.kept[idx * ELEMENTS / 32..], self.scale, y);
        })?;
        Ok(y)
    }
}

impl CustomOp1 for Mask {
    fn name(&self) -> &'static str {
        "dropout"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((self.apply(Numbers::of(x, layout)?)?, layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        let dx = self.apply(Values::of(&grad).numbers()?)?;
        Ok(Some(gradient(dx, x)?))
    }
}
