//! `plan` as a user runs it: against the programs that train, against the ZeRO paper, and with options that cannot be.

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use serde_json::Value;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn run(program: &str, arguments: &str) -> std::io::Result<Output> {
    Command::new(program)
        .args(arguments.split_whitespace())
        .env_remove("WORLD_SIZE")
        .output()
}

fn plan(arguments: &str) -> std::io::Result<Output> {
    run(env!("CARGO_BIN_EXE_plan"), arguments)
}

/// What the program prints.
fn printed(arguments: &str) -> Result<String> {
    let output = plan(arguments)?;
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments}: {message}");
    Ok(String::from_utf8(output.stdout)?)
}

/// What it writes to `--json`.
fn planned(dir: &Path, arguments: &str) -> Result<Value> {
    let file = dir.join("plan.json");
    printed(&format!("{arguments} --json {}", file.display()))?;
    Ok(serde_json::from_slice(&std::fs::read(file)?)?)
}

fn rows(report: &Value) -> &[Value] {
    report["rows"].as_array().map_or(&[], Vec::as_slice)
}

/// Options that `plan` and `memory-per-card` share.
const SHAPES: [&str; 3] = [
    "--layers 2 --width 64 --heads 2 --context 64 --batch 16",
    "--layers 4 --width 120 --heads 3 --context 35 --batch 11",
    "--layers 1 --width 256 --heads 4 --context 128 --batch 6",
];

const PRECISIONS: [&str; 5] = [
    "--dtype f32",
    "--dtype bf16",
    "--dtype f16 --grad-accum-dtype parameter",
    "--dtype bf16 --communication-dtype bf16",
    "--dtype f32 --communication-dtype f16 --bucket-kib 50",
];

/// Trains, and compares each rank's bytes, exactly, and its activations, within a quarter, with the plan. The largest buffer while a trainer is made is a part of the ledger's peak.
fn compare(dir: &Path, ranks: u64, shape: &str, precision: &str) -> Result<()> {
    let bucket = match precision.contains("--bucket-kib") {
        true => "",
        false => "--bucket-kib 1024",
    };
    let shared = format!("--ranks {ranks} {shape} {precision} {bucket}");
    let plan = planned(dir, &format!("{shared} --vocab 256 --head untied"))?;
    let out = dir.join("trained");
    // A short one: the shuffled order of a long text is on the heap, too, and no activation.
    let text = dir.join("text");
    std::fs::write(&text, "a short text to learn. ".repeat(20))?;
    let (out_dir, text) = (out.display(), text.display());
    let arguments = format!("{shared} --steps 2 --out {out_dir} --data {text}");
    let output = run(env!("CARGO_BIN_EXE_memory-per-card"), &arguments)?;
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments}: {message}");
    let trained: Value = serde_json::from_slice(&std::fs::read(out.join("report.json"))?)?;
    assert_eq!(trained["num_params"], plan["num_params"]);

    let strategies = trained["strategies"].as_array().ok_or("strategies")?;
    for (strategy, planned) in strategies.iter().zip(rows(&plan)) {
        let context = format!("{shared}, {}", planned["strategy"]);
        assert_eq!(strategy["name"], planned["strategy"]);
        assert_eq!(planned["basis"], "exact");
        assert_eq!(
            strategy["bytes_sent_per_step"], planned["bytes_sent_per_step"],
            "{context}"
        );
        for card in strategy["ranks"].as_array().ok_or("ranks")? {
            for category in ["parameters", "gradients", "optimizer"] {
                assert_eq!(card[category], planned[category], "{context}: {category}");
            }
            let communication = planned["communication"]
                .as_u64()
                .max(planned["set_up"].as_u64());
            assert_eq!(card["communication"].as_u64(), communication, "{context}");
            let measured = card["activations_peak"].as_f64().ok_or("a number")?;
            let estimate = planned["activations"].as_f64().ok_or("a number")?;
            let ratio = estimate / measured;
            assert!((0.75..=1.25).contains(&ratio), "{context}: {ratio}");
        }
    }
    Ok(())
}

