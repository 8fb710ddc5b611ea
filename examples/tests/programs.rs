//! The example programs as a user runs them: what they print, write and return.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn run(program: &str, arguments: &[&str]) -> std::io::Result<Output> {
    Command::new(program)
        .args(arguments)
        .env_remove("WORLD_SIZE")
        .output()
}

const MEMORY_PER_CARD: &str = env!("CARGO_BIN_EXE_memory-per-card");
const SMALL: [&str; 14] = [
    "--steps",
    "2",
    "--batch",
    "1",
    "--context",
    "16",
    "--layers",
    "1",
    "--width",
    "24",
    "--heads",
    "2",
    "--bucket-kib",
    "8",
];

fn small_report(out: &Path, more: &[&str]) -> Result<Value, Box<dyn std::error::Error>> {
    let out = out.to_str().ok_or("a path in UTF-8")?;
    let arguments = [&SMALL[..], &["--out", out], more].concat();
    let output = run(MEMORY_PER_CARD, &arguments)?;
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let html = std::fs::read_to_string(format!("{out}/report.html"))?;
    assert!(html.contains("<svg") && !html.contains("http://") && !html.contains("https://"));
    Ok(serde_json::from_slice(&std::fs::read(format!(
        "{out}/report.json"
    ))?)?)
}

#[test]
fn report_has_what_it_promises() -> Result<(), Box<dyn std::error::Error>> {
    let out = tempfile::tempdir()?;
    for ranks in [1u64, 2, 3, 4] {
        let report = small_report(out.path(), &["--ranks", &ranks.to_string()])?;
        assert_eq!(report["world_size"], ranks);
        assert_eq!(report["dtype"], "f32");
        let num_params = report["num_params"].as_u64().ok_or("num_params")?;
        let strategies = report["strategies"].as_array().ok_or("strategies")?;
        let names: Vec<&str> = strategies
            .iter()
            .filter_map(|s| s["name"].as_str())
            .collect();
        assert_eq!(names, ["ddp", "zero1", "zero2"]);
        for (strategy, sharded_bytes) in strategies.iter().zip([0, 8, 12]) {
            assert_eq!(strategy["losses"].as_array().map(Vec::len), Some(2));
            assert_eq!(strategy["params_sha256"], strategies[0]["params_sha256"]);
            assert_eq!(strategy["losses"], strategies[0]["losses"]);
            assert!(strategy["tokens_per_second"].as_f64() > Some(0.0));
            assert_eq!(
                strategy["bytes_sent_per_step"],
                strategy["bytes_sent_predicted"]
            );
            let cards = strategy["ranks"].as_array().ok_or("ranks")?;
            assert_eq!(cards.len() as u64, ranks);
            for (index, card) in cards.iter().enumerate() {
                assert_eq!(card["rank"], index);
                let mut states = 0;
                for category in ["parameters", "gradients", "optimizer"] {
                    assert_eq!(
                        card[category], card["predicted"][category],
                        "{names:?} {category}"
                    );
                    states += card[category].as_u64().ok_or("bytes are integers")?;
                }
                // 16 bytes per parameter, of which the strategy divides some by the ranks; the rest is padding.
                let expected =
                    (16 - sharded_bytes) * num_params + sharded_bytes * num_params / ranks;
                let padding = 16 * ranks * 16;
                assert!(
                    (expected..=expected + padding).contains(&states),
                    "{states} not {expected}"
                );
                for measured in ["communication", "activations_peak", "peak"] {
                    assert!(card[measured].is_u64(), "{measured}");
                }
                assert!(
                    card["peak"].as_u64() > Some(states),
                    "the heap holds the model states"
                );
                assert!(card["activations_peak"].as_u64() > Some(0));
            }
        }
    }
    Ok(())
}

#[test]
fn other_text_and_a_choice_of_strategies() -> Result<(), Box<dyn std::error::Error>> {
    let out = tempfile::tempdir()?;
    let text = out.path().join("text");
    std::fs::write(&text, "abcdefgh".repeat(20))?;
    let text = text.to_str().ok_or("a path in UTF-8")?;
    let report = small_report(
        out.path(),
        &[
            "--ranks",
            "2",
            "--data",
            text,
            "--strategies",
            "zero2",
            "--seed",
            "5",
        ],
    )?;
    assert_eq!(report["model"]["text_bytes"], 160);
    assert_eq!(report["seed"], 5);
    assert_eq!(report["strategies"].as_array().map(Vec::len), Some(1));
    Ok(())
}

