//! The update of parameters on CUDA devices.

use std::ops::Range;

use candle_core::cuda_backend::cudarc::driver::{CudaView, CudaViewMut};
use smallvec::SmallVec;

use crate::buffer::Buffer;
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
            let rule = Rule {
                optimizer: &optimizers[self.group_of[index]],
                step: self.param_steps[index],
                divisor,
                grad_scale,
            };
            let (tensor, states) = (self.params[index].tensor(), &mut *states);
            with_trainable!(gradient.dtype(), G => {
                let (device, grad) = gradient.on_cuda::<G>(at.clone())?;
                let kernels = Kernels::of(device)?;
                match &mut masters {
                    None => with_cuda_mut::<f32, _>(tensor, |_, mut values| {
                        let values = values.slice_mut(segment.in_param);
                        let state = views(states, &at)?;
                        rule.apply::<G, f32>(&kernels, values, None, grad, state)
                    }),
                    Some(masters) => with_trainable!(bucket.dtype, T => {
                        with_cuda_mut::<T, _>(tensor, |_, mut values| {
                            let values = values.slice_mut(segment.in_param);
                            let masters = masters.cuda_mut()?.view_mut(at.clone())?;
                            let state = views(states, &at)?;
                            rule.apply(&kernels, masters, Some(values), grad, state)
                        })
                    }),
                }
            })?;
        }
        Ok(())
    }
}

/// Optimizer state of the elements that an update is about.
type State<'v> = SmallVec<[CudaViewMut<'v, f32>; 4]>;

fn views<'v>(states: &'v mut [Buffer], at: &Range<usize>) -> Result<State<'v>> {
    let view = |state: &'v mut Buffer| state.cuda_mut()?.view_mut(at.clone());
    states.iter_mut().map(view).collect()
}

/// How a parameter is updated in this step.
struct Rule<'a, O> {
    optimizer: &'a O,
    step: u64,
    divisor: f32,
    grad_scale: f32,
}

impl<O: Optimizer> Rule<'_, O> {
    fn apply<'v, G: CudaFloat, P: CudaFloat>(
        &self,
        kernels: &Kernels,
        mut values: CudaViewMut<'v, f32>,
        mut rounded: Option<CudaViewMut<'v, P>>,
        grad: CudaView<'v, G>,
        mut state: State<'v>,
    ) -> Result<()> {
        let update = Update {
            values: &mut values,
            rounded: rounded.as_mut(),
            grad: &grad,
            divisor: self.divisor,
            state: &mut state,
        };
        let (step, grad_scale) = (self.step, self.grad_scale);
        match self.optimizer.fused() {
            Some(FusedOptimizer::AdamW(adamw)) => {
                kernels.adamw(adamw.factors(step, grad_scale), update)
            }
            Some(FusedOptimizer::Sgd(sgd)) => kernels.sgd(sgd.factors(step, grad_scale), update),
            None => {
                let message = format!("{} has no CUDA kernel", self.optimizer.name());
                Err(Error::invalid("optimizer", message))
            }
        }
    }
}
