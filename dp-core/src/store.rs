//! The named parameters of one rank's model.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use candle_core::safetensors::MmapedSafetensors;
use candle_core::{CpuStorage, DType, Device, Shape, Storage, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use crate::buffer::{Buffer, with_element};
use crate::error::{Error, Result};
use crate::init::initial_values;
use crate::memory::{Category, Ledger, Reservation};
use crate::param::{GradientSink, HookOp, HookSlot, with_values, with_values_mut};

type NamePredicate = Arc<dyn Fn(&str) -> bool + Send + Sync>;

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

/// A named tensor of a [`ParamStore`].
#[derive(Debug, Clone)]
pub struct Param {
    name: Arc<str>,
    tensor: Tensor,
    kind: ParamKind,
}

impl Param {
    /// A trained parameter that lives elsewhere than in a store.
    pub(crate) fn trained(name: &str, tensor: &Tensor) -> Self {
        Self {
            name: name.into(),
            tensor: tensor.clone(),
            kind: ParamKind::Trained,
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

    /// Number of elements.
    pub fn num_elements(&self) -> usize {
        self.tensor.elem_count()
    }

    /// Copies elements `range` (row-major) to `out`, without a temporary.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] unless f32 on the CPU; [`Error::InvalidArgument`] if lengths do not fit.
    pub fn read(&self, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        self.check_range(&range, out.len())?;
        with_values(&self.tensor, |values| out.copy_from_slice(&values[range]))
    }

    /// Overwrites elements `range` (row-major) in place: layers see the new values at once.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] unless f32 on the CPU; [`Error::InvalidArgument`] if lengths do not fit.
    pub fn write(&self, range: Range<usize>, values: &[f32]) -> Result<()> {
        self.check_range(&range, values.len())?;
        with_values_mut(&self.tensor, |own| own[range].copy_from_slice(values))
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
        let mut buffer = Buffer::reserved(dtype, len, ledger, Category::Communication)?;
        with_element!(dtype, T => {
            let out = buffer.as_mut_slice::<T>()?;
            with_values::<T, _>(&self.tensor, |values| out.copy_from_slice(values))?;
        });
        Ok(buffer)
    }

    /// Overwrites the values in place; dtype and length must fit.
    pub(crate) fn set_from_buffer(&self, buffer: &Buffer) -> Result<()> {
        with_element!(buffer.dtype(), T => {
            let values = buffer.as_slice::<T>()?;
            with_values_mut::<T, _>(&self.tensor, |own| own.copy_from_slice(values))
        })
    }
}

/// Creates the parameters of a model, with gradient hooks, through Candle's own `VarBuilder`.
///
/// Layers of candle_nn work unmodified. A name that is asked for twice gives the same tensor: tied parameters are one
/// parameter. The trainer takes the store, and parameters cannot be added after that.
///
/// ```
/// use candle_core::{DType, Device};
/// use dp_core::ParamStore;
///
/// # fn main() -> dp_core::Result<()> {
/// let store = ParamStore::new(&Device::Cpu).with_seed(42);
/// let layer = candle_nn::linear(4, 3, store.var_builder(DType::F32).pp("fc"))?;
/// assert_eq!(layer.weight().dims(), [3, 4]);
/// assert_eq!(store.num_trained(), 3 * 4 + 3);
/// # Ok(())
/// # }
/// ```
pub struct ParamStore {
    inner: Arc<Inner>,
}

struct Inner {
    device: Device,
    ledger: Ledger,
    hooks: Arc<HookSlot>,
    settings: Mutex<Settings>,
    params: Mutex<Params>,
}

/// How parameters are made; each one follows the settings at the time of its creation.
#[derive(Clone)]
struct Settings {
    seed: u64,
    frozen: Option<NamePredicate>,
    is_buffer: NamePredicate,
    initial: Option<Arc<InitialValues>>,
}

#[derive(Default)]
struct Params {
    /// In creation order.
    list: Vec<Param>,
    index: HashMap<Arc<str>, usize>,
    reservations: Vec<Reservation>,
    /// The variable that all parameters formally depend on; it makes Candle visit them in backward.
    anchor: Option<Var>,
    sealed: bool,
}

struct InitialValues {
    path: PathBuf,
    tensors: MmapedSafetensors,
    used: Mutex<BTreeSet<String>>,
}

impl ParamStore {
    /// An empty store on `device`, with seed 0.
    pub fn new(device: &Device) -> Self {
        Self {
            inner: Arc::new(Inner {
                device: device.clone(),
                ledger: Ledger::new(),
                hooks: Arc::default(),
                settings: Mutex::new(Settings {
                    seed: 0,
                    frozen: None,
                    is_buffer: Arc::new(is_batch_norm_statistic),
                    initial: None,
                }),
                params: Mutex::default(),
            }),
        }
    }

    /// Seed of the initial values. They are a function of seed and name: the same on all ranks.
    #[must_use]
    pub fn with_seed(self, seed: u64) -> Self {
        self.inner.settings.lock().seed = seed;
        self
    }

    /// Parameters whose full name satisfies `predicate` are created frozen: they keep their values and take part in no
    /// reduction (`requires_grad = False` in PyTorch).
    #[must_use]
    pub fn with_frozen(self, predicate: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        self.inner.settings.lock().frozen = Some(Arc::new(predicate));
        self
    }

    /// Names that satisfy `predicate` are buffers: state that layers write, and nobody trains. Without this call, names
    /// that end in `running_mean` or `running_var` are.
    #[must_use]
    pub fn with_buffers(self, predicate: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        self.inner.settings.lock().is_buffer = Arc::new(predicate);
        self
    }

    /// Takes the initial values from a safetensors file instead of the layers' initialisations. Each parameter must be
    /// there by name, with its shape; the file's dtype is converted. Names that the model does not have are left
    /// alone: [`unused_initial_values`](Self::unused_initial_values) lists them.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be read.
    pub fn with_initial_values(self, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        // SAFETY: the usual condition of a memory map: the file must not be changed while it is mapped. Values are
        // copied out when parameters are created, and the map ends with the store.
        let tensors = unsafe { MmapedSafetensors::new(&path) }.map_err(|e| Error::File {
            path: path.clone(),
            message: e.to_string(),
        })?;
        self.inner.settings.lock().initial = Some(Arc::new(InitialValues {
            path,
            tensors,
            used: Mutex::default(),
        }));
        Ok(self)
    }

    /// A builder for layers; see [`candle_nn::VarBuilder`].
    pub fn var_builder(&self, dtype: DType) -> VarBuilder<'static> {
        let backend = Backend(Arc::clone(&self.inner));
        VarBuilder::from_backend(Box::new(backend), dtype, self.inner.device.clone())
    }

    /// The parameters in creation order.
    pub fn params(&self) -> Vec<Param> {
        self.inner.params.lock().list.clone()
    }

    /// The parameter called `name`.
    pub fn get(&self, name: &str) -> Option<Param> {
        let params = self.inner.params.lock();
        let index = *params.index.get(name)?;
        Some(params.list[index].clone())
    }

    /// Number of trained elements: what papers call the number of parameters.
    pub fn num_trained(&self) -> usize {
        let params = self.inner.params.lock();
        let trained = params.list.iter().filter(|p| p.kind == ParamKind::Trained);
        trained.map(Param::num_elements).sum()
    }

    /// Bytes that this rank's trainer and parameters hold.
    pub fn ledger(&self) -> &Ledger {
        &self.inner.ledger
    }

    /// The device of the parameters.
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// The seed of the initial values.
    pub fn seed(&self) -> u64 {
        self.inner.settings.lock().seed
    }

    /// Names in the file of [`with_initial_values`](Self::with_initial_values) that no parameter has asked for, sorted.
    pub fn unused_initial_values(&self) -> Vec<String> {
        let Some(initial) = self.inner.settings.lock().initial.clone() else {
            return Vec::new();
        };
        let used = initial.used.lock();
        let mut names: Vec<String> = initial
            .tensors
            .tensors()
            .into_iter()
            .map(|(name, _)| name)
            .filter(|name| !used.contains(name))
            .collect();
        names.sort();
        names
    }

    /// SHA-256 over names, shapes and values of all parameters and buffers, sorted by name, as hexadecimal digits. Equal
    /// digests mean bitwise equal models.
    ///
    /// # Errors
    /// [`Error::Candle`] if values cannot be copied from the device.
    pub fn sha256(&self) -> Result<String> {
        let mut params = self.params();
        params.sort_by(|a, b| a.name.cmp(&b.name));
        let mut hash = Sha256::new();
        for param in &params {
            hash.update(param.name.as_bytes());
            hash.update([0]);
            hash.update(format!(
                "{:?} {:?}\n",
                param.tensor.dims(),
                param.tensor.dtype()
            ));
            hash.update(little_endian_bytes(&param.tensor)?);
        }
        let digest = hash.finalize();
        Ok(digest.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// No parameters can be created from now on; gradients go to `sink`.
    pub(crate) fn seal(&self, sink: Weak<dyn GradientSink>) {
        self.inner.params.lock().sealed = true;
        self.inner.hooks.attach(sink);
    }
}

impl std::fmt::Debug for ParamStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let params = self.inner.params.lock();
        f.debug_struct("ParamStore")
            .field("params", &params.list.len())
            .field("seed", &self.seed())
            .finish()
    }
}

/// The default rule for [`ParamStore::with_buffers`].
fn is_batch_norm_statistic(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    matches!(last, "running_mean" | "running_var")
}

/// The elements' bytes, little endian, in row-major order.
pub(crate) fn little_endian_bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    let tensor = tensor.to_device(&Device::Cpu)?.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let (start, end) = layout.contiguous_offsets().unwrap_or((0, 0));
    macro_rules! bytes {
        ($v:expr) => {
            $v[start..end]
                .iter()
                .flat_map(|x| x.to_le_bytes())
                .collect()
        };
    }
    match &*storage {
        Storage::Cpu(CpuStorage::F32(v)) => Ok(bytes!(v)),
        Storage::Cpu(CpuStorage::F64(v)) => Ok(bytes!(v)),
        Storage::Cpu(CpuStorage::F16(v)) => Ok(bytes!(v)),
        Storage::Cpu(CpuStorage::BF16(v)) => Ok(bytes!(v)),
        _ => Err(Error::UnsupportedDType {
            what: "a parameter".to_string(),
            dtype: tensor.dtype().as_str(),
            supported: "f32, f64, f16, bf16",
        }),
    }
}

struct Backend(Arc<Inner>);

impl Backend {
    fn create(&self, shape: Shape, name: &str, init: Init, dtype: DType) -> Result<Tensor> {
        let inner = &self.0;
        let settings = inner.settings.lock().clone();
        let mut params = inner.params.lock();
        if let Some(&index) = params.index.get(name) {
            let known = &params.list[index].tensor;
            if known.shape() != &shape || known.dtype() != dtype {
                return Err(Error::parameter(
                    name,
                    format!(
                        "asked for as {shape:?} {dtype:?}, but it exists as {:?} {:?}",
                        known.shape(),
                        known.dtype()
                    ),
                ));
            }
            return Ok(known.clone());
        }
        if params.sealed {
            return Err(Error::parameter(
                name,
                "created after the trainer; build the whole model first, then the trainer",
            ));
        }
        let bytes = (shape.elem_count() * dtype.size_in_bytes()) as u64;
        let reservation = inner.ledger.reserve(Category::Parameters, bytes);
        let storage = match &settings.initial {
            Some(initial) => initial.load(name, &shape, dtype)?,
            None => initial_values(settings.seed, name, init, &shape, dtype)?,
        };
        let kind = if (settings.is_buffer)(name) {
            ParamKind::Buffer
        } else if settings.frozen.as_ref().is_some_and(|frozen| frozen(name)) {
            ParamKind::Frozen
        } else {
            ParamKind::Trained
        };
        let name: Arc<str> = name.into();
        let op = HookOp {
            name: Arc::clone(&name),
            param_idx: params.list.len(),
            hooks: Arc::clone(&inner.hooks),
            initial: Mutex::new(Some((storage, shape))),
        };
        let anchor = match params.anchor.clone() {
            Some(anchor) => anchor,
            None => Var::zeros((), DType::F32, &inner.device)?,
        };
        params.anchor = Some(anchor.clone());
        let tensor = match kind {
            ParamKind::Trained => anchor.apply_op1(op)?,
            ParamKind::Frozen => anchor.apply_op1_no_bwd(&op)?,
            // batch_norm turns its statistics into a Var, which shares the values only if they are a Var already.
            ParamKind::Buffer => Var::from_tensor(&anchor.apply_op1_no_bwd(&op)?)?.into_inner(),
        };
        let index = params.list.len();
        params.index.insert(Arc::clone(&name), index);
        params.reservations.push(reservation);
        params.list.push(Param {
            name,
            tensor: tensor.clone(),
            kind,
        });
        Ok(tensor)
    }
}

impl InitialValues {
    fn load(&self, name: &str, shape: &Shape, dtype: DType) -> Result<CpuStorage> {
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

impl SimpleBackend for Backend {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        _: &Device,
    ) -> candle_core::Result<Tensor> {
        Ok(self.create(shape, name, init, dtype)?)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, _: &Device) -> candle_core::Result<Tensor> {
        let known = self.0.params.lock().index.get(name).copied();
        if let Some(index) = known {
            return Ok(self.0.params.lock().list[index].tensor.clone());
        }
        let Some(initial) = self.0.settings.lock().initial.clone() else {
            return Err(Error::parameter(name, "its shape must be given to create it").into());
        };
        let shape = initial.tensors.get(name)?.shape().to_vec();
        Ok(self.create(shape.into(), name, Init::default(), dtype)?)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        let known = self.0.params.lock().index.contains_key(name);
        let settings = self.0.settings.lock();
        known
            || settings
                .initial
                .as_ref()
                .is_some_and(|i| i.tensors.get(name).is_ok())
    }
}
