//! Compares the emulator's tensor cores with a GPU's: `tensor_cores [FRAGMENTS]`, one line per `mma.sync`.

use std::process::ExitCode;

use driver::Gpu;
use emu::numerics::tensor::TensorRules;
use flashcore_lab::differential::{compare_mma, kinds};

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
    let (mut exact, mut failed) = (true, 0);
    for kind in kinds(rules) {
        let target = gpu.target();
        match compare_mma(&mut gpu, target, rules, kind, fragments) {
            Ok(c) => {
                exact &= c.differing == 0;
                println!("{}", serde_json::to_string(&c).map_err(|e| e.to_string())?);
            }
            Err(error) => {
                failed += 1;
                println!("failed: {error}");
            }
        }
    }
    println!("{}", if exact && failed == 0 { "no bit differs" } else { "NOT equal" });
    Ok(exact && failed == 0)
}
