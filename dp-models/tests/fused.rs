//! The fused f32 layers against the composed candle operations in f64, which the same functions use for f64 tensors.

use candle_core::{DType, Module, Result, Tensor, Var};
use candle_nn::{Linear, VarBuilder};
use dp_models::{
    CausalMask, CausalSelfAttention, LayerNorm, cross_entropy, embed, gelu_tanh, linear,
    linear_gelu,
};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::support::{CPU, assert_close_within};

type Layer<'a> = &'a dyn Fn(&[Tensor]) -> Result<Tensor>;

fn random(seed: u64, shape: &[usize]) -> Tensor {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let numbers: Vec<f32> = (0..shape.iter().product())
        .map(|_| rng.random_range(-1.5..1.5))
        .collect();
    Tensor::from_vec(numbers, shape, &CPU).unwrap()
}

/// The result, and the gradients of `sum(result * c)` for all inputs, with some fixed `c`.
fn run(layer: Layer<'_>, inputs: &[Tensor], dtype: DType) -> (Tensor, Vec<Tensor>) {
    let vars: Vec<Var> = inputs
        .iter()
        .map(|t| Var::from_tensor(&t.to_dtype(dtype).unwrap()).unwrap())
        .collect();
    let tensors: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
    let y = layer(&tensors).unwrap();
    let c = random(99, y.dims()).to_dtype(y.dtype()).unwrap();
    let loss = (&y * c).unwrap().sum_all().unwrap();
    let mut grads = loss.backward().unwrap();
    // Backward leaves the graph as it was.
    let mut again = loss.backward().unwrap();
    let gradients = vars.iter().map(|v| {
        let gradient = grads.remove(v).unwrap();
        let second = again.remove(v).unwrap();
        assert_close_within("a second backward", &second, &gradient, 0.0);
        gradient
    });
    (y.detach(), gradients.collect())
}

fn check(what: &str, layer: Layer<'_>, inputs: &[Tensor]) {
    let (y, gradients) = run(layer, inputs, DType::F32);
    let (want, want_gradients) = run(layer, inputs, DType::F64);
    assert_close_within(what, &y, &want, 2e-5);
    for (i, (got, want)) in gradients.iter().zip(&want_gradients).enumerate() {
        assert_close_within(&format!("{what}: gradient of input {i}"), got, want, 5e-5);
    }
    // 16-bit tensors: the arithmetic of f32, rounded at both ends.
    for (dtype, tolerance) in [(DType::F16, 2e-2), (DType::BF16, 1.5e-1)] {
        let rounded: Vec<Tensor> = inputs
            .iter()
            .map(|t| t.to_dtype(dtype).unwrap().to_dtype(DType::F32).unwrap())
            .collect();
        let (want, want_gradients) = run(layer, &rounded, DType::F32);
        let (y, gradients) = run(layer, &rounded, dtype);
        assert_close_within(&format!("{what} in {dtype:?}"), &y, &want, tolerance);
        for (got, want) in gradients.iter().zip(&want_gradients) {
            assert_eq!(got.dtype(), dtype);
            assert_close_within(
                &format!("{what}: gradient in {dtype:?}"),
                got,
                want,
                tolerance,
            );
        }
    }
}

#[test]
fn linear_layers_of_odd_shapes() {
    for (rows, width, out) in [(1, 1, 1), (3, 5, 7), (17, 33, 20), (130, 16, 9)] {
        let inputs = [
            random(1, &[rows, width]),
            random(2, &[out, width]),
            random(3, &[out]),
        ];
        check("linear", &|t| linear(&t[0], &t[1], Some(&t[2])), &inputs);
        check(
            "linear without bias",
            &|t| linear(&t[0], &t[1], None),
            &inputs[..2],
        );
        check(
            "linear gelu",
            &|t| linear_gelu(&t[0], &t[1], &t[2]),
            &inputs,
        );
        // Any leading dimensions, and inputs that are not contiguous.
        let wide = [
            random(1, &[2, rows, width]),
            inputs[1].clone(),
            inputs[2].clone(),
        ];
        check(
            "linear of a batch",
            &|t| linear(&t[0].transpose(0, 1)?, &t[1], Some(&t[2])),
            &wide,
        );
        check(
            "linear with a transposed weight",
            &|t| linear(&t[0], &t[1].t()?, None),
            &[random(1, &[rows, width]), random(2, &[width, out])],
        );
    }
}

#[test]
fn layer_norm_of_odd_shapes() {
    for shape in [&[1, 2][..], &[3, 5], &[2, 3, 33], &[300, 17]] {
        let width = shape[shape.len() - 1];
        let layer: Layer<'_> = &|t| {
            let tensors = [
                ("weight".to_string(), t[1].clone()),
                ("bias".to_string(), t[2].clone()),
            ];
            LayerNorm::new(
                width,
                1e-5,
                VarBuilder::from_tensors(tensors.into(), t[0].dtype(), &CPU),
            )?
            .forward(&t[0])
        };
        check(
            "layer norm",
            layer,
            &[random(4, shape), random(5, &[width]), random(6, &[width])],
        );
    }
}

#[test]
fn gelu_of_odd_shapes() {
    for shape in [&[][..], &[1], &[5, 7], &[2, 3, 37]] {
        check("gelu", &|t| gelu_tanh(&t[0]), &[random(7, shape)]);
    }
    let far = Tensor::new(&[-40f32, -9., -1e-3, 0., 12., 90.], &CPU).unwrap();
    check("gelu far out", &|t| gelu_tanh(&t[0]), &[far]);
}

