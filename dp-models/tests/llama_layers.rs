//! The layers of Llama: root-mean-square norm, gated MLP, rotary embedding. Fused against composed in f64, finite
//! differences, PyTorch, and in 16 bits against f32.

use std::collections::HashMap;

use candle_core::{DType, Module, Result, Tensor};
use candle_nn::{Linear, VarBuilder, VarMap};
use dp_models::{
    CausalMask, CausalSelfAttention, RmsNorm, Rotary, RotaryPairs, SwiGlu, embedding, silu_gated,
    silu_gated_linear,
};

use crate::gradcheck::{
    Layer, check, check_differences, check_empty, check_frozen, check_node, random,
};
use crate::support::{CPU, assert_close_within, assert_err, names};

const PAIRS: [RotaryPairs; 2] = [RotaryPairs::Halves, RotaryPairs::Interleaved];

/// Norm of `t[0]` with the weight `t[1]`.
fn rms_norm(t: &[Tensor]) -> Result<Tensor> {
    let tensors = HashMap::from([("weight".to_string(), t[1].clone())]);
    let vb = VarBuilder::from_tensors(tensors, t[1].dtype(), &CPU);
    RmsNorm::new(t[1].elem_count(), 1e-5, vb)?.forward(&t[0])
}

/// `t[0]` through the gated MLP with the weights `t[1]` (gate), `t[2]` (up) and `t[3]` (down).
fn swiglu(t: &[Tensor]) -> Result<Tensor> {
    let named = |name: &str, i: usize| (format!("{name}.weight"), t[i].clone());
    let tensors = [
        named("gate_proj", 1),
        named("up_proj", 2),
        named("down_proj", 3),
    ];
    let (hidden, width) = t[1].dims2()?;
    let vb = VarBuilder::from_tensors(tensors.into(), t[1].dtype(), &CPU);
    SwiGlu::new(width, hidden, vb)?.forward(&t[0])
}

fn rotary(head_width: usize, pairs: RotaryPairs, dtype: DType) -> Rotary {
    Rotary::new(head_width, 2000, 100., pairs, dtype, &CPU).unwrap()
}

/// Row and column counts around the lanes of a sum, the rows of a chunk, and one.
#[test]
fn rms_norm_of_odd_shapes() {
    for shape in [
        &[1][..],
        &[1, 1],
        &[3, 7],
        &[2, 3, 33],
        &[300, 17],
        &[129, 1],
    ] {
        let inputs = [random(4, shape), random(5, &shape[shape.len() - 1..])];
        check_node("rms norm", &rms_norm, &inputs);
    }
    check_node(
        "rms norm of a transposed input",
        &|t| rms_norm(&[t[0].t()?, t[1].clone()]),
        &[random(4, &[5, 7]), random(5, &[5])],
    );
    check_node(
        "rms norm with a part of a weight",
        &|t| rms_norm(&[t[0].clone(), t[1].narrow(0, 2, 7)?]),
        &[random(4, &[5, 7]), random(5, &[9])],
    );
}

#[test]
fn gates_of_odd_shapes() {
    for shape in [&[][..], &[1], &[5, 7], &[2, 3, 37], &[130, 33, 5]] {
        let inputs = [random(6, shape), random(7, shape)];
        check_node("silu gated", &|t| silu_gated(&t[0], &t[1]), &inputs);
    }
    // One tensor on both sides has the sum of two gradients.
    check(
        "silu gated by itself",
        &|t| silu_gated(&t[0], &t[0]),
        &[random(6, &[7])],
    );
    check_node(
        "silu gated of views",
        &|t| silu_gated(&t[0].t()?, &t[1].narrow(1, 3, 5)?),
        &[random(6, &[5, 7]), random(7, &[7, 9])],
    );
    let far = Tensor::new(&[-200f32, -80., -20., 20., 80., 200.], &CPU).unwrap();
    let inputs = [far, random(7, &[6])];
    check_node("silu gated far out", &|t| silu_gated(&t[0], &t[1]), &inputs);
}

