use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;
use dp_models::gpt::hugging_face::{export, import, import_weights, read_config};
use dp_models::{Gpt, GptConfig};
use safetensors::tensor::{Dtype, SafeTensors, TensorView};
use serde_json::Value;
use tempfile::TempDir;

use crate::support::{CPU, assert_close, assert_err, seeded_gpt};

/// Dtype, shape and bytes of each tensor of a file.
type Raw = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn fixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gpt2_hugging_face")
}

fn config() -> GptConfig {
    GptConfig {
        vocab_size: 31,
        context: 12,
        width: 18,
        heads: 3,
        layers: 2,
        tied_head: true,
    }
}

fn read(path: &Path) -> Raw {
    let bytes = std::fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let raw = |(name, view): (&str, TensorView<'_>)| {
        let (shape, data) = (view.shape().to_vec(), view.data().to_vec());
        (name.to_string(), (view.dtype(), shape, data))
    };
    tensors.iter().map(raw).collect()
}

fn write(path: &Path, tensors: &Raw) {
    let views = tensors.iter().map(|(name, (dtype, shape, data))| {
        (name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    safetensors::serialize_to_file(views, None, path).unwrap();
}

/// A model folder with these weights and the config of the fixture, changed.
fn model(tensors: &Raw, change: impl FnOnce(&mut Value)) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    write(&folder.path().join("model.safetensors"), tensors);
    let json = std::fs::read_to_string(fixture().join("config.json")).unwrap();
    let mut json = serde_json::from_str(&json).unwrap();
    change(&mut json);
    std::fs::write(folder.path().join("config.json"), json.to_string()).unwrap();
    folder
}

fn fixture_weights() -> Raw {
    read(&fixture().join("model.safetensors"))
}

fn files_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name();
    let mut names: Vec<_> = entries
        .map(|entry| name(entry).into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Loads the weights of `tests/fixtures/make_gpt2_fixture.py` and compares the logits that it computed.
#[test]
fn imported_gpt2_has_the_logits_of_transformers() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("gpt2.safetensors");
    let got = import(fixture(), &file).unwrap();
    assert_eq!(got, config());

    let weights = got.load_weights(&file, &CPU).unwrap();
    let gpt = Gpt::new(&got, VarBuilder::from_tensors(weights, DType::F32, &CPU)).unwrap();
    let json = std::fs::read_to_string(fixture().join("logits.json")).unwrap();
    let json: Value = serde_json::from_str(&json).unwrap();
    let inputs: Vec<Vec<u32>> = serde_json::from_value(json["inputs"].clone()).unwrap();
    let logits: Vec<Vec<Vec<f32>>> = serde_json::from_value(json["logits"].clone()).unwrap();
    let logits: Vec<Tensor> = logits
        .into_iter()
        .map(|rows| Tensor::new(rows, &CPU).unwrap())
        .collect();
    let expected = Tensor::stack(&logits, 0).unwrap();
    let got = gpt.forward(&Tensor::new(inputs, &CPU).unwrap()).unwrap();
    assert_close("logits", &got, &expected);
}

/// The exported folder stays in cargo's folder for files of tests, so that `make_gpt2_fixture.py --check` can load it.
#[test]
fn export_gives_back_the_bytes_that_were_imported() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("gpt2.safetensors");
    let exported = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gpt2_exported");
    if exported.exists() {
        std::fs::remove_dir_all(&exported).unwrap();
    }
    let config = import(fixture(), &file).unwrap();
    export(&config, &file, &exported).unwrap();
    assert_eq!(files_in(&exported), ["config.json", "model.safetensors"]);
    assert_eq!(read(&exported.join("model.safetensors")), fixture_weights());
    assert_eq!(read_config(&exported).unwrap(), config);
    let bytes = std::fs::read(exported.join("model.safetensors")).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
    assert_err(export(&config, &file, &exported), "is not empty");
    // Nothing but the file itself is left where it was written.
    assert_eq!(files_in(folder.path()), ["gpt2.safetensors"]);
}

/// Wide and narrow matrices, with edges that are no multiple of a tile: element by element.
#[test]
fn conv1d_weights_are_transposed() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("gpt2.safetensors");
    import(fixture(), &file).unwrap();
    let (ours, theirs) = (read(&file), fixture_weights());
    for (name, their_name) in [
        ("qkv", "attn.c_attn"),
        ("proj", "attn.c_proj"),
        ("fc", "mlp.c_fc"),
        ("out", "mlp.c_proj"),
    ] {
        let (_, shape, got) = &ours[&format!("blocks.1.{name}.weight")];
        let (_, their_shape, want) = &theirs[&format!("transformer.h.1.{their_name}.weight")];
        let &[out, input] = shape.as_slice() else {
            panic!("{name} has the shape {shape:?}")
        };
        assert_eq!(their_shape, &[input, out]);
        for row in 0..out {
            for col in 0..input {
                let got = &got[4 * (row * input + col)..][..4];
                assert_eq!(got, &want[4 * (col * out + row)..][..4]);
            }
        }
    }
}

