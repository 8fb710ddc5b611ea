//! The numbers of CPU tensors, for the fused layers: f32, f16 and bf16.

use std::borrow::Cow;
use std::ops::Range;

use candle_core::{CpuStorage, DType, Layout, Result, Shape, Storage, Tensor, bail};
use half::slice::HalfFloatSliceExt;
use parking_lot::RwLockReadGuard;

use crate::kernels::{narrow_bf16, narrow_f16, widen_bf16, widen_f16};

/// True if fused kernels can compute with these tensors: all on the CPU, each in f32, f16 or bf16.
pub(super) fn is_fusable(tensors: &[&Tensor]) -> bool {
    let fits = |t: &&Tensor| t.device().is_cpu() && is_at_most_32_bits(t.dtype());
    tensors.iter().all(fits)
}

pub(super) fn is_at_most_32_bits(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

/// The numbers of a contiguous tensor on the CPU, without a copy, as long as this is alive.
pub(super) struct Values<'a> {
    storage: RwLockReadGuard<'a, Storage>,
    layout: &'a Layout,
}

impl<'a> Values<'a> {
    pub fn of(tensor: &'a Tensor) -> Self {
        let (storage, layout) = tensor.storage_and_layout();
        Self { storage, layout }
    }

    pub fn numbers(&self) -> Result<Numbers<'_>> {
        match &*self.storage {
            Storage::Cpu(storage) => Numbers::of(storage, self.layout),
            _ => bail!("a fused layer got a tensor that is not on the CPU"),
        }
    }
}

/// Floats in the type they are stored in; f16 and bf16 by their bits.
#[derive(Clone, Copy)]
pub(super) enum Numbers<'a> {
    F32(&'a [f32]),
    F16(&'a [u16]),
    BF16(&'a [u16]),
}

impl<'a> Numbers<'a> {
    /// What lies behind a layout, as custom operations get it.
    pub fn of(storage: &'a CpuStorage, layout: &Layout) -> Result<Self> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("a fused layer got a tensor that is not contiguous")
        };
        let all = match storage {
            CpuStorage::F32(x) => Self::F32(x),
            CpuStorage::F16(x) => Self::F16(x.reinterpret_cast()),
            CpuStorage::BF16(x) => Self::BF16(x.reinterpret_cast()),
            _ => bail!("a fused layer got a tensor that is not f32, f16 or bf16"),
        };
        Ok(all.range(start..end))
    }

    pub fn dtype(self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::F16(_) => DType::F16,
            Self::BF16(_) => DType::BF16,
        }
    }

    pub fn len(self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::F16(x) | Self::BF16(x) => x.len(),
        }
    }

    pub fn range(self, range: Range<usize>) -> Self {
        match self {
            Self::F32(x) => Self::F32(&x[range]),
            Self::F16(x) => Self::F16(&x[range]),
            Self::BF16(x) => Self::BF16(&x[range]),
        }
    }

    /// `out` as long as these numbers.
    pub fn copy_to(self, out: &mut [f32]) {
        match self {
            Self::F32(x) => out.copy_from_slice(x),
            Self::F16(x) => widen_f16(x, out),
            Self::BF16(x) => widen_bf16(x, out),
        }
    }

    /// In f32; a copy if they are not.
    pub fn to_f32(self) -> Cow<'a, [f32]> {
        match self {
            Self::F32(x) => Cow::Borrowed(x),
            _ => {
                let mut wide = vec![0f32; self.len()];
                self.copy_to(&mut wide);
                Cow::Owned(wide)
            }
        }
    }
}

