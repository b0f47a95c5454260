//! Kernels on a GPU, one line each: right against f64, the same bits three times, and the time of a call in a graph.
//!
//! ```text
//! hopper ROWS.jsonl [--limit SECONDS] PLAN PROBLEM … [PLAN PROBLEM …]
//! ```
//!
//! A PLAN is the name of a family (its default for each problem), a JSON object of genes that differ from that default
//! (`{"family":"wgmma","block_n":144}`), or a file that holds one; it counts for the problems after it. A PROBLEM is one in words
//! (`1,8,512,64,f16,causal`) or a suite (`mission`, `small`, `forward`). Each case runs in a process that is ended when it takes
//! longer than the limit: a kernel that waits for ever costs that, and no more. Details go to the rows.

mod case;
mod work;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use case::Case;
use flashcore_lab::store::append_line;
use serde_json::json;

type Error = Box<dyn std::error::Error>;

/// Seconds that a case may take, unless said otherwise: compiling, the answer in f64, and thousands of calls.
const LIMIT: f64 = 40.0;

/// What the command line says.
struct Args {
    rows: PathBuf,
    limit: Duration,
    cases: Vec<Case>,
    /// In a child: the case to begin with.
    from: Option<usize>,
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let result = parse(&words).and_then(|args| match args.from {
        Some(from) => work::run(&args.rows, &args.cases, from),
        None => watch(&args, &words),
    });
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(3)
        }
    }
}

fn parse(words: &[String]) -> Result<Args, Error> {
    const USAGE: &str = "usage: hopper ROWS.jsonl [--limit SECONDS] PLAN PROBLEM … [PLAN PROBLEM …]";
    let mut words = words.iter();
    let rows = words.next().filter(|word| !word.starts_with('-')).ok_or(USAGE)?;
    let mut args =
        Args { rows: rows.into(), limit: Duration::from_secs_f64(LIMIT), cases: Vec::new(), from: None };
    let mut genes = None;
    while let Some(word) = words.next() {
        match word.as_str() {
            "--limit" => {
                args.limit = Duration::try_from_secs_f64(words.next().ok_or(USAGE)?.parse()?)?;
            }
            "--from" => args.from = Some(words.next().ok_or(USAGE)?.parse()?),
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
        return Err(USAGE.into());
    }
    Ok(args)
}

/// A process that works through the cases, and what it prints.
struct Worker {
    child: Child,
    lines: Receiver<String>,
}

impl Worker {
    fn new(words: &[String], from: usize) -> Result<Worker, Error> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(words).args(["--from", &from.to_string()]).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let output = child.stdout.take().ok_or("no pipe")?;
        let (tell, lines) = channel();
        std::thread::spawn(move || {
            BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| tell.send(line))
        });
        Ok(Worker { child, lines })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts workers one after the other until all cases were tried: whether all were right.
fn watch(args: &Args, words: &[String]) -> Result<bool, Error> {
    let (mut next, mut right) = (0, 0);
    while next < args.cases.len() {
        let mut worker = Worker::new(words, next)?;
        let mut since = Instant::now();
        // A worker says a line for each case, and ends after one that may have broken its device.
        while next < args.cases.len() {
            let case = &args.cases[next];
            match worker.lines.recv_timeout(args.limit.saturating_sub(since.elapsed())) {
                Ok(line) => {
                    println!("{line}");
                    right += usize::from(line.starts_with(work::RIGHT));
                }
                Err(RecvTimeoutError::Timeout) => {
                    lost(&args.rows, case, &format!("HANGS  ended after {} s", args.limit.as_secs_f64()))?;
                    next += 1;
                    break;
                }
                Err(RecvTimeoutError::Disconnected) => {
                    // It ends on purpose only between two cases.
                    let status = worker.child.wait()?;
                    if status.code() != Some(work::AGAIN) {
                        lost(&args.rows, case, &format!("ENDED  {status}"))?;
                        next += 1;
                    }
                    break;
                }
            }
            next += 1;
            since = Instant::now();
        }
    }
    println!("{right} of {} right", args.cases.len());
    Ok(right == args.cases.len())
}

/// A case whose worker said nothing.
fn lost(rows: &Path, case: &Case, what: &str) -> Result<(), Error> {
    println!("{what}: {case}");
    append_line(rows, &json!({ "case": case.to_string(), "fault": what }).to_string())?;
    Ok(())
}
