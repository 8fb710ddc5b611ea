//! `train-gpt` as a user runs it: a trained model, a run that goes on, a picture, a sample, and what is refused.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const TRAIN_GPT: &str = env!("CARGO_BIN_EXE_train-gpt");
const TEXT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../LICENSE-APACHE");
const TOKENIZER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/tokenizer.json");

/// A run's folder, and its configuration, which a test changes.
struct Run {
    folder: TempDir,
    config: Value,
}

impl Run {
    /// A GPT that learns something within a second.
    fn new() -> Result<Self> {
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

    fn set(mut self, pointer: &str, value: Value) -> Self {
        let (section, key) = pointer.rsplit_once('/').expect("a pointer");
        let section = self.config.pointer_mut(section).expect("a section");
        section[key] = value;
        self
    }

    fn out(&self, file: &str) -> PathBuf {
        self.folder.path().join("run").join(file)
    }

    fn command(&self, arguments: &[&str]) -> Result<Command> {
        let config = self.folder.path().join("config.json");
        std::fs::write(&config, self.config.to_string())?;
        let mut command = Command::new(TRAIN_GPT);
        command.arg("--config").arg(config).args(arguments);
        for variable in ["WORLD_SIZE", "RANK"] {
            command.env_remove(variable);
        }
        Ok(command)
    }

    fn train(&self, arguments: &[&str]) -> Result<String> {
        let output = self.command(arguments)?.output()?;
        let text = text_of(&output);
        assert!(output.status.success(), "{text}");
        Ok(text)
    }

    /// Ends with code 2 and one line that has all of `words`.
    fn refused(&self, arguments: &[&str], words: &[&str]) -> Result<()> {
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

    fn metrics(&self) -> Result<Vec<Value>> {
        let text = std::fs::read_to_string(self.out("metrics.jsonl"))?;
        Ok(text
            .lines()
            .map(serde_json::from_str)
            .collect::<std::result::Result<_, _>>()?)
    }

    /// Losses of the steps, in order.
    fn losses(&self) -> Result<Vec<f64>> {
        let records = self.metrics()?.into_iter().filter(|r| r["kind"] == "train");
        Ok(records
            .map(|r| r["loss"].as_f64().expect("a loss"))
            .collect())
    }
}

fn text_of(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr[..]].concat();
    String::from_utf8_lossy(&text).into_owned()
}

/// The parameters' digest, which the last line names.
fn digest(text: &str) -> Result<String> {
    let digest = text
        .split("steps done, parameters ")
        .nth(1)
        .ok_or("no digest")?;
    Ok(digest.trim().to_string())
}

#[test]
fn a_run_leaves_a_model_metrics_a_picture_and_a_sample() -> Result<()> {
    let run = Run::new()?
        .set("/run/steps", json!(60))
        .set("/tensorboard", json!({"enabled": true}))
        .set("/wall_clock_breakdown", json!(true))
        .set("/gradient_accumulation_steps", json!(2));
    let text = run.train(&[])?;
    for words in [
        "gpt2 with 13,800 parameters in f32, zero2 on 2 ranks",
        "batch of 12 = 3 per micro-batch x 2 micro-batches x 2 ranks; sums of gradients are divided by 4",
        "192 tokens per step",
        "step 60/60",
        "tokens/s",
        "validation loss",
        "exposed communication",
    ] {
        assert!(text.contains(words), "{words} is not in\n{text}");
    }
    let losses = run.losses()?;
    assert_eq!(losses.len(), 60);
    assert!(losses[0] > 5.4 && losses[59] < 3.5, "{losses:?}");
    let evaluations: Vec<Value> = run
        .metrics()?
        .into_iter()
        .filter(|r| r["kind"] == "evaluation")
        .collect();
    assert_eq!(evaluations.len(), 10);
    assert!(
        evaluations[9]["loss"].as_f64().is_some_and(|l| l < 3.7),
        "{evaluations:?}"
    );
    let sample = std::fs::read_to_string(run.out("sample.txt"))?;
    assert!(sample.starts_with("The ") && text.contains(&sample));
    let report = std::fs::read_to_string(run.out("report.html"))?;
    assert!(
        report.matches("<polyline").count() >= 4 && !report.contains("http"),
        "{report}"
    );
    let weights = std::fs::read(run.out("model.safetensors"))?;
    assert!(weights.len() > 4 * 13_800);
    let config: Value = serde_json::from_slice(&std::fs::read(run.out("config.json"))?)?;
    assert_eq!(config["run"]["steps"], 60);
    let events = std::fs::read_dir(run.out("tensorboard"))?.count();
    assert_eq!(events, 1);
    Ok(())
}

/// The same global batch on any number of ranks, with any stage and accumulation: the same training.
#[test]
fn ranks_stages_and_accumulation_do_not_change_the_training() -> Result<()> {
    let one = Run::new()?.set("/zero_optimization/stage", json!(0));
    one.train(&["--ranks", "1"])?;
    let expected = one.losses()?;
    for (ranks, stage, accumulation) in [(2, 0, 3), (3, 1, 1), (4, 2, 3)] {
        let run = Run::new()?
            .set("/zero_optimization/stage", json!(stage))
            .set("/gradient_accumulation_steps", json!(accumulation));
        run.train(&["--ranks", &ranks.to_string()])?;
        for (a, b) in run.losses()?.iter().zip(&expected) {
            assert!((a - b).abs() < 2e-5, "{ranks} ranks: {a} instead of {b}");
        }
        let last = |run: &Run| -> Result<f64> {
            let records = run.metrics()?;
            let evaluation = records.iter().rev().find(|r| r["kind"] == "evaluation");
            Ok(evaluation
                .and_then(|r| r["loss"].as_f64())
                .ok_or("no evaluation")?)
        };
        assert!((last(&run)? - last(&one)?).abs() < 2e-5);
    }
    Ok(())
}

#[test]
fn a_resumed_run_is_the_straight_run() -> Result<()> {
    let straight = Run::new()?;
    let expected = digest(&straight.train(&[])?)?;
    let run = Run::new()?;
    run.train(&["--set", "run.steps=7"])?;
    let text = run.train(&["--resume", "latest"])?;
    assert!(text.contains("from step 7 of 2 ranks"), "{text}");
    assert_eq!(digest(&text)?, expected);
    assert_eq!(run.losses()?, straight.losses()?);
    let steps: Vec<u64> = run
        .metrics()?
        .iter()
        .filter(|r| r["kind"] == "train")
        .filter_map(|r| r["step"].as_u64())
        .collect();
    assert_eq!(
        steps,
        (1..=12).collect::<Vec<_>>(),
        "no step is there twice"
    );
    // A run that has come to its end stays as it is.
    let (metrics, checkpoints) = (
        run.metrics()?.len(),
        std::fs::read_dir(run.out("checkpoints"))?.count(),
    );
    assert_eq!(digest(&run.train(&["--resume", "latest"])?)?, expected);
    assert_eq!(run.metrics()?.len(), metrics);
    assert_eq!(
        std::fs::read_dir(run.out("checkpoints"))?.count(),
        checkpoints
    );
    // On other ranks and with another stage it goes on, too.
    let other = Run::new()?;
    other.train(&["--set", "run.steps=7"])?;
    other.train(&[
        "--resume",
        "latest",
        "--ranks",
        "3",
        "--set",
        "zero_optimization.stage=1",
    ])?;
    for (a, b) in other.losses()?.iter().zip(straight.losses()?) {
        assert!((a - b).abs() < 2e-5, "{a} instead of {b}");
    }
    // From a checkpoint by its path, into another folder.
    let third = Run::new()?;
    let checkpoint = run.out("checkpoints/step-00000008");
    let text = third.train(&["--resume", checkpoint.to_str().ok_or("UTF-8")?])?;
    assert_eq!(digest(&text)?, expected);
    Ok(())
}

#[test]
fn another_schedule_needs_a_word_from_the_user() -> Result<()> {
    let run = Run::new()?.set(
        "/scheduler",
        json!({"type": "WarmupCosineLR", "params": {"warmup_num_steps": 3}}),
    );
    run.train(&["--set", "run.steps=8"])?;
    let output = run.command(&["--resume", "latest"])?.output()?;
    let text = text_of(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("--hyper-parameters"), "{text}");
    run.train(&["--resume", "latest", "--hyper-parameters", "current"])?;
    assert_eq!(run.losses()?.len(), 12);
    Ok(())
}

/// Ctrl-C finishes the step, saves, and says how to go on; the run that goes on is the straight one.
#[cfg(unix)]
#[test]
fn an_interrupted_run_goes_on_where_it_was() -> Result<()> {
    let straight = Run::new()?.set("/run/steps", json!(400));
    let expected = digest(&straight.train(&[])?)?;
    for signal in ["-INT", "-TERM"] {
        let run = Run::new()?
            .set("/run/steps", json!(400))
            .set("/run/save_every", json!(0));
        let child = run
            .command(&[])?
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let started = Instant::now();
        while run.metrics().map_or(0, |m| m.len()) < 5 {
            assert!(
                started.elapsed() < Duration::from_secs(60),
                "no step in a minute"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        let pid = child.id().to_string();
        assert!(
            Command::new("kill")
                .args([signal, &pid])
                .status()?
                .success()
        );
        let output = child.wait_with_output()?;
        let text = text_of(&output);
        assert_eq!(output.status.code(), Some(130), "{text}");
        assert!(text.contains("--resume latest"), "{text}");
        assert!(run.losses()?.len() < 400);
        let text = run.train(&["--resume", "latest"])?;
        assert_eq!(digest(&text)?, expected);
    }
    Ok(())
}

#[test]
fn llama_in_bf16_learns() -> Result<()> {
    let llama = json!({"architecture": "llama", "context": 16, "width": 24, "heads": 2, "kv_heads": 1, "hidden": 64, "layers": 1});
    let run = Run::new()?
        .set("/model", llama)
        .set("/bf16", json!({"enabled": true}))
        .set("/zero_optimization/stage", json!(1))
        .set("/run/steps", json!(60));
    let text = run.train(&["--ranks", "3"])?;
    assert!(text.contains("llama") && text.contains("bf16"), "{text}");
    assert!(run.losses()?[59] < 3.6);
    Ok(())
}

#[test]
fn f16_skips_what_overflows_and_goes_on() -> Result<()> {
    let fp16 = json!({"enabled": true, "initial_scale_power": 30, "hysteresis": 1});
    let run = Run::new()?.set("/fp16", fp16);
    let text = run.train(&[])?;
    assert!(text.contains("skipped"), "{text}");
    let records = run.metrics()?;
    let is_step = |r: &&Value| r["kind"] == "train" && r["skipped"].is_null();
    assert_eq!(records.iter().filter(is_step).count(), 12);
    let scale = records
        .iter()
        .rev()
        .find(is_step)
        .and_then(|r| r["loss_scale"].as_f64());
    assert!(scale.is_some_and(|s| s < 2f64.powi(30)), "{scale:?}");
    Ok(())
}

#[test]
fn byte_pair_tokens_and_token_files() -> Result<()> {
    let run = Run::new()?.set("/data/tokenizer", json!(TOKENIZER));
    let text = run.train(&[])?;
    assert!(text.contains("vocabulary of 400"), "{text}");
    let sample = std::fs::read_to_string(run.out("sample.txt"))?;
    assert!(sample.starts_with("The "), "{sample}");

    // The same tokens in a file, as nanoGPT writes them: the same training.
    let tokenizer = dp_examples::train::tokenizer::Tokenizer::open(TOKENIZER)?;
    let ids = tokenizer.encode(&std::fs::read_to_string(TEXT)?)?;
    let bytes: Vec<u8> = ids
        .iter()
        .flat_map(|id| (*id as u16).to_le_bytes())
        .collect();
    let file = run.folder.path().join("train.bin");
    std::fs::write(&file, bytes)?;
    let from_file = Run::new()?
        .set("/data/train", json!(file))
        .set("/model/vocab_size", json!(400))
        .set("/run/sample/prompt", json!("5 6"));
    from_file.train(&[])?;
    assert_eq!(from_file.losses()?, run.losses()?);
    let sample = std::fs::read_to_string(from_file.out("sample.txt"))?;
    assert!(
        sample.starts_with("5 6 ") && sample.split(' ').count() == 10,
        "{sample}"
    );

    let short = from_file.set("/model/vocab_size", json!(300));
    let short = Run {
        config: short.config,
        folder: tempfile::tempdir()?,
    }
    .set("/run/out", json!(run.folder.path().join("short")));
    short.refused(&[], &["train.bin", "model.vocab_size is 300"])?;
    Ok(())
}

/// A text is encoded in pieces, and the tokens are those of the whole.
#[test]
fn pieces_of_a_text_give_the_tokens_of_the_whole() -> Result<()> {
    let text = std::fs::read_to_string(TEXT)?.repeat(15);
    assert!(text.len() > 2 << 16);
    let whole = tokenizers::Tokenizer::from_file(TOKENIZER).map_err(|e| e.to_string())?;
    let whole = whole
        .encode(text.as_str(), false)
        .map_err(|e| e.to_string())?;
    let tokenizer = dp_examples::train::tokenizer::Tokenizer::open(TOKENIZER)?;
    let pieces = tokenizer.encode(&text)?;
    assert_eq!(pieces, whole.get_ids());
    assert_eq!(tokenizer.decode(&pieces)?, text);
    Ok(())
}

#[test]
fn what_cannot_be_is_one_line_and_code_2() -> Result<()> {
    let files = tempfile::tempdir()?;
    let file = |name: &str, bytes: &[u8]| -> Result<String> {
        let path = files.path().join(name);
        std::fs::write(&path, bytes)?;
        Ok(path.to_str().ok_or("UTF-8")?.to_string())
    };
    let (empty, short) = (file("empty.txt", b"")?, file("short.txt", b"too short")?);
    let run = Run::new()?;
    let set = |override_: &str, words: &[&str]| run.refused(&["--set", override_], words);
    set(
        "data.train=no-such-file.txt",
        &["data.train", "no-such-file.txt"],
    )?;
    set(
        &format!("data.train={empty}"),
        &["data.train", "empty.txt is empty"],
    )?;
    set(
        &format!("data.train={short}"),
        &["data.train", "too short for a context of 16"],
    )?;
    set(
        &format!("data.validation={short}"),
        &["data.validation", "too short"],
    )?;
    set(
        "data.validation_fraction=0.0001",
        &["validation_fraction", "held-out"],
    )?;
    set("data.validation_fraction=1", &["data.validation_fraction"])?;
    set(
        "data.tokenizer=no-such-tokenizer",
        &["data.tokenizer", "no-such-tokenizer", "bytes"],
    )?;
    set(
        &format!("data.tokenizer={short}"),
        &["data.tokenizer", "no tokenizer.json"],
    )?;
    set("model.vocab_size=100", &["model", "vocab_size", "256"])?;
    set("model.width=25", &["model", "width", "heads"])?;
    set("model.widht=24", &["`model.widht`", "`model.width`"])?;
    set("model.architecture=gpt3", &["model", "gpt3"])?;
    set("train_batch_size=13", &["train_batch_size", "2 ranks"])?;
    set(
        "train_batch_sise=12",
        &["`train_batch_sise`", "`train_batch_size`"],
    )?;
    set("modle={}", &["`modle`", "`model`"])?;
    set("run.stepz=3", &["`run.stepz`", "`run.steps`"])?;
    set("run.steps=0", &["run.steps"])?;
    set("run.sample.prompt=", &["run.sample.prompt"])?;
    set("run.sample.temperature=-1", &["run.sample.temperature"])?;
    set(
        "zero_optimization.stage=3",
        &["zero_optimization.stage", "3"],
    )?;
    set("run", &["--set run", "key=value"])?;
    run.refused(&["--ranks", "5"], &["train_batch_size", "5 ranks"])?;
    run.refused(
        &["--resume", "no-such-folder"],
        &["--resume", "no-such-folder"],
    )?;
    let output = Command::new(TRAIN_GPT)
        .args(["--config", "no-such-config.json"])
        .output()?;
    assert_eq!(output.status.code(), Some(2));
    assert!(text_of(&output).contains("no-such-config.json"));
    assert!(!run.out("checkpoints").exists(), "nothing was trained");
    // A folder with a run in it is not overwritten.
    run.train(&["--set", "run.steps=2"])?;
    let before = std::fs::read(run.out("metrics.jsonl"))?;
    run.refused(&[], &["run.out", "--resume latest"])?;
    assert_eq!(std::fs::read(run.out("metrics.jsonl"))?, before);
    Ok(())
}

/// Far more than any machine has: refused at once, so nothing of it was allocated.
#[test]
fn a_job_that_cannot_fit_is_refused_at_once() -> Result<()> {
    let run = Run::new()?;
    let huge = [
        "--set",
        "model.width=16384",
        "--set",
        "model.layers=1000",
        "--ranks",
        "3",
    ];
    let started = Instant::now();
    run.refused(
        &huge,
        &["--ranks", "3 ranks take", "GiB", "the machine has", "bytes"],
    )?;
    assert!(started.elapsed() < Duration::from_secs(5));
    run.refused(
        &["--set", "model.layers=18446744073709551615"],
        &["layers", "at most 10000"],
    )?;
    assert!(!run.out("").exists(), "no folder was made");
    Ok(())
}

/// A shorter context than the model's is allowed, and a longer one is not.
#[test]
fn sequences_may_be_shorter_than_the_context() -> Result<()> {
    let run = Run::new()?.set("/data/context", json!(7));
    let text = run.train(&["--set", "run.steps=2"])?;
    assert!(text.contains("84 tokens per step"), "{text}");
    let long = Run::new()?.set("/data/context", json!(17));
    long.refused(&[], &["data.context", "17", "16 positions"])?;
    Ok(())
}

/// The page of the book is what the types say; `UPDATE_REFERENCE=1` writes it anew.
#[test]
fn the_reference_page_is_made_from_the_types() -> Result<()> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/src/config-reference.md");
    let page = dp_examples::train::config::reference_page();
    if std::env::var_os("UPDATE_REFERENCE").is_some() {
        std::fs::write(&path, &page)?;
    }
    let written = std::fs::read_to_string(&path)?;
    assert!(
        written == page,
        "docs/src/config-reference.md is old: UPDATE_REFERENCE=1 cargo test --workspace reference_page"
    );
    Ok(())
}

/// The configurations that come with the programs are read, and fit their models.
#[test]
fn configurations_in_the_repository_are_good() -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs");
    let mut count = 0;
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.file_name() == Some("finetune.json".as_ref()) {
            continue; // Its model is a folder; tests/finetune.rs reads it.
        }
        let config = dp_examples::train::config::TrainConfig::from_file(&path, &[], None)?;
        for ranks in [1, 2, 4] {
            config.deepspeed.batch_sizes(ranks)?;
        }
        config.model.with_vocab_size(256)?.validate()?;
        count += 1;
    }
    assert!(count >= 2);
    Ok(())
}
