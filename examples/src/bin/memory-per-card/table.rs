//! The report as text.

use comfy_table::Table;
use dp_examples::table::{add_row, mib, new_table, thousands};
use dp_zero::{BytesPerElement, ModelStates, Sharding};

use crate::report::{Report, StrategyReport};

/// Prints the whole report.
pub fn print(report: &Report) {
    println!(
        "\nGPT with {} parameters in {} on {} ranks; {} steps of {} x {} tokens per rank; seed {}\n",
        thousands(report.num_params as u64),
        report.precision(),
        report.world_size,
        report.strategies.first().map_or(0, |s| s.losses.len()),
        report.model.batch,
        report.model.context,
        report.seed
    );
    println!("Memory per card, MiB:");
    println!("{}\n", memory_table(report));
    if let Some(table) = driver_table(report) {
        println!("GPU memory by the driver, all ranks of a GPU together, MiB:");
        println!("{table}\n");
    }
    println!("Training:");
    println!("{}\n", training_table(report));
    println!(
        "Model states per card in mixed precision with Adam, GB (estimate; zero3 has no trainer yet):"
    );
    println!("{}\n", estimate_table());
}

fn memory_table(report: &Report) -> Table {
    let mut table = new_table(&[
        "strategy",
        "rank",
        "parameters",
        "gradients",
        "optimizer",
        "communic.",
        "activ.+temp. peak",
        "total peak",
        "predicted states",
        "bytes/param",
        "saved",
    ]);
    let ddp = report.strategies.iter().find(|s| s.name == "ddp");
    for strategy in &report.strategies {
        for rank in &strategy.ranks {
            let states = rank.model_states();
            let saved = ddp.map_or("-".to_string(), |ddp| {
                format!("{:.2} x", ddp.model_states() as f64 / states as f64)
            });
            add_row(
                &mut table,
                [
                    strategy.name.to_string(),
                    rank.rank.to_string(),
                    mib(rank.parameters),
                    mib(rank.gradients),
                    mib(rank.optimizer),
                    mib(rank.communication),
                    mib(rank.activations_peak),
                    mib(rank.peak),
                    mib(rank.predicted.total()),
                    format!("{:.2}", states as f64 / report.num_params as f64),
                    saved,
                ],
            );
        }
    }
    table
}

/// What the driver has counted; `None` on the CPU.
fn driver_table(report: &Report) -> Option<Table> {
    let mut table = new_table(&[
        "strategy",
        "rank",
        "used",
        "used peak",
        "reserved peak",
        "of the GPU",
    ]);
    let mut rows = 0;
    for strategy in &report.strategies {
        for rank in &strategy.ranks {
            let Some(gpu) = &rank.gpu else { continue };
            rows += 1;
            add_row(
                &mut table,
                [
                    strategy.name.to_string(),
                    rank.rank.to_string(),
                    mib(gpu.used),
                    mib(gpu.used_peak),
                    mib(gpu.reserved_peak),
                    mib(gpu.total),
                ],
            );
        }
    }
    (rows > 0).then_some(table)
}

fn training_table(report: &Report) -> Table {
    let mut table = new_table(&[
        "strategy",
        "first loss",
        "last loss",
        "tokens/s",
        "bytes sent per rank and step",
        "by formula",
        "sha256 of the parameters",
    ]);
    for s in &report.strategies {
        let loss = |l: Option<&f64>| l.map_or("-".to_string(), |l| format!("{l:.6}"));
        add_row(
            &mut table,
            [
                s.name.to_string(),
                loss(s.losses.first()),
                loss(s.losses.last()),
                format!("{:.0}", s.tokens_per_second),
                thousands(s.bytes_sent_per_step),
                thousands(s.bytes_sent_predicted),
                format!("{}...", &s.params_sha256[..16]),
            ],
        );
    }
    table
}

/// Parameter counts and card counts of the estimate.
pub const ESTIMATED_PARAMS: [(&str, u64); 3] = [
    ("1.5B", 1_500_000_000),
    ("7.5B", 7_500_000_000),
    ("70B", 70_000_000_000),
];
pub const ESTIMATED_RANKS: [u64; 3] = [4, 64, 1024];

fn estimate_table() -> Table {
    let mut header = vec!["parameters", "cards"];
    header.extend(Sharding::ALL.map(Sharding::name));
    let mut table = new_table(&header);
    for (label, num_params) in ESTIMATED_PARAMS {
        for ranks in ESTIMATED_RANKS {
            let mut row = vec![label.to_string(), ranks.to_string()];
            row.extend(Sharding::ALL.map(|s| gigabytes(num_params, ranks, s)));
            add_row(&mut table, row);
        }
    }
    table
}

/// Model states per card in units of 10^9 bytes, as the ZeRO paper gives them.
pub fn gigabytes(num_params: u64, ranks: u64, sharding: Sharding) -> String {
    let states = ModelStates::estimate(num_params, ranks, sharding, BytesPerElement::MIXED_ADAM);
    let gigabytes = states.total() as f64 / 1e9;
    let digits = if gigabytes < 1.0 { 3 } else { 1 };
    format!("{gigabytes:.digits$}")
}

/// One line when a strategy is done.
pub fn summary(strategy: &StrategyReport) -> String {
    let (first, last) = (strategy.losses.first(), strategy.losses.last());
    format!(
        "{:6} loss {:.4} -> {:.4}, model states {} MiB per card, total peak {} MiB",
        strategy.name,
        first.unwrap_or(&f64::NAN),
        last.unwrap_or(&f64::NAN),
        mib(strategy.model_states()),
        mib(strategy.peak()),
    )
}
