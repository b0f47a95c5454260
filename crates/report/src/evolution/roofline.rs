//! The roofline chart: the rates that candidates reach, and the device's peaks.

use maud::{Markup, html};

use super::axis::{Axis, grid, percent, px, time};
use super::view::ProblemView;
use super::{arm_class, arm_name};
use bench::{CpuPeaks, Floor, Mode, Peaks, Products};
use ledger::{Ranked, Run};

const SIZE: (f64, f64) = (520.0, 330.0);
const LEFT: f64 = 60.0;
const RIGHT: f64 = SIZE.0 - 18.0;
const TOP: f64 = 24.0;
const BOTTOM: f64 = SIZE.1 - 44.0;
const TICKS: usize = 4;

/// The shortest possible time of one call of the problem, with as much of the inputs in L2 as fits, µs.
pub(super) fn floor_us(run: &Run, view: &ProblemView) -> Option<f64> {
    match Peaks::of(&run.device) {
        Some(peaks) => Some(peaks.floor(&view.problem.problem(), Mode::Warm).us()),
        None => measured_floor(run, view).map(|(floor, _)| floor.us()),
    }
}

/// The floor by the peaks of the processor, which were measured before the run.
fn measured_floor(run: &Run, view: &ProblemView) -> Option<(Floor, Products)> {
    let peaks: Option<CpuPeaks> = serde_json::from_value(run.config["peaks"].clone()).ok()?;
    peaks?.floor(&view.problem.problem())
}

/// The points shown: the baseline, the best of the random arm if it is another one, and the best.
fn shown(view: &ProblemView) -> Vec<(&'static str, f64)> {
    let random = view.curve(ledger::Arm::Random).and_then(|c| c.best_us()).map(|us| ("random", us));
    let of = |timed: &Option<Ranked>, class| timed.as_ref().map(|t| (class, t.us));
    let best = view.best.as_ref().map(|t| (arm_class(t.arm), t.us));
    let mut all: Vec<(&'static str, f64)> =
        [of(&view.baseline, "baseline"), random, best].into_iter().flatten().collect();
    all.dedup();
    all
}

/// The figures of a floor from measured peaks: there is no data sheet from which to draw a roofline.
fn figures(floor: &Floor, products: &Products, view: &ProblemView) -> Markup {
    html! {
        p.soft {
            "Before the run this processor reached " (format!("{:.0}", products.flops * 1e-9)) " GFLOP/s with "
            (products.isa.name()) ". No kernel takes less than " (time(floor.us())) " µs."
        }
        dl.figures {
            div { dt { "floor: arithmetic at its peak" } dd { (time(floor.flops_us)) " µs" } }
            div { dt { "floor: reading the inputs" } dd { (time(floor.bytes_us)) " µs" } }
            (attained(&shown(view), floor.us()))
        }
    }
}

/// The share of the floor in the time of each point.
fn attained(rows: &[(&'static str, f64)], floor_us: f64) -> Markup {
    html! {
        @for (class, us) in rows {
            div { dt { i class=(format!("key {class}")) {} "floor / time, " (name(class)) } dd { (percent(floor_us / us)) } }
        }
    }
}

pub(super) fn chart(run: &Run, view: &ProblemView) -> Markup {
    let Some(peaks) = Peaks::of(&run.device) else {
        if let Some((floor, products)) = measured_floor(run, view) {
            return figures(&floor, &products, view);
        }
        let why = "are in no table of FlashCore's, so there is no floor to hold its times against.";
        return html! { p.soft { "The peaks of " (run.device) " " (why) } };
    };
    let problem = view.problem.problem();
    let floor = peaks.floor(&problem, Mode::Warm);
    let intensity = problem.flops() / problem.bytes();
    let tflops = |us: f64| problem.flops() / us * 1e-6;
    let rows = shown(view);
    let (peak, ridge) = (peaks.flops * 1e-12, peaks.flops / peaks.bandwidth);
    let niches: Vec<f64> = view.niches.iter().map(|n| tflops(n.us)).collect();
    let x = Axis::over([intensity / 4.0, ridge / 4.0, ridge * 4.0, intensity * 4.0].into_iter(), LEFT, RIGHT);
    let rates = rows.iter().map(|(_, us)| tflops(*us)).chain(niches.iter().copied());
    let least = rates.fold(peak / 10.0, f64::min);
    let y = Axis::over([least, peak * 1.2].into_iter(), BOTTOM, TOP);
    // The slope starts at the left edge or at the lower edge.
    let bandwidth = peaks.bandwidth * 1e-12;
    let entry = (intensity.min(ridge) / 4.0).max(least / bandwidth);
    html! {
        svg.chart.roofline viewBox=(format!("0 0 {} {}", SIZE.0, SIZE.1)) role="img" aria-label="Attained and attainable rates" {
            (grid(&x, &y, TICKS))
            text.tick x=(LEFT - 8.0) y=(TOP - 10.0) text-anchor="end" { "TFLOP/s" }
            text.tick x=((LEFT + RIGHT) / 2.0) y=(SIZE.1 - 8.0) text-anchor="middle" { "FLOP per byte of inputs and outputs" }
            path.roof d=(format!("M{} {}L{} {}H{RIGHT}", px(x.at(entry)), px(y.at(entry * bandwidth)), px(x.at(ridge)), px(y.at(peak)))) {}
            @for rate in &niches { circle.dot.niche cx=(px(x.at(intensity))) cy=(px(y.at(*rate))) r="2.4" {} }
            @for (class, us) in &rows {
                circle class=(format!("mark {class}")) cx=(px(x.at(intensity))) cy=(px(y.at(tflops(*us)))) r="5" {
                    title { (class) ": " (format!("{:.1}", tflops(*us))) " TFLOP/s" }
                }
            }
        }
        dl.figures {
            div { dt { "floor: arithmetic at its peak" } dd { (time(floor.flops_us)) " µs" } }
            div { dt { "floor: traffic beyond L2" } dd { (time(floor.bytes_us)) " µs" } }
            (attained(&rows, floor.us()))
        }
    }
}

fn name(class: &str) -> &str {
    match class {
        "random" => arm_name(ledger::Arm::Random),
        "evolution" => "best",
        other => other,
    }
}
