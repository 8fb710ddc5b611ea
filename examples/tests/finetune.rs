//! `finetune` as a user runs it: it begins with the very model of the folder, and leaves one that can be loaded again.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use dp_models::Gpt;
use dp_models::gpt::hugging_face;
use serde_json::{Value, json};
use tempfile::TempDir;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A small GPT-2 that transformers has made: vocabulary 31, 12 positions.
const MODEL: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../dp-models/tests/fixtures/gpt2_hugging_face"
);
const CONTEXT: usize = 12;

struct Run {
    folder: TempDir,
    config: Value,
}

impl Run {
    /// A copy of the model with a tokenizer of one token a character, and 8 sequences of text.
    fn new() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let model = folder.path().join("model");
        std::fs::create_dir(&model)?;
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(Path::new(MODEL).join(file), model.join(file))?;
        }
        std::fs::write(model.join("tokenizer.json"), tokenizer(31).to_string())?;
        let text: String = "the quick brown fox, a lazy dog."
            .chars()
            .cycle()
            .take(8 * CONTEXT + 1)
            .collect();
        std::fs::write(folder.path().join("text.txt"), text)?;
        let config = json!({
            "train_batch_size": 8,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 2000},
            "data": {"train": folder.path().join("text.txt"), "validation_fraction": 0.0},
            "run": {"steps": 10, "out": folder.path().join("run"), "save_every": 4, "sample": {"prompt": "the ", "tokens": 4}}
        });
        Ok(Self { folder, config })
    }

    fn model(&self) -> PathBuf {
        self.folder.path().join("model")
    }

    fn out(&self, file: &str) -> PathBuf {
        self.folder.path().join("run").join(file)
    }

    fn start(&self, model: &Path, arguments: &[&str]) -> Result<Output> {
        let config = self.folder.path().join("config.json");
        std::fs::write(&config, self.config.to_string())?;
        let mut command = Command::new(env!("CARGO_BIN_EXE_finetune"));
        command
            .arg("--model")
            .arg(model)
            .arg("--config")
            .arg(config);
        for variable in ["WORLD_SIZE", "RANK"] {
            command.env_remove(variable);
        }
        Ok(command.args(arguments).output()?)
    }

    fn train(&self, arguments: &[&str]) -> Result<String> {
        let output = self.start(&self.model(), arguments)?;
        let text = [&output.stdout[..], &output.stderr[..]].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        assert!(output.status.success(), "{text}");
        Ok(text)
    }

    /// Ends with code 2 and one line that has all of `words`.
    fn refused(&self, model: &Path, arguments: &[&str], words: &[&str]) -> Result<()> {
        let output = self.start(model, arguments)?;
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        for word in words {
            assert!(text.contains(word), "{word} not in: {text}");
        }
        Ok(())
    }

    fn losses(&self) -> Result<Vec<f64>> {
        let text = std::fs::read_to_string(self.out("metrics.jsonl"))?;
        let mut losses = Vec::new();
        for line in text.lines() {
            let record: Value = serde_json::from_str(line)?;
            if record["kind"] == "train" {
                losses.push(record["loss"].as_f64().ok_or("a loss")?);
            }
        }
        Ok(losses)
    }
}

/// A `tokenizer.json` of so many tokens: characters, and nothing is merged.
fn tokenizer(size: usize) -> Value {
    let characters = ('a'..='z')
        .chain([' ', '.', ',', '\n', '!'])
        .chain('A'..='Z');
    let vocab: serde_json::Map<String, Value> = characters
        .take(size)
        .enumerate()
        .map(|(i, c)| (c.to_string(), json!(i)))
        .collect();
    assert_eq!(vocab.len(), size);
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, "pre_tokenizer": null,
        "post_processor": null, "decoder": {"type": "Fuse"},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "vocab": vocab, "merges": []
        }
    })
}

/// The model of a folder, without any trainer.
fn load(folder: &Path) -> Result<Gpt> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("weights.safetensors");
    let config = hugging_face::import(folder, &file)?;
    let weights = config.load_weights(&file, &Device::Cpu)?;
    let vb = VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu);
    Ok(Gpt::new(&config, vb)?)
}

