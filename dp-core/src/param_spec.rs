//! What a parameter is, without its values: name, shape, dtype, kind.

use candle_core::{DType, Shape};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::param::{Param, ParamKind};
use crate::precision::{is_trainable, not_trainable};

/// Name, shape, dtype and kind of a parameter. Buckets are laid out from these, ranks compare them, and
/// [`ParamShapes`](crate::ParamShapes) finds them without the memory that the parameters would take.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParamSpec {
    /// The full name, e.g. `blocks.0.qkv.weight`.
    pub name: String,
    /// The shape.
    pub shape: Vec<usize>,
    /// The dtype; `f32`, `bf16`, ... in text.
    #[serde(with = "dtype_name")]
    pub dtype: DType,
    /// Trained, frozen, or a buffer.
    pub kind: ParamKind,
}

impl From<&Param> for ParamSpec {
    fn from(param: &Param) -> Self {
        Self {
            name: param.name().to_string(),
            shape: param.tensor().dims().to_vec(),
            dtype: param.tensor().dtype(),
            kind: param.kind(),
        }
    }
}

impl ParamSpec {
    /// Of all of `params`, in their order.
    pub fn of_all(params: &[Param]) -> Vec<Self> {
        params.iter().map(Self::from).collect()
    }

    /// Number of elements; 1 for a scalar.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of the values.
    pub fn num_bytes(&self) -> u64 {
        (self.num_elements() * self.dtype.size_in_bytes()) as u64
    }

    /// Refuses what no trainer trains.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] that names the first trained parameter whose dtype is not f32, f16 or bf16.
    pub fn check_trainable(specs: &[Self]) -> Result<()> {
        let bad = |s: &&Self| s.kind == ParamKind::Trained && !is_trainable(s.dtype);
        match specs.iter().find(bad) {
            Some(spec) => {
                let what = format!("training parameter `{}`", spec.name);
                Err(not_trainable(&what, spec.dtype))
            }
            None => Ok(()),
        }
    }

    pub(crate) fn describe(&self) -> String {
        describe(&self.shape, self.dtype.as_str(), self.kind)
    }
}

/// Shape, dtype and kind in words.
pub(crate) fn describe(shape: &[usize], dtype: &str, kind: ParamKind) -> String {
    let kind = match kind {
        ParamKind::Trained => "trained",
        ParamKind::Frozen => "frozen",
        ParamKind::Buffer => "a buffer",
    };
    format!("{shape:?} {dtype}, {kind}")
}

/// A name that is asked for again must be asked for as before: it is one parameter.
pub(crate) fn check_same(name: &str, known: (&Shape, DType), asked: (&Shape, DType)) -> Result<()> {
    if known == asked {
        return Ok(());
    }
    let ((known_shape, known_dtype), (shape, dtype)) = (known, asked);
    Err(Error::parameter(
        name,
        format!(
            "asked for as {shape:?} {dtype:?}, but it exists as {known_shape:?} {known_dtype:?}"
        ),
    ))
}

/// A dtype as Candle's name of it.
mod dtype_name {
    use candle_core::DType;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub fn serialize<S: Serializer>(dtype: &DType, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(dtype.as_str())
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<DType, D::Error> {
        let name = String::deserialize(deserializer)?;
        name.parse()
            .map_err(|_| D::Error::custom(format!("no dtype is called `{name}`")))
    }
}
