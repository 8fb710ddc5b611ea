use candle_core::DType;
use candle_nn::VarBuilder;
use dp_models::{Gpt, GptConfig};

use crate::support::{CPU, Fixture, assert_close, assert_err, names, new_gpt, var};

fn config(tied_head: bool) -> GptConfig {
    GptConfig {
        vocab_size: 31,
        context: 12,
        width: 18,
        heads: 3,
        layers: 2,
        tied_head,
    }
}

/// Loads the weights of `tests/fixtures/make_gpt_fixture.py` and compares all that it computed.
fn check(file: &str, tied_head: bool) {
    let fixture = Fixture::load(file);
    let weights = fixture.group("weight.");
    let (gpt, mut vars) = new_gpt(&config(tied_head), DType::F32);

    let mut expected: Vec<_> = weights.keys().cloned().collect();
    expected.sort();
    assert_eq!(names(&vars), expected);
    vars.set(weights.iter()).unwrap();

    let (inputs, targets) = (fixture.ids("inputs"), fixture.ids("targets"));
    assert_close(
        "logits",
        &gpt.forward(&inputs).unwrap(),
        fixture.get("logits"),
    );
    let loss = gpt.loss(&inputs, &targets).unwrap();
    assert_close("loss", &loss, fixture.get("loss"));
    let grads = loss.backward().unwrap();
    for name in &expected {
        let grad = grads
            .get(&var(&vars, name))
            .unwrap_or_else(|| panic!("no gradient for {name}"));
        assert_close(name, grad, fixture.get(&format!("grad.{name}")));
    }

    let single = gpt.forward(&fixture.ids("single.inputs")).unwrap();
    assert_close("single.logits", &single, fixture.get("single.logits"));
}

#[test]
fn tied_gpt_matches_pytorch() {
    check("gpt_tied.safetensors", true);
}

#[test]
fn untied_gpt_matches_pytorch() {
    check("gpt_untied.safetensors", false);
}

/// PyTorch's `save_model` stores a tied weight as `head.weight`, other writers under both names.
#[test]
fn weights_load_from_safetensors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("init.safetensors");
    for (file, tied_head) in [
        ("gpt_tied.safetensors", true),
        ("gpt_untied.safetensors", false),
    ] {
        let fixture = Fixture::load(file);
        let weights = fixture.group("weight.");
        let mut stored = vec![weights.clone()];
        if tied_head {
            let mut twice = weights.clone();
            twice.insert("head.weight".to_string(), weights["wte.weight"].clone());
            let mut renamed = twice.clone();
            renamed.remove("wte.weight");
            stored.extend([twice, renamed]);
        }
        for weights in stored {
            candle_core::safetensors::save(&weights, &path).unwrap();
            let loaded = config(tied_head).load_weights(&path, &CPU).unwrap();
            let vb = VarBuilder::from_tensors(loaded, DType::F32, &CPU);
            let gpt = Gpt::new(&config(tied_head), vb).unwrap();
            let logits = gpt.forward(&fixture.ids("inputs")).unwrap();
            assert_close("logits", &logits, fixture.get("logits"));
        }
    }
    assert_err(
        config(true).load_weights(&path, &CPU),
        "head.weight that differs from its wte.weight",
    );
    let missing = dir.path().join("missing.safetensors");
    assert_err(
        config(true).load_weights(missing, &CPU),
        "missing.safetensors",
    );

    let headless = Fixture::load("gpt_tied.safetensors").group("weight.");
    let vb = VarBuilder::from_tensors(headless, DType::F32, &CPU);
    assert_err(Gpt::new(&config(false), vb), "head.weight");
}
