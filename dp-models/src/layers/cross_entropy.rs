//! Mean cross-entropy of logits against class ids.

use std::sync::OnceLock;

use candle_core::{CpuStorage, CustomOp1, D, DType, Layout, Result, Shape, Tensor, bail};

use super::chunks::{Output, map};
use super::values::{Numbers, Values, gradient, into_f32, is_fusable};
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

    let logits = logits.flatten_to(D::Minus2)?;
    if is_fusable(&[&logits]) {
        let op = CrossEntropy {
            targets: targets.flatten_all()?.to_vec1()?,
            log_sums: OnceLock::new(),
        };
        return logits.contiguous()?.apply_op1(op);
    }
    let logits = widen(&logits)?;
    let targets = targets.flatten_all()?.unsqueeze(1)?.contiguous()?;
    // Only `shifted` uses the logits, so the backward pass visits them once. The maximum is a constant for it: it cancels.
    let shifted = logits.broadcast_sub(&logits.detach().max_keepdim(1)?)?;
    let log_sum_exp = shifted.exp()?.sum_keepdim(1)?.log()?;
    (log_sum_exp - shifted.gather(&targets, 1)?)?.mean_all()
}

struct CrossEntropy {
    targets: Vec<u32>,
    /// `log(sum(exp(logits)))` of each row, which forward leaves for backward.
    log_sums: OnceLock<Vec<f32>>,
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        "cross-entropy"
    }

    fn cpu_fwd(&self, logits: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let logits = Numbers::of(logits, layout)?;
        let classes = logits.len() / self.targets.len();
        let rows = kernels::cross_entropy_rows(classes);
        let output = Output {
            dtype: DType::F32,
            len: self.targets.len(),
            chunk: rows,
        };
        let (log_sums, losses) = map([(logits, rows * classes)], output, |idx, [logits], out| {
            kernels::log_sum_exp(logits, out);
            let targets = &self.targets[idx * rows..][..out.len()];
            let rows = logits.chunks_exact(classes).zip(targets);
            let losses = rows.zip(&*out);
            losses
                .map(|((row, target), log_sum)| log_sum - row[*target as usize])
                .collect::<Vec<f32>>()
        })?;
        let log_sums = into_f32(log_sums)?;
        let sum: f64 = losses.iter().flatten().map(|loss| f64::from(*loss)).sum();
        self.log_sums.get_or_init(|| log_sums);
        let mean = sum / self.targets.len() as f64;
        Ok((CpuStorage::F32(vec![mean as f32]), Shape::from(())))
    }

    fn bwd(&self, logits: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let scale = grad.to_scalar::<f32>()? / self.targets.len() as f32;
        let Some(log_sums) = self.log_sums.get() else {
            bail!("cross-entropy has no backward pass before its forward pass")
        };
        let values = Values::of(logits);
        let numbers = values.numbers()?;
        let classes = numbers.len() / self.targets.len();
        let rows = kernels::cross_entropy_rows(classes);
        let inputs = [(numbers, rows * classes), (Numbers::F32(log_sums), rows)];
        let output = Output::rows(numbers, rows * classes);
        let (dx, _) = map(inputs, output, |idx, [logits, log_sums], dx| {
            let targets = &self.targets[idx * rows..][..log_sums.len()];
            kernels::cross_entropy_backward(logits, targets, log_sums, scale, dx);
        })?;
        Ok(Some(gradient(dx, logits)?))
    }
}
