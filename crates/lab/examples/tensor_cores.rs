//! Compares the emulator's tensor cores with a GPU's: `tensor_cores [FRAGMENTS [DIFFERENCES.jsonl]]`, one line per
//! `mma.sync`, and every difference to the file.

use std::io::Write;
use std::process::ExitCode;

use driver::Gpu;
use emu::numerics::tensor::TensorRules;
use flashcore_lab::differential::{compare_mma, kinds};

/// Differences kept per kind.
const KEPT: usize = 30_000;

fn main() -> ExitCode {
    let fragments = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(1_000_000);
    match run(fragments) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(message) => {
            eprintln!("{message}");
            ExitCode::from(3)
        }
    }
}

fn run(fragments: u64) -> Result<bool, String> {
    let mut gpu = Gpu::open(0).map_err(|e| e.to_string())?;
    let (major, minor) = gpu.info().capability;
    let sm = major * 10 + minor;
    let rules = TensorRules::of_sm(sm).ok_or_else(|| format!("sm_{sm} has no rules"))?;
    println!("{} sm_{sm}, {rules:?} rules, {fragments} fragments a kind", gpu.info().name);
    let mut file =
        std::env::args().nth(2).map(std::fs::File::create).transpose().map_err(|e| e.to_string())?;
    let (mut exact, mut failed) = (true, 0);
    for kind in kinds(rules) {
        let target = gpu.target();
        let mut lines = String::new();
        let mut kept = 0;
        let report = |difference| {
            kept += 1;
            if kept <= KEPT
                && let Ok(line) = serde_json::to_string(&difference)
            {
                lines.push_str(&format!("{kind:?}\t{line}\n"));
            }
        };
        match compare_mma(&mut gpu, target, rules, kind, fragments, report) {
            Ok(c) => {
                exact &= c.differing == 0;
                println!("{}", serde_json::to_string(&c).map_err(|e| e.to_string())?);
            }
            Err(error) => {
                failed += 1;
                println!("failed: {error}");
            }
        }
        if let Some(file) = &mut file {
            file.write_all(lines.as_bytes()).map_err(|e| e.to_string())?;
        }
    }
    println!("{}", if exact && failed == 0 { "no bit differs" } else { "NOT equal" });
    Ok(exact && failed == 0)
}
