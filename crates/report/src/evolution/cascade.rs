//! The cascade: candidates that passed by stage, reasons of rejection, operators' gains and the cost.

use maud::{Markup, html};

use super::Links;
use super::axis::{grouped, percent, px, ratio};
use super::ranking::clip;
use super::view::{Rejected, RunView};
use super::words::stage_in;
use ledger::{EQUAL, Earnings, MadeBy, Operator, Stage, TimeKind};

const WIDTH: f64 = 520.0;
const ROW: f64 = 24.0;
/// Number of reasons with a separate row. The others are summed.
const REASONS: usize = 14;

/// The candidates that entered and passed each stage, as counts and bars.
pub(super) fn funnel(view: &RunView) -> Markup {
    if view.funnel.iter().all(|passage| passage.entered == 0) {
        return html! { p.soft { "No candidate was evaluated yet." } };
    }
    let (left, right, top) = (96.0, WIDTH - 150.0, 26.0);
    let height = top + ROW * view.funnel.len() as f64 + 8.0;
    html! {
        svg.chart.funnel viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label="Candidates that entered and passed each stage" {
            text.head x="12" y="16" { "stage" }
            text.head x=(right + 70.0) y="16" text-anchor="end" { "entered" }
            text.head x=(WIDTH - 12.0) y="16" text-anchor="end" { "passed" }
            @for (i, passage) in view.funnel.iter().enumerate() {
                @let y = top + ROW * i as f64;
                @let passed = passage.entered - passage.rejected;
                @let share = passed as f64 / passage.entered.max(1) as f64;
                g.row {
                    text.name x="12" y=(y + 16.0) { (stage_in(passage.stage, view.kind())) }
                    @if passage.entered > 0 {
                        rect.entered x=(left) y=(y + 3.0) width=(right - left) height=(ROW - 6.0) {}
                        rect.passed x=(left) y=(y + 3.0) width=(px(share * (right - left))) height=(ROW - 6.0) {}
                    }
                    text.value x=(right + 70.0) y=(y + 16.0) text-anchor="end" { (grouped(passage.entered)) }
                    text.value x=(WIDTH - 12.0) y=(y + 16.0) text-anchor="end" { (grouped(passed)) }
                    title { (stage_in(passage.stage, view.kind())) ": " (passage.rejected) " of " (passage.entered) " rejected" }
                }
            }
        }
        div.legend { span { i.key.passed {} "share that passed" } span { i.key.entered {} "share that was rejected" } }
        p.soft {
            "Screen: does the plan fit the problem, and is its kernel new and not hopeless? Check: is the result right, without "
            "hazards, on a small problem? "
            @if view.kind() == Some(TimeKind::Predicted) { "Prediction: how long would a call take? Comparison: with the baseline. " }
            @else { "Short timing: how long does a call take? Race: paired with the baseline. " }
            "Held out: the winner again, and on other problems."
        }
    }
}