#[test]
fn cross_entropy_of_odd_shapes() {
    for (rows, classes) in [(1, 1), (1, 2), (5, 17), (40, 256)] {
        let targets: Vec<u32> = (0..rows).map(|i| (i * 7 % classes) as u32).collect();
        let targets = Tensor::new(targets, &CPU).unwrap();
        check(
            "cross-entropy",
            &|t| cross_entropy(&t[0], &targets),
            &[random(8, &[rows, classes])],
        );
    }
}

/// Lengths around the size of a tile, several heads and sequences, a single position.
#[test]
fn attention_of_odd_shapes() {
    for (batch, len, heads, head_width) in [
        (1, 1, 1, 1),
        (2, 5, 3, 4),
        (1, 64, 2, 8),
        (2, 65, 1, 16),
        (1, 150, 2, 5),
    ] {
        let width = heads * head_width;
        let layer: Layer<'_> = &|t| {
            let dtype = t[0].dtype();
            let attention = CausalSelfAttention::new(
                Linear::new(t[1].clone(), Some(t[2].clone())),
                Linear::new(t[3].clone(), None),
                heads,
            )?;
            attention.forward(&t[0], &CausalMask::new(dtype, &CPU).get(len)?)
        };
        let scaled =
            |seed, shape: &[usize]| (random(seed, shape) * (width as f64).powf(-0.5)).unwrap();
        let inputs = [
            random(9, &[batch * len, width]),
            scaled(10, &[3 * width, width]),
            random(11, &[3 * width]),
            scaled(12, &[width, width]),
        ];
        // In f16 and bf16 the fallback would need candle's 16-bit products, so the dtypes are checked for f32 and f64 only.
        let (y, gradients) = run(layer, &inputs, DType::F32);
        let (want, want_gradients) = run(layer, &inputs, DType::F64);
        assert_close_within("attention", &y, &want, 2e-5);
        for (got, want) in gradients.iter().zip(&want_gradients) {
            assert_close_within("attention: gradient", got, want, 1e-4);
        }
    }
}

#[test]
fn embeddings_add_up_where_tokens_repeat() {
    let tokens = Tensor::new(&[[1u32, 1, 4], [0, 4, 1]], &CPU).unwrap();
    check(
        "embed",
        &|t| embed(&tokens, &t[0], &t[1]),
        &[random(13, &[5, 3]), random(14, &[4, 3])],
    );
    let wte = random(13, &[5, 3]);
    let error = embed(&tokens, &wte.narrow(0, 0, 4).unwrap(), &random(14, &[4, 3]))
        .unwrap_err()
        .to_string();
    assert!(error.contains("ids must be below 4"), "{error}");
    assert!(
        embed(&tokens, &wte, &random(14, &[2, 3])).is_err(),
        "more positions than there are"
    );
}

/// Inputs that need no gradient get none, and the others theirs.
#[test]
fn frozen_weights_and_plain_inputs_get_no_gradient() {
    let (x, w, b) = (
        random(1, &[4, 3]),
        random(2, &[5, 3]),
        Var::from_tensor(&random(3, &[5])).unwrap(),
    );
    let grads = linear(&x, &w, Some(&b))
        .unwrap()
        .sum_all()
        .unwrap()
        .backward()
        .unwrap();
    assert_eq!(grads.get(&b).unwrap().to_vec1::<f32>().unwrap(), [4.0; 5]);
    assert!(grads.get(&x).is_none() && grads.get(&w).is_none());
}

/// A NaN or an infinity in an input is in the result, wherever it stands.
#[test]
fn nan_is_not_lost() {
    for at in [0, 7, 16, 18] {
        let mut numbers = random(1, &[19]).to_vec1::<f32>().unwrap();
        numbers[at] = f32::NAN;
        let x = Tensor::new(numbers, &CPU)
            .unwrap()
            .reshape((1, 19))
            .unwrap();
        let has_nan = |t: Tensor| {
            t.flatten_all()
                .unwrap()
                .to_vec1::<f32>()
                .unwrap()
                .iter()
                .any(|v| v.is_nan())
        };
        assert!(has_nan(gelu_tanh(&x).unwrap()));
        assert!(has_nan(linear(&x, &random(2, &[3, 19]), None).unwrap()));
        assert!(has_nan(
            cross_entropy(&x, &Tensor::new(&[0u32], &CPU).unwrap()).unwrap()
        ));
    }
}

/// The same bits from one thread and from several.
#[test]
fn threads_change_no_bits() {
    let digest = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| {
            let width = 24;
            let layer: Layer<'_> = &|t| {
                let tensors = [
                    ("weight".to_string(), t[1].clone()),
                    ("bias".to_string(), t[2].clone()),
                ];
                let norm = LayerNorm::new(
                    width,
                    1e-5,
                    VarBuilder::from_tensors(tensors.into(), DType::F32, &CPU),
                )?;
                let attention = CausalSelfAttention::new(
                    Linear::new(t[3].clone(), None),
                    Linear::new(t[4].clone(), None),
                    3,
                )?;
                attention.forward(
                    &norm.forward(&t[0])?,
                    &CausalMask::new(DType::F32, &CPU).get(100)?,
                )
            };
            let inputs = [
                &[400, width][..],
                &[width],
                &[width],
                &[3 * width, width],
                &[width, width],
            ];
            let inputs: Vec<Tensor> = (0..)
                .zip(inputs)
                .map(|(seed, shape)| random(seed, shape))
                .collect();
            let (y, gradients) = run(layer, &inputs, DType::F32);
            let bits = |t: &Tensor| {
                t.flatten_all()
                    .unwrap()
                    .to_vec1::<f32>()
                    .unwrap()
                    .iter()
                    .map(|v| v.to_bits())
                    .collect::<Vec<_>>()
            };
            std::iter::once(&y)
                .chain(&gradients)
                .map(bits)
                .collect::<Vec<_>>()
        })
    };
    assert_eq!(digest(1), digest(3));
}
