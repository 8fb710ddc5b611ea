//! One named tensor of a model, whose values are read and written in place.

#[cfg(feature = "cuda")]
mod cuda;

use std::io::Write;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use candle_core::{CpuStorage, InplaceOp1, Layout, Storage, Tensor};
use parking_lot::Mutex;

use crate::buffer::{Buffer, Element, with_element};
use crate::error::{Error, Result};
use crate::little_endian::write_le;
use crate::memory::{Category, Ledger};
use crate::precision::{narrow, widen, with_trainable};

#[cfg(feature = "cuda")]
pub(crate) use cuda::{with_cuda, with_cuda_mut};

/// What a named tensor of the model is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ParamKind {
    /// Trained: it has a gradient hook.
    Trained,
    /// A parameter that keeps its value: no gradient, no optimizer state.
    Frozen,
    /// State that layers write themselves, such as batch-norm statistics: no gradient.
    Buffer,
}

/// A named tensor of a [`ParamStore`](crate::ParamStore).
#[derive(Debug, Clone)]
pub struct Param {
    pub(crate) name: Arc<str>,
    pub(crate) tensor: Tensor,
    pub(crate) kind: ParamKind,
    pub(crate) tied: bool,
}

impl Param {
    /// A trained parameter that lives elsewhere than in a store.
    pub(crate) fn trained(name: &str, tensor: &Tensor) -> Self {
        Self {
            name: name.into(),
            tensor: tensor.clone(),
            kind: ParamKind::Trained,
            tied: false,
        }
    }

    /// The full name, e.g. `blocks.0.qkv.weight`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The tensor that the model's layers hold.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Trained, frozen or buffer.
    pub fn kind(&self) -> ParamKind {
        self.kind
    }

    /// True if several layers have asked for it: tied weights.
    pub fn is_tied(&self) -> bool {
        self.tied
    }

    /// Number of elements.
    pub fn num_elements(&self) -> usize {
        self.tensor.elem_count()
    }

    /// Copies elements `range` (row-major) of a f32, f16 or bf16 parameter to `out`, without a temporary on the CPU.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for other dtypes; [`Error::InvalidArgument`] if lengths do not fit; [`Error::Cuda`] if
    /// the values cannot be copied from a device.
    pub fn read(&self, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        self.check_range(&range, out.len())?;
        with_trainable!(self.tensor.dtype(), T => {
            #[cfg(feature = "cuda")]
            if self.is_cuda() {
                return cuda::read::<T>(&self.tensor, range, out);
            }
            with_values(&self.tensor, |values: &[T]| widen(&values[range], out))
        })
    }

    /// Overwrites elements `range` (row-major) in place, rounded to the parameter's dtype: layers see the new values at once.
    ///
    /// A trainer keeps f32 masters of 16-bit parameters, and refuses to step after they have changed behind its back; use
    /// [`Trainer::set_parameter`](crate::Trainer::set_parameter) there, or
    /// [`Trainer::refresh_masters`](crate::Trainer::refresh_masters) afterwards.
    ///
    /// # Errors
    /// See [`read`](Self::read).
    pub fn write(&self, range: Range<usize>, values: &[f32]) -> Result<()> {
        self.check_range(&range, values.len())?;
        with_trainable!(self.tensor.dtype(), T => {
            self.write_with::<T>(range, |at, own| {
                narrow(&values[at], own);
                Ok(())
            })
        })
    }

    /// Copies elements `range` to `buffer`, which has the parameter's dtype and lies where the parameter does, from element
    /// `at` on.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for another dtype; [`Error::InvalidArgument`] if lengths or places do not fit.
    pub fn copy_to(&self, range: Range<usize>, buffer: &mut Buffer, at: usize) -> Result<()> {
        self.check_range(&range, buffer.len().saturating_sub(at).min(range.len()))?;
        with_element!(self.tensor.dtype(), T => {
            #[cfg(feature = "cuda")]
            if self.is_cuda() {
                return cuda::copy_to::<T>(&self.tensor, range, buffer, at);
            }
            let out = &mut buffer.as_mut_slice::<T>()?[at..at + range.len()];
            with_values::<T, _>(&self.tensor, |values| out.copy_from_slice(&values[range]))
        })
    }

    /// Overwrites elements `range` in place by those of `buffer`, which has the parameter's dtype, from element `at` on. The
    /// buffer lies where the parameter does, or in the host's memory.
    ///
    /// # Errors
    /// See [`copy_to`](Self::copy_to).
    pub fn copy_from(&self, range: Range<usize>, buffer: &Buffer, at: usize) -> Result<()> {
        self.check_range(&range, buffer.len().saturating_sub(at).min(range.len()))?;
        with_element!(self.tensor.dtype(), T => {
            #[cfg(feature = "cuda")]
            if self.is_cuda() {
                return cuda::copy_from::<T>(&self.tensor, range, buffer, at);
            }
            let values = &buffer.as_slice::<T>()?[at..at + range.len()];
            with_values_mut::<T, _>(&self.tensor, |own| own[range].copy_from_slice(values))
        })
    }

    /// Writes elements `range` (row-major), of any float dtype, as little-endian bytes.
    pub(crate) fn write_le(&self, range: Range<usize>, out: &mut dyn Write) -> Result<()> {
        let failed = |e| Error::parameter(&self.name, format!("writing its values: {e}"));
        with_element!(self.tensor.dtype(), T => {
            #[cfg(feature = "cuda")]
            if self.is_cuda() {
                return cuda::write_le::<T>(&self.tensor, range, out).map_err(failed);
            }
            with_values::<T, _>(&self.tensor, |values| write_le(&values[range], out))?
        })
        .map_err(failed)
    }

    /// Lets `f` overwrite elements `range` in place: it gets their positions in `range` and their memory, all at once on the
    /// CPU, and piece by piece on a device, to which they are copied.
    pub(crate) fn write_with<T: Element>(
        &self,
        range: Range<usize>,
        mut f: impl FnMut(Range<usize>, &mut [T]) -> Result<()>,
    ) -> Result<()> {
        #[cfg(feature = "cuda")]
        if self.is_cuda() {
            return cuda::write_with::<T>(&self.tensor, range, f);
        }
        with_values_mut::<T, _>(&self.tensor, |own| f(0..range.len(), &mut own[range]))?
    }

    /// True if the values lie in the memory of a CUDA device.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_cuda(&self) -> bool {
        self.tensor.device().is_cuda()
    }

    fn check_range(&self, range: &Range<usize>, len: usize) -> Result<()> {
        if range.start <= range.end && range.end <= self.num_elements() && range.len() == len {
            return Ok(());
        }
        let own = self.num_elements();
        let message = format!(
            "elements {range:?} of {own} in `{}`, with {len} values",
            self.name
        );
        Err(Error::invalid("range", message))
    }

    /// A copy of the values, of any float dtype.
    pub(crate) fn to_buffer(&self, ledger: &Ledger) -> Result<Buffer> {
        let (dtype, len) = (self.tensor.dtype(), self.num_elements());
        let (device, category) = (self.tensor.device(), Category::Communication);
        let mut buffer = Buffer::reserved_on(dtype, len, device, ledger, category)?;
        self.copy_to(0..len, &mut buffer, 0)?;
        Ok(buffer)
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