#[test]
fn gated_linear_layers_of_odd_shapes() {
    for (rows, width, out) in [(1, 1, 1), (3, 5, 7), (17, 33, 20), (130, 160, 9)] {
        let inputs = [
            random(6, &[rows, width]),
            random(7, &[rows, width]),
            random(8, &[out, width]),
        ];
        check_node("silu gated linear", &gated_linear, &inputs);
    }
    let wide = [
        random(6, &[5, 2, 7]),
        random(7, &[2, 5, 9]),
        random(8, &[7, 3]),
    ];
    check(
        "silu gated linear of views",
        &|t| silu_gated_linear(&t[0].transpose(0, 1)?, &t[1].narrow(2, 1, 7)?, &t[2].t()?),
        &wide,
    );
    let far = Tensor::new(&[[-200f32, -80., -20., 20., 80., 200.]], &CPU).unwrap();
    let inputs = [far, random(7, &[1, 6]), random(8, &[2, 6])];
    check_node("silu gated linear far out", &gated_linear, &inputs);
}

fn gated_linear(t: &[Tensor]) -> Result<Tensor> {
    silu_gated_linear(&t[0], &t[1], &t[2])
}

#[test]
fn swiglu_of_odd_shapes() {
    for (rows, width, hidden) in [(1, 1, 1), (3, 7, 17), (17, 33, 5)] {
        let scale = |t: Tensor, width: usize| (t * (width as f64).powf(-0.5)).unwrap();
        let inputs = [
            random(1, &[rows, width]),
            scale(random(2, &[hidden, width]), width),
            scale(random(3, &[hidden, width]), width),
            scale(random(4, &[width, hidden]), hidden),
        ];
        check("swiglu", &swiglu, &inputs);
    }
}

/// One position and many, several heads, 1500 rows of 34 features: more than one chunk, and one that starts amid a sequence.
#[test]
fn rotary_of_odd_shapes() {
    for pairs in PAIRS {
        for (shape, first) in [
            (&[1, 2][..], 0),
            (&[2, 3, 1, 4], 7),
            (&[1, 2, 17, 6], 0),
            (&[3, 500, 34], 1000),
        ] {
            let width = shape[shape.len() - 1];
            let layer: Layer<'_> = &|t| rotary(width, pairs, t[0].dtype()).forward(&t[0], first);
            check_node("rotary", layer, &[random(8, shape)]);
        }
        let layer: Layer<'_> =
            &|t| rotary(4, pairs, t[0].dtype()).forward(&t[0].transpose(1, 2)?, 3);
        // [B, T, H, E], as a projection returns it.
        check_node("rotary of a view", layer, &[random(8, &[2, 5, 3, 4])]);
    }
}

#[test]
fn rotary_at_given_positions() {
    let x = random(8, &[2, 4, 6]);
    for pairs in PAIRS {
        let rotary = rotary(6, pairs, DType::F32);
        let at = |ids: &[u32]| rotary.forward_at(&x, &Tensor::new(ids, &CPU).unwrap());
        let in_order = at(&[5, 6, 7, 8]).unwrap();
        assert_close_within("in order", &in_order, &rotary.forward(&x, 5).unwrap(), 0.0);
        let packed = at(&[7, 0, 1, 7]).unwrap();
        for (row, position) in [(0, 7), (1, 0), (2, 1), (3, 7)] {
            let part = |t: &Tensor| t.narrow(1, row, 1).unwrap().contiguous().unwrap();
            let alone = rotary.forward(&part(&x), position).unwrap();
            assert_close_within("a row", &part(&packed), &alone, 0.0);
        }
        let ids = Tensor::new(&[7u32, 0, 1, 7], &CPU).unwrap();
        let layer: Layer<'_> = &|t| self::rotary(6, pairs, t[0].dtype()).forward_at(&t[0], &ids);
        check_node("rotary at positions", layer, std::slice::from_ref(&x));
    }
}

