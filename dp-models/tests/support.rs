use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder, VarMap};
use dp_models::{CausalLm, Gpt, GptConfig, LlamaConfig, ModelConfig};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

pub const CPU: Device = Device::Cpu;

/// Tensors by name, as the scripts in `tests/fixtures` write them.
pub struct Fixture(HashMap<String, Tensor>);

impl Fixture {
    pub fn load(file: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/fixtures")
            .join(file);
        Self(candle_core::safetensors::load(path, &CPU).unwrap())
    }

    pub fn get(&self, name: &str) -> &Tensor {
        self.0
            .get(name)
            .unwrap_or_else(|| panic!("no {name} in the fixture"))
    }

    pub fn ids(&self, name: &str) -> Tensor {
        self.get(name).to_dtype(DType::U32).unwrap()
    }

    /// The tensors whose name starts with `prefix`, by the rest of their name.
    pub fn group(&self, prefix: &str) -> HashMap<String, Tensor> {
        let rest = |(name, tensor): (&String, &Tensor)| {
            Some((name.strip_prefix(prefix)?.to_string(), tensor.clone()))
        };
        self.0.iter().filter_map(rest).collect()
    }
}

/// Asserts that `got` is `want` within `tolerance`, absolute for values below 1 and relative above.
#[track_caller]
pub fn assert_close_within(what: &str, got: &Tensor, want: &Tensor, tolerance: f64) {
    assert_eq!(got.dims(), want.dims(), "shape of {what}");
    let values = |t: &Tensor| -> Vec<f64> {
        let flat = t.flatten_all().unwrap().to_dtype(DType::F64).unwrap();
        flat.to_vec1().unwrap()
    };
    for (idx, (got, want)) in values(got).into_iter().zip(values(want)).enumerate() {
        let allowed = tolerance * want.abs().max(1.);
        assert!(
            (got - want).abs() <= allowed,
            "{what}[{idx}]: got {got}, want {want}"
        );
    }
}

#[track_caller]
pub fn assert_close(what: &str, got: &Tensor, want: &Tensor) {
    assert_close_within(what, got, want, 1e-5);
}

/// Asserts that `result` is an error whose text contains `text`.
#[track_caller]
pub fn assert_err<T: std::fmt::Debug>(result: Result<T>, text: &str) {
    let message = result.expect_err(text).to_string();
    assert!(message.contains(text), "{text:?} is not in {message:?}");
}

pub fn names(vars: &VarMap) -> Vec<String> {
    let mut names: Vec<_> = vars.data().lock().unwrap().keys().cloned().collect();
    names.sort();
    names
}

pub fn var(vars: &VarMap, name: &str) -> Tensor {
    vars.data().lock().unwrap()[name].as_tensor().clone()
}

pub fn new_gpt(config: &GptConfig, dtype: DType) -> (Gpt, VarMap) {
    let vars = VarMap::new();
    let gpt = Gpt::new(config, VarBuilder::from_varmap(&vars, dtype, &CPU)).unwrap();
    (gpt, vars)
}

/// A GPT with the same values in each run, which candle's own CPU init cannot give. Biases and norms are random, too.
pub fn seeded_gpt(config: &GptConfig, seed: u64) -> (Gpt, VarMap) {
    let (gpt, mut vars) = new_gpt(config, DType::F32);
    seed_values(&mut vars, seed);
    (gpt, vars)
}

/// [`seeded_gpt`] for any decoder.
pub fn seeded(config: &ModelConfig, seed: u64) -> (Box<dyn CausalLm>, VarMap) {
    let mut vars = VarMap::new();
    let model = config.build(VarBuilder::from_varmap(&vars, DType::F32, &CPU));
    seed_values(&mut vars, seed);
    (model.unwrap(), vars)
}

fn seed_values(vars: &mut VarMap, seed: u64) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    for name in names(vars) {
        let old = var(vars, &name);
        let is_norm = name.contains("ln") || name.contains("norm");
        let mean = if is_norm && name.ends_with("weight") {
            1.
        } else {
            0.
        };
        let values: Vec<f32> = (0..old.elem_count())
            .map(|_| mean + 0.1 * rng.random_range(-1f32..1.))
            .collect();
        let new = Tensor::from_vec(values, old.shape(), &CPU).unwrap();
        vars.set_one(&name, &new).unwrap();
    }
}

pub fn tiny() -> GptConfig {
    GptConfig {
        vocab_size: 11,
        context: 6,
        width: 8,
        heads: 2,
        layers: 2,
        tied_head: false,
    }
}

/// As [`tiny`], with grouped queries.
pub fn tiny_llama() -> LlamaConfig {
    LlamaConfig {
        vocab_size: 11,
        context: 6,
        width: 8,
        heads: 4,
        kv_heads: Some(2),
        hidden: 5,
        layers: 2,
        tied_head: false,
        rope_theta: 100.,
        rms_norm_eps: 1e-5,
    }
}

/// Name, shape and initial values of a parameter.
pub type Request = (String, Vec<usize>, Init);

/// Notes what a model asks its `VarBuilder` for, in order.
#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Vec<Request>>>);

impl SimpleBackend for Recorder {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        init: Init,
        dtype: DType,
        dev: &Device,
    ) -> Result<Tensor> {
        let entry = (name.to_string(), shape.dims().to_vec(), init);
        self.0.lock().unwrap().push(entry);
        Tensor::zeros(shape, dtype, dev)
    }

    fn get_unchecked(&self, _: &str, _: DType, _: &Device) -> Result<Tensor> {
        unreachable!("the model knows its shapes")
    }

    fn contains_tensor(&self, _: &str) -> bool {
        true
    }
}

/// What a model asks for when it is made, in order.
pub fn record(config: &ModelConfig) -> Vec<Request> {
    let recorder = Recorder::default();
    let vb = VarBuilder::from_backend(Box::new(recorder.clone()), DType::F32, CPU);
    config.build(vb).unwrap();
    std::mem::take(&mut *recorder.0.lock().unwrap())
}
