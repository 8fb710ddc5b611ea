//! What is measured: the content of the JSON file, and the lines on the terminal.

use std::fmt;

use dp_examples::machine::Provenance;
use serde::Serialize;

use crate::measure::Times;
use crate::options::{Op, Options};

/// The whole report.
#[derive(Debug, Serialize)]
pub struct Report {
    pub rows: Vec<Row>,
    pub ranks: u16,
    pub dtype: &'static str,
    #[serde(flatten)]
    pub provenance: Provenance,
}

/// One operation at one size. GB are 10^9 bytes, as in nccl-tests.
#[derive(Debug, Serialize)]
pub struct Row {
    pub op: &'static str,
    pub bytes: usize,
    /// Median time of a call.
    pub time_us: f64,
    pub algbw_gbs: f64,
    pub busbw_gbs: f64,
    /// Time in which as many threads each copy `bytes`, over `time_us`.
    pub fraction_of_memcpy: f64,
    /// The former.
    pub memcpy_us: f64,
    /// The shortest turn: what a machine does that does nothing else.
    pub min_us: f64,
    pub memcpy_min_us: f64,
    /// Values that the medians are of.
    pub turns: usize,
}

impl Row {
    pub fn new(op: Op, ranks: usize, times: &Times) -> Self {
        let algbw_gbs = times.bytes as f64 / times.collective / 1e9;
        Self {
            op: op.name(),
            bytes: times.bytes,
            time_us: times.collective * 1e6,
            algbw_gbs,
            busbw_gbs: algbw_gbs * op.bus_factor(ranks),
            fraction_of_memcpy: times.memcpy / times.collective,
            memcpy_us: times.memcpy * 1e6,
            min_us: times.collective_min * 1e6,
            memcpy_min_us: times.memcpy_min * 1e6,
            turns: times.turns,
        }
    }
}

/// The line above the rows.
pub fn header(options: &Options) -> String {
    format!(
        "{} ranks, {}\n{:14} {:>10} {:>11} {:>10} {:>10} {:>11} {:>11} {:>6}",
        options.ranks,
        options.dtype.name(),
        "op",
        "bytes",
        "time us",
        "algbw GB/s",
        "busbw GB/s",
        "% of memcpy",
        "min us",
        "turns"
    )
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:14} {:>10} {:>11.2} {:>10.3} {:>10.3} {:>11.1} {:>11.2} {:>6}",
            self.op,
            self.bytes,
            self.time_us,
            self.algbw_gbs,
            self.busbw_gbs,
            100.0 * self.fraction_of_memcpy,
            self.min_us,
            self.turns
        )
    }
}
