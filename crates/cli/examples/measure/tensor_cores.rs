//! Compares the emulator's tensor cores with a GPU's:
//! `tensor_cores FRAGMENTS ROWS.jsonl [--widths] [--only NAME] [FIRST]`, from subject number FIRST on, for
//! instructions whose names begin with NAME (`mma`, `wmma`, `wgmma`, or longer); with `--widths`, for every N
//! of `wgmma` with 8-bit floats. Prints one line per `mma.sync`, `wmma` and `wgmma`, and a build of `cargo
//! xtask evidence` appends a row for each. A failing subject is reported, and the next one follows.

use std::path::PathBuf;
use std::time::Instant;

use bench::provenance::Provenance;
use calibrate::differential::{InstructionComparison, Subject, compare};
use driver::Gpu;
use emu::numerics::tensor::TensorRules;
use host::store::append_line;
use serde_json::{Value, json};

use crate::{Outcome, Usage, with};

/// The command line.
struct Request {
    fragments: u64,
    rows: PathBuf,
    /// The beginning of the instruction's name.
    only: String,
    first: usize,
    /// Every N of `wgmma` with 8-bit floats instead of [`Subject::all`].
    widths: bool,
}

impl Request {
    fn parse(args: &[String]) -> Option<Request> {
        let mut args = args.iter();
        let (fragments, rows) = (args.next()?.parse().ok()?, args.next()?.into());
        let mut request = Request { fragments, rows, only: String::new(), first: 0, widths: false };
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--widths" => request.widths = true,
                "--only" => request.only = args.next()?.clone(),
                first => request.first = first.parse().ok()?,
            }
        }
        Some(request)
    }
}

pub fn main(args: &[String]) -> Outcome {
    let request = Request::parse(args).ok_or(Usage)?;
    let mut gpu = Gpu::open(0)?;
    let provenance = Provenance::of_gpu(gpu.info());
    let (major, minor) = gpu.info().capability;
    let (sm, target) = (major * 10 + minor, gpu.target());
    let rules = TensorRules::of_sm(sm).ok_or_else(|| format!("sm_{sm} has no rules"))?;
    println!("{} sm_{sm}, {rules:?} rules, {} fragments each", gpu.info().name, request.fragments);
    let mut subjects = if request.widths { Subject::of_every_width() } else { Subject::all(rules) };
    subjects.retain(|subject| subject.instruction(target).starts_with(&request.only));
    let (mut exact, count) = (true, subjects.len());
    for (i, subject) in subjects.into_iter().enumerate().skip(request.first) {
        let start = Instant::now();
        let compared = match compare(&mut gpu, target, rules, subject, request.fragments) {
            Ok(compared) => compared,
            Err(error) => {
                exact = false;
                println!("{i}/{count} FAILED: {error}");
                continue;
            }
        };
        exact &= compared.differing == 0;
        let (differing, results) = (compared.differing, compared.results);
        let seconds = start.elapsed().as_secs_f64();
        println!(
            "{i}/{count} {differing} of {results} results differ ({seconds:.1} s): {}",
            compared.instruction
        );
        if let Some(first) = &compared.first {
            println!("    first: {first:?}");
        }
        if provenance.commit.is_some() {
            append_line(&request.rows, &row(&compared, &provenance).to_string())?;
        }
    }
    println!("{}", if exact { "no bit differs" } else { "NOT equal" });
    Ok(exact)
}

/// The evidence row: the comparison with its provenance.
fn row(compared: &InstructionComparison, provenance: &Provenance) -> Value {
    with(with(json!({ "suite": "emulator", "impl": "flashcore", "check": "mma bits" }), compared), provenance)
}
