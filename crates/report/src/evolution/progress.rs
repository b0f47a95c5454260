//! The best time so far over the number of candidates, for each arm.

use maud::{Markup, html};

use super::axis::{Axis, grouped, ratio, time};
use super::view::{Curve, ProblemView};
use super::{AXIS_TEXT, arm_class, arm_name};
use ledger::Arm;

const WIDTH: f64 = 900.0;
const HEIGHT: f64 = 300.0;
const LEFT: f64 = 62.0;
/// Right edge of the curves, with room for their names.
const RIGHT: f64 = WIDTH - 190.0;
const TOP: f64 = 24.0;
const BOTTOM: f64 = HEIGHT - 40.0;
/// Minimum distance of curve names.
const APART: f64 = 15.0;
const TICKS: usize = 5;

/// A name right of the chart.
struct Name {
    y: f64,
    class: &'static str,
    text: String,
}

pub(super) fn chart(view: &ProblemView, floor_us: Option<f64>) -> Markup {
    let curves: Vec<&Curve> = [Arm::Random, Arm::Evolution]
        .iter()
        .filter_map(|&arm| view.curve(arm))
        .filter(|c| !c.steps.is_empty())
        .collect();
    if curves.is_empty() {
        return html! { p.soft { "No candidate has a time yet." } };
    }
    let baseline = view.baseline.as_ref().map(|ranked| ranked.us);
    let times = curves.iter().flat_map(|c| &c.steps).map(|s| s.us).chain(baseline);
    let y = Axis::over(times, BOTTOM, TOP);
    let most = curves.iter().map(|c| c.tried).max().unwrap_or(1).max(1);
    let x = Axis::linear(0.0, most as f64, LEFT, RIGHT);
    let floor = floor_us.filter(|us| y.holds(*us));
    let mut names: Vec<Name> = curves
        .iter()
        .filter_map(|c| {
            let us = c.best_us()?;
            Some(Name {
                y: y.at(us),
                class: arm_class(c.arm),
                text: format!("{} {}", arm_name(c.arm), time(us)),
            })
        })
        .collect();
    names.extend(baseline.map(|us| Name {
        y: y.at(us),
        class: "baseline",
        text: format!("baseline {}", time(us)),
    }));
    names.extend(floor.map(|us| Name { y: y.at(us), class: "floor", text: format!("floor {}", time(us)) }));
    spread(&mut names, TOP, BOTTOM);
    html! {
        svg.chart.progress viewBox=(format!("0 0 {WIDTH} {HEIGHT}")) role="img"
            aria-label="Best time so far over candidates tried, for the evolution and the random samples" {
            @for tick in y.ticks(TICKS) {
                line.grid x1=(LEFT) x2=(RIGHT) y1=(y.at(tick)) y2=(y.at(tick)) {}
                text.tick x=(LEFT - 8.0) y=(y.at(tick) + AXIS_TEXT) text-anchor="end" { (y.label(tick, TICKS)) }
            }
            text.tick x=(LEFT - 8.0) y=(TOP - 10.0) text-anchor="end" { "µs" }
            @for tick in x.ticks(8).into_iter().filter(|t| t.fract() == 0.0) {
                text.tick x=(x.at(tick)) y=(BOTTOM + 16.0) text-anchor="middle" { (grouped(tick as i64)) }
            }
            text.tick x=((LEFT + RIGHT) / 2.0) y=(HEIGHT - 6.0) text-anchor="middle" { "candidates tried in the group" }
            @if let Some(us) = baseline {
                line.baseline x1=(LEFT) x2=(RIGHT) y1=(y.at(us)) y2=(y.at(us)) {}
            }
            @if let Some(us) = floor {
                line.floor x1=(LEFT) x2=(RIGHT) y1=(y.at(us)) y2=(y.at(us)) {}
            }
            @for curve in &curves {
                @if let Some(us) = curve.best_us() {
                    line class=(format!("on {}", arm_class(curve.arm))) x1=(px(x.at(curve.tried as f64))) x2=(RIGHT)
                        y1=(px(y.at(us))) y2=(px(y.at(us))) {}
                }
                path class=(format!("step {}", arm_class(curve.arm))) d=(steps(curve, &x, &y)) {}
                @for step in &curve.steps {
                    circle class=(format!("mark {}", arm_class(curve.arm))) r="3.2"
                        cx=(px(x.at(step.candidates as f64))) cy=(px(y.at(step.us))) {
                        title {
                            "#" (step.candidate.0) ", " (arm_name(curve.arm)) " candidate " (grouped(step.candidates)) ": " (time(step.us)) " µs"
                            @if let Some(baseline) = baseline { ", " (ratio(baseline / step.us)) " the baseline's speed" }
                        }
                    }
                }
            }
            @for name in &names {
                text class=(format!("name {}", name.class)) x=(RIGHT + 10.0) y=(px(name.y + AXIS_TEXT)) { (name.text) " µs" }
            }
        }
    }
}

/// A pixel coordinate, rounded to a tenth.
pub(super) fn px(value: f64) -> String {
    format!("{value:.1}")
}

/// A step line that falls at each improvement and ends at the arm's last candidate.
fn steps(curve: &Curve, x: &Axis, y: &Axis) -> String {
    let mut path = String::new();
    for (i, step) in curve.steps.iter().enumerate() {
        let (to, down) = (px(x.at(step.candidates as f64)), px(y.at(step.us)));
        path += &if i == 0 { format!("M{to} {down}") } else { format!("H{to}V{down}") };
    }
    path + &format!("H{}", px(x.at(curve.tried as f64)))
}

/// Moves names apart within the chart, keeping their order.
fn spread(names: &mut [Name], top: f64, bottom: f64) {
    names.sort_by(|a, b| a.y.total_cmp(&b.y));
    let mut least = top;
    for name in names.iter_mut() {
        name.y = name.y.max(least);
        least = name.y + APART;
    }
    let mut most = bottom;
    for name in names.iter_mut().rev() {
        name.y = name.y.min(most);
        most = name.y - APART;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_apart_and_in_the_chart() {
        let name = |y| Name { y, class: "", text: String::new() };
        let mut names = [name(258.0), name(259.0), name(20.0), name(260.0)];
        spread(&mut names, TOP, BOTTOM);
        let at: Vec<f64> = names.iter().map(|n| n.y).collect();
        assert!(at.windows(2).all(|w| w[1] - w[0] >= APART), "{at:?}");
        assert!(at[0] >= TOP && at[3] <= BOTTOM, "{at:?}");
    }
}
