//! Tests of the gate on default plans for odd and for large head dims: the torture set must be within the
//! error model of the type.

use flashcore_check::gate::{Settings, Verdict, bind, check_family, torture};
use kernels::{Arch, Family};
use problem::DType;

/// The torture set of a type and a head dim, on the default plans of a family.
fn passes(family: Family, dtype: DType, dim: usize, arch: &Arch) {
    let problems = torture::problems(dtype, dim);
    let bound = |problem: &problem::Problem| {
        let problem = problem.clone().with_lse(true);
        let plan = family.default_for(&problem, arch).ok()?;
        Some(bind(&plan, &problem, arch).unwrap())
    };
    assert!(problems.iter().filter(|torture| bound(&torture.problem).is_some()).count() > 10);
    let check = check_family(&problems, &Settings::quick(), bound).unwrap();
    assert_eq!(check.verdict, Verdict::Passed, "{family:?} {dtype} {dim}: {:#?}", check.reasons);
}

/// Three products of tf32.
#[test]
fn f32_is_within_the_error_model() {
    passes(Family::Mma, DType::F32, 32, &Arch::SM_80);
}

#[test]
fn odd_head_dims_are_within_the_error_model() {
    passes(Family::Mma, DType::F16, 59, &Arch::SM_80);
    passes(Family::Mma, DType::Bf16, 60, &Arch::SM_90);
}

#[test]
fn wide_head_dims_are_within_the_error_model() {
    passes(Family::Mma, DType::F16, 512, &Arch::SM_80);
    passes(Family::Wgmma, DType::Bf16, 512, &Arch::SM_90);
}
