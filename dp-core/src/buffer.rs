//! Flat, owned blocks of numbers: what collectives take, fill and give back.

#[cfg(feature = "cuda")]
mod cuda;

use std::io::{self, Write};
use std::ops::Range;

use candle_core::{CpuStorage, DType, Device, DeviceLocation};
use half::{bf16, f16};

use crate::error::{Error, Result};
use crate::little_endian::write_le;
use crate::memory::{Category, Ledger, Reservation};
use crate::precision::{add, with_trainable};

pub use crate::element::Element;
pub(crate) use crate::element::with_element;
#[cfg(feature = "cuda")]
pub(crate) use cuda::{
    CudaMemory, copy as cuda_copy, for_each_piece as cuda_pieces, upload as cuda_upload,
    write_with as cuda_write_with,
};

/// A flat block of `len` elements of one dtype, owned by one rank at a time, in the host's memory or in a device's.
///
/// A collective takes the buffer, and its [`Pending`](crate::comm::Pending) gives the same block back: nothing is
/// copied on the way in or out. A buffer made with [`Buffer::reserved`] is entered in a [`Ledger`] as long as it lives.
///
/// The elements of a buffer in a device's memory are not at hand as a slice; [`to_vec`](Self::to_vec) copies them.
#[derive(Debug)]
pub struct Buffer {
    // Declared before the reservation, so that it is freed before the ledger forgets it.
    memory: Memory,
    reservation: Option<Reservation>,
}

/// Where the elements lie.
#[derive(Debug)]
enum Memory {
    Host(CpuStorage),
    #[cfg(feature = "cuda")]
    Cuda(CudaMemory),
}

impl Buffer {
    /// Zeros, in the host's memory.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for dtypes that are no [`Element`].
    pub fn zeros(dtype: DType, len: usize) -> Result<Self> {
        let storage = match dtype {
            DType::F32 => CpuStorage::F32(vec![0.0; len]),
            DType::F64 => CpuStorage::F64(vec![0.0; len]),
            DType::F16 => CpuStorage::F16(vec![f16::ZERO; len]),
            DType::BF16 => CpuStorage::BF16(vec![bf16::ZERO; len]),
            DType::U8 => CpuStorage::U8(vec![0; len]),
            DType::U32 => CpuStorage::U32(vec![0; len]),
            DType::I64 => CpuStorage::I64(vec![0; len]),
            other => return Err(unsupported(other)),
        };
        Ok(Self::new(Memory::Host(storage)))
    }

