//! The loss of one rank's micro-batch, and what it weighs in the mean over all ranks.

use candle_core::{DType, Tensor};

use crate::error::{Error, Result};

/// One rank's loss, and how it enters the mean. With `w` the weight, the gradients of a step are
///
/// ```text
/// (sum over ranks and micro-batches of w * gradient of the rank's mean) / (sum over ranks and micro-batches of w)
/// ```
///
/// so they are exact where ranks hold different numbers of samples or tokens, none included. All ranks use the same kind
/// in a step: either [`PerRank`](Self::PerRank), or one of the counted ones; [`Nothing`](Self::Nothing) goes with both.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Loss<'a> {
    /// A mean over the rank's own samples, and each rank weighs the same (a mean of means): `w = 1`. What PyTorch's
    /// DistributedDataParallel does.
    PerRank(&'a Tensor),
    /// A mean over `count` samples or tokens: `w = count`. With a count of 0 the loss is ignored, also if it is NaN.
    Mean {
        /// One number.
        loss: &'a Tensor,
        /// What it is the mean of.
        count: usize,
    },
    /// A sum over `count` samples or tokens: `w = count`, and the gradient of the rank's mean is this one's over `count`.
    Sum {
        /// One number.
        loss: &'a Tensor,
        /// What it is the sum of.
        count: usize,
    },
    /// This rank has no data left, and joins the others with weight 0.
    Nothing,
}

/// The kinds of weights that cannot be mixed in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WeightKind {
    PerRank,
    Counted,
}

/// A loss that is multiplied by its weight, or whose gradients will be.
pub(crate) struct WeightedLoss {
    /// `None`: nothing to compute.
    pub tensor: Option<Tensor>,
    pub weight: f64,
    /// What its gradients are still to be multiplied by.
    pub factor: f32,
    pub kind: Option<WeightKind>,
}

impl Loss<'_> {
    pub(crate) fn tensor(&self) -> Option<&Tensor> {
        match self {
            Self::PerRank(loss) | Self::Mean { loss, .. } | Self::Sum { loss, .. } => Some(loss),
            Self::Nothing => None,
        }
    }

    /// The loss times its weight: what it adds to the numerator of the mean. Copied from the device. 0 where the weight is.
    pub(crate) fn weighted_value(self) -> Result<f64> {
        let (loss, factor) = match self {
            Self::Nothing | Self::Mean { count: 0, .. } | Self::Sum { count: 0, .. } => {
                return Ok(0.0);
            }
            Self::PerRank(loss) | Self::Sum { loss, .. } => (loss, 1.0),
            Self::Mean { loss, count } => (loss, count as f64),
        };
        let loss = match loss.rank() {
            0 => loss.clone(),
            _ => loss.reshape(())?,
        };
        let value = match loss.dtype() {
            DType::F32 => f64::from(loss.to_scalar::<f32>()?),
            DType::F16 => loss.to_scalar::<half::f16>()?.to_f64(),
            DType::BF16 => loss.to_scalar::<half::bf16>()?.to_f64(),
            _ => loss.to_dtype(DType::F64)?.to_scalar::<f64>()?,
        };
        Ok(value * factor)
    }

    /// `scale`: all losses are multiplied by it. `late`: the weight is multiplied into the gradients, in f32. A gradient of 16
    /// bits has no room for a count.
    pub(crate) fn weighted(self, scale: f64, late: bool) -> Result<WeightedLoss> {
        let (loss, weight, kind) = match self {
            Self::PerRank(loss) => (loss, 1, Some(WeightKind::PerRank)),
            Self::Mean { loss, count } | Self::Sum { loss, count } => {
                (loss, count, Some(WeightKind::Counted))
            }
            Self::Nothing => {
                return Ok(WeightedLoss {
                    tensor: None,
                    weight: 0.0,
                    factor: 1.0,
                    kind: None,
                });
            }
        };
        if loss.elem_count() != 1 {
            let shape = loss.shape();
            return Err(Error::invalid(
                "loss",
                format!("must be one number, got shape {shape:?}"),
            ));
        }
        let count = weight as f64;
        let (now, later) = match self {
            Self::Mean { .. } if late => (scale, count),
            Self::Sum { .. } if late => (scale / count, count),
            Self::Mean { .. } => (scale * count, 1.0),
            _ => (scale, 1.0),
        };
        let tensor = match loss.dtype() {
            _ if weight == 0 => None,
            _ if now == 1.0 => Some(loss.clone()),
            DType::F16 | DType::BF16 => Some((loss.to_dtype(DType::F32)? * now)?),
            _ => Some((loss * now)?),
        };
        Ok(WeightedLoss {
            tensor,
            weight: count,
            factor: later as f32,
            kind,
        })
    }
}
