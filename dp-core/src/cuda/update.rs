//! The optimizers' updates: division, clipping, update and rounding in one pass over memory.

use candle_core::cuda_backend::cudarc::driver::{
    CudaView, CudaViewMut, DevicePtr, DevicePtrMut, SyncOnDrop,
};
use smallvec::SmallVec;

use super::args::{AdamWArgs, Flat, SgdArgs};
use super::kernels::{CudaFloat, Kernels, same_len};
use super::sources::Kernel;
use crate::error::{Error, Result};
use crate::optim::{AdamWFactors, SgdFactors};

/// The elements of one parameter that a rank updates: slices of equal length. `G` is the dtype of gradients, `P` that of the
/// parameter.
pub(crate) struct Update<'a, 'v, G, P> {
    /// The f32 parameter itself, or the f32 master of a 16-bit one.
    pub values: &'a mut CudaViewMut<'v, f32>,
    /// The 16-bit parameter, which becomes `values` rounded; `None` (and any `P`) for a f32 parameter.
    pub rounded: Option<&'a mut CudaViewMut<'v, P>>,
    /// The reduced gradient. It counts as `grad / divisor`, in f32, times the factors' `grad_scale`.
    pub grad: &'a CudaView<'v, G>,
    /// What is left to divide by, not 0: total weight over the number of ranks, times the loss scale.
    pub divisor: f32,
    /// f32 optimizer state in the order of [`Optimizer::state_names`](crate::Optimizer::state_names), or more.
    pub state: &'a mut [CudaViewMut<'v, f32>],
}

impl Kernels {
    /// [`Optimizer::update`](crate::Optimizer::update) of [`AdamW`](crate::AdamW), whose `factors` these are; two states.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if lengths differ or states are missing; [`Error::Cuda`] if the driver refuses.
    pub fn adamw<G: CudaFloat, P: CudaFloat>(
        &self,
        factors: AdamWFactors,
        update: Update<'_, '_, G, P>,
    ) -> Result<()> {
        let len = update.grad.len();
        self.with_flat(update, "adamw", 2, |flat| {
            let args = AdamWArgs { flat, factors };
            let kernel = Kernel::of_pair("adamw", G::DTYPE, P::DTYPE);
            // SAFETY: `with_flat` has checked the slices, and keeps their guards until the launch is recorded.
            unsafe { self.launch(kernel, len, &args) }
        })
    }

    /// [`Optimizer::update`](crate::Optimizer::update) of [`Sgd`](crate::Sgd), whose `factors` these are; one state with momentum, none without.
    ///
    /// # Errors
    /// As [`adamw`](Self::adamw).
    pub fn sgd<G: CudaFloat, P: CudaFloat>(
        &self,
        factors: SgdFactors,
        update: Update<'_, '_, G, P>,
    ) -> Result<()> {
        let len = update.grad.len();
        let num_states = usize::from(factors.momentum != 0.0);
        self.with_flat(update, "sgd", num_states, |flat| {
            let args = SgdArgs { flat, factors };
            let kernel = Kernel::of_pair("sgd", G::DTYPE, P::DTYPE);
            // SAFETY: `with_flat` has checked the slices, and keeps their guards until the launch is recorded.
            unsafe { self.launch(kernel, len, &args) }
        })
    }

    /// Checks the slices, and calls `f` with their addresses while this stream may use them.
    fn with_flat<G: CudaFloat, P: CudaFloat>(
        &self,
        update: Update<'_, '_, G, P>,
        call: &'static str,
        num_states: usize,
        f: impl FnOnce(Flat) -> Result<()>,
    ) -> Result<()> {
        let (stream, len) = (self.stream(), update.grad.len());
        if update.state.len() < num_states {
            let message = format!("{call} needs {num_states}, got {}", update.state.len());
            return Err(Error::invalid("optimizer state", message));
        }
        same_len(call, len, update.values.len())?;
        let mut guards: SmallVec<[SyncOnDrop<'_>; 5]> = SmallVec::new();
        let mut state = [0; 2];
        for (address, slice) in state.iter_mut().zip(&mut update.state[..num_states]) {
            same_len(call, len, slice.len())?;
            let (pointer, guard) = slice.device_ptr_mut(stream);
            *address = pointer;
            guards.push(guard);
        }
        let mut rounded = 0;
        if let Some(slice) = update.rounded {
            same_len(call, len, slice.len())?;
            let (pointer, guard) = slice.device_ptr_mut(stream);
            rounded = pointer;
            guards.push(guard);
        }
        let (values, guard) = update.values.device_ptr_mut(stream);
        guards.push(guard);
        let (grad, guard) = update.grad.device_ptr(stream);
        guards.push(guard);
        f(Flat {
            values,
            rounded,
            grad,
            state,
            len: len as u64,
            divisor: update.divisor,
        })
    }
}
