//! Compares the emulator's tensor cores with a GPU's: `tensor_cores FRAGMENTS ROWS.jsonl [FIRST]`, from subject number
//! FIRST on. One line per `mma.sync` and `wmma` goes to the terminal, and, from a build of `cargo xtask evidence`, to the rows.

use std::path::Path;
use std::process::ExitCode;

use driver::Gpu;
use emu::numerics::tensor::TensorRules;
use flashcore_lab::differential::{Subject, compare};
use flashcore_lab::provenance::Provenance;
use flashcore_lab::store::append_line;
use serde_json::{Value, json};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let first = args.get(2).map_or(Ok(0), |n| n.parse());
    let (Some(Ok(fragments)), Some(rows), Ok(first)) = (args.first().map(|n| n.parse()), args.get(1), first)
    else {
        eprintln!("usage: tensor_cores FRAGMENTS ROWS.jsonl [FIRST]");
        return ExitCode::from(3);
    };
    match run(fragments, Path::new(rows), first) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(message) => {
            eprintln!("{message}");
            ExitCode::from(3)
        }
    }
}

fn run(fragments: u64, rows: &Path, first: usize) -> Result<bool, String> {
    let text = |e: &dyn std::error::Error| e.to_string();
    let mut gpu = Gpu::open(0).map_err(|e| text(&e))?;
    let provenance = Provenance::of_gpu(gpu.info());
    let (major, minor) = gpu.info().capability;
    let sm = major * 10 + minor;
    let rules = TensorRules::of_sm(sm).ok_or_else(|| format!("sm_{sm} has no rules"))?;
    println!("{} sm_{sm}, {rules:?} rules, {fragments} fragments each", gpu.info().name);
    let mut exact = true;
    for subject in Subject::all(rules).into_iter().skip(first) {
        let target = gpu.target();
        let compared = compare(&mut gpu, target, rules, subject, fragments).map_err(|e| text(&e))?;
        exact &= compared.differing == 0;
        println!("{} of {} results differ: {}", compared.differing, compared.results, compared.instruction);
        if provenance.commit.is_some() {
            append_line(rows, &row(&compared, &provenance).to_string()).map_err(|e| text(&e))?;
        }
    }
    println!("{}", if exact { "no bit differs" } else { "NOT equal" });
    Ok(exact)
}

/// The evidence row: the comparison with its provenance.
fn row(compared: &flashcore_lab::differential::Comparison, provenance: &Provenance) -> Value {
    let mut row = json!({ "suite": "emulator", "impl": "flashcore", "check": "mma bits" });
    for part in [json!(compared), json!(provenance)] {
        if let (Value::Object(row), Value::Object(part)) = (&mut row, part) {
            row.extend(part);
        }
    }
    row
}