/// Files of the first published models: no prefix, masks of attention, and the tied head stored again.
#[test]
fn old_files_import_alike() {
    let folder = tempfile::tempdir().unwrap();
    let [new, old] = ["new", "old"].map(|name| folder.path().join(name));
    import(fixture(), &new).unwrap();

    let plain = fixture_weights().into_iter().map(|(name, tensor)| {
        (
            name.strip_prefix("transformer.").unwrap().to_string(),
            tensor,
        )
    });
    let plain: Raw = plain.collect();
    let mut with_masks = plain.clone();
    for idx in 0..2 {
        let mask = (Dtype::BOOL, vec![1, 1, 12, 12], vec![1; 144]);
        with_masks.insert(format!("h.{idx}.attn.bias"), mask);
        let masked = (Dtype::F32, vec![], vec![0; 4]);
        with_masks.insert(format!("h.{idx}.attn.masked_bias"), masked);
    }
    let mut twice = fixture_weights();
    twice.insert("lm_head.weight".into(), plain["wte.weight"].clone());
    let mut head_only = twice.clone();
    head_only.remove("transformer.wte.weight");
    for tensors in [plain, with_masks, twice, head_only] {
        let model = model(&tensors, |json| {
            let fields = json.as_object_mut().unwrap();
            let context = fields.remove("n_positions").unwrap();
            fields.insert("n_ctx".into(), context);
            fields.remove("tie_word_embeddings");
            fields["activation_function"] = "gelu_pytorch_tanh".into();
        });
        import(model.path(), &old).unwrap();
        assert_eq!(read(&old), read(&new));
        // The file alone will do, too: its config lies beside it.
        import(model.path().join("model.safetensors"), &old).unwrap();
        assert_eq!(read(&old), read(&new));
    }
}

#[test]
fn models_in_several_files_import_alike() {
    let folder = tempfile::tempdir().unwrap();
    let [whole, parts] = ["whole", "parts"].map(|name| folder.path().join(name));
    import(fixture(), &whole).unwrap();

    let model = model(&fixture_weights(), |_| ());
    let at = |name: &str| model.path().join(name);
    std::fs::remove_file(at("model.safetensors")).unwrap();
    let (mut first, mut map) = (fixture_weights(), serde_json::Map::new());
    let second = first.split_off("transformer.h.1");
    for (name, tensors) in [("a.safetensors", first), ("b.safetensors", second)] {
        write(&at(name), &tensors);
        map.extend(tensors.into_keys().map(|key| (key, name.into())));
    }
    let index = |map| serde_json::json!({"metadata": {}, "weight_map": map}).to_string();
    std::fs::write(at("model.safetensors.index.json"), index(map.clone())).unwrap();
    import(model.path(), &parts).unwrap();
    assert_eq!(read(&parts), read(&whole));

    std::fs::copy(at("b.safetensors"), at("a.safetensors")).unwrap();
    assert_err(import(model.path(), &parts), "that another file has, too");
    std::fs::remove_file(at("b.safetensors")).unwrap();
    assert_err(import(model.path(), &parts), "b.safetensors");
    map.insert("x".into(), "../a.safetensors".into());
    std::fs::write(at("model.safetensors.index.json"), index(map)).unwrap();
    assert_err(import(model.path(), &parts), "lists ../a.safetensors");
    std::fs::remove_file(at("model.safetensors.index.json")).unwrap();
    assert_err(import(model.path(), &parts), "save_pretrained");
}

/// Our own weights in any dtype, with a head of their own: exported and imported they are what they were.
#[test]
fn every_dtype_round_trips() {
    let config = GptConfig {
        tied_head: false,
        ..config()
    };
    let (_, vars) = seeded_gpt(&config, 3);
    let folder = tempfile::tempdir().unwrap();
    let [file, again] = ["file", "again"].map(|name| folder.path().join(name));
    for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
        let weights = vars.data().lock().unwrap();
        let weights = weights.iter().map(|(name, var)| {
            // Norms stay in f32: a file may mix dtypes.
            let dtype = match name.contains("ln") {
                true => DType::F32,
                false => dtype,
            };
            (name.clone(), var.to_dtype(dtype).unwrap())
        });
        candle_core::safetensors::save(&weights.collect(), &file).unwrap();
        let model = folder.path().join(format!("{dtype:?}"));
        export(&config, &file, &model).unwrap();
        assert_eq!(import(&model, &again).unwrap(), config);
        assert_eq!(read(&again), read(&file), "{dtype:?}");
    }
}

