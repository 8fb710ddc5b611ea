//! The short way for existing programs: a `VarMap` and a candle_nn optimizer, made data parallel.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_nn::VarMap;

use crate::buffer::{Buffer, with_element};
use crate::comm::{Collective, Communicator, ReduceOp, Request};
use crate::element::is_element;
use crate::error::{Error, Result};
use crate::memory::Ledger;
use crate::param::Param;
#[cfg(feature = "cuda")]
use crate::param::with_cuda;
use crate::param::with_values;
use crate::param_spec::ParamSpec;
use crate::replica::{broadcast_values, check_replicas};

/// Keeps the `VarMap`s of all ranks alike: two lines in an existing training loop.
///
/// ```
/// use candle_core::{DType, Tensor};
/// use candle_nn::{AdamW, Module, Optimizer, VarBuilder, VarMap};
/// use dp_core::{VarMapSync, World};
///
/// fn main() -> candle_core::Result<()> {
///     World::threads(2)?.run(|rank| -> candle_core::Result<()> {
///         let varmap = VarMap::new();
///         let vb = VarBuilder::from_varmap(&varmap, DType::F32, rank.device());
///         let model = candle_nn::linear(3, 1, vb)?;
///         let ddp = VarMapSync::new(&varmap, rank.comm())?; // first line: rank 0's values everywhere
///         let mut optimizer = AdamW::new_lr(varmap.all_vars(), 1e-3)?;
///
///         let x = Tensor::full(rank.rank() as f32, (4, 3), rank.device())?;
///         let loss = model.forward(&x)?.sqr()?.mean_all()?;
///         let mut grads = loss.backward()?;
///         ddp.all_reduce(&mut grads)?; // second line: the mean over the ranks
///         optimizer.step(&grads)
///     })
/// }
/// ```
///
/// Gradients are reduced after backward, not during it, and every rank keeps the whole optimizer state;
/// [`DistributedDataParallel`](crate::DistributedDataParallel) and the ZeRO trainers do better.
pub struct VarMapSync {
    comm: Arc<dyn Communicator>,
    varmap: VarMap,
    /// In rank 0's order, by name.
    vars: Vec<(String, Var)>,
}

impl VarMapSync {
    /// Collective: checks that all ranks' maps hold the same variables, by name, and gives all of them rank 0's values.
    ///
    /// # Errors
    /// [`Error::ReplicaMismatch`] on every rank if the maps differ; [`Error::Misuse`] on every rank if two ranks share a
    /// variable (one map was built and handed to several ranks): each update would then be applied several times.
    pub fn new(varmap: &VarMap, comm: Arc<dyn Communicator>) -> Result<Self> {
        let mut vars: Vec<(String, Var)> = {
            let data = varmap.data().lock().unwrap_or_else(|e| e.into_inner());
            data.iter()
                .map(|(name, var)| (name.clone(), var.clone()))
                .collect()
        };
        vars.sort_by(|a, b| a.0.cmp(&b.0));
        let params: Vec<Param> = vars
            .iter()
            .map(|(name, var)| Param::trained(name, var.as_tensor()))
            .collect();
        let specs = ParamSpec::of_all(&params);
        check_replicas(&specs, comm.as_ref())?;
        refuse_shared(&vars, comm.as_ref())?;
        broadcast_values(&params, 0..params.len(), comm.as_ref(), &Ledger::new())?;
        Ok(Self {
            comm,
            varmap: varmap.clone(),
            vars,
        })
    }

    /// Replaces the gradients by their means over the ranks. A variable that only some ranks have used counts as zero on
    /// the others; one that no rank has used stays without a gradient.
    ///
    /// # Errors
    /// Those of the collectives; [`Error::Misuse`] if the map has variables that were created after
    /// [`new`](Self::new); [`Error::UnsupportedDType`] on devices other than the CPU and CUDA.
    pub fn all_reduce(&self, grads: &mut GradStore) -> Result<()> {
        self.refuse_late_variables()?;
        let used = self
            .vars
            .iter()
            .map(|(_, var)| u8::from(grads.get(var).is_some()));
        let request = Request::new(Collective::AllReduce(ReduceOp::Max), "used variables");
        let used = self
            .comm
            .start(request, Buffer::from_vec(used.collect::<Vec<u8>>()))?;
        let used = used.wait()?;
        let used = used.as_slice::<u8>()?;
        let used_vars: Vec<_> = self
            .vars
            .iter()
            .zip(used)
            .filter(|(_, u)| **u != 0)
            .collect();
        // All are under way before the first is waited for.
        let mut pending = Vec::with_capacity(used_vars.len());
        for ((name, var), _) in &used_vars {
            let label = format!("gradient of {name}");
            let request = Request::new(Collective::AllReduce(ReduceOp::Mean), label);
            pending.push(self.comm.start(request, gradient_of(name, var, grads)?)?);
        }
        for (((_, var), _), pending) in used_vars.into_iter().zip(pending) {
            grads.insert(var, mean_of(pending.wait()?, var)?);
        }
        Ok(())
    }
}

