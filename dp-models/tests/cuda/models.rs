//! Decoders on a GPU: loss and gradients of the CPU, and training in f32 and in 16 bits.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{VarBuilder, VarMap};
use dp_models::{ByteTokens, CausalLm, GptConfig, LlamaConfig, ModelConfig};

use crate::compare::{DTYPES, assert_close, gpu, random};

fn configs() -> [(&'static str, ModelConfig); 2] {
    let gpt = GptConfig {
        vocab_size: 256,
        context: 16,
        width: 32,
        heads: 4,
        layers: 2,
        tied_head: true,
    };
    let llama = LlamaConfig {
        vocab_size: 256,
        context: 16,
        width: 32,
        heads: 4,
        kv_heads: Some(2),
        hidden: 48,
        layers: 2,
        tied_head: false,
        rope_theta: 100.,
        rms_norm_eps: 1e-5,
    };
    [
        ("gpt", ModelConfig::Gpt2(gpt)),
        ("llama", ModelConfig::Llama(llama)),
    ]
}

struct Model {
    decoder: Box<dyn CausalLm>,
    vars: VarMap,
    device: Device,
}

impl Model {
    /// The same values wherever it is, rounded to `dtype`.
    fn new(config: &ModelConfig, dtype: DType, rounded_to: DType, device: &Device) -> Result<Self> {
        let vars = VarMap::new();
        let decoder = config.build(VarBuilder::from_varmap(&vars, dtype, device))?;
        let model = Self {
            decoder,
            vars,
            device: device.clone(),
        };
        for (seed, name) in model.names().iter().enumerate() {
            let var = model.vars.data().lock().unwrap()[name].clone();
            let mean = f64::from(u8::from(name.contains("norm") || name.contains("ln")));
            let values = ((random(seed as u64, var.dims()) * 0.1)? + mean)?;
            let values = values.to_dtype(rounded_to)?.to_dtype(dtype)?;
            var.set(&values.to_device(device)?)?;
        }
        Ok(model)
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = self.vars.data().lock().unwrap().keys().cloned().collect();
        names.sort();
        names
    }

    fn loss(&self) -> Result<Tensor> {
        let text = "it was the best of times, it was the worst of times";
        let text = ByteTokens::from_bytes(text)?;
        let (inputs, targets) = text.batch(&[0, 9, 20, 30], 16, &self.device)?;
        self.decoder.loss(&inputs, &targets)
    }

    /// Losses of some steps of plain SGD on one batch, the loss multiplied by `scale` for the backward pass.
    fn train(&self, steps: usize, scale: f64) -> Result<Vec<f32>> {
        let step = |_| {
            let loss = self.loss()?;
            assert_eq!(loss.dtype(), DType::F32);
            let grads = (&loss * scale)?.backward()?;
            for var in self.vars.all_vars() {
                let grad = grads.get(&var).expect("every parameter is used");
                var.set(&(var.as_tensor() - (grad * (0.03 / scale))?)?)?;
            }
            loss.to_scalar::<f32>()
        };
        (0..steps).map(step).collect()
    }
}

#[test]
fn loss_and_gradients_are_those_of_the_cpu() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for (what, config) in configs() {
        for (dtype, tolerance) in DTYPES {
            let here = Model::new(&config, DType::F32, dtype, &Device::Cpu)?;
            let there = Model::new(&config, dtype, dtype, &gpu)?;
            let (want, got) = (here.loss()?, there.loss()?);
            assert_close(
                &format!("{what}: loss in {dtype:?}"),
                &got,
                &want,
                tolerance,
            )?;
            let (want, got) = (want.backward()?, got.backward()?);
            for name in here.names() {
                let grad = |model: &Model, grads: &candle_core::backprop::GradStore| {
                    let var = model.vars.data().lock().unwrap()[&name].clone();
                    grads.get(&var).expect("every parameter is used").clone()
                };
                let (got, want) = (grad(&there, &got), grad(&here, &want));
                assert_eq!(got.dtype(), dtype, "{what}: {name}");
                assert_close(
                    &format!("{what}: {name} in {dtype:?}"),
                    &got,
                    &want,
                    tolerance,
                )?;
            }
        }
    }
    Ok(())
}

/// Losses follow those of the CPU in the same dtype, as far as roundings in between let them.
#[test]
fn decoders_train_in_every_dtype() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for (what, config) in configs() {
        for (dtype, scale, tolerance) in [
            (DType::F32, 1., 1e-5),
            (DType::F16, 128., 1e-3),
            (DType::BF16, 1., 4e-3),
        ] {
            let train = |device| Model::new(&config, dtype, dtype, device)?.train(20, scale);
            let (losses, expected) = (train(&gpu)?, train(&Device::Cpu)?);
            assert!(
                expected[19] < 0.9 * expected[0],
                "{what} learns nothing: {expected:?}"
            );
            for (step, (got, want)) in losses.iter().zip(&expected).enumerate() {
                assert!(
                    (got - want).abs() <= tolerance * want,
                    "{what} in {dtype:?}, step {step}: {got}, not {want}"
                );
            }
        }
    }
    Ok(())
}
