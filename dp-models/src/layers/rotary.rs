//! Rotary position embeddings.

use candle_core::{CpuStorage, CustomOp1, D, DType, Device, Layout, Result, Shape, Tensor, bail};

use super::chunks::{ELEMENTS, Output, map};
use super::values::{Numbers, Values, gradient, is_fusable};
use super::widen::widen;
use crate::kernels;

/// Which features of a head are rotated together by [`Rotary`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotaryPairs {
    /// Feature `i` with feature `i + E / 2`: `rotate_half` of Hugging Face's Llama, `candle_nn::rotary_emb::rope`.
    Halves,
    /// Feature `2 i` with feature `2 i + 1`: the paper, Meta's Llama, `candle_nn::rotary_emb::rope_i`.
    Interleaved,
}

type Rotation = fn(&[f32], (&[f32], &[f32]), usize, usize, &mut [f32]);

impl RotaryPairs {
    fn kernel(self) -> Rotation {
        match self {
            Self::Halves => kernels::rotate_halves,
            Self::Interleaved => kernels::rotate_interleaved,
        }
    }
}

/// Rotary position embeddings (Su et al., arXiv 2104.09864), for the queries and keys of an attention: at position `p` the
/// `i`-th pair of features is rotated by the angle `a = p theta^(-2 i / E)`:
///
/// `y1 = x1 cos(a) - x2 sin(a)`, `y2 = x2 cos(a) + x1 sin(a)`.
///
/// The backward pass rotates the gradient by `-a`. Angles, sines and cosines are computed in f64 and rounded once; those of
/// Hugging Face, in f32 from the frequency on, differ by about `p` 6e-8.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use dp_models::{Rotary, RotaryPairs};
///
/// let rotary = Rotary::new(2, 16, 10_000., RotaryPairs::Halves, DType::F32, &Device::Cpu)?;
/// let queries = Tensor::new(&[[[[1f32, 0.], [1., 0.]]]], &Device::Cpu)?; // [B, H, T, E]
/// let y = rotary.forward(&queries, 0)?.flatten_all()?.to_vec1::<f32>()?;
/// assert_eq!(y, [1., 0., 1f32.cos(), 1f32.sin()]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Rotary {
    /// Cosines and sines of the angles, `[positions, E / 2]`, of the dtype that is computed in.
    cos: Tensor,
    sin: Tensor,
    pairs: RotaryPairs,
}

impl Rotary {
    /// For heads of `head_width` features and the positions from 0 up to and without `positions`; `theta` is 10,000 in the paper
    /// and in Llama 2. For inputs of `dtype` on `device`, where f32, f16 and bf16 are one.
    ///
    /// # Errors
    ///
    /// A `head_width` that is odd or zero, a `theta` that is not positive and finite, or a dtype that is not a float.
    pub fn new(
        head_width: usize,
        positions: usize,
        theta: f64,
        pairs: RotaryPairs,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        if head_width == 0 || !head_width.is_multiple_of(2) {
            bail!("Rotary: head_width ({head_width}) must be even and not zero")
        }
        if !theta.is_finite() || theta <= 0. {
            bail!("Rotary: theta must be positive and finite, got {theta}")
        }
        let dtype = match dtype {
            DType::F16 | DType::BF16 | DType::F32 => DType::F32,
            DType::F64 => DType::F64,
            _ => bail!("Rotary: the dtype must be a float, got {dtype:?}"),
        };
        let half = head_width / 2;
        let angles = (0..positions).flat_map(|position| {
            let angle = move |i| position as f64 * theta.powf(-2. * i as f64 / head_width as f64);
            (0..half).map(angle)
        });
        let (sin, cos): (Vec<f64>, Vec<f64>) = angles.map(f64::sin_cos).unzip();
        let table = |values| {
            let table = Tensor::from_vec(values, (positions, half), &Device::Cpu)?;
            table.to_dtype(dtype)?.to_device(device)
        };
        Ok(Self {
            cos: table(cos)?,
            sin: table(sin)?,
            pairs,
        })
    }

    /// `x` `[.., T, E]` at the positions `first`, `first + 1`, ..., `first + T - 1`; `first` is not 0 where earlier positions are
    /// in a cache. The result has shape and dtype of `x`; 16-bit input is computed in f32 and rounded once.
    ///
    /// # Errors
    ///
    /// An `x` of other than `E` features, more positions than there are, or a dtype that does not fit that of the layer.
    pub fn forward(&self, x: &Tensor, first: usize) -> Result<Tensor> {
        let len = self.check(x)?;
        let (positions, _) = self.cos.dims2()?;
        if first.saturating_add(len) > positions {
            bail!(
                "Rotary of {positions} positions got {len} from position {first} on, for an input of shape {:?}",
                x.shape()
            )
        }
        self.rotate(
            x,
            self.cos.narrow(0, first, len)?,
            self.sin.narrow(0, first, len)?,
        )
    }

