//! The command `flashcore report`: writes a run as one page.

use std::io::Write;

use host::store;
use ledger::{CandidateId, Ledger, RunId};
use report::evolution::{AnalysedKernel, RunView, page};
use serde_json::json;

use crate::args::Report;
use crate::error::CliError;
use crate::terminal::one_line;
use crate::{Status, source, unless_closed};

pub fn report(args: &Report) -> Result<Status, CliError> {
    source::not_beside_json("--out", &args.out, args.json)?;
    source::distinct("--out", &args.out, &[("--ledger", &args.ledger.path)])?;
    store::writable(&args.out)?;
    let ledger = Ledger::read(&args.ledger.path)?;
    let run = match args.run {
        Some(run) => RunId(run),
        None => ledger.latest_run()?.ok_or_else(|| CliError::Argument {
            argument: "--ledger",
            value: args.ledger.path.display().to_string(),
            accepted: "a ledger with a run; `flashcore evolve` begins one".to_owned(),
        })?,
    };
    let view = RunView::of(&ledger, run)?;
    store::write(&args.out, page(&view, &analysed(&ledger, &view)?).as_bytes())?;
    if store::is_standard(&args.out) {
        return Ok(Status::Passed);
    }
    let mut out = crate::terminal::out();
    unless_closed(
        if args.json {
            out.json("report", &json!({ "run": run, "out": args.out }))
        } else {
            writeln!(out, "report: {}", one_line(&args.out.to_string_lossy()))
        }
        .map_err(CliError::from),
    )?;
    Ok(Status::Passed)
}

/// The kernels to show line by line: the baseline and the best candidate of the first problem.
fn analysed(ledger: &Ledger, view: &RunView) -> Result<Vec<AnalysedKernel>, CliError> {
    let Some(problem) = view.problems.first() else { return Ok(Vec::new()) };
    let mut shown: Vec<CandidateId> =
        [&problem.baseline, &problem.best].into_iter().flatten().map(|ranked| ranked.candidate).collect();
    shown.dedup();
    Ok(shown.into_iter().map(|id| AnalysedKernel::of(ledger, id)).collect::<Result<_, _>>()?)
}
