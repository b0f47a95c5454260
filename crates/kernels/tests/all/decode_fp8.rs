//! The `decode` family with 8-bit caches of 16-bit queries: results within the rounding of P and O, faults,
//! and registers. `crates/check/tests/all/decode.rs` has pages, lengths and all styles of inputs.

use flashcore_kernels::forward::decode::DecodePlan;
use flashcore_kernels::{Arch, Plan, emit};
use problem::{Band, DTypes, Layout, Problem, ScaleLayout, Scales};
use ptx::Kernel;

use crate::common::fp8::{self, Fault, WINDOW, edit_text, faults_are_seen, lines, problem};
use crate::tools;

fn with_factors(problem: Problem) -> Problem {
    let scales =
        Scales { q: None, k: Some(ScaleLayout::per_head(problem.heads_kv)), v: Some(ScaleLayout::TENSOR) };
    Problem { scales, ..problem }
}

fn plan(problem: &Problem, arch: &Arch) -> DecodePlan {
    DecodePlan { stages: 3, least_blocks: 1, resident_ctas: 1, ..DecodePlan::default_for(problem, arch) }
}

#[test]
fn types_dims_and_groups() {
    for (i, (rows, keys, dim, types, band)) in [
        (1, 300, 64, "f16/e4m3/e4m3:f16", Band::FULL),
        (3, 133, 128, "bf16/e4m3/e4m3", Band::CAUSAL),
        (17, 90, 64, "bf16/e5m2/e4m3", WINDOW),
        (1, 150, 256, "f16/e5m2/e5m2:bf16", Band::FULL),
        (2, 65, 192, "bf16/e4m3/e5m2:f16", Band::CAUSAL),
        (1, 70, 32, "f16/e4m3/e4m3:f16", Band::FULL),
    ]
    .into_iter()
    .enumerate()
    {
        let one = problem(rows, keys, dim, types, band);
        let warps = if dim == 32 { 2 } else { 4 };
        for problem in [one.clone(), with_factors(one).with_heads_kv(1, Layout::Bshd)] {
            let arch = Arch { multiprocessors: [3, 132][i % 2], ..Arch::SM_90 };
            let plan = DecodePlan { warps, ..plan(&problem, &arch) };
            fp8::run(&problem, &Plan::Decode(plan), &arch, i as u64, |_| {}).check();
        }
    }
}

/// Without one of the factors, or with the bytes of a pair exchanged, the result is wrong.
#[test]
fn faults_of_widening_are_seen() {
    let problem = with_factors(problem(2, 133, 64, "bf16/e4m3/e4m3", Band::CAUSAL));
    let plan = Plan::Decode(plan(&problem, &Arch::SM_90));
    let run = |fault: Fault<'_>| fp8::run(&problem, &plan, &Arch::SM_90, 4, |program| fault(program));
    let swapped: Fault<'_> = &|program| {
        edit_text(program, |text| text.replace(", 12576;", ", 8496;").replace(", 0x3120;", ", 0x2130;"));
    };
    let plain: Fault<'_> = &|program| {
        edit_text(program, |text| {
            lines(text, |line, _| {
                let operands = line.trim().strip_prefix("mul.rn.f32 ").unwrap_or_default();
                let in_place = operands.split(", ").collect::<Vec<_>>();
                (in_place.len() < 3 || in_place[0] != in_place[1]).then(|| line.to_owned())
            })
        });
    };
    faults_are_seen(run, &[("columns exchanged", swapped), ("factors left out", plain)]);
}

#[test]
fn default_kernels_assemble_without_spills() {
    let mut kernels: Vec<Kernel> = Vec::new();
    let mut cases = Vec::new();
    for (arch, dim) in
        [Arch::SM_89, Arch::SM_90, Arch::SM_120].into_iter().flat_map(|a| [64, 128, 256].map(|d| (a, d)))
    {
        for types in ["bf16", "f16/e4m3/e4m3:f16", "bf16/e4m3/e4m3", "bf16/e5m2/e5m2"] {
            let dtypes: DTypes = types.parse().unwrap();
            let problem = Problem { heads_kv: 2, ..Problem::new(4, 16, 1, dim, dtypes) };
            let problem = problem.with_seq_kv(4096, Layout::Bshd).with_pages(16, 1100);
            let problem = if dtypes.has_fp8() { with_factors(problem) } else { problem };
            let plan = DecodePlan::default_for(&problem, &arch);
            cases.push(format!("sm_{} {dim} {types} {plan:?}", arch.sm));
            kernels.push(emit(&problem, &Plan::Decode(plan), &arch).unwrap().kernel(0));
        }
    }
    let Some(facts) = tools::facts(&kernels.iter().collect::<Vec<_>>()) else { return };
    for (case, facts) in cases.into_iter().zip(facts) {
        // O takes 128 registers of a thread with head dim 256, and a few others of the page table are
        // spilled.
        let most = if case.contains(" 256 ") { 128 } else { 0 };
        println!("{case}: {} registers, {} spilled", facts.registers, facts.spills);
        assert!(facts.spills <= most, "{case}: {} registers, {} spilled", facts.registers, facts.spills);
    }
}
