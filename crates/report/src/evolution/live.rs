//! The live pages: the list of runs, a run, a candidate, the best plans, forecasts, and errors.

use kernels::select::Shape;
use maud::{Markup, html};
use serde_json::Value;

use super::axis::{grouped, percent, ratio, time};
use super::cascade::{duration, operator_name};
use super::decisions::figures;
use super::lineage::changes;
use super::view::{ProblemView, RunRow, RunView, in_words, moment, speedup};
use super::{
    Links, Section, arm_name, frame, kind_words, progress, scatter, scatter_legend, stage_name, title,
    trial_in, with_contents,
};
use bench::suites::words;
use ledger::Candidate;
use ledger::{
    ByHand, CandidateId, CheckFact, Dossier, Forecast, Judge, Line, MeasurementFact, Pair, Ranked, Reason,
    RunId, Screening, TimeKind, Trial,
};

/// Number of children listed on a candidate's page.
const CHILDREN: usize = 20;

/// Address of the live pages' script.
pub const SCRIPT: &str = "/live.js";

pub const SCRIPT_TEXT: &str = include_str!("live.js");

/// A candidate's number as a link to its page.
fn number(id: CandidateId) -> Markup {
    Links::Live.number(id)
}

fn navigation(at: &str) -> Markup {
    html! {
        nav.site aria-label="Pages" {
            a.brand href="/" { "FlashCore" }
            @for (path, name) in [("/", "runs"), ("/topk", "fastest plans"), ("/forecasts", "forecasts")] {
                a href=(path) aria-current=[(path == at).then_some("page")] { (name) }
            }
        }
    }
}

/// The list of runs, newest first; `before` leads to older ones.
pub fn runs(ledger: &str, rows: &[RunRow], before: Option<i64>) -> String {
    let body = html! {
        (navigation("/"))
        h1 { "Runs" }
        p.lead { "Ledger " code { (ledger) } "." }
        @if rows.is_empty() { p.soft { "No run was begun yet: " code { "flashcore evolve --ledger " (ledger) } " begins one." } }
        @else {
            @if let Some((older, newer)) = comparable(rows) {
                p { a href=(format!("/compare?a={}&b={}", older.line.id.0, newer.line.id.0)) { "compare the two latest of one problem" } }
            }
            div.scroll { table.runs.stacks.sortable {
                thead { tr {
                    th { "run" } th { "device" } th { "problem" } th { "begun" } th { "state" }
                    th.n { "candidates" } th.n { "baseline µs" } th.n { "best µs" } th.n { "speed-up" } th { "verdict" }
                } }
                tbody { @for row in rows { (run_row(row)) } }
            } }
        }
        @if let Some(before) = before { p { a href=(format!("/?before={before}")) { "older runs" } } }
    };
    frame("Runs", SCRIPT, body)
}

/// The two latest runs, the older one first, that searched the same problem on the same device.
fn comparable(rows: &[RunRow]) -> Option<(&RunRow, &RunRow)> {
    let is_alike = |a: &RunRow, b: &RunRow| {
        a.line.device == b.line.device
            && a.problems.first().is_some_and(|problem| b.problems.contains(problem))
    };
    let pairs =
        rows.iter().enumerate().flat_map(|(i, newer)| rows[i + 1..].iter().map(move |older| (older, newer)));
    pairs.into_iter().find(|(older, newer)| is_alike(newer, older))
}

fn run_row(row: &RunRow) -> Markup {
    let (line, baseline, best) = (&row.line, row.baseline.as_ref(), row.best.as_ref());
    let gain = speedup(baseline, best);
    let us = |ranked: Option<&Ranked>| ranked.map_or("–".to_owned(), |r| time(r.us));
    html! {
        tr {
            td { a href=(format!("/run/{}", line.id.0)) { b { "run " (line.id.0) } } }
            td { (line.device) }
            td { @match row.problems.as_slice() {
                [] => "–",
                [one] => (one.title()),
                [first, rest @ ..] => { (first.title()) " and " (rest.len()) " more" }
            } }
            td { (row.begun) }
            td { span class=(format!("state {}", row.state.name())) { (row.state.name()) } }
            td.n data-label="candidates" { (grouped(line.candidates)) }
            td.n data-label="baseline µs" { (us(baseline)) }
            td.n data-label="best µs" { (us(best)) @if best.is_some_and(|b| b.kind == TimeKind::Predicted) { span.soft { " predicted" } } }
            td.n data-label="speed-up" { @match gain {
                None => "–",
                Some((gain, Some(_))) => {
                    (ratio(gain)) @if let Some(race) = best.and_then(|best| best.against) { " " (race.verdict.name()) }
                }
                Some((gain, None)) => { (ratio(gain)) span.soft { " of times" } }
            } }
            td data-label="verdict" { (row.conclusion) }
        }
    }
}

