//! A run of the program with a configuration that a test changes.

use std::error::Error;
use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::{Value, json};
use tempfile::TempDir;

pub type Result<T> = std::result::Result<T, Box<dyn Error>>;

pub const TRAIN_GPT: &str = env!("CARGO_BIN_EXE_train-gpt");
pub const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../LICENSE-APACHE");
pub const TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tokenizer.json");

/// A run's folder, and its configuration, which a test changes.
pub struct Run {
    pub folder: TempDir,
    pub config: Value,
}

impl Run {
    /// A GPT that learns something within a second.
    pub fn new() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let config = json!({
            "train_batch_size": 12,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
            "zero_optimization": {"stage": 2, "reduce_bucket_size": 2000},
            "steps_per_print": 5,
            "model": {"architecture": "gpt2", "context": 16, "width": 24, "heads": 2, "layers": 1},
            "data": {"train": TEXT},
            "run": {"steps": 12, "out": folder.path().join("run"), "save_every": 4, "eval_every": 6, "sample": {"prompt": "The ", "tokens": 8}}
        });
        Ok(Self { folder, config })
    }

    pub fn set(mut self, pointer: &str, value: Value) -> Self {
        let (section, key) = pointer.rsplit_once('/').expect("a pointer");
        let section = self.config.pointer_mut(section).expect("a section");
        section[key] = value;
        self
    }

    pub fn out(&self, file: &str) -> PathBuf {
        self.folder.path().join("run").join(file)
    }

    pub fn command(&self, arguments: &[&str]) -> Result<Command> {
        let config = self.folder.path().join("config.json");
        std::fs::write(&config, self.config.to_string())?;
        let mut command = Command::new(TRAIN_GPT);
        command.arg("--config").arg(config).args(arguments);
        for variable in ["WORLD_SIZE", "RANK"] {
            command.env_remove(variable);
        }
        Ok(command)
    }

    pub fn train(&self, arguments: &[&str]) -> Result<String> {
        let output = self.command(arguments)?.output()?;
        let text = text_of(&output);
        assert!(output.status.success(), "{text}");
        Ok(text)
    }

    /// Ends with code 2 and one line that has all of `words`.
    pub fn refused(&self, arguments: &[&str], words: &[&str]) -> Result<()> {
        let output = self.command(arguments)?.output()?;
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        assert!(
            words.iter().all(|w| text.contains(w)),
            "{words:?} not in: {text}"
        );
        Ok(())
    }

    pub fn metrics(&self) -> Result<Vec<Value>> {
        let text = std::fs::read_to_string(self.out("metrics.jsonl"))?;
        Ok(text
            .lines()
            .map(serde_json::from_str)
            .collect::<std::result::Result<_, _>>()?)
    }

    /// Losses of the steps, in order.
    pub fn losses(&self) -> Result<Vec<f64>> {
        let records = self.metrics()?.into_iter().filter(|r| r["kind"] == "train");
        Ok(records
            .map(|r| r["loss"].as_f64().expect("a loss"))
            .collect())
    }
}

pub fn text_of(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&text).into_owned()
}

/// The parameters' digest, which the last line names.
pub fn digest(text: &str) -> Result<String> {
    let digest = text
        .split("steps done, parameters ")
        .nth(1)
        .ok_or("no digest")?;
    Ok(digest.trim().to_string())
}
