use candle_core::DType;
use candle_nn::{Init, VarBuilder};
use dp_models::{Gpt, GptConfig};

use crate::support::{CPU, assert_err, new_gpt, record, tiny};

#[test]
fn parameters_are_created_in_forward_order_with_gpt2_values() {
    // Weight and bias of each, by standard deviation of the weight (0.01 = 0.02 / sqrt(2 * 2 layers)); None is a norm.
    let block = [
        ("ln1", vec![8], None),
        ("qkv", vec![24, 8], Some(0.02)),
        ("proj", vec![8, 8], Some(0.01)),
        ("ln2", vec![8], None),
        ("fc", vec![32, 8], Some(0.02)),
        ("out", vec![8, 32], Some(0.01)),
    ];
    let mut expected = vec![
        ("wte.weight".to_string(), vec![11, 8], Some(0.02)),
        ("wpe.weight".to_string(), vec![6, 8], Some(0.02)),
    ];
    for idx in 0..2 {
        for (name, shape, stdev) in &block {
            expected.push((format!("blocks.{idx}.{name}.weight"), shape.clone(), *stdev));
            expected.push((format!("blocks.{idx}.{name}.bias"), vec![shape[0]], None));
        }
    }
    expected.push(("lnf.weight".to_string(), vec![8], None));
    expected.push(("lnf.bias".to_string(), vec![8], None));
    expected.push(("head.weight".to_string(), vec![11, 8], Some(0.02)));

    for tied_head in [false, true] {
        let config = GptConfig {
            tied_head,
            ..tiny()
        };
        let got = record(&config.into());
        let expected = &expected[..expected.len() - usize::from(tied_head)];
        assert_eq!(got.len(), expected.len());
        for ((name, shape, init), (want_name, want_shape, want_stdev)) in got.iter().zip(expected) {
            assert_eq!((name, shape), (want_name, want_shape));
            match (init, want_stdev) {
                (Init::Randn { mean, stdev }, Some(want)) => {
                    assert_eq!(*mean, 0., "{name}");
                    assert!((stdev - want).abs() < 1e-12, "{name}: {stdev}");
                }
                (Init::Const(value), None) => {
                    assert_eq!(
                        *value,
                        if name.ends_with("weight") { 1. } else { 0. },
                        "{name}"
                    );
                }
                _ => panic!("{name} is initialised by {init:?}"),
            }
        }
    }
}

#[test]
fn num_params_counts_what_is_created() {
    let mini = GptConfig::mini();
    for tied_head in [true, false] {
        for config in [
            mini.clone(),
            tiny(),
            GptConfig {
                layers: 1,
                width: 1,
                heads: 1,
                ..tiny()
            },
        ] {
            let config = GptConfig {
                tied_head,
                ..config
            };
            let (_, vars) = new_gpt(&config, DType::F32);
            let created: usize = vars.all_vars().iter().map(|var| var.elem_count()).sum();
            assert_eq!(config.num_params(), created, "{config:?}");
        }
    }
    assert_eq!(mini.num_params(), 120_576);
    assert_eq!(GptConfig::gpt2().num_params(), 124_439_808);
}

#[test]
fn config_errors_name_the_field() {
    for (field, config) in [
        (
            "vocab_size",
            GptConfig {
                vocab_size: 0,
                ..tiny()
            },
        ),
        (
            "context",
            GptConfig {
                context: 0,
                ..tiny()
            },
        ),
        ("width", GptConfig { width: 0, ..tiny() }),
        ("heads", GptConfig { heads: 0, ..tiny() }),
        (
            "layers",
            GptConfig {
                layers: 0,
                ..tiny()
            },
        ),
    ] {
        let message = format!("{field} must not be zero");
        assert_err(config.validate(), &message);
        let vb = VarBuilder::zeros(DType::F32, &CPU);
        assert_err(Gpt::new(&config, vb), &message);
    }
    let config = GptConfig { heads: 3, ..tiny() };
    assert_err(
        config.validate(),
        "width (8) must be a multiple of heads (3)",
    );
    GptConfig::mini().validate().unwrap();
    GptConfig::gpt2().validate().unwrap();
}
