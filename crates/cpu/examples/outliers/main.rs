//! Runs random problems with one large element (10² to 6·10⁴) in Q, K or V, at keys that all rows see, that
//! few see or that none sees. Compares O and the LSE with the f64 oracle, element by element, within the
//! bounds of `problems::Bounds`:
//!
//!     cargo run --release -p flashcore-cpu --example outliers [-- --problems N --seed S --isa NAME,…]
//!
//! The default is 2000 problems from seed 1, on every instruction set of this machine and on their
//! counterparts in plain Rust. Shapes, masks, types, strides, head dimensions, groups of heads and plans are
//! drawn too. Each problem is computed with and without an LSE. The program prints a summary for each
//! instruction set, and each failure. The exit code is 1 after a failure, and 2 for invalid arguments.

mod problems;

use std::process::ExitCode;

use flashcore_cpu::Isa;
use problems::Case;

/// The options of the command line.
struct Asked {
    problems: u64,
    seed: u64,
    isas: Vec<Isa>,
}

/// Every instruction set of this machine, and the two in plain Rust.
fn everywhere() -> Vec<Isa> {
    Isa::available().into_iter().chain(Isa::PORTABLE).collect()
}

fn parse(mut arguments: impl Iterator<Item = String>) -> Result<Asked, String> {
    let mut asked = Asked { problems: 2000, seed: 1, isas: everywhere() };
    while let Some(name) = arguments.next() {
        let value = arguments.next().ok_or_else(|| format!("{name} has no value"))?;
        let number = || value.parse::<u64>().map_err(|e| format!("{name} {value}: {e}"));
        match name.as_str() {
            "--problems" => asked.problems = number()?,
            "--seed" => asked.seed = number()?,
            "--isa" => asked.isas = value.split(',').map(isa).collect::<Result<_, _>>()?,
            _ => return Err(format!("invalid argument '{name}': expected --problems, --seed, --isa")),
        }
    }
    Ok(asked)
}

fn isa(name: &str) -> Result<Isa, String> {
    let known = everywhere();
    let names: Vec<&str> = known.iter().map(|isa| isa.name()).collect();
    let found = known.iter().copied().find(|isa| isa.name() == name);
    found.ok_or_else(|| {
        format!(
            "invalid value '{name}' for --isa: expected one that this processor has: {}",
            names.join(", ")
        )
    })
}

fn main() -> ExitCode {
    let asked = match parse(std::env::args().skip(1)) {
        Ok(asked) => asked,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::from(2);
        }
    };
    let failures: u64 = asked.isas.iter().map(|&isa| run(isa, &asked)).sum();
    if failures == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Runs all problems with the instruction set `isa`. Returns the number of failures.
fn run(isa: Isa, asked: &Asked) -> u64 {
    let (mut failures, mut own, mut worst) = (0, 0, 0.0f64);
    for seed in asked.seed..asked.seed + asked.problems {
        let case = Case::random(seed);
        let plan = case.plan(isa);
        match case.run(&plan) {
            Ok(outcome) => {
                own += u64::from(outcome.own);
                worst = worst.max(outcome.worst);
                if outcome.worst > 1.0 {
                    failures += 1;
                    let (what, worst) = (outcome.what, outcome.worst);
                    println!(
                        "{isa}, seed {seed}: {what} errs by {worst:.2} of what is allowed; {plan:?} {case:?}"
                    );
                }
            }
            Err(error) => {
                failures += 1;
                println!("{isa}, seed {seed}: {error}; {plan:?} {case:?}");
            }
        }
    }
    let problems = asked.problems;
    println!(
        "{isa}: {problems} problems from seed {}, {failures} failures, largest error {worst:.2} of what is allowed, \
         {own} problems in the set's own arithmetic",
        asked.seed
    );
    failures
}
