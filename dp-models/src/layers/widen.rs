//! f32 arithmetic for 16-bit tensors.

use candle_core::{DType, Result, Tensor};

/// `x` in f32 if it is f16 or bf16, else `x` itself. The conversion has a backward pass.
pub(super) fn widen(x: &Tensor) -> Result<Tensor> {
    match x.dtype() {
        DType::F16 | DType::BF16 => x.to_dtype(DType::F32),
        _ => Ok(x.clone()),
    }
}
