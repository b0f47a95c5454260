//! Tests random samples from the whole search space of the evolution. Every plan that passes the plan check
//! must pass the gate; otherwise a generator has a bug.

use check::gate::{Settings, Verdict, bind, check_kernel};
use filetest::is_due;
use flashcore_evolve::Candidate;
use flashcore_evolve::space::Space;
use kernels::Arch;
use problem::{Band, DType, Layout, Problem};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use rayon::prelude::*;

/// Number of samples for each problem. A share of the tests takes each second.
const DRAWS: u64 = 24;

/// Problems with more tiles than the architecture has SMs, ragged ends, and grouped heads.
fn problems() -> [Problem; 4] {
    let rectangle = |heads, seq_q: usize, seq_kv: usize, dim, dtype| {
        Problem::new(1, heads, seq_q, dim, dtype).with_seq_kv(seq_kv, Layout::Bhsd)
    };
    let grouped = Problem { heads_q: 4, heads_kv: 2, ..Problem::new(2, 4, 70, 64, DType::Bf16) };
    [
        rectangle(3, 200, 200, 64, DType::F16),
        rectangle(3, 130, 190, 64, DType::Bf16).with_band(Band::CAUSAL),
        rectangle(2, 150, 100, 128, DType::Bf16),
        grouped.with_layout(Layout::Bshd).with_band(Band::CAUSAL),
    ]
}

/// Two of the four quick runs: every pair of neighbours is as frequent as the others.
fn half_of_quick(seed: u64) -> Settings {
    let quick = Settings::quick();
    let runs = quick.runs.iter().cycle().skip(seed as usize % quick.runs.len()).take(2);
    Settings { runs: runs.copied().collect(), ..quick }
}

#[test]
fn blind_draws_pass() {
    let arch = Arch { multiprocessors: 4, ..Arch::SM_90 };
    let draws: Vec<(Problem, u64)> = problems()
        .into_iter()
        .flat_map(|problem| {
            (0..DRAWS).filter(|&seed| is_due(seed as usize, 2)).map(move |seed| (problem.clone(), seed))
        })
        .collect();
    let refused: Vec<String> = draws
        .par_iter()
        .filter_map(|(problem, seed)| {
            let space = Space::gpu(problem, &arch, &[]);
            let drawn = space.random(&mut SmallRng::seed_from_u64(*seed))?;
            let Candidate::Gpu(plan) = drawn else { return Some(format!("{drawn:?} is no plan")) };
            let bound = match bind(&plan, problem, &arch) {
                Ok(bound) => bound,
                Err(error) => return Some(format!("{plan:?}: {error}")),
            };
            match check_kernel(&bound, &half_of_quick(*seed)) {
                Ok(check) if check.verdict == Verdict::Passed => None,
                Ok(check) => {
                    Some(format!("{problem:?}, draw {seed}, {plan:?}: {}", check.reasons.join("; ")))
                }
                Err(error) => Some(format!("{plan:?}: {error}")),
            }
        })
        .collect();
    assert!(refused.is_empty(), "{} of {}: {refused:#?}", refused.len(), draws.len());
}