/// Scores depend on the distance of two positions alone, and lengths do not change: what the rotation is for.
#[test]
fn rotary_scores_depend_on_the_distance() {
    let (q, k) = (random(1, &[1, 8]), random(2, &[1, 8]));
    for pairs in PAIRS {
        let rotary = rotary(8, pairs, DType::F64);
        let at = |t: &Tensor, position| {
            let t = t.to_dtype(DType::F64).unwrap();
            rotary.forward(&t, position).unwrap()
        };
        let score = |i, j| (at(&q, i) * at(&k, j)).unwrap().sum_all().unwrap();
        assert_close_within("scores", &score(3, 1), &score(1002, 1000), 1e-12);
        let square = |t: Tensor| t.sqr().unwrap().sum_all().unwrap();
        assert_close_within("lengths", &square(at(&q, 1999)), &square(at(&q, 0)), 1e-12);
        let differ = (score(3, 1) - score(3, 2)).unwrap().abs().unwrap();
        assert!(differ.to_scalar::<f64>().unwrap() > 1e-3);
    }
}

#[test]
fn gradients_are_slopes() {
    let inputs = [random(1, &[3, 4]), random(2, &[4])];
    check_differences("rms norm", &rms_norm, &inputs);
    let pair = [random(1, &[3, 4]), random(2, &[3, 4])];
    check_differences("silu gated", &|t| silu_gated(&t[0], &t[1]), &pair);
    let gated = [pair[0].clone(), pair[1].clone(), random(3, &[5, 4])];
    check_differences("silu gated linear", &gated_linear, &gated);
    let weights = [
        random(1, &[2, 3]),
        random(2, &[4, 3]),
        random(3, &[4, 3]),
        random(4, &[3, 4]),
    ];
    check_differences("swiglu", &swiglu, &weights);
    for pairs in PAIRS {
        let layer: Layer<'_> = &|t| rotary(4, pairs, t[0].dtype()).forward(&t[0], 2);
        check_differences("rotary", layer, &inputs[..1]);
    }
}

/// The result is transposed, so the gradient comes in as a view.
#[test]
fn gradients_that_are_not_contiguous() {
    let inputs = [random(1, &[3, 4]), random(2, &[4])];
    check_node("rms norm", &|t| rms_norm(t)?.t(), &inputs);
    let pair = [random(1, &[3, 4]), random(2, &[3, 4])];
    check_node("silu gated", &|t| silu_gated(&t[0], &t[1])?.t(), &pair);
    let gated = [pair[0].clone(), pair[1].clone(), random(3, &[5, 4])];
    check_node("silu gated linear", &|t| gated_linear(t)?.t(), &gated);
    for pairs in PAIRS {
        let layer: Layer<'_> = &|t| rotary(4, pairs, t[0].dtype()).forward(&t[0], 1)?.t();
        check_node("rotary", layer, &inputs[..1]);
    }
}

#[test]
fn no_rows() {
    check_empty(
        "rms norm",
        &rms_norm,
        &[random(1, &[0, 4]), random(2, &[4])],
    );
    let none = [random(1, &[0, 4]), random(2, &[0, 4])];
    check_empty("silu gated", &|t| silu_gated(&t[0], &t[1]), &none);
    let gated = [none[0].clone(), none[1].clone(), random(3, &[5, 4])];
    check_empty("silu gated linear", &gated_linear, &gated);
    let weights = [
        random(1, &[0, 3]),
        random(2, &[4, 3]),
        random(3, &[4, 3]),
        random(4, &[3, 4]),
    ];
    check_empty("swiglu", &swiglu, &weights);
    for shape in [&[2, 0, 4], &[0, 3, 4]] {
        let layer: Layer<'_> = &|t| rotary(4, RotaryPairs::Halves, t[0].dtype()).forward(&t[0], 0);
        check_empty("rotary", layer, &[random(1, shape)]);
    }
}

