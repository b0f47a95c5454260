//! Tests of the gate on default plans for odd and for large head dims: the torture set must be within the
//! error model of the type.

use crate::common::half_of_torture_passes;
use flashcore_check::gate::{Settings, Verdict, bind, check_kernel, torture};
use flashcore_check::launchfile::Bound;
use kernels::{Arch, Family};
use problem::{DType, DTypes, Problem};

/// A half of the torture set's runs for a type and a head dim, on the default plans of a family.
fn passes(half: usize, family: Family, dtypes: impl Into<DTypes>, dim: usize, arch: &Arch) {
    let dtypes = dtypes.into();
    let of = (family, dtypes.to_string(), dim);
    half_of_torture_passes(&torture::problems(dtypes, dim), half, 11, &of, |problem| {
        let problem = problem.clone().with_lse(true);
        let plan = family.default_for(&problem, arch).ok()?;
        Some(bind(&plan, &problem, arch).unwrap())
    });
}

/// Three products of tf32.
#[test]
fn f32_is_within_the_error_model() {
    passes(0, Family::Mma, DType::F32, 32, &Arch::SM_80);
}

#[test]
fn tf32_is_within_its_error_model() {
    passes(1, Family::Mma, DTypes::TF32, 32, &Arch::SM_80);
}

/// A kernel that multiplies in tf32 fails as a kernel of f32.
#[test]
fn tf32_is_not_f32() {
    let float = Problem::new(1, 2, 96, 32, DType::F32);
    let coarse = Problem { dtypes: DTypes::TF32, ..float.clone() };
    let plan = Family::Mma.default_for(&coarse, &Arch::SM_80).unwrap();
    let verdict = |stated: &Problem, computed: &Problem| {
        let bound = bind(&plan, computed, &Arch::SM_80).unwrap();
        let bound = Bound { problem: Some(stated.clone()), ..bound };
        check_kernel(&bound, &Settings::quick()).unwrap().verdict
    };
    assert_eq!(verdict(&float, &float), Verdict::Passed);
    assert_eq!(verdict(&coarse, &coarse), Verdict::Passed);
    assert_eq!(verdict(&float, &coarse), Verdict::Failed);
}

#[test]
fn odd_head_dims_are_within_the_error_model() {
    passes(0, Family::Mma, DType::F16, 59, &Arch::SM_80);
    passes(1, Family::Mma, DType::Bf16, 60, &Arch::SM_90);
}

#[test]
fn wide_head_dims_are_within_the_error_model() {
    passes(0, Family::Mma, DType::F16, 512, &Arch::SM_80);
    passes(1, Family::Wgmma, DType::Bf16, 512, &Arch::SM_90);
}
