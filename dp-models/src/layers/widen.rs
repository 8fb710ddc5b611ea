//! f32 arithmetic for 16-bit tensors where layers are composed of Candle's operations.

use candle_core::{DType, Result, Tensor};

use super::values::is_at_most_32_bits;

/// `x` in f32 if it is f16 or bf16, else `x` itself. The conversion has a backward pass.
pub(super) fn widen(x: &Tensor) -> Result<Tensor> {
    match x.dtype() {
        DType::F16 | DType::BF16 => x.to_dtype(DType::F32),
        _ => Ok(x.clone()),
    }
}

/// A parameter, or a mask, in the dtype of the input it is applied to. Only between f32, f16 and bf16; Candle reports other mixtures.
pub(super) fn follow(parameter: &Tensor, x: &Tensor) -> Result<Tensor> {
    match is_at_most_32_bits(parameter.dtype()) && is_at_most_32_bits(x.dtype()) {
        true => parameter.to_dtype(x.dtype()),
        false => Ok(parameter.clone()),
    }
}
