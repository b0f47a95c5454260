//! Times random plans of the native kernels' search space, to fit and to evaluate the time model of the CPU.
//! Prints one JSON object per plan: the problem, the plan, its time, and the time of the default plan
//! measured in turns with it.
//!
//! ```text
//! cargo run -p flashcore-evolve --example cpu_times -- [PLANS_A_PROBLEM [SEED]] > times.jsonl
//! ```

use std::time::Instant;

use bench::CpuTimer;
use cpu::CpuPlan;
use flashcore_evolve::Candidate;
use flashcore_evolve::space::Space;
use problem::{Band, DType, Layout, Problem};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde_json::json;

/// Rounds of a plan, each in turns with the default.
const ROUNDS: usize = 3;

fn problems() -> Vec<(&'static str, Problem)> {
    let keys = |p: Problem, keys| p.with_seq_kv(keys, Layout::Bhsd);
    vec![
        ("mission-f16", Problem::mission()),
        ("mission-f32", Problem::new(1, 8, 512, 64, DType::F32)),
        ("causal-d128-bf16", Problem::new(1, 4, 768, 128, DType::Bf16).with_band(Band::CAUSAL)),
        ("decode-f32", keys(Problem::new(1, 8, 1, 64, DType::F32), 2048)),
        ("gqa-f16", Problem::new(1, 16, 256, 64, DType::F16).with_heads_kv(2, Layout::Bhsd)),
    ]
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let plans: usize = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(100);
    let seed: u64 = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(1);
    for (name, problem) in problems() {
        let began = Instant::now();
        let (space, mut rng) = (Space::cpu(&problem), SmallRng::seed_from_u64(seed));
        let (mut timer, default) = (CpuTimer::new(&problem), CpuPlan::for_problem(&problem));
        let mut time = |plan: &CpuPlan| timer.time(plan).unwrap_or(f64::NAN);
        time(&default);
        for _ in 0..plans {
            let Some(Candidate::Cpu(plan)) = space.random(&mut rng) else { continue };
            let mut times: Vec<[f64; 2]> = (0..ROUNDS).map(|_| [time(&plan), time(&default)]).collect();
            times.sort_by(|a, b| (a[0] / a[1]).total_cmp(&(b[0] / b[1])));
            let [us, default_us] = times[ROUNDS / 2];
            println!(
                "{}",
                json!({ "name": name, "problem": problem, "plan": plan, "us": us, "default_us": default_us })
            );
        }
        eprintln!("{name}: {plans} plans in {:.1} s", began.elapsed().as_secs_f64());
    }
}
