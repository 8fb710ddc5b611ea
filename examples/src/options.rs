//! What the command lines of several programs have in common: values that are checked, and messages of one line.

use std::process::ExitCode;

use candle_core::DType;
use clap::ValueEnum;
use dp_core::{Devices, GradAccumDType, World};
use dp_zero::Sharding;
use serde::Serialize;

use crate::closed_pipe;

/// Above this no size in these programs is meant to be; products of sizes below it fit in 64 bits.
pub const LARGEST: usize = 1 << 20;

/// A size of at least 1.
///
/// # Errors
/// What is wrong with `text`.
pub fn positive(text: &str) -> Result<usize, String> {
    match text.parse::<usize>() {
        Ok(0) => Err("must be at least 1".to_string()),
        Ok(value) if value > LARGEST => Err(format!("must be at most {LARGEST}")),
        Ok(value) => Ok(value),
        Err(e) => Err(e.to_string()),
    }
}

/// Refuses ranks that are processes, for programs that need the results of all ranks in one.
///
/// # Errors
/// For a world of several processes.
pub fn threads_only(world: World) -> anyhow::Result<World> {
    anyhow::ensure!(
        world.ranks_here().len() == world.world_size(),
        "the ranks of this program are threads of one process; start it once, without a launcher"
    );
    Ok(world)
}

/// A strategy that has a trainer, by its name.
///
/// # Errors
/// Other names.
pub fn strategy(name: &str) -> Result<Sharding, String> {
    match name.parse() {
        Err(_) | Ok(Sharding::Zero3) => Err("expected ddp, zero1 or zero2".to_string()),
        Ok(sharding) => Ok(sharding),
    }
}

/// The last layer's weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Head {
    /// The token embedding.
    Tied,
    /// Its own.
    Untied,
}

/// A dtype that can be trained, by its name.
///
/// # Errors
/// Other names.
pub fn dtype(name: &str) -> Result<DType, String> {
    match name {
        "f32" => Ok(DType::F32),
        "bf16" => Ok(DType::BF16),
        "f16" => Ok(DType::F16),
        _ => Err("expected f32, bf16 or f16".to_string()),
    }
}

/// Where ranks compute: `cpu`; `cuda`, which is the first GPU for all of them; or GPUs dealt out in turn, as in `cuda:0,1`.
///
/// # Errors
/// Other names.
pub fn devices(name: &str) -> Result<Devices, String> {
    let expected =
        || format!("expected cpu, cuda, or numbers of GPUs as in cuda:0,1, not `{name}`");
    match name.split_once(':') {
        None if name == "cpu" => Ok(Devices::Cpu),
        None if name == "cuda" => Ok(Devices::Cuda(vec![0])),
        Some(("cuda", ordinals)) => {
            let ordinals = ordinals.split(',').map(|o| o.trim().parse::<usize>());
            let ordinals = ordinals.collect::<Result<Vec<_>, _>>();
            ordinals.map(Devices::Cuda).map_err(|_| expected())
        }
        _ => Err(expected()),
    }
}

/// What gradients of 16-bit parameters are kept in, by its name.
///
/// # Errors
/// Other names.
pub fn grad_accum_dtype(name: &str) -> Result<GradAccumDType, String> {
    match name {
        "f32" => Ok(GradAccumDType::F32),
        "parameter" => Ok(GradAccumDType::Parameter),
        _ => Err("expected f32 or parameter".to_string()),
    }
}

/// Refuses a list of `--strategies` that has one twice.
///
/// # Errors
/// The first one that is there again.
pub fn distinct(strategies: &[Sharding]) -> anyhow::Result<()> {
    for (i, strategy) in strategies.iter().enumerate() {
        anyhow::ensure!(
            !strategies[..i].contains(strategy),
            "--strategies: {} is there twice",
            strategy.name()
        );
    }
    Ok(())
}

/// Candle's message without the backtrace that it adds where `RUST_BACKTRACE` is set.
pub fn one_line(error: &candle_core::Error) -> String {
    match error {
        candle_core::Error::WithBacktrace { inner, .. } => one_line(inner),
        other => other.to_string(),
    }
}

/// Runs a program: `check` its options, then `run` it; `run` is true if all that it checks holds. The exit code is 0 then,
/// 1 after a failure, 2 for options that cannot be; errors are one line on stderr.
pub fn exit_code<Job>(
    check: impl FnOnce() -> anyhow::Result<Job>,
    run: impl FnOnce(&Job) -> anyhow::Result<bool>,
) -> ExitCode {
    closed_pipe::end_quietly();
    let failed = |error: anyhow::Error, code: u8| {
        eprintln!("error: {error:#}");
        ExitCode::from(code)
    };
    match check() {
        Err(error) => failed(error, 2),
        Ok(job) => match run(&job) {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(error) => failed(error, 1),
        },
    }
}

/// Creates the file that an option names, or makes sure that it can be written, before the work begins.
///
/// # Errors
/// The option and the system's message.
pub fn writable(option: &str, path: &std::path::Path) -> anyhow::Result<()> {
    let file = std::fs::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path);
    file.map(drop)
        .map_err(|e| anyhow::anyhow!("{option}: cannot write {}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_by_name() {
        assert_eq!(devices("cpu"), Ok(Devices::Cpu));
        assert_eq!(devices("cuda"), Ok(Devices::Cuda(vec![0])));
        assert_eq!(devices("cuda:2"), Ok(Devices::Cuda(vec![2])));
        assert_eq!(devices("cuda:0,1"), Ok(Devices::Cuda(vec![0, 1])));
        for wrong in ["", "gpu", "cuda:", "cuda:x", "cpu:0", "cuda:0,"] {
            assert!(
                devices(wrong).is_err_and(|e| e.contains("cuda:0,1")),
                "{wrong}"
            );
        }
    }
}
