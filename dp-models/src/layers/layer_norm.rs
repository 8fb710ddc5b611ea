//! Layer normalisation over the last dimension.

use candle_core::{CpuStorage, CustomOp3, D, Layout, Module, Result, Shape, Tensor, bail};
use candle_nn::{Init, VarBuilder};

use super::chunks::{Output, map, total};
use super::values::{Numbers, Values, gradient, is_fusable, parameter_gradient};
use super::widen::widen;
use crate::kernels::{self, NORM_ROWS};

/// Layer normalisation, as `torch.nn.LayerNorm` over the last dimension (Ba et al., arXiv 1607.06450):
///
/// `y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, with the biased variance.
///
/// Input and output `[.., D]` of any float dtype; `weight` and `bias` are `[D]`. 16-bit input is computed in f32 and rounded
/// once; between f32, f16 and bf16 the parameters may have another dtype than the input, and the result has the input's.
///
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
        check_width("LayerNorm", &self.weight, x)?;
        let (weight, bias) = (&self.weight, &self.bias);
        if is_fusable(&[x, weight, bias]) {
            let op = Normalise {
                eps: self.eps as f32,
            };
            return x
                .contiguous()?
                .apply_op3(&weight.contiguous()?, &bias.contiguous()?, op);
        }
        composed(&widen(x)?, &widen(weight)?, &widen(bias)?, self.eps)?.to_dtype(x.dtype())
    }
}

/// Without this check a weight of one element would be broadcast to any width.
pub(super) fn check_width(layer: &str, weight: &Tensor, x: &Tensor) -> Result<()> {
    let width = weight.elem_count();
    match x.dims().last() {
        Some(last) if *last == width => Ok(()),
        _ => bail!(
            "{layer} of width {width} got an input of shape {:?}",
            x.shape()
        ),
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
        let (x, w, b) = (
            Numbers::of(x, lx)?,
            Numbers::of(w, lw)?.to_f32(),
            Numbers::of(b, lb)?.to_f32(),
        );
        let chunk = NORM_ROWS * w.len();
        let (y, _) = map([(x, chunk)], Output::rows(x, chunk), |_, [x], y| {
            kernels::layer_norm(x, &w, &b, self.eps, y);
        })?;
        Ok((y, lx.shape().clone()))
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
        let (x_values, w_values, grad) = (Values::of(x), Values::of(w), Values::of(&grad));
        let (numbers, weight) = (x_values.numbers()?, w_values.numbers()?.to_f32());
        let width = weight.len();
        let chunk = NORM_ROWS * width;
        let output = match x.track_op() {
            true => Output::rows(numbers, chunk),
            false => Output::none(),
        };
        let num_sums = if w.track_op() || b.track_op() {
            width
        } else {
            0
        };
        let inputs = [(numbers, chunk), (grad.numbers()?, chunk)];
        let (dx, sums) = map(inputs, output, |_, [x, grad], dx| {
            let mut sums = vec![0f32; 2 * num_sums];
            let dw_db = sums.split_at_mut(num_sums);
            kernels::layer_norm_backward(x, &weight, grad, self.eps, dx, dw_db);
            sums
        })?;
        let mut dw = total(sums, 2 * num_sums);
        let db = dw.split_off(num_sums);
        Ok((
            x.track_op().then(|| gradient(dx, x)).transpose()?,
            parameter_gradient(dw, w)?,
            parameter_gradient(db, b)?,
        ))
    }
}
