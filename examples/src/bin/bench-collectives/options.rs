//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use candle_core::DType;
use clap::{Parser, ValueEnum};
use dp_examples::options::{positive, writable};

/// Measures collectives between ranks: threads, or processes under mpirun.
#[derive(Debug, Clone, Parser)]
#[command(name = "bench-collectives", version)]
pub struct Options {
    /// Number of ranks that are threads; under a launcher its number of processes counts
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub ranks: u16,
    /// Collectives to measure, in this order
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "all_reduce,reduce_scatter,all_gather,broadcast"
    )]
    pub ops: Vec<Op>,
    /// Smallest size in bytes; K and M stand for 1024 and 1024 x 1024
    #[arg(long, default_value = "4K", value_parser = bytes)]
    pub min_bytes: usize,
    /// Largest size in bytes
    #[arg(long, default_value = "64M", value_parser = bytes)]
    pub max_bytes: usize,
    /// Each size is so many times the one before
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(2..))]
    pub factor: u16,
    /// Type of the elements
    #[arg(long, default_value = "f32")]
    pub dtype: Number,
    /// Time for each row, in milliseconds; there are at least five measurements whatever they take
    #[arg(long, default_value_t = 500, value_parser = positive)]
    pub budget_ms: usize,
    /// File for the report
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// A collective, by NCCL's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum Op {
    /// The sum, on all ranks
    AllReduce,
    /// The sum, slice r on rank r
    ReduceScatter,
    /// Slice r of rank r to all ranks
    AllGather,
    /// Rank 0's buffer to all ranks
    Broadcast,
}

impl Op {
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllGather => "all_gather",
            Self::Broadcast => "broadcast",
        }
    }

    /// `busbw / algbw` on `n` ranks, as nccl-tests defines it (its PERFORMANCE.md).
    pub fn bus_factor(self, n: usize) -> f64 {
        let others = (n - 1) as f64 / n as f64;
        match self {
            Self::AllReduce => 2.0 * others,
            Self::ReduceScatter | Self::AllGather => others,
            Self::Broadcast => 1.0,
        }
    }
}

/// The type of the elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum Number {
    F32,
    F64,
    F16,
    Bf16,
}

impl Number {
    pub fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F64 => DType::F64,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }

    pub fn name(self) -> &'static str {
        self.dtype().as_str()
    }
}

impl Options {
    /// Checks what the parser cannot see. The error is one line for the user.
    pub fn checked(self) -> anyhow::Result<Self> {
        anyhow::ensure!(
            self.min_bytes <= self.max_bytes,
            "--min-bytes: {} is more than --max-bytes, {}",
            self.min_bytes,
            self.max_bytes
        );
        let one_each = self.quantum();
        anyhow::ensure!(
            self.min_bytes >= one_each,
            "--min-bytes: {} is less than one {} for each of {} ranks, {one_each} bytes",
            self.min_bytes,
            self.dtype.name(),
            self.ranks
        );
        if let Some(path) = &self.json {
            writable("--json", path)?;
        }
        Ok(self)
    }

    /// The sizes to measure: multiples of an element for each rank, as reduce_scatter and all_gather need them.
    pub fn sizes(&self) -> impl Iterator<Item = usize> {
        let quantum = self.quantum();
        let (max, factor) = (self.max_bytes, usize::from(self.factor));
        std::iter::successors(Some(self.min_bytes), move |s| s.checked_mul(factor))
            .take_while(move |s| *s <= max)
            .map(move |s| s / quantum * quantum)
    }

    pub fn budget(&self) -> Duration {
        Duration::from_millis(self.budget_ms as u64)
    }

    fn quantum(&self) -> usize {
        usize::from(self.ranks) * self.dtype.dtype().size_in_bytes()
    }
}

/// The largest buffer: with 256 ranks, a source and a copy for each, 2 TiB; the system says what it has.
const LARGEST: usize = 4 << 30;

/// `4096`, `4K`, `64M`.
fn bytes(text: &str) -> Result<usize, String> {
    let (digits, unit) = match text.strip_suffix(['K', 'k']) {
        Some(digits) => (digits, 1 << 10),
        None => match text.strip_suffix(['M', 'm']) {
            Some(digits) => (digits, 1 << 20),
            None => (text, 1),
        },
    };
    let number: usize = digits.parse().map_err(|e| format!("{e}"))?;
    match number.checked_mul(unit) {
        Some(0) => Err("must be at least 1".to_string()),
        Some(bytes) if bytes <= LARGEST => Ok(bytes),
        _ => Err(format!("must be at most {LARGEST} bytes")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_fit_all_ranks() -> anyhow::Result<()> {
        let line = "bench-collectives --ranks 3 --min-bytes 1K --max-bytes 20000";
        let options = Options::try_parse_from(line.split(' '))?.checked()?;
        let sizes: Vec<usize> = options.sizes().collect();
        assert_eq!(sizes, [1020, 4092, 16380]);
        Ok(())
    }

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        assert_eq!(Op::AllReduce.bus_factor(4), 1.5);
        assert_eq!(Op::AllGather.bus_factor(4), 0.75);
        assert_eq!(Op::ReduceScatter.bus_factor(1), 0.0);
        assert_eq!(Op::Broadcast.bus_factor(8), 1.0);
    }
}
