use candle_core::{DType, IndexOp, Tensor};
use candle_nn::{Init, VarBuilder, VarMap};
use dp_models::{Llama, LlamaConfig};

use crate::support::{
    CPU, Fixture, assert_close, assert_err, names, record, seeded, tiny_llama, var,
};

fn new_llama(config: &LlamaConfig, dtype: DType) -> (Llama, VarMap) {
    let vars = VarMap::new();
    let llama = Llama::new(config, VarBuilder::from_varmap(&vars, dtype, &CPU)).unwrap();
    (llama, vars)
}

fn ids<const ROWS: usize>(rows: &[[u32; 4]; ROWS]) -> Tensor {
    Tensor::new(rows, &CPU).unwrap()
}

/// Loads the weights of `tests/fixtures/make_llama_fixture.py` and compares all that it computed.
#[test]
fn llama_matches_hugging_face() {
    for (file, tied_head) in [
        ("llama_tied.safetensors", true),
        ("llama_untied.safetensors", false),
    ] {
        let config = LlamaConfig {
            vocab_size: 31,
            context: 12,
            width: 24,
            heads: 6,
            kv_heads: Some(2),
            hidden: 20,
            layers: 2,
            tied_head,
            rope_theta: 500.,
            rms_norm_eps: 1e-3,
        };
        let fixture = Fixture::load(file);
        let weights = fixture.group("weight.");
        let (llama, mut vars) = new_llama(&config, DType::F32);
        let mut expected: Vec<_> = weights.keys().cloned().collect();
        expected.sort();
        assert_eq!(names(&vars), expected);
        vars.set(weights.iter()).unwrap();

        let (inputs, targets) = (fixture.ids("inputs"), fixture.ids("targets"));
        assert_close(
            "logits",
            &llama.forward(&inputs).unwrap(),
            fixture.get("logits"),
        );
        let loss = llama.loss(&inputs, &targets).unwrap();
        assert_close("loss", &loss, fixture.get("loss"));
        let grads = loss.backward().unwrap();
        for name in &expected {
            let grad = grads.get(&var(&vars, name)).expect(name);
            assert_close(name, grad, fixture.get(&format!("grad.{name}")));
        }
    }
}

#[test]
fn parameters_are_created_in_forward_order() {
    // 0.01 = 0.02 / sqrt(2 * 2 layers); None is a norm.
    let block = [
        ("norm1", vec![8], None),
        ("qkv", vec![16, 8], Some(0.02)),
        ("proj", vec![8, 8], Some(0.01)),
        ("norm2", vec![8], None),
        ("gate_proj", vec![5, 8], Some(0.02)),
        ("up_proj", vec![5, 8], Some(0.02)),
        ("down_proj", vec![8, 5], Some(0.01)),
    ];
    let mut expected = vec![("wte.weight".to_string(), vec![11, 8], Some(0.02))];
    for idx in 0..2 {
        let of_block = |(name, shape, stdev)| (format!("blocks.{idx}.{name}.weight"), shape, stdev);
        expected.extend(block.clone().map(of_block));
    }
    expected.push(("normf.weight".to_string(), vec![8], None));
    expected.push(("head.weight".to_string(), vec![11, 8], Some(0.02)));

    for tied_head in [false, true] {
        let config = LlamaConfig {
            tied_head,
            ..tiny_llama()
        };
        let requests = record(&config.into()).into_iter();
        let got: Vec<_> = requests
            .map(|(name, shape, init)| match init {
                Init::Randn { mean: 0., stdev } => (name, shape, Some(stdev)),
                Init::Const(1.) => (name, shape, None),
                _ => panic!("{name} is initialised by {init:?}"),
            })
            .collect();
        assert_eq!(got, expected[..expected.len() - usize::from(tied_head)]);
    }
}

#[test]
fn num_params_counts_what_is_created() {
    let mini = LlamaConfig::mini();
    for tied_head in [true, false] {
        for kv_heads in [None, Some(1), Some(2)] {
            for config in [mini.clone(), tiny_llama()] {
                let config = LlamaConfig {
                    tied_head,
                    kv_heads,
                    ..config
                };
                let (_, vars) = new_llama(&config, DType::F32);
                let created: usize = vars.all_vars().iter().map(|var| var.elem_count()).sum();
                assert_eq!(config.num_params(), created, "{config:?}");
            }
        }
    }
    assert_eq!(mini.num_params(), 108_864);
    // Llama 3 8B has 8,030,261,248 parameters.
    let llama3 = LlamaConfig {
        vocab_size: 128_256,
        context: 8192,
        width: 4096,
        heads: 32,
        kv_heads: Some(8),
        hidden: 14_336,
        layers: 32,
        tied_head: false,
        rope_theta: 500_000.,
        rms_norm_eps: 1e-5,
    };
    llama3.validate().unwrap();
    assert_eq!(llama3.num_params(), 8_030_261_248);
}

