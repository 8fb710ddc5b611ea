//! The loss on held-out text.

use candle_core::DType;
use dp_core::{Rank, weighted_mean};
use dp_models::CausalLm;

use super::dataset::Dataset;

/// The mean loss over `max` sequences, evenly spread over `data`, or over all with `max` 0. Collective: each rank takes its
/// share, and all get the same number, whatever the number of ranks, to rounding.
///
/// # Errors
/// Those of Candle and of the collectives.
pub fn evaluate(
    model: &dyn CausalLm,
    data: &Dataset,
    max: usize,
    micro_batch_size: usize,
    rank: &Rank,
) -> anyhow::Result<f64> {
    let count = match max {
        0 => data.len(),
        max => max.min(data.len()),
    };
    let own = (rank.rank()..count).step_by(rank.world_size());
    let own: Vec<usize> = own.map(|i| i * data.len() / count).collect();
    let mut sum = 0.0;
    for sequences in own.chunks(micro_batch_size) {
        let (inputs, targets) = data.batch(sequences, rank.device())?;
        let loss = model.loss(&inputs, &targets)?.to_dtype(DType::F32)?;
        sum += f64::from(loss.to_scalar::<f32>()?) * sequences.len() as f64;
    }
    Ok(weighted_mean(rank.comm().as_ref(), sum, own.len() as f64)?)
}
