use std::path::Path;

use candle_core::{DType, Device, Tensor};
use candle_nn::{Init, VarBuilder, VarMap};
use dp_core::checkpoint::{Checkpoint, CheckpointProblem};
use dp_core::{AdamW, Error, LoadOptions, ParamStore, Rank, Result, Trainer};
use dp_zero::Sharding;

use crate::checkpoint::folder;
use crate::support::{AnyTrainer, Oddities, STRATEGIES, caps, noise, ranks, same_on_all, values};

/// Every kind of parameter, a frozen one in bf16 and batch-norm statistics.
fn model(strategy: Sharding, rank: &Rank, seed: u64) -> Result<(Oddities, AnyTrainer<AdamW>)> {
    model_in(
        ParamStore::new(rank.device()).with_seed(seed),
        strategy,
        rank,
    )
}

fn model_in(
    store: ParamStore,
    strategy: Sharding,
    rank: &Rank,
) -> Result<(Oddities, AnyTrainer<AdamW>)> {
    let store = store.with_frozen(|name| matches!(name, "frozen" | "half"));
    let vb = store.var_builder(DType::F32);
    let model = Oddities::new(vb.clone())?;
    candle_nn::batch_norm(3, 1e-5, vb.pp("norm"))?;
    store
        .var_builder(DType::BF16)
        .get_with_hints(3, "half", Init::Const(0.1))?;
    Ok((
        model,
        AnyTrainer::new(strategy, store, rank, AdamW::with_lr(0.1), caps(16))?,
    ))
}

fn loss_bits(model: &Oddities) -> Result<u32> {
    Ok(model.loss(&noise(1, (2, 5)))?.to_scalar::<f32>()?.to_bits())
}

/// Plain candle reads the file by both of its ways and computes the same loss; the export of a checkpoint has the
/// same tensors.
#[test]
fn candle_reads_the_weights() -> Result<()> {
    for strategy in STRATEGIES {
        for world_size in [1, 2, 3] {
            let (guard, run) = folder();
            let path = guard.path().join("weights.safetensors");
            std::fs::write(&path, "an older file").expect("writable");
            let (to, checkpoint) = (path.clone(), run.clone());
            let expected = same_on_all(ranks(world_size, move |rank| {
                let (model, mut trainer) = model(strategy, &rank, 11)?;
                trainer.backward(&model.loss(&noise(2, (2, 5)))?)?;
                trainer.step()?;
                trainer.export_safetensors(&to)?;
                trainer.save(&checkpoint)?;
                loss_bits(&model)
            }));
            // SAFETY: nobody changes the file while it is mapped.
            let vb =
                unsafe { VarBuilder::from_mmaped_safetensors(&[&path], DType::F32, &Device::Cpu)? };
            assert_eq!(loss_bits(&Oddities::new(vb)?)?, expected);
            let mut map = VarMap::new();
            let model = Oddities::new(VarBuilder::from_varmap(&map, DType::F32, &Device::Cpu))?;
            map.load(&path)?;
            assert_eq!(loss_bits(&model)?, expected);

            let again = guard.path().join("again.safetensors");
            Checkpoint::open(&run)?.export_safetensors(&again)?;
            let (a, b) = (
                candle_core::safetensors::load(&path, &Device::Cpu)?,
                candle_core::safetensors::load(&again, &Device::Cpu)?,
            );
            assert_eq!(
                (a.len(), a["half"].dtype(), a["norm.running_var"].dims()),
                (15, DType::BF16, &[3][..])
            );
            assert_eq!(a.len(), b.len());
            for (name, tensor) in &a {
                assert_eq!(
                    (tensor.dtype(), tensor.dims()),
                    (b[name].dtype(), b[name].dims()),
                    "{name}"
                );
                assert_eq!(
                    values(&tensor.to_dtype(DType::F32)?),
                    values(&b[name].to_dtype(DType::F32)?),
                    "{name}"
                );
            }
            let left: Vec<_> = std::fs::read_dir(guard.path())
                .expect("a folder")
                .flatten()
                .map(|e| e.file_name())
                .collect();
            assert_eq!(left.len(), 3, "{left:?}");
        }
    }
    Ok(())
}

/// Weights imported before the trainer is made and after it, also from 16-bit numbers: the same model, on all ranks.
#[test]
fn weights_are_imported_before_and_after_wrapping() {
    for strategy in STRATEGIES {
        let (guard, _) = folder();
        let path = guard.path().join("weights.safetensors");
        ranks(3, move |rank| {
            let (_, trainer) = model(strategy, &rank, 11)?;
            trainer.export_safetensors(&path)?;
            let expected = trainer.store().sha256()?;

            let store = ParamStore::new(rank.device()).with_initial_values(&path)?;
            let (_, before) = model_in(store, strategy, &rank)?;
            assert_eq!(before.store().sha256()?, expected);

            let (other, mut after) = model(strategy, &rank, 12)?;
            after.backward(&other.loss(&noise(2, (2, 5)))?)?;
            after.step()?;
            after.import_safetensors(&path, &LoadOptions::new())?;
            assert_eq!(after.store().sha256()?, expected);
            assert_eq!(after.num_steps(), 1, "optimizer state stays");
            after.backward(&other.loss(&noise(2, (2, 5)))?)?;
            after.step().map(drop)
        });
    }
}

