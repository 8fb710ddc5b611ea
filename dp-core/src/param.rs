//! One parameter: a tensor that reports its gradient, and whose values are read and written in place.
//!
//! A parameter is the output of a custom op ([`HookOp`]) on a scalar anchor variable. During `backward`, Candle calls
//! the op's `bwd` as soon as the parameter's gradient is complete: that is the gradient hook. `bwd` returns no gradient
//! for the anchor, so Candle keeps no copy. PyTorch calls this `register_post_accumulate_grad_hook`.

use std::marker::PhantomData;
use std::sync::{Arc, Weak};

use candle_core::{CpuStorage, CustomOp1, InplaceOp1, Layout, Shape, Storage, Tensor};
use parking_lot::{Mutex, RwLock};

use crate::buffer::Element;
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

impl CustomOp1 for HookOp {
    fn name(&self) -> &'static str {
        "parameter"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        self.initial.lock().take().ok_or_else(|| {
            candle_core::Error::msg(format!("parameter `{}` was already created", self.name))
        })
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

/// Reads the values of a contiguous CPU tensor in place.
pub(crate) fn with_values<T: Element, R>(tensor: &Tensor, f: impl FnOnce(&[T]) -> R) -> Result<R> {
    let (storage, layout) = tensor.storage_and_layout();
    let values = match &*storage {
        Storage::Cpu(storage) => T::vec(storage),
        _ => None,
    };
    let values = values.ok_or_else(|| no_access::<T>(tensor))?;
    let (start, end) = contiguous(layout)?;
    Ok(f(&values[start..end]))
}

/// Writes the values of a contiguous CPU tensor in place.
pub(crate) fn with_values_mut<T: Element, R>(
    tensor: &Tensor,
    f: impl FnOnce(&mut [T]) -> R,
) -> Result<R> {
    /// The closure before the call, its result after.
    struct Edit<F, R, T>(Mutex<(Option<F>, Option<R>)>, PhantomData<T>);

    impl<T: Element, F: FnOnce(&mut [T]) -> R, R> InplaceOp1 for Edit<F, R, T> {
        fn name(&self) -> &'static str {
            "edit-in-place"
        }

        fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
            let (start, end) = contiguous(layout)?;
            let mut state = self.0.lock();
            if let (Some(values), Some(f)) = (T::vec_mut(storage), state.0.take()) {
                state.1 = Some(f(&mut values[start..end]));
            }
            Ok(())
        }
    }

    let edit = Edit(Mutex::new((Some(f), None)), PhantomData::<T>);
    tensor.inplace_op1(&edit)?;
    let (_, result) = edit.0.into_inner();
    result.ok_or_else(|| no_access::<T>(tensor))
}

/// Copies the values of a f32 tensor of any layout to `out`, or adds them.
pub(crate) fn read_values(tensor: &Tensor, out: &mut [f32], accumulate: bool) -> Result<()> {
    // Candle's backward hands out sums it has just made, which are contiguous: then this copies nothing.
    with_values(&tensor.contiguous()?, |values: &[f32]| match accumulate {
        true => out.iter_mut().zip(values).for_each(|(o, v)| *o += v),
        false => out.copy_from_slice(values),
    })
}

fn contiguous(layout: &Layout) -> Result<(usize, usize)> {
    layout
        .contiguous_offsets()
        .ok_or_else(|| Error::invalid("tensor", "in-place access needs a contiguous tensor"))
}

fn no_access<T: Element>(tensor: &Tensor) -> Error {
    Error::UnsupportedDType {
        what: format!(
            "access as {} on the CPU to a tensor on {:?}",
            T::DTYPE.as_str(),
            tensor.device().location()
        ),
        dtype: tensor.dtype().as_str(),
        supported: T::DTYPE.as_str(),
    }
}