#[test]
fn inputs_that_need_no_gradient_get_none() {
    check_frozen(&rms_norm, &[random(1, &[3, 4]), random(2, &[4])]);
    let pair = [random(1, &[3, 4]), random(2, &[3, 4])];
    check_frozen(&|t| silu_gated(&t[0], &t[1]), &pair);
    let gated = [pair[0].clone(), pair[1].clone(), random(3, &[5, 4])];
    check_frozen(&gated_linear, &gated);
}

#[test]
fn nan_is_not_lost() {
    for at in [0, 7, 16, 18] {
        let mut numbers = random(1, &[20]).to_vec1::<f32>().unwrap();
        numbers[at] = f32::NAN;
        let x = Tensor::from_vec(numbers, (1, 20), &CPU).unwrap();
        let ones = Tensor::ones(20, DType::F32, &CPU).unwrap();
        let (row, other) = (ones.reshape((1, 20)).unwrap(), random(2, &[1, 20]));
        for y in [
            rms_norm(&[x.clone(), ones]).unwrap(),
            silu_gated(&x, &other).unwrap(),
            silu_gated(&row, &x).unwrap(),
            silu_gated_linear(&row, &x, &other).unwrap(),
            rotary(20, RotaryPairs::Halves, DType::F32)
                .forward(&x, 1)
                .unwrap(),
            rotary(20, RotaryPairs::Interleaved, DType::F32)
                .forward(&x, 1)
                .unwrap(),
        ] {
            let y: Vec<f32> = y.flatten_all().unwrap().to_vec1().unwrap();
            assert!(y.iter().any(|v| v.is_nan()));
        }
    }
}

/// Shapes and initial values of what a `VarBuilder` is asked for.
#[test]
fn parameters_have_the_names_of_hugging_face() {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &CPU);
    RmsNorm::new(5, 1e-6, vb.pp("norm")).unwrap();
    SwiGlu::new(5, 7, vb.pp("mlp")).unwrap();
    let expected = [
        "mlp.down_proj.weight",
        "mlp.gate_proj.weight",
        "mlp.up_proj.weight",
        "norm.weight",
    ];
    assert_eq!(names(&vars), expected);
    let var = |name: &str| crate::support::var(&vars, name);
    assert_eq!(var(expected[0]).dims(), [5, 7]);
    assert_eq!(var(expected[1]).dims(), [7, 5]);
    assert_eq!(var(expected[2]).dims(), [7, 5]);
    assert_eq!(var(expected[3]).to_vec1::<f32>().unwrap(), [1.0; 5]);
}

