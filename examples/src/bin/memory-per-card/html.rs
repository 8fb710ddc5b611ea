//! The report as one page that needs no network: bars per card, loss curves, the tables.

use dp_examples::html::{self, Bar, legend, stacked_bars};
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
    const WIDTH: f64 = 640.0;
    const HEIGHT: f64 = 240.0;
    const LEFT: f64 = 46.0;
    const BOTTOM: f64 = 28.0;
    let finite = report
        .strategies
        .iter()
        .flat_map(|s| &s.losses)
        .filter(|l| l.is_finite());
    let (low, high) = finite.fold((f64::MAX, f64::MIN), |(low, high), l| {
        (low.min(*l), high.max(*l))
    });
    if low > high {
        return html! { p { "No finite loss to draw." } };
    }
    let (low, high) = (low.floor(), high.ceil().max(low.floor() + 1.0));
    let steps = report
        .strategies
        .iter()
        .map(|s| s.losses.len())
        .max()
        .unwrap_or(1);
    let x = |i: usize| LEFT + (WIDTH - LEFT - 10.0) * i as f64 / (steps.max(2) - 1) as f64;
    let y = |l: f64| 8.0 + (HEIGHT - BOTTOM - 8.0) * (high - l) / (high - low);
    let points = |s: &StrategyReport| {
        let finite = s.losses.iter().enumerate().filter(|(_, l)| l.is_finite());
        let points: Vec<String> = finite
            .map(|(i, l)| format!("{:.1},{:.1}", x(i), y(*l)))
            .collect();
        points.join(" ")
    };
    html! {
        ul.legend {
            @for (i, strategy) in report.strategies.iter().enumerate() {
                li { svg.dash viewBox="0 0 36 8" { line.(format!("curve{i}")) x1="0" y1="4" x2="36" y2="4" {} } (strategy.name) }
            }
        }
        svg.curves viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-label="loss over steps" {
            @for tick in low as i64..=high as i64 {
                line.grid x1=(LEFT) x2=(WIDTH - 10.0) y1=(y(tick as f64)) y2=(y(tick as f64)) {}
                text x=(LEFT - 8.0) y=(y(tick as f64) + 4.0) text-anchor="end" { (tick) }
            }
            text x=(LEFT) y=(HEIGHT - 6.0) { "step 1" }
            text x=(WIDTH - 10.0) y=(HEIGHT - 6.0) text-anchor="end" { "step " (steps) }
            @for (i, strategy) in report.strategies.iter().enumerate() {
                polyline.(format!("curve{i}")) points=(points(strategy)) {}
            }
        }
    }
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
