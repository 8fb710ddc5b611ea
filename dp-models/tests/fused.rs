//! The layers of a GPT: fused against composed of candle's operations in f64, and in 16 bits against f32.

use crate::gradcheck::{
    Layer, cast, check, check_differences, check_empty, check_f32, check_frozen, check_node,
    random, run,
};
use crate::support::{CPU, assert_close_within, assert_err};
use candle_core::{DType, Module, Result, Tensor};
use candle_nn::{Linear, VarBuilder};
use dp_models::{
    CausalMask, CausalSelfAttention, LayerNorm, cross_entropy, embed, gelu_erf, gelu_linear,
    gelu_tanh, linear,
};

#[test]
fn linear_layers_of_odd_shapes() {
    for (rows, width, out) in [(1, 1, 1), (3, 5, 7), (17, 33, 20), (130, 16, 9)] {
        let inputs = [
            random(1, &[rows, width]),
            random(2, &[out, width]),
            random(3, &[out]),
        ];
        check_node("linear", &|t| linear(&t[0], &t[1], Some(&t[2])), &inputs);
        check_node(
            "linear without bias",
            &|t| linear(&t[0], &t[1], None),
            &inputs[..2],
        );
        check_node(
            "gelu linear",
            &|t| gelu_linear(&t[0], &t[1], &t[2]),
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

/// Layer norm of `t[0]` with the weight `t[1]` and the bias `t[2]`.
fn layer_norm(t: &[Tensor]) -> Result<Tensor> {
    let tensors = [
        ("weight".to_string(), t[1].clone()),
        ("bias".to_string(), t[2].clone()),
    ];
    let vb = VarBuilder::from_tensors(tensors.into(), t[1].dtype(), &CPU);
    LayerNorm::new(t[1].elem_count(), 1e-5, vb)?.forward(&t[0])
}

#[test]
fn layer_norm_of_odd_shapes() {
    for shape in [&[1, 2][..], &[3, 5], &[2, 3, 33], &[300, 17]] {
        let width = shape[shape.len() - 1];
        let inputs = [random(4, shape), random(5, &[width]), random(6, &[width])];
        check_node("layer norm", &layer_norm, &inputs);
    }
    let inputs = [random(4, &[5, 7]), random(5, &[5]), random(6, &[5])];
    check_node(
        "layer norm of a transposed input",
        &|t| layer_norm(&[t[0].t()?, t[1].clone(), t[2].clone()]),
        &inputs,
    );
}

#[test]
fn gelu_of_odd_shapes() {
    for shape in [&[][..], &[1], &[5, 7], &[2, 3, 37]] {
        check_node("gelu tanh", &|t| gelu_tanh(&t[0]), &[random(7, shape)]);
        check_node("gelu erf", &|t| gelu_erf(&t[0]), &[random(7, shape)]);
    }
    let far = Tensor::new(&[-40f32, -9., -1e-3, 0., 12., 90.], &CPU).unwrap();
    check_node(
        "gelu tanh far out",
        &|t| gelu_tanh(&t[0]),
        std::slice::from_ref(&far),
    );
    check_node("gelu erf far out", &|t| gelu_erf(&t[0]), &[far]);
}

/// 4000 rows of 40 are more than one chunk. The loss of 16-bit logits is f32, and unrounded.
#[test]
fn cross_entropy_of_odd_shapes() {
    for (rows, classes) in [(1, 1), (1, 2), (5, 17), (40, 256), (4000, 40)] {
        let targets: Vec<u32> = (0..rows).map(|i| (i * 7 % classes) as u32).collect();
        let targets = Tensor::new(targets, &CPU).unwrap();
        let layer: Layer<'_> = &|t| cross_entropy(&t[0], &targets);
        let logits = [random(8, &[rows, classes])];
        check_f32("cross-entropy", layer, &logits);
        for dtype in [DType::F16, DType::BF16] {
            let rounded = cast(&logits, dtype);
            let (want, want_gradients) = run(layer, &cast(&rounded, DType::F32));
            let (loss, gradients) = run(layer, &rounded);
            assert_eq!(loss.dtype(), DType::F32);
            assert_close_within("loss", &loss, &want, 0.0);
            let want = want_gradients[0].to_dtype(dtype).unwrap();
            assert_close_within("gradient of logits", &gradients[0], &want, 0.0);
        }
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
        check("attention", layer, &inputs);
    }
}

#[test]
fn embeddings_add_up_where_tokens_repeat() {
    let tokens = Tensor::new(&[[1u32, 1, 4], [0, 4, 1]], &CPU).unwrap();
    check_node(
        "embed",
        &|t| embed(&tokens, &t[0], &t[1]),
        &[random(13, &[5, 3]), random(14, &[4, 3])],
    );
    let wte = random(13, &[5, 3]);
    assert_err(
        embed(&tokens, &wte.narrow(0, 0, 4).unwrap(), &random(14, &[4, 3])),
        "ids must be below 4",
    );
    assert_err(
        embed(&tokens, &wte, &random(14, &[2, 3])),
        "tokens [2, 3] for wte [5, 3] and wpe [2, 3]",
    );
}

#[test]
fn gradients_are_slopes() {
    let inputs = [random(1, &[3, 4]), random(2, &[5, 4]), random(3, &[5])];
    check_differences("linear", &|t| linear(&t[0], &t[1], Some(&t[2])), &inputs);
    check_differences(
        "gelu linear",
        &|t| gelu_linear(&t[0], &t[1], &t[2]),
        &inputs,
    );
    check_differences("gelu tanh", &|t| gelu_tanh(&t[0]), &inputs[..1]);
    check_differences("gelu erf", &|t| gelu_erf(&t[0]), &inputs[..1]);
    let targets = Tensor::new(&[3u32, 0, 1], &CPU).unwrap();
    check_differences(
        "cross-entropy",
        &|t| cross_entropy(&t[0], &targets),
        &inputs[..1],
    );
    let tokens = Tensor::new(&[[1u32, 4], [1, 1]], &CPU).unwrap();
    let tables = [random(2, &[5, 4]), random(1, &[3, 4])];
    check_differences("embed", &|t| embed(&tokens, &t[0], &t[1]), &tables);
    let norm = [random(1, &[3, 4]), random(5, &[4]), random(6, &[4])];
    check_differences("layer norm", &layer_norm, &norm);
}

/// The result is transposed, so the gradient comes in as a view.
#[test]
fn gradients_that_are_not_contiguous() {
    let inputs = [random(1, &[3, 4]), random(2, &[5, 4]), random(3, &[5])];
    check_node(
        "linear",
        &|t| linear(&t[0], &t[1], Some(&t[2]))?.t(),
        &inputs,
    );
    check_node(
        "linear without bias",
        &|t| linear(&t[0], &t[1], None)?.t(),
        &inputs[..2],
    );
    check_node(
        "gelu linear",
        &|t| gelu_linear(&t[0], &t[1], &t[2])?.t(),
        &inputs,
    );
    check_node("gelu tanh", &|t| gelu_tanh(&t[0])?.t(), &inputs[..1]);
    check_node("gelu erf", &|t| gelu_erf(&t[0])?.t(), &inputs[..1]);
    let tokens = Tensor::new(&[[1u32, 4], [1, 1]], &CPU).unwrap();
    let tables = [random(2, &[5, 4]), random(1, &[3, 4])];
    check_node("embed", &|t| embed(&tokens, &t[0], &t[1])?.t(), &tables);
    let norm = [random(1, &[3, 4]), random(5, &[4]), random(6, &[4])];
    check_node("layer norm", &|t| layer_norm(t)?.t(), &norm);
}

#[test]
fn no_rows() {
    let inputs = [random(1, &[0, 4]), random(2, &[5, 4]), random(3, &[5])];
    check_empty("linear", &|t| linear(&t[0], &t[1], Some(&t[2])), &inputs);
    check_empty(
        "gelu linear",
        &|t| gelu_linear(&t[0], &t[1], &t[2]),
        &inputs,
    );
    check_empty("gelu tanh", &|t| gelu_tanh(&t[0]), &inputs[..1]);
    check_empty("gelu erf", &|t| gelu_erf(&t[0]), &inputs[..1]);
    let norm = [random(1, &[0, 4]), random(5, &[4]), random(6, &[4])];
    check_empty("layer norm", &layer_norm, &norm);
    let layer: Layer<'_> = &|t| {
        let linear = |t: &Tensor| Linear::new(t.clone(), None);
        let attention = CausalSelfAttention::new(linear(&t[1]), linear(&t[2]), 2)?;
        attention.forward(&t[0], &CausalMask::new(t[0].dtype(), &CPU).get(3)?)
    };
    let weights = [random(1, &[0, 4]), random(2, &[12, 4]), random(3, &[4, 4])];
    check_empty("attention", layer, &weights);
}

/// Inputs that need no gradient get none, and the others theirs: for each input of a layer in turn, the only one that is a
/// variable has the gradient that it has among variables.
#[test]
fn inputs_that_need_no_gradient_get_none() {
    let tokens = Tensor::new(&[[1u32, 4], [1, 1]], &CPU).unwrap();
    let matrices = [random(1, &[4, 3]), random(2, &[5, 3]), random(3, &[5])];
    let norm = [random(1, &[4, 5]), random(2, &[5]), random(3, &[5])];
    let tables = [random(2, &[5, 4]), random(1, &[3, 4])];
    let layers: [(Layer<'_>, &[Tensor]); 5] = [
        (&|t| linear(&t[0], &t[1], Some(&t[2])), &matrices),
        (&|t| linear(&t[0], &t[1], None), &matrices[..2]),
        (&|t| gelu_linear(&t[0], &t[1], &t[2]), &matrices),
        (&layer_norm, &norm),
        (&|t| embed(&tokens, &t[0], &t[1]), &tables),
    ];
    for (layer, inputs) in layers {
        check_frozen(layer, inputs);
    }
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
        assert!(has_nan(gelu_tanh(&x).unwrap()) && has_nan(gelu_erf(&x).unwrap()));
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
            let (y, gradients) = run(layer, &inputs);
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