    /// `x` `[.., T, E]` at any `positions` `[T]`, u32: those of tokens that were selected or packed.
    ///
    /// # Errors
    ///
    /// As [`forward`](Self::forward); `positions` of another length or dtype.
    pub fn forward_at(&self, x: &Tensor, positions: &Tensor) -> Result<Tensor> {
        let len = self.check(x)?;
        if positions.dims() != [len] {
            bail!(
                "Rotary needs one position for each of the {len} rows of {:?}, got positions of shape {:?}",
                x.shape(),
                positions.shape()
            )
        }
        crate::ids::check_ids("positions", positions, self.cos.dim(0)?)?;
        let rows = |table: &Tensor| table.index_select(positions, 0);
        self.rotate(x, rows(&self.cos)?, rows(&self.sin)?)
    }

    /// `E`
    pub(super) fn head_width(&self) -> Result<usize> {
        Ok(2 * self.cos.dim(1)?)
    }

    /// The cosines, `[positions, E / 2]`.
    pub(super) fn cos(&self) -> &Tensor {
        &self.cos
    }

    /// Rotates the first `num` features of each row of `x`, heads of `E` features that lie side by side; row `p` is position
    /// `p`. `x` is `[T, stride]`. With `back` the angles are negative, which is the backward pass.
    pub(super) fn rotate_rows(
        &self,
        x: &mut [f32],
        stride: usize,
        num: usize,
        back: bool,
    ) -> Result<()> {
        let half = self.cos.dim(1)?;
        let (cos, sin) = (Values::of(&self.cos), Values::of(&self.sin));
        let (cos, sin) = (cos.numbers()?.to_f32(), sin.numbers()?.to_f32());
        let rotate = self.pairs.kernel();
        let mut old = vec![0f32; num];
        let mut signed = vec![0f32; half];
        for (p, row) in x.chunks_exact_mut(stride).enumerate() {
            let angle = p * half..(p + 1) * half;
            signed.copy_from_slice(&sin[angle.clone()]);
            if back {
                signed.iter_mut().for_each(|sin| *sin = -*sin);
            }
            old.copy_from_slice(&row[..num]);
            rotate(&old, (&cos[angle], &signed), half, 0, &mut row[..num]);
        }
        Ok(())
    }

    /// Checks shape and dtype of `x`; returns its `T`.
    fn check(&self, x: &Tensor) -> Result<usize> {
        let width = 2 * self.cos.dim(1)?;
        match *x.dims() {
            [.., len, last] if last == width => Ok(len),
            _ => bail!("Rotary needs [.., T, {width}], got {:?}", x.shape()),
        }
    }

    /// `cos` and `sin` are `[T, E / 2]`.
    fn rotate(&self, x: &Tensor, cos: Tensor, sin: Tensor) -> Result<Tensor> {
        if is_fusable(&[x, &cos]) {
            let op = Rotate {
                cos,
                sin,
                pairs: self.pairs,
            };
            return x.contiguous()?.apply_op1(op);
        }
        let wide = widen(x)?;
        let half = cos.dim(1)?;
        let (x1, x2) = match self.pairs {
            RotaryPairs::Halves => (
                wide.narrow(D::Minus1, 0, half)?,
                wide.narrow(D::Minus1, half, half)?,
            ),
            RotaryPairs::Interleaved => {
                let lead = &wide.dims()[..wide.rank() - 1];
                let pairs = wide.reshape([lead, &[half, 2]].concat())?;
                let part = |i| pairs.narrow(D::Minus1, i, 1)?.squeeze(D::Minus1);
                (part(0)?, part(1)?)
            }
        };
        let y1 = (x1.broadcast_mul(&cos)? - x2.broadcast_mul(&sin)?)?;
        let y2 = (x2.broadcast_mul(&cos)? + x1.broadcast_mul(&sin)?)?;
        let y = match self.pairs {
            RotaryPairs::Halves => Tensor::cat(&[y1, y2], D::Minus1)?,
            RotaryPairs::Interleaved => Tensor::stack(&[y1, y2], D::Minus1)?.reshape(x.shape())?,
        };
        y.to_dtype(x.dtype())
    }
}

/// Rotation of the rows of `[.., T, E]` by the angles of `[T, E / 2]`.
struct Rotate {
    cos: Tensor,
    sin: Tensor,
    pairs: RotaryPairs,
}

impl Rotate {
    /// `sin` is negative on the way back.
    fn apply(&self, x: Numbers<'_>, sin: &Tensor) -> Result<CpuStorage> {
        let (len, half) = self.cos.dims2()?;
        let (cos, sin) = (Values::of(&self.cos), Values::of(sin));
        let (cos, sin) = (cos.numbers()?.to_f32(), sin.numbers()?.to_f32());
        let rotate = self.pairs.kernel();
        let rows = (ELEMENTS / (2 * half)).max(1);
        let chunk = rows * 2 * half;
        let (y, _) = map([(x, chunk)], Output::rows(x, chunk), |idx, [x], y| {
            rotate(x, (&cos, &sin), half, idx * rows % len, y);
        })?;
        Ok(y)
    }
}

impl CustomOp1 for Rotate {
    fn name(&self) -> &'static str {
        "rotary"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let y = self.apply(Numbers::of(x, layout)?, &self.sin)?;
        Ok((y, layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        let dx = self.apply(Values::of(&grad).numbers()?, &self.sin.neg()?)?;
        Ok(Some(gradient(dx, x)?))
    }
}
