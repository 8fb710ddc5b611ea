//! Mixtures of f32 and 16-bit tensors, and a GPT in 16 bits: training, and the memory of its activations.

use candle_core::{DType, Device, Module, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use dp_models::{
    Activation, ByteTokens, CausalMask, Gpt, GptConfig, LayerNorm, Mlp, MlpConfig, RmsNorm,
    attention, embed, gelu_linear, linear, silu_gated, silu_gated_linear,
};

use crate::allocations::live_bytes;
use crate::gradcheck::{Layer, cast, random, run};
use crate::support::{CPU, assert_close_within, assert_err, names, seeded_gpt, var};

fn layer_norm(t: &[Tensor]) -> Result<Tensor> {
    let named = |name: &str, i: usize| (name.to_string(), t[i].clone());
    let tensors = [named("weight", 1), named("bias", 2)].into();
    let vb = VarBuilder::from_tensors(tensors, t[1].dtype(), &CPU);
    // The builder gives both the dtype of the weight.
    LayerNorm::new(t[1].elem_count(), 1e-5, vb)?.forward(&t[0])
}

fn rms_norm(t: &[Tensor]) -> Result<Tensor> {
    let tensors = [("weight".to_string(), t[1].clone())].into();
    let vb = VarBuilder::from_tensors(tensors, t[1].dtype(), &CPU);
    RmsNorm::new(t[1].elem_count(), 1e-5, vb)?.forward(&t[0])
}

/// Each input of each layer in f32, f16 or bf16: the result has the dtype of the first, and a gradient that of its input; both
/// are the numbers of f32 arithmetic, rounded once if they are 16 bit.
#[test]
fn dtypes_mix_by_one_rule() {
    let tokens = Tensor::new(&[[1u32, 4], [1, 1]], &CPU).unwrap();
    let matrices = [random(1, &[4, 7]), random(2, &[5, 7]), random(3, &[5])];
    let norm = [random(1, &[4, 5]), random(2, &[5]), random(3, &[5])];
    let pair = [random(1, &[4, 7]), random(2, &[4, 7])];
    let tables = [random(2, &[5, 4]), random(1, &[3, 4])];
    let gated = [random(1, &[4, 7]), random(2, &[4, 7]), random(3, &[5, 7])];
    let layers: [(&str, Layer<'_>, &[Tensor]); 8] = [
        ("linear", &|t| linear(&t[0], &t[1], Some(&t[2])), &matrices),
        (
            "linear without bias",
            &|t| linear(&t[0], &t[1], None),
            &matrices[..2],
        ),
        (
            "gelu linear",
            &|t| gelu_linear(&t[0], &t[1], &t[2]),
            &matrices,
        ),
        (
            "silu gated linear",
            &|t| silu_gated_linear(&t[0], &t[1], &t[2]),
            &gated,
        ),
        ("rms norm", &rms_norm, &norm[..2]),
        ("layer norm", &layer_norm, &norm),
        ("silu gated", &|t| silu_gated(&t[0], &t[1]), &pair),
        ("embed", &|t| embed(&tokens, &t[0], &t[1]), &tables),
    ];
    const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
    for (what, layer, inputs) in layers {
        for mixture in 0..3usize.pow(inputs.len() as u32) {
            let dtype = |i: usize| DTYPES[mixture / 3usize.pow(i as u32) % 3];
            if what == "layer norm" && dtype(1) != dtype(2) {
                continue;
            }
            let mixed: Vec<Tensor> = (0..)
                .zip(inputs)
                .map(|(i, t)| t.to_dtype(dtype(i)).unwrap())
                .collect();
            let what = format!("{what}, mixture {mixture}");
            let (y, gradients) = run(layer, &mixed);
            assert_eq!(y.dtype(), dtype(0), "{what}");
            let (want, want_gradients) = run(layer, &cast(&mixed, DType::F32));
            let rounded = |t: &Tensor, i| t.to_dtype(dtype(i)).unwrap();
            assert_close_within(&what, &y, &rounded(&want, 0), 0.0);
            for (i, (got, want)) in gradients.iter().zip(&want_gradients).enumerate() {
                assert_eq!(got.dtype(), dtype(i), "{what}");
                assert_close_within(&what, got, &rounded(want, i), 0.0);
            }
        }
    }
}

#[test]
fn f64_is_mixed_with_nothing() {
    let x = random(1, &[2, 3]).to_dtype(DType::F64).unwrap();
    let weight = random(2, &[3, 3]);
    assert_err(linear(&x, &weight, None), "dtype mismatch");
    assert_err(linear(&weight, &x, None), "dtype mismatch");
    assert_err(silu_gated(&x, &random(1, &[2, 3])), "dtype mismatch");
    let row = random(3, &[3]);
    assert_err(rms_norm(&[x, row]), "dtype mismatch");
}

fn config() -> GptConfig {
    GptConfig {
        context: 16,
        ..GptConfig::mini()
    }
}

/// A GPT of these values in another dtype.
fn converted(vars: &VarMap, dtype: DType) -> (Gpt, VarMap) {
    let converted = VarMap::new();
    let vb = VarBuilder::from_varmap(&converted, dtype, &CPU);
    let gpt = Gpt::new(&config(), vb).unwrap();
    for name in names(vars) {
        let value = var(vars, &name).to_dtype(dtype).unwrap();
        converted.data().lock().unwrap()[&name].set(&value).unwrap();
    }
    (gpt, converted)
}

/// Losses of some steps of plain SGD on one batch, the loss multiplied by `scale` for the backward pass.
fn train(gpt: &Gpt, vars: &VarMap, scale: f64) -> Vec<f32> {
    let text =
        ByteTokens::from_bytes("it was the best of times, it was the worst of times").unwrap();
    let (inputs, targets) = text.batch(&[0, 9, 20, 30], 16, &CPU).unwrap();
    let step = |_| {
        let loss = gpt.loss(&inputs, &targets).unwrap();
        assert_eq!(loss.dtype(), DType::F32);
        let grads = (&loss * scale).unwrap().backward().unwrap();
        for var in vars.all_vars() {
            let grad = grads.get(&var).unwrap();
            assert_eq!(grad.dtype(), var.dtype());
            let change = (grad * (0.02 / scale)).unwrap();
            var.set(&(var.as_tensor() - change).unwrap()).unwrap();
        }
        loss.to_scalar::<f32>().unwrap()
    };
    (0..20).map(step).collect()
}

#[test]
fn a_gpt_trains_in_16_bits_as_in_32() {
    let (_, vars) = seeded_gpt(&config(), 7);
    let run = |dtype, scale| {
        let (gpt, vars) = converted(&vars, dtype);
        train(&gpt, &vars, scale)
    };
    let single = run(DType::F32, 1.0);
    let (first, last) = (single[0], single[single.len() - 1]);
    assert!(last < 0.6 * first, "{single:?}");
    // Scaling by a power of two is exact in f32, and changes little in f16, whose gradients are not near its limits here. In
    // bf16 the smaller ones of the updates are lost in the rounding of the weights.
    for (dtype, scale, tolerance) in [
        (DType::F32, 1024., 1e-6),
        (DType::F16, 1., 2e-3),
        (DType::F16, 1024., 2e-3),
        (DType::BF16, 1., 4e-2),
    ] {
        let losses = run(dtype, scale);
        for (step, (got, want)) in losses.iter().zip(&single).enumerate() {
            assert!(
                (got - want).abs() <= tolerance * want,
                "{dtype:?} x{scale}, step {step}: {got}, not {want}"
            );
        }
    }
}

/// What a loss keeps alive for its backward pass is half as much in 16 bits, and all of it is freed with the loss.
#[test]
fn activations_take_half_the_memory() {
    let (_, vars) = seeded_gpt(&config(), 7);
    let ids: Vec<u32> = (0..32 * 16).map(|i| i * 7 % 256).collect();
    let tokens = Tensor::from_vec(ids, (32, 16), &CPU).unwrap();
    let kept = |dtype| {
        let (gpt, _vars) = converted(&vars, dtype);
        // The mask is made by the first call.
        drop(gpt.loss(&tokens, &tokens).unwrap());
        let before = live_bytes();
        let loss = gpt.loss(&tokens, &tokens).unwrap();
        let kept = live_bytes() - before;
        let grads = loss.backward().unwrap();
        drop((loss, grads));
        let left = live_bytes() - before;
        assert!(left.abs() < 1_000, "{left} bytes are left in {dtype:?}");
        kept
    };
    // One thread, since memory is counted by thread.
    let pool = rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build()
        .unwrap();
    let kept = |dtype| pool.install(|| kept(dtype));
    let single = kept(DType::F32);
    // Two blocks of 14 rows of the width each for every position, and the logits.
    let expected = 4 * 512 * (2 * 14 * 64 + 2 * 64 + 256);
    assert!(
        (expected * 9 / 10..expected * 11 / 10).contains(&single),
        "{single} of {expected}"
    );
    for dtype in [DType::F16, DType::BF16] {
        let ratio = kept(dtype) as f64 / single as f64;
        assert!((0.49..0.52).contains(&ratio), "{ratio} in {dtype:?}");
    }
}

/// A layer is one node in each dtype, without conversions beside it.
#[test]
fn sixteen_bits_add_no_nodes() {
    let (_, vars) = seeded_gpt(&config(), 7);
    let tokens = Tensor::new(&[[1u32, 2, 3, 4]], &CPU).unwrap();
    let nodes = |dtype| {
        let (gpt, _vars) = converted(&vars, dtype);
        let loss = gpt.loss(&tokens, &tokens).unwrap();
        loss.sorted_nodes().len()
    };
    // Parameters; the embedding; 9 nodes for each of 2 blocks; the last norm, the head and the loss.
    assert_eq!(nodes(DType::F32), names(&vars).len() + 1 + 2 * 9 + 3);
    assert_eq!(nodes(DType::F16), nodes(DType::F32));
    assert_eq!(nodes(DType::BF16), nodes(DType::F32));
}

/// In 16 bits a network gives what it gives in f32, to the rounding between its layers.
#[test]
fn an_mlp_works_in_16_bits() {
    let config = MlpConfig {
        input: 7,
        hidden: vec![9, 5],
        output: 3,
        activation: Activation::GeluTanh,
    };
    let single = VarMap::new();
    let mlp = |vars: &VarMap, dtype| Mlp::new(&config, VarBuilder::from_varmap(vars, dtype, &CPU));
    let want = mlp(&single, DType::F32).unwrap();
    let x = random(1, &[4, 7]);
    let want = want.forward(&x).unwrap();
    for (dtype, tolerance) in [(DType::F16, 1e-2), (DType::BF16, 8e-2)] {
        let vars = VarMap::new();
        let mlp = mlp(&vars, dtype).unwrap();
        for name in names(&single) {
            let value = var(&single, &name).to_dtype(dtype).unwrap();
            vars.data().lock().unwrap()[&name].set(&value).unwrap();
        }
        let y = mlp.forward(&x.to_dtype(dtype).unwrap()).unwrap();
        assert_close_within("mlp", &y, &want, tolerance);
        let grads = y.sum_all().unwrap().backward().unwrap();
        for var in vars.all_vars() {
            assert_eq!(grads.get(&var).unwrap().dtype(), dtype);
        }
    }
}

/// Separate queries, keys and values: as in f32, with one rounding of the result.
#[test]
fn attention_works_in_16_bits() {
    let inputs = [1, 2, 3].map(|seed| random(seed, &[2, 3, 5, 4]));
    let masks = CausalMask::new(DType::F32, &CPU);
    let mask = masks.get(5).unwrap();
    let layer: Layer<'_> = &|t| attention(&t[0], &t[1], &t[2], &mask.to_dtype(t[0].dtype())?);
    for dtype in [DType::F16, DType::BF16] {
        let rounded = cast(&inputs, dtype);
        let (y, gradients) = run(layer, &rounded);
        let (want, want_gradients) = run(layer, &cast(&rounded, DType::F32));
        assert_close_within("attention", &y, &want.to_dtype(dtype).unwrap(), 0.0);
        for (got, want) in gradients.iter().zip(&want_gradients) {
            assert_close_within("gradient", got, &want.to_dtype(dtype).unwrap(), 0.0);
        }
    }
}

/// Loss and gradients have the same bits from one thread and from several, in tensors of many chunks.
#[test]
fn threads_change_no_bits_of_a_gpt() {
    let (_, vars) = seeded_gpt(&config(), 7);
    let ids: Vec<u32> = (0..32 * 16).map(|i| i * 7 % 256).collect();
    let tokens = Tensor::from_vec(ids, (32, 16), &CPU).unwrap();
    let numbers = |dtype, threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        pool.install(|| {
            let (gpt, vars) = converted(&vars, dtype);
            let loss = gpt.loss(&tokens, &tokens).unwrap();
            let grads = loss.backward().unwrap();
            let gradient = |name: String| grads.get(&var(&vars, &name)).unwrap().clone();
            let mut tensors: Vec<Tensor> = names(&vars).into_iter().map(gradient).collect();
            tensors.push(loss);
            cast(&tensors, DType::F32)
                .iter()
                .map(|t| t.flatten_all().unwrap().to_vec1::<f32>().unwrap())
                .collect::<Vec<_>>()
        })
    };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        assert!(numbers(dtype, 1) == numbers(dtype, 3), "{dtype:?}");
    }
}

