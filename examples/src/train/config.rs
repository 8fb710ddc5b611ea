//! The configuration of a run: DeepSpeed's keys, and three sections of our own. The doc comments are the descriptions on the
//! reference page, which is made from these types.

use std::path::{Path, PathBuf};

use dp_models::{ModelConfig, Sampling};
use dp_zero::DeepSpeedConfig;
use dp_zero::config::{
    ConfigError, check_is_object, parse_json, paths_of, read_section, reference, reference_of, set,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::dataset::is_token_file;
use super::pretrained::Pretrained;
use crate::options::one_line;

/// Names of our own sections.
const SECTIONS: [&str; 3] = ["model", "data", "run"];

/// A whole configuration.
#[derive(Debug, Clone)]
pub struct TrainConfig {
    /// Batch sizes, ZeRO, dtypes, optimizer and schedule, by DeepSpeed's keys.
    pub deepspeed: DeepSpeedConfig,
    /// The model. Of a fine-tuning it is that of `pretrained`.
    pub model: ModelConfig,
    /// The model that a fine-tuning goes on with.
    pub pretrained: Option<Pretrained>,
    /// What it is trained on.
    pub data: DataSection,
    /// How long, how often, and where to.
    pub run: RunSection,
    /// The JSON it was read from, overrides included.
    pub json: Value,
}

/// What the model is trained on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DataSection {
    /// File to train on: a text, or, with the ending .bin, tokens of 16 bits each, little-endian, as nanoGPT writes them.
    #[schemars(with = "String")]
    pub train: PathBuf,
    /// File to evaluate on, of the same kind. Left out: the end of the training file is held out.
    #[serde(default)]
    #[schemars(with = "Option<String>")]
    pub validation: Option<PathBuf>,
    /// Tokens of a sequence, at most `model.context`. Left out: `model.context`.
    #[serde(default)]
    pub context: Option<usize>,
    /// How much of the training file is held out, if there is no validation file; 0 for no evaluation.
    #[serde(default = "default_validation_fraction")]
    pub validation_fraction: f64,
    /// `bytes`, each byte of a text is a token, or the path of a `tokenizer.json` of Hugging Face's tokenizers. For a .bin file it is what the file was made with, and is used for the prompt and the sample; left out, these are numbers. Left out in `finetune`: the `tokenizer.json` of the model's folder.
    #[serde(default)]
    pub tokenizer: Option<String>,
}

fn default_validation_fraction() -> f64 {
    0.1
}

/// How long a run is, how often it does what, and where it writes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RunSection {
    /// Optimizer steps of the whole run, those before a resume included.
    pub steps: u64,
    /// Seed of the initial values, of the order of the data and of the sample.
    pub seed: u64,
    /// Folder of the run: checkpoints, metrics.jsonl, report.html, model.safetensors, sample.txt. Left out in `finetune`: `target/finetune`.
    #[schemars(with = "String")]
    pub out: PathBuf,
    /// Steps between two evaluations; 0 for one at the end only.
    pub eval_every: u64,
    /// Sequences of an evaluation, evenly spread over the held-out text; 0 for all.
    pub eval_sequences: usize,
    /// Steps between two checkpoints; 0 for one at the end only.
    pub save_every: u64,
    /// Checkpoints that are kept.
    pub keep_last: usize,
    /// Text that is sampled at the end.
    pub sample: SampleSection,
}

impl Default for RunSection {
    fn default() -> Self {
        Self {
            steps: 1000,
            seed: 0,
            out: PathBuf::from("target/train-gpt"),
            eval_every: 100,
            eval_sequences: 64,
            save_every: 100,
            keep_last: 2,
            sample: SampleSection::default(),
        }
    }
}

/// The sample at the end of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct SampleSection {
    /// What it begins with. For a .bin file without a tokenizer: numbers of tokens, separated by spaces.
    pub prompt: String,
    /// Tokens that the model adds; 0 for no sample.
    pub tokens: usize,
    /// Logits are divided by it; 0 always takes the most likely token.
    pub temperature: f64,
    /// Choose among so many of the most likely tokens only.
    pub top_k: Option<usize>,
    /// Choose among the most likely tokens only whose probabilities add up to this.
    pub top_p: Option<f64>,
}

impl Default for SampleSection {
    fn default() -> Self {
        Self {
            prompt: "\n".to_string(),
            tokens: 200,
            temperature: 0.8,
            top_k: Some(40),
            top_p: None,
        }
    }
}

