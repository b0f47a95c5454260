//! Measures the value of each idea in a kernel: the plan chosen for a problem races against itself with one
//! gene changed.
//!
//! ```text
//! ideas ROWS.jsonl [--seconds S] [--gene NAME …] PROBLEM …
//! ```
//!
//! All variants of a problem, or those of the named genes, run in one race with warm L2. Their rows have the
//! suite `ideas_FAMILY` and the names `flashcore GENE VALUE`; the row `flashcore` is the plan itself. `<!--
//! table:DEVICE/ideas_FAMILY -->` in a document shows them.

use std::path::PathBuf;

use bench::gpu::{Contestant, race};
use bench::provenance::Provenance;
use bench::{Mode, Peaks, RaceInputs, Rules, suites};
use check::launchfile::Bound;
use driver::{Buffer, Context, Stream};
use evolve::search::ideas;
use host::store::append_line;
use kernels::select::{Device, TunedTable, choose};
use kernels::{Arch, Plan, emit};
use problem::{Problem, Tensor};
use serde_json::json;

use crate::{Outcome, Usage};

type Error = Box<dyn std::error::Error>;

/// Seconds per variant of a problem.
const SECONDS: f64 = 0.2;

pub fn main(args: &[String]) -> Outcome {
    let mut words = args.iter();
    let rows: PathBuf = words.next().filter(|word| !word.starts_with('-')).ok_or(Usage)?.into();
    let (mut seconds, mut genes, mut problems) = (SECONDS, Vec::new(), Vec::new());
    while let Some(word) = words.next() {
        match word.as_str() {
            "--seconds" => seconds = words.next().ok_or(Usage)?.parse()?,
            "--gene" => genes.push(words.next().ok_or(Usage)?.clone()),
            word => {
                let problem = suites::parse(word).map_err(|accepted| {
                    format!("invalid value '{word}' for the problem: expected {accepted}")
                })?;
                problems.push(problem);
            }
        }
    }
    if problems.is_empty() {
        return Err(Usage.into());
    }
    let context = Context::open(0)?;
    let provenance = Provenance::of_gpu(context.info());
    let stream = Stream::new(&context)?;
    for problem in &problems {
        one(&stream, problem, &genes, seconds, &provenance, &rows)?;
    }
    Ok(true)
}

fn one(
    stream: &Stream,
    problem: &Problem,
    genes: &[String],
    seconds: f64,
    provenance: &Provenance,
    rows: &std::path::Path,
) -> Result<(), Error> {
    let context = stream.context();
    let info = context.info();
    let arch = Arch::of(info.sm()).ok_or("this GPU is not a target of the kernels")?;
    let arch = Arch { multiprocessors: info.sms, ..arch };
    let chosen = choose(problem, &Device { name: &info.name, arch }, TunedTable::builtin())?.plan;
    let buffer = |tensor: Tensor| {
        let elements = problem.span(tensor).map_or(0, |(elements, _)| elements);
        Buffer::new(context, elements * problem.dtypes.of(tensor).bytes())
    };
    let inputs = [buffer(Tensor::Q)?, buffer(Tensor::K)?, buffer(Tensor::V)?];
    let slices = [inputs[0].slice(), inputs[1].slice(), inputs[2].slice()];
    let calls = suites::calls(problem);
    let contestant = |name: Option<&str>, plan: &Plan| -> Result<Contestant<'_>, Error> {
        let bound = Bound::of_program(emit(problem, plan, &arch)?, problem);
        Ok(Contestant::kernel(stream, &bound, slices, calls, name, Some(json!(plan)))?)
    };
    let mut contestants = vec![contestant(None, &chosen)?];
    for (name, plan) in ideas(&chosen, problem, &arch, genes) {
        match contestant(Some(&name), &plan) {
            Ok(variant) => contestants.push(variant),
            Err(error) => eprintln!("{name}: {error}"),
        }
    }
    let identities: Vec<_> = contestants.iter().map(|c| c.identity().clone()).collect();
    let seconds = seconds * contestants.len() as f64;
    let rules = Rules::new(Mode::Warm, seconds, Peaks::of(&info.name));
    let race = race(context, &RaceInputs::draw(problem, 1)?, &contestants, &rules)?;
    println!("{problem:?}");
    let own = race.first().us();
    for measurement in &race.measurements {
        println!("{:>9.2} µs  {:.3}  {}", measurement.us(), measurement.us() / own, measurement.name);
    }
    if provenance.commit.is_some() {
        for row in race.rows(&format!("ideas_{}", chosen.family()), &identities, provenance) {
            append_line(rows, &json!(row).to_string())?;
        }
    }
    Ok(())
}