/// The page of a run in progress. The script polls for changes and replaces the sections that changed.
pub fn live_run(view: &RunView, sections: &[Section]) -> String {
    let pair =
        view.problems.iter().find_map(|p| Some((p.baseline.as_ref()?.candidate, p.best.as_ref()?.candidate)));
    let body = html! {
        (navigation("/run"))
        div #live data-run=(view.id.0) { span.dot {} " " span.text { "a still picture: the script is not running" } }
        nav.actions aria-label="This run" {
            a href=(format!("/run/{}/candidates", view.id.0)) { "all candidates" }
            @if let Some((a, b)) = pair { a href=(format!("/diff?a={}&b={}", a.0, b.0)) { "the best beside the baseline" } }
        }
        (with_contents(sections))
    };
    frame(&title(view), SCRIPT, body)
}

/// The candidates of a run, newest first; `before` leads to older ones. `kind` says where the times come
/// from.
pub fn candidates(run: RunId, kind: TimeKind, lines: &[Line], before: Option<i64>) -> String {
    let us = |value: Option<f64>| value.map_or("–".to_owned(), time);
    let (forecast, timed) = match kind {
        TimeKind::Measured => ("predicted µs", "measured µs"),
        TimeKind::Predicted => ("µs, predicted at screening", "µs, predicted"),
    };
    let body = html! {
        (navigation("/run"))
        h1 { "Candidates of run " (run.0) }
        nav.actions {
            a href=(format!("/run/{}", run.0)) { "the run" }
            a href=(format!("/run/{}/candidates.csv", run.0)) download=(format!("run-{}.csv", run.0)) { "all candidates as CSV" }
        }
        div.scroll { table.candidates.stacks.sortable {
            thead { tr {
                th { "candidate" } th { "group" } th { "operator" } th { "last stage" } th { "rejected" } th.n { (forecast) } th.n { (timed) }
            } }
            tbody { @for line in lines {
                tr {
                    td { (number(line.id)) @if line.promoted { " ★" } }
                    td { (arm_name(line.arm)) } td title=(line.operator) { (operator_name(&line.operator)) }
                    td data-label="last stage" { (line.stage.map_or("–", stage_name)) }
                    td data-label="rejected" { (line.rejected.map_or("–", Reason::name).replace('_', " ")) }
                    td.n data-label=(forecast) { (us(line.predicted_us)) } td.n data-label=(timed) { (us(line.us)) }
                }
            } }
        } }
        @if let Some(before) = before { p { a href=(format!("/run/{}/candidates?before={before}", run.0)) { "older candidates" } } }
    };
    frame(&format!("Candidates of run {}", run.0), SCRIPT, body)
}

/// All candidates of a run as comma-separated values.
pub fn csv(lines: &[Line]) -> String {
    let quoted = |text: &str| format!("\"{}\"", text.replace('"', "\"\""));
    let number = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
    let mut text = "candidate,group,operator,last_stage,rejected,predicted_us,us,promoted\n".to_owned();
    for line in lines {
        let cells = [
            line.id.0.to_string(),
            quoted(arm_name(line.arm)),
            quoted(&line.operator.to_string()),
            quoted(line.stage.map_or("", stage_name)),
            quoted(line.rejected.map_or("", Reason::name)),
            number(line.predicted_us),
            number(line.us),
            line.promoted.to_string(),
        ];
        text += &cells.join(",");
        text.push('\n');
    }
    text
}

