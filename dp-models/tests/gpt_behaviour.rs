use candle_core::{DType, IndexOp, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use dp_models::{Activation, CausalLm, GptConfig, Mlp, MlpConfig, Sampling, cross_entropy};

use crate::support::{CPU, assert_close, assert_err, names, new_gpt, seeded_gpt, tiny, var};

fn ids<const ROWS: usize>(rows: &[[u32; 4]; ROWS]) -> Tensor {
    Tensor::new(rows, &CPU).unwrap()
}

/// Nothing in the models cuts the graph: every parameter has a gradient, and it is not all zeros.
#[test]
fn every_parameter_gets_a_gradient() {
    let check = |loss: Tensor, vars: &VarMap| {
        let grads = loss.backward().unwrap();
        for name in names(vars) {
            let grad = grads
                .get(&var(vars, &name))
                .unwrap_or_else(|| panic!("no gradient for {name}"));
            let size = grad.abs().unwrap().sum_all().unwrap();
            assert!(
                size.to_scalar::<f32>().unwrap() > 0.,
                "zero gradient for {name}"
            );
        }
    };
    for tied_head in [true, false] {
        let config = GptConfig {
            tied_head,
            ..tiny()
        };
        let (gpt, vars) = seeded_gpt(&config, 1);
        let loss = gpt.loss(
            &ids(&[[1, 2, 3, 4], [10, 0, 5, 5]]),
            &ids(&[[2, 3, 4, 5], [0, 5, 5, 6]]),
        );
        check(loss.unwrap(), &vars);
    }
    for activation in [Activation::Relu, Activation::GeluTanh, Activation::Tanh] {
        let config = MlpConfig {
            input: 3,
            hidden: vec![16, 16],
            output: 2,
            activation,
        };
        let vars = VarMap::new();
        let mlp = Mlp::new(&config, VarBuilder::from_varmap(&vars, DType::F32, &CPU)).unwrap();
        let x = Tensor::randn(0f32, 1., (32, 3), &CPU).unwrap();
        let targets = Tensor::zeros(32, DType::U32, &CPU).unwrap();
        check(
            cross_entropy(&mlp.forward(&x).unwrap(), &targets).unwrap(),
            &vars,
        );
    }
}

/// A later token changes no earlier logit, in not a single bit; it does change its own.
#[test]
fn attention_is_causal() {
    let (gpt, _) = seeded_gpt(&tiny(), 2);
    let logits = |tokens: [u32; 4]| {
        let logits = gpt.forward(&ids(&[tokens])).unwrap();
        logits.i(0).unwrap().to_vec2::<f32>().unwrap()
    };
    let before = logits([1, 2, 3, 4]);
    for changed in 1..4 {
        let mut tokens = [1, 2, 3, 4];
        tokens[changed] = 9;
        let after = logits(tokens);
        assert_eq!(before[..changed], after[..changed]);
        for position in changed..4 {
            assert_ne!(before[position], after[position]);
        }
    }
}

/// The loss of a batch is the mean of the losses of its rows: what data parallelism stands on.
#[test]
fn loss_is_the_mean_over_rows() {
    let (gpt, _) = seeded_gpt(&tiny(), 3);
    let rows = [([1, 2, 3, 4], [2, 3, 4, 5]), ([10, 0, 5, 5], [0, 5, 5, 6])];
    let losses = rows.map(|(input, target)| gpt.loss(&ids(&[input]), &ids(&[target])).unwrap());
    let mean = ((&losses[0] + &losses[1]).unwrap() / 2.).unwrap();
    let joined = gpt.loss(&ids(&rows.map(|row| row.0)), &ids(&rows.map(|row| row.1)));
    assert_close("loss", &joined.unwrap(), &mean);
}

#[test]
fn double_precision_works() {
    let (gpt, _) = new_gpt(&tiny(), DType::F64);
    let loss = gpt
        .loss(&ids(&[[1, 2, 3, 4]]), &ids(&[[2, 3, 4, 5]]))
        .unwrap();
    assert_eq!(loss.dtype(), DType::F64);
    loss.backward().unwrap();
}

/// In both 16-bit types, though candle has no bf16 products on the CPU. The loss is f32.
#[test]
fn half_precision_works() {
    for dtype in [DType::F16, DType::BF16] {
        let (gpt, vars) = new_gpt(&tiny(), dtype);
        let tokens = ids(&[[1, 2, 3, 4]]);
        assert_eq!(gpt.forward(&tokens).unwrap().dtype(), dtype);
        let loss = gpt.loss(&tokens, &ids(&[[2, 3, 4, 5]])).unwrap();
        assert_eq!(loss.dtype(), DType::F32);
        assert!((loss.to_scalar::<f32>().unwrap() - 11f32.ln()).abs() < 0.3);
        let grads = loss.backward().unwrap();
        for var in vars.all_vars() {
            assert_eq!(grads.get(&var).unwrap().dtype(), dtype);
        }
    }
}

#[test]
fn input_errors_name_the_input() {
    let (gpt, _) = seeded_gpt(&tiny(), 4);
    let long = Tensor::zeros((1, 7), DType::U32, &CPU).unwrap();
    assert_err(
        gpt.forward(&long),
        "tokens of length 7 are longer than the context of 6",
    );
    assert_err(gpt.loss(&long, &long), "inputs of length 7");
    assert_err(
        gpt.forward(&ids(&[[0, 11, 0, 0]])),
        "tokens contain the id 11",
    );
    assert_err(
        gpt.forward(&ids(&[[0, u32::MAX, 0, 0]])),
        "ids must be below 11",
    );
    let good = ids(&[[0, 1, 2, 3]]);
    assert_err(
        gpt.loss(&good, &ids(&[[0, 11, 0, 0]])),
        "targets contain the id 11",
    );
    assert_err(gpt.loss(&good, &long), "must have one shape");
    let flat = good.flatten_all().unwrap();
    assert_err(gpt.forward(&flat), "tokens must be [B, T], got [4]");
    let wide = good.to_dtype(DType::I64).unwrap();
    assert_err(gpt.forward(&wide), "tokens must be u32, got I64");
    let empty = Tensor::zeros((1, 0), DType::U32, &CPU).unwrap();
    assert_err(gpt.forward(&empty), "tokens must not be empty");
}

#[test]
fn generate_errors_name_the_argument() {
    let (gpt, _) = seeded_gpt(&tiny(), 5);
    let greedy = Sampling::greedy();
    assert_err(gpt.generate(&[], 1, &greedy), "the prompt is empty");
    assert_err(
        gpt.generate(&[0, 11], 1, &greedy),
        "the prompt contains the id 11",
    );
    for temperature in [-1., f64::NAN, f64::INFINITY] {
        let sampling = Sampling {
            temperature,
            ..greedy.clone()
        };
        assert_err(gpt.generate(&[0], 1, &sampling), "temperature");
    }
    let sampling = Sampling {
        top_k: Some(0),
        ..greedy.clone()
    };
    assert_err(gpt.generate(&[0], 1, &sampling), "top_k");
    for top_p in [0., -0.5, 1.5, f64::NAN] {
        let sampling = Sampling {
            top_p: Some(top_p),
            ..greedy.clone()
        };
        assert_err(gpt.generate(&[0], 1, &sampling), "top_p must be above 0");
    }
}

/// Sampling is reproducible, `top_k: Some(1)` is greedy, and a prompt longer than the context is cut from the left.
#[test]
fn generate_follows_its_sampling() {
    let (gpt, _) = seeded_gpt(&tiny(), 6);
    let sample = |prompt: &[u32], temperature, top_k, seed| {
        let sampling = Sampling {
            temperature,
            top_k,
            top_p: None,
            seed,
        };
        gpt.generate(prompt, 20, &sampling).unwrap()
    };
    let text = sample(&[1, 2], 1., None, 7);
    assert_eq!(text.len(), 22);
    assert_eq!(text[..2], [1, 2]);
    assert!(text.iter().all(|&token| token < 11));
    assert_eq!(text, sample(&[1, 2], 1., None, 7));
    assert_ne!(text, sample(&[1, 2], 1., None, 8));
    assert_eq!(
        sample(&[1, 2], 5., Some(1), 7),
        sample(&[1, 2], 0., None, 0)
    );
    assert_eq!(sample(&[1, 2], 1., Some(99), 7), text);
    let long = [9, 9, 9, 1, 2, 3, 4, 5, 6];
    assert_eq!(
        sample(&long, 0., None, 0)[9..],
        sample(&long[3..], 0., None, 0)[6..]
    );
    assert_eq!(gpt.generate(&[3], 0, &Sampling::greedy()).unwrap(), [3]);
}
