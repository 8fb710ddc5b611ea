//! The plan as text.

use comfy_table::Table;
use dp_examples::table::{add_row, new_table, size, thousands};

use crate::report::{Choice, Report, Row};

/// What one number of a table means.
#[derive(Clone, Copy)]
pub struct Unit {
    pub name: &'static str,
    bytes: f64,
}

impl Unit {
    /// 10^9 bytes where the paper's formulas speak, as in the paper; else MiB, or GiB if there is much.
    pub fn of(report: &Report) -> Self {
        let largest = report.rows.iter().map(|r| r.total).max();
        let (name, bytes) = match report.model {
            None => ("GB", 1e9),
            Some(_) if largest < Some(10 << 30) => ("MiB", f64::from(1 << 20)),
            Some(_) => ("GiB", f64::from(1 << 30)),
        };
        Self { name, bytes }
    }

    /// Two digits after the point, and more below 1; `-` for what is not known.
    pub fn text(self, bytes: impl Into<Option<u64>>) -> String {
        let Some(bytes) = bytes.into() else {
            return "-".to_string();
        };
        let number = bytes as f64 / self.bytes;
        match number {
            0.0 => "0".to_string(),
            n if n < 1.0 => format!("{n:.3}"),
            n => format!("{n:.2}"),
        }
    }
}

/// Prints the whole plan.
pub fn print(report: &Report) {
    println!("{}\n", subject(report));
    println!(
        "Memory per card, {}; bytes sent per step:",
        Unit::of(report).name
    );
    println!("{}", table(report));
    for note in notes(report) {
        println!("{note}");
    }
    let choices = choices(report);
    if !choices.is_empty() {
        println!("\n{}", choices.join("\n"));
    }
}

/// What is planned, in a line.
pub fn subject(report: &Report) -> String {
    let params = thousands(report.num_params);
    let mut precision = vec![format!("gradients in {}", report.grad_dtype)];
    if let Some(dtype) = report.communication_dtype {
        precision.push(format!("sent in {dtype}"));
    }
    let settings = format!(
        "{params} parameters in {} ({}), {}",
        report.dtype,
        precision.join(", "),
        report.optimizer.text()
    );
    match &report.model {
        None => format!("A model with {settings}"),
        Some(m) => format!(
            "{} of {} layers, width {}, {} heads, vocabulary {}: {settings}; {}",
            m.config.architecture(),
            m.config.layers(),
            m.config.width(),
            m.config.heads(),
            m.config.vocab_size(),
            batches(report, m.sequence_len)
        ),
    }
}

/// What each rank takes: lists in the order of the numbers of ranks, where that differs.
fn batches(report: &Report, len: usize) -> String {
    let mut batches: Vec<_> = report
        .rows
        .iter()
        .filter_map(|r| Some((r.ranks, r.batch?.size, r.batch?.accumulation_steps)))
        .collect();
    batches.dedup();
    let list = |of: fn(&(usize, usize, usize)) -> usize| {
        let numbers: Vec<String> = batches.iter().map(|b| of(b).to_string()).collect();
        match numbers.iter().all(|n| *n == numbers[0]) {
            true => numbers.into_iter().next().unwrap_or_default(),
            false => numbers.join(", "),
        }
    };
    let (sizes, steps) = (list(|b| b.1), list(|b| b.2));
    let mut text = format!("{sizes} x {len} tokens per rank and micro-batch");
    if steps != "1" {
        text += &format!(", {steps} micro-batches per step");
    }
    if sizes.contains(',') || steps.contains(',') {
        text += &format!(", on {} ranks", list(|b| b.0));
    }
    text
}

fn table(report: &Report) -> Table {
    let mut table = new_table(&HEADER);
    for row in &report.rows {
        add_row(&mut table, cells(row, Unit::of(report)));
    }
    table
}

/// Of the columns of [`cells`].
pub const HEADER: [&str; 11] = [
    "ranks",
    "strategy",
    "parameters",
    "gradients",
    "optimizer",
    "communic.",
    "activations",
    "total",
    "sent per step",
    "buckets",
    "basis",
];

/// A row of the table.
pub fn cells(row: &Row, unit: Unit) -> [String; 11] {
    [
        row.ranks.to_string(),
        match row.configured {
            true => format!("{} *", row.strategy),
            false => row.strategy.to_string(),
        },
        unit.text(row.parameters),
        unit.text(row.gradients),
        unit.text(row.optimizer),
        unit.text(row.communication),
        unit.text(row.activations),
        unit.text(row.total),
        thousands(row.bytes_sent_per_step),
        row.num_buckets.map_or("-".to_string(), |n| n.to_string()),
        row.basis.text().to_string(),
    ]
}

/// What a reader of the table must know.
pub fn notes(report: &Report) -> Vec<String> {
    let mut notes = Vec::new();
    match report.model {
        None => {
            notes.push(
                "Activations, communication buffers and buckets are not known from a count (-), and not in the total."
                    .to_string(),
            );
            if report.dtype != "f32" && report.grad_dtype != "f32" {
                notes.push(format!(
                    "Gradients are kept in {}, as in the ZeRO paper; trainers keep them in f32 unless told otherwise \
                     (--grad-accum-dtype f32).",
                    report.grad_dtype
                ));
            }
        }
        Some(_) => notes.push(
            "Exact: what the trainer will count, to the byte. Activations are an estimate in every row.".to_string(),
        ),
    }
    if report.rows.iter().any(|r| r.configured) {
        notes.push("* the strategy of the configuration.".to_string());
    }
    let while_made =
        |r: &&Row| r.set_up.is_some_and(|s| r.parameters + s == r.total) && r.gradients > 0;
    if let Some(row) = report.rows.iter().find(while_made) {
        notes.push(format!(
            "{} on {} ranks is fullest while the trainer is made: parameters, and the largest of them as it comes from rank 0.",
            row.strategy, row.ranks
        ));
    }
    notes
}

/// The answer to `--card`, a line for each number of ranks.
pub fn choices(report: &Report) -> Vec<String> {
    let Some(card) = report.card.map(size) else {
        return Vec::new();
    };
    let unit = Unit::of(report);
    let answer = |choice: &Choice| match (choice.smallest, choice.zero3_total) {
        (Some(strategy), _) => {
            format!("{strategy} is the smallest stage that fits a card of {card}")
        }
        (None, Some(zero3)) if Some(zero3) <= report.card => format!(
            "none of ddp, zero1, zero2 fits a card of {card}; zero3 would with {} {} (estimate), but has no trainer",
            unit.text(zero3),
            unit.name
        ),
        (None, zero3) => format!(
            "none fits a card of {card}; zero3 would take {} {} (estimate)",
            unit.text(zero3),
            unit.name
        ),
    };
    let line = |choice: &Choice| {
        let ranks = match choice.ranks {
            1 => "1 rank".to_string(),
            n => format!("{n} ranks"),
        };
        format!("{ranks}: {}", answer(choice))
    };
    report.choices.iter().map(line).collect()
}