/// Two runs side by side.
pub fn compare(a: &RunView, b: &RunView) -> String {
    let both = [a, b];
    let is_predicted = both.iter().all(|run| run.kind() == Some(TimeKind::Predicted));
    let floor = if is_predicted { "uncertainty of the model" } else { "noise floor" };
    let body = html! {
        (navigation("/compare"))
        h1 { "Run " (a.id.0) " and run " (b.id.0) }
        @let common = in_common(both);
        @if common.is_empty() {
            p.warning { "These runs searched different problems: nothing below can be compared." }
        } @else if a.run.device != b.run.device {
            p.warning { "These runs are of different devices." }
        }
        @for (problem, views) in &common {
            h2 { (problem.title()) }
            (progress::overlay([(a.id.0, views[0]), (b.id.0, views[1])]))
        }
        div.scroll { table.compare {
            thead { tr { th {} @for run in both { th { a href=(format!("/run/{}", run.id.0)) { "run " (run.id.0) } } } } }
            tbody {
                (side_by_side("device", both, |run| run.run.device.clone()))
                (side_by_side("commit", both, |run| run.run.environment.commit.clone().unwrap_or("–".into())))
                (side_by_side("begun", both, |run| run.begun.clone()))
                (side_by_side("state", both, |run| run.state.name().to_owned()))
                (side_by_side("times", both, |run| kind_words(run.kind()).to_owned()))
                (side_by_side("candidates, with a time", both, |run| format!("{}, {}", grouped(run.candidates), grouped(run.timed))))
                (side_by_side("device time", both, |run| duration(run.cost.device_seconds)))
                @for problem in problems_of(both) {
                    tr { th colspan="3" { (problem.title()) } }
                    (of_problem("baseline µs", both, &problem, |p| p.baseline.as_ref().map(|r| time(r.us))))
                    (of_problem("best µs", both, &problem, |p| p.best.as_ref().map(|r| time(r.us))))
                    (of_problem("verdict", both, &problem, |p| Some(p.conclusion.1.clone())))
                    (of_problem("speed-up", both, &problem, |p| p.speedup().map(|(gain, range)| match range {
                        Some((low, high)) => {
                            format!("{} ({} to {}), {}", ratio(gain), ratio(low), ratio(high), super::verdict(p))
                        }
                        None => {
                            let by = if p.is_predicted() { "predictions" } else { "short timings" };
                            format!("~{}, by separate {by}", ratio(gain))
                        }
                    })))
                    (of_problem(floor, both, &problem, |p| p.noise_floor.map(ratio)))
                    (of_problem("best plan", both, &problem, |p| p.best.as_ref().map(|r| in_words(&r.subject))))
                    (of_problem("best random sample µs", both, &problem, |p| p.drawn.as_ref().map(|r| {
                        let alone = r.trial == Trial::Microbench;
                        format!("{}{}{}", time(r.us), if alone { ", " } else { "" }, if alone { trial_in(r.trial, r.kind) } else { "" })
                    })))
                }
            }
        } }
    };
    frame(&format!("Runs {} and {}", a.id.0, b.id.0), "", body)
}

fn side_by_side(name: &str, runs: [&RunView; 2], of: impl Fn(&RunView) -> String) -> Markup {
    html! { tr { td { (name) } @for run in runs { td { (of(run)) } } } }
}

/// A row of a problem; a dash where a run does not have the problem or the figure.
fn of_problem(
    name: &str,
    runs: [&RunView; 2],
    problem: &Shape,
    of: impl Fn(&ProblemView) -> Option<String>,
) -> Markup {
    let find = |run: &RunView| run.problems.iter().find(|p| p.problem == *problem).and_then(&of);
    side_by_side(name, runs, |run| find(run).unwrap_or("–".into()))
}

/// The problems that both runs searched, with their views.
fn in_common([a, b]: [&RunView; 2]) -> Vec<(Shape, [&ProblemView; 2])> {
    let find = |problem: &Shape| b.problems.iter().find(|p| p.problem == *problem);
    a.problems.iter().filter_map(|p| Some((p.problem, [p, find(&p.problem)?]))).collect()
}

/// The problems of two runs, each once.
fn problems_of(runs: [&RunView; 2]) -> Vec<Shape> {
    let mut all: Vec<Shape> = Vec::new();
    for problem in runs.iter().flat_map(|run| &run.problems) {
        if !all.contains(&problem.problem) {
            all.push(problem.problem);
        }
    }
    all
}

