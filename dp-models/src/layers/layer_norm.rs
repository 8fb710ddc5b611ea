//! Layer normalisation over the last dimension.

use candle_core::{CpuStorage, CustomOp3, D, Layout, Module, Result, Shape, Tensor, bail};
use candle_nn::{Init, VarBuilder};

use super::values::{Values, is_fusable, slice};
use super::widen::widen;
use crate::kernels;

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
        let (weight, bias) = (widen(&self.weight)?, widen(&self.bias)?);
        let y = match is_fusable(&wide) {
            true => {
                let op = Normalise {
                    eps: self.eps as f32,
                };
                wide.contiguous()?
                    .apply_op3(&weight.contiguous()?, &bias.contiguous()?, op)?
            }
            false => composed(&wide, &weight, &bias, self.eps)?,
        };
        y.to_dtype(x.dtype())
    }
}

fn composed(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    let centered = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let variance = centered.sqr()?.mean_keepdim(D::Minus1)?;
    // The reciprocal is taken on one number per row; the backward pass of a division would take two more full passes.
    let rstd = (variance + eps)?.sqrt()?.recip()?;
    centered
        .broadcast_mul(&rstd)?
        .broadcast_mul(weight)?
        .broadcast_add(bias)
}

struct Normalise {
    eps: f32,
}

impl CustomOp3 for Normalise {
    fn name(&self) -> &'static str {
        "layer-norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        lx: &Layout,
        w: &CpuStorage,
        lw: &Layout,
        b: &CpuStorage,
        lb: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let x = slice(x, lx)?;
        let mut y = vec![0f32; x.len()];
        kernels::layer_norm_forward(x, slice(w, lw)?, slice(b, lb)?, self.eps, &mut y);
        Ok((CpuStorage::F32(y), lx.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        w: &Tensor,
        b: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let mut dx = vec![0f32; x.elem_count()];
        let (dw, db) = kernels::layer_norm_backward(
            &Values::of(x)?,
            &Values::of(w)?,
            &Values::of(&grad)?,
            self.eps,
            &mut dx,
        );
        Ok((
            Some(Tensor::from_vec(dx, x.shape(), x.device())?),
            Some(Tensor::from_vec(dw, w.shape(), w.device())?),
            Some(Tensor::from_vec(db, b.shape(), b.device())?),
        ))
    }
}
