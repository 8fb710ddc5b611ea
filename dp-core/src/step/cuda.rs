//! The update of parameters on CUDA devices.

use candle_core::cuda_backend::cudarc::driver::CudaViewMut;
use smallvec::SmallVec;

use crate::cuda::{CudaFloat, Kernels, Update};
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::mean_gradient::MeanGradient;
use crate::optim::{FusedOptimizer, Optimizer};
use crate::param::with_cuda_mut;
use crate::precision::with_trainable;
use crate::strategy::Strategy;

impl<O: Optimizer> Engine<O> {
    /// Updates the elements of `bucket` that this rank owns, in the parameters' own memory: one kernel per parameter, which
    /// divides, clips, applies, and rounds in one pass. Returns when the kernels are on the stream.
    pub(super) fn update_owned_on_cuda(
        &mut self,
        strategy: &dyn Strategy,
        bucket: usize,
        optimizers: &[O],
        used: &[bool],
        divisor: f32,
    ) -> Result<()> {
        let grad_scale = self.clipping.as_ref().map_or(1.0, |c| c.factor);
        let gradient = MeanGradient::of(strategy, bucket, divisor)?;
        let (owned, states) = (self.owned[bucket].clone(), &mut self.states[bucket]);
        let mut masters = self.masters.of_mut(bucket);
        let bucket = &self.layout.buckets()[bucket];
        for segment in bucket.segments(owned) {
            let (index, at) = (segment.param_idx, segment.in_owned);
            if !used[index] {
                continue;
            }
            let (optimizer, step) = (&optimizers[self.group_of[index]], self.param_steps[index]);
            let tensor = self.params[index].tensor();
            let mut state: SmallVec<[CudaViewMut<'_, f32>; 4]> = states
                .iter_mut()
                .map(|state| state.cuda_mut()?.view_mut(at.clone()))
                .collect::<Result<_>>()?;
            with_trainable!(gradient.dtype(), G => {
                let (device, grad) = gradient.on_cuda::<G>(at.clone())?;
                let kernels = Kernels::of(device)?;
                match &mut masters {
                    None => with_cuda_mut::<f32, _>(tensor, |_, mut values| {
                        let mut values = values.slice_mut(segment.in_param);
                        update(&kernels, optimizer, Update::<G, f32> {
                            step,
                            values: &mut values,
                            rounded: None,
                            grad: &grad,
                            divisor,
                            grad_scale,
                            state: &mut state,
                        })
                    }),
                    Some(masters) => with_trainable!(bucket.dtype, T => {
                        let mut masters = masters.cuda_mut()?.view_mut::<f32>(at)?;
                        with_cuda_mut::<T, _>(tensor, |_, mut values| {
                            let mut values = values.slice_mut(segment.in_param);
                            update(&kernels, optimizer, Update {
                                step,
                                values: &mut masters,
                                rounded: Some(&mut values),
                                grad: &grad,
                                divisor,
                                grad_scale,
                                state: &mut state,
                            })
                        })
                    }),
                }
            })?;
        }
        Ok(())
    }
}

fn update<O: Optimizer, G: CudaFloat, P: CudaFloat>(
    kernels: &Kernels,
    optimizer: &O,
    update: Update<'_, '_, G, P>,
) -> Result<()> {
    match optimizer.fused() {
        Some(FusedOptimizer::AdamW(adamw)) => kernels.adamw(adamw, update),
        Some(FusedOptimizer::Sgd(sgd)) => kernels.sgd(sgd, update),
        None => {
            let message = format!("{} has no CUDA kernel", optimizer.name());
            Err(Error::invalid("optimizer", message))
        }
    }
}
