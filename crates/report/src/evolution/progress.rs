//! The progress chart: for each arm, the best short timing so far over the number of candidates, in grey, and
//! the candidates that raced, in colour.

use maud::{Markup, html};

use super::axis::{Axis, grouped, px, ratio, time};
use super::ranking;
use super::view::{Curve, ProblemView, RaceView};
use super::{AXIS_TEXT, arm_class, arm_name};
use ledger::{Arm, Ranked};

const HEIGHT: f64 = 300.0;
const LEFT: f64 = 62.0;
const TOP: f64 = 24.0;
/// Space right of the curves for their names.
const NAMES: f64 = 190.0;
/// The widths of the chart: for a page, and for a narrow screen, where a legend below has the names.
const ROOMY: (&str, f64, f64) = ("chart progress roomy", 900.0, 900.0 - NAMES);
const NARROW: (&str, f64, f64) = ("chart progress narrow", 400.0, 388.0);
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
    let ends = |ranked: &Ranked| match view.is_predicted() {
        true => [ranked.us; 2],
        false => [ranked.low_us, ranked.high_us],
    };
    let raced = view.races.iter().flat_map(|race| ends(&race.ranked));
    let times = curves.iter().flat_map(|c| &c.steps).map(|s| s.us).chain(baseline).chain(raced);
    let y = Axis::over(times, BOTTOM, TOP);
    let most = curves.iter().map(|c| c.tried).max().unwrap_or(1).max(1);
    let drawn = Drawn { view, curves, baseline, floor: floor_us.filter(|us| y.holds(*us)), y, most };
    html! {
        (drawn.svg(ROOMY))
        (drawn.svg(NARROW))
        div.legend {
            @let [compared, short] = drawn.words();
            span { i.key.evolution {} "evolution, " (compared) } span { i.key.random {} "random sample, " (compared) }
            span { i.key.short {} "best " (short) " so far (solid: evolution, dashed: random)" }
            span { i.key.level {} "baseline" @if let Some(us) = drawn.baseline { " " (time(us)) " µs" } }
            @if let Some(us) = drawn.floor { span { i.key.roof {} "floor " (time(us)) " µs" } }
        }
    }
}

/// The best times so far of two runs' evolutions on one problem, over each other; nothing if one has none.
pub(super) fn overlay(runs: [(i64, &ProblemView); 2]) -> Markup {
    let curve =
        |view: &'_ ProblemView| view.curve(Arm::Evolution).filter(|curve| !curve.steps.is_empty()).cloned();
    let curves = runs.map(|(_, view)| curve(view));
    let [Some(first), Some(second)] = &curves else { return html! {} };
    let both = [(first, "evolution"), (second, "random")];
    let y =
        Axis::over(both.iter().flat_map(|(curve, _)| curve.steps.iter().map(|step| step.us)), BOTTOM, TOP);
    let most = first.tried.max(second.tried).max(1) as f64;
    let svg = |(class, width, right): (&str, f64, f64)| {
        let x = Axis::linear(0.0, most, LEFT, right);
        html! {
            svg class=(class) viewBox=(format!("0 0 {width} {HEIGHT}")) role="img" aria-label="Best times so far of both runs" {
                (axes(&x, &y, width, right, "candidates of the evolution tried"))
                @for (curve, class) in both { path class=(format!("step {class}")) d=(steps(curve, &x, &y)) {} }
            }
        }
    };
    html! {
        (svg((ROOMY.0, ROOMY.1, ROOMY.1 - 12.0)))
        (svg(NARROW))
        div.legend {
            span { i.key.evolution {} "run " (runs[0].0) " (solid)" } span { i.key.random {} "run " (runs[1].0) " (dashed)" }
            span.soft { "Each curve is the best time alone so far; clocks and other work differ between runs." }
        }
    }
}

/// The grid of times and the numbers of candidates below it.
fn axes(x: &Axis, y: &Axis, width: f64, right: f64, candidates: &str) -> Markup {
    html! {
        @for tick in y.ticks(TICKS) {
            line.grid x1=(LEFT) x2=(right) y1=(y.at(tick)) y2=(y.at(tick)) {}
            text.tick x=(LEFT - 8.0) y=(y.at(tick) + AXIS_TEXT) text-anchor="end" { (y.label(tick, TICKS)) }
        }
        text.tick x=(LEFT - 8.0) y=(TOP - 10.0) text-anchor="end" { "µs" }
        @for tick in x.ticks((width / 110.0) as usize).into_iter().filter(|t| t.fract() == 0.0) {
            text.tick x=(x.at(tick)) y=(BOTTOM + 16.0) text-anchor="middle" { (grouped(tick as i64)) }
        }
        text.tick x=((LEFT + right) / 2.0) y=(HEIGHT - 6.0) text-anchor="middle" { (candidates) }
    }
}

/// The contents of the chart, for any width.
struct Drawn<'a> {
    view: &'a ProblemView,
    curves: Vec<&'a Curve>,
    baseline: Option<f64>,
    floor: Option<f64>,
    y: Axis,
    /// Candidates of the larger arm.
    most: i64,
}

