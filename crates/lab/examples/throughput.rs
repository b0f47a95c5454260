//! How fast candidates are made: plans drawn, checked and identified in a second, and PTX emitted and assembled in a second.
//!
//! ```text
//! cargo run --release -p flashcore-lab --example throughput
//! ```

use std::collections::HashSet;
use std::time::Instant;

use emu::model::machine::H200;
use flashcore_lab::evolve::evaluate::kernel::Bench;
use flashcore_lab::evolve::space::Space;
use kernels::Arch;
use problem::{DType, Mask, Problem};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rayon::prelude::*;

/// Seconds of each measurement.
const SECONDS: f64 = 5.0;

fn main() {
    let problems = [
        ("mission", Problem::mission()),
        ("large", Problem::new(4, 16, 4096, 128, DType::Bf16).with_mask(Mask::Causal)),
    ];
    for (name, problem) in problems {
        let space = Space::gpu(&problem, &Arch::SM_90, &[]);
        let mut rng = SmallRng::seed_from_u64(1);
        let (began, mut plans, mut distinct) = (Instant::now(), 0_u64, HashSet::new());
        let mut kept = Vec::new();
        while began.elapsed().as_secs_f64() < SECONDS {
            let Some(plan) = space.random(&mut rng) else { continue };
            plans += 1;
            if distinct.insert(plan.hash()) && kept.len() < 400 {
                kept.push(plan);
            }
        }
        let rate = plans as f64 / began.elapsed().as_secs_f64();
        println!(
            "{name}: {rate:.0} plans/s drawn blindly, checked and identified ({} distinct)",
            distinct.len()
        );
        let parent = kept.first().unwrap_or(&space.families[0].template);
        let (began, mut plans) = (Instant::now(), 0_u64);
        while began.elapsed().as_secs_f64() < SECONDS {
            let Some(plan) = space.mutate(parent, &mut rng) else { continue };
            distinct.insert(plan.hash());
            plans += 1;
        }
        println!(
            "{name}: {:.0} mutants/s checked and identified",
            plans as f64 / began.elapsed().as_secs_f64()
        );
        let Some(bench) = Bench::of(&H200) else { return };
        let began = Instant::now();
        let emitted =
            |plan| bench.bound(plan, &problem).is_ok_and(|bound| !bound.kernel.module.to_string().is_empty());
        let count = kept.par_iter().filter(|plan| emitted(plan)).count();
        println!("{name}: {:.0} PTX/s emitted", count as f64 / began.elapsed().as_secs_f64());
        if bench.ptxas.is_none() {
            println!("{name}: no ptxas");
            continue;
        }
        let began = Instant::now();
        let count = kept.par_iter().take(160).filter(|plan| bench.build(plan, &problem).is_ok()).count();
        let rate = count as f64 / began.elapsed().as_secs_f64();
        println!(
            "{name}: {rate:.0} PTX/s emitted and assembled by ptxas ({count}, {} threads)",
            rayon::current_num_threads()
        );
    }
}
