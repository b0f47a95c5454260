//! The distributions of the races: every sample of every candidate that raced.

use maud::{Markup, html};

use super::axis::{Axis, percent, px, ratio, time};
use super::ranking::clip;
use super::view::{ProblemView, RaceView, in_words};
use super::{AXIS_TEXT, Links, arm_class, arm_name};
use bench::{median, quantile};

const ROW: f64 = 42.0;
const TOP: f64 = 14.0;
const FOOT: f64 = 26.0;
/// Vertical offsets over which neighbouring samples are spread, so that equal ones stay visible.
const SPREAD: [f64; 5] = [0.0, 8.0, -8.0, 4.0, -4.0];

/// The widths of a chart: for a page, and for a narrow screen.
struct Layout {
    class: &'static str,
    width: f64,
    left: f64,
    /// About as many labels fit below the axis.
    ticks: usize,
    /// Maximum number of characters of a plan's name.
    name: usize,
}

const LAYOUTS: [Layout; 2] = [
    Layout { class: "chart races roomy", width: 900.0, left: 330.0, ticks: 5, name: 34 },
    Layout { class: "chart races narrow", width: 400.0, left: 60.0, ticks: 3, name: 0 },
];

/// A strip of dots for each race, with the median and the middle half of the samples.
pub(super) fn strips(view: &ProblemView, links: Links) -> Markup {
    if view.races.is_empty() {
        return html! { p.soft { "No race has been run yet." } };
    }
    html! {
        @for layout in &LAYOUTS { (chart(view, layout, links)) }
        p.soft {
            "A dot is the time of one sample, a call in turns with the baseline's. The box is the middle half of the "
            "samples and the line in it their median. Two groups of dots in one row mean that the machine was in "
            "two different states: the ratios of the race are then unreliable. Point at a dot for its value. Elsewhere on "
            "this page, the time of a candidate that raced is the baseline's time divided by the ratio of the race."
        }
    }
}

fn chart(view: &ProblemView, layout: &Layout, links: Links) -> Markup {
    // The last label may reach beyond the axis by half of its width.
    let (left, right) = (layout.left, layout.width - 30.0);
    let x = Axis::over(view.races.iter().flat_map(|race| race.samples.iter().copied()), left, right);
    let bottom = TOP + ROW * view.races.len() as f64;
    html! {
        svg class=(layout.class) viewBox=(format!("0 0 {} {}", layout.width, bottom + FOOT)) role="img"
            aria-label="Every sample of the races" {
            @for tick in x.ticks(layout.ticks) {
                line.grid x1=(px(x.at(tick))) x2=(px(x.at(tick))) y1=(TOP) y2=(bottom) {}
                text.tick x=(px(x.at(tick))) y=(bottom + 18.0) text-anchor="middle" { (x.label(tick, layout.ticks)) " µs" }
            }
            @for (i, race) in view.races.iter().enumerate() {
                (strip(race, TOP + ROW * (i as f64 + 0.5), &x, layout, links))
            }
        }
    }
}

fn strip(race: &RaceView, y: f64, x: &Axis, layout: &Layout, links: Links) -> Markup {
    let ranked = &race.ranked;
    let class = arm_class(ranked.arm);
    let at = |part: f64| x.at(quantile(&race.samples, part));
    let middle = x.at(median(&race.samples));
    html! {
        g.row {
            (links.candidate(ranked.candidate, html! { text.name x="12" y=(y + AXIS_TEXT) { "#" (ranked.candidate.0) } }))
            @if layout.name > 0 {
                text.what x="64" y=(y + AXIS_TEXT) { (clip(&in_words(&ranked.subject), layout.name)) }
            }
            @if let Some([fast, slow, share]) = race.modes {
                // On a narrow chart the caption begins at the left edge: before the slower mode it would be
                // cut.
                @let is_narrow = layout.name == 0;
                @let (at, anchor) = if is_narrow { (layout.left, "start") } else { (x.at(slow), "end") };
                text.modes x=(px(at)) y=(y - 15.0) text-anchor=(anchor) {
                    "two modes, " (ratio(slow / fast)) " apart, " (percent(share)) " in the slower"
                }
            }
            rect class=(format!("box {class}")) x=(px(at(0.25))) y=(y - 11.0) height="22"
                width=(px((at(0.75) - at(0.25)).max(1.0))) {}
            line class=(format!("span {class}")) x1=(px(middle)) x2=(px(middle)) y1=(y - 12.0) y2=(y + 12.0) {}
            @for (i, us) in race.samples.iter().enumerate() {
                circle class=(format!("sample {class}")) r="2.2" cx=(px(x.at(*us))) cy=(px(y + SPREAD[i % SPREAD.len()])) {
                    title { "#" (ranked.candidate.0) ", " (arm_name(ranked.arm)) ", sample " (i + 1) ": " (time(*us)) " µs" }
                }
            }
        }
    }
}
