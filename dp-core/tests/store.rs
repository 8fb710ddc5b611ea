use std::collections::HashMap;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Init, Module};
use dp_core::{
    AdamW, DistributedDataParallel, Error, LedgerSnapshot, ParamKind, ParamStore, Result, Sgd,
    Trainer,
};

use crate::support::{builder, expect_error, linear_loss, ones, ranks, values};

/// Two linear layers; in the other order on request.
fn two_layers(store: &ParamStore, swapped: bool) -> Result<()> {
    let vb = builder(store);
    let names = if swapped { ["b", "a"] } else { ["a", "b"] };
    for name in names {
        candle_nn::linear(4, 3, vb.pp(name))?;
    }
    Ok(())
}

#[test]
fn initial_values_depend_on_seed_and_name_only() {
    let digest = |seed, swapped| {
        let store = ParamStore::new(&Device::Cpu).with_seed(seed);
        two_layers(&store, swapped).expect("new names");
        assert_eq!(store.seed(), seed);
        let layers = ["a.weight", "b.weight"].map(|n| values(store.get(n).expect("made").tensor()));
        assert_ne!(layers[0], layers[1]);
        store.sha256().expect("on the CPU")
    };
    let base = digest(5, false);
    assert_eq!(digest(5, false), base);
    assert_eq!(digest(5, true), base);
    assert_ne!(digest(6, false), base);
    let of_ranks = ranks(3, move |rank| {
        let store = ParamStore::new(rank.device()).with_seed(5);
        two_layers(&store, rank.rank() == 1)?;
        store.sha256()
    });
    assert_eq!(of_ranks, vec![base; 3]);
}

#[test]
fn initial_values_have_the_distribution_that_is_asked_for() {
    let store = ParamStore::new(&Device::Cpu);
    let vb = builder(&store);
    let draw = |name: &str, init| {
        values(
            &vb.get_with_hints((200, 50), name, init)
                .expect("a new name"),
        )
    };
    let moments = |v: &[f32]| {
        let mean = v.iter().sum::<f32>() / v.len() as f32;
        let var = v.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / v.len() as f32;
        (mean, var.sqrt())
    };
    let close =
        |a: f32, b: f32| assert!((a - b).abs() < 0.02 * b.abs().max(1.0), "{a} against {b}");
    let (mean, std) = moments(&draw(
        "normal",
        Init::Randn {
            mean: 3.0,
            stdev: 0.5,
        },
    ));
    close(mean, 3.0);
    close(std, 0.5);
    let uniform = draw("uniform", Init::Uniform { lo: -1.0, up: 2.0 });
    assert!(uniform.iter().all(|x| (-1.0..2.0).contains(x)));
    close(moments(&uniform).0, 0.5);
    let (mean, std) = moments(&draw("kaiming", candle_nn::init::DEFAULT_KAIMING_NORMAL));
    close(mean, 0.0);
    close(std, (2f32 / 50.0).sqrt());
    assert_eq!(draw("const", Init::Const(-2.5)), [-2.5; 10_000]);
    // What candle_nn's linear layer asks for: weights normal with variance 2 / fan in, biases uniform.
    let layer = candle_nn::linear(50, 400, vb.pp("fc")).expect("new names");
    let (mean, std) = moments(&values(layer.weight()));
    close(mean, 0.0);
    close(std, (2f32 / 50.0).sqrt());
    let bias = values(layer.bias().expect("it has one"));
    let bound = 1.0 / 50f32.sqrt();
    assert!(bias.iter().all(|b| b.abs() <= bound) && bias.iter().any(|b| b.abs() > 0.9 * bound));
}

#[test]
fn a_name_is_one_parameter() {
    let store = ParamStore::new(&Device::Cpu);
    let vb = builder(&store);
    let first = ones(&vb, 3, "w").expect("a new name");
    let again = ones(&vb, 3, "w").expect("the same tensor");
    assert_eq!(
        (first.id(), store.params().len(), store.num_trained()),
        (again.id(), 1, 3)
    );
    expect_error(ones(&vb, 4, "w"), &["`w`", "[4]", "[3]"]);
    expect_error(
        ones(&store.var_builder(DType::F64), 3, "w"),
        &["`w`", "F64", "F32"],
    );
    assert!(vb.contains_tensor("w") && !vb.contains_tensor("v"));
    assert!(store.get("v").is_none());
}

