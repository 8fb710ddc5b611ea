//! The report as one page that needs no network: bars per card, loss curves, the tables.

use dp_examples::html::{self, Bar, legend, stacked_bars};
use dp_examples::line_chart::{Curve, chart};
use dp_examples::table::{mib, thousands};
use dp_zero::Sharding;
use maud::{Markup, html};

use crate::report::{RankReport, Report, StrategyReport};
use crate::table::{ESTIMATED_PARAMS, ESTIMATED_RANKS, gigabytes};

/// The whole page.
pub fn page(report: &Report) -> String {
    let title = format!("Memory per card, {} ranks", report.world_size);
    let body = html! {
        p {
            "The same GPT (" (thousands(report.num_params as u64)) " parameters, " (report.precision()) ", AdamW) on the same "
            (thousands(report.model.text_bytes as u64)) " bytes of text, once per strategy. Seed " (report.seed) "."
        }
        h2 { "What each card holds" }
        (legend())
        (memory_bars(report))
        p.note {
            "Model states are counted where they are allocated. Activations and temporaries are the measured peak of "
            "everything else on the heap. The mark is the measured peak of the whole heap; it lies inside the bar where "
            "the parts peak at different moments."
        }
        (memory_table(report))
        h2 { "Loss" }
        (loss_curves(report))
        (training_table(report))
        h2 { "Checks" }
        ul.checks {
            @for (statement, holds) in report.checks() {
                li.failed[!holds] { (if holds { "holds: " } else { "FAILED: " }) (statement) }
            }
        }
        h2 { "Larger models: model states per card, GB" }
        p.note {
            "Estimate for mixed precision with Adam (2 + 2 + 12 bytes per parameter), after the ZeRO paper, "
            "arXiv 1910.02054. There is no trainer for zero3 yet."
        }
        (estimate_table())
    };
    html::page(&title, &body)
}

/// One bar per strategy and rank.
fn memory_bars(report: &Report) -> Markup {
    let bar = |name: &str, r: &RankReport| Bar {
        label: format!("{name} rank {}", r.rank),
        parts: [
            r.parameters,
            r.gradients,
            r.optimizer,
            r.communication,
            r.activations_peak,
        ],
        mark: Some(r.peak),
        total: r.peak,
    };
    let group = |s: &StrategyReport| s.ranks.iter().map(|r| bar(s.name, r)).collect();
    let groups: Vec<Vec<Bar>> = report.strategies.iter().map(group).collect();
    stacked_bars(&groups)
}

/// Losses over steps. Equal curves are drawn over each other, with dashes that leave the ones below visible.
fn loss_curves(report: &Report) -> Markup {
    let curve = |s: &StrategyReport| Curve {
        name: s.name.to_string(),
        points: (1..).map(f64::from).zip(s.losses.iter().copied()).collect(),
    };
    let curves: Vec<Curve> = report.strategies.iter().map(curve).collect();
    chart("loss over steps", &curves)
}

fn memory_table(report: &Report) -> Markup {
    let ddp = report.strategies.iter().find(|s| s.name == "ddp");
    html! {
        div.scroll { table {
            thead { tr {
                th { "strategy" } th { "rank" } th { "parameters" } th { "gradients" } th { "optimizer" } th { "communication" }
                th { "activations + temporaries" } th { "total peak" } th { "predicted states" } th { "bytes per parameter" } th { "saved" }
            } }
            tbody {
                @for strategy in &report.strategies { @for rank in &strategy.ranks {
                    @let states = rank.model_states() as f64;
                    tr {
                        td { (strategy.name) } td { (rank.rank) }
                        td { (mib(rank.parameters)) } td { (mib(rank.gradients)) } td { (mib(rank.optimizer)) }
                        td { (mib(rank.communication)) } td { (mib(rank.activations_peak)) } td { (mib(rank.peak)) }
                        td { (mib(rank.predicted.total())) } td { (format!("{:.2}", states / report.num_params as f64)) }
                        td { @match ddp {
                            Some(ddp) => (format!("{:.2} x", ddp.model_states() as f64 / states)),
                            None => "-",
                        } }
                    }
                } }
            }
        } }
        p.note { "Sizes in MiB. Saved: model states of ddp over model states of this strategy." }
    }
}

fn training_table(report: &Report) -> Markup {
    html! {
        div.scroll { table {
            thead { tr {
                th { "strategy" } th { "first loss" } th { "last loss" } th { "tokens/s" } th { "bytes sent per rank and step" }
                th { "by formula" } th { "sha256 of the parameters" }
            } }
            tbody { @for s in &report.strategies { tr {
                td { (s.name) }
                td { (format!("{:.6}", s.losses.first().unwrap_or(&f64::NAN))) }
                td { (format!("{:.6}", s.losses.last().unwrap_or(&f64::NAN))) }
                td { (format!("{:.0}", s.tokens_per_second)) }
                td { (thousands(s.bytes_sent_per_step)) } td { (thousands(s.bytes_sent_predicted)) }
                td title=(s.params_sha256) { code { (&s.params_sha256[..16]) "..." } }
            } } }
        } }
    }
}

fn estimate_table() -> Markup {
    html! {
        div.scroll { table {
            thead { tr { th { "parameters" } th { "cards" } @for s in Sharding::ALL { th { (s.name()) } } } }
            tbody { @for (label, num_params) in ESTIMATED_PARAMS { @for ranks in ESTIMATED_RANKS { tr {
                td { (label) } td { (ranks) }
                @for s in Sharding::ALL { td { (gigabytes(num_params, ranks, s)) } }
            } } } }
        } }
    }
}
