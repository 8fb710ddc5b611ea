use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::{Result, Run, TRAIN_GPT, text_of};

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
    set("run.out=", &["run.out"])?;
    set("data.validation=tokens.bin", &["data.validation", ".bin"])?;
    set("run.sample.prompt=", &["run.sample.prompt"])?;
    set("run.sample.temperature=-1", &["run.sample", "temperature"])?;
    set("run.sample.top_k=0", &["run.sample", "top_k"])?;
    set(
        "zero_optimization.stage=3",
        &["zero_optimization.stage", "3"],
    )?;
    set("run", &["--set run", "key=value"])?;
    run.refused(&["--ranks", "5"], &["train_batch_size", "5 ranks"])?;
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

#[test]
fn a_run_that_diverges_fails_and_leaves_no_weights() -> Result<()> {
    let run = Run::new()?
        .set("/optimizer/params/lr", json!(1e30))
        .set("/run/save_every", json!(1));
    let output = run.command(&[])?.output()?;
    let text = text_of(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("has diverged"), "{text}");
    assert!(!run.out("model.safetensors").exists());
    let one_step = Run::new()?
        .set("/optimizer/params/lr", json!(1e30))
        .set("/run/steps", json!(1))
        .set("/run/sample/tokens", json!(0));
    let output = one_step.command(&[])?.output()?;
    assert_eq!(output.status.code(), Some(1), "{}", text_of(&output));
    assert!(!one_step.out("model.safetensors").exists());
    Ok(())
}