#[test]
fn c04_tied_layers_train_one_weight() {
    ranks(2, |rank| {
        let store = ParamStore::new(rank.device()).with_seed(1);
        let vb = builder(&store);
        // GPT-2's way: embedding and head share a weight.
        let embedding = candle_nn::embedding(7, 4, vb.pp("wte"))?;
        let head = candle_nn::linear_no_bias(4, 7, vb.pp("wte"))?;
        assert_eq!(store.num_trained(), 28);
        let start = values(head.weight());
        let mut trainer = DistributedDataParallel::new(store, rank.comm(), Sgd::new(1.0))?;
        let ids = Tensor::new(&[0u32, 3], rank.device())?;
        let x = embedding.forward(&ids)?;
        trainer.backward(&head.forward(&x)?.sum_all()?)?;
        trainer.step()?;
        // d/dw of sum over i, v of w[id_i] . w[v]: the column sums for used rows, and sum of the used rows for all.
        let column = |c: usize| (0..7).map(|v| start[v * 4 + c]).sum::<f32>();
        for (i, w) in values(embedding.embeddings()).iter().enumerate() {
            let (row, c) = (i / 4, i % 4);
            let mut g = start[c] + start[12 + c];
            if row == 0 || row == 3 {
                g += column(c);
            }
            assert!((w - (start[i] - g)).abs() < 1e-5, "element {i}");
        }
        Ok(())
    });
}

#[test]
fn frozen_parameters_keep_their_values_and_cost_no_state() {
    ranks(2, |rank| {
        let store = ParamStore::new(rank.device())
            .with_seed(2)
            .with_frozen(|n| n.starts_with("body"));
        let vb = builder(&store);
        let first = candle_nn::linear(4, 4, vb.pp("first"))?;
        let body = candle_nn::linear(4, 4, vb.pp("body"))?;
        assert_eq!(
            store.get("body.weight").expect("made").kind(),
            ParamKind::Frozen
        );
        assert_eq!(store.num_trained(), 20);
        let before = (
            values(first.weight()),
            values(body.weight()),
            values(body.bias().expect("made")),
        );
        let mut trainer = DistributedDataParallel::new(store, rank.comm(), AdamW::with_lr(0.1))?;
        let x = Tensor::full(1f32 + rank.rank() as f32, (2, 4), rank.device())?;
        for _ in 0..3 {
            trainer.backward(&body.forward(&first.forward(&x)?)?.sqr()?.mean_all()?)?;
            assert!(trainer.step()?.unused.is_empty());
        }
        assert_eq!(
            (values(body.weight()), values(body.bias().expect("made"))),
            (before.1, before.2)
        );
        // Gradients pass through it.
        assert_ne!(values(first.weight()), before.0);
        let mut bytes = LedgerSnapshot::default();
        (bytes.parameters, bytes.gradients, bytes.optimizer) = (160, 80, 160);
        assert_eq!(trainer.ledger().current(), bytes);
        Ok(())
    });
}

/// A safetensors file of these tensors.
fn file(folder: &tempfile::TempDir, tensors: &[(&str, Tensor)]) -> std::path::PathBuf {
    let path = folder.path().join("initial.safetensors");
    let tensors: HashMap<&str, Tensor> = tensors.iter().cloned().collect();
    candle_core::safetensors::save(&tensors, &path).expect("the folder can be written");
    path
}

#[test]
fn initial_values_come_from_a_file_by_name() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let weight = Tensor::arange(0f32, 12f32, &Device::Cpu)
        .and_then(|t| t.reshape((3, 4)))
        .expect("12 elements");
    let bias = Tensor::new(&[0.5f32, -1.5, 1024.0], &Device::Cpu).expect("3 elements");
    let half = bias.to_dtype(DType::BF16).expect("exact");
    let other = bias.clone();
    let path = file(
        &folder,
        &[
            ("fc.weight", weight),
            ("fc.bias", half),
            ("old.head", other.clone()),
            ("extra", other),
        ],
    );

    let store = ParamStore::new(&Device::Cpu)
        .with_initial_values(&path)
        .expect("the file is there");
    let vb = builder(&store);
    assert!(vb.contains_tensor("fc.weight") && !vb.contains_tensor("fc.scale"));
    let layer = candle_nn::linear(4, 3, vb.pp("fc")).expect("names and shapes fit");
    assert_eq!(
        values(layer.weight()),
        (0..12).map(|i| i as f32).collect::<Vec<_>>()
    );
    // Converted from bf16.
    assert_eq!(values(layer.bias().expect("made")), [0.5, -1.5, 1024.0]);
    assert_eq!(store.unused_initial_values(), ["extra", "old.head"]);

    // And it trains.
    ranks(2, move |rank| {
        let store = ParamStore::new(rank.device()).with_initial_values(&path)?;
        let w = builder(&store).get(3, "fc.bias")?;
        let mut trainer = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.5))?;
        trainer.backward(&linear_loss(&w, 1.0)?)?;
        trainer.step()?;
        assert_eq!(values(&w), [0.0, -2.0, 1023.5]);
        Ok(())
    });
}

