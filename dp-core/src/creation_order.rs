//! Which of two tensors is older.

use candle_core::Tensor;

/// Candle numbers tensors in the order of their creation, but shows the number in the `Debug` text only. `None` if that text
/// has changed: what depends on it is a check that then is not made.
pub(crate) fn creation_number(tensor: &Tensor) -> Option<usize> {
    let text = format!("{:?}", tensor.id());
    text.strip_prefix("TensorId(")?
        .strip_suffix(')')?
        .parse()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_tensors_have_greater_numbers() -> candle_core::Result<()> {
        let first = Tensor::new(1f32, &candle_core::Device::Cpu)?;
        let second = first.sqr()?;
        assert!(creation_number(&first).is_some());
        assert!(creation_number(&first) < creation_number(&second));
        Ok(())
    }
}
