//! What each address answers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Json;
use axum::extract::{Path, Query, State};
use axum::http::{Uri, header};
use axum::response::{Html, IntoResponse};
use lab::bench::suites;
use lab::ledger::{CandidateId, Ledger, RunId};
use lab::report::evolution::{self as evolution, Links, RunRow, RunView, Section};
use serde_json::{Value, json};

use super::Site;
use super::kernels::exhibit;
use super::recent::Recent;
use super::trouble::Trouble;

type Page = Result<Html<String>, Trouble>;
type Shared = State<Arc<Site>>;
type Asked = Query<HashMap<String, String>>;

/// Rows of a list on one page.
const ROWS: usize = 50;
/// Plans in the list of the fastest.
const PLANS: usize = 40;
/// Forecasts that are drawn and scored.
const FORECASTS: usize = 1500;
/// Forecasts by hand that are listed.
const BY_HAND: usize = 200;
/// Runs whose sections are kept.
const RUNS: usize = 8;

const NUMBER: &str = "Accepted: a number.";

fn number(argument: &'static str, value: &str) -> Result<i64, Trouble> {
    let wrong = || Trouble::Argument { argument, value: value.to_owned(), accepted: NUMBER };
    value.parse().map_err(|_| wrong())
}

fn asked(query: &Asked, argument: &'static str) -> Result<Option<i64>, Trouble> {
    query.get(argument).map(|value| number(argument, value)).transpose()
}

pub async fn script() -> impl IntoResponse {
    ([(header::CONTENT_TYPE, "text/javascript; charset=utf-8")], evolution::SCRIPT_TEXT)
}

pub async fn nothing(uri: Uri) -> Trouble {
    Trouble::Page(uri.path().to_owned())
}

pub async fn reads_only() -> Trouble {
    Trouble::Method
}

pub async fn runs(State(site): Shared, query: Asked) -> Page {
    let before = asked(&query, "before")?.unwrap_or(i64::MAX);
    site.ask(move |site, ledger| {
        let mut lines = ledger.runs()?;
        lines.retain(|line| line.id.0 < before);
        let older = (lines.len() > ROWS).then(|| lines[ROWS - 1].id.0);
        lines.truncate(ROWS);
        let rows = lines.into_iter().map(|line| RunRow::of(ledger, line)).collect::<Result<Vec<_>, _>>()?;
        Ok(Html(evolution::runs(&site.ledger.display().to_string(), &rows, older)))
    })
    .await
}

/// The sections of a run, drawn.
pub struct Sections {
    state: i64,
    page: String,
    news: Value,
    parts: HashMap<String, String>,
}

/// The runs that were looked at last.
pub type Drawn = Recent<RunId, Mutex<Option<Arc<Sections>>>, RUNS>;

/// A run's sections as the ledger stands: drawn anew when anything was added to it.
fn drawn(site: &Site, ledger: &Ledger, run: RunId) -> Result<Arc<Sections>, Trouble> {
    // Whoever asks for the same run meanwhile waits for it, and finds it drawn.
    let cell = site.drawn.cell(run);
    let mut drawn = cell.lock().unwrap_or_else(PoisonError::into_inner);
    let state = ledger.state()?;
    if let Some(known) = drawn.as_ref().filter(|known| known.state == state) {
        return Ok(Arc::clone(known));
    }
    let view = RunView::of(ledger, run)?;
    let sections = evolution::sections(&view, Links::Live);
    let made = Arc::new(Sections {
        state,
        page: evolution::live_run(&view, &sections),
        news: news_of(&view, &sections),
        parts: sections.iter().map(|s| (s.id.clone(), s.inner().into_string())).collect(),
    });
    *drawn = Some(Arc::clone(&made));
    Ok(made)
}

/// What the script asks for: what changed, and the figures that matter.
fn news_of(view: &RunView, sections: &[Section]) -> Value {
    let problems = view.problems.iter().map(|p| {
        json!({
            "problem": p.problem,
            "baseline_us": p.baseline.as_ref().map(|b| b.us),
            "best": p.best.as_ref().map(|b| b.candidate),
            "best_us": p.best.as_ref().map(|b| b.us),
            "speedup": p.speedup().map(|(ratio, _)| ratio),
        })
    });
    json!({
        "run": view.id,
        "title": evolution::page_title(view),
        "state": view.state.name(),
        "kind": view.kind(),
        "candidates": view.candidates,
        "timed": view.timed,
        "problems": problems.collect::<Vec<_>>(),
        "sections": sections.iter().map(|s| (s.id.clone(), json!(s.hash()))).collect::<serde_json::Map<_, _>>(),
    })
}

pub async fn run(State(site): Shared, Path(run): Path<String>) -> Page {
    let run = RunId(number("run", &run)?);
    site.ask(move |site, ledger| Ok(Html(drawn(site, ledger, run)?.page.clone()))).await
}

