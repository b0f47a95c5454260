//! The fastest candidates with their intervals.

use maud::{Markup, html};

use super::axis::{Axis, px, ratio, time};
use super::view::{ProblemView, differing, in_words, speedup};
use super::{AXIS_TEXT, Links, arm_class, arm_name, trial_in};
use ledger::{Against, Ranked};

const WIDTH: f64 = 900.0;
const ROW: f64 = 24.0;
const TOP: f64 = 26.0;
const LEFT: f64 = 330.0;
const RIGHT: f64 = WIDTH - 230.0;
const TICKS: usize = 5;

/// A row of the chart.
struct Row<'a> {
    timed: &'a Ranked,
    class: &'static str,
    name: String,
}

/// The fastest candidates, and below them the baseline and the control.
pub(super) fn chart(view: &ProblemView, links: Links) -> Markup {
    let top =
        view.top.iter().map(|timed| Row { timed, class: arm_class(timed.arm), name: named(view, timed) });
    let mut rows: Vec<Row> = top.collect();
    // Baseline and control are placed below, unless they are among the fastest.
    let shown = |timed: &Ranked| view.top.iter().any(|t| t.candidate == timed.candidate);
    let also = |timed: &'_ Option<Ranked>| timed.as_ref().is_some_and(|t| !shown(t));
    if let (true, Some(timed)) = (also(&view.baseline), &view.baseline) {
        rows.push(Row { timed, class: "baseline", name: in_words(&timed.subject) });
    }
    if let (true, Some(timed)) = (also(&view.reference), &view.reference) {
        rows.push(Row { timed, class: "reference", name: in_words(&timed.subject) });
    }
    if let (true, Some(timed)) = (also(&view.control), &view.control) {
        rows.push(Row { timed, class: "control", name: in_words(&timed.subject) });
    }
    if rows.is_empty() {
        return html! { p.soft { "No candidate has a time yet." } };
    }
    // The intervals of predictions are the model's uncertainty: equally wide for all, and wider than the
    // chart.
    let is_measured = !view.is_predicted();
    let ends = |r: &Row| match is_measured {
        true => [r.timed.us, r.timed.low_us, r.timed.high_us],
        false => [r.timed.us; 3],
    };
    let ends = rows.iter().flat_map(ends);
    let x = Axis::over(ends, LEFT, RIGHT);
    let height = TOP + ROW * rows.len() as f64 + 26.0;
    let bottom = height - 26.0;
    let baseline = view.baseline.as_ref().map(|b| b.us);
    html! {
        (listed(&rows, view, links))
        svg.chart.ranking.roomy viewBox=(format!("0 0 {WIDTH} {height}")) role="img"
            aria-label="The fastest candidates with the intervals of their times" {
            text.head x="12" y="16" { "candidate" }
            text.head x=(RIGHT + 14.0) y="16" { "µs" }
            text.head x=(WIDTH - 12.0) y="16" text-anchor="end" { "speed-up" }
            @for tick in x.ticks(TICKS) {
                line.grid x1=(x.at(tick)) x2=(x.at(tick)) y1=(TOP) y2=(bottom) {}
                text.tick x=(x.at(tick)) y=(bottom + 18.0) text-anchor="middle" { (x.label(tick, TICKS)) " µs" }
            }
            @if let Some(us) = baseline { line.baseline x1=(x.at(us)) x2=(x.at(us)) y1=(TOP) y2=(bottom) {} }
            @for (i, row) in rows.iter().enumerate() {
                @let y = TOP + ROW * (i as f64 + 0.5);
                g.row {
                    (links.candidate(row.timed.candidate, html! { text.name x="12" y=(y + AXIS_TEXT) { "#" (row.timed.candidate.0) } }))
                    text.what x="64" y=(y + AXIS_TEXT) { (clip(&row.name, 38)) @if row.timed.promoted { tspan.promoted { " ★" } } }
                    @if is_measured {
                        line class=(format!("span {}", row.class)) y1=(y) y2=(y)
                            x1=(px(x.at(row.timed.low_us))) x2=(px(x.at(row.timed.high_us))) {}
                    }
                    (mark(row.class, x.at(row.timed.us), y))
                    text.value x=(RIGHT + 14.0) y=(y + AXIS_TEXT) { (time(row.timed.us)) }
                    @let class = if row.timed.against.is_some() { "value" } else { "value short" };
                    text class=(class) x=(WIDTH - 12.0) y=(y + AXIS_TEXT) text-anchor="end" {
                        @match speedup(view.baseline.as_ref(), Some(row.timed)).filter(|_| row.class != "baseline") {
                            Some((raced, Some(_))) => {
                                (ratio(raced)) @if let Some(race) = undecided(row) { " " (race.verdict.name()) }
                            }
                            // The ratio of two separate times, not a race.
                            Some((quotient, None)) => { "~" (ratio(quotient)) }
                            None => "–",
                        }
                    }
                    title {
                        "#" (row.timed.candidate.0) " " (in_words(&row.timed.subject)) " (" (row.name) "), " (arm_name(row.timed.arm)) ", " (row.timed.operator) ": "
                        (time(row.timed.us)) " µs (" (time(row.timed.low_us)) " to " (time(row.timed.high_us)) "), "
                        (trial_in(row.timed.trial, row.timed.kind))
                        @if let Some(race) = row.timed.against { ", " (race.verdict.name()) }
                    }
                }
            }
        }
    }
}

