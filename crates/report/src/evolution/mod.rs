//! Pages of a search: a run as one self-contained file, or its sections for a live page.

mod axis;
mod cascade;
mod decisions;
mod gains;
mod kernel;
mod lineage;
mod live;
mod niches;
pub mod pages;
mod progress;
mod races;
mod ranking;
mod roofline;
mod scatter;
#[cfg(test)]
mod tests;
mod view;
mod words;

use maud::{Markup, PreEscaped, html};

use axis::{grouped, percent, ratio, time};
use bench::Load;
use gains::gains;
use ledger::{CandidateId, Pair, Ranked, Score, TimeKind, Trial};
use words::{arm_class, arm_name, kind_badge, kind_words, stage_name, trial_in};

pub use kernel::{AnalysedKernel, Lines, Work, difference, heat};
pub use live::{SCRIPT, SCRIPT_TEXT, failure};
pub use view::{ProblemView, RunRow, RunView, State, in_words};

/// Distance from a text's baseline to the middle of its letters, pixels.
const AXIS_TEXT: f64 = 4.0;

/// The target of a link to a candidate.
#[derive(Clone, Copy, Debug)]
pub enum Links<'a> {
    /// The candidate's own page.
    Live,
    /// The candidate's kernel on the same page, for these candidates only.
    Within(&'a [CandidateId]),
}

impl Links<'_> {
    fn number(self, id: CandidateId) -> Markup {
        self.candidate(id, html! { "#" (id.0) })
    }

    fn candidate(self, id: CandidateId, content: Markup) -> Markup {
        let to = match self {
            Links::Live => format!("/candidate/{}", id.0),
            Links::Within(shown) if shown.contains(&id) => format!("#kernel-{}", id.0),
            Links::Within(_) => return content,
        };
        html! { a href=(to) { (content) } }
    }
}

/// A section of a run's page, which can be updated separately.
pub struct Section {
    pub id: String,
    /// The title; `None` for the head.
    pub title: Option<String>,
    pub body: Markup,
}

impl Section {
    fn new(id: impl Into<String>, title: &str, body: Markup) -> Section {
        Section { id: id.into(), title: Some(title.to_owned()), body }
    }

    /// The inner markup, without the section element.
    pub fn inner(&self) -> Markup {
        html! { @if let Some(title) = &self.title { h2 { (title) } } (self.body) }
    }

    /// A hash that changes with the section.
    pub fn hash(&self) -> String {
        bench::provenance::hash(self.inner().into_string().as_bytes())
    }

    /// The section element in the page.
    fn markup(&self) -> Markup {
        html! { section id=(self.id) data-hash=(self.hash()) { (self.inner()) } }
    }
}

/// The page of a run as one file without scripts or network access. `analysed` are the kernels to show line
/// by line: the baseline and the best.
pub fn page(view: &RunView, analysed: &[AnalysedKernel]) -> String {
    let shown: Vec<CandidateId> = analysed.iter().filter(|e| !e.is_native()).map(|e| e.id).collect();
    let mut sections = sections(view, Links::Within(&shown));
    if let [first, second] = analysed {
        let body = difference(first, second, Lines::Folded);
        sections.push(Section::new("difference", "The best beside the baseline", body));
    }
    let has_lines = |analysed: &&AnalysedKernel| !analysed.is_native();
    sections.extend(analysed.iter().filter(has_lines).map(|analysed| {
        let title = format!("Kernel #{}, line by line", analysed.id.0);
        Section::new(format!("kernel-{}", analysed.id.0), &title, kernel::heat(analysed))
    }));
    let body = with_contents(&sections);
    frame(&title(view), "", body)
}

/// The frame of every page of a search. `script` is the address of its script, or empty.
fn frame(title: &str, script: &str, body: Markup) -> String {
    let head = html! {
        // An empty icon avoids a request for one.
        link rel="icon" href="data:,";
        style { (PreEscaped(include_str!("style.css"))) }
        @if !script.is_empty() { script src=(script) defer {} }
    };
    crate::frame(&format!("{title} · FlashCore"), head, html! { body.wide { (body) } })
}

fn title(view: &RunView) -> String {
    let problem = view.problems.first().map_or_else(String::new, |p| format!(": {}", p.problem.title()));
    format!("Run {}{problem}", view.id.0)
}

