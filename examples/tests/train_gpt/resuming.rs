use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::support::{Result, Run, TEXT, digest, text_of};

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
fn a_checkpoint_of_another_run_is_refused() -> Result<()> {
    let run = Run::new()?;
    run.train(&["--set", "run.steps=6"])?;
    let other = run.folder.path().join("other.txt");
    let mut text = std::fs::read(TEXT)?;
    text[5000] ^= 1;
    std::fs::write(&other, text)?;
    let other = format!("data.train={}", other.display());
    let latest = |override_: &str, words: &[&str]| {
        run.refused(&["--resume", "latest", "--set", override_], words)
    };
    latest("model.heads=4", &["model.heads is 2 there, and 4 here"])?;
    latest("model.layers=2", &["model.layers is 1 there, and 2 here"])?;
    latest(
        "run.seed=7",
        &["data.seed is 0 there, and 7 here", "--restart-data"],
    )?;
    latest(&other, &["data.train.sha256", "--restart-data"])?;
    latest(
        "data.validation_fraction=0.5",
        &["data.train", "--restart-data"],
    )?;
    latest("run.steps=5", &["run.steps is 5", "step 6"])?;
    // If that is meant: the model goes on, and the data begins anew.
    let arguments = [
        "--resume",
        "latest",
        "--restart-data",
        "--set",
        "run.seed=7",
    ];
    let text = run.train(&arguments)?;
    assert!(text.contains("from step 6"), "{text}");
    assert_eq!(run.losses()?.len(), 12);
    run.refused(
        &["--resume", "latest"],
        &["data.seed is 7 there, and 0 here"],
    )?;
    // From the folder of another run.
    let third = Run::new()?
        .set("/run/seed", json!(7))
        .set("/run/steps", json!(13));
    let folder = run.out("");
    let text = third.train(&["--resume", folder.to_str().ok_or("UTF-8")?])?;
    assert!(text.contains("from step 12"), "{text}");
    let words = ["--resume", "no-such-folder"];
    Run::new()?.refused(&words, &words)?;
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
fn one_process_trains_in_a_folder() -> Result<()> {
    let run = Run::new()?.set("/run/steps", json!(100_000));
    let mut first = run
        .command(&[])?
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let started = Instant::now();
    while run.metrics().map_or(0, |m| m.len()) < 3 {
        assert!(
            started.elapsed() < Duration::from_secs(60),
            "no step in a minute"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    run.refused(&[], &["run.out", "another process"])?;
    run.refused(&["--resume", "latest"], &["run.out", "another process"])?;
    first.kill()?;
    first.wait()?;
    // The lock of a process that was killed is gone; metrics may end in the middle of a line.
    let mut metrics = std::fs::OpenOptions::new()
        .append(true)
        .open(run.out("metrics.jsonl"))?;
    std::io::Write::write_all(&mut metrics, b"\xff\xfe\n{\"kind\":\"tr")?;
    let run = run.set("/run/steps", json!(16));
    let checkpoints = std::fs::read_dir(run.out("checkpoints")).map_or(0, |c| c.count());
    if checkpoints > 0 {
        std::fs::remove_dir_all(run.out("checkpoints"))?;
    }
    run.train(&["--resume", "latest"])?;
    assert_eq!(run.losses()?.len(), 16);
    Ok(())
}
