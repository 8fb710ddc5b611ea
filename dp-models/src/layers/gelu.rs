//! The tanh form of GELU.

use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};

use super::values::{Values, is_fusable, slice};
use super::widen::widen;
use crate::kernels;

/// GELU in its tanh form, as `torch.nn.functional.gelu(x, approximate="tanh")` (Hendrycks and Gimpel, arXiv 1606.08415):
///
/// `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
///
/// Any shape, any float dtype; 16-bit input is computed in f32. In f64 and on other devices it is candle's `gelu()`, whose
/// constants have six digits.
///
/// # Errors
///
/// An integer dtype.
pub fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    let wide = widen(x)?;
    let y = match is_fusable(&wide) {
        true => wide.contiguous()?.apply_op1(Gelu)?,
        false => wide.gelu()?,
    };
    y.to_dtype(x.dtype())
}

struct Gelu;

impl CustomOp1 for Gelu {
    fn name(&self) -> &'static str {
        "gelu-tanh"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = slice(x, layout)?;
        let mut y = vec![0f32; x.len()];
        kernels::gelu(x, &mut y);
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let mut dx = Values::of(x)?.to_vec();
        kernels::gelu_backward(&mut dx, &Values::of(&grad.contiguous()?)?);
        Ok(Some(Tensor::from_vec(dx, x.shape(), x.device())?))
    }
}