#[test]
fn a_file_that_does_not_fit_is_an_error_with_its_name() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let path = file(
        &folder,
        &[(
            "w",
            Tensor::zeros((3, 4), DType::F32, &Device::Cpu).expect("zeros"),
        )],
    );
    let name = path.to_string_lossy().to_string();
    let store = ParamStore::new(&Device::Cpu)
        .with_initial_values(&path)
        .expect("the file is there");
    let vb = builder(&store);
    let get = |shape: &[usize], name: &str| -> Result<Tensor> { Ok(vb.get(shape, name)?) };
    expect_error(get(&[3, 4], "v"), &["`v`", &name]);
    expect_error(get(&[4, 3], "w"), &["`w`", &name, "[3, 4]", "[4, 3]"]);
    assert!(store.params().is_empty());
    get(&[3, 4], "w").expect("after the failures");
    assert_eq!(store.unused_initial_values(), [""; 0]);

    let missing = folder.path().join("nowhere.safetensors");
    let open = |path: &std::path::Path| ParamStore::new(&Device::Cpu).with_initial_values(path);
    assert!(matches!(
        expect_error(open(&missing), &["nowhere.safetensors"]),
        Error::File { .. }
    ));
    let garbage = folder.path().join("garbage.safetensors");
    for content in [b"".as_slice(), b"not a header", &[255; 64]] {
        std::fs::write(&garbage, content).expect("the folder can be written");
        assert!(matches!(
            expect_error(open(&garbage), &["garbage.safetensors"]),
            Error::File { .. }
        ));
    }
}

#[test]
fn parameters_are_made_before_the_trainer() {
    ranks(1, |rank| {
        let store = ParamStore::new(rank.device());
        let vb = builder(&store);
        let w = ones(&vb, 2, "w")?;
        let mut trainer = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.25))?;
        expect_error(ones(&vb, 2, "late"), &["`late`", "after the trainer"]);
        assert_eq!(ones(&vb, 2, "w")?.id(), w.id());
        trainer.backward(&w.sum_all()?)?;
        trainer.step().map(drop)
    });
}

/// `loss.backward()` of candle, whose error is text by then.
fn candle_backward(loss: &Tensor) -> Result<()> {
    Ok(loss.backward().map(drop)?)
}

#[test]
fn gradients_without_a_trainer_are_an_error_by_name() {
    let store = ParamStore::new(&Device::Cpu);
    let w = ones(&builder(&store), 2, "fc.w").expect("a new name");
    let loss = w.sum_all().expect("a sum");
    expect_error(candle_backward(&loss), &["`fc.w`", "no trainer"]);
}

#[test]
fn backward_past_the_trainer_is_an_error_and_harms_nothing() {
    ranks(2, |rank| {
        let store = ParamStore::new(rank.device());
        let w = ones(&builder(&store), (), "w")?;
        let mut trainer = DistributedDataParallel::new(store, rank.comm(), Sgd::new(0.25))?;
        expect_error(
            candle_backward(&(&w * 9.0)?),
            &["`w`", "trainer.backward(&loss)"],
        );
        trainer.backward(&w)?;
        expect_error(
            candle_backward(&(&w * 9.0)?),
            &["`w`", "trainer.backward(&loss)"],
        );
        trainer.step()?;
        assert_eq!(values(&w), [0.75]);
        Ok(())
    });
}

#[test]
fn parameters_do_not_keep_the_trainer_alive() {
    ranks(2, |rank| {
        let store = ParamStore::new(rank.device());
        let ledger = store.ledger().clone();
        let w = ones(&builder(&store), 10, "w")?;
        let mut trainer = DistributedDataParallel::new(store, rank.comm(), AdamW::default())?;
        trainer.backward(&w.sum_all()?)?;
        trainer.step()?;
        let loss = w.sum_all()?;
        let held = ledger.current();
        assert_eq!(
            (held.parameters, held.gradients, held.optimizer),
            (40, 40, 80)
        );
        drop(trainer);
        // The model is still there, and the loss with its graph.
        assert_eq!(ledger.current(), LedgerSnapshot::default());
        expect_error(candle_backward(&loss), &["`w`", "no trainer listens"]);
        Ok(())
    });
}

#[test]
fn values_are_read_and_written_in_place() {
    let store = ParamStore::new(&Device::Cpu);
    let vb = builder(&store);
    let w = ones(&vb, (2, 3), "w").expect("a new name");
    let p = store.get("w").expect("just made");
    p.write(2..4, &[7.0, 8.0]).expect("in range");
    assert_eq!(values(&w), [1.0, 1.0, 7.0, 8.0, 1.0, 1.0]);
    let mut out = [0.0; 3];
    p.read(1..4, &mut out).expect("in range");
    assert_eq!(out, [1.0, 7.0, 8.0]);
    expect_error(p.read(4..7, &mut out), &["range", "`w`", "4..7"]);
    expect_error(p.write(0..2, &[1.0]), &["range", "1 values"]);
}

#[test]
fn the_digest_sees_names_shapes_and_bits() {
    let digest = |name: &str, shape: &[usize], value: f64| {
        let store = ParamStore::new(&Device::Cpu);
        builder(&store)
            .get_with_hints(shape, name, Init::Const(value))
            .expect("a new name");
        store.sha256().expect("on the CPU")
    };
    let base = digest("w", &[2, 3], 0.0);
    assert_eq!(digest("w", &[2, 3], 0.0), base);
    assert_eq!(base.len(), 64);
    for other in [
        digest("v", &[2, 3], 0.0),
        digest("w", &[3, 2], 0.0),
        digest("w", &[2, 3], -0.0),
    ] {
        assert_ne!(other, base);
    }
}