/// Mean loss of all sequences of the run's text.
fn loss_of(model: &Gpt, run: &Run) -> Result<f64> {
    let text = std::fs::read_to_string(run.folder.path().join("text.txt"))?;
    let tokenizer = run.model().join("tokenizer.json");
    let tokenizer = tokenizers::Tokenizer::from_file(tokenizer).map_err(|e| e.to_string())?;
    let encoding = tokenizer.encode(text, false).map_err(|e| e.to_string())?;
    let ids = encoding.get_ids();
    let batch = |shift: usize| {
        let ids = ids[shift..shift + 8 * CONTEXT].to_vec();
        Tensor::from_vec(ids, (8, CONTEXT), &Device::Cpu)
    };
    let loss = model.loss(&batch(0)?, &batch(1)?)?;
    Ok(f64::from(loss.to_scalar::<f32>()?))
}

/// All sequences are the first batch, so its order does not matter; and the trained model is what the folder says.
#[test]
fn training_begins_with_the_model_and_ends_in_the_same_layout() -> Result<()> {
    for (ranks, stage) in [("1", 0), ("2", 2), ("4", 1)] {
        let mut run = Run::new()?;
        run.config["zero_optimization"]["stage"] = json!(stage);
        let text = run.train(&["--ranks", ranks])?;
        let losses = run.losses()?;
        let before = loss_of(&load(&run.model())?, &run)?;
        assert!(
            (losses[0] - before).abs() < 1e-5,
            "{} is not {before}",
            losses[0]
        );
        assert!(losses[9] < losses[0] - 0.3, "{losses:?}");

        let exported = run.out("hugging_face");
        assert!(text.contains(&format!("wrote {}", exported.display())));
        let again = run.folder.path().join("again.safetensors");
        let config = hugging_face::import(&exported, &again)?;
        assert_eq!(config, hugging_face::read_config(MODEL)?);
        let [trained, again] = [run.out("model.safetensors"), again]
            .map(|path| candle_core::safetensors::load(path, &Device::Cpu));
        let (trained, again) = (trained?, again?);
        assert_eq!(trained.len(), again.len());
        for (name, tensor) in &trained {
            let values = |t: &Tensor| -> Result<Vec<u32>> {
                let values = t.flatten_all()?.to_vec1::<f32>()?;
                Ok(values.into_iter().map(f32::to_bits).collect())
            };
            assert_eq!(values(tensor)?, values(&again[name])?, "{name}");
        }
        let copied = std::fs::read(exported.join("tokenizer.json"))?;
        assert_eq!(copied, std::fs::read(run.model().join("tokenizer.json"))?);
        assert!(!run.out("initial.safetensors").exists());
    }
    Ok(())
}

/// Logits of transformers give the loss of the first step, on fewer tokens than the model has positions.
#[test]
fn the_first_loss_is_that_of_transformers() -> Result<()> {
    let fixture: Value =
        serde_json::from_slice(&std::fs::read(Path::new(MODEL).join("logits.json"))?)?;
    for i in 0..2 {
        let ids: Vec<usize> = serde_json::from_value(fixture["inputs"][i].clone())?;
        let logits: Vec<Vec<f64>> = serde_json::from_value(fixture["logits"][i].clone())?;
        let mut expected = 0.0;
        for (row, target) in logits.iter().zip(&ids[1..]) {
            let sum: f64 = row.iter().map(|logit| logit.exp()).sum();
            expected += (sum.ln() - row[*target]) / (ids.len() - 1) as f64;
        }
        let mut run = Run::new()?;
        let file = run.folder.path().join("tokens.bin");
        let bytes: Vec<u8> = ids
            .iter()
            .flat_map(|id| (*id as u16).to_le_bytes())
            .collect();
        std::fs::write(&file, bytes)?;
        run.config["data"] =
            json!({"train": file, "context": ids.len() - 1, "validation_fraction": 0.0});
        run.config["train_batch_size"] = json!(1);
        run.config["gradient_accumulation_steps"] = json!(1);
        run.train(&["--ranks", "1", "--set", "run.steps=1"])?;
        let loss = run.losses()?[0];
        assert!((loss - expected).abs() < 1e-5, "{loss} is not {expected}");
    }
    Ok(())
}