/// The reasons of rejection by stage as bars, each with an example.
pub(super) fn rejections(view: &RunView, links: Links) -> Markup {
    if view.rejections.is_empty() {
        return html! { p.soft { "No candidate was rejected yet." } };
    }
    let all: i64 = view.rejections.iter().map(|d| d.count).sum();
    let mut shown: Vec<&Rejected> = view.rejections.iter().take(REASONS).collect();
    shown.sort_by_key(|d| (d.stage, std::cmp::Reverse(d.count)));
    let most = shown.iter().map(|d| d.count).max().unwrap_or(1);
    let (left, right) = (218.0, WIDTH - 112.0);
    let top = 26.0;
    let height = top + ROW * shown.len() as f64 + 8.0;
    html! {
        svg.chart.rejections viewBox=(format!("0 0 {WIDTH} {height}")) role="img" aria-label="Reasons why candidates were rejected" {
            text.head x="12" y="16" { "stage" }
            text.head x="92" y="16" { "reason" }
            text.head x=(WIDTH - 12.0) y="16" text-anchor="end" { "candidates" }
            @for (i, found) in shown.iter().enumerate() {
                @let y = top + ROW * i as f64;
                @let first = i == 0 || shown[i - 1].stage != found.stage;
                g.row {
                    @if first { text.tick x="12" y=(y + 16.0) { (stage_in(found.stage, view.kind())) } }
                    @let reason = html! { text.name x="92" y=(y + 16.0) { (clip(&found.reason.name().replace('_', " "), 18)) } };
                    @let (id, detail) = &found.example;
                    (links.candidate(*id, reason))
                    @let long = found.count as f64 / most as f64 * (right - left);
                    rect.rejected x=(left) y=(y + 4.0) height=(ROW - 8.0) width=(px(long.max(1.0))) {}
                    text.value x=(WIDTH - 12.0) y=(y + 4.0 + ROW / 2.0) text-anchor="end" {
                        (grouped(found.count)) " · " (percent(found.count as f64 / all as f64))
                    }
                    title { (found.reason.name()) ": #" (id.0) ", " (detail) }
                }
            }
        }
        @if view.rejections.len() > REASONS {
            @let rest: i64 = view.rejections.iter().skip(REASONS).map(|d| d.count).sum();
            p.soft { (view.rejections.len() - REASONS) " rarer reasons, " (grouped(rest)) " candidates." }
        }
    }
}

/// The results of the operators that improved the best or won a race. The others are summed, and random
/// samples, which are the control group, are left out.
pub(super) fn operators(view: &RunView) -> Markup {
    let tried: i64 = view.operators.iter().map(|o| o.candidates).sum();
    if tried == 0 {
        return html! { p.soft { "No operator was at work yet." } };
    }
    let has_earned = |o: &&Earnings| o.gain >= EQUAL || o.faster > 0;
    let is_random = |o: &&Earnings| o.operator.operator == Operator::Random;
    let of_search = || view.operators.iter().filter(|o| !is_random(o));
    let (earned, idle): (Vec<&Earnings>, Vec<&Earnings>) = of_search().partition(has_earned);
    let most = earned.iter().map(|o| o.gain.ln()).fold(1e-9, f64::max);
    let made: i64 = idle.iter().map(|o| o.candidates).sum();
    let won = if view.kind() == Some(TimeKind::Predicted) { "comparisons won" } else { "races won" };
    let mut shown: Vec<Operator> = earned.iter().map(|o| o.operator.operator).collect();
    shown.sort_unstable();
    shown.dedup();
    html! {
        @if !earned.is_empty() { div.scroll { table.operators {
            thead { tr {
                th { "operator" } th.n { "made" } th.n { "share" } th.n { "with a time" } th.n { (won) } th.n { "gained" } th {}
            } }
            tbody { @for o in earned { (operator(o, tried, most)) } }
        } } }
        @if !idle.is_empty() {
            p.soft { (idle.len()) " operators with " (grouped(made)) " candidates improved nothing." }
        }
        p.soft {
            "Gained: the product of time before over time after, of candidates that were faster than all before them in their group."
            @for (name, means) in shown.into_iter().filter_map(|o| Some((o.name(), meaning(o)?))) {
                " " (name[..1].to_uppercase()) (name[1..]) ": " (means) "."
            }
        }
    }
}

/// The way in which an operator makes a candidate. `None` for one that the search does not choose.
const fn meaning(operator: Operator) -> Option<&'static str> {
    Some(match operator {
        Operator::Seed => "a plan that the search begins with",
        Operator::Mutate => "a good candidate with some genes drawn anew",
        Operator::Cross => "the genes of two good candidates",
        Operator::Neighbour => "the best with one gene changed by a step",
        Operator::Guided => "a change that helped another candidate, or that cures a finding",
        Operator::Restart => "a plan at random, to leave the best",
        Operator::Propose => "the answer of an external program",
        _ => return None,
    })
}

