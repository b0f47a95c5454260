//! Builds the pages of `flashcore serve` from a ledger.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::view::{POINTS, RunRow, RunView};
use super::{Links, Section, live, sections, title};
use bench::suites::words;
use ledger::{CandidateId, Ledger, LedgerError, RunId, TimeKind};

/// Rows of a list on one page.
const ROWS: usize = 50;
/// Number of plans in the list of the fastest.
const PLANS: usize = 40;
/// Number of people's forecasts in the list.
const BY_HAND: usize = 200;

/// A run's page, its sections, and the data that its script polls.
pub struct RunPage {
    pub page: String,
    /// Counts, times, and a hash of each section.
    pub news: Value,
    /// The sections by anchor.
    pub parts: HashMap<String, String>,
}

/// The list of runs, or of those older than `before`.
///
/// # Errors
/// When the ledger cannot be read.
pub fn runs(ledger: &Ledger, before: Option<RunId>) -> Result<String, LedgerError> {
    let mut lines = ledger.runs()?;
    lines.retain(|line| before.is_none_or(|before| line.id < before));
    let older = (lines.len() > ROWS).then(|| lines[ROWS - 1].id.0);
    lines.truncate(ROWS);
    let rows = lines.into_iter().map(|line| RunRow::of(ledger, line)).collect::<Result<Vec<_>, _>>()?;
    Ok(live::runs(&ledger.path().display().to_string(), &rows, older))
}

/// # Errors
/// When there is no such run, or the ledger cannot be read.
pub fn run(ledger: &Ledger, run: RunId) -> Result<RunPage, LedgerError> {
    let view = RunView::of(ledger, run)?;
    let sections = sections(&view, Links::Live);
    Ok(RunPage {
        page: live::live_run(&view, &sections),
        news: news(&view, &sections),
        parts: sections.iter().map(|s| (s.id.clone(), s.inner().into_string())).collect(),
    })
}

fn news(view: &RunView, sections: &[Section]) -> Value {
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
        // The title of the browser window.
        "title": format!("{} · FlashCore", title(view)),
        "state": view.state.name(),
        "kind": view.kind(),
        "candidates": view.candidates,
        "timed": view.timed,
        "problems": problems.collect::<Vec<_>>(),
        "sections": sections.iter().map(|s| (s.id.clone(), json!(s.hash()))).collect::<serde_json::Map<_, _>>(),
    })
}

/// The candidates of a run, or those older than `before`.
///
/// # Errors
/// When there is no such run, or the ledger cannot be read.
pub fn candidates(ledger: &Ledger, run: RunId, before: Option<CandidateId>) -> Result<String, LedgerError> {
    let model = !ledger.run(run)?.config["target"]["model"].is_null();
    let kind = if model { TimeKind::Predicted } else { TimeKind::Measured };
    let mut lines = ledger.lines(run, before, ROWS + 1)?;
    let older = (lines.len() > ROWS).then(|| lines[ROWS - 1].id.0);
    lines.truncate(ROWS);
    Ok(live::candidates(run, kind, &lines, older))
}

/// Maximum number of candidates in a CSV file.
const ALL: usize = 1_000_000;

/// All candidates of a run as comma-separated values, newest first.
///
/// # Errors
/// When there is no such run, or the ledger cannot be read.
pub fn csv(ledger: &Ledger, run: RunId) -> Result<String, LedgerError> {
    ledger.run(run)?;
    Ok(live::csv(&ledger.lines(run, None, ALL)?))
}

/// The page of two runs.
///
/// # Errors
/// When one of the runs does not exist, or the ledger cannot be read.
pub fn compare(ledger: &Ledger, a: RunId, b: RunId) -> Result<String, LedgerError> {
    Ok(live::compare(&RunView::of(ledger, a)?, &RunView::of(ledger, b)?))
}

/// The page of a candidate. Its kernel is a part that is loaded later.
///
/// # Errors
/// When there is no such candidate, or the ledger cannot be read.
pub fn candidate(ledger: &Ledger, candidate: CandidateId) -> Result<String, LedgerError> {
    let dossier = ledger.candidate(candidate)?;
    let device = ledger.run(dossier.known.new.run)?.device;
    Ok(live::candidate(&dossier, &device, ledger.standing(candidate)?.as_ref()))
}

/// The page of two candidates. Their kernels are a part that is loaded later.
///
/// # Errors
/// When one of the candidates does not exist, or the ledger cannot be read.
pub fn pair(ledger: &Ledger, a: CandidateId, b: CandidateId) -> Result<String, LedgerError> {
    ledger.candidate(a)?;
    ledger.candidate(b)?;
    Ok(live::pair(a, b))
}

/// The fastest plans for a problem (in text form) and a device, or by default for the first pair with a time.
/// `None` when the requested pair has no times.
///
/// # Errors
/// When the ledger cannot be read.
pub fn top(
    ledger: &Ledger,
    problem: Option<&str>,
    device: Option<&str>,
) -> Result<Option<String>, LedgerError> {
    let mut all = Vec::new();
    for device in ledger.devices()? {
        // A device's name also matches longer names that contain it.
        for best in ledger.best_of_problems(&device)? {
            if !all.contains(&(best.problem, best.device.clone())) {
                all.push((best.problem, best.device));
            }
        }
    }
    let wanted = |wanted: Option<&str>, found: &str| wanted.is_none_or(|w| w == found);
    let chosen =
        all.iter().find(|(shape, name)| wanted(problem, &words(&shape.problem())) && wanted(device, name));
    let best = match chosen {
        Some((problem, device)) => ledger.topk(problem, device, PLANS)?,
        None if problem.is_some() || device.is_some() => return Ok(None),
        None => Vec::new(),
    };
    Ok(Some(live::top(&all, chosen.map(|(problem, device)| (problem, device.as_str())), &best)))
}

/// The scores of all forecasters, and people's forecasts.
///
/// # Errors
/// When the ledger cannot be read.
pub fn forecasts(ledger: &Ledger) -> Result<String, LedgerError> {
    let mut authors = Vec::new();
    for (author, device) in ledger.forecasters()? {
        let pairs = ledger.pairs(&author, &device, POINTS)?;
        authors.push((author, device, pairs));
    }
    Ok(live::forecasts(&authors, &ledger.by_hand(BY_HAND)?))
}