#[test]
fn errors_name_the_tensors() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("to");
    let changed = |change: &dyn Fn(&mut Raw)| {
        let mut tensors = fixture_weights();
        change(&mut tensors);
        import(model(&tensors, |_| ()).path(), &to)
    };
    let tensor = |shape: &[usize]| {
        let len = 4 * shape.iter().product::<usize>();
        (Dtype::F32, shape.to_vec(), vec![0; len])
    };
    let several = changed(&|tensors| {
        tensors.remove("transformer.h.1.mlp.c_fc.bias");
        tensors.insert("score.weight".into(), tensor(&[2, 18]));
        // A weight that is not transposed.
        tensors.insert(
            "transformer.h.0.attn.c_attn.weight".into(),
            tensor(&[54, 18]),
        );
        let ids = (Dtype::I32, vec![18], vec![0; 72]);
        tensors.insert("transformer.ln_f.bias".into(), ids);
    });
    let message = several.unwrap_err().to_string();
    for text in [
        "missing: transformer.h.1.mlp.c_fc.bias;",
        "not a part of the model: score.weight;",
        "transformer.h.0.attn.c_attn.weight [54, 18] instead of [18, 54];",
        "transformer.ln_f.bias (I32)",
    ] {
        assert!(message.contains(text), "{text} is not in {message}");
    }

    let many = changed(&|tensors| tensors.retain(|name, _| !name.contains("h.1.")));
    assert_err(many, "and 8 more");
    let twin = changed(&|tensors| {
        let wte = tensors["transformer.wte.weight"].clone();
        tensors.insert("wte.weight".into(), wte);
    });
    assert_err(twin, "as well as");
    let untied = changed(&|tensors| {
        tensors.insert("lm_head.weight".into(), tensor(&[31, 18]));
    });
    assert_err(
        untied,
        "lm_head.weight differs from transformer.wte.weight, but the config says that the head is tied",
    );
    let headless = model(&fixture_weights(), |json| {
        json["tie_word_embeddings"] = false.into()
    });
    assert_err(import(headless.path(), &to), "missing: lm_head.weight");
    let more_layers = GptConfig {
        layers: 3,
        ..config()
    };
    assert_err(
        import_weights(&more_layers, fixture(), &to),
        "transformer.h.2.ln_1.weight",
    );
    assert_err(
        export(&config(), fixture().join("model.safetensors"), &to),
        "missing: wte.weight, wpe.weight",
    );

    // None of these has left anything behind.
    assert_eq!(files_in(folder.path()), [""; 0]);
}

#[test]
fn damaged_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let [to, file] = ["to", "file"].map(|name| folder.path().join(name));
    let whole = std::fs::read(fixture().join("model.safetensors")).unwrap();
    for (bytes, text) in [
        (&whole[..whole.len() - 1], "its header says"),
        (&whole[..100], "does not fit"),
        (&whole[..4], "cannot read the safetensors header"),
        (&[0xFF; 64][..], "does not fit"),
        (
            b"\x02\0\0\0\0\0\0\0[]",
            "cannot read the safetensors header",
        ),
    ] {
        std::fs::write(&file, bytes).unwrap();
        assert_err(import_weights(&config(), &file, &to), text);
    }
    assert_err(
        import_weights(&config(), folder.path().join("none"), &to),
        "none",
    );
    std::fs::write(&file, whole).unwrap();
    let nowhere = folder.path().join("no folder").join("to");
    assert_err(import_weights(&config(), &file, nowhere), "no folder");
}

#[test]
fn config_errors_name_the_field() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.json");
    let json = std::fs::read_to_string(fixture().join("config.json")).unwrap();
    for (field, value, text) in [
        ("activation_function", Value::from("gelu"), "\"gelu_new\""),
        ("layer_norm_epsilon", 1e-6.into(), "1e-5"),
        ("scale_attn_by_inverse_layer_idx", true.into(), "false"),
        ("scale_attn_weights", false.into(), "true"),
        ("add_cross_attention", true.into(), "false"),
        ("n_inner", 70.into(), "4 n_embd"),
        ("model_type", "llama".into(), "\"gpt2\""),
        ("n_positions", Value::Null, "missing"),
        ("n_embd", Value::Null, "config.json"),
        ("n_head", 4.into(), "heads (4)"),
        ("vocab_size", 0.into(), "vocab_size must not be zero"),
    ] {
        let mut json: Value = serde_json::from_str(&json).unwrap();
        json[field] = value;
        std::fs::write(&path, json.to_string()).unwrap();
        // Candle adds a backtrace where RUST_BACKTRACE is set.
        let first_line = |path: &Path| {
            let message = read_config(path).unwrap_err().to_string();
            message.lines().next().unwrap_or_default().to_string()
        };
        let message = first_line(folder.path());
        assert!(message.contains(text), "{field}: {message}");
        let is_named = message.contains(field) || ["n_embd", "n_head"].contains(&field);
        assert!(is_named, "{field}: {message}");
        assert_eq!(message, first_line(&path));
    }
    let mut with_inner: Value = serde_json::from_str(&json).unwrap();
    with_inner["n_inner"] = 72.into();
    std::fs::write(&path, with_inner.to_string()).unwrap();
    assert_eq!(read_config(&path).unwrap(), config());
    std::fs::remove_file(&path).unwrap();
    assert_err(read_config(folder.path()), "config.json");
}
