//! The tanh form of GELU.

use candle_core::{Result, Tensor};

use super::widen::widen;

/// GELU in its tanh form, as `torch.nn.functional.gelu(x, approximate="tanh")` (Hendrycks and Gimpel, arXiv 1606.08415):
///
/// `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
///
/// Any shape, any float dtype. This is candle's `gelu()`, computed in f32 for 16-bit input: candle's backward pass cubes `x`,
/// which overflows f16 above 40 and turns the gradient into NaN. Its constants have six digits, so a gradient is exact to
/// about 1e-6, also in f64.
///
/// # Errors
///
/// An integer dtype.
pub fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    widen(x)?.gelu()?.to_dtype(x.dtype())
}
