//! Real tabular data: 1,599 red wines of Cortez et al., "Modeling wine preferences by data mining from physicochemical
//! properties", 2009, as the crate linfa-datasets ships them.

use candle_core::{Device, Result, Tensor};
use dp_core::DistributedSampler;

/// Measurements per wine.
pub const FEATURES: usize = 11;

/// Measurements `[wines, 11]` and qualities `[wines, 1]`, f32, standardised (mean 0, variance 1), in a fixed shuffled order.
///
/// # Errors
/// Those of Candle.
pub fn load(device: &Device) -> Result<(Tensor, Tensor)> {
    let data = linfa_datasets::winequality();
    let count = data.records.nrows();
    let x: Vec<f32> = data.records.iter().map(|v| *v as f32).collect();
    let y: Vec<f32> = data.targets.iter().map(|quality| *quality as f32).collect();
    let order = DistributedSampler::new(count, 1, 0)?
        .with_shuffle(0)
        .indices(0);
    let order = Tensor::from_iter(order.iter().map(|i| *i as u32), device)?;
    let x = Tensor::from_vec(x, (count, FEATURES), device)?.index_select(&order, 0)?;
    let y = Tensor::from_vec(y, (count, 1), device)?.index_select(&order, 0)?;
    Ok((standardise(&x)?, standardise(&y)?))
}

fn standardise(columns: &Tensor) -> Result<Tensor> {
    let centered = columns.broadcast_sub(&columns.mean_keepdim(0)?)?;
    centered.broadcast_div(&centered.sqr()?.mean_keepdim(0)?.sqrt()?)
}