#[test]
fn a_resumed_run_takes_the_checkpoint_and_exports_again() -> Result<()> {
    let straight = Run::new()?;
    let expected = straight.train(&[])?;
    let digest = |text: &str| {
        text.split("steps done, parameters ")
            .nth(1)
            .map(str::to_string)
    };
    let run = Run::new()?;
    run.train(&["--set", "run.steps=5"])?;
    let first = std::fs::read(run.out("hugging_face/model.safetensors"))?;
    let text = run.train(&["--resume", "latest"])?;
    assert!(text.contains("from step 5 of 2 ranks"), "{text}");
    assert!(digest(&text).is_some() && digest(&text) == digest(&expected));
    assert_eq!(run.losses()?, straight.losses()?);
    let second = std::fs::read(run.out("hugging_face/model.safetensors"))?;
    let of_straight = std::fs::read(straight.out("hugging_face/model.safetensors"))?;
    assert!(second != first && second == of_straight);
    // Where there is no checkpoint yet it begins with the model, not with random values.
    let fresh = Run::new()?;
    let text = fresh.train(&["--resume", "latest"])?;
    assert_eq!(digest(&text), digest(&expected));
    Ok(())
}

#[test]
fn what_cannot_be_is_one_line_and_code_2() -> Result<()> {
    let run = Run::new()?;
    let model = run.model();
    let set = |text: &str, words: &[&str]| run.refused(&model, &["--set", text], words);
    set(
        "model.width=18",
        &["`model`", "--model", "leave this section out"],
    )?;
    set("data.context=13", &["data.context", "13", "12 positions"])?;
    set("data.context=0", &["data.context", "at least 1"])?;
    set(
        "data.tokenizer=bytes",
        &["data.tokenizer", "256 tokens", "vocabulary of 31"],
    )?;
    let large = run.folder.path().join("large.json");
    std::fs::write(&large, tokenizer(32).to_string())?;
    set(
        &format!("data.tokenizer={}", large.display()),
        &["data.tokenizer", "32 tokens", "vocabulary of 31"],
    )?;
    set("train_batch_size=9", &["train_batch_size", "2 ranks"])?;
    let nowhere = run.folder.path().join("no-such-model");
    run.refused(&nowhere, &[], &["--model", "no-such-model"])?;
    run.refused(
        &run.folder.path().join("text.txt"),
        &[],
        &["--model", "text.txt"],
    )?;

    // What is wrong in the folder itself.
    let changed = |change: &dyn Fn(&mut Value)| -> Result<()> {
        let path = model.join("config.json");
        let mut json =
            serde_json::from_slice(&std::fs::read(Path::new(MODEL).join("config.json"))?)?;
        change(&mut json);
        Ok(std::fs::write(path, json.to_string())?)
    };
    changed(&|json| json["model_type"] = json!("llama"))?;
    run.refused(&model, &[], &["--model", "model_type", "llama", "gpt2"])?;
    changed(&|json| json["n_layer"] = json!(3))?;
    run.refused(&model, &[], &["--model", "missing", "transformer.h.2."])?;
    changed(&|_| ())?;
    std::fs::remove_file(model.join("tokenizer.json"))?;
    run.refused(
        &model,
        &[],
        &["data.tokenizer", "no tokenizer.json", "bytes"],
    )?;
    std::fs::remove_file(model.join("model.safetensors"))?;
    let tokenizer = format!("data.tokenizer={}", large.display());
    run.refused(&model, &["--set", &tokenizer], &["data.tokenizer"])?;
    std::fs::write(model.join("tokenizer.json"), tokenizer_text())?;
    run.refused(&model, &[], &["--model", "neither model.safetensors nor"])?;
    assert!(!run.out("checkpoints").exists(), "nothing was trained");
    Ok(())
}

fn tokenizer_text() -> String {
    tokenizer(31).to_string()
}

/// The configuration of the book is one for this program.
#[test]
fn the_configuration_in_the_repository_is_good() -> Result<()> {
    use dp_examples::train::{config::TrainConfig, pretrained::Pretrained};
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/finetune.json");
    let run = Run::new()?;
    let pretrained = Pretrained::open(&run.model())?;
    let config = TrainConfig::from_file(&path, &[], Some(pretrained))?;
    for ranks in [1, 2, 4] {
        config.deepspeed.batch_sizes(ranks)?;
    }
    let own = run.model().join("tokenizer.json");
    assert_eq!(config.data.tokenizer.as_deref(), own.to_str());
    Ok(())
}
