//! Values and gradients of a layer on the CPU against its composed form in f64, against finite differences, and in 16 bits
//! against f32.

use candle_core::{DType, Result, Tensor, Var};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::support::{CPU, assert_close_within};

pub type Layer<'a> = &'a dyn Fn(&[Tensor]) -> Result<Tensor>;

pub fn random(seed: u64, shape: &[usize]) -> Tensor {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let numbers: Vec<f32> = (0..shape.iter().product())
        .map(|_| rng.random_range(-1.5..1.5))
        .collect();
    Tensor::from_vec(numbers, shape, &CPU).unwrap()
}

/// What the elements of a result weigh in the loss: multiples of 1/64, exact in every dtype.
fn weights(shape: &[usize]) -> Tensor {
    let mut rng = ChaCha8Rng::seed_from_u64(99);
    let numbers: Vec<f32> = (0..shape.iter().product())
        .map(|_| rng.random_range(-96..=96) as f32 / 64.)
        .collect();
    Tensor::from_vec(numbers, shape, &CPU).unwrap()
}

fn loss(y: &Tensor) -> Tensor {
    let weights = weights(y.dims()).to_dtype(y.dtype()).unwrap();
    (y * weights).unwrap().sum_all().unwrap()
}

/// The result, and the gradients of the weighted sum of its elements for all inputs.
pub fn run(layer: Layer<'_>, inputs: &[Tensor]) -> (Tensor, Vec<Tensor>) {
    let vars: Vec<Var> = inputs
        .iter()
        .map(|t| Var::from_tensor(t).unwrap())
        .collect();
    let tensors: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let y = layer(&tensors).unwrap();
    let loss = loss(&y);
    let mut grads = loss.backward().unwrap();
    // Backward leaves the graph as it was.
    let mut again = loss.backward().unwrap();
    let gradients = vars.iter().map(|var| {
        let gradient = grads
            .remove(var)
            .unwrap_or_else(|| panic!("no gradient of {:?} {:?}", var.shape(), var.dtype()));
        assert_eq!(gradient.dtype(), var.dtype());
        let second = again.remove(var).unwrap();
        assert_close_within("a second backward", &second, &gradient, 0.0);
        gradient
    });
    (y.detach(), gradients.collect())
}

pub fn cast(inputs: &[Tensor], dtype: DType) -> Vec<Tensor> {
    inputs.iter().map(|t| t.to_dtype(dtype).unwrap()).collect()
}

/// The layer in f32 against its composed form in f64.
pub fn check_f32(what: &str, layer: Layer<'_>, inputs: &[Tensor]) {
    let (y, gradients) = run(layer, inputs);
    let (want, want_gradients) = run(layer, &cast(inputs, DType::F64));
    assert_close_within(what, &y, &want, 2e-5);
    for (i, (got, want)) in gradients.iter().zip(&want_gradients).enumerate() {
        assert_close_within(&format!("{what}: gradient of input {i}"), got, want, 1e-4);
    }
}

/// [`check_f32`], and the layer in 16 bits against f32 on the same numbers.
fn check_within(what: &str, layer: Layer<'_>, inputs: &[Tensor], tolerances: [f64; 2]) {
    check_f32(what, layer, inputs);
    for (dtype, tolerance) in [DType::F16, DType::BF16].into_iter().zip(tolerances) {
        let rounded = cast(inputs, dtype);
        let (want, want_gradients) = run(layer, &cast(&rounded, DType::F32));
        let (y, gradients) = run(layer, &rounded);
        assert_eq!(y.dtype(), dtype);
        let what = format!("{what} in {dtype:?}");
        assert_close_within(&what, &y, &want.to_dtype(dtype).unwrap(), tolerance);
        for (got, want) in gradients.iter().zip(&want_gradients) {
            let want = want.to_dtype(dtype).unwrap();
            assert_close_within(&format!("{what}: gradient"), got, &want, tolerance);
        }
    }
}

/// A layer of several nodes. In 16 bits each rounds its result.
pub fn check(what: &str, layer: Layer<'_>, inputs: &[Tensor]) {
    check_within(what, layer, inputs, [2e-2, 1.5e-1]);
}

/// A layer of one node: in 16 bits its results and gradients are those of f32, rounded once, to the bit.
pub fn check_node(what: &str, layer: Layer<'_>, inputs: &[Tensor]) {
    check_within(what, layer, inputs, [0.0, 0.0]);
}

/// Gradients in f64 and f32 against central differences of the f64 result, element by element.
pub fn check_differences(what: &str, layer: Layer<'_>, inputs: &[Tensor]) {
    const STEP: f64 = 1e-5;
    let wide = cast(inputs, DType::F64);
    let value = |inputs: &[Tensor]| loss(&layer(inputs).unwrap()).to_scalar::<f64>().unwrap();
    let (_, exact) = run(layer, &wide);
    let (_, gradients) = run(layer, inputs);
    for (i, input) in wide.iter().enumerate() {
        let numbers: Vec<f64> = input.flatten_all().unwrap().to_vec1().unwrap();
        let moved = |j: usize, by: f64| {
            let mut numbers = numbers.clone();
            numbers[j] += by;
            let mut inputs = wide.clone();
            inputs[i] = Tensor::from_vec(numbers, input.shape(), &CPU).unwrap();
            value(&inputs)
        };
        let slope = |j: usize| (moved(j, STEP) - moved(j, -STEP)) / (2. * STEP);
        let slopes: Vec<f64> = (0..numbers.len()).map(slope).collect();
        let slopes = Tensor::from_vec(slopes, input.shape(), &CPU).unwrap();
        let what = format!("{what}: differences by input {i}");
        // 1e-6: candle's own gradients in f64 have constants of six digits.
        assert_close_within(&format!("{what}, f64"), &exact[i], &slopes, 3e-6);
        assert_close_within(&format!("{what}, f32"), &gradients[i], &slopes, 1e-4);
    }
}

/// No rows: an empty result, and gradients that are zero.
pub fn check_empty(what: &str, layer: Layer<'_>, inputs: &[Tensor]) {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let (y, gradients) = run(layer, &cast(inputs, dtype));
        assert_eq!(y.elem_count(), 0, "{what}");
        for (gradient, input) in gradients.iter().zip(inputs) {
            let zeros = Tensor::zeros(input.shape(), DType::F32, &CPU).unwrap();
            assert_close_within(what, gradient, &zeros, 0.0);
        }
    }
}

/// For each input in turn as the only variable: it has the gradient that it has among variables, and the others have none.
pub fn check_frozen(layer: Layer<'_>, inputs: &[Tensor]) {
    let (_, want) = run(layer, inputs);
    for (i, want) in want.iter().enumerate() {
        let var = Var::from_tensor(&inputs[i]).unwrap();
        let mut tensors = inputs.to_vec();
        tensors[i] = var.as_tensor().clone();
        let grads = loss(&layer(&tensors).unwrap()).backward().unwrap();
        assert_close_within("the only gradient", grads.get(&var).unwrap(), want, 0.0);
        for (j, frozen) in inputs.iter().enumerate() {
            assert!(grads.get(frozen).is_none(), "a gradient of input {j}");
        }
    }
}
