//! Curves over steps, as SVG that takes its colours from the page.

use maud::{Markup, html};

/// One curve.
#[derive(Debug, Clone)]
pub struct Curve {
    /// Its name in the legend.
    pub name: String,
    /// Step and value; values that are not finite are left out.
    pub points: Vec<(f64, f64)>,
}

const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 240.0;
const LEFT: f64 = 64.0;
const RIGHT: f64 = 10.0;
const TOP: f64 = 8.0;
const BOTTOM: f64 = 28.0;

/// The curves, with a legend if there are several; `label` says what is drawn. The `i`-th has the class `curve{i}`: classes
/// differ in colour and dashes, so equal curves stay visible.
pub fn chart(label: &str, curves: &[Curve]) -> Markup {
    let finite = |c: &Curve| {
        let points = c.points.iter().copied().filter(|(_, y)| y.is_finite());
        points.collect::<Vec<_>>()
    };
    let drawn: Vec<(&Curve, Vec<(f64, f64)>)> = curves.iter().map(|c| (c, finite(c))).collect();
    let all = || drawn.iter().flat_map(|(_, points)| points);
    let bounds = |of: fn(&(f64, f64)) -> f64| {
        all().map(of).fold((f64::MAX, f64::MIN), |(low, high), v| {
            (low.min(v), high.max(v))
        })
    };
    if all().next().is_none() {
        return html! { p.note { "Nothing to draw of " (label) "." } };
    }
    let ((first, last), (low, high)) = (bounds(|p| p.0), bounds(|p| p.1));
    let ticks = ticks(low, high);
    let (low, high) = (ticks[0], ticks[ticks.len() - 1]);
    let x = |step: f64| LEFT + (WIDTH - LEFT - RIGHT) * (step - first) / (last - first).max(1.0);
    let y = |value: f64| TOP + (HEIGHT - TOP - BOTTOM) * (high - value) / (high - low);
    let points = |points: &[(f64, f64)]| {
        let points: Vec<String> = points
            .iter()
            .map(|(step, value)| format!("{:.1},{:.1}", x(*step), y(*value)))
            .collect();
        points.join(" ")
    };
    html! {
        @if drawn.len() > 1 {
            ul.legend {
                @for (i, (curve, _)) in drawn.iter().enumerate() {
                    li { svg.dash viewBox="0 0 36 8" { line.(format!("curve{i}")) x1="0" y1="4" x2="36" y2="4" {} } (curve.name) }
                }
            }
        }
        div.scroll {
            svg.curves viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img" aria-label=(label) {
                @for tick in &ticks {
                    line.grid x1=(LEFT) x2=(WIDTH - RIGHT) y1=(y(*tick)) y2=(y(*tick)) {}
                    text x=(LEFT - 8.0) y=(y(*tick) + 4.0) text-anchor="end" { (number(*tick)) }
                }
                text x=(LEFT) y=(HEIGHT - 6.0) { "step " (first) }
                text x=(WIDTH - RIGHT) y=(HEIGHT - 6.0) text-anchor="end" { "step " (last) }
                @for (i, (_, drawn)) in drawn.iter().enumerate() {
                    polyline.(format!("curve{i}")) points=(points(drawn)) {}
                }
            }
        }
    }
}

/// Three to eight round numbers that enclose both.
fn ticks(low: f64, high: f64) -> Vec<f64> {
    let span = match high - low {
        0.0 => low.abs().max(1.0),
        span => span,
    };
    let rough = span / 5.0;
    let power = 10f64.powf(rough.log10().floor());
    let step = match rough / power {
        r if r <= 1.0 => power,
        r if r <= 2.0 => 2.0 * power,
        r if r <= 5.0 => 5.0 * power,
        _ => 10.0 * power,
    };
    let (first, last) = (
        (low / step).floor(),
        (high / step).ceil().max((low / step).floor() + 1.0),
    );
    (first as i64..=last as i64)
        .map(|i| i as f64 * step)
        .collect()
}

/// With as many digits as it needs.
fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_string(),
        v if v < 1e-3 => format!("{value:.1e}"),
        v if v < 10.0 => {
            let text = format!("{value:.4}");
            text.trim_end_matches('0').trim_end_matches('.').to_string()
        }
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_enclose() {
        assert_eq!(ticks(2.6, 5.6), [2.0, 3.0, 4.0, 5.0, 6.0]);
        assert_eq!(ticks(0.0, 100.0), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        let flat = ticks(3.0, 3.0);
        assert!(
            flat[0] <= 3.0 && flat[flat.len() - 1] >= 3.0 && flat.len() > 1,
            "{flat:?}"
        );
        assert_eq!(number(0.0005), "5.0e-4");
        assert_eq!(number(2.5), "2.5");
    }

    #[test]
    fn values_that_are_no_numbers_are_left_out() {
        let curve = Curve {
            name: "loss".to_string(),
            points: vec![(1.0, 2.0), (2.0, f64::NAN), (3.0, 1.0)],
        };
        let page = chart("loss", &[curve]).into_string();
        let polyline = page
            .split("points=\"")
            .nth(1)
            .and_then(|p| p.split('"').next());
        assert_eq!(polyline.map(|p| p.split(' ').count()), Some(2));
        assert!(!page.contains("NaN"));
        // A narrow screen scrolls the chart; it does not shrink its text.
        assert!(page.contains(r#"<div class="scroll"><svg class="curves""#));
    }
}
