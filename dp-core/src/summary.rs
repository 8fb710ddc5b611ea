//! What all ranks together did in a window of micro-batches: one small all-reduce per step.

use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::loss::{WeightKind, WeightedLoss};
use crate::param::Param;

/// Numbers before the flags of the parameters.
const HEADER: usize = 4;

/// More than there are ranks, and so many times that the sum is still exact.
const ALTERED: f64 = (1u64 << 24) as f64;

/// One rank's micro-batches.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Weights {
    weight: f64,
    /// The sum of losses times weights.
    pub loss: f64,
    num_per_rank: usize,
    num_counted: usize,
}

impl Weights {
    pub fn add(&mut self, loss: &WeightedLoss) {
        self.weight += loss.weight;
        match loss.kind {
            Some(WeightKind::PerRank) => self.num_per_rank += 1,
            Some(WeightKind::Counted) => self.num_counted += 1,
            None => {}
        }
    }

    /// What this rank adds to the sum: its weights, and 1 for each parameter it used, [`ALTERED`] for each whose value is not
    /// the one it has given it, in the order that ranks share.
    pub fn write(
        self,
        order: &[usize],
        used: &[bool],
        altered: &[bool],
        buffer: &mut Buffer,
    ) -> Result<()> {
        let (header, flags) = buffer.as_mut_slice::<f64>()?.split_at_mut(HEADER);
        header.copy_from_slice(&[
            self.weight,
            self.num_per_rank as f64,
            self.num_counted as f64,
            self.loss,
        ]);
        for (flag, &i) in flags.iter_mut().zip(order) {
            *flag = f64::from(u8::from(used[i])) + ALTERED * f64::from(u8::from(altered[i]));
        }
        Ok(())
    }

    /// A buffer to [`write`](Self::write) to.
    pub fn buffer(order: &[usize]) -> Buffer {
        Buffer::from_vec(vec![0f64; HEADER + order.len()])
    }
}

/// All ranks' micro-batches.
#[derive(Debug, Default)]
pub(crate) struct Summary {
    /// The sum of all weights.
    pub weight: f64,
    /// The sum of all losses times their weights.
    pub loss: f64,
    /// Per parameter: some rank has used it.
    pub used: Vec<bool>,
}

impl Summary {
    /// Reads the sum over ranks.
    ///
    /// # Errors
    /// [`Error::Misuse`], on every rank, if kinds of weights were mixed; [`Error::Altered`] if a parameter was changed by
    /// somebody else.
    pub fn read(&mut self, sum: &Buffer, order: &[usize], params: &[Param]) -> Result<()> {
        let sum = sum.as_slice::<f64>()?;
        let (num_per_rank, num_counted) = (sum[1], sum[2]);
        if num_per_rank > 0.0 && num_counted > 0.0 {
            return Err(Error::misuse(
                "backward",
                format!(
                    "over all ranks and micro-batches of this step, {num_per_rank} losses weigh the same per rank and \
                     {num_counted} weigh by a count; use one kind, so that the mean has a meaning"
                ),
            ));
        }
        self.weight = sum[0];
        self.loss = sum[3];
        self.used.resize(order.len(), false);
        for (&param_idx, flag) in order.iter().zip(&sum[HEADER..]) {
            if *flag >= ALTERED {
                return Err(Error::Altered {
                    parameter: params[param_idx].name().to_string(),
                });
            }
            self.used[param_idx] = *flag > 0.0;
        }
        Ok(())
    }
}
