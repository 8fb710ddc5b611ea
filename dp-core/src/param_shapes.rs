//! The parameters of a model that is not there: what they would be.

use std::collections::HashMap;
use std::sync::Arc;

use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::param_kinds::ParamKinds;
use crate::param_spec::{ParamSpec, check_same};

/// Finds out names, shapes, dtypes and kinds of a model's parameters without allocating them (the meta device of PyTorch serves
/// the same end). Any code that takes a `VarBuilder` can be asked.
///
/// Each tensor that the builder returns is one zero, broadcast to its shape with strides of 0, so a model of any size takes a
/// few bytes per parameter. Such a model can be built, and is not meant to be run. What a constructor computes from its
/// parameters is computed in full: `candle_nn::batch_norm` copies its statistics.
///
/// Rules are those of [`ParamStore`](crate::ParamStore): a name that is asked for twice is one parameter, kinds go by name. The order is that
/// of creation.
///
/// ```
/// use candle_core::DType;
/// use dp_core::{ParamShapes, Result};
///
/// # fn main() -> Result<()> {
/// let specs = ParamShapes::record(DType::BF16, |vb| candle_nn::linear(1 << 20, 1 << 20, vb.pp("fc")))?; // 2 TiB
/// assert_eq!((specs[0].name.as_str(), specs[0].num_bytes()), ("fc.weight", 2 << 40));
/// assert_eq!(specs[1].shape, [1 << 20]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Default)]
pub struct ParamShapes {
    kinds: ParamKinds,
    recorded: Arc<Mutex<Recorded>>,
}

#[derive(Default)]
struct Recorded {
    /// In creation order.
    specs: Vec<ParamSpec>,
    /// What the layers were given, by name.
    known: HashMap<String, Tensor>,
}

impl ParamShapes {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// All parameters that `build` asks for, in creation order. `build` may return the model, or nothing.
    ///
    /// # Errors
    /// Those of `build`; [`Error::Parameter`] for a name that is asked for with two shapes or dtypes.
    pub fn record<M>(
        dtype: DType,
        build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>,
    ) -> Result<Vec<ParamSpec>> {
        let shapes = Self::new();
        build(shapes.var_builder(dtype))?;
        Ok(shapes.specs())
    }

    /// As [`ParamStore::with_frozen`](crate::ParamStore::with_frozen).
    #[must_use]
    pub fn with_frozen(mut self, predicate: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        self.kinds.frozen = Some(Arc::new(predicate));
        self
    }

    /// As [`ParamStore::with_buffers`](crate::ParamStore::with_buffers).
    #[must_use]
    pub fn with_buffers(
        mut self,
        predicate: impl Fn(&str) -> bool + Send + Sync + 'static,
    ) -> Self {
        self.kinds.is_buffer = Arc::new(predicate);
        self
    }

    /// A builder for layers, on the CPU; several of different dtypes may be used for one model.
    pub fn var_builder(&self, dtype: DType) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self.clone()), dtype, Device::Cpu)
    }

    /// What has been asked for, in creation order.
    pub fn specs(&self) -> Vec<ParamSpec> {
        self.recorded.lock().specs.clone()
    }
}

impl std::fmt::Debug for ParamShapes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let params = self.recorded.lock().specs.len();
        f.debug_struct("ParamShapes")
            .field("params", &params)
            .finish()
    }
}

impl SimpleBackend for ParamShapes {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: Init,
        dtype: DType,
        _: &Device,
    ) -> candle_core::Result<Tensor> {
        let mut recorded = self.recorded.lock();
        if let Some(known) = recorded.known.get(name) {
            check_same(name, (known.shape(), known.dtype()), (&shape, dtype))?;
            return Ok(known.clone());
        }
        let tensor = Tensor::zeros((), dtype, &Device::Cpu)?.broadcast_as(&shape)?;
        recorded.specs.push(ParamSpec {
            name: name.to_string(),
            shape: shape.into_dims(),
            dtype,
            kind: self.kinds.of(name),
        });
        recorded.known.insert(name.to_string(), tensor.clone());
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> candle_core::Result<Tensor> {
        let known = self.recorded.lock().known.get(name).cloned();
        known.ok_or_else(|| Error::parameter(name, "its shape must be given to record it").into())
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.recorded.lock().known.contains_key(name)
    }
}
