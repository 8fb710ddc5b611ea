//! Linear layers of an activation, in one node: the second half of a transformer's MLP.
//!
//! The activation is computed again in backward, in the pass that computes its gradient, instead of being kept: of a hidden
//! layer, the widest tensor of a block, only what the activation is taken of stays in memory.

use candle_core::{CpuStorage, CustomOp3, D, DType, Layout, Result, Shape, Tensor, bail};
use rayon::prelude::*;

use super::chunks::{ELEMENTS, Output, map};
use super::gelu::gelu_tanh;
use super::linear::{
    bias_gradient, composed, forward, input_gradient, output_shape, weight_gradient,
};
use super::swiglu::silu_gated;
use super::values::{Numbers, Values, gradient, into_f32, is_fusable, round};
use crate::kernels;

/// [`linear`](super::linear) of [`gelu_tanh`]: `gelu_tanh(x) weight^T + bias`.
///
/// Shapes and dtypes as in [`linear`](super::linear). 16-bit numbers are widened, and nothing is rounded between the two.
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::new(&[[0f32, 1.]], &Device::Cpu)?;
/// let weight = Tensor::new(&[[5f32, 1.]], &Device::Cpu)?;
/// let y = dp_models::gelu_linear(&x, &weight, &Tensor::new(&[2f32], &Device::Cpu)?)?;
/// assert!((y.to_vec2::<f32>()?[0][0] - 2.841_192).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
///
/// Shapes or dtypes that do not fit.
pub fn gelu_linear(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let shape = output_shape(x, weight, Some(bias))?;
    let rows = x.flatten_to(D::Minus2)?;
    if !is_fusable(&[x, weight, bias]) {
        return composed(&gelu_tanh(&rows)?, weight, Some(bias))?.reshape(shape);
    }
    let (weight, bias) = (weight.contiguous()?, bias.contiguous()?);
    rows.contiguous()?
        .apply_op3(&weight, &bias, GeluLinear { shape })
}

/// [`linear`](super::linear) of [`silu_gated`], without a bias: `(silu(gate) * up) weight^T`.
///
/// `gate` and `up` `[.., in]`, `weight` `[out, in]`, the result `[.., out]`. Dtypes as in [`silu_gated`] and [`linear`](super::linear).
/// 16-bit numbers are widened, and nothing is rounded between the two.
///
/// # Errors
///
/// Shapes or dtypes that do not fit.
pub fn silu_gated_linear(gate: &Tensor, up: &Tensor, weight: &Tensor) -> Result<Tensor> {
    if gate.shape() != up.shape() {
        bail!(
            "silu_gated_linear needs a gate and an input of one shape, got {:?} and {:?}",
            gate.shape(),
            up.shape()
        )
    }
    let shape = output_shape(gate, weight, None)?;
    let (gate, up) = (gate.flatten_to(D::Minus2)?, up.flatten_to(D::Minus2)?);
    if !is_fusable(&[&gate, &up, weight]) {
        return composed(&silu_gated(&gate, &up)?, weight, None)?.reshape(shape);
    }
    let (up, weight) = (up.contiguous()?, weight.contiguous()?);
    gate.contiguous()?
        .apply_op3(&up, &weight, SiluGatedLinear { shape })
}

/// As many f32 numbers as `like`.
fn output(like: Numbers<'_>) -> Output {
    Output {
        dtype: DType::F32,
        ..Output::like(like)
    }
}

struct GeluLinear {
    /// Of the result.
    shape: Shape,
}

impl GeluLinear {
    fn activation(x: Numbers<'_>) -> Result<Vec<f32>> {
        let (y, _) = map([(x, ELEMENTS)], output(x), |_, [x], y| {
            kernels::gelu_tanh(x, y);
        })?;
        into_f32(y)
    }
}

