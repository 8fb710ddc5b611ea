use serde_json::{Value, json};

use crate::support::{Result, Run, TEXT, TOKENIZER};

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
    assert!(report.contains("exposed communication") && report.contains("hidden behind backward"));
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

/// Also where epochs end in the middle of a batch, and for a run that goes on in a later epoch with other ranks.
#[test]
fn epochs_end_alike_on_any_number_of_ranks() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("tiny.txt");
    std::fs::write(&file, &std::fs::read(TEXT)?[..1000])?;
    let tiny = || -> Result<Run> {
        // 900 tokens to train on: 56 sequences, so the fifth step of 12 has the first epoch's end in it.
        Ok(Run::new()?
            .set("/data/train", json!(file))
            .set("/run/eval_sequences", json!(0)))
    };
    let one = tiny()?;
    let text = one.train(&["--ranks", "1"])?;
    assert!(text.contains("12 steps are 2.6 epochs"), "{text}");
    let last = |run: &Run| -> Result<f64> {
        let record = run.metrics()?.pop().ok_or("no metrics")?;
        Ok(record["loss"].as_f64().ok_or("no evaluation")?)
    };
    for ranks in ["2", "3", "4"] {
        let run = tiny()?;
        run.train(&["--ranks", ranks])?;
        let resumed = tiny()?;
        resumed.train(&["--ranks", ranks, "--set", "run.steps=7"])?;
        resumed.train(&["--ranks", "1", "--resume", "latest"])?;
        for run in [run, resumed] {
            for (a, b) in run.losses()?.iter().zip(one.losses()?) {
                assert!((a - b).abs() < 2e-5, "{ranks} ranks: {a} instead of {b}");
            }
            assert!((last(&run)? - last(&one)?).abs() < 2e-5);
        }
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
fn a_timeline_has_every_step_of_every_rank() -> Result<()> {
    let run = Run::new()?;
    let path = run.folder.path().join("trace.json");
    run.train(&["--trace", path.to_str().ok_or("UTF-8")?])?;
    let events: Vec<Value> = serde_json::from_slice(&std::fs::read(path)?)?;
    for rank in 0..2u64 {
        for phase in ["forward", "backward", "optimizer", "gather"] {
            let of = |e: &&Value| e["name"] == phase && e["pid"] == rank;
            assert_eq!(
                events.iter().filter(of).count(),
                12,
                "{phase} of rank {rank}"
            );
        }
    }
    Ok(())
}
