//! The graph of a loss: which parameters it uses, and whether it is of this step.

use std::collections::{HashMap, HashSet};
use std::fmt::{self, Write};

use candle_core::{CpuStorage, DType, Device, Storage, Tensor, TensorId};

#[cfg(feature = "cuda")]
use candle_core::CudaStorage;

use crate::error::{Error, Result};
use crate::param::{Param, ParamKind};

/// Finds one trainer's parameters in the graphs of losses.
pub(crate) struct LossGraph {
    /// Positions of the trained parameters.
    by_tensor: HashMap<TensorId, usize>,
    /// Where their values lie: views of a parameter lie there, too.
    places: HashSet<usize>,
    /// Number of a tensor that was created when the parameters had changed last.
    updated_at: Option<usize>,
    /// What [`visit`](Self::visit) has found last.
    used: Vec<usize>,
}

impl LossGraph {
    /// Parameters count as changed just now.
    pub fn new(params: &[Param]) -> Result<Self> {
        let trained = |p: &&Param| p.kind() == ParamKind::Trained;
        let mut graph = Self {
            by_tensor: params
                .iter()
                .enumerate()
                .filter(|(_, p)| trained(p))
                .map(|(i, p)| (p.tensor().id(), i))
                .collect(),
            places: params
                .iter()
                .filter(trained)
                .filter_map(|p| place(p.tensor()))
                .collect(),
            updated_at: None,
            used: Vec::with_capacity(params.len()),
        };
        graph.mark_update()?;
        Ok(graph)
    }

    /// The parameters have changed: what was computed before must not be used any more.
    pub fn mark_update(&mut self) -> Result<()> {
        let marker = Tensor::zeros((), DType::U8, &Device::Cpu)?;
        self.updated_at = creation_number(&marker);
        Ok(())
    }

    /// Finds the parameters that `loss` is computed from: [`used`](Self::used).
    ///
    /// # Errors
    /// [`Error::Misuse`] if a part of the graph that depends on a parameter was computed before the last update: its
    /// backward would mix old and new values. Parameters themselves and views of them show the new values.
    pub fn visit(&mut self, loss: Option<&Tensor>) -> Result<()> {
        self.used.clear();
        let nodes = loss.map(Tensor::sorted_nodes).unwrap_or_default();
        for node in &nodes {
            if self.is_old(node)
                && node
                    .sorted_nodes()
                    .iter()
                    .any(|n| self.by_tensor.contains_key(&n.id()))
            {
                let message = format!(
                    "a part of the loss's graph, {node:?}, was computed before the last change of the parameters (a step, a \
                     load, or the making of the trainer), from values that are gone; run the forward again, and detach what \
                     is carried over from one step to the next"
                );
                return Err(Error::misuse("backward", message));
            }
        }
        let positions = nodes
            .iter()
            .filter_map(|n| self.by_tensor.get(&n.id()).copied());
        self.used.extend(positions);
        Ok(())
    }

    /// Positions of the parameters of the loss that was visited last.
    pub fn used(&self) -> &[usize] {
        &self.used
    }

    /// True for a computed tensor from before the last update.
    fn is_old(&self, node: &Tensor) -> bool {
        let old = match (creation_number(node), self.updated_at) {
            (Some(number), Some(update)) => number < update,
            _ => false,
        };
        old && !node.is_variable()
            && !self.by_tensor.contains_key(&node.id())
            && place(node).is_none_or(|place| !self.places.contains(&place))
    }
}

/// Candle numbers tensors in the order of their creation, but shows the number in the `Debug` text only. `None` if that text
/// has changed: then stale graphs are not found.
fn creation_number(tensor: &Tensor) -> Option<usize> {
    /// There are many nodes, so the text is kept on the stack.
    struct Text([u8; 40], usize);

    impl fmt::Write for Text {
        fn write_str(&mut self, part: &str) -> fmt::Result {
            let end = self.1 + part.len();
            let place = self.0.get_mut(self.1..end).ok_or(fmt::Error)?;
            place.copy_from_slice(part.as_bytes());
            self.1 = end;
            Ok(())
        }
    }

    let mut text = Text([0; 40], 0);
    write!(text, "{:?}", tensor.id()).ok()?;
    let text = std::str::from_utf8(&text.0[..text.1]).ok()?;
    text.strip_prefix("TensorId(")?
        .strip_suffix(')')?
        .parse()
        .ok()
}

/// The address of the storage of a tensor of a trainable dtype, which its views share.
fn place(tensor: &Tensor) -> Option<usize> {
    let (storage, _) = tensor.storage_and_layout();
    match &*storage {
        Storage::Cpu(CpuStorage::F32(values)) => Some(values.as_ptr() as usize),
        Storage::Cpu(CpuStorage::F16(values)) => Some(values.as_ptr() as usize),
        Storage::Cpu(CpuStorage::BF16(values)) => Some(values.as_ptr() as usize),
        #[cfg(feature = "cuda")]
        Storage::Cuda(storage) => device_address(storage),
        _ => None,
    }
}

/// [`place`] on a CUDA device. Its addresses and the host's are never the same: CUDA gives them out of one address space.
#[cfg(feature = "cuda")]
fn device_address(storage: &CudaStorage) -> Option<usize> {
    use candle_core::cuda_backend::CudaStorageSlice;
    use candle_core::cuda_backend::cudarc::driver::DevicePtr;

    // Asked for as if to read: the address is only compared, so it does not matter what is to be done there.
    let stream = storage.device.cuda_stream();
    let address = match &storage.slice {
        CudaStorageSlice::F32(values) => values.device_ptr(&stream).0,
        CudaStorageSlice::F16(values) => values.device_ptr(&stream).0,
        CudaStorageSlice::BF16(values) => values.device_ptr(&stream).0,
        _ => return None,
    };
    usize::try_from(address).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_tensors_have_greater_numbers() -> candle_core::Result<()> {
        let first = Tensor::new(1f32, &Device::Cpu)?;
        let second = first.sqr()?;
        assert!(creation_number(&first).is_some());
        assert!(creation_number(&first) < creation_number(&second));
        Ok(())
    }

    #[test]
    fn views_lie_where_their_tensor_does() -> candle_core::Result<()> {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let tensor = Tensor::zeros((3, 4), dtype, &Device::Cpu)?;
            assert!(place(&tensor).is_some());
            for view in [tensor.t()?, tensor.narrow(0, 1, 2)?, tensor.reshape(12)?] {
                assert_eq!(place(&view), place(&tensor));
            }
            assert_ne!(place(&tensor.t()?.contiguous()?), place(&tensor));
        }
        Ok(())
    }
}
