//! Layer normalisation over the last dimension.

use candle_core::{D, Module, Result, Tensor, bail};
use candle_nn::{Init, VarBuilder};

use super::widen::widen;

/// Layer normalisation, as `torch.nn.LayerNorm` over the last dimension (Ba et al., arXiv 1607.06450):
///
/// `y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, with the biased variance.
///
/// Input and output `[.., D]` of any float dtype; `weight` and `bias` are `[D]`.
/// `candle_nn::LayerNorm` has no backward pass on contiguous input; this one has.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::VarBuilder;
/// use dp_models::LayerNorm;
///
/// let vb = VarBuilder::from_varmap(&candle_nn::VarMap::new(), DType::F32, &Device::Cpu);
/// let norm = LayerNorm::new(2, 1e-5, vb)?;
/// let y = norm.forward(&Tensor::new(&[[3f32, 5.], [0., 8.]], &Device::Cpu)?)?;
/// assert!((y.to_vec2::<f32>()?[1][1] - 1.).abs() < 1e-4);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
}

impl LayerNorm {
    /// Takes `weight` (initially ones) and `bias` (initially zeros), both `[width]`, from `vb`, in this order.
    ///
    /// # Errors
    ///
    /// Whatever `vb` reports: a missing name, or another shape.
    pub fn new(width: usize, eps: f64, vb: VarBuilder) -> Result<Self> {
        let weight = vb.get_with_hints(width, "weight", Init::Const(1.))?;
        let bias = vb.get_with_hints(width, "bias", Init::Const(0.))?;
        Ok(Self { weight, bias, eps })
    }
}

impl Module for LayerNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        // Without this check a weight of one element would be broadcast to any width.
        if x.dim(D::Minus1)? != self.weight.elem_count() {
            bail!(
                "LayerNorm of width {} got an input of shape {:?}",
                self.weight.elem_count(),
                x.shape()
            )
        }
        let wide = widen(x)?;
        let centered = wide.broadcast_sub(&wide.mean_keepdim(D::Minus1)?)?;
        let variance = centered.sqr()?.mean_keepdim(D::Minus1)?;
        // The reciprocal is taken on one number per row; the backward pass of a division would take two more full passes.
        let rstd = (variance + self.eps)?.sqrt()?.recip()?;
        centered
            .broadcast_mul(&rstd)?
            .broadcast_mul(&widen(&self.weight)?)?
            .broadcast_add(&widen(&self.bias)?)?
            .to_dtype(x.dtype())
    }
}