/// The last race of a candidate, if it decides nothing: its ratio does not stand without this word.
fn undecided(row: &Row) -> Option<Against> {
    row.timed.against.filter(|race| race.verdict == bench::SpeedVerdict::Undecided)
}

/// The label of a candidate in the chart: the genes in which it differs from the baseline, or else its family
/// and tile.
fn named(view: &ProblemView, timed: &Ranked) -> String {
    let baseline = view.baseline.as_ref().filter(|baseline| baseline.candidate != timed.candidate);
    let genes = baseline.and_then(|baseline| differing(&baseline.subject, &timed.subject));
    genes.unwrap_or_else(|| in_words(&timed.subject))
}

/// The rows of the chart as text, for narrow screens.
fn listed(rows: &[Row], view: &ProblemView, links: Links) -> Markup {
    html! {
        ol.narrow {
            @for row in rows {
                li {
                    b { (links.number(row.timed.candidate)) } " " (time(row.timed.us)) " µs"
                    @match speedup(view.baseline.as_ref(), Some(row.timed)).filter(|_| row.class != "baseline") {
                        Some((raced, Some((low, high)))) => {
                            ", " (ratio(raced)) " (" (ratio(low)) " to " (ratio(high)) ")"
                            @if let Some(race) = row.timed.against { ", " (race.verdict.name()) }
                        }
                        Some((quotient, None)) => span.soft {
                            ", ~" (ratio(quotient)) (if view.is_predicted() { " by separate predictions" } else { " by short timings" })
                        }
                        None => {}
                    }
                    div.soft { (arm_name(row.timed.arm)) ": " (row.name) @if row.timed.promoted { " ★" } }
                }
            }
        }
    }
}

/// Arms have different shapes, for readers who do not see the colours.
pub(super) fn mark(class: &str, x: f64, y: f64) -> Markup {
    let (x0, x1) = (px(x - 4.5), px(x + 4.5));
    html! {
        @match class {
            "random" => path class="mark random" d=(format!("M{} {}L{x1} {y}L{} {}L{x0} {y}Z", px(x), y - 5.5, px(x), y + 5.5)) {},
            "baseline" | "control" | "reference" => rect class=(format!("mark {class}")) x=(px(x - 4.0)) y=(y - 4.0) width="8" height="8" {},
            _ => circle class=(format!("mark {class}")) cx=(px(x)) cy=(y) r="4.6" {},
        }
    }
}

/// The first characters, with an ellipsis where the text is cut.
pub(super) fn clip(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}