/// A file of `w`, `[2, 3]`, and what else is wanted.
fn file(path: &Path, dtype: DType, extra: Option<&str>) -> Result<()> {
    let mut tensors = std::collections::HashMap::new();
    tensors.insert("w".to_string(), noise(3, (2, 3)).to_dtype(dtype)?);
    if let Some(name) = extra {
        tensors.insert(name.to_string(), Tensor::zeros(2, dtype, &Device::Cpu)?);
    }
    Ok(candle_core::safetensors::save(&tensors, path)?)
}

#[test]
fn files_that_do_not_fit_are_refused_before_anything_changes() {
    let (guard, _) = folder();
    let root = guard.path().to_path_buf();
    for (name, dtype, extra) in [
        ("half", DType::F16, None),
        ("extra", DType::F32, Some("extra")),
        ("both", DType::F32, Some("v")),
    ] {
        file(&root.join(name), dtype, extra).expect("writable");
    }
    std::fs::write(root.join("text"), "not a file of tensors").expect("writable");
    ranks(2, move |rank| {
        let new = |shape: &[usize], with_v: bool| -> Result<_> {
            let store = ParamStore::new(rank.device());
            let w = crate::support::ones(&store, shape, "w")?;
            if with_v {
                crate::support::ones(&store, 2, "v")?;
            }
            Ok((
                w,
                AnyTrainer::new(Sharding::Zero2, store, &rank, AdamW::default(), caps(4))?,
            ))
        };
        // Only rank 0 reads: the others do not even need the file.
        let at = |name: &str| match rank.rank() {
            0 => root.join(name),
            _ => Path::new("/no/such/place").to_path_buf(),
        };
        let import =
            |shape: &[usize], with_v: bool, name: &str, options: LoadOptions| -> Result<Vec<f32>> {
                let (w, mut trainer) = new(shape, with_v)?;
                match trainer.import_safetensors(&root.join(name), &options) {
                    Ok(()) => Ok(values(&w)),
                    Err(e) => {
                        assert_eq!(values(&w), vec![1.0; w.elem_count()]);
                        Err(e)
                    }
                }
            };
        let strict = LoadOptions::new;
        let refused = |result: Result<Vec<f32>>, kind: CheckpointProblem, part: &str| match result {
            Err(Error::Checkpoint {
                rank: Some(0),
                problem,
                message,
                ..
            }) => {
                assert_eq!(problem, kind);
                assert!(message.contains(part), "no {part:?} in {message:?}");
            }
            other => panic!("expected {part:?}, got {other:?}"),
        };
        use CheckpointProblem::{Corrupt, Missing, Model};
        refused(
            import(&[2, 3], false, "nowhere", strict()),
            Missing,
            "cannot be read",
        );
        refused(
            import(&[2, 3], false, "text", strict()),
            Corrupt,
            "cannot be read",
        );
        refused(
            import(&[3, 2], false, "half", strict()),
            Model,
            "`w` has shape [2, 3]",
        );
        refused(
            import(&[2, 3], true, "half", strict()),
            Model,
            "`v` of the model is not there",
        );
        refused(
            import(&[2, 3], false, "extra", strict()),
            Model,
            "`extra` is not in the model",
        );
        let half = values(
            &noise(3, (2, 3))
                .to_dtype(DType::F16)?
                .to_dtype(DType::F32)?,
        );
        assert_eq!(
            import(
                &[2, 3],
                true,
                "half",
                strict().with_new_params(|n| n == "v")
            )?,
            half
        );
        assert_eq!(
            import(
                &[2, 3],
                false,
                "extra",
                strict().with_dropped_params(|n| n == "extra")
            )?,
            values(&noise(3, (2, 3)))
        );
        let (w, mut trainer) = new(&[2, 3], true)?;
        trainer.import_safetensors(&at("both"), &strict())?;
        assert_eq!(values(&w), values(&noise(3, (2, 3))));
        Ok(())
    });
}

/// An element type that candle does not have, for one of two tensors: nothing is changed, and the ranks go on.
#[test]
fn a_dtype_that_candle_does_not_read() {
    let (guard, _) = folder();
    let path = guard.path().join("odd.safetensors");
    let header = r#"{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"BOOL","shape":[2],"data_offsets":[8,10]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.extend([0; 10]);
    std::fs::write(&path, bytes).expect("writable");
    ranks(2, move |rank| {
        let store = ParamStore::new(rank.device());
        let (a, b) = (
            crate::support::ones(&store, 2, "a")?,
            crate::support::ones(&store, 2, "b")?,
        );
        let mut trainer =
            AnyTrainer::new(Sharding::Zero2, store, &rank, AdamW::default(), caps(4))?;
        let error = trainer
            .import_safetensors(&path, &LoadOptions::new())
            .expect_err("no such dtype")
            .to_string();
        assert!(error.contains("`b` has a dtype"), "{error}");
        assert_eq!((values(&a), values(&b)), (vec![1.0; 2], vec![1.0; 2]));
        trainer.barrier()
    });
}

/// A path without a folder, and names that the format keeps for itself.
#[test]
fn names_that_the_format_keeps_for_itself() {
    let (guard, run) = folder();
    let path = guard.path().join("weights.safetensors");
    ranks(2, move |rank| {
        let store = ParamStore::new(rank.device());
        crate::support::ones(&store, 2, "__metadata__")?;
        let trainer = AnyTrainer::new(Sharding::Zero2, store, &rank, AdamW::default(), caps(4))?;
        trainer.save(&run)?;
        let error = trainer
            .export_safetensors(&path)
            .expect_err("nobody could read it")
            .to_string();
        assert!(error.contains("__metadata__") && !path.exists(), "{error}");
        Ok(())
    });
}
