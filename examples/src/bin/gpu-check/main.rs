//! Everything that needs a GPU, in one command of some minutes: tests, memory per card, speed beside PyTorch's, a table.
//!
//! ```text
//! .ci/gpu-check.sh pack DIR      # where there are cargo and a CUDA toolkit; a GPU is not needed
//! DIR/gpu-check.sh               # where there is a GPU; no cargo is needed
//! ```
//!
//! The other programs lie beside this one, and are started one after the other, each with a deadline. With one GPU, ranks are
//! threads that share it. With several, ranks with a GPU each run over NCCL, too.
//!
//! Exit codes: 0 all well, 1 something has failed, 2 wrong arguments, 3 there is no GPU.

#[cfg(feature = "nccl")]
mod bandwidth;
mod findings;
mod measurement;
mod optimizer;
mod programs;
mod report;

use std::path::PathBuf;
use std::process::ExitCode;

use candle_core::Device;
use clap::Parser;
use dp_examples::closed_pipe;

use measurement::Measurement;
use programs::Programs;
use report::Report;

/// Checks this project on the GPUs of this machine.
#[derive(Debug, Parser)]
#[command(name = "gpu-check", version)]
struct Options {
    /// Folder of the programs to start; that of this program unless given
    #[arg(long)]
    programs: Option<PathBuf>,
    /// Folder for reports and logs
    #[arg(long, default_value = "gpu-check-results")]
    out: PathBuf,
    /// Python with torch, for the comparison
    #[arg(long, default_value = "python3")]
    python: String,
    /// Seconds for everything; what does not fit is left out, and said
    #[arg(long, default_value_t = 290)]
    budget: u64,
    /// Seconds that one program may take
    #[arg(long, default_value_t = 90)]
    longest: u64,
    /// Only this measurement, in this process; the check starts itself again for each
    #[arg(long, value_enum)]
    measure: Option<Measurement>,
}

/// There is no GPU.
const NO_GPU: u8 = 3;

fn main() -> ExitCode {
    closed_pipe::end_quietly();
    let options = Options::parse();
    let num_gpus = match count_gpus() {
        Ok(num) => num,
        Err(why) => {
            eprintln!("gpu-check: no CUDA device: {why}");
            return ExitCode::from(NO_GPU);
        }
    };
    let outcome = match options.measure {
        Some(measurement) => measurement.print(num_gpus).map(|()| true),
        None => check(&options, num_gpus),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("gpu-check: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// How many there are, or why there is none.
fn count_gpus() -> Result<usize, candle_core::Error> {
    Device::new_cuda_with_stream(0)?;
    let usable = |i: &usize| Device::new_cuda_with_stream(*i).is_ok();
    Ok((0..).take_while(usable).count())
}

fn check(options: &Options, num_gpus: usize) -> anyhow::Result<bool> {
    let programs = Programs::new(options)?;
    let mut report = Report::default();
    println!("{}", programs.machine());
    println!("{num_gpus} GPUs");

    // What is wrong first: numbers of a wrong program mean nothing.
    for tests in ["dp-core-cuda", "dp-zero-cuda"] {
        report.add(programs.run(&format!("tests {tests}"), tests, &[]));
    }
    if cfg!(feature = "nccl") {
        for tests in ["dp-core-nccl", "dp-zero-nccl"] {
            report.add(programs.run(&format!("tests {tests}"), tests, &[]));
        }
    }
    for ranks in ["2", "4"] {
        let out = options.out.join(format!("memory-per-card-{ranks}"));
        let folder = out.to_string_lossy();
        let arguments = ["--device", "cuda", "--ranks", ranks, "--out", &folder];
        let name = format!("memory per card, {ranks} ranks on one GPU");
        let row = programs.run(&name, "memory-per-card", &arguments);
        report.add(row.saying(|_| findings::memory_per_card(&out.join("report.json"))));
    }
    report.add_all(optimizer(&programs, options));
    report.add_all(training(&programs, options));
    if num_gpus > 1 {
        several_gpus(&programs, options, num_gpus, &mut report);
    } else {
        report.skip("NCCL between GPUs", "there is one GPU");
    }
    println!("{report}");
    let path = options.out.join("gpu-check.json");
    std::fs::write(&path, serde_json::to_string_pretty(&report.rows)?)?;
    println!("logs and reports are in {}", options.out.display());
    Ok(report.is_good())
}

/// An optimizer step, ours and PyTorch's.
fn optimizer(programs: &Programs, options: &Options) -> Vec<report::Row> {
    let elements = optimizer::ELEMENTS.to_string();
    let name = format!("AdamW step, {elements} elements of f32");
    let arguments = ["adamw_step.py", "--elements", &elements];
    vec![
        programs.measure(&name, Measurement::Adamw),
        programs
            .run_python("AdamW step in PyTorch, fused", options, &arguments)
            .saying(findings::pytorch),
    ]
}

/// A training step, ours and PyTorch's, of the same model on the same data.
fn training(programs: &Programs, options: &Options) -> Vec<report::Row> {
    let shape = ["--steps", "30", "--warmup", "10"];
    let (json, text) = (
        options.out.join("bench-train.json"),
        options.out.join("text"),
    );
    let (ours, text) = (json.to_string_lossy(), text.to_string_lossy());
    if let Err(e) = std::fs::write(&*text, lipsum::LIBER_PRIMUS) {
        return vec![report::Row::failed("training", format!("{text}: {e}"))];
    }
    let mut arguments = vec!["--device", "cuda", "--ranks", "1", "--data", &text];
    arguments.extend(["--strategies", "ddp", "--json", &ours]);
    arguments.extend(shape);
    let ours = programs.run("training step, 1 rank", "bench-train", &arguments);
    let mut rows = vec![ours.saying(|_| findings::bench_train(&json))];
    let mut arguments = vec!["gpt_train.py", "--device", "cuda", "--data", &text];
    arguments.extend(shape);
    let theirs = programs.run_python("training step in PyTorch", options, &arguments);
    rows.push(theirs.saying(findings::pytorch));
    rows
}

/// Ranks with a GPU each.
fn several_gpus(programs: &Programs, options: &Options, num_gpus: usize, report: &mut Report) {
    #[cfg(feature = "nccl")]
    {
        let name = format!("all_reduce over NCCL, {num_gpus} GPUs");
        report.add(programs.measure(&name, Measurement::AllReduce));
        let n = num_gpus.min(8);
        for strategy in ["ddp", "zero1", "zero2"] {
            let name = format!("{strategy} over NCCL, {n} processes with a GPU each");
            let out = options.out.join(format!("nccl-{strategy}"));
            let folder = out.to_string_lossy();
            let arguments = ["--strategies", strategy, "--out", &folder];
            let row = programs.run_ranks(&name, n, "memory-per-card", &arguments);
            report.add(row.saying(|_| findings::memory_per_card(&out.join("report.json"))));
        }
    }
    #[cfg(not(feature = "nccl"))]
    {
        let _ = (programs, options, num_gpus);
        report.skip("NCCL between GPUs", "this build has no feature `nccl`");
    }
}