    /// Zeros, in the memory of `device`.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for dtypes that are no [`Element`]; [`Error::Cuda`] if the device has no room;
    /// [`Error::InvalidArgument`] for devices that this build does not train on.
    pub fn zeros_on(dtype: DType, len: usize, device: &Device) -> Result<Self> {
        match device {
            Device::Cpu => Self::zeros(dtype, len),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                let memory = CudaMemory::zeros(dtype, len, device)?;
                Ok(Self::new(Memory::Cuda(memory)))
            }
            other => Err(unsupported_device(other)),
        }
    }

    /// Zeros, entered in `ledger` under `category` with exactly `len` times the element size.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for dtypes that are no [`Element`].
    pub fn reserved(dtype: DType, len: usize, ledger: &Ledger, category: Category) -> Result<Self> {
        Self::reserved_on(dtype, len, &Device::Cpu, ledger, category)
    }

    /// [`zeros_on`](Self::zeros_on), entered in `ledger` under `category` with exactly `len` times the element size.
    ///
    /// # Errors
    /// See [`zeros_on`](Self::zeros_on).
    pub fn reserved_on(
        dtype: DType,
        len: usize,
        device: &Device,
        ledger: &Ledger,
        category: Category,
    ) -> Result<Self> {
        let bytes = (len * dtype.size_in_bytes()) as u64;
        let reservation = ledger.reserve_on(device, category, bytes);
        let mut buffer = Self::zeros_on(dtype, len, device)?;
        buffer.reservation = Some(reservation);
        Ok(buffer)
    }

    /// Takes over `values` without a copy.
    pub fn from_vec<T: Element>(values: Vec<T>) -> Self {
        Self::new(Memory::Host(T::storage(values)))
    }

    fn new(memory: Memory) -> Self {
        Self {
            memory,
            reservation: None,
        }
    }

    /// The elements' dtype.
    pub fn dtype(&self) -> DType {
        match &self.memory {
            Memory::Host(storage) => dtype_of(storage),
            #[cfg(feature = "cuda")]
            Memory::Cuda(memory) => memory.dtype(),
        }
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        match &self.memory {
            Memory::Host(storage) => {
                with_element!(dtype_of(storage), T => T::vec(storage).map_or(0, Vec::len))
            }
            #[cfg(feature = "cuda")]
            Memory::Cuda(memory) => memory.len(),
        }
    }

    /// True without elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where the elements lie.
    pub fn location(&self) -> DeviceLocation {
        match &self.memory {
            Memory::Host(_) => DeviceLocation::Cpu,
            #[cfg(feature = "cuda")]
            Memory::Cuda(memory) => memory.location(),
        }
    }

    /// The elements.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] if the buffer holds another type than `T`; [`Error::InvalidArgument`] if the elements
    /// lie in a device's memory.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        let values = T::vec(self.host()?).map(Vec::as_slice);
        values.ok_or_else(|| wrong_type::<T>(self.dtype()))
    }

    /// The elements, to be written.
    ///
    /// # Errors
    /// See [`as_slice`](Self::as_slice).
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        let dtype = self.dtype();
        let values = T::vec_mut(self.host_mut()?).map(Vec::as_mut_slice);
        values.ok_or_else(|| wrong_type::<T>(dtype))
    }

    /// Gives the elements out without a copy.
    ///
    /// # Errors
    /// See [`as_slice`](Self::as_slice).
    pub fn into_vec<T: Element>(mut self) -> Result<Vec<T>> {
        let dtype = self.dtype();
        let values = T::vec_mut(self.host_mut()?).map(std::mem::take);
        values.ok_or_else(|| wrong_type::<T>(dtype))
    }

    /// A copy of the elements in the host's memory, wherever they lie. Waits for what a device has to do on them.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] if the buffer holds another type than `T`; [`Error::Cuda`] if they cannot be copied.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        match &self.memory {
            Memory::Host(_) => Ok(self.as_slice::<T>()?.to_vec()),
            #[cfg(feature = "cuda")]
            Memory::Cuda(memory) => memory.to_vec(0..memory.len()),
        }
    }

    /// Makes the buffer `len` elements long; it grows with zeros. Within the length it was created with, nothing is
    /// allocated.
    ///
    /// # Errors
    /// [`Error::Cuda`] if a device has no room for it. On the host it does not fail.
    pub fn resize(&mut self, len: usize) -> Result<()> {
        match &mut self.memory {
            Memory::Host(storage) => {
                with_element!(dtype_of(storage), T => if let Some(v) = T::vec_mut(storage) {
                    v.resize(len, T::ZERO);
                });
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Memory::Cuda(memory) => memory.resize(len),
        }
    }

    /// Sets elements `range` to zero.
    ///
    /// # Errors
    /// [`Error::Cuda`] if a device cannot do it. On the host it does not fail.
    pub fn fill_zero(&mut self, range: Range<usize>) -> Result<()> {
        match &mut self.memory {
            Memory::Host(storage) => {
                with_element!(dtype_of(storage), T => if let Some(v) = T::vec_mut(storage) {
                    v[range].fill(T::ZERO);
                });
                Ok(())
            }
            #[cfg(feature = "cuda")]
            Memory::Cuda(memory) => memory.fill_zero(range),
        }
    }

    /// Becomes a copy of elements `range` of `other`, which has the same dtype and lies in the same memory.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for another dtype.
    pub fn copy_from(&mut self, other: &Self, range: Range<usize>) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Memory::Cuda(memory) = &mut self.memory {
            return memory.copy_from(other.cuda()?, range);
        }
        with_element!(self.dtype(), T => {
            self.as_mut_slice::<T>()?.copy_from_slice(&other.as_slice::<T>()?[range]);
        });
        Ok(())
    }

    /// Adds elements `range` of `other`, floats of the same dtype. 16-bit sums are rounded once.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for another dtype, and for what is not trained.
    pub fn add_from(&mut self, other: &Self, range: Range<usize>) -> Result<()> {
        #[cfg(feature = "cuda")]
        if let Memory::Cuda(memory) = &mut self.memory {
            return memory.add_from(other.cuda()?, range);
        }
        with_trainable!(self.dtype(), T => {
            add::<T, T>(&other.as_slice::<T>()?[range], self.as_mut_slice::<T>()?);
            Ok(())
        })
    }

    /// Writes elements `range` as little-endian bytes, those of a device piece by piece.
    pub(crate) fn write_le(&self, range: Range<usize>, out: &mut dyn Write) -> io::Result<()> {
        with_element!(self.dtype(), T => match &self.memory {
            Memory::Host(_) => {
                let values = self.as_slice::<T>().map_err(io::Error::other)?;
                write_le(&values[range], out)
            }
            #[cfg(feature = "cuda")]
            Memory::Cuda(memory) => {
                memory.for_each_piece::<T>(range, |_, values| write_le(values, out))
            }
        })
    }

    /// Lets `f` write elements `range`: it gets their positions in `range` and their memory, all at once on the host, and
    /// piece by piece where they lie on a device, to which they are copied.
    pub(crate) fn write_with<T: Element>(
        &mut self,
        range: Range<usize>,
        mut f: impl FnMut(Range<usize>, &mut [T]) -> Result<()>,
    ) -> Result<()> {
        match &mut self.memory {
            Memory::Host(_) => f(0..range.len(), &mut self.as_mut_slice::<T>()?[range]),
            #[cfg(feature = "cuda")]
            Memory::Cuda(memory) => memory.write_with(range, f),
        }
    }

    /// Start of the elements in the host's memory, for the backends that let several ranks work on one buffer. Null for a
    /// buffer in a device's memory.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        let Ok(storage) = self.host_mut() else {
            return std::ptr::null_mut();
        };
        with_element!(dtype_of(storage), T => T::vec_mut(storage)
            .map_or(std::ptr::null_mut(), |v| v.as_mut_ptr().cast()))
    }

    fn host(&self) -> Result<&CpuStorage> {
        match &self.memory {
            Memory::Host(storage) => Ok(storage),
            #[cfg(feature = "cuda")]
            Memory::Cuda(_) => Err(not_on_host()),
        }
    }

    fn host_mut(&mut self) -> Result<&mut CpuStorage> {
        match &mut self.memory {
            Memory::Host(storage) => Ok(storage),
            #[cfg(feature = "cuda")]
            Memory::Cuda(_) => Err(not_on_host()),
        }
    }
}