/// Nothing cuts the graph: every parameter has a gradient, and it is not all zeros.
#[test]
fn every_parameter_gets_a_gradient() {
    for tied_head in [true, false] {
        let config = LlamaConfig {
            tied_head,
            ..tiny_llama()
        };
        let (llama, vars) = seeded(&config.into(), 1);
        let loss = llama.loss(
            &ids(&[[1, 2, 3, 4], [10, 0, 5, 5]]),
            &ids(&[[2, 3, 4, 5], [0, 5, 5, 6]]),
        );
        let grads = loss.unwrap().backward().unwrap();
        for name in names(&vars) {
            let grad = grads.get(&var(&vars, &name)).expect(&name);
            let size = grad.abs().unwrap().sum_all().unwrap();
            assert!(size.to_scalar::<f32>().unwrap() > 0., "{name}");
        }
    }
}

/// A later token changes no earlier logit, in not a single bit; it does change its own.
#[test]
fn attention_is_causal() {
    let (llama, _) = seeded(&tiny_llama().into(), 2);
    let logits = |tokens: [u32; 4]| {
        let logits = llama.forward(&ids(&[tokens])).unwrap();
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

/// The order of earlier tokens matters, which it does not without positions.
#[test]
fn positions_matter() {
    let (llama, _) = seeded(&tiny_llama().into(), 3);
    let last = |tokens: [u32; 4]| {
        let logits = llama.next_logits(&ids(&[tokens])).unwrap();
        logits.to_vec2::<f32>().unwrap().remove(0)
    };
    assert_ne!(last([1, 2, 3, 4]), last([2, 1, 3, 4]));
}

#[test]
fn other_precisions_work() {
    for (dtype, loss_dtype) in [
        (DType::F16, DType::F32),
        (DType::BF16, DType::F32),
        (DType::F64, DType::F64),
    ] {
        let (llama, vars) = new_llama(&tiny_llama(), dtype);
        let tokens = ids(&[[1, 2, 3, 4]]);
        assert_eq!(llama.forward(&tokens).unwrap().dtype(), dtype);
        let loss = llama.loss(&tokens, &ids(&[[2, 3, 4, 5]])).unwrap();
        assert_eq!(loss.dtype(), loss_dtype);
        let value = loss.to_dtype(DType::F32).unwrap().to_scalar::<f32>();
        assert!((value.unwrap() - 11f32.ln()).abs() < 0.3);
        let grads = loss.backward().unwrap();
        for var in vars.all_vars() {
            assert_eq!(grads.get(&var).unwrap().dtype(), dtype);
        }
    }
}

#[test]
fn errors_name_the_field() {
    let edited = |edit: fn(&mut LlamaConfig)| {
        let mut config = tiny_llama();
        edit(&mut config);
        config
    };
    for (config, text) in [
        (edited(|c| c.vocab_size = 0), "vocab_size must not be zero"),
        (edited(|c| c.context = 0), "context must not be zero"),
        (edited(|c| c.width = 0), "width must not be zero"),
        (edited(|c| c.heads = 0), "heads must not be zero"),
        (
            edited(|c| c.kv_heads = Some(0)),
            "kv_heads must not be zero",
        ),
        (edited(|c| c.hidden = 0), "hidden must not be zero"),
        (edited(|c| c.layers = 0), "layers must not be zero"),
        (
            edited(|c| c.heads = 3),
            "width (8) must be a multiple of heads (3)",
        ),
        (
            edited(|c| c.heads = 8),
            "width / heads (8 / 8) must be even",
        ),
        (
            edited(|c| c.kv_heads = Some(3)),
            "heads (4) must be a multiple of kv_heads (3)",
        ),
        (edited(|c| c.rope_theta = 0.), "rope_theta must be positive"),
        (
            edited(|c| c.rms_norm_eps = f64::NAN),
            "rms_norm_eps must be positive",
        ),
    ] {
        assert_err(config.validate(), text);
        assert_err(
            Llama::new(&config, VarBuilder::zeros(DType::F32, &CPU)),
            text,
        );
    }
    let (llama, _) = new_llama(&tiny_llama(), DType::F32);
    let long = Tensor::zeros((1, 7), DType::U32, &CPU).unwrap();
    assert_err(
        llama.forward(&long),
        "tokens of length 7 are longer than the context of 6",
    );
    assert_err(
        llama.forward(&ids(&[[0, 11, 0, 0]])),
        "tokens contain the id 11",
    );
}
