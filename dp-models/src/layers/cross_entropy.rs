//! Mean cross-entropy of logits against class ids.

use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, CustomOp1, D, Layout, Result, Shape, Tensor, bail};

use super::values::{Values, is_fusable, slice};
use super::widen::widen;
use crate::ids::check_ids;
use crate::kernels;

/// Mean cross-entropy, as `torch.nn.functional.cross_entropy(logits, targets)`:
///
/// `mean over rows of (log(sum_j exp(logits_j)) - logits_target)`.
///
/// `logits` `[.., V]` of any float dtype, `targets` `[..]` u32 class ids below `V`. The result is a scalar, in f32 for
/// 16-bit logits and else in the dtype of the logits. The mean is over all leading dimensions, so the loss of a batch is the
/// mean of the losses of its equal shards.
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let logits = Tensor::new(&[[0f32, 0.], [100., -100.]], &Device::Cpu)?;
/// let targets = Tensor::new(&[1u32, 0], &Device::Cpu)?;
/// let loss = dp_models::cross_entropy(&logits, &targets)?.to_scalar::<f32>()?;
/// assert!((loss - 0.5 * 2f32.ln()).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
///
/// Logits of fewer than two dimensions, targets of another shape than the logits' leading dimensions, no targets at all,
/// targets that are not u32, or (checked on the CPU) a target that is not below `V`.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let [lead @ .., classes] = logits.dims() else {
        bail!("cross_entropy needs logits [.., V], got a scalar")
    };
    if lead.is_empty() || targets.dims() != lead {
        bail!(
            "cross_entropy needs logits [.., V] and targets [..], got {:?} and {:?}",
            logits.shape(),
            targets.shape()
        )
    }
    if targets.elem_count() == 0 {
        bail!("cross_entropy got no targets, so there is no mean")
    }
    check_ids("targets", targets, *classes)?;

    let logits = widen(&logits.flatten_to(D::Minus2)?)?;
    if is_fusable(&logits) {
        let op = CrossEntropy {
            targets: targets.flatten_all()?.to_vec1()?,
            log_sums: Mutex::default(),
        };
        return logits.contiguous()?.apply_op1(op);
    }
    let targets = targets.flatten_all()?.unsqueeze(1)?.contiguous()?;
    // Only `shifted` uses the logits, so the backward pass visits them once. The maximum is a constant for it: it cancels.
    let shifted = logits.broadcast_sub(&logits.detach().max_keepdim(1)?)?;
    let log_sum_exp = shifted.exp()?.sum_keepdim(1)?.log()?;
    (log_sum_exp - shifted.gather(&targets, 1)?)?.mean_all()
}

struct CrossEntropy {
    targets: Vec<u32>,
    /// `log(sum(exp(logits)))` of each row, which forward leaves for backward.
    log_sums: Mutex<Vec<f32>>,
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross-entropy"
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (sum, log_sums) = kernels::cross_entropy_forward(slice(logits, layout)?, &self.targets);
        *self.log_sums.lock().unwrap_or_else(PoisonError::into_inner) = log_sums;
        let mean = sum / self.targets.len() as f64;
        Ok((CpuStorage::F32(vec![mean as f32]), Shape::from(())))
    }

    fn bwd(&self, logits: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let scale = grad.to_scalar::<f32>()? / self.targets.len() as f32;
        let mut dx = vec![0f32; logits.elem_count()];
        let log_sums = self.log_sums.lock().unwrap_or_else(PoisonError::into_inner);
        kernels::cross_entropy_backward(
            &Values::of(logits)?,
            &self.targets,
            &log_sums,
            scale,
            &mut dx,
        );
        Ok(Some(Tensor::from_vec(dx, logits.shape(), logits.device())?))
    }
}
