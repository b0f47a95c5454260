//! Latent attention by warpgroups in the `decode` family: registers, and what is refused.

use flashcore_kernels::forward::decode::DecodePlan;
use flashcore_kernels::{Arch, Plan, emit};
use problem::{Band, DType, Layout, Problem, SideLengths};
use ptx::Kernel;

use crate::tools;

/// `rows` query rows of 128 heads for each of four sequences of 4096 keys, in pages of `page` rows or dense.
fn problem(rows: usize, page: usize, dtype: DType) -> Problem {
    let problem = Problem { heads_kv: 1, ..Problem::new(4, 128, rows, 576, dtype) };
    let problem = problem.with_seq_kv(4096, Layout::Bshd).with_lse(true);
    let problem = if page == 0 { problem } else { problem.with_pages(page, 4 * 4096 / page + 4) };
    problem.with_v_in_k(512)
}

/// The problem with every feature of the form that costs registers.
fn with_all_features(mut problem: Problem) -> Problem {
    problem.band = Band::window(1000, 0);
    (problem.score.sink, problem.score.softcap) = (true, Some(30.0));
    problem.lengths.q = SideLengths { packed: Some(16), used: false };
    problem.lengths.kv.used = true;
    problem
}

fn plan(problem: &Problem) -> Plan {
    Plan::Decode(DecodePlan::default_for(problem, &Arch::SM_90).of_warpgroups())
}

#[test]
fn kernels_assemble_without_spills() {
    let mut cases: Vec<Problem> = Vec::new();
    for (page, dtype) in [(0, DType::F16), (64, DType::Bf16), (16, DType::Bf16), (8, DType::F16)] {
        cases.push(problem(1, page, dtype));
        cases.push(problem(2, page, dtype).with_band(Band::CAUSAL));
        cases.push(with_all_features(problem(4, page, dtype)));
    }
    let kernels: Vec<Kernel> =
        cases.iter().map(|case| emit(case, &plan(case), &Arch::SM_90).unwrap().kernel(0)).collect();
    let Some(facts) = tools::facts(&kernels.iter().collect::<Vec<_>>()) else { return };
    for (case, facts) in cases.iter().zip(facts) {
        println!("{case:?}: {} registers, {} spilled", facts.registers, facts.spills);
        assert_eq!(facts.spills, 0, "{case:?}: {} registers", facts.registers);
    }
}
