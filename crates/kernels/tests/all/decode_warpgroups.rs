//! Latent attention by warpgroups in the `decode` family: registers, and what is refused.

use flashcore_kernels::forward::decode::{DecodePlan, ProductUnit};
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

/// Whether TMA copies the keys.
fn tma(problem: &Problem) -> bool {
    problem.storage.pages().is_none_or(|pages| pages.rows.is_multiple_of(8))
}

/// ptxas would also warn of serialised products.
#[test]
fn kernels_assemble_without_spills() {
    let mut cases: Vec<Problem> = Vec::new();
    for (page, dtype) in
        [(0, DType::F16), (64, DType::Bf16), (16, DType::Bf16), (8, DType::F16), (3, DType::F16)]
    {
        cases.push(problem(1, page, dtype));
        cases.push(problem(2, page, dtype).with_band(Band::CAUSAL));
        cases.push(with_all_features(problem(4, page, dtype)));
    }
    let kernel = |case: &Problem| {
        let plan = DecodePlan::default_for(case, &Arch::SM_90);
        assert_eq!((plan.products, plan.tma), (ProductUnit::Warpgroup, tma(case)), "{case:?}");
        emit(case, &Plan::Decode(plan), &Arch::SM_90).unwrap().kernel(0)
    };
    let kernels: Vec<Kernel> = cases.iter().map(kernel).collect();
    let Some(facts) = tools::facts(&kernels.iter().collect::<Vec<_>>()) else { return };
    for (case, facts) in cases.iter().zip(facts) {
        println!("{case:?}: {} registers, {} spilled", facts.registers, facts.spills);
        assert_eq!(facts.spills, 0, "{case:?}: {} registers", facts.registers);
    }
}

/// Warpgroups multiply by default on sm_90 where a CTA of warps would not have all rows.
#[test]
fn the_default_depends_on_rows_and_architecture() {
    for (heads, rows, arch, expected) in [
        (128, 1, Arch::SM_90, ProductUnit::Warpgroup),
        (33, 1, Arch::SM_90, ProductUnit::Warpgroup),
        (16, 3, Arch::SM_90, ProductUnit::Warpgroup),
        (32, 1, Arch::SM_90, ProductUnit::Warp),
        (128, 1, Arch::SM_80, ProductUnit::Warp),
        (128, 1, Arch::SM_120, ProductUnit::Warp),
    ] {
        let problem = Problem { heads_q: heads, ..problem(rows, 64, DType::Bf16) };
        let problem = problem.with_layout(Layout::Bshd).with_pages(64, 260).with_v_in_k(512);
        let plan = DecodePlan::default_for(&problem, &arch);
        assert_eq!(plan.products, expected, "{heads} {rows} {arch:?}");
        plan.check(&problem, &arch).unwrap();
    }
}

/// Each refusal names what the form does not compute. The default then has products of warps.
#[test]
fn refusals_name_the_reason() {
    let plan = DecodePlan::default_for(&problem(1, 64, DType::Bf16), &Arch::SM_90);
    let mut negative = problem(1, 64, DType::Bf16);
    negative.score.scale = Some(-0.5);
    let mut padded = problem(1, 64, DType::Bf16);
    padded.lengths.left_padded = true;
    let narrow = Problem { heads_kv: 1, ..Problem::new(4, 128, 1, 512, DType::Bf16) };
    let narrow = narrow.with_seq_kv(4096, Layout::Bshd).with_v_in_k(512);
    let many_warps = DecodePlan { warps: 4, ..plan.clone() };
    for (plan, problem, reason) in [
        (&plan, negative, "scale"),
        (&plan, padded, "left padding"),
        (&plan, problem(1, 3, DType::Bf16), "page_size"),
        (&plan, narrow, "head dims"),
        (&many_warps, problem(1, 64, DType::Bf16), "genes with products of warpgroups"),
    ] {
        let refused = plan.check(&problem, &Arch::SM_90).unwrap_err().to_string();
        assert!(refused.contains(reason), "{reason}: {refused}");
        let default = DecodePlan::default_for(&problem, &Arch::SM_90);
        assert_eq!(default.check(&problem, &Arch::SM_90), Ok(()), "{default:?}");
    }
    let refused = plan.check(&problem(1, 64, DType::Bf16), &Arch::SM_120).unwrap_err().to_string();
    assert!(refused.contains("sm"), "{refused}");
}
