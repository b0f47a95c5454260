//! Prints the time of one emulated `mma.sync` on one core, for every kind whose name contains the argument.

use std::hint::black_box;
use std::time::Instant;

use flashcore_emu::numerics::tensor::{
    Accumulator, Distribution, MmaKind, TensorRules, mma, mma_f64, random_fragment, random_fragment_f64,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let wanted = std::env::args().nth(1).unwrap_or_default();
    println!("{:<58} {:>9} {:>9}", "mma.sync", "Ada, ns", "Hopper, ns");
    for kind in MmaKind::all() {
        let shape = kind.shape();
        let name = format!(
            "m{}n{}k{} {:?}·{:?} → {:?}",
            shape.m,
            shape.n,
            shape.k,
            kind.a(),
            kind.b(),
            kind.accumulator()
        );
        if !name.contains(&wanted) {
            continue;
        }
        let [ada, hopper] = [TensorRules::Ada, TensorRules::Hopper].map(|rules| nanoseconds(kind, rules));
        println!("{name:<58} {:>9} {:>9}", show(ada?), show(hopper?));
    }
    Ok(())
}

fn show(time: Option<f64>) -> String {
    time.map_or("-".into(), |t| format!("{t:.0}"))
}

/// Nanoseconds per `mma`, the shortest of several rounds; `None` if the architecture lacks the kind.
fn nanoseconds(kind: MmaKind, rules: TensorRules) -> Result<Option<f64>, Box<dyn std::error::Error>> {
    const REPEATS: u32 = 2_000;
    if kind.check(rules).is_err() {
        return Ok(None);
    }
    let count = kind.registers()[2];
    let mut best = f64::INFINITY;
    for round in 0..7 {
        let start;
        if kind.accumulator() == Accumulator::F64 {
            let f = random_fragment_f64(kind, Distribution::Normal, round);
            let mut d = vec![[0; 32]; count];
            start = Instant::now();
            for _ in 0..REPEATS {
                mma_f64(kind, rules, black_box(&f.a), &f.b, &f.c, black_box(&mut d))?;
            }
        } else {
            let f = random_fragment(kind, Distribution::Normal, round);
            let mut d = vec![[0; 32]; count];
            start = Instant::now();
            for _ in 0..REPEATS {
                mma(kind, rules, black_box(&f.a), &f.b, &f.c, black_box(&mut d))?;
            }
        }
        best = best.min(start.elapsed().as_secs_f64() * 1e9 / f64::from(REPEATS));
    }
    Ok(Some(best))
}
