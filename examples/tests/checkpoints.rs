//! Checkpoints of real processes: killed, out of disk, looked at, exported.

use std::error::Error;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use dp_core::checkpoint::Checkpoint;

const RESUME: &str = env!("CARGO_BIN_EXE_resume");
const CHECKPOINT: &str = env!("CARGO_BIN_EXE_checkpoint");

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

fn resume(dir: &Path, more: &[&str]) -> Command {
    let mut command = Command::new(RESUME);
    command
        .arg("--dir")
        .arg(dir)
        .args(more)
        .env_remove("WORLD_SIZE")
        .env_remove("RUST_BACKTRACE");
    command
}

fn text(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// The line with the parameters' digest, of a run that has come to its end.
fn digest(output: &Output) -> Result<String> {
    assert!(output.status.success(), "{}", text(output));
    Ok(String::from_utf8_lossy(&output.stdout)
        .lines()
        .last()
        .ok_or("no output")?
        .to_string())
}

/// Case C44: a run that is killed with SIGKILL at 30 random moments, each time in the steps around a save, and started
/// again. There is always a complete checkpoint, never an older one than was reported, and in the end the parameters are
/// those of a run that nobody killed.
#[test]
fn c44_a_run_killed_30_times_ends_with_the_same_parameters() -> Result {
    let folder = tempfile::tempdir()?;
    let (straight, killed) = (folder.path().join("straight"), folder.path().join("killed"));
    let options = [
        "--steps",
        "2000",
        "--save-every",
        "1",
        "--ranks",
        "2",
        "--strategy",
        "zero1",
    ];
    let expected = digest(
        &resume(
            &straight,
            &["--steps", "2000", "--save-every", "500", "--ranks", "2"],
        )
        .output()?,
    )?;

    let started = Instant::now();
    let (mut kills, mut last_seen, mut state) = (0, 0u64, 12345u64);
    while kills < 30 {
        assert!(
            started.elapsed() < Duration::from_secs(120),
            "{kills} kills, step {last_seen}"
        );
        let mut child = resume(&killed, &options)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let mut lines = BufReader::new(child.stdout.take().ok_or("piped")?).lines();
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        let (num_saves, delay) = ((state >> 60) % 4, (state >> 33) % 12_000);
        let mut saved = Vec::new();
        for line in lines.by_ref().map_while(std::result::Result::ok) {
            if let Some(step) = line.strip_prefix("step ").and_then(|l| l.split(' ').next()) {
                saved.push(step.parse::<u64>()?);
            }
            if saved.len() as u64 > num_saves {
                break;
            }
        }
        std::thread::sleep(Duration::from_micros(delay));
        child.kill()?;
        let status = child.wait()?;
        assert!(
            !status.success(),
            "it should have been killed in the middle"
        );
        saved.extend(lines.map_while(std::result::Result::ok).filter_map(|l| {
            l.strip_prefix("step ")?
                .split(' ')
                .next()?
                .parse::<u64>()
                .ok()
        }));
        last_seen = saved.last().copied().ok_or("it saved nothing")?;
        let checkpoint = Checkpoint::open(&killed)?;
        checkpoint.verify()?;
        let latest = checkpoint.manifest().step;
        assert!(
            latest == last_seen || latest == last_seen + 1,
            "{latest}, reported {last_seen}"
        );
        kills += 1;
    }
    let output = resume(&killed, &options).output()?;
    assert!(text(&output).contains("from step"), "{}", text(&output));
    assert_eq!(digest(&output)?, expected);
    // What the killed ones have left is cleared away, and two checkpoints are kept.
    let mut names: Vec<String> = std::fs::read_dir(&killed)?
        .flatten()
        .filter_map(|e| e.file_name().into_string().ok())
        .collect();
    names.sort();
    assert_eq!(names, [".lock", "latest", "step-00001999", "step-00002000"]);
    Ok(())
}

/// A disk that is full in the middle of a save, here a limit on the length of files: the run goes on, its checkpoint stays,
/// nothing is left of the new one.
#[cfg(unix)]
#[test]
fn a_full_disk_does_not_stop_the_run() -> Result {
    let folder = tempfile::tempdir()?;
    let dir = folder.path().join("run");
    let first = resume(&dir, &["--steps", "2", "--save-every", "2"]).output()?;
    digest(&first)?;
    // In units of 1 KiB; a rank's file has about 6.
    let limited = format!(
        "trap '' XFSZ; ulimit -f 3; exec {RESUME} --dir {} --steps 5 --save-every 2",
        dir.display()
    );
    let output = Command::new("bash")
        .args(["-c", &limited])
        .env_remove("RUST_BACKTRACE")
        .output()?;
    let text = text(&output);
    assert!(text.contains("from step 2"), "{text}");
    assert!(
        text.contains("step 4 not saved: rank 0:")
            && text.contains("cannot be written: File too large"),
        "{text}"
    );
    assert!(!output.status.success(), "the last save must work: {text}");
    let checkpoint = Checkpoint::open(&dir)?;
    checkpoint.verify()?;
    assert_eq!(checkpoint.manifest().step, 2);
    assert_eq!(
        std::fs::read_dir(&dir)?.count(),
        3,
        "latest, .lock and one checkpoint"
    );
    assert_eq!(
        digest(&resume(&dir, &["--steps", "5"]).output()?)?,
        digest(&resume(&folder.path().join("other"), &["--steps", "5"]).output()?)?
    );
    Ok(())
}

/// Two jobs that save to one folder at a time: the second is told.
#[test]
fn a_folder_belongs_to_one_job() -> Result {
    let folder = tempfile::tempdir()?;
    std::fs::create_dir_all(folder.path())?;
    let lock = std::fs::File::create(folder.path().join(".lock"))?;
    lock.lock()?;
    let output = resume(folder.path(), &["--steps", "1"]).output()?;
    assert!(!output.status.success());
    assert!(
        text(&output).contains("by another job"),
        "{}",
        text(&output)
    );
    Ok(())
}

#[test]
fn checkpoints_are_inspected_and_exported_without_the_model() -> Result {
    let folder = tempfile::tempdir()?;
    let dir = folder.path().join("run");
    digest(
        &resume(
            &dir,
            &["--steps", "10", "--ranks", "3", "--strategy", "zero2"],
        )
        .output()?,
    )?;
    let checkpoint = |arguments: &[&str]| {
        Command::new(CHECKPOINT)
            .args(arguments)
            .env_remove("RUST_BACKTRACE")
            .output()
    };
    let path = dir.to_str().ok_or("a path in UTF-8")?;
    let output = checkpoint(&["inspect", path])?;
    let report = text(&output);
    assert!(output.status.success(), "{report}");
    for part in [
        "step 10, saved by zero2 on 3 ranks",
        "hidden.weight",
        "rank-00002-of-00003.safetensors",
        "833 trained elements",
        "lr 0.003",
    ] {
        assert!(report.contains(part), "no {part:?} in {report}");
    }
    let json: serde_json::Value =
        serde_json::from_slice(&checkpoint(&["inspect", "--json", path])?.stdout)?;
    assert_eq!(json["parameters"][0]["updates"], 10);

    let weights = folder.path().join("weights.safetensors");
    let file = weights.to_str().ok_or("a path in UTF-8")?;
    assert!(checkpoint(&["export", path, file])?.status.success());
    let tensors = candle_core::safetensors::load(&weights, &candle_core::Device::Cpu)?;
    assert_eq!(tensors["hidden.weight"].dims(), [64, 11]);

    let shard = dir
        .join("step-00000010")
        .join("rank-00001-of-00003.safetensors");
    let bytes = std::fs::read(&shard)?;
    for damaged in [Some(&bytes[..bytes.len() - 1]), None] {
        match damaged {
            Some(bytes) => std::fs::write(&shard, bytes)?,
            None => std::fs::remove_file(&shard)?,
        }
        for arguments in [
            &["inspect", path][..],
            &["inspect", "--json", path],
            &["export", path, file],
        ] {
            let output = checkpoint(arguments)?;
            assert_eq!(output.status.code(), Some(1), "{}", text(&output));
            assert!(
                text(&output).contains("rank-00001-of-00003.safetensors: "),
                "{}",
                text(&output)
            );
        }
    }
    assert_eq!(
        candle_core::safetensors::load(&weights, &candle_core::Device::Cpu)?.len(),
        4,
        "the old export is as it was"
    );
    let output = checkpoint(&["inspect", folder.path().to_str().ok_or("a path in UTF-8")?])?;
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output).contains("no checkpoint is there"),
        "{}",
        text(&output)
    );
    Ok(())
}