impl SampleSection {
    /// How the sample is drawn.
    pub fn sampling(&self, seed: u64) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            seed,
        }
    }
}

impl TrainConfig {
    /// Reads a file; `overrides` are `key=value`, as `--set` takes them. With a pretrained model there is no section `model`,
    /// `data.tokenizer` is by default the model's, and `run.out` `target/finetune`.
    ///
    /// # Errors
    /// What is wrong, and where, in one line.
    pub fn from_file(
        path: &Path,
        overrides: &[String],
        pretrained: Option<Pretrained>,
    ) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(|e| anyhow::anyhow!("--config: cannot read {}: {e}", path.display()))?;
        let in_file = |e: ConfigError| anyhow::anyhow!("{}: {e}", path.display());
        let mut json = parse_json(&text).map_err(in_file)?;
        check_is_object(&json).map_err(in_file)?;
        for text in overrides {
            let Some((key, value)) = text.split_once('=') else {
                anyhow::bail!("--set {text}: expected key=value");
            };
            set(&mut json, key, value).map_err(|e| anyhow::anyhow!("--set {text}: {e}"))?;
        }
        Self::from_value(json, pretrained).map_err(in_file)
    }

    /// From parsed JSON; see [`from_file`](Self::from_file).
    ///
    /// # Errors
    /// [`ConfigError`].
    pub fn from_value(json: Value, pretrained: Option<Pretrained>) -> Result<Self, ConfigError> {
        let mut rest = json.clone();
        let mut take = |name: &str| {
            let section = rest.as_object_mut().and_then(|o| o.remove(name));
            match section {
                Some(section) if section.is_object() => Ok(section),
                Some(_) => Err(ConfigError::invalid(name, "must be a section, { ... }")),
                None if name == "run" => Ok(Value::Object(serde_json::Map::new())),
                None => Err(ConfigError::invalid(name, "this section is missing")),
            }
        };
        let sections = SECTIONS.map(&mut take);
        // A mistyped section is found before a missing one.
        let own_keys = [
            paths_of::<ModelConfig>("model"),
            paths_of::<DataSection>("data"),
            paths_of::<RunSection>("run"),
        ];
        let deepspeed = DeepSpeedConfig::from_value(rest, &own_keys.concat())?;
        let [model, data, run] = sections;
        let model = match &pretrained {
            None => read_section("model", model?)?,
            Some(_) if json.get("model").is_some() => {
                let message = "the shape is that of the folder --model; leave this section out";
                return Err(ConfigError::invalid("model", message));
            }
            Some(pretrained) => pretrained.config().clone().into(),
        };
        let mut config = Self {
            deepspeed,
            model,
            pretrained,
            data: read_section("data", data?)?,
            run: read_section("run", run?)?,
            json,
        };
        config.set_defaults_of_pretrained()?;
        config.validate()?;
        Ok(config)
    }

    fn set_defaults_of_pretrained(&mut self) -> Result<(), ConfigError> {
        let Some(pretrained) = &self.pretrained else {
            return Ok(());
        };
        if self.json.pointer("/run/out").is_none() {
            self.run.out = PathBuf::from("target/finetune");
        }
        if self.data.tokenizer.is_none() {
            let own = pretrained.tokenizer();
            self.data.tokenizer = own.map(|path| path.display().to_string());
        }
        let is_tokens = is_token_file(&self.data.train);
        if self.data.tokenizer.is_none() && !is_tokens {
            let message = format!(
                "is not there, and {} has no tokenizer.json; name one, or \"bytes\" if each byte is a token of the model",
                pretrained.folder().display()
            );
            return Err(ConfigError::invalid("data.tokenizer", message));
        }
        Ok(())
    }

    fn validate(&self) -> Result<(), ConfigError> {
        let fraction = self.data.validation_fraction;
        if !(0.0..1.0).contains(&fraction) {
            let message = format!("{fraction} is not from 0 to below 1");
            return Err(ConfigError::invalid("data.validation_fraction", message));
        }
        let run = &self.run;
        for (key, value) in [("steps", run.steps), ("keep_last", run.keep_last as u64)] {
            if value == 0 {
                return Err(ConfigError::invalid(
                    format!("run.{key}"),
                    "must be at least 1",
                ));
            }
        }
        let sampling = run.sample.sampling(run.seed);
        if let Err(error) = sampling.validate() {
            return Err(ConfigError::invalid("run.sample", one_line(&error)));
        }
        self.deepspeed.schedule(Some(run.steps)).map(drop)
    }
}

