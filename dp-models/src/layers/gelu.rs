//! GELU, in its tanh form and in its exact form.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

use super::chunks::{ELEMENTS, Output, map};
use super::values::{Numbers, Values, gradient, is_fusable};
use super::widen::widen;
use crate::kernels;

/// GELU in its tanh form, as `torch.nn.functional.gelu(x, approximate="tanh")` (Hendrycks and Gimpel, arXiv 1606.08415):
///
/// `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
///
/// Any shape, any float dtype; 16-bit input is computed in f32 and rounded once. In f64 and on other devices it is candle's
/// `gelu()`, whose constants have six digits.
///
/// # Errors
///
/// An integer dtype.
pub fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    match is_fusable(&[x]) {
        true => x.contiguous()?.apply_op1(Gelu::Tanh),
        false => widen(x)?.gelu()?.to_dtype(x.dtype()),
    }
}

/// GELU in its exact form, as `torch.nn.functional.gelu(x)` (Hendrycks and Gimpel, arXiv 1606.08415): `x` times the
/// distribution function of the standard normal, which is
///
/// `0.5 x (1 + erf(x / sqrt(2)))`.
///
/// Any shape, any float dtype; 16-bit input is computed in f32 and rounded once. In f32 on the CPU the error is below
/// `3e-7 |x|`. In f64 and on other devices it is candle's `gelu_erf()`, whose gradient has a constant of six digits.
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let y = dp_models::gelu_erf(&Tensor::new(&[-1f32, 0., 1.], &Device::Cpu)?)?.to_vec1::<f32>()?;
/// assert!((y[0] + 0.158_655).abs() < 1e-6 && y[1] == 0. && (y[2] - 0.841_345).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
///
/// An integer dtype.
pub fn gelu_erf(x: &Tensor) -> Result<Tensor> {
    match is_fusable(&[x]) {
        true => x.contiguous()?.apply_op1(Gelu::Erf),
        false => widen(x)?.gelu_erf()?.to_dtype(x.dtype()),
    }
}

enum Gelu {
    Tanh,
    Erf,
}

impl CustomOp1 for Gelu {
    fn name(&self) -> &'static str {
        match self {
            Self::Tanh => "gelu-tanh",
            Self::Erf => "gelu-erf",
        }
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = Numbers::of(x, layout)?;
        let (y, _) = map([(x, ELEMENTS)], Output::like(x), |_, [x], y| match self {
            Self::Tanh => kernels::gelu_tanh(x, y),
            Self::Erf => kernels::gelu_erf(x, y),
        })?;
        Ok((y, layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let grad = grad.contiguous()?;
        let (values, grad) = (Values::of(x), Values::of(&grad));
        let numbers = values.numbers()?;
        let inputs = [(numbers, ELEMENTS), (grad.numbers()?, ELEMENTS)];
        let (dx, _) = map(inputs, Output::like(numbers), |_, [x, grad], dx| {
            dx.copy_from_slice(x);
            match self {
                Self::Tanh => kernels::gelu_tanh_backward(dx, grad),
                Self::Erf => kernels::gelu_erf_backward(dx, grad),
            }
        })?;
        Ok(Some(gradient(dx, x)?))
    }
}