/// The head, the table of contents, and the sections.
fn with_contents(sections: &[Section]) -> Markup {
    let (head, rest) = sections.split_at(sections.len().min(1));
    html! { @for section in head { (section.markup()) } (contents(rest)) @for section in rest { (section.markup()) } }
}

fn contents(sections: &[Section]) -> Markup {
    html! {
        nav.contents aria-label="Sections" {
            @for section in sections {
                @if let Some(title) = &section.title { a href=(format!("#{}", section.id)) { (title) } }
            }
        }
    }
}

pub fn sections(view: &RunView, links: Links) -> Vec<Section> {
    let mut sections = vec![Section { id: "summary".into(), title: None, body: summary(view, links) }];
    for (i, problem) in view.problems.iter().enumerate() {
        // With a single problem, titles do not name it.
        let named = |title: &str| match view.problems.len() {
            1 => title.to_owned(),
            _ => format!("{title}: {}", problem.problem.title()),
        };
        let floor = roofline::floor_us(&view.run, problem);
        let mut add = |id: &str, title: &str, body| {
            sections.push(Section::new(format!("{id}-{i}"), &named(title), body))
        };
        add("progress", "Best so far", html! { (gains(problem)) (progress::chart(problem, floor)) });
        add("top", "The fastest", html! { (ranking::chart(problem, links)) (ranking_legend(problem)) });
        // Predicted times have one sample each.
        if view.kind() != Some(TimeKind::Predicted) {
            add("races", "Every sample of the races", races::strips(problem, links));
        }
        add("lineage", "Lineage of the best", lineage::tree(problem, links));
        add(
            "space",
            "Where the fast ones are",
            html! {
                div.halves {
                    div { h3 { "Cells" } (niches::map(problem, links)) }
                    div { h3 { "Under the roofline" } (roofline::chart(&view.run, problem)) }
                }
            },
        );
    }
    sections.push(Section::new(
        "forecasts",
        "Forecast and outcome",
        html! {
            div.halves {
                div { (scatter::chart(&view.forecasts, links)) }
                div { (scatter::score(&view.forecasts)) (scatter_legend(&view.forecasts)) }
            }
        },
    ));
    sections.push(Section::new("rejections", "Why candidates were rejected", html! {
        div.halves { div { h3 { "Stage by stage" } (cascade::funnel(view)) } div { h3 { "By reason" } (cascade::rejections(view, links)) } }
    }));
    sections.push(Section::new(
        "operators",
        "What operators earned, and what it cost",
        html! {
            // One below the other: operator names are long, and the tables should not scroll sideways.
            (cascade::operators(view)) (cascade::cost(view))
        },
    ));
    sections.push(Section::new("decisions", "Decisions", decisions::decisions(&view.decisions, links)));
    sections
}

/// The summary: run, device, progress and the main figures.
fn summary(view: &RunView, links: Links) -> Markup {
    let environment = &view.run.environment;
    html! {
        h1 { (title(view)) }
        p.lead {
            (kind_badge(view.kind())) " "
            "on " b { (view.run.device) } ", " (environment.driver) ", " (environment.compiler)
            @if let Some(commit) = &environment.commit { ", commit " code { (commit) } } "."
            " Begun " (view.begun) ", latest entry " (view.latest) ", "
            span class=(format!("state {}", view.state.name())) { (view.state.name()) } "."
        }
        (disturbances(view))
        @for (i, problem) in view.problems.iter().enumerate() {
            @if view.problems.len() > 1 { h3 { (problem.problem.title()) } }
            p.conclusion { (problem.conclusion.1) }
            (tiles(problem, i == 0, view, links))
        }
    }
}

/// Disturbances of the run's times: other work on the processor, and races whose samples have two modes.
fn disturbances(view: &RunView) -> Markup {
    let load = serde_json::from_value::<Option<Load>>(view.run.config["load"].clone()).unwrap_or_default();
    let busy = load.and_then(|load| load.words());
    let races = || view.problems.iter().flat_map(|problem| &problem.races);
    let two = races().filter(|race| race.modes.is_some()).count();
    html! {
        @if busy.is_some() || two > 0 {
            p.warning {
                b { "This machine was busy: the figures are unreliable. " }
                @if let Some(words) = busy { "Before the run " (words) ". " }
                @if two > 0 { "The samples of " (two) " of " (races().count()) " races have two modes." }
            }
        }
    }
}

