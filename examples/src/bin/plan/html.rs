//! The plan as one page that needs no network.

use dp_examples::html::{self, Bar, legend, stacked_bars};
use dp_examples::table::size;
use dp_zero::Sharding;
use maud::{Markup, html};

use crate::report::{Report, Row};
use crate::table::{HEADER, Unit, cells, choices, notes, subject};

/// The whole page.
pub fn page(report: &Report) -> String {
    let body = html! {
        p { (subject(report)) }
        h2 { "What each card would hold" }
        (legend())
        (bars(report))
        p.note {
            "One scale for all bars. Activations are an estimate, and zero3 is one altogether: there is no trainer for it."
            @if let Some(card) = report.card { " The mark is a card of " (size(card)) "." }
        }
        (table(report))
        @for note in notes(report) { p.note { (note) } }
        @if report.card.is_some() {
            h2 { "What fits" }
            ul { @for choice in choices(report) { li { (choice) } } }
        }
    };
    html::page("Memory per card, planned", &body)
}

/// One bar per strategy, grouped by the number of ranks.
fn bars(report: &Report) -> Markup {
    let bar = |row: &Row| Bar {
        label: format!("{} on {}", row.strategy, row.ranks),
        parts: [
            row.parameters,
            row.gradients,
            row.optimizer,
            row.communication.unwrap_or(0),
            row.activations.unwrap_or(0),
        ],
        mark: report.card,
        total: row.total,
    };
    let groups = report.rows.chunks(Sharding::ALL.len());
    let groups: Vec<Vec<Bar>> = groups.map(|rows| rows.iter().map(bar).collect()).collect();
    stacked_bars(&groups)
}

fn table(report: &Report) -> Markup {
    let unit = Unit::of(report);
    html! {
        div.scroll { table {
            thead { tr { @for title in HEADER { th { (title) } } } }
            tbody { @for row in &report.rows { tr {
                @for cell in cells(row, unit) { td { (cell) } }
            } } }
        } }
        p.note { "Sizes in " (unit.name) ", sent per step in bytes." }
    }
}