#[test]
fn errors_name_what_does_not_fit() {
    let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, &CPU).unwrap();
    // A weight of one element would be broadcast.
    assert_err(
        rms_norm(&[ones(&[2, 5]), ones(&[1])]),
        "RmsNorm of width 1 got an input of shape [2, 5]",
    );
    assert_err(
        rms_norm(&[ones(&[]), ones(&[1])]),
        "RmsNorm of width 1 got an input of shape []",
    );
    assert_err(
        silu_gated(&ones(&[2, 3]), &ones(&[3])),
        "one shape, got [2, 3] and [3]",
    );
    assert_err(
        gated_linear(&[ones(&[2, 3]), ones(&[3, 2]), ones(&[1, 3])]),
        "one shape, got [2, 3] and [3, 2]",
    );
    assert_err(
        gated_linear(&[ones(&[2, 3]), ones(&[2, 3]), ones(&[1, 2])]),
        "got [2, 3], [1, 2]",
    );
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &CPU);
    assert_err(SwiGlu::new(4, 0, vb.clone()), "width (4) and hidden (0)");
    let mlp = SwiGlu::new(4, 8, vb).unwrap();
    assert_err(mlp.forward(&ones(&[2, 3])), "got [2, 3], [8, 4]");

    let new = |width, theta, dtype| Rotary::new(width, 8, theta, RotaryPairs::Halves, dtype, &CPU);
    assert_err(new(3, 1e4, DType::F32), "head_width (3) must be even");
    assert_err(new(0, 1e4, DType::F32), "head_width (0) must be even");
    for theta in [0., -1., f64::NAN, f64::INFINITY] {
        assert_err(new(2, theta, DType::F32), "theta must be positive");
    }
    assert_err(new(2, 1e4, DType::U32), "must be a float, got U32");
    let rotary = new(4, 1e4, DType::BF16).unwrap();
    assert_err(
        rotary.forward(&ones(&[2, 3, 6]), 0),
        "Rotary needs [.., T, 4], got [2, 3, 6]",
    );
    assert_err(rotary.forward(&ones(&[4]), 0), "got [4]");
    assert_err(
        rotary.forward(&ones(&[2, 3, 4]), 6),
        "8 positions got 3 from position 6 on, for an input of shape [2, 3, 4]",
    );
    let at = |ids: &[u32]| rotary.forward_at(&ones(&[2, 4]), &Tensor::new(ids, &CPU).unwrap());
    assert_err(at(&[1]), "2 rows of [2, 4], got positions of shape [1]");
    assert_err(at(&[1, 8]), "positions contain the id 8");
    let wide = ones(&[2, 4]).to_dtype(DType::F64).unwrap();
    assert_err(rotary.forward(&wide, 0), "dtype mismatch");
}

/// Grouped queries with rotation, in both kinds of pairs: one head of keys for all, one for some, one for each. Lengths around
/// the size of a tile.
#[test]
fn grouped_rotary_attention_of_odd_shapes() {
    for (batch, len, heads, kv_heads, head_width) in [
        (1, 1, 2, 1, 2),
        (2, 5, 4, 2, 4),
        (1, 65, 6, 2, 8),
        (1, 66, 3, 1, 6),
        (2, 7, 3, 3, 2),
    ] {
        let (width, out) = (heads * head_width, (heads + 2 * kv_heads) * head_width);
        for pairs in PAIRS {
            let layer: Layer<'_> = &|t| {
                let linear = |t: &Tensor| Linear::new(t.clone(), None);
                let attention =
                    CausalSelfAttention::grouped(linear(&t[1]), linear(&t[2]), heads, kv_heads)?
                        .with_rotary(rotary(head_width, pairs, t[0].dtype()))?;
                attention.forward(&t[0], &CausalMask::new(t[0].dtype(), &CPU).get(len)?)
            };
            let scaled =
                |seed, shape: &[usize]| (random(seed, shape) * (width as f64).powf(-0.5)).unwrap();
            let inputs = [
                random(9, &[batch * len, width]),
                scaled(10, &[out, width]),
                scaled(12, &[width, width]),
            ];
            let what = format!("{heads} heads that share {kv_heads}, {pairs:?}");
            check(&what, layer, &inputs);
            if len <= 5 {
                check_differences(&what, layer, &inputs);
            }
        }
    }
}

/// Ids that repeat, more ids than one chunk takes, and none.
#[test]
fn embedding_of_tokens() {
    for (batch, len, width) in [(2, 3, 5), (1, 1, 1), (3, 1000, 7)] {
        let ids: Vec<u32> = (0..batch * len).map(|i| (i * i % 11) as u32).collect();
        let tokens = Tensor::from_vec(ids, (batch, len), &CPU).unwrap();
        let inputs = [random(3, &[11, width])];
        check_node("embedding", &|t| embedding(&tokens, &t[0]), &inputs);
    }
    let tokens = Tensor::zeros((0, 3), DType::U32, &CPU).unwrap();
    check_empty(
        "embedding",
        &|t| embedding(&tokens, &t[0]),
        &[random(3, &[4, 2])],
    );
    let weight = random(3, &[4, 2]);
    assert_err(
        embedding(&Tensor::new(&[[4u32]], &CPU).unwrap(), &weight),
        "tokens contain the id 4",
    );
}
