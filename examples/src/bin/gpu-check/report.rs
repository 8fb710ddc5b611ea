//! What came out.

use std::fmt;
use std::time::Duration;

use dp_examples::table::{add_row, new_table};
use serde::Serialize;

/// One thing that was done, or not.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    pub name: String,
    pub outcome: Outcome,
    pub seconds: f64,
    /// What it has found, in a line.
    pub detail: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    Ok,
    Failed,
    Skipped,
}

impl Row {
    pub fn ok(name: &str, time: Duration, detail: impl Into<String>) -> Self {
        Self {
            name: name.to_string(),
            outcome: Outcome::Ok,
            seconds: time.as_secs_f64(),
            detail: detail.into(),
        }
    }

    pub fn failed(name: &str, detail: impl Into<String>) -> Self {
        Self {
            outcome: Outcome::Failed,
            ..Self::ok(name, Duration::ZERO, detail)
        }
    }

    pub fn skipped(name: &str, why: impl Into<String>) -> Self {
        Self {
            outcome: Outcome::Skipped,
            ..Self::ok(name, Duration::ZERO, why)
        }
    }

    /// With what `finding` makes of the program's last line, if it has ended well.
    pub fn saying(mut self, finding: impl FnOnce(&str) -> Option<String>) -> Self {
        if self.outcome == Outcome::Ok
            && let Some(detail) = finding(&self.detail)
        {
            self.detail = detail;
        }
        self
    }
}

#[derive(Debug, Default)]
pub struct Report {
    pub rows: Vec<Row>,
}

impl Report {
    /// Says it at once, too.
    pub fn add(&mut self, row: Row) {
        println!(
            "{:?}: {} ({:.1} s): {}",
            row.outcome, row.name, row.seconds, row.detail
        );
        self.rows.push(row);
    }

    pub fn add_all(&mut self, rows: Vec<Row>) {
        rows.into_iter().for_each(|row| self.add(row));
    }

    pub fn skip(&mut self, name: &str, why: &str) {
        self.add(Row::skipped(name, why));
    }

    pub fn is_good(&self) -> bool {
        self.rows.iter().all(|row| row.outcome != Outcome::Failed)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = new_table(&["what", "outcome", "s", "detail"]);
        for row in &self.rows {
            let outcome = match row.outcome {
                Outcome::Ok => "ok",
                Outcome::Failed => "FAILED",
                Outcome::Skipped => "skipped",
            };
            let cells = [
                row.name.clone(),
                outcome.to_string(),
                format!("{:.1}", row.seconds),
                row.detail.clone(),
            ];
            add_row(&mut table, cells);
        }
        write!(f, "{table}")
    }
}
