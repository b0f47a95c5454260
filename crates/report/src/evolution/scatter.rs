//! A scatter plot of forecasts and measured times.

use maud::{Markup, html};

use super::Links;
use super::axis::{Axis, grid, grouped, percent, px, ratio, time};
use super::view::{POINTS, within};
use ledger::{Pair, Score};

const SIZE: (f64, f64) = (520.0, 400.0);
const LEFT: f64 = 60.0;
const RIGHT: f64 = SIZE.0 - 16.0;
const TOP: f64 = 24.0;
const BOTTOM: f64 = SIZE.1 - 44.0;
const TICKS: usize = 5;
/// Maximum number of points whose intervals are drawn.
const BARS: usize = 60;

pub(super) fn chart(points: &[Pair], links: Links) -> Markup {
    if points.is_empty() {
        return html! { p.soft { "Nothing that was forecast has been measured: how good the forecasts are is not known." } };
    }
    let ends = || points.iter().flat_map(|p| [p.us, p.measured_us]);
    let (x, y) = (Axis::over(ends(), LEFT, RIGHT), Axis::over(ends(), BOTTOM, TOP));
    let (low, high) = ends().fold((f64::INFINITY, 0.0f64), |(low, high), v| (low.min(v), high.max(v)));
    html! {
        svg.chart.scatter viewBox=(format!("0 0 {} {}", SIZE.0, SIZE.1)) role="img" aria-label="Predicted against measured times" {
            (grid(&x, &y, TICKS))
            text.tick x="12" y=(TOP - 10.0) { "measured, µs" }
            text.tick x=((LEFT + RIGHT) / 2.0) y=(SIZE.1 - 8.0) text-anchor="middle" { "predicted, µs" }
            line.same x1=(px(x.at(low))) y1=(px(y.at(low))) x2=(px(x.at(high))) y2=(px(y.at(high))) {}
            @if points.len() <= BARS {
                @for p in points {
                    @let y = px(y.at(p.measured_us));
                    line class=(format!("span {}", class(p))) x1=(px(x.at(p.low_us))) x2=(px(x.at(p.high_us))) y1=(y) y2=(y) {}
                }
            }
            @for p in points {
                @let dot = dot(p, x.at(p.us), y.at(p.measured_us));
                @match p.candidate { Some(id) => (links.candidate(id, dot)), None => (dot) }
            }
        }
    }
}

fn class(point: &Pair) -> &'static str {
    if within(point) { "inside" } else { "outside" }
}

/// A disc if the forecast's interval contains the measured time, a ring otherwise.
fn dot(p: &Pair, x: f64, y: f64) -> Markup {
    html! {
        circle class=(format!("dot {}", class(p))) cx=(px(x)) cy=(px(y)) r="3.4" {
            title {
                @if let Some(id) = p.candidate { "#" (id.0) ": " }
                "predicted " (time(p.us)) " µs (" (time(p.low_us)) " to " (time(p.high_us)) "), measured " (time(p.measured_us)) " µs"
            }
        }
    }
}

/// The forecaster's score.
pub(super) fn score(pairs: &[Pair]) -> Markup {
    if pairs.is_empty() {
        return html! {};
    }
    let score = Score::of("", "", pairs);
    html! {
        dl.figures {
            div { dt { "forecasts with an outcome" } dd { (grouped(score.count as i128)) } }
            div { dt { "bias: median of predicted / measured" } dd { (ratio(score.bias)) } }
            div { dt { "median error" } dd { (percent(score.median_error)) } }
            div { dt { "outcomes within the interval" } dd { (percent(score.coverage)) } }
            div { dt { "rank correlation (Spearman)" } dd { (correlation(&score)) } }
        }
        @if pairs.len() >= POINTS { p.soft { "The newest " (grouped(POINTS as i64)) " of them; older ones are left out." } }
    }
}

/// The rank correlation; a dash for fewer than three forecasts, whose ranks say nothing.
pub(super) fn correlation(score: &Score) -> String {
    let shown = score.spearman.filter(|_| score.count >= 3);
    shown.map_or_else(|| "–".to_owned(), |spearman| format!("{spearman:.2}"))
}