#[test]
fn a_plan_is_what_training_takes() -> Result<()> {
    let dir = tempfile::tempdir()?;
    for (shape, ranks) in SHAPES.into_iter().zip([1, 2, 3]) {
        for precision in &PRECISIONS[..2] {
            compare(dir.path(), ranks, shape, precision)?;
        }
    }
    for (shape, precision) in SHAPES.into_iter().zip(&PRECISIONS[2..]) {
        compare(dir.path(), 4, shape, precision)?;
    }
    Ok(())
}

/// `plan --config` foresees what `train-gpt` counts with the same file, clipping and micro-batches included.
#[test]
fn a_planned_configuration_is_what_train_gpt_does() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let text = dir.path().join("text");
    std::fs::write(&text, "a short text to learn. ".repeat(40))?;
    let config = dir.path().join("config.json");
    std::fs::write(
        &config,
        serde_json::json!({
            "train_batch_size": 12,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"reduce_bucket_size": 3000},
            "model": {"architecture": "gpt2", "context": 16, "width": 24, "heads": 2, "layers": 2},
            "data": {"train": text, "context": 10, "validation_fraction": 0},
            "run": {"steps": 2, "sample": {"tokens": 0}}
        })
        .to_string(),
    )?;
    let precisions = [
        "",
        "--set bf16.enabled=true",
        "--set bf16.enabled=true --set data_types.grad_accum_dtype=bf16 --set gradient_clipping=0",
        "--set communication_data_type=fp16 --set optimizer.type=SGD --set gradient_accumulation_steps=1",
    ];
    for (i, precision) in precisions.into_iter().enumerate() {
        let shared = format!("--config {} {precision}", config.display());
        for stage in 0..3 {
            let shared = format!("{shared} --set zero_optimization.stage={stage}");
            let plan = planned(dir.path(), &format!("{shared} --ranks 1,2,3"))?;
            assert_eq!(plan["model"]["sequence_len"], 10);
            assert_eq!(plan["model"]["vocab_size"], 256);
            let configured = || rows(&plan).iter().filter(|r| r["configured"] == true);
            assert_eq!(configured().count(), 3);
            for row in configured() {
                let (ranks, out) = (&row["ranks"], dir.path().join(format!("run-{i}-{stage}")));
                let out = out.join(ranks.to_string());
                let arguments = format!("{shared} --ranks {ranks} --set run.out={}", out.display());
                let output = run(env!("CARGO_BIN_EXE_train-gpt"), &arguments)?;
                let message = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "{arguments}: {message}");
                let metrics = std::fs::read_to_string(out.join("metrics.jsonl"))?;
                assert_eq!(metrics.lines().count(), 2);
                for line in metrics.lines() {
                    let step: Value = serde_json::from_str(line)?;
                    assert_eq!(step["num_micro_batches"], row["accumulation_steps"]);
                    assert_eq!(
                        step["bytes_sent"], row["bytes_sent_by_rank_0"],
                        "{arguments}"
                    );
                    for part in ["parameters", "gradients", "optimizer", "communication"] {
                        let counted = &step[format!("{part}_bytes")];
                        assert_eq!(counted, &row[part], "{arguments}: {part}");
                    }
                    let peak = row["communication"].as_u64().max(row["set_up"].as_u64());
                    assert_eq!(step["communication_peak_bytes"].as_u64(), peak);
                }
                let sizes = ["micro_batch_size", "accumulation_steps", "ranks"];
                let batch: Option<u64> = sizes.iter().map(|s| row[s].as_u64()).product();
                assert_eq!(batch, Some(12));
            }
        }
    }

    let printed = printed(&format!("--config {} --ranks 1,2", config.display()))?;
    for words in [
        "ddp *",
        "* the strategy of the configuration",
        "6, 3 x 10 tokens per rank and micro-batch, 2 micro-batches per step, on 1, 2 ranks",
    ] {
        assert!(printed.contains(words), "{words} is not in {printed}");
    }
    let config = config.display();
    let cases = [
        (format!("--config {config} --layers 2"), "--layers"),
        (format!("--config {config} --params 7B"), "--params"),
        (format!("--config {config} --dtype bf16"), "--dtype"),
        (format!("--config {config} --batch 2"), "--batch"),
        ("--params 7B --set run.steps=1".to_string(), "--config"),
        (format!("--config {config} --ranks 1,5"), "--ranks 5"),
        (
            format!("--config {config} --set data.context=17"),
            "data.context",
        ),
        (
            format!("--config {config} --set model.widht=17"),
            "model.width",
        ),
        (
            format!("--config {config} --set model.layers=10001"),
            "at most 10000",
        ),
        (
            "--config no-such-config.json".to_string(),
            "no-such-config.json",
        ),
    ];
    for (arguments, expected) in cases {
        let output = plan(&arguments)?;
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments}: {message}");
        assert!(message.contains(expected), "{arguments}: {message}");
        let names_both = !message.contains("cannot be used with") || message.contains("--config");
        assert!(names_both, "{message}");
    }
    Ok(())
}

