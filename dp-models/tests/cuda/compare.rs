//! A layer's values and gradients on a GPU against those of the CPU.

use candle_core::{DType, Device, Result, Tensor, Var};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

pub type Layer<'a> = &'a dyn Fn(&[Tensor]) -> Result<Tensor>;

/// What is trained, and how far a layer of several rounded steps may be from the f32 result of the same numbers: absolute for
/// values below 1 and relative above. 16-bit layers are composed of Candle's operations here, some of which round to 16 bits.
pub const DTYPES: [(DType, f64); 3] = [(DType::F32, 2e-5), (DType::F16, 1e-2), (DType::BF16, 8e-2)];

/// The first GPU; without one a message, and `None`.
pub fn gpu() -> Option<Device> {
    let device = Device::new_cuda_with_stream(0);
    device
        .map_err(|e| println!("no CUDA device: skipped ({e})"))
        .ok()
}

pub fn random(seed: u64, shape: &[usize]) -> Tensor {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let numbers: Vec<f32> = (0..shape.iter().product())
        .map(|_| rng.random_range(-1.5..1.5))
        .collect();
    Tensor::from_vec(numbers, shape, &Device::Cpu).expect("as many numbers as the shape has")
}

/// Asserts that `got` is `want` within `tolerance`, see [`DTYPES`].
#[track_caller]
pub fn assert_close(what: &str, got: &Tensor, want: &Tensor, tolerance: f64) -> Result<()> {
    let values = |t: &Tensor| -> Result<Vec<f64>> {
        // The GPU's numbers are converted by the CPU.
        let on_cpu = t.to_device(&Device::Cpu)?.flatten_all()?;
        on_cpu.to_dtype(DType::F64)?.to_vec1()
    };
    assert_eq!(got.dims(), want.dims(), "shape of {what}");
    for (i, (got, want)) in values(got)?.into_iter().zip(values(want)?).enumerate() {
        assert!(
            (got - want).abs() <= tolerance * want.abs().max(1.),
            "{what}[{i}]: got {got}, want {want}"
        );
    }
    Ok(())
}

/// The result, and the gradients of the weighted sum of its elements for all inputs.
pub fn run(layer: Layer<'_>, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
    let vars: Vec<Var> = inputs.iter().map(Var::from_tensor).collect::<Result<_>>()?;
    let tensors: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let y = layer(&tensors)?;
    // Multiples of 1/64 are exact in every dtype.
    let weights = ((random(99, y.dims()) * 64.)?.round()? / 64.)?;
    let weights = weights.to_dtype(y.dtype())?.to_device(y.device())?;
    let grads = (&y * weights)?.sum_all()?.backward()?;
    let mut all = vec![y.detach()];
    for (i, var) in vars.iter().enumerate() {
        let grad = grads.get(var);
        all.push(
            grad.unwrap_or_else(|| panic!("no gradient of input {i}"))
                .clone(),
        );
    }
    Ok(all)
}

/// A layer in each dtype on the GPU against the CPU in f32, on the same numbers.
#[track_caller]
pub fn check(what: &str, layer: Layer<'_>, inputs: &[Tensor]) -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for (dtype, tolerance) in DTYPES {
        let cast = |to: DType, device: &Device| -> Result<Vec<Tensor>> {
            let rounded = inputs.iter().map(|t| t.to_dtype(dtype)?.to_dtype(to));
            rounded.map(|t| t?.to_device(device)).collect()
        };
        let got = run(layer, &cast(dtype, &gpu)?)?;
        let want = run(layer, &cast(DType::F32, &Device::Cpu)?)?;
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            let what = match i {
                0 => format!("{what} in {dtype:?}"),
                _ => format!("{what} in {dtype:?}: gradient of input {}", i - 1),
            };
            // A scalar loss of 16-bit numbers may be f32.
            assert!(
                got.dtype() == dtype || got.dtype() == DType::F32,
                "{what} is {:?}",
                got.dtype()
            );
            if i > 0 {
                assert_eq!(got.dtype(), dtype, "{what}");
            }
            assert!(got.device().is_cuda(), "{what} is on the CPU");
            assert_close(&what, got, want, tolerance)?;
        }
    }
    Ok(())
}
