//! The command `flashcore forecast`: records forecasts, and scores those of people and of the time model.

use std::io::Write;
use std::path::Path;

use bench::provenance::iso8601;
use bench::suites;
use evolve::Evaluator;
use evolve::evaluate::cpu::CpuEvaluator;
use evolve::setup::models;
use ledger::Operator;
use ledger::{
    ByHand, CandidateId, Forecast, ForecastOutcome, Ledger, LedgerError, Recalibration, SCORED, Score,
};
use predict::Gpu;
use serde_json::json;

use crate::args::forecast::{
    self as args, ForecastAdd, ForecastCommand, ForecastList, ForecastRecalibrate, ForecastScore,
};
use crate::error::CliError;
use crate::topk::device_name;
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

/// Half-width of the default interval, as a fraction of the expected time.
const DEFAULT_MARGIN: f64 = 0.1;
/// The author of forecasts that a proposer makes in a run. People may not use this name.
const PROPOSER: &str = Operator::Propose.name();

fn add(args: &ForecastAdd) -> Result<Status, CliError> {
    check(args)?;
    let problem = args.problem.as_deref().map(|text| choice::parse_shape("--problem", text)).transpose()?;
    let mut forecast = Forecast {
        candidate: args.candidate.map(CandidateId),
        hypothesis: args.hypothesis.trim().to_owned(),
        author: args.author.trim().to_owned(),
        // The device is empty for a candidate, because the ledger knows the candidate's device.
        device: String::new(),
        problem,
        low_us: args.low.unwrap_or(args.us * (1.0 - DEFAULT_MARGIN)),
        us: args.us,
        high_us: args.high.unwrap_or(args.us * (1.0 + DEFAULT_MARGIN)),
    };
    forecast.check()?;
    let path = &args.ledger.path;
    if let Some(device) = &args.device {
        forecast.device = common_name(path, device)?;
    }
    let ledger = if args.candidate.is_some() { Ledger::open_existing(path) } else { Ledger::open(path) }?;
    let number = ledger.forecast(&forecast)?;
    let mut out = crate::terminal::out();
    unless_closed(
        if args.json {
            out.json("forecast", &json!(ledger.forecast_by_hand(number)?))
        } else {
            writeln!(out, "{number}")
        }
        .map_err(CliError::from),
    )?;
    Ok(Status::Passed)
}

/// Rejects an empty hypothesis, an author that is not a person, times that are not positive, and an empty
/// device.
fn check(args: &ForecastAdd) -> Result<(), CliError> {
    let refuse = |argument, value: &str, accepted: &str| {
        Err(CliError::Argument { argument, value: value.to_owned(), accepted: accepted.to_owned() })
    };
    let author = args.author.trim();
    if author.is_empty() || author.starts_with("model") || author == PROPOSER {
        let accepted = "a person's name; the model (model, model:…) and a run's proposer (proposer) forecast by themselves";
        return refuse("--author", author, accepted);
    }
    if args.hypothesis.trim().is_empty() {
        return refuse("HYPOTHESIS", &args.hypothesis, "the idea, in words");
    }
    for (argument, us) in [("--us", Some(args.us)), ("--low", args.low), ("--high", args.high)] {
        us.map_or(Ok(()), |us| positive(argument, us))?;
    }
    match args.device.as_deref().filter(|device| device.trim().is_empty()) {
        Some(device) => refuse("--device", device, "cpu, cuda, or the name of a device, such as h200"),
        None => Ok(()),
    }
}

fn positive(argument: &'static str, us: f64) -> Result<(), CliError> {
    if us.is_finite() && us > 0.0 {
        return Ok(());
    }
    Err(CliError::Argument { argument, value: us.to_string(), accepted: "a positive number".to_owned() })
}

/// The whole name of `cpu`, `cuda` or `cuda:N` of this machine. Other names are returned unchanged.
fn own_name(device: &str) -> Result<String, CliError> {
    match device.trim() {
        "cpu" => Ok(CpuEvaluator::new().environment().device),
        other => device_name(other),
    }
}