/// Nothing to multiply leaves the bias.
#[test]
fn a_linear_layer_without_features_is_its_bias() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let tensor = |shape: &[usize]| Tensor::ones(shape, dtype, &Device::Cpu).unwrap();
        let (x, weight) = (tensor(&[2, 0]), tensor(&[3, 0]));
        let bias = Var::from_tensor(&tensor(&[3])).unwrap();
        let y = dp_models::linear(&x, &weight, Some(&bias)).unwrap();
        let wide = y.to_dtype(DType::F32).unwrap();
        assert_eq!(wide.to_vec2::<f32>().unwrap(), [[1.0; 3]; 2]);
        let grads = y.sum_all().unwrap().backward().unwrap();
        let grad = grads.get(&bias).unwrap().to_dtype(DType::F32).unwrap();
        assert_eq!(grad.to_vec1::<f32>().unwrap(), [2.0; 3]);
    }
}

/// In bf16, 256 + 1 is 256: gradients of one token are added in f32.
#[test]
fn gradients_of_a_repeated_token_are_added_in_f32() {
    let table = |rows: usize| {
        let zeros = Tensor::zeros((rows, 1), DType::BF16, &Device::Cpu).unwrap();
        Var::from_tensor(&zeros).unwrap()
    };
    let (wte, wpe) = (table(2), table(4));
    let tokens = Tensor::new(&[[1u32, 1, 1, 1]], &Device::Cpu).unwrap();
    let y = dp_models::embed(&tokens, &wte, &wpe).unwrap();
    let weights = Tensor::new(&[256f32, 1.0, 1.0, 2.0], &Device::Cpu).unwrap();
    let weights = weights.reshape(y.shape()).unwrap();
    let loss = (y * weights.to_dtype(DType::BF16).unwrap()).unwrap();
    let grads = loss.sum_all().unwrap().backward().unwrap();
    let grad = grads.get(&wte).unwrap().to_dtype(DType::F32).unwrap();
    assert_eq!(grad.to_vec2::<f32>().unwrap(), [[0.0], [260.0]]);
}
