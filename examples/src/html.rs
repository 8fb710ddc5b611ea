//! Pages that need no network: what reports of several programs show alike.

use maud::{DOCTYPE, Markup, PreEscaped, html};

use crate::table::size;

const STYLE: &str = include_str!("html.css");

/// A whole page, in the colours that the reader's system asks for.
pub fn page(title: &str, body: &Markup) -> String {
    let page = html! {
        (DOCTYPE)
        html lang="en" {
            head {
                meta charset="utf-8";
                meta name="viewport" content="width=device-width, initial-scale=1";
                title { (title) }
                style { (PreEscaped(STYLE)) }
            }
            body {
                h1 { (title) }
                (body)
            }
        }
    };
    page.into_string()
}

/// What a card's memory is for: title and CSS class, in the order of [`Bar::parts`].
pub const PARTS: [(&str, &str); 5] = [
    ("parameters", "parameters"),
    ("gradients", "gradients"),
    ("optimizer state", "optimizer"),
    ("communication buffers", "communication"),
    ("activations + temporaries, peak", "activations"),
];

/// One card's memory.
pub struct Bar {
    /// Stands before the bar.
    pub label: String,
    /// Bytes of each of [`PARTS`].
    pub parts: [u64; 5],
    /// Bytes where a line crosses the bar.
    pub mark: Option<u64>,
    /// Bytes that stand after the bar.
    pub total: u64,
}

/// The colours of [`PARTS`].
pub fn legend() -> Markup {
    html! {
        ul.legend {
            @for (title, class) in PARTS {
                li { span.swatch.(class) {} (title) }
            }
        }
    }
}

/// Horizontal stacked bars on one scale, with gaps between groups.
pub fn stacked_bars(groups: &[Vec<Bar>]) -> Markup {
    const LABEL: f64 = 110.0;
    const WIDTH: f64 = 640.0;
    const BAR: f64 = 20.0;
    const ROW: f64 = 26.0;
    const GAP: f64 = 12.0;
    let end = |bar: &Bar| bar.parts.iter().sum::<u64>().max(bar.mark.unwrap_or(0));
    let mut bars = Vec::new();
    let mut height = 0.0;
    for group in groups {
        for bar in group {
            bars.push((bar, height));
            height += ROW;
        }
        height += GAP;
    }
    let longest = bars.iter().map(|(bar, _)| end(bar)).max();
    let scale = (WIDTH - LABEL - 90.0) / longest.unwrap_or(1).max(1) as f64;
    let x = |bytes: u64| LABEL + bytes as f64 * scale;
    html! {
        div.scroll {
            svg.bars viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label="memory per card, stacked by category" {
                @for (bar, y) in bars {
                    text x=(LABEL - 8.0) y=(y + BAR * 0.72) text-anchor="end" { (bar.label) }
                    @for (i, ((title, class), bytes)) in PARTS.iter().zip(bar.parts).enumerate() {
                        @let before = bar.parts[..i].iter().sum();
                        rect.(*class) x=(x(before)) y=(y) width=(bytes as f64 * scale) height=(BAR) {
                            title { (title) ": " (size(bytes)) }
                        }
                    }
                    @if let Some(mark) = bar.mark {
                        line.peak x1=(x(mark)) x2=(x(mark)) y1=(y - 2.0) y2=(y + BAR + 2.0) {}
                    }
                    text x=(x(end(bar)) + 6.0) y=(y + BAR * 0.72) { (size(bar.total)) }
                }
            }
        }
    }
}
