//! The benchmark programs: what they compute is right, what they write has the promised form. Speed is not tested.
//!
//! `fixtures/gpt-*.safetensors` and `gpt-*.json` are from PyTorch, made in `fixtures/`, with `HEAD` tied and untied, by
//!
//! ```text
//! S="--head HEAD --ctx 16 --dim 8 --layers 2 --heads 2 --global-batch 8 --lr 0.01"
//! python ../../pytorch/gpt_train.py $S --save-init gpt-HEAD.safetensors
//! python ../../pytorch/gpt_train.py $S --data ../../../LICENSE-APACHE > gpt-HEAD.json
//! ```

use std::error::Error;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::{Value, json};

const TRAIN: &str = env!("CARGO_BIN_EXE_bench-train");
const COLLECTIVES: &str = env!("CARGO_BIN_EXE_bench-collectives");

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

fn run(program: &str, arguments: &[&str]) -> std::io::Result<Output> {
    Command::new(program)
        .args(arguments)
        .env_remove("WORLD_SIZE")
        .output()
}

fn text(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|t| String::from_utf8_lossy(t));
    format!("{out}{err}")
}

fn read(path: &Path) -> Result<Value> {
    Ok(serde_json::from_slice(&std::fs::read(path)?)?)
}

const SMALL: [&str; 12] = [
    "--context",
    "16",
    "--width",
    "8",
    "--layers",
    "2",
    "--heads",
    "2",
    "--batch",
    "8",
    "--lr",
    "0.01",
];