/// A count gives the paper's numbers: figure 1 of arXiv 1910.02054.
#[test]
fn a_count_gives_figure_1_of_the_paper() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let report = planned(
        dir.path(),
        "--params 7.5B --ranks 64 --dtype bf16 --card 80GiB",
    )?;
    let totals: Vec<f64> = rows(&report)
        .iter()
        .filter_map(|r| r["total"].as_f64())
        .map(|bytes| (bytes / 1e8).round() / 10.0)
        .collect();
    assert_eq!(totals, [120.0, 31.4, 16.6, 1.9]);
    for row in rows(&report) {
        for unknown in ["activations", "communication", "num_buckets", "set_up"] {
            assert!(row[unknown].is_null(), "{unknown}");
        }
    }
    assert_eq!(rows(&report)[3]["basis"], "estimate_only");
    // As this library's trainers would do it.
    let arguments = "--params 1000 --ranks 10 --dtype bf16 --grad-accum-dtype f32";
    let report = planned(dir.path(), arguments)?;
    let totals: Vec<u64> = rows(&report)
        .iter()
        .filter_map(|r| r["total"].as_u64())
        .collect();
    assert_eq!(totals, [18000, 7200, 3600, 1800]);
    let text = printed("--params 7.5B --ranks 64 --dtype bf16")?;
    for part in [
        "not known from a count",
        "estimate only: no trainer",
        "--grad-accum-dtype f32",
    ] {
        assert!(text.contains(part), "{text}");
    }
    Ok(())
}

#[test]
fn the_smallest_stage_that_fits_is_named() -> Result<()> {
    let text = printed("--params 7.5B --ranks 1,4,64 --dtype bf16 --card 45GB")?;
    for part in [
        "1 rank: none fits a card of 41.91 GiB; zero3 would take 120.00 GB",
        "4 ranks: zero2 is the smallest stage that fits a card of 41.91 GiB",
        "64 ranks: zero1 is the smallest",
    ] {
        assert!(text.contains(part), "{part} not in {text}");
    }
    let text = printed("--params 7.5B --ranks 8 --dtype bf16 --card 16GB")?;
    assert!(
        text.contains("zero3 would with 15.00 GB (estimate), but has no trainer"),
        "{text}"
    );
    Ok(())
}

/// Llama 2 70B: `zero3` apart nothing can hold it, and that is known at once.
#[test]
fn a_model_of_70_billion_parameters_is_planned_in_a_second() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let start = Instant::now();
    let report = planned(
        dir.path(),
        "--architecture llama --layers 80 --width 8192 --heads 64 --kv-heads 8 --hidden 28672 --context 4096 --vocab 32000 \
         --dtype bf16 --ranks 8,64,512,1024 --card 80GiB",
    )?;
    assert!(
        start.elapsed() < Duration::from_secs(1),
        "{:?}",
        start.elapsed()
    );
    assert_eq!(report["num_params"], 68_976_648_192u64);
    assert_eq!(rows(&report)[0]["parameters"], 2 * 68_976_648_192u64);
    assert!(rows(&report)[2]["num_buckets"].as_u64() > Some(100));
    assert_eq!(report["choices"].as_array().map(Vec::len), Some(4));
    assert!(report["choices"][3]["smallest"].is_null());
    Ok(())
}