impl std::fmt::Debug for VarMapSync {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VarMapSync")
            .field("comm", &self.comm)
            .field("vars", &self.vars.len())
            .finish()
    }
}

impl VarMapSync {
    fn refuse_late_variables(&self) -> Result<()> {
        let data = self.varmap.data().lock().unwrap_or_else(|e| e.into_inner());
        let is_known = |name: &String| self.vars.iter().any(|(known, _)| known == name);
        match data.len() == self.vars.len() {
            true => Ok(()),
            false => {
                let late = data
                    .keys()
                    .find(|name| !is_known(name))
                    .map_or("", String::as_str);
                let message = format!(
                    "variable `{late}` was created after VarMapSync::new, so ranks may hold other values of it; build the \
                     whole model first"
                );
                Err(Error::misuse("VarMapSync::all_reduce", message))
            }
        }
    }
}

fn gradient_of(name: &str, var: &Var, grads: &GradStore) -> Result<Buffer> {
    let dtype = var.dtype();
    let Some(grad) = grads.get(var) else {
        return Buffer::zeros_on(dtype, var.elem_count(), var.device());
    };
    if grad.shape() != var.shape() || grad.dtype() != dtype {
        let (got, expected) = ((grad.shape(), grad.dtype()), (var.shape(), dtype));
        return Err(Error::parameter(
            name,
            format!("gradient is {got:?}, expected {expected:?}"),
        ));
    }
    let grad = grad.contiguous()?;
    #[cfg(feature = "cuda")]
    if grad.device().is_cuda() {
        return Param::trained(name, &grad).to_buffer(&Ledger::new());
    }
    with_element!(dtype, T => with_values::<T, _>(&grad, |values| Buffer::from_vec(values.to_vec())))
}

/// The reduced gradient of a variable.
fn mean_of(mean: Buffer, var: &Var) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if mean.is_cuda() {
        let tensor = var.zeros_like()?;
        Param::trained("mean gradient", &tensor).copy_from(0..mean.len(), &mean, 0)?;
        return Ok(tensor);
    }
    Ok(with_element!(mean.dtype(), T => {
        Tensor::from_vec(mean.into_vec::<T>()?, var.shape(), var.device())?
    }))
}

/// Where the values of a variable lie: the same number for two variables of one process means the same memory.
fn address_of(var: &Var) -> Result<i64> {
    with_element!(var.dtype(), T => {
        #[cfg(feature = "cuda")]
        if var.device().is_cuda() {
            use candle_core::cuda_backend::cudarc::driver::DevicePtr;
            return with_cuda::<T, _>(var, |device, values| {
                Ok(values.device_ptr(&device.cuda_stream()).0 as i64)
            });
        }
        with_values::<T, _>(var, |v| v.as_ptr() as i64)
    })
}

/// Fails on every rank if two ranks hold the same memory.
fn refuse_shared(vars: &[(String, Var)], comm: &dyn Communicator) -> Result<()> {
    let process = i64::from(std::process::id());
    let mut mine = Vec::with_capacity(vars.len() * 16);
    for (_, var) in vars {
        let address = match is_element(var.dtype()) {
            true => address_of(var)?,
            false => 0,
        };
        let used = if var.elem_count() == 0 { 0 } else { address };
        mine.extend_from_slice(&process.to_le_bytes());
        mine.extend_from_slice(&used.to_le_bytes());
    }
    let all = comm.all_gather_bytes(&mine, "addresses of variables")?;
    for (i, (name, _)) in vars.iter().enumerate() {
        let places: Vec<&[u8]> = all.iter().map(|a| &a[16 * i..16 * (i + 1)]).collect();
        for (b, place) in places.iter().enumerate() {
            let shares = |other: &&[u8]| *other == *place && place[8..] != [0; 8];
            if let Some(a) = places[..b].iter().position(shares) {
                return Err(Error::misuse(
                    "VarMapSync::new",
                    format!(
                        "ranks {a} and {b} share the memory of variable `{name}`; build one VarMap inside the closure \
                         of each rank"
                    ),
                ));
            }
        }
    }
    Ok(())
}