/// As [`Numbers`], to write.
pub(super) enum NumbersMut<'a> {
    F32(&'a mut [f32]),
    F16(&'a mut [u16]),
    BF16(&'a mut [u16]),
}

impl<'a> NumbersMut<'a> {
    pub fn of(storage: &'a mut CpuStorage) -> Result<Self> {
        Ok(match storage {
            CpuStorage::F32(x) => Self::F32(x),
            CpuStorage::F16(x) => Self::F16(x.reinterpret_cast_mut()),
            CpuStorage::BF16(x) => Self::BF16(x.reinterpret_cast_mut()),
            _ => bail!("a fused layer computes f32, f16 or bf16"),
        })
    }

    fn len(&self) -> usize {
        match self {
            Self::F32(x) => x.len(),
            Self::F16(x) | Self::BF16(x) => x.len(),
        }
    }

    /// The first `mid` numbers, or all if there are fewer; and the others.
    pub fn split_at(self, mid: usize) -> (Self, Self) {
        let mid = mid.min(self.len());
        match self {
            Self::F32(x) => {
                let (a, b) = x.split_at_mut(mid);
                (Self::F32(a), Self::F32(b))
            }
            Self::F16(x) => {
                let (a, b) = x.split_at_mut(mid);
                (Self::F16(a), Self::F16(b))
            }
            Self::BF16(x) => {
                let (a, b) = x.split_at_mut(mid);
                (Self::BF16(a), Self::BF16(b))
            }
        }
    }

    /// What `compute` leaves in its argument, which is zeros at first, rounded once.
    pub fn fill<R>(self, compute: impl FnOnce(&mut [f32]) -> R) -> R {
        let (mut wide, result);
        match self {
            Self::F32(out) => return compute(out),
            Self::F16(out) => {
                wide = vec![0f32; out.len()];
                result = compute(&mut wide);
                narrow_f16(&wide, out);
            }
            Self::BF16(out) => {
                wide = vec![0f32; out.len()];
                result = compute(&mut wide);
                narrow_bf16(&wide, out);
            }
        }
        result
    }
}

/// `len` zeros of a dtype that fused layers know.
pub(super) fn zeros(dtype: DType, len: usize) -> Result<CpuStorage> {
    Ok(match dtype {
        DType::F32 => CpuStorage::F32(vec![0.0; len]),
        DType::F16 => CpuStorage::F16(vec![Default::default(); len]),
        DType::BF16 => CpuStorage::BF16(vec![Default::default(); len]),
        _ => bail!("a fused layer computes f32, f16 or bf16, not {dtype:?}"),
    })
}

/// f32 numbers, each rounded once to `dtype`; not copied if that is f32.
pub(super) fn round(values: Vec<f32>, dtype: DType) -> Result<CpuStorage> {
    if dtype == DType::F32 {
        return Ok(CpuStorage::F32(values));
    }
    let mut rounded = zeros(dtype, values.len())?;
    match NumbersMut::of(&mut rounded)? {
        NumbersMut::F32(_) => {}
        NumbersMut::F16(out) => narrow_f16(&values, out),
        NumbersMut::BF16(out) => narrow_bf16(&values, out),
    }
    Ok(rounded)
}

/// The numbers of a storage in f32; not copied if they are.
pub(super) fn into_f32(storage: CpuStorage) -> Result<Vec<f32>> {
    let numbers = match &storage {
        CpuStorage::F16(x) => Numbers::F16(x.reinterpret_cast()),
        CpuStorage::BF16(x) => Numbers::BF16(x.reinterpret_cast()),
        _ => match storage {
            CpuStorage::F32(x) => return Ok(x),
            _ => bail!("a fused layer computes f32, f16 or bf16"),
        },
    };
    Ok(numbers.to_f32().into_owned())
}

/// A tensor on the CPU, of the shape of `like`: its gradient.
pub(super) fn gradient(storage: CpuStorage, like: &Tensor) -> Result<Tensor> {
    let shape: &Shape = like.shape();
    match storage {
        CpuStorage::F32(x) => Tensor::from_vec(x, shape, like.device()),
        CpuStorage::F16(x) => Tensor::from_vec(x, shape, like.device()),
        CpuStorage::BF16(x) => Tensor::from_vec(x, shape, like.device()),
        _ => bail!("a fused layer computes f32, f16 or bf16"),
    }
}

/// The gradient of a parameter, summed in f32 and rounded once; none if it needs none.
pub(super) fn parameter_gradient(sum: Vec<f32>, parameter: &Tensor) -> Result<Option<Tensor>> {
    match parameter.track_op() {
        true => Ok(Some(gradient(round(sum, parameter.dtype())?, parameter)?)),
        false => Ok(None),
    }
}