/// A candidate with its origin, its place in the ranking and its results. [`super::heat`] shows the kernel
/// after its analysis.
pub fn candidate(view: &Dossier, device: &str, standing: Option<&Ranked>) -> String {
    let new = &view.known.new;
    let id = view.known.id.0;
    let native = matches!(new.candidate, Candidate::Cpu(_));
    let body = html! {
        (navigation("/candidate"))
        h1 { "Candidate #" (id) }
        p.lead {
            (in_words(&new.candidate)) ", of " a href=(format!("/run/{}", new.run.0)) { "run " (new.run.0) }
            " on " (device) ", for " (new.problem.title()) ". "
            "Group: " (arm_name(new.arm)) "; operator: " b title=(new.operator) { (operator_name(&new.operator)) } "; " (moment(view.known.at)) "."
        }
        @if !new.parents.is_empty() {
            p { "From " @for (i, parent) in new.parents.iter().enumerate() { @if i > 0 { " and " } (number(*parent)) }
                @let changed = changes(&new.changes);
                @if !changed.is_empty() { ": " code { (changed) } }
                @if let Some(parent) = new.parents.first() { " (" a href=(format!("/diff?a={}&b={id}", parent.0)) { "side by side" } ")" }
                "." }
        }
        @if !view.children.is_empty() {
            p { "Parent of "
                @for (i, child) in view.children.iter().take(CHILDREN).enumerate() { @if i > 0 { ", " } (number(*child)) }
                @if view.children.len() > CHILDREN { ", …" } "." }
        }
        @for rejection in &view.rejections {
            div.hazard {
                b { "Rejected at " (stage_name(rejection.stage)) ": " (rejection.reason.name().replace('_', " ")) } br; (rejection.detail)
            }
        }
        section #plan {
            h2 { "Plan" }
            @if !matches!(new.candidate, Candidate::Kernel(_)) {
                // The script shows the button.
                button.copy type="button" hidden data-copy=(serde_json::json!(new.candidate)) { "copy as JSON" }
            }
            (plan(&new.candidate))
        }
        @if let Some((screening, findings)) = &view.screening {
            section #screening { h2 { "Screening" } (screened(screening, native)) (noted(findings)) }
        }
        section #times { h2 { "Times" }
            @if let Some(ranked) = standing { (ranked_at(ranked)) }
            (times(&view.forecasts, &view.measurements, &new.problem))
        }
        section #checks { h2 { "Checks" } (checks(&view.checks)) }
        @if !native {
            section #kernel { h2 { "Kernel" }
                (part(&format!("/candidate/{id}/kernel"), "The kernel is being taken apart …"))
            }
        }
    };
    frame(&format!("Candidate #{id}"), SCRIPT, body)
}

/// The one time by which a candidate is ranked and named on every page, and where the time comes from.
fn ranked_at(ranked: &Ranked) -> Markup {
    html! {
        p {
            "Ranked at " b { (time(ranked.us)) " µs" } ": "
            @match (ranked.against, ranked.incumbent_us) {
                (Some(race), Some(us)) => {
                    (time(us)) " µs of " (number(race.incumbent)) ", divided by the ratio " (ratio(race.ratio))
                    " of the last race between the two."
                }
                _ if ranked.kind == TimeKind::Predicted => "the time that the model predicts.",
                _ => "the short timing.",
            }
        }
    }
}

/// A slow part, which the script loads later.
fn part(from: &str, meanwhile: &str) -> Markup {
    html! { div.part data-part=(from) { p.soft { (meanwhile) " " noscript { a href=(from) { "show it" } } } } }
}

/// Two candidates side by side, after both are analysed.
pub fn pair(a: CandidateId, b: CandidateId) -> String {
    let body = html! {
        (navigation("/diff"))
        h1 { (number(a)) " beside " (number(b)) }
        (part(&format!("/diff/part?a={}&b={}", a.0, b.0), "Both kernels are being taken apart …"))
    };
    frame(&format!("#{} beside #{}", a.0, b.0), SCRIPT, body)
}

fn plan(candidate: &Candidate) -> Markup {
    html! {
        @match candidate {
            Candidate::Gpu(plan) => (figures(&serde_json::json!(plan))),
            Candidate::Cpu(plan) => (figures(&serde_json::json!(plan))),
            Candidate::Kernel(source) => {
                details { summary { "the launch file" } pre.source { (source.launch) } }
                details { summary { "the source, " (grouped(source.text.lines().count() as u64)) " lines" } pre.source { (source.text) } }
            }
        }
    }
}

/// The results of the screening. For a native plan, which has no PTX, the hash is the plan's.
fn screened(s: &Screening, native: bool) -> Markup {
    let count = |value: Option<u32>| value.map_or("–".to_owned(), grouped);
    html! {
        dl.figures {
            div { dt { "hash of the " @if native { "plan" } @else { "PTX" } } dd { code { (s.ptx_hash) } } }
            @if let Some(sass) = &s.sass_hash { div { dt { "hash of the machine code" } dd { code { (sass) } } } }
            @if !native {
                div { dt { "registers a thread" } dd { (count(s.registers)) } }
                div { dt { "bytes spilled" } dd { (count(s.spill_bytes)) } }
                div { dt { "bytes of shared memory" } dd { (count(s.shared_bytes)) } }
            }
            div { dt { "bound by" } dd { (s.bound.as_deref().unwrap_or("–").replace('_', " ")) } }
            div { dt { "tile" } dd { (s.tile.as_deref().unwrap_or("–")) } }
        }
    }
}