impl CustomOp3 for GeluLinear {
    fn name(&self) -> &'static str {
        "gelu-linear"
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
        let (x, w) = (Numbers::of(x, lx)?, Numbers::of(w, lw)?);
        let activation = Self::activation(x)?;
        let y = forward(
            Numbers::F32(&activation),
            w,
            Some(Numbers::of(b, lb)?),
            [lx.dims()[0], lw.dims()[0]],
        );
        Ok((round(y, x.dtype())?, self.shape.clone()))
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
        let grad = Values::of(&grad);
        let grad = grad.numbers()?.to_f32();
        let values = Values::of(x);
        let numbers = values.numbers()?;
        let mut dx = None;
        let activation = match x.track_op() {
            false => Self::activation(numbers)?,
            true => {
                let mut dactivation = input_gradient(w, &grad, x.dim(0)?)?;
                let mut activation = vec![0f32; numbers.len()];
                let wide = numbers.to_f32();
                dactivation
                    .par_chunks_mut(ELEMENTS)
                    .zip(activation.par_chunks_mut(ELEMENTS))
                    .zip(wide.par_chunks(ELEMENTS))
                    .for_each(|((grad, y), x)| kernels::gelu_tanh_both(x, grad, y));
                drop(wide);
                dx = Some(gradient(round(dactivation, x.dtype())?, x)?);
                activation
            }
        };
        let dw = weight_gradient(Numbers::F32(&activation), w, &grad)?;
        Ok((dx, dw, bias_gradient(b, &grad)?))
    }
}

struct SiluGatedLinear {
    /// Of the result.
    shape: Shape,
}

impl SiluGatedLinear {
    fn product(gate: Numbers<'_>, up: Numbers<'_>) -> Result<Vec<f32>> {
        let inputs = [(gate, ELEMENTS), (up, ELEMENTS)];
        let (y, _) = map(inputs, output(gate), |_, [gate, up], y| {
            kernels::silu_gated(gate, up, y);
        })?;
        into_f32(y)
    }
}

impl CustomOp3 for SiluGatedLinear {
    fn name(&self) -> &'static str {
        "silu-gated-linear"
    }

    fn cpu_fwd(
        &self,
        gate: &CpuStorage,
        lg: &Layout,
        up: &CpuStorage,
        lu: &Layout,
        w: &CpuStorage,
        lw: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (gate, up, w) = (
            Numbers::of(gate, lg)?,
            Numbers::of(up, lu)?,
            Numbers::of(w, lw)?,
        );
        let product = Self::product(gate, up)?;
        let sizes = [lg.dims()[0], lw.dims()[0]];
        let y = forward(Numbers::F32(&product), w, None, sizes);
        Ok((round(y, gate.dtype())?, self.shape.clone()))
    }

    fn bwd(
        &self,
        gate: &Tensor,
        up: &Tensor,
        w: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let grad = Values::of(&grad);
        let grad = grad.numbers()?.to_f32();
        let (gates, ups) = (Values::of(gate), Values::of(up));
        let (gates, ups) = (gates.numbers()?, ups.numbers()?);
        let mut gradients = (None, None);
        let product = match gate.track_op() || up.track_op() {
            false => Self::product(gates, ups)?,
            true => {
                let mut dup = input_gradient(w, &grad, gate.dim(0)?)?;
                let (mut dgate, mut product) = (vec![0f32; dup.len()], vec![0f32; dup.len()]);
                let (wide_gate, wide_up) = (gates.to_f32(), ups.to_f32());
                let inputs = wide_gate
                    .par_chunks(ELEMENTS)
                    .zip(wide_up.par_chunks(ELEMENTS));
                dup.par_chunks_mut(ELEMENTS)
                    .zip(dgate.par_chunks_mut(ELEMENTS))
                    .zip(product.par_chunks_mut(ELEMENTS))
                    .zip(inputs)
                    .for_each(|(((grad, dgate), product), (gate, up))| {
                        kernels::silu_gated_all(gate, up, grad, dgate, product);
                    });
                drop((wide_gate, wide_up));
                let as_gradient = |values, of: &Tensor| match of.track_op() {
                    true => gradient(round(values, of.dtype())?, of).map(Some),
                    false => Ok(None),
                };
                gradients = (as_gradient(dgate, gate)?, as_gradient(dup, up)?);
                product
            }
        };
        let dw = weight_gradient(Numbers::F32(&product), w, &grad)?;
        Ok((gradients.0, gradients.1, dw))
    }
}
