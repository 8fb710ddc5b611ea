//! Initial values from a safetensors file.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use candle_core::safetensors::MmapedSafetensors;
use candle_core::{CpuStorage, DType, Device, Shape, Storage};
use parking_lot::Mutex;

use crate::buffer::{Element, with_element};
use crate::error::{Error, Result};
use crate::param::Param;

/// A mapped file, and which of its tensors have been asked for.
pub(crate) struct InitialValues {
    path: PathBuf,
    tensors: MmapedSafetensors,
    used: Mutex<BTreeSet<String>>,
}

impl InitialValues {
    pub fn open(path: &Path) -> Result<Self> {
        // SAFETY: the usual condition of a memory map: the file must not be changed while it is mapped. Values are
        // copied out when parameters are created, and the map ends with the store.
        let tensors = unsafe { MmapedSafetensors::new(path) }.map_err(|e| Error::File {
            path: path.to_path_buf(),
            message: e.to_string(),
        })?;
        Ok(Self {
            path: path.to_path_buf(),
            tensors,
            used: Mutex::default(),
        })
    }

    /// The shape of a tensor; `None` if it is not in the file.
    pub fn shape(&self, name: &str) -> Option<Shape> {
        Some(self.tensors.get(name).ok()?.shape().to_vec().into())
    }

    /// Fails for a dtype that Candle cannot read, with a message that names the tensor.
    pub fn check_dtype(&self, name: &str) -> Result<(), String> {
        let dtype = self.tensors.get(name).map_err(|e| e.to_string())?.dtype();
        match DType::try_from(dtype) {
            Ok(_) => Ok(()),
            Err(e) => Err(format!(
                "`{name}` has a dtype that Candle does not read: {e}"
            )),
        }
    }

    /// All names, sorted.
    pub fn names(&self) -> Vec<String> {
        let names = self.tensors.tensors().into_iter().map(|(name, _)| name);
        let mut names: Vec<String> = names.collect();
        names.sort();
        names
    }

    /// Names that nobody has asked for, sorted.
    pub fn unused(&self) -> Vec<String> {
        let used = self.used.lock();
        let mut names = self.names();
        names.retain(|name| !used.contains(name));
        names
    }

    /// Overwrites a parameter's values in place, converted to its dtype.
    pub fn load_into(&self, param: &Param) -> Result<()> {
        let tensor = param.tensor();
        let values = self.load(param.name(), tensor.shape(), tensor.dtype())?;
        with_element!(tensor.dtype(), T => {
            let values = T::vec(&values).ok_or_else(|| Error::parameter(param.name(), "was loaded with another dtype"))?;
            param.write_with::<T>(0..values.len(), |at, own| {
                own.copy_from_slice(&values[at]);
                Ok(())
            })
        })
    }

    /// The values of a tensor, which must have this shape, converted to `dtype`.
    pub fn load(&self, name: &str, shape: &Shape, dtype: DType) -> Result<CpuStorage> {
        let file = self.path.display();
        let missing = |e| Error::parameter(name, format!("not in {file}: {e}"));
        let tensor = self.tensors.load(name, &Device::Cpu).map_err(missing)?;
        if tensor.shape() != shape {
            return Err(Error::parameter(
                name,
                format!(
                    "has shape {:?} in {file}, but {shape:?} in the model",
                    tensor.shape()
                ),
            ));
        }
        self.used.lock().insert(name.to_string());
        let tensor = tensor.to_dtype(dtype)?.contiguous()?;
        let (storage, _) = tensor.storage_and_layout();
        match &*storage {
            // Freshly loaded, so the layout starts at 0 and covers the storage.
            Storage::Cpu(values) => Ok(values.clone()),
            _ => Err(Error::parameter(name, "was not loaded to the CPU")),
        }
    }
}
