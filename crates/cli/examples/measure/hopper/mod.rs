//! Tests kernels on a GPU, one line each: compares the outputs with f64, repeats them three times, and times
//! a call in a graph.
//!
//! ```text
//! hopper ROWS.jsonl [--limit SECONDS] PLAN PROBLEM … [PLAN PROBLEM …]
//! ```
//!
//! A PLAN is the name of a family (its default for each problem), a JSON object of genes that differ from
//! that default (`{"family":"wgmma","block_n":144}`), or a file with such an object. It applies to the
//! problems after it. A PROBLEM is one in words (`1,8,512,64,f16,causal`), with keys in pages
//! (`64,32/8,1x4096,128,bf16,pages=16`), or a suite (`@mission`, `@small`, `@forward`). Each case runs in a
//! process that is killed after the limit, so that a kernel that never ends costs only that time. Details are
//! written to the rows.

mod case;
mod work;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use case::Case;
use host::child::{Ended, follow};
use host::store::append_line;
use serde_json::json;

use crate::{Outcome, Usage};

type Error = Box<dyn std::error::Error>;

/// Default time limit of a case, s: compiling, the oracle in f64, and thousands of calls.
const LIMIT: f64 = 40.0;

/// The command line.
struct Args {
    rows: PathBuf,
    limit: Duration,
    cases: Vec<Case>,
    /// Index of the first case to run; only set in a child process.
    from: Option<usize>,
}

pub fn main(words: &[String]) -> Outcome {
    let args = parse(words)?;
    match args.from {
        Some(from) => work::run(&args.rows, &args.cases, from),
        None => watch(&args, words),
    }
}

fn parse(words: &[String]) -> Result<Args, Error> {
    let mut words = words.iter();
    let rows = words.next().filter(|word| !word.starts_with('-')).ok_or(Usage)?;
    let mut args =
        Args { rows: rows.into(), limit: Duration::from_secs_f64(LIMIT), cases: Vec::new(), from: None };
    let mut genes = None;
    while let Some(word) = words.next() {
        match word.as_str() {
            "--limit" => {
                args.limit = Duration::try_from_secs_f64(words.next().ok_or(Usage)?.parse()?)?;
            }
            "--from" => args.from = Some(words.next().ok_or(Usage)?.parse()?),
            word => match case::genes(word)? {
                Some(plan) => genes = Some(plan),
                None => {
                    let genes = genes.clone().ok_or("a PLAN stands before the first PROBLEM")?;
                    args.cases.extend(case::problems(word)?.into_iter().map(|p| Case::new(p, &genes)));
                }
            },
        }
    }
    if args.cases.is_empty() {
        return Err(Usage.into());
    }
    Ok(args)
}

/// Starts workers one after the other until all cases are done. Returns whether all cases passed.
fn watch(args: &Args, words: &[String]) -> Result<bool, Error> {
    let (mut next, mut right) = (0, 0);
    while let Some(case) = args.cases.get(next) {
        let before = next;
        let mut worker = Command::new(std::env::current_exe()?);
        worker.arg("hopper").args(words).args(["--from", &next.to_string()]);
        // A worker prints one line per case.
        let ended = follow(&mut worker, args.limit, |line| {
            println!("{line}");
            right += usize::from(line.starts_with(work::RIGHT));
            next += 1;
        })?;
        let case = args.cases.get(next).unwrap_or(case);
        match ended {
            Ended::Silent => {
                lost(&args.rows, case, &format!("HANGS  ended after {} s", args.limit.as_secs_f64()))?
            }
            // The worker ends on purpose after a case that may have broken its device, or after the last
            // case.
            Ended::Exited(status)
                if next == args.cases.len() || next > before && status.code() == Some(work::AGAIN) =>
            {
                continue;
            }
            Ended::Exited(status) => lost(&args.rows, case, &format!("ENDED  {status}"))?,
        }
        next += 1;
    }
    println!("{right} of {} right", args.cases.len());
    Ok(right == args.cases.len())
}

/// Records a case whose worker ended without printing a line for it.
fn lost(rows: &Path, case: &Case, what: &str) -> Result<(), Error> {
    println!("{what}: {case}");
    append_line(rows, &json!({ "case": case.to_string(), "fault": what }).to_string())?;
    Ok(())
}