/// A common name for all spellings of a device, so that its forecasts are scored together: the name in the
/// ledger, or else this processor's or GPU's name or the name in the time model. Any other name is refused: a
/// forecast of a misspelt device is never scored. Must be called before the ledger is created.
fn common_name(ledger: &Path, device: &str) -> Result<String, CliError> {
    let own = own_name(device)?;
    let known = match Ledger::read(ledger) {
        Err(LedgerError::Missing { .. } | LedgerError::Empty { .. }) => None,
        ledger => match ledger?.device_called(&own) {
            Err(LedgerError::Unknown { .. }) => None,
            found => Some(found?),
        },
    };
    let of_this_machine = || (own != device.trim()).then(|| own.clone());
    let of_model = || Gpu::named(&own).map(|machine| machine.name.to_owned());
    known.or_else(of_this_machine).or_else(of_model).ok_or_else(|| CliError::Argument {
        argument: "--device",
        value: device.to_owned(),
        accepted: format!("cpu, cuda, cuda:N, {}, or the name of a device in the ledger", models()),
    })
}

fn outcome(args: &args::ForecastOutcome) -> Result<Status, CliError> {
    positive("--us", args.us)?;
    let outcome = ForecastOutcome { forecast: args.forecast, us: args.us, note: args.note.clone() };
    let ledger = Ledger::open_existing(&args.ledger.path)?;
    ledger.forecast_outcome(&outcome)?;
    let told = ledger.forecast_by_hand(args.forecast)?;
    let mut out = crate::terminal::out();
    unless_closed(if args.json {
        out.json("forecast", &json!(told)).map_err(CliError::from)
    } else {
        table::print(&mut out, &LINE, &[line(&told)]).map_err(CliError::from)
    })?;
    Ok(Status::Passed)
}

fn list(args: &ForecastList) -> Result<Status, CliError> {
    let forecasts = Ledger::read(&args.ledger.path)?.by_hand(args.n)?;
    let mut out = crate::terminal::out();
    unless_closed(if args.json {
        out.json("forecast-list", &json!(forecasts)).map_err(CliError::from)
    } else {
        let rows: Vec<Vec<String>> = forecasts.iter().map(line).collect();
        table::print(&mut out, &LINE, &rows).map_err(CliError::from)
    })?;
    Ok(Status::Passed)
}

const LINE: [&str; 9] =
    ["", "when", "author", "device", "problem", "expected µs", "measured µs", "idea", "note"];

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
    let mut out = crate::terminal::out();
    unless_closed(if args.json {
        out.json("forecast-score", &json!(scores)).map_err(CliError::from)
    } else {
        let rows: Vec<Vec<String>> =
            scores.iter().map(|s| [vec![s.author.clone(), s.device.clone()], figures(s)].concat()).collect();
        let header = [&["author", "device"], &FIGURES[..]].concat();
        table::print(&mut out, &header, &rows).map_err(CliError::from).and_then(|()| {
            match scores.iter().any(|score| score.count >= SCORED) {
                true => writeln!(out, "of each author the newest {SCORED}; older ones are left out")
                    .map_err(CliError::from),
                false => Ok(()),
            }
        })
    })?;
    Ok(Status::Passed)
}

const FIGURES: [&str; 5] = ["forecasts", "bias", "within its interval", "rank correlation", "median error"];

fn figures(s: &Score) -> Vec<String> {
    vec![
        s.count.to_string(),
        format!("{:.3}×", s.bias),
        format!("{:.0} %", s.coverage * 100.0),
        s.spearman.map_or_else(|| "–".to_owned(), |spearman| format!("{spearman:.2}")),
        format!("{:.1} %", s.median_error * 100.0),
    ]
}

fn recalibrate(args: &ForecastRecalibrate) -> Result<Status, CliError> {
    let ledger = Ledger::open_existing(&args.ledger.path)?;
    let device = ledger.device_called(&device_name(&args.device)?)?;
    let map = ledger.recalibrate(&args.author, &device)?;
    let mut out = crate::terminal::out();
    unless_closed(match (&map, args.json) {
        (map, true) => out.json("forecast-recalibrate", &json!({ "map": map })).map_err(CliError::from),
        (Some(map), false) => print(&mut out, map),
        (None, false) => {
            writeln!(out, "too few forecasts have an outcome: a map needs 20").map_err(CliError::from)
        }
    })?;
    Ok(Status::Passed)
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
