//! The mask that hides later positions from earlier ones.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Result, Tensor};

/// Makes causal masks, and keeps the last one: in training `T` stays the same, so the mask is made once.
///
/// A mask is `[T, T]`: 0 where key `j` may be seen by query `i` (`j <= i`), minus infinity elsewhere. It is added to the
/// scores before the softmax. Adding is cheaper than `where_cond`, whose backward pass makes two masked copies of the scores.
#[derive(Clone, Debug)]
pub struct CausalMask {
    dtype: DType,
    device: Device,
    /// The mask of the most recent length; `None` before the first use. Clones share it, as they share their parameters.
    last: Arc<Mutex<Option<Tensor>>>,
}

impl CausalMask {
    /// Masks for scores of this dtype on this device.
    pub fn new(dtype: DType, device: &Device) -> Self {
        Self {
            dtype,
            device: device.clone(),
            last: Arc::default(),
        }
    }

    /// The mask `[len, len]`.
    ///
    /// # Errors
    ///
    /// The device is out of memory.
    pub fn get(&self, len: usize) -> Result<Tensor> {
        // A panic elsewhere leaves a whole mask or none, so a poisoned lock is still good.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match &*last {
            Some(mask) if mask.dims() == [len, len] => Ok(mask.clone()),
            _ => Ok(last.insert(self.make(len)?).clone()),
        }
    }

    fn make(&self, len: usize) -> Result<Tensor> {
        let values: Vec<f32> = (0..len)
            .flat_map(|i| (0..len).map(move |j| if j <= i { 0. } else { f32::NEG_INFINITY }))
            .collect();
        Tensor::from_vec(values, (len, len), &self.device)?.to_dtype(self.dtype)
    }
}
