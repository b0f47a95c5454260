//! Plans of the `decode` family whose warps divide the head dims: registers, and shared memory of each GPU.

use flashcore_kernels::forward::decode::DecodePlan;
use flashcore_kernels::select::{Device, TunedTable, choose};
use flashcore_kernels::{Arch, Plan, PlanError, bind, emit};
use problem::{Band, DType, Layout, Problem, SideLengths};
use ptx::Kernel;

use crate::tools;

/// One query row for each of four sequences of 4096 keys in pages of 64 rows.
fn problem(heads: [usize; 2], dims: [usize; 2], dtype: DType) -> Problem {
    let problem = Problem { heads_kv: heads[1], ..Problem::new(4, heads[0], 1, dims[0], dtype) };
    let problem = problem.with_seq_kv(4096, Layout::Bshd).with_pages(64, 260).with_lse(true);
    if dims[0] == dims[1] { problem } else { problem.with_v_in_k(dims[1]) }
}

/// The problem with every feature of the family that costs registers.
fn with_all_features(mut problem: Problem) -> Problem {
    problem.band = Band::window(1000, 0);
    (problem.score.sink, problem.score.softcap) = (true, Some(30.0));
    problem.lengths.q = SideLengths { packed: Some(4), used: false };
    (problem.lengths.kv.used, problem.lengths.left_padded) = (true, true);
    problem.with_pages(1, 20_000)
}

#[test]
fn default_kernels_assemble_without_spills() {
    let mut kernels: Vec<Kernel> = Vec::new();
    let mut cases = Vec::new();
    for arch in Arch::ALL {
        for (heads, dims) in [([8, 1], [320, 320]), ([16, 2], [512, 512]), ([128, 1], [576, 512])] {
            let of = |dtype| problem(heads, dims, dtype);
            for problem in [of(DType::F16), of(DType::Bf16), with_all_features(of(DType::Bf16))] {
                let plan = Plan::default_for(&problem, &arch).unwrap();
                assert_eq!(plan.family(), "decode", "{problem:?}");
                cases.push(format!("sm_{} {dims:?} {} {plan:?}", arch.sm, problem.dtypes));
                kernels.push(emit(&problem, &plan, &arch).unwrap().kernel(0));
            }
        }
    }
    let Some(facts) = tools::facts(&kernels.iter().collect::<Vec<_>>()) else { return };
    for (case, facts) in cases.into_iter().zip(facts) {
        println!("{case}: {} registers", facts.registers);
        assert_eq!(facts.spills, 0, "{case}: {} registers", facts.registers);
    }
}

/// Values in keys are read once where the rows are not many, in pages or not. More rows, and values apart
/// from keys, have other families.
#[test]
fn the_family_is_chosen_for_few_rows_with_values_in_keys() {
    let of_rows = |rows: usize| Problem { heads_kv: 1, ..Problem::new(4, 128, rows, 576, DType::Bf16) };
    let dense = |rows| of_rows(rows).with_seq_kv(4096, Layout::Bshd);
    let apart = Problem { head_dim_v: 512, ..dense(1) }.with_layout(Layout::Bshd);
    for (problem, expected) in [
        (dense(1).with_v_in_k(512), true),
        (dense(1).with_pages(64, 260).with_v_in_k(512), true),
        (dense(64).with_v_in_k(512), true),
        (dense(65).with_v_in_k(512), false),
        (apart, false),
    ] {
        let device = Device { name: "NVIDIA H200", arch: Arch::SM_90 };
        let choice = choose(&problem, &device, TunedTable::builtin()).unwrap();
        assert_eq!(choice.plan.family() == "decode", expected, "{problem:?}: {:?}", choice.plan);
    }
}

/// Whether V is in K is a property of the code only where the kernel reads it there.
#[test]
fn views_are_baked_where_they_are_read() {
    let of = |problem: &Problem, plan: &DecodePlan| {
        let plan = Plan::Decode(plan.clone());
        let (baked, _) = bind(problem, &plan, &Arch::SM_90).unwrap();
        (baked, emit(problem, &plan, &Arch::SM_90).unwrap().module.to_string())
    };
    for (dims, dim_warps, differs) in [([576, 512], 4, true), ([128, 128], 1, false), ([128, 128], 4, false)]
    {
        let latent = problem([16, 1], dims, DType::Bf16).with_v_in_k(dims[1]);
        let apart = Problem { v_in_k: false, ..latent.clone() };
        let plan = DecodePlan::default_for(&latent, &Arch::SM_90);
        let plan = DecodePlan { dim_warps, stages: 2, ..plan };
        let [(baked, text), (other_baked, other_text)] = [&latent, &apart].map(|problem| of(problem, &plan));
        assert_eq!((baked != other_baked, text != other_text), (differs, differs), "{dims:?} {dim_warps}");
    }
}

/// A plan that does not fit the shared memory of a GPU is refused with both sizes.
#[test]
fn shared_memory_is_limited() {
    let problem = problem([16, 2], [512, 512], DType::Bf16);
    let plan = DecodePlan::default_for(&problem, &Arch::SM_90);
    let refused = Plan::Decode(plan).check(&problem, &Arch::SM_120).unwrap_err();
    assert!(matches!(refused, PlanError::SharedMemory { limit: 101_376, .. }), "{refused:?}");
}
