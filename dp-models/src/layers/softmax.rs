//! Softmax over the last dimension.

use candle_core::{D, Result, Tensor};

use super::widen::widen;

/// Softmax over the last dimension, as `torch.softmax(x, -1)`: `exp(x - max(x)) / sum(exp(x - max(x)))`.
///
/// Input and output `[.., V]` of any float dtype. An element of minus infinity gets the probability 0; a row of nothing
/// else gives NaN, as in PyTorch.
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let p = dp_models::softmax(&Tensor::new(&[[1000f32, 1000.]], &Device::Cpu)?)?;
/// assert_eq!(p.to_vec2::<f32>()?, [[0.5, 0.5]]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
///
/// A scalar input, or an integer dtype.
pub fn softmax(x: &Tensor) -> Result<Tensor> {
    let wide = widen(x)?;
    // The result does not depend on the shift, so the maximum is a constant for the backward pass.
    let max = wide.detach().max_keepdim(D::Minus1)?;
    let exp = wide.broadcast_sub(&max)?.exp()?;
    let inverse_sum = exp.sum_keepdim(D::Minus1)?.recip()?;
    exp.broadcast_mul(&inverse_sum)?.to_dtype(x.dtype())
}