fn fixture(name: &str) -> String {
    format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// `bench-train` on the job of the fixtures.
fn train_as_pytorch(head: &str, expected: &str, more: &[&str]) -> Result<Output> {
    let init = fixture(&format!("gpt-{head}.safetensors"));
    let data = format!("{}/../LICENSE-APACHE", env!("CARGO_MANIFEST_DIR"));
    let files = [
        "--head", head, "--init", &init, "--data", &data, "--expect", expected,
    ];
    Ok(run(TRAIN, &[&SMALL[..], &files, more].concat())?)
}

#[test]
fn losses_are_those_of_pytorch() -> Result {
    for head in ["tied", "untied"] {
        for ranks in ["1", "2", "4"] {
            let expected = fixture(&format!("gpt-{head}.json"));
            let output = train_as_pytorch(head, &expected, &["--ranks", ranks])?;
            let text = text(&output);
            assert!(output.status.success(), "{head}, {ranks} ranks: {text}");
            assert!(
                text.contains("[ok]     40 losses are the expected ones"),
                "{text}"
            );
        }
    }
    Ok(())
}

#[test]
fn other_losses_than_expected_are_a_failure() -> Result {
    let dir = tempfile::tempdir()?;
    let mut curve = read(fixture("gpt-tied.json").as_ref())?;
    let last = curve["losses"][39].as_f64().ok_or("a loss")?;
    curve["losses"][39] = json!(last + 2e-4);
    let expected = dir.path().join("curve.json");
    std::fs::write(&expected, curve.to_string())?;
    let expected = expected.to_str().ok_or("a path in UTF-8")?;
    let output = train_as_pytorch("tied", expected, &["--strategies", "ddp"])?;
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(
        text(&output).contains("[FAILED] 40 losses"),
        "{}",
        text(&output)
    );
    Ok(())
}

#[test]
fn training_report_has_what_it_promises() -> Result {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("train.json");
    let json = path.to_str().ok_or("a path in UTF-8")?;
    let more = [
        "--ranks", "2", "--steps", "5", "--warmup", "2", "--rounds", "2", "--json", json,
    ];
    let output = run(TRAIN, &[&SMALL[..], &more].concat())?;
    assert!(output.status.success(), "{}", text(&output));
    let report = read(&path)?;
    let rows = report["rows"].as_array().ok_or("rows")?;
    let names: Vec<_> = rows.iter().map(|r| &r["strategy"]).collect();
    assert_eq!(names, ["ddp", "zero1", "zero2"]);
    for row in rows {
        let number = |name: &str| row[name].as_f64().ok_or(name.to_string());
        for part in [
            "forward_ms",
            "backward_ms",
            "exposed_communication_ms",
            "optimizer_ms",
        ] {
            // Two ranks meet in each step, so no part takes no time at all.
            assert!(
                number(part)? > 0.0 && number(part)? < number("step_ms")?,
                "{row}"
            );
        }
        let tokens = number("tokens_per_second")? * number("step_ms")? / 1e3;
        assert!((tokens - 8.0 * 16.0).abs() < 1e-6, "{row}");
        // 3,936 parameters: values, gradients and two moments of at least half of them.
        assert!(
            row["peak_bytes"].as_u64() > Some(3936 * (4 + 2 + 4)),
            "{row}"
        );
    }
    assert_eq!(report["losses"].as_array().map(Vec::len), Some(5));
    assert_eq!(report["options"]["num_params"], 3936);
    assert_eq!(report["options"]["global_batch"], 8);
    assert!(report["versions"]["candle-core"].is_string());
    assert!(report["hardware"]["cores"].as_u64() > Some(0));
    Ok(())
}

/// Overlap changes no bit, a 16-bit communication dtype halves what is sent, and without overlap nothing is hidden.
#[test]
fn variants_of_communication_are_compared_in_one_report() -> Result {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("train.json");
    let json = path.to_str().ok_or("a path in UTF-8")?;
    let more = [
        "--ranks",
        "2",
        "--steps",
        "10",
        "--warmup",
        "1",
        "--bucket-kib",
        "4",
        "--overlap-comm",
        "on,off",
        "--communication-dtype",
        "f32,bf16",
        "--json",
        json,
    ];
    let output = run(TRAIN, &[&SMALL[..], &more].concat())?;
    assert!(output.status.success(), "{}", text(&output));
    let report = read(&path)?;
    let rows = report["rows"].as_array().ok_or("rows")?;
    let mut names = rows.iter().map(|r| {
        [
            &r["strategy"],
            &r["communication_dtype"],
            &r["overlap_comm"],
        ]
    });
    for strategy in ["ddp", "zero1", "zero2"] {
        for dtype in ["f32", "bf16"] {
            for overlap in ["on", "off"] {
                assert_eq!(
                    names.next(),
                    Some([&json!(strategy), &json!(dtype), &json!(overlap)])
                );
            }
        }
    }
    assert!(names.next().is_none());
    for row in rows {
        let share = row["hidden_share"].as_f64().ok_or("a share")?;
        assert!((0.0..=1.0).contains(&share), "{row}");
        assert!(row["reduction_ms"].as_f64() > Some(0.0), "{row}");
        if row["overlap_comm"] == "off" {
            assert!(share < 0.5, "{row}");
        }
    }
    // Each rank sends half of 3,936 gradients to be summed and half as sums; what else there is per step is some hundred bytes.
    let sent = |row: usize| rows[row]["bytes_sent"].as_u64().ok_or("bytes");
    assert!(
        (3936 * 4..3936 * 4 + 1000).contains(&sent(0)?),
        "{}",
        sent(0)?
    );
    assert_eq!(sent(0)? - sent(2)?, 3936 * 2);
    Ok(())
}

#[test]
fn a_trace_has_all_ranks_and_steps() -> Result {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("trace.json");
    let trace = path.to_str().ok_or("a path in UTF-8")?;
    let more = [
        "--ranks",
        "2",
        "--strategies",
        "zero2",
        "--steps",
        "3",
        "--warmup",
        "0",
        "--trace",
        trace,
    ];
    let output = run(TRAIN, &[&SMALL[..], &more].concat())?;
    assert!(output.status.success(), "{}", text(&output));
    assert!(text(&output).contains("trace.json"), "{}", text(&output));
    let events = read(&path)?;
    let events = events.as_array().ok_or("an array of events")?;
    for (rank, step) in [0, 1].into_iter().flat_map(|r| [1, 2, 3].map(|s| (r, s))) {
        let of = |e: &&Value| e["ph"] == "X" && e["pid"] == rank && e["args"]["step"] == step;
        let names: Vec<_> = events.iter().filter(of).map(|e| &e["name"]).collect();
        let all = [
            "forward",
            "backward",
            "reduction of bucket 0",
            "wait",
            "optimizer",
            "gather",
        ];
        for name in all {
            let count = names.iter().filter(|n| **n == name).count();
            assert_eq!(count, 1, "{name} of rank {rank} in step {step}: {names:?}");
        }
    }
    Ok(())
}

#[test]
fn collectives_report_has_what_it_promises() -> Result {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("collectives.json");
    let json = path.to_str().ok_or("a path in UTF-8")?;
    for (dtype, ranks) in [("f32", 1u64), ("bf16", 3), ("f16", 2), ("f64", 4)] {
        let arguments = [
            "--ranks",
            &ranks.to_string(),
            "--dtype",
            dtype,
            "--min-bytes",
            "96",
            "--max-bytes",
            "2K",
            "--factor",
            "16",
            "--budget-ms",
            "1",
            "--json",
            json,
        ];
        let output = run(COLLECTIVES, &arguments)?;
        assert!(output.status.success(), "{}", text(&output));
        let report = read(&path)?;
        assert_eq!(report["dtype"], dtype);
        assert_eq!(report["ranks"], ranks);
        let rows = report["rows"].as_array().ok_or("rows")?;
        let names: Vec<_> = rows.iter().map(|r| (&r["op"], &r["bytes"])).collect();
        let mut expected = Vec::new();
        for op in ["all_reduce", "reduce_scatter", "all_gather", "broadcast"] {
            expected.extend([(json!(op), json!(96)), (json!(op), json!(1536))]);
        }
        let expected: Vec<_> = expected.iter().map(|(op, bytes)| (op, bytes)).collect();
        assert_eq!(names, expected);
        for row in rows {
            let number = |name: &str| row[name].as_f64().ok_or(name.to_string());
            let (time, algbw) = (number("time_us")?, number("algbw_gbs")?);
            assert!(time > 0.0, "{row}");
            let near = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b.abs();
            assert!(near(algbw * time * 1e3, number("bytes")?), "{row}");
            let others = (ranks - 1) as f64 / ranks as f64;
            let factor = match row["op"].as_str() {
                Some("all_reduce") => 2.0 * others,
                Some("broadcast") => 1.0,
                _ => others,
            };
            assert!(near(number("busbw_gbs")?, factor * algbw), "{row}");
            let fraction = number("memcpy_us")? / time;
            assert!(near(number("fraction_of_memcpy")?, fraction), "{row}");
        }
    }
    Ok(())
}

#[test]
fn bad_values_are_one_clear_line_and_exit_code_2() -> Result {
    let dir = tempfile::tempdir()?;
    let path = |name: &str| dir.path().join(name).to_string_lossy().into_owned();
    let (nothing, no_curve, no_weights) = (path("nothing"), path("curve"), path("weights"));
    std::fs::write(&no_curve, r#"{"losses": []}"#)?;
    std::fs::write(&no_weights, "no safetensors")?;
    let tied = fixture("gpt-tied.safetensors");
    let one_layer = [
        "--context",
        "16",
        "--width",
        "8",
        "--layers",
        "1",
        "--heads",
        "2",
        "--init",
        &tied,
    ];
    let train: [(&[&str], &str); 17] = [
        (&["--ranks", "0"], "--ranks"),
        (&["--ranks", "3", "--batch", "16"], "--batch"),
        (&["--threads", "0"], "--threads"),
        (&["--strategies", "zero3"], "zero3"),
        (&["--strategies", "zero1,zero1"], "twice"),
        (&["--steps", "10"], "--warmup"),
        (&["--head", "half"], "--head"),
        (&["--lr", "-1"], "--lr"),
        (&["--width", "30"], "--width"),
        (&["--data", &nothing], &nothing),
        (&["--expect", &no_curve], "no losses"),
        (&["--init", &no_weights], "--init"),
        (&["--init", &tied], "head.weight"),
        (&one_layer, "blocks.1.ln1.weight"),
        (&["--json", "/proc/no"], "--json"),
        (&["--trace", "/proc/no", "--strategies", "ddp"], "--trace"),
        (&["--trace", "trace.json"], "a timeline shows one run"),
    ];
    let collectives: [(&[&str], &str); 7] = [
        (&["--ranks", "0"], "--ranks"),
        (&["--ops", "reduce"], "reduce"),
        (&["--dtype", "i8"], "--dtype"),
        (&["--min-bytes", "8K", "--max-bytes", "4K"], "--min-bytes"),
        (&["--min-bytes", "4", "--ranks", "2"], "--min-bytes"),
        (&["--max-bytes", "8G"], "--max-bytes"),
        (&["--json", "/proc/no"], "--json"),
    ];
    let cases = train.iter().map(|c| (TRAIN, c));
    for (program, (arguments, expected)) in
        cases.chain(collectives.iter().map(|c| (COLLECTIVES, c)))
    {
        let output = run(program, arguments)?;
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
        assert!(message.contains(expected), "{arguments:?}: {message}");
        assert!(!message.contains("panicked"), "{arguments:?}: {message}");
    }
    Ok(())
}