/// The findings that the screening stored.
fn noted(findings: &Value) -> Markup {
    let list = findings.as_array().map(Vec::as_slice).unwrap_or_default();
    let text = |f: &Value, field: &str| f[field].as_str().unwrap_or_default().to_owned();
    html! {
        @if !list.is_empty() {
            ul.causes { @for f in list.iter().take(4) {
                li {
                    b { (text(f, "name")) } @if let Some(gain) = f["expected_gain"].as_f64() { ", at most " (ratio(gain)) }
                    ": " (text(f, "evidence"))
                }
            } }
        }
    }
}

pub(super) fn times(forecasts: &[Forecast], measurements: &[MeasurementFact], own: &Shape) -> Markup {
    if forecasts.is_empty() && measurements.is_empty() {
        return html! { p.soft { "None yet." } };
    }
    html! {
        div.scroll { table.times.stacks {
            thead { tr { th { "what" } th { "problem" } th.n { "µs" } th.n { "interval" } th.n { "samples" } th { "against" } } }
            tbody {
                @for f in forecasts { tr {
                    td { "forecast by " (f.author) @if !f.hypothesis.is_empty() { ": " (f.hypothesis) } } td { (f.problem.as_ref().map_or("–".to_owned(), |problem| problem.title())) } td.n data-label="µs" { (time(f.us)) }
                    td.n data-label="interval" { (time(f.low_us)) " – " (time(f.high_us)) } td.n data-label="samples" { "–" } td data-label="against" { "–" }
                } }
                @for m in measurements { tr {
                    @let second = m.trial == Trial::HeldOut && m.problem == *own;
                    td { @if second { "second " } (trial_in(if second { Trial::Race } else { m.trial }, m.kind)) }
                    td { (m.problem.title()) } td.n data-label="µs" { b { (time(m.us)) } }
                    td.n data-label="interval" { (time(m.low_us)) " – " (time(m.high_us)) } td.n data-label="samples" { (m.samples.len()) }
                    td data-label="against" { @match m.against {
                        Some(a) => {
                            (number(a.incumbent)) ": " (ratio(a.ratio)) " (" (ratio(a.low)) " to " (ratio(a.high)) "), " b { (a.verdict.name()) }
                        }
                        None => "–",
                    } }
                } }
            }
        } }
        @if measurements.iter().any(|m| m.against.is_some()) {
            p.soft {
                "Each time of this table is the mean of the middle half of its own samples; that of a race on a GPU is their "
                "median. Clocks and other work differ from one measurement to the next, so that only times of one race compare."
            }
        }
    }
}

fn checks(checks: &[CheckFact]) -> Markup {
    if checks.is_empty() {
        return html! { p.soft { "None yet." } };
    }
    html! {
        @for check in checks {
            p {
                "By " @match check.judge { Judge::Emulator => "the emulator", Judge::Device => "the device" } ": "
                span class=(format!("verdict {}", check.verdict.name())) { (check.verdict.name()) }
                @if let Some(error) = check.error_rel { ", relative error " (format!("{error:.2e}")) }
                ", " (format!("{:.2}", check.seconds)) " s."
            }
            @for reason in check.reasons.iter().take(8) { div.hazard { (reason) } }
            @for hazard in check.hazards.as_array().into_iter().flatten().take(8) {
                div.hazard {
                    (hazard["message"].as_str().unwrap_or_default())
                    @if let Some(line) = hazard["line"].as_u64() { code { "line " (line) } }
                }
            }
        }
    }
}

