//! `flashcore forecast`: what people expect, and how good they and the model are at it.

use std::io::Write;

use kernels::select::Shape;
use lab::bench::suites;
use lab::ledger::{ByHand, CandidateId, Forecast, ForecastOutcome, Ledger, Recalibration, Score};
use lab::provenance::iso8601;
use serde_json::json;

use crate::args::{self, ForecastAdd, ForecastCommand, ForecastList, ForecastRecalibrate, ForecastScore};
use crate::error::CliError;
use crate::{Status, choice, table, unless_closed};

pub fn forecast(command: &ForecastCommand) -> Result<Status, CliError> {
    match command {
        ForecastCommand::Add(args) => add(args),
        ForecastCommand::Outcome(args) => outcome(args),
        ForecastCommand::List(args) => list(args),
        ForecastCommand::Score(args) => score(args),
        ForecastCommand::Recalibrate(args) => recalibrate(args),
    }
}

/// Part of the expected time that the interval leaves on each side, unless it is given.
const DEFAULT_MARGIN: f64 = 0.1;

fn add(args: &ForecastAdd) -> Result<Status, CliError> {
    if args.author.starts_with("model") {
        return Err(CliError::Argument {
            argument: "--author",
            value: args.author.clone(),
            accepted: "a person's name; the model forecasts by itself".to_owned(),
        });
    }
    let problem = args.problem.as_deref().map(choice::parse).transpose()?;
    let forecast = Forecast {
        candidate: args.candidate.map(CandidateId),
        hypothesis: args.hypothesis.clone(),
        author: args.author.clone(),
        // Of a candidate the ledger knows it.
        device: args.device.clone().unwrap_or_default(),
        problem: problem.as_ref().map(Shape::of),
        low_us: args.low.unwrap_or(args.us * (1.0 - DEFAULT_MARGIN)),
        us: args.us,
        high_us: args.high.unwrap_or(args.us * (1.0 + DEFAULT_MARGIN)),
    };
    forecast.check()?;
    let path = &args.ledger.path;
    let ledger = if args.candidate.is_some() { Ledger::open_existing(path) } else { Ledger::open(path) }?;
    let number = ledger.forecast(&forecast)?;
    unless_closed(writeln!(std::io::stdout(), "{number}").map_err(CliError::from))?;
    Ok(Status::Proven)
}

fn outcome(args: &args::ForecastOutcome) -> Result<Status, CliError> {
    let outcome = ForecastOutcome { forecast: args.forecast, us: args.us, note: args.note.clone() };
    Ledger::open_existing(&args.ledger.path)?.forecast_outcome(&outcome)?;
    Ok(Status::Proven)
}

fn list(args: &ForecastList) -> Result<Status, CliError> {
    let forecasts = Ledger::read(&args.ledger.path)?.by_hand(args.n)?;
    let mut out = std::io::stdout().lock();
    unless_closed(if args.json {
        writeln!(out, "{}", json!(forecasts)).map_err(CliError::from)
    } else {
        let header =
            ["", "when", "author", "device", "problem", "expected µs", "measured µs", "idea", "note"];
        let rows: Vec<Vec<String>> = forecasts.iter().map(line).collect();
        table::print(&mut out, &header, &rows).map_err(CliError::from)
    })?;
    Ok(Status::Proven)
}

fn line(told: &ByHand) -> Vec<String> {
    let f = &told.forecast;
    let measured = told.measured_us.map_or("–".to_owned(), |us| {
        let fell = match us {
            us if us < f.low_us => "below",
            us if us > f.high_us => "above",
            _ => "within",
        };
        format!("{us:.2} ({fell})")
    });
    vec![
        told.id.to_string(),
        iso8601(told.at.max(0) as u64 / 1000),
        f.author.clone(),
        f.device.clone(),
        f.problem.map_or("–".to_owned(), |shape| suites::words(&shape.problem())),
        format!("{:.2} ({:.2} … {:.2})", f.us, f.low_us, f.high_us),
        measured,
        f.hypothesis.clone(),
        told.note.clone().unwrap_or_default(),
    ]
}

fn score(args: &ForecastScore) -> Result<Status, CliError> {
    let scores = Ledger::read(&args.ledger.path)?.scores()?;
    let mut out = std::io::stdout().lock();
    unless_closed(if args.json {
        writeln!(out, "{}", json!(scores)).map_err(CliError::from)
    } else {
        let rows: Vec<Vec<String>> =
            scores.iter().map(|s| [vec![s.author.clone(), s.device.clone()], figures(s)].concat()).collect();
        let header = [&["author", "device"], &FIGURES[..]].concat();
        table::print(&mut out, &header, &rows).map_err(CliError::from)
    })?;
    Ok(Status::Proven)
}

const FIGURES: [&str; 5] = ["forecasts", "bias", "within its interval", "rank correlation", "median error"];

fn figures(s: &Score) -> Vec<String> {
    vec![
        s.count.to_string(),
        format!("{:.3}×", s.bias),
        format!("{:.0} %", s.coverage * 100.0),
        format!("{:.2}", s.spearman),
        format!("{:.1} %", s.median_error * 100.0),
    ]
}

fn recalibrate(args: &ForecastRecalibrate) -> Result<Status, CliError> {
    let map = Ledger::open_existing(&args.ledger.path)?.recalibrate(&args.author, &args.device)?;
    let mut out = std::io::stdout().lock();
    unless_closed(match (&map, args.json) {
        (map, true) => writeln!(out, "{}", json!(map)).map_err(CliError::from),
        (Some(map), false) => print(&mut out, map),
        (None, false) => {
            writeln!(out, "too few forecasts came out: a map needs 20 of them").map_err(CliError::from)
        }
    })?;
    Ok(Status::Proven)
}

fn print(out: &mut impl Write, map: &Recalibration) -> Result<(), CliError> {
    let factor = map.intercept.exp();
    writeln!(
        out,
        "fitted to the older {} forecasts: µs ↦ {factor:.3} · µs^{:.3}, {:.3} … {:.3} of that",
        map.calibrated_on, map.slope, map.low, map.high
    )?;
    let row = |name: &str, score: &Score| [vec![name.to_owned()], figures(score)].concat();
    let rows = [row("as forecast", &map.before), row("mapped", &map.after)];
    table::print(out, &[&["the newer ones"], &FIGURES[..]].concat(), &rows)?;
    let verdict = if map.adopted {
        "adopted: later forecasts of the model's are told as model:recalibrated, too; the search itself goes by the model's own"
    } else {
        "not adopted: on what it was not fitted to, errors are no smaller or fewer times fall within the interval"
    };
    writeln!(out, "{verdict}")?;
    Ok(())
}