#[test]
fn the_page_needs_no_network() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let file = dir.path().join("plan.html");
    let arguments = format!(
        "{} --vocab 99 --card 1MiB --html {}",
        SHAPES[0],
        file.display()
    );
    printed(&arguments)?;
    let html = std::fs::read_to_string(file)?;
    assert!(html.contains("<svg") && !html.contains("http://") && !html.contains("https://"));
    assert!(html.contains("prefers-color-scheme: dark"));
    for part in [
        "zero3 on 64",
        "estimate only: no trainer",
        "none fits a card of 1.00 MiB",
    ] {
        assert!(html.contains(part), "{part}");
    }
    Ok(())
}

#[test]
fn optimizers_differ_in_what_they_keep() -> Result<()> {
    let dir = tempfile::tempdir()?;
    for (optimizer, bytes) in [("adamw", 8), ("sgd-momentum", 4), ("sgd", 0)] {
        let arguments = format!(
            "{} --vocab 256 --ranks 1 --optimizer {optimizer}",
            SHAPES[0]
        );
        let report = planned(dir.path(), &arguments)?;
        let num_params = report["num_params"].as_u64().ok_or("a number")?;
        assert_eq!(rows(&report)[0]["optimizer"], bytes * num_params);
        assert_eq!(report["optimizer"], optimizer);
    }
    Ok(())
}

#[test]
fn options_that_cannot_be_are_one_clear_line_and_exit_code_2() -> Result<()> {
    let cases = [
        ("", "no model to plan"),
        ("--params 0", "at least 1"),
        ("--params -5", "7.5B, 350M"),
        ("--params 7.5X", "7.5B, 350M"),
        ("--params 1.5", "not a whole number"),
        ("--params 2000T", "at most 1000T"),
        ("--params 7B --ranks 0", "--ranks"),
        ("--params 7B --ranks 4,many", "--ranks"),
        ("--params 7B --layers 12", "two models"),
        ("--params 7B --hidden 12", "two models"),
        ("--params 7B --card 80apples", "80GiB, 24GB"),
        ("--params 7B --card 0GiB", "at least 1 byte"),
        ("--params 7B --dtype f64", "f32, bf16 or f16"),
        ("--params 7B --optimizer lion", "adamw"),
        ("--params 7B --grad-accum-dtype f16", "f32 or parameter"),
        ("--params 7B --communication-dtype u8", "f32, bf16 or f16"),
        ("--params 7B --bucket-kib 0", "--bucket-kib"),
        ("--params 7B --json /does/not/exist", "--json"),
        ("--params 7B --html /does/not/exist", "--html"),
        (
            "--layers 12 --width 768 --heads 12 --context 1024",
            "--vocab is missing",
        ),
        ("--hidden 12", "--layers is missing"),
        (
            "--layers 12 --width 30 --heads 4 --context 1024 --vocab 9",
            "--width",
        ),
        (
            "--layers 1 --width 32 --heads 4 --context 8 --vocab 9 --kv-heads 2",
            "--kv-heads is for --architecture llama",
        ),
        (
            "--architecture llama --layers 1 --width 32 --heads 4 --context 8 --vocab 9",
            "--hidden is missing",
        ),
        (
            "--layers 10001 --width 8 --heads 4 --context 8 --vocab 9",
            "at most 10000",
        ),
        (
            "--layers 9999 --width 1048576 --heads 4 --context 8 --vocab 9",
            "more than 100T",
        ),
        (
            "--layers 1 --width 8 --heads 4 --context 1048576 --vocab 9 --batch 1000",
            "tokens per rank",
        ),
    ];
    for (arguments, expected) in cases {
        let output = plan(arguments)?;
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
        assert!(message.contains(expected), "{arguments:?}: {message}");
        assert!(!message.contains("panicked"), "{arguments:?}: {message}");
    }
    Ok(())
}
