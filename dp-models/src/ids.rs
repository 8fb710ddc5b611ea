//! Checks of integer ids (tokens, targets) before they index a tensor.

use candle_core::{DType, Result, Tensor, bail};

/// Checks that `ids` is u32 and, on the CPU, that each id is below `bound`; `what` names the ids in the error.
///
/// On an accelerator the range is left to candle's kernels, which abort on an id out of range: reading the largest id back
/// would make the host wait for the device in every step. candle itself reads the id `u32::MAX` as "a row of zeros".
pub(crate) fn check_ids(what: &str, ids: &Tensor, bound: usize) -> Result<()> {
    if ids.dtype() != DType::U32 {
        bail!("{what} must be u32, got {:?}", ids.dtype())
    }
    if !ids.device().is_cpu() || ids.elem_count() == 0 {
        return Ok(());
    }
    let largest = ids.flatten_all()?.max(0)?.to_scalar::<u32>()?;
    if largest as usize >= bound {
        bail!("{what} contain the id {largest}, but ids must be below {bound}")
    }
    Ok(())
}