pub async fn news(State(site): Shared, Path(run): Path<String>) -> Result<Json<Value>, Trouble> {
    let run = RunId(number("run", &run)?);
    site.ask(move |site, ledger| Ok(Json(drawn(site, ledger, run)?.news.clone()))).await
}

pub async fn part(State(site): Shared, Path((run, part)): Path<(String, String)>) -> Page {
    let run = RunId(number("run", &run)?);
    site.ask(move |site, ledger| {
        let sections = drawn(site, ledger, run)?;
        let found = sections.parts.get(&part).cloned();
        found.map(Html).ok_or(Trouble::Part { run: run.0, part })
    })
    .await
}

pub async fn candidates(State(site): Shared, Path(run): Path<String>, query: Asked) -> Page {
    let run = RunId(number("run", &run)?);
    let before = asked(&query, "before")?.map(CandidateId);
    site.ask(move |_, ledger| {
        ledger.run(run)?;
        let mut lines = ledger.lines(run, before, ROWS + 1)?;
        let older = (lines.len() > ROWS).then(|| lines[ROWS - 1].id.0);
        lines.truncate(ROWS);
        Ok(Html(evolution::candidates(run, &lines, older)))
    })
    .await
}

pub async fn candidate(State(site): Shared, Path(candidate): Path<String>) -> Page {
    let id = CandidateId(number("candidate", &candidate)?);
    site.ask(move |_, ledger| {
        let dossier = ledger.candidate(id)?;
        let device = ledger.run(dossier.known.new.run)?.device;
        Ok(Html(evolution::candidate(&dossier, &device)))
    })
    .await
}

pub async fn kernel(State(site): Shared, Path(candidate): Path<String>) -> Page {
    let shown = exhibit(&site, CandidateId(number("candidate", &candidate)?)).await?;
    Ok(Html(evolution::heat(&shown).into_string()))
}

fn two(query: &Asked) -> Result<(CandidateId, CandidateId), Trouble> {
    let one = |argument| {
        let missing = || Trouble::Argument {
            argument,
            value: String::new(),
            accepted: "Accepted: /diff?a=N&b=M, numbers of candidates.",
        };
        asked(query, argument)?.map(CandidateId).ok_or_else(missing)
    };
    Ok((one("a")?, one("b")?))
}

pub async fn pair(State(site): Shared, query: Asked) -> Page {
    let (a, b) = two(&query)?;
    site.ask(move |_, ledger| {
        ledger.candidate(a)?;
        ledger.candidate(b)?;
        Ok(Html(evolution::pair(a, b)))
    })
    .await
}

pub async fn difference(State(site): Shared, query: Asked) -> Page {
    let (a, b) = two(&query)?;
    let (a, b) = (exhibit(&site, a).await?, exhibit(&site, b).await?);
    let page = tokio::task::spawn_blocking(move || {
        evolution::difference(&a, &b, evolution::Lines::Shown).into_string()
    })
    .await;
    page.map(Html).map_err(|error| Trouble::Internal(error.to_string()))
}

pub async fn top(State(site): Shared, query: Asked) -> Page {
    let asked = |name: &str| query.get(name).cloned();
    let (problem, device) = (asked("problem"), asked("device"));
    site.ask(move |_, ledger| {
        let mut all = Vec::new();
        for device in ledger.devices()? {
            // A name finds the devices that have it in theirs, too.
            for best in ledger.best_of_problems(&device)? {
                if !all.contains(&(best.problem, best.device.clone())) {
                    all.push((best.problem, best.device));
                }
            }
        }
        let wanted = |wanted: &Option<String>, found: &str| wanted.as_ref().is_none_or(|w| w == found);
        let chosen = all.iter().find(|(shape, name)| {
            wanted(&problem, &suites::words(&shape.problem())) && wanted(&device, name)
        });
        if chosen.is_none() && (problem.is_some() || device.is_some()) {
            return Err(Trouble::Argument {
                argument: "problem and device",
                value: [problem, device].into_iter().flatten().collect::<Vec<_>>().join(" on "),
                accepted: "Accepted: what /topk links to.",
            });
        }
        let best = match chosen {
            Some((problem, device)) => ledger.topk(problem, device, PLANS)?,
            None => Vec::new(),
        };
        Ok(Html(evolution::top(&all, chosen.map(|(problem, device)| (problem, device.as_str())), &best)))
    })
    .await
}

pub async fn forecasts(State(site): Shared) -> Page {
    site.ask(move |_, ledger| {
        let mut authors = Vec::new();
        for (author, device) in ledger.forecasters()? {
            let pairs = ledger.pairs(&author, &device, FORECASTS)?;
            authors.push((author, device, pairs));
        }
        Ok(Html(evolution::forecasts(&authors, &ledger.by_hand(BY_HAND)?)))
    })
    .await
}
