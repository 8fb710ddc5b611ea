use candle_core::{DType, IndexOp, Tensor};
use candle_nn::VarBuilder;
use dp_models::{GptConfig, LlamaConfig, ModelConfig, Sampling};

use crate::support::{CPU, assert_close_within, assert_err, seeded, tiny, tiny_llama};

const GPT2: &str = r#"{"architecture": "gpt2", "context": 6, "width": 8, "heads": 2, "layers": 2}"#;
const LLAMA: &str =
    r#"{"architecture": "llama", "context": 6, "width": 8, "heads": 2, "layers": 2, "hidden": 20}"#;

fn parse(json: &str) -> Result<ModelConfig, String> {
    serde_json::from_str(json).map_err(|err| err.to_string())
}

#[test]
fn json_has_the_defaults_it_documents() {
    let gpt2 = GptConfig {
        vocab_size: 0,
        tied_head: true,
        ..tiny()
    };
    assert_eq!(parse(GPT2).unwrap(), gpt2.into());
    let llama = LlamaConfig {
        vocab_size: 0,
        context: 6,
        width: 8,
        heads: 2,
        kv_heads: None,
        hidden: 20,
        layers: 2,
        tied_head: false,
        rope_theta: 10_000.,
        rms_norm_eps: 1e-5,
    };
    assert_eq!(llama.num_kv_heads(), 2);
    assert_eq!(parse(LLAMA).unwrap(), llama.into());
}

#[test]
fn json_round_trips() {
    for config in [ModelConfig::from(tiny()), tiny_llama().into()] {
        let json = serde_json::to_string(&config).unwrap();
        assert_eq!(parse(&json).unwrap(), config, "{json}");
    }
}

#[test]
fn json_errors_name_the_field() {
    let with = |json: &str, field: &str| parse(&json.replace("}", &format!(", {field}}}")));
    for (result, text) in [
        (with(GPT2, r#""hidden": 3"#), "unknown field `hidden`"),
        (with(LLAMA, r#""dropout": 0.1"#), "unknown field `dropout`"),
        (parse(&GPT2.replace("gpt2", "gpt3")), "`gpt3`"),
        (
            parse(&GPT2.replace(r#""architecture": "gpt2", "#, "")),
            "missing field `architecture`",
        ),
        (
            parse(&LLAMA.replace(r#", "hidden": 20"#, "")),
            "missing field `hidden`",
        ),
        (parse(&GPT2.replace("6", "-6")), "-6"),
    ] {
        let message = result.unwrap_err();
        assert!(message.contains(text), "{text:?} is not in {message:?}");
    }
}

/// In the schema each architecture has its own name and fields in one object, with what the docs of the fields say.
#[test]
fn schema_has_both_architectures() {
    let schema = serde_json::to_value(schemars::schema_for!(ModelConfig)).unwrap();
    let variants = schema["oneOf"].as_array().unwrap();
    assert_eq!(variants.len(), 2);
    for (variant, (name, field)) in variants
        .iter()
        .zip([("gpt2", "tied_head"), ("llama", "kv_heads")])
    {
        let properties = &variant["properties"];
        assert_eq!(properties["architecture"]["const"], name);
        assert_eq!(variant["additionalProperties"], false);
        for field in ["vocab_size", field] {
            let description = properties[field]["description"].as_str().unwrap();
            assert!(description.contains("Absent"), "{description}");
        }
        let required: Vec<_> = variant["required"].as_array().unwrap().iter().collect();
        assert!(required.contains(&&"architecture".into()));
        assert!(!required.contains(&&"vocab_size".into()));
    }
}

#[test]
fn vocab_size_is_that_of_the_tokenizer_if_absent() {
    for json in [GPT2, LLAMA] {
        let config = parse(json).unwrap();
        assert_err(config.validate(), "vocab_size must not be zero");
        let config = config.with_vocab_size(11).unwrap();
        config.validate().unwrap();
        assert_eq!(config.vocab_size(), 11);
        assert_eq!(config.clone().with_vocab_size(7).unwrap(), config);
        assert_err(
            config.with_vocab_size(12),
            "vocab_size is 11, but the tokenizer has 12 tokens",
        );
    }
}

#[test]
fn built_models_are_what_the_config_says() {
    for config in [ModelConfig::from(tiny()), tiny_llama().into()] {
        let (model, vars) = seeded(&config, 1);
        assert_eq!(model.model_config(), config);
        let created: usize = vars.all_vars().iter().map(|var| var.elem_count()).sum();
        assert_eq!(config.num_params(), created);
        let (context, width, layers) = (config.context(), config.width(), config.layers());
        assert_eq!((context, width, layers), (6, 8, 2));
        assert_eq!(model.head().dims(), [config.vocab_size(), width]);
        let broken = match config {
            ModelConfig::Gpt2(config) => GptConfig {
                layers: 0,
                ..config
            }
            .into(),
            ModelConfig::Llama(config) => ModelConfig::from(LlamaConfig {
                layers: 0,
                ..config
            }),
            other => panic!("{}: no such case", other.architecture()),
        };
        assert_err(
            broken.build(VarBuilder::zeros(DType::F32, &CPU)),
            "layers must not be zero",
        );
    }
}

/// The logits of the last position alone are those among all, for several sequences.
#[test]
fn next_logits_are_the_last_of_forward() {
    let tokens = Tensor::new(&[[1u32, 2, 3, 4], [5, 6, 7, 8], [9, 10, 0, 1]], &CPU).unwrap();
    for config in [ModelConfig::from(tiny()), tiny_llama().into()] {
        let (model, _) = seeded(&config, 2);
        let all = model.forward(&tokens).unwrap();
        let last = all.i((.., 3)).unwrap();
        // Products of matrices of other shapes may differ in the last bits.
        assert_close_within("next", &model.next_logits(&tokens).unwrap(), &last, 1e-6);
    }
}

/// `top_p` keeps exactly the tokens that are needed to reach it, and at the limits it is greedy, or changes nothing.
#[test]
fn top_p_samples_from_the_nucleus() {
    for config in [ModelConfig::from(tiny()), tiny_llama().into()] {
        let (model, _) = seeded(&config, 6);
        let prompt = [1, 2];
        let logits = model
            .next_logits(&Tensor::new(&[prompt], &CPU).unwrap())
            .unwrap();
        let logits = logits.i(0).unwrap().to_vec1::<f32>().unwrap();
        let sum: f64 = logits.iter().map(|&x| f64::from(x).exp()).sum();
        let mut ranked: Vec<_> = (0u32..)
            .zip(logits.iter().map(|&x| f64::from(x).exp() / sum))
            .collect();
        ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
        let next = |top_p: Option<f64>, seed: u64| {
            let sampling = Sampling {
                top_p,
                ..Sampling::with_seed(seed)
            };
            model.generate(&prompt, 1, &sampling).unwrap()[2]
        };
        // A little above the probability of the first two, so that the third is needed, and no other.
        let top_p = ranked[0].1 + ranked[1].1 + 0.01;
        let mut drawn: Vec<u32> = (0..200).map(|seed| next(Some(top_p), seed)).collect();
        drawn.sort_unstable();
        drawn.dedup();
        let mut nucleus: Vec<u32> = ranked[..3].iter().map(|(id, _)| *id).collect();
        nucleus.sort_unstable();
        assert_eq!(drawn, nucleus);
        for seed in 0..20 {
            assert_eq!(next(Some(1.), seed), next(None, seed));
            assert_eq!(next(Some(1e-9), seed), ranked[0].0);
        }
    }
}