/// The fastest plans for a problem and a device, with links to the other combinations.
pub fn top(problems: &[(Shape, String)], chosen: Option<(&Shape, &str)>, best: &[Ranked]) -> String {
    let body = html! {
        (navigation("/topk"))
        h1 { "Fastest plans" }
        @if problems.is_empty() { p.soft { "No plan has a time yet." } }
        nav.contents { @for (problem, device) in problems {
            @let current = chosen.is_some_and(|(p, d)| p == problem && d == device);
            a href=(address(problem, device)) aria-current=[current.then_some("page")] { (problem.title()) " on " (device) }
        } }
        @if let Some((problem, device)) = chosen {
            @let is_predicted = best.iter().any(|timed| timed.kind == TimeKind::Predicted);
            @let over = if is_predicted { "over the plan of the comparison" } else { "over the plan it raced" };
            h2 { (problem.title()) " on " (device) }
            div.scroll { table.best.stacks.sortable {
                thead { tr {
                    th { "candidate" } th { "plan" } th { "operator" } th.n { "µs" } th.n { "interval" } th { "by" } th { (over) }
                } }
                tbody { @for timed in best {
                    @let short = timed.trial == Trial::Microbench;
                    tr {
                        td { (number(timed.candidate)) @if timed.promoted { " ★" } }
                        td { (in_words(&timed.subject)) } td title=(timed.operator) { (operator_name(&timed.operator)) }
                        td.n data-label="µs" { @if short { span.soft { (time(timed.us)) } } @else { b { (time(timed.us)) } } }
                        td.n data-label="interval" { (time(timed.low_us)) " – " (time(timed.high_us)) }
                        td data-label="by" { (trial_in(timed.trial, timed.kind)) }
                        td data-label=(over) { @match timed.against {
                            Some(race) => {
                                (ratio(race.ratio)) " " (race.verdict.name()) " over " (number(race.incumbent))
                                @if let Some(us) = timed.incumbent_us { " at " (time(us)) " µs" }
                            }
                            None => "–",
                        } }
                    }
                } }
            } }
            p.soft {
                @if best.iter().any(|timed| timed.trial == Trial::Microbench) {
                    @if is_predicted { "Candidates that were compared come first; grey times are predicted alone. " }
                    @else { "Candidates that raced come first; grey times are single short timings. " }
                }
                "Runs begin with different plans: compare times, not ratios."
            }
        }
    };
    frame("Fastest plans", SCRIPT, body)
}

/// The address of the fastest plans for a problem on a device. The address stays valid while the ledger
/// grows.
fn address(problem: &Shape, device: &str) -> String {
    format!("/topk?problem={}&device={}", encoded(&words(&problem.problem())), encoded(device))
}

/// Percent-encodes a query component (RFC 3986, section 2.1).
fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~,/".contains(&byte);
    let one = |byte: u8| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(one).collect()
}

/// The scores of all forecasters, and people's forecasts of ideas.
pub fn forecasts(authors: &[(String, String, Vec<Pair>)], told: &[ByHand]) -> String {
    let body = html! {
        (navigation("/forecasts"))
        h1 { "Forecasts" }
        @if authors.is_empty() { p.soft { "Nothing that was forecast has been measured yet." } }
        @for (author, device, pairs) in authors {
            section { h2 { (author) ", " (device) }
                div.halves { div { (scatter::chart(pairs, Links::Live)) } div { (scatter::score(pairs)) (scatter_legend(pairs)) } }
            }
        }
        section { h2 { "Manual forecasts" }
            @if told.is_empty() { p.soft { "No manual forecasts yet: " code { "flashcore forecast add" } " records one." } }
            @else { div.scroll { table.told.stacks {
                thead { tr { th { "idea" } th { "by" } th { "device" } th.n { "expected µs" } th.n { "came out" } th { "verdict" } } }
                tbody { @for t in told { (told_row(t)) } }
            } } }
        }
    };
    frame("Forecasts", "", body)
}

fn told_row(told: &ByHand) -> Markup {
    let f = &told.forecast;
    html! {
        tr {
            td {
                @if let Some(id) = f.candidate { (number(id)) " " }
                (f.hypothesis)
                @if let Some(note) = told.note.as_ref().filter(|note| !note.is_empty()) { br; span.soft { (note) } }
            }
            td data-label="by" { (f.author) } td data-label="device" { (f.device) } td.n data-label="expected µs" { (time(f.us)) " (" (time(f.low_us)) " – " (time(f.high_us)) ")" }
            td.n data-label="came out" { (told.measured_us.map_or("–".to_owned(), time)) }
            td data-label="verdict" { @match told.measured_us {
                Some(us) if (f.low_us..=f.high_us).contains(&us) => "as expected",
                Some(us) => { (percent(f.us / us - 1.0)) " off" }
                None => span.soft { "open" },
            } }
        }
    }
}

/// An error page with the accepted values.
pub fn failure(status: &str, what: &str, accepted: &str) -> String {
    let body = html! {
        (navigation(""))
        h1 { (status) }
        p { (what) }
        @if !accepted.is_empty() { p.soft { (accepted) } }
    };
    frame(status, "", body)
}