#[test]
fn bad_values_are_one_clear_line_and_exit_code_2() -> Result<(), Box<dyn std::error::Error>> {
    let dir = tempfile::tempdir()?;
    let empty = dir.path().join("empty.txt");
    std::fs::write(&empty, "")?;
    let short = dir.path().join("short.txt");
    std::fs::write(&short, "short")?;
    let [empty, short] = [&empty, &short].map(|p| p.to_str().unwrap_or_default());
    let cases: [(&[&str], &str); 16] = [
        (&["--ranks", "0"], "--ranks"),
        (&["--ranks", "many"], "--ranks"),
        (&["--layers", "10000", "--width", "4096"], "GiB"),
        (&["--batch", "1000000"], "GiB"),
        (&["--width", "18446744073709551615"], "at most"),
        (&["--strategies", "ddp,zero9"], "zero9"),
        (&["--strategies", "ddp,ddp"], "twice"),
        (&["--steps", "0"], "--steps"),
        (&["--batch", "-1"], "--batch"),
        (&["--context", "0"], "--context"),
        (&["--width", "30", "--heads", "4"], "--width"),
        (&["--bucket-kib", "0"], "--bucket-kib"),
        (&["--data", "/does/not/exist"], "/does/not/exist"),
        (&["--data", empty], "empty"),
        (&["--data", short], "--context"),
        (&["--out", "/proc/no"], "--out"),
    ];
    for (arguments, expected) in cases {
        let output = run(MEMORY_PER_CARD, arguments)?;
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
        assert!(message.contains(expected), "{arguments:?}: {message}");
        assert!(!message.contains("panicked"), "{arguments:?}: {message}");
    }
    Ok(())
}

/// Started by a launcher of several processes, a program must not train a world of its own in each.
#[test]
fn launchers_of_processes_are_refused() -> Result<(), Box<dyn std::error::Error>> {
    for program in [
        MEMORY_PER_CARD,
        env!("CARGO_BIN_EXE_quickstart"),
        env!("CARGO_BIN_EXE_existing-loop"),
    ] {
        let output = Command::new(program).env("WORLD_SIZE", "4").output()?;
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{program}: {message}");
        assert!(message.contains("WORLD_SIZE=4"), "{program}: {message}");
    }
    Ok(())
}

/// What the launcher has set is what programs look for; this build cannot join its ranks, and says so on each.
#[cfg(target_os = "linux")]
#[test]
fn ranks_of_dp_launch_find_their_world() -> Result<(), Box<dyn std::error::Error>> {
    let quickstart = env!("CARGO_BIN_EXE_quickstart");
    let output = run(
        env!("CARGO_BIN_EXE_dp-launch"),
        &["-n", "2", "--", quickstart],
    )?;
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("WORLD_SIZE=2"), "{message}");
    assert!(message.contains("dp-launch: rank "), "{message}");
    // A world of one is no cluster: the program makes threads.
    let output = run(
        env!("CARGO_BIN_EXE_dp-launch"),
        &["-n", "1", "--", quickstart, "--ranks", "2"],
    )?;
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(text.starts_with("[rank 0] 2 ranks, "), "{text}");
    Ok(())
}

#[test]
fn quickstart_and_existing_loop_check_themselves() -> Result<(), Box<dyn std::error::Error>> {
    let programs = [
        env!("CARGO_BIN_EXE_quickstart"),
        env!("CARGO_BIN_EXE_existing-loop"),
    ];
    for program in programs {
        for ranks in ["1", "3"] {
            let output = run(program, &["--ranks", ranks])?;
            let message = String::from_utf8_lossy(&output.stderr);
            assert!(
                output.status.success(),
                "{program} --ranks {ranks}: {message}"
            );
        }
    }
    Ok(())
}

#[test]
fn programs_end_quietly_when_their_reader_goes_away() -> Result<(), Box<dyn std::error::Error>> {
    let out = tempfile::tempdir()?;
    let out = out.path().to_str().ok_or("a path in UTF-8")?;
    let small = [&SMALL[..], &["--ranks", "1", "--out", out]].concat();
    let programs: [(&str, &[&str]); 4] = [
        (MEMORY_PER_CARD, &small),
        (env!("CARGO_BIN_EXE_plan"), &["--params", "7B"]),
        // A rank's thread prints.
        (env!("CARGO_BIN_EXE_quickstart"), &["--ranks", "2"]),
        (
            env!("CARGO_BIN_EXE_resume"),
            &["--dir", out, "--steps", "50"],
        ),
    ];
    for (program, arguments) in programs {
        let (reader, writer) = std::io::pipe()?;
        drop(reader);
        let output = Command::new(program)
            .args(arguments)
            .env_remove("WORLD_SIZE")
            .stdout(writer)
            .output()?;
        let message = String::from_utf8_lossy(&output.stderr);
        // As a shell reports a program that SIGPIPE has ended.
        assert_eq!(output.status.code(), Some(141), "{program}: {message}");
        assert!(!message.contains("panicked"), "{program}: {message}");
    }
    Ok(())
}