/// A raced candidate in the chart.
struct Raced<'a> {
    race: &'a RaceView,
    /// The number of candidates of its arm when it was made, if known.
    candidates: i64,
}

impl Drawn<'_> {
    /// The words for a paired comparison and for a time alone.
    fn words(&self) -> [&'static str; 2] {
        if self.view.is_predicted() { ["compared", "predicted time"] } else { ["raced", "short timing"] }
    }

    /// The races of candidates, at their positions along the search. A candidate that never was the best of
    /// its arm is placed at the end.
    fn raced(&self) -> Vec<Raced<'_>> {
        let is_candidate = |race: &&RaceView| matches!(race.ranked.arm, Arm::Evolution | Arm::Random);
        let place = |race: &RaceView| {
            let curve = self.view.curve(race.ranked.arm)?;
            let corner = curve.steps.iter().find(|step| step.candidate == race.ranked.candidate);
            Some(corner.map_or(curve.tried, |corner| corner.candidates))
        };
        let races = self.view.races.iter().filter(is_candidate);
        races.filter_map(|race| Some(Raced { race, candidates: place(race)? })).collect()
    }

    fn svg(&self, (class, width, right): (&str, f64, f64)) -> Markup {
        let Drawn { curves, baseline, floor, y, .. } = self;
        let x = Axis::linear(0.0, self.most as f64, LEFT, right);
        let [compared, short] = self.words();
        let names = if width > right + NAMES / 2.0 { self.names() } else { Vec::new() };
        html! {
            svg class=(class) viewBox=(format!("0 0 {width} {HEIGHT}")) role="img"
                aria-label=(format!("Best {short} so far over candidates tried, and the candidates that were {compared}")) {
                (axes(&x, y, width, right, "candidates tried in the group"))
                @if let Some(us) = *baseline { line.baseline x1=(LEFT) x2=(right) y1=(y.at(us)) y2=(y.at(us)) {} }
                @if let Some(us) = *floor { line.floor x1=(LEFT) x2=(right) y1=(y.at(us)) y2=(y.at(us)) {} }
                @for curve in curves {
                    path class=(format!("step short {}", arm_class(curve.arm))) d=(steps(curve, &x, y)) {}
                    @for step in &curve.steps {
                        circle.mark.short r="2.6" cx=(px(x.at(step.candidates as f64))) cy=(px(y.at(step.us))) {
                            title {
                                "#" (step.candidate.0) ", " (arm_name(curve.arm)) " candidate " (grouped(step.candidates))
                                ": a " (short) " of " (time(step.us)) " µs"
                            }
                        }
                    }
                }
                @for raced in self.raced() { (self.mark(&raced, x.at(raced.candidates as f64))) }
                @for name in &names {
                    text class=(format!("name {}", name.class)) x=(right + 10.0) y=(px(name.y + AXIS_TEXT)) { (name.text) " µs" }
                }
            }
        }
    }

    /// The names right of the chart: the best raced candidate of each arm, and the levels.
    fn names(&self) -> Vec<Name> {
        let level = |class, text: &str, us: f64| Name {
            y: self.y.at(us),
            class,
            text: format!("{text} {}", time(us)),
        };
        let best = |arm: Arm| {
            let races = self.view.races.iter().filter(|race| race.ranked.arm == arm);
            races.map(|race| race.ranked.us).min_by(f64::total_cmp)
        };
        let arms = [Arm::Evolution, Arm::Random].into_iter();
        let mut names: Vec<Name> =
            arms.filter_map(|arm| Some(level(arm_class(arm), arm_name(arm), best(arm)?))).collect();
        names.extend(self.baseline.map(|us| level("baseline", "baseline", us)));
        names.extend(self.floor.map(|us| level("floor", "floor", us)));
        spread(&mut names, TOP, BOTTOM);
        names
    }

    /// A raced candidate with the interval of its time. The interval of a prediction is the model's
    /// uncertainty, which is the same for all.
    fn mark(&self, raced: &Raced<'_>, x: f64) -> Markup {
        let (ranked, y) = (&raced.race.ranked, &self.y);
        let class = arm_class(ranked.arm);
        html! {
            @if !self.view.is_predicted() {
                line class=(format!("span {class}")) x1=(px(x)) x2=(px(x)) y1=(px(y.at(ranked.low_us))) y2=(px(y.at(ranked.high_us))) {}
            }
            g {
                (ranking::mark(class, x, y.at(ranked.us)))
                title {
                    "#" (ranked.candidate.0) ", " (arm_name(ranked.arm)) ": " (time(ranked.us)) " µs"
                    @if let Some(race) = ranked.against {
                        ", " (ratio(race.ratio)) " (" (ratio(race.low)) " to " (ratio(race.high)) ") the baseline's speed, "
                        (race.verdict.name())
                    }
                }
            }
        }
    }
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
