//! Gradient hooks: a parameter is a tensor that reports its gradient as soon as it is complete.
//!
//! A parameter is the output of a custom op ([`HookOp`]) on a scalar anchor variable. During `backward`, Candle calls
//! the op's `bwd` as soon as the parameter's gradient is complete: that is the gradient hook. `bwd` returns no gradient
//! for the anchor, so Candle keeps no copy. PyTorch calls this `register_post_accumulate_grad_hook`.

use std::sync::{Arc, Weak};

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Shape, Tensor};
use parking_lot::{Mutex, RwLock};

use crate::error::{Error, Result};

/// Receives finished gradients.
pub(crate) trait GradientSink: Send + Sync {
    /// The gradient of parameter `param_idx` is complete. Runs inside `backward`, on its thread.
    fn gradient_ready(&self, param_idx: usize, grad: &Tensor) -> Result<()>;
}

/// Where the parameters of one store look for their sink. It holds the sink weakly: the sink owns the store, the store
/// the parameters, and these the slot.
#[derive(Default)]
pub(crate) struct HookSlot(RwLock<Option<Weak<dyn GradientSink>>>);

impl HookSlot {
    pub fn attach(&self, sink: Weak<dyn GradientSink>) {
        *self.0.write() = Some(sink);
    }

    fn sink(&self) -> Option<Arc<dyn GradientSink>> {
        self.0.read().as_ref()?.upgrade()
    }
}

/// The op whose output is a parameter.
pub(crate) struct HookOp {
    pub name: Arc<str>,
    pub param_idx: usize,
    pub hooks: Arc<HookSlot>,
    /// Handed out by the one forward call that creates the parameter.
    pub initial: Mutex<Option<(CpuStorage, Shape)>>,
}

impl HookOp {
    fn take_initial(&self) -> candle_core::Result<(CpuStorage, Shape)> {
        self.initial.lock().take().ok_or_else(|| {
            candle_core::Error::msg(format!("parameter `{}` was already created", self.name))
        })
    }
}

impl CustomOp1 for HookOp {
    fn name(&self) -> &'static str {
        "parameter"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        self.take_initial()
    }

    /// Copies the initial values to the device of the anchor: they are drawn, or read, on the host, so that they are the
    /// same everywhere.
    fn cuda_fwd(
        &self,
        anchor: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        let (values, shape) = self.take_initial()?;
        let values = anchor.device().storage_from_cpu_storage_owned(values)?;
        Ok((values, shape))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let sink = self.hooks.sink().ok_or_else(|| {
            Error::parameter(
                &self.name,
                "its gradient arrived, but no trainer listens; create a DistributedDataParallel or a ZeroOptimizer \
                 over its ParamStore, keep it alive, and call backward on it",
            )
        })?;
        sink.gradient_ready(self.param_idx, grad)?;
        Ok(None)
    }
}