/// The reference page of the book: all keys of a configuration.
pub fn reference_page() -> String {
    let mut page = String::from(
        "# Configuration reference\n\n\
         <!-- Made from the Rust types; `UPDATE_REFERENCE=1 cargo test --workspace reference_page` writes it anew. -->\n\n\
         The keys of `train-gpt --config FILE`, of `finetune` (without `model`) and of `plan`. Those of DeepSpeed have DeepSpeed's names and meaning, and `dp_zero::DeepSpeedConfig`\n\
         reads them in any program; `model`, `data` and `run` are train-gpt's own. `--set key=value` overrides one,\n\
         `--set zero_optimization.stage=2`. A key that is in no table here is an error that names the nearest one.\n",
    );
    page += &reference_of::<ModelConfig>("model");
    page += &reference_of::<DataSection>("data");
    page += &reference_of::<RunSection>("run");
    page += "\n# DeepSpeed's keys\n";
    page += &reference();
    page
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// A small configuration with one value set.
    fn read(path: &str, value: Value) -> Result<TrainConfig, String> {
        let mut config = json!({
            "train_batch_size": 4,
            "model": {"architecture": "gpt2", "context": 8, "width": 8, "heads": 2, "layers": 1},
            "data": {"train": "text.txt"}
        });
        set(&mut config, path, &value.to_string()).map_err(|e| e.to_string())?;
        TrainConfig::from_value(config, None).map_err(|e| e.to_string())
    }

    #[test]
    fn values_of_another_kind_are_named_with_their_whole_path() {
        let gpt2 =
            "`architecture`, `context`, `heads`, `layers`, `tied_head`, `vocab_size`, `width`";
        for (path, value, message) in [
            (
                "model.context",
                json!("32"),
                "`model.context`: must be a whole number from 0 on, got \"32\"".to_string(),
            ),
            (
                "model.tied_head",
                json!(1),
                "`model.tied_head`: must be true or false, got 1".to_string(),
            ),
            (
                "model.architecture",
                json!("gpt3"),
                "`model.architecture`: must be one of \"gpt2\", \"llama\", got \"gpt3\""
                    .to_string(),
            ),
            (
                "model.kv_heads",
                json!(2),
                format!("`model.kv_heads` is a key of llama, not of gpt2, which has {gpt2}"),
            ),
            (
                "model",
                json!({"architecture": "gpt2"}),
                "`model.context`: is missing; it is a whole number from 0 on".to_string(),
            ),
            (
                "run.sample",
                json!([]),
                "`run.sample`: must be a section, { ... }, got []".to_string(),
            ),
            (
                "run.steps",
                json!(1.5),
                "`run.steps`: must be a whole number from 0 on, got 1.5".to_string(),
            ),
            (
                "data.train",
                json!(null),
                "`data.train`: must be a text, got null".to_string(),
            ),
            (
                "seed",
                json!(1),
                "`seed` is no known key; did you mean `run.seed`?".to_string(),
            ),
        ] {
            let error = read(path, value).map(drop);
            assert_eq!(error, Err(message));
        }
    }

    #[test]
    fn integral_floats_are_whole_numbers() -> Result<(), String> {
        assert_eq!(read("model.layers", json!(1e1))?.model.layers(), 10);
        let steps = read("run", json!({"steps": 1e3, "sample": {"top_k": 4.0}}))?.run;
        assert_eq!((steps.steps, steps.sample.top_k), (1000, Some(4)));
        // Of our own sections null is a value: no limit, not the default one.
        let all = read("run.sample.top_k", json!(null))?;
        assert_eq!(all.run.sample.top_k, None);
        Ok(())
    }

    #[test]
    fn a_file_that_is_no_object_says_so_with_overrides_too() -> anyhow::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("config.json");
        std::fs::write(&path, "[1]")?;
        let overrides = ["run.steps=1".to_string()];
        let error = TrainConfig::from_file(&path, &overrides, None).map(drop);
        let error = error.map_err(|e| e.to_string()).unwrap_err();
        assert!(
            error.ends_with("config.json: `the configuration`: must be a JSON object, { ... }"),
            "{error}"
        );
        Ok(())
    }
}
