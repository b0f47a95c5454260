//! Answers the request for each address.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Json;
use axum::extract::{Path, Query, State};
use axum::http::{Uri, header};
use axum::response::{Html, IntoResponse};
use ledger::{CandidateId, Ledger, RunId};
use report::evolution::{self, pages};
use serde_json::Value;

use super::Site;
use super::kernels::analysed;
use super::recent::Recent;
use super::trouble::Trouble;

type Page = Result<Html<String>, Trouble>;
type Shared = State<Arc<Site>>;
type Asked = Query<HashMap<String, String>>;

/// Number of runs whose sections are kept.
const RUNS: usize = 8;

const NUMBER: &str = "Expected a number.";

fn number(argument: &'static str, value: &str) -> Result<i64, Trouble> {
    let wrong = || Trouble::Argument { argument, value: value.to_owned(), accepted: NUMBER };
    value.parse().map_err(|_| wrong())
}

fn asked(query: &Asked, argument: &'static str) -> Result<Option<i64>, Trouble> {
    query.get(argument).map(|value| number(argument, value)).transpose()
}

/// The names that a page accepts after `?`.
fn parameters(route: &str) -> &'static [&'static str] {
    match route {
        "/" | "/run/{run}/candidates" => &["before"],
        "/compare" | "/diff" | "/diff/part" => &["a", "b"],
        "/topk" => &["problem", "device"],
        _ => &[],
    }
}

/// The first parameter of an address that its page does not have, or that the address gives twice. Such an
/// address would silently show something else than it says.
pub fn unknown_parameter(route: &str, uri: &Uri) -> Option<Trouble> {
    let Ok(Query(given)) = Query::<Vec<(String, String)>>::try_from_uri(uri) else {
        return Some(Trouble::Parameter {
            name: uri.query().unwrap_or_default().to_owned(),
            accepted: parameters(route),
        });
    };
    let names: Vec<&str> = given.iter().map(|(name, _)| name.as_str()).collect();
    let wrong = |(at, name): (usize, &&str)| !parameters(route).contains(name) || names[..at].contains(name);
    let (_, name) = names.iter().enumerate().find(|&found| wrong(found))?;
    Some(Trouble::Parameter { name: (*name).to_owned(), accepted: parameters(route) })
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
    let before = asked(&query, "before")?.map(RunId);
    site.ask(move |_, ledger| Ok(Html(pages::runs(ledger, before)?))).await
}

/// The page of a run, and the state of the ledger that it shows.
pub struct Sections {
    state: i64,
    shown: pages::RunPage,
}

/// The sections of the runs that were requested most recently.
pub type Drawn = Recent<RunId, Mutex<Option<Arc<Sections>>>, RUNS>;

/// The sections of a run, rendered again if the ledger has changed.
fn drawn(site: &Site, ledger: &Ledger, run: RunId) -> Result<Arc<Sections>, Trouble> {
    // Simultaneous requests for a run wait for this lock and find the sections rendered.
    let cell = site.drawn.cell(run);
    let mut drawn = cell.lock().unwrap_or_else(PoisonError::into_inner);
    let state = ledger.state()?;
    if let Some(known) = drawn.as_ref().filter(|known| known.state == state) {
        return Ok(Arc::clone(known));
    }
    let made = Arc::new(Sections { state, shown: pages::run(ledger, run)? });
    *drawn = Some(Arc::clone(&made));
    Ok(made)
}

pub async fn run(State(site): Shared, Path(run): Path<String>) -> Page {
    let run = RunId(number("run", &run)?);
    site.ask(move |site, ledger| Ok(Html(drawn(site, ledger, run)?.shown.page.clone()))).await
}

pub async fn news(State(site): Shared, Path(run): Path<String>) -> Result<Json<Value>, Trouble> {
    let run = RunId(number("run", &run)?);
    site.ask(move |site, ledger| Ok(Json(drawn(site, ledger, run)?.shown.news.clone()))).await
}

pub async fn part(State(site): Shared, Path((run, part)): Path<(String, String)>) -> Page {
    let run = RunId(number("run", &run)?);
    site.ask(move |site, ledger| {
        let drawn = drawn(site, ledger, run)?;
        let found = drawn.shown.parts.get(&part).cloned();
        found.map(Html).ok_or(Trouble::Part { run: run.0, part })
    })
    .await
}

pub async fn candidates(State(site): Shared, Path(run): Path<String>, query: Asked) -> Page {
    let run = RunId(number("run", &run)?);
    let before = asked(&query, "before")?.map(CandidateId);
    site.ask(move |_, ledger| Ok(Html(pages::candidates(ledger, run, before)?))).await
}

pub async fn csv(State(site): Shared, Path(run): Path<String>) -> Result<impl IntoResponse, Trouble> {
    let run = RunId(number("run", &run)?);
    let text = site.ask(move |_, ledger| Ok(pages::csv(ledger, run)?)).await?;
    Ok(([(header::CONTENT_TYPE, "text/csv; charset=utf-8")], text))
}

pub async fn compare(State(site): Shared, query: Asked) -> Page {
    let one = |argument| {
        let missing = || Trouble::Argument {
            argument,
            value: String::new(),
            accepted: "Expected /compare?a=N&b=M, numbers of runs.",
        };
        asked(&query, argument)?.map(RunId).ok_or_else(missing)
    };
    let (a, b) = (one("a")?, one("b")?);
    site.ask(move |_, ledger| Ok(Html(pages::compare(ledger, a, b)?))).await
}

pub async fn candidate(State(site): Shared, Path(candidate): Path<String>) -> Page {
    let id = CandidateId(number("candidate", &candidate)?);
    site.ask(move |_, ledger| Ok(Html(pages::candidate(ledger, id)?))).await
}

pub async fn kernel(State(site): Shared, Path(candidate): Path<String>) -> Page {
    let shown = analysed(&site, CandidateId(number("candidate", &candidate)?)).await?;
    Ok(Html(evolution::heat(&shown).into_string()))
}

fn two(query: &Asked) -> Result<(CandidateId, CandidateId), Trouble> {
    let one = |argument| {
        let missing = || Trouble::Argument {
            argument,
            value: String::new(),
            accepted: "Expected /diff?a=N&b=M, numbers of candidates.",
        };
        asked(query, argument)?.map(CandidateId).ok_or_else(missing)
    };
    Ok((one("a")?, one("b")?))
}

pub async fn pair(State(site): Shared, query: Asked) -> Page {
    let (a, b) = two(&query)?;
    site.ask(move |_, ledger| Ok(Html(pages::pair(ledger, a, b)?))).await
}

pub async fn difference(State(site): Shared, query: Asked) -> Page {
    let (a, b) = two(&query)?;
    let (a, b) = (analysed(&site, a).await?, analysed(&site, b).await?);
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
        let page = pages::top(ledger, problem.as_deref(), device.as_deref())?;
        page.map(Html).ok_or_else(|| Trouble::Argument {
            argument: "problem and device",
            value: [problem, device].into_iter().flatten().collect::<Vec<_>>().join(" on "),
            accepted: "Expected what /topk links to.",
        })
    })
    .await
}

pub async fn forecasts(State(site): Shared) -> Page {
    site.ask(|_, ledger| Ok(Html(pages::forecasts(ledger)?))).await
}