#[cfg(feature = "cuda")]
impl Buffer {
    /// True if the elements lie in the memory of a CUDA device.
    pub(crate) fn is_cuda(&self) -> bool {
        matches!(self.memory, Memory::Cuda(_))
    }

    /// The elements in the memory of a CUDA device.
    pub(crate) fn cuda(&self) -> Result<&CudaMemory> {
        match &self.memory {
            Memory::Cuda(memory) => Ok(memory),
            Memory::Host(_) => Err(not_on_device()),
        }
    }

    /// [`cuda`](Self::cuda), to be written.
    pub(crate) fn cuda_mut(&mut self) -> Result<&mut CudaMemory> {
        match &mut self.memory {
            Memory::Cuda(memory) => Ok(memory),
            Memory::Host(_) => Err(not_on_device()),
        }
    }
}

fn dtype_of(storage: &CpuStorage) -> DType {
    match storage {
        CpuStorage::F32(_) => DType::F32,
        CpuStorage::F64(_) => DType::F64,
        CpuStorage::F16(_) => DType::F16,
        CpuStorage::BF16(_) => DType::BF16,
        CpuStorage::U8(_) => DType::U8,
        CpuStorage::U32(_) => DType::U32,
        _ => DType::I64,
    }
}

fn unsupported(dtype: DType) -> Error {
    Error::UnsupportedDType {
        what: "a buffer".to_string(),
        dtype: dtype.as_str(),
        supported: "f32, f64, f16, bf16, u8, u32, i64",
    }
}

fn unsupported_device(device: &Device) -> Error {
    let message = match device.is_cuda() {
        true => "this build has no CUDA; build with the feature `cuda`".to_string(),
        false => format!("{:?}: use the CPU or CUDA", device.location()),
    };
    Error::invalid("device", message)
}

#[cfg(feature = "cuda")]
fn not_on_host() -> Error {
    let message = "its elements lie in a device's memory; copy them with to_vec";
    Error::invalid("buffer", message)
}

#[cfg(feature = "cuda")]
fn not_on_device() -> Error {
    let message = "its elements lie in the host's memory, the others in a device's";
    Error::invalid("buffer", message)
}

fn wrong_type<T: Element>(dtype: DType) -> Error {
    Error::UnsupportedDType {
        what: format!("access as {}", T::DTYPE.as_str()),
        dtype: dtype.as_str(),
        supported: T::DTYPE.as_str(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_know_their_type_and_length() -> Result<()> {
        let mut b = Buffer::zeros(DType::BF16, 3)?;
        b.as_mut_slice::<bf16>()?[1] = bf16::ONE;
        assert_eq!((b.dtype(), b.len()), (DType::BF16, 3));
        assert!(b.as_slice::<f32>().is_err());
        assert_eq!(b.to_vec::<bf16>()?, [bf16::ZERO, bf16::ONE, bf16::ZERO]);
        assert_eq!(b.into_vec::<bf16>()?, [bf16::ZERO, bf16::ONE, bf16::ZERO]);
        assert!(Buffer::zeros(DType::F8E4M3, 1).is_err());
        Ok(())
    }

    #[test]
    fn reserved_bytes_are_the_allocated_bytes() -> Result<()> {
        let ledger = Ledger::new();
        let b = Buffer::reserved(DType::F16, 5, &ledger, Category::Communication)?;
        assert_eq!(ledger.current().communication, 10);
        drop(b);
        assert_eq!(ledger.current().communication, 0);
        Ok(())
    }
}
