//! The named parameters of one rank's model.

use std::collections::HashMap;
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Weak};

use candle_core::{DType, Device, Shape, Tensor, Var};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use parking_lot::Mutex;

use crate::buffer::Buffer;
use crate::error::{Error, Result};
use crate::hashing::{Hashing, hex};
use crate::hook::{GradientSink, HookOp, HookSlot};
use crate::init::initial_values;
use crate::initial_values::InitialValues;
use crate::memory::{Category, Ledger, Reservation};
use crate::param::{Param, ParamKind};
use crate::param_kinds::ParamKinds;
use crate::param_spec::check_same;

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
    kinds: ParamKinds,
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
                    kinds: ParamKinds::default(),
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
        self.inner.settings.lock().kinds.frozen = Some(Arc::new(predicate));
        self
    }

    /// Names that satisfy `predicate` are buffers: state that layers write, and nobody trains. Without this call, names
    /// that end in `running_mean` or `running_var` are.
    #[must_use]
    pub fn with_buffers(self, predicate: impl Fn(&str) -> bool + Send + Sync + 'static) -> Self {
        self.inner.settings.lock().kinds.is_buffer = Arc::new(predicate);
        self
    }

    /// Takes the initial values from a safetensors file instead of the layers' initialisations. Each parameter must be
    /// there by name, with its shape; the file's dtype is converted. Names that the model does not have are left
    /// alone: [`unused_initial_values`](Self::unused_initial_values) lists them.
    ///
    /// # Errors
    /// [`Error::File`] if the file cannot be read.
    pub fn with_initial_values(self, path: impl AsRef<Path>) -> Result<Self> {
        let initial = InitialValues::open(path.as_ref())?;
        self.inner.settings.lock().initial = Some(Arc::new(initial));
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

    /// A flat buffer of zeros on the device of the parameters, entered in the [ledger](Self::ledger) as long as it lives.
    ///
    /// # Errors
    /// See [`Buffer::zeros_on`].
    pub fn reserve(&self, dtype: DType, len: usize, category: Category) -> Result<Buffer> {
        Buffer::reserved_on(dtype, len, self.device(), self.ledger(), category)
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
        let initial = self.inner.settings.lock().initial.clone();
        initial.map_or(Vec::new(), |i| i.unused())
    }

    /// SHA-256 over names, shapes and values of all parameters and buffers, sorted by name, as hexadecimal digits. Equal
    /// digests mean bitwise equal models.
    ///
    /// # Errors
    /// [`Error::Candle`] if values cannot be copied from the device.
    pub fn sha256(&self) -> Result<String> {
        let mut params = self.params();
        params.sort_by(|a, b| a.name.cmp(&b.name));
        let mut hash = Hashing::only();
        for param in &params {
            let header = format!(
                "{}\0{:?} {:?}\n",
                param.name,
                param.tensor.dims(),
                param.tensor.dtype()
            );
            // Hashing does not fail.
            let _ = hash.write_all(header.as_bytes());
            param.write_le(0..param.num_elements(), &mut hash)?;
        }
        Ok(hex(&hash.finish().1))
    }

    /// No parameters can be created from now on.
    pub(crate) fn seal(&self) {
        self.inner.params.lock().sealed = true;
    }

    /// Gradients go to `sink` from now on.
    pub(crate) fn listen(&self, sink: Weak<dyn GradientSink>) {
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

struct Backend(Arc<Inner>);

impl Backend {
    fn create(&self, shape: Shape, name: &str, init: Init, dtype: DType) -> Result<Tensor> {
        let inner = &self.0;
        let settings = inner.settings.lock().clone();
        let mut params = inner.params.lock();
        if let Some(&index) = params.index.get(name) {
            let known = &params.list[index].tensor;
            check_same(name, (known.shape(), known.dtype()), (&shape, dtype))?;
            let known = known.clone();
            params.list[index].tied = true;
            return Ok(known);
        }
        if params.sealed {
            return Err(Error::parameter(
                name,
                "created after the trainer; build the whole model first, then the trainer",
            ));
        }
        let bytes = (shape.elem_count() * dtype.size_in_bytes()) as u64;
        let reservation = inner
            .ledger
            .reserve_on(&inner.device, Category::Parameters, bytes);
        let storage = match &settings.initial {
            Some(initial) => initial.load(name, &shape, dtype)?,
            None => initial_values(settings.seed, name, init, &shape, dtype)?,
        };
        let kind = settings.kinds.of(name);
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
            tied: false,
        });
        Ok(tensor)
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
        let initial = self.0.settings.lock().initial.clone();
        let Some(shape) = initial.and_then(|i| i.shape(name)) else {
            return Err(Error::parameter(name, "its shape must be given to create it").into());
        };
        Ok(self.create(shape, name, Init::default(), dtype)?)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        let initial = self.0.settings.lock().initial.clone();
        self.0.params.lock().index.contains_key(name)
            || initial.is_some_and(|i| i.shape(name).is_some())
    }
}