fn tiles(problem: &ProblemView, whole: bool, view: &RunView, links: Links) -> Markup {
    let speedup = problem.speedup();
    html! {
        dl.tiles {
            @for (name, ranked) in [("baseline", &problem.baseline), ("best", &problem.best)] {
                @if let Some(r) = ranked {
                    (tile(name, html! { (time(r.us)) small { " µs" } }, html! {
                        (links.number(r.candidate)) " " (in_words(&r.subject))
                        @if let (true, Some(us)) = (name == "baseline", problem.beside_best()) { "; " (time(us)) " µs beside the best" }
                    }))
                }
            }
            @if let Some((gain, range)) = speedup {
                @let is_gain = problem.conclusion.0;
                (tile("speed-up", html! { @if is_gain { (ratio(gain)) } @else { "no gain found" } }, match range {
                    Some((low, high)) => html! {
                        @if !is_gain { (ratio(gain)) ", " }
                        (ratio(low)) " to " (ratio(high)) ", " (verdict(problem))
                        @if let Some(floor) = problem.noise_floor { "; " (below(floor, view.kind())) }
                    },
                    None => html! { @if !is_gain { (ratio(gain)) ", " } "a ratio of separate timings" },
                }))
            }
            @if whole {
                (tile("candidates", html! { (grouped(view.candidates)) }, html! { (grouped(view.timed)) " with a time" }))
                (tile("device time", html! { (cascade::duration(view.cost.device_seconds)) }, match view.cost.price {
                    Some(cost) => html! { "cost " (format!("{cost:.2}")) },
                    None if view.cost.device_seconds > 0.0 => html! { "evolve --price gives its cost" },
                    None => html! { "no device was used" },
                }))
                @if !view.forecasts.is_empty() {
                    @let score = Score::of("", "", &view.forecasts);
                    (tile("forecasts", html! { (scatter::correlation(&score)) }, html! {
                        "rank correlation; median error " (percent(score.median_error))
                    }))
                }
            }
        }
    }
}

/// The verdict of the best candidate's race.
fn verdict(problem: &ProblemView) -> &'static str {
    problem.best.as_ref().and_then(|best| best.against).map_or("not compared", |race| race.verdict.name())
}

/// The meaning of the noise floor. That of predictions is the model's uncertainty.
fn below(floor: f64, kind: Option<TimeKind>) -> String {
    match kind {
        Some(TimeKind::Predicted) => {
            format!("the model cannot tell differences below {} apart", ratio(floor))
        }
        _ => format!("differences below {} are noise", ratio(floor)),
    }
}

fn tile(name: &str, figure: Markup, note: Markup) -> Markup {
    html! { div { dt { (name) } dd.figure { (figure) } dd.note { (note) } } }
}

fn ranking_legend(view: &ProblemView) -> Markup {
    let is_predicted = view.is_predicted();
    let raced = |t: &Ranked| t.trial == Trial::Race;
    let order = match (view.top.iter().any(raced), view.top.iter().all(raced)) {
        (true, false) => "; those that raced come first, the others by their short timings",
        (true, true) => "; times are the baseline's over the race's ratio",
        (false, _) => "; times are short timings",
    };
    html! {
        div.legend {
            span { i.key.evolution {} "evolution" } span { i.key.random {} "random" }
            span { i.key.baseline {} "baseline" }
            @if view.reference.is_some() { span { i.key.reference {} "shipped" } }
            span { i.key.control {} "control" }
            span { "★ promoted" }
            span.soft {
                @if is_predicted {
                    "Times are predicted. "
                    @if let Some(floor) = view.noise_floor { "The model cannot tell differences below " (ratio(floor)) " apart. " }
                } @else {
                    "Lines: 95 % intervals" @if !view.top.is_empty() { (order) }
                    ". ~: a ratio of separate timings, not a race against the baseline. "
                }
                span.roomy { "The axis does not begin at 0." }
            }
        }
    }
}

fn scatter_legend(pairs: &[Pair]) -> Markup {
    html! {
        @if !pairs.is_empty() {
            div.legend {
                span { i.key.inside {} "within its interval" } span { i.key.outside {} "outside" }
                span { i.key.same {} "as predicted" }
            }
            p.soft { "Above the line a candidate was slower than predicted, below it faster." }
        }
    }
}