fn operator(o: &Earnings, tried: i64, most: f64) -> Markup {
    let width = (o.gain.ln().max(0.0) / most * 90.0).min(90.0);
    html! {
        tr {
            td title=(o.operator) { (operator_name(&o.operator)) } td.n { (grouped(o.candidates)) } td.n { (percent(o.candidates as f64 / tried as f64)) }
            td.n { (grouped(o.timed)) } td.n { (grouped(o.faster)) } td.n { (ratio(o.gain)) }
            td.bar { svg viewBox="0 0 90 10" width="90" height="10" aria-hidden="true" {
                rect.passed x="0" y="1" height="8" width=(px(width)) {}
            } }
        }
    }
}

/// Maximum number of genes that an operator's name lists.
const GENES: usize = 2;

/// An operator's name. Long lists of genes are replaced by their number: `mutate, 10 genes`.
pub(super) fn operator_name(made: &MadeBy) -> String {
    let (name, genes) = (made.operator.name(), made.detail.split('+').count());
    match (made.operator, made.detail.as_str()) {
        (Operator::Other, whole) => whole.to_owned(),
        (_, "") => name.to_owned(),
        _ if genes > GENES => format!("{name}, {genes} genes"),
        (_, detail) => format!("{name}: {}", detail.replace('+', ", ")),
    }
}

/// The device time and its cost.
pub(super) fn cost(view: &RunView) -> Markup {
    let cost = &view.cost;
    if cost.items.is_empty() {
        return html! { p.soft { "Nothing was spent yet." } };
    }
    let price = cost.price_per_hour;
    let money = |seconds: f64| match price {
        Some(price) if seconds > 0.0 => format!("{:.2}", price * seconds / 3600.0),
        _ => "–".to_owned(),
    };
    let seconds: f64 = cost.items.iter().map(|item| item.seconds).sum();
    html! {
        div.scroll { table.cost {
            thead { tr { th { "spent on" } th.n { "tasks" } th.n { "work" } th.n { "device" } th.n { "cost" } } }
            tbody { @for item in &cost.items {
                tr { td { (spent_on(&item.what, view)) } td.n { (grouped(item.tasks)) } td.n { (duration(item.seconds)) }
                    td.n { (duration(item.device_seconds)) } td.n { (money(item.device_seconds)) } }
            } }
            tfoot { tr {
                td { "in all" } td.n {} td.n { (duration(seconds)) }
                td.n { (duration(cost.device_seconds)) } td.n { (money(cost.device_seconds)) }
            } }
        } }
        @if let Some(price) = price {
            p.soft { "Device time at " (format!("{price:.2}")) " an hour, in the currency that the run was given." }
        }
    }
}

/// The words for an entry of the time that was spent: the stage's, or else those of the ledger.
fn spent_on(what: &str, view: &RunView) -> String {
    let stage = serde_json::from_value::<Stage>(what.into()).ok();
    stage.map_or_else(|| what.replace('_', " "), |stage| stage_in(stage, view.kind()).to_owned())
}

/// A duration in words: `14 s`, `3 min 20 s`, `2 h 5 min`.
pub(super) fn duration(seconds: f64) -> String {
    match seconds {
        0.0 => "–".to_owned(),
        s if s < 9.95 => format!("{s:.1} s"),
        s if s < 119.5 => format!("{s:.0} s"),
        s if s < 7170.0 => format!("{} min {} s", s.round() as u64 / 60, s.round() as u64 % 60),
        s => format!("{} h {} min", (s / 60.0).round() as u64 / 60, (s / 60.0).round() as u64 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        let names =
            ["mutate:a+b+c", "insight:stages", "guided:stages", "neighbour:a+b", "restart", "anneal:a"];
        let shown = names.map(|name| operator_name(&MadeBy::from(name)));
        let guided = "guided: stages";
        assert_eq!(shown, ["mutate, 3 genes", guided, guided, "neighbour: a, b", "restart", "anneal:a"]);
        assert_eq!([0.31, 42.4, 200.0, 7500.0].map(duration), ["0.3 s", "42 s", "3 min 20 s", "2 h 5 min"]);
    }
}
