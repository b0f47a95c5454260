//! The plans of invariant problems on every architecture, and the output of ptxas for their kernels.

use attend::Rescale;
use flashcore_kernels::select::{Device, TunedTable, choose};
use flashcore_kernels::{Arch, Family, Plan, emit};
use problem::{Band, DType, DTypes, Invariant, Layout, Problem, SideLengths};

use crate::common::each::each;
use crate::tools::{self, Facts};

/// `rows` query rows in each of `batch` sequences of at most `keys` keys.
fn cache(batch: usize, rows: usize, keys: usize, (dim, dtypes): (usize, DTypes)) -> Problem {
    let problem = Problem::new(batch, 32, rows, dim, DType::Bf16).with_dtypes(dtypes);
    let problem = problem.with_heads_kv(8, Layout::Bshd).with_seq_kv(keys, Layout::Bshd);
    let mut problem = problem.with_band(Band::CAUSAL).with_invariant(Invariant::Phase);
    problem.lengths.kv.used = true;
    problem
}

/// The genes that order the sums of a row.
fn order(problem: &Problem, arch: Arch) -> (u32, u32, Option<u32>, Rescale) {
    let device = Device { name: "NVIDIA H200", arch };
    match choose(problem, &device, TunedTable::builtin()).unwrap().plan {
        Plan::Decode(plan) => (plan.warps, plan.warp_keys, plan.piece, plan.rescale),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_order_of_sums_depends_on_dims_and_types_alone() {
    for arch in Arch::ALL {
        for (dim, dtypes) in [(64, "f16"), (128, "bf16"), (256, "f16"), (128, "bf16/e4m3/e4m3")] {
            let dtypes: DTypes = dtypes.parse().unwrap();
            if dtypes.has_narrow_cache() && !arch.multiplies_fp8() {
                continue;
            }
            let of = (dim, dtypes);
            let expected = order(&cache(1, 1, 100, of), arch);
            assert_eq!((expected.3, expected.2.is_some()), (Rescale::Always, true));
            let mut packed = cache(7, 300, 5000, of);
            packed.lengths.q = SideLengths { packed: Some(900), used: false };
            let few = Arch { multiprocessors: 3, ..arch };
            for (problem, arch) in [
                (cache(256, 1, 1 << 17, of), arch),
                (cache(1, 8192, 8192, of).with_lse(true), arch),
                (cache(3, 2, 700, of).with_pages(1, 3000), arch),
                (cache(3, 2, 700, of).with_pages(16, 300).with_softcap(30.0), few),
                (packed, few),
            ] {
                let batch = problem.clone().with_invariant(Invariant::Batch);
                assert_eq!((order(&problem, arch), order(&batch, arch)), (expected, expected), "{problem:?}");
            }
        }
    }
}

/// The error of a problem that the family refuses names the argument and the reason.
#[test]
fn other_problems_are_refused() {
    let told = |problem: &Problem| Plan::default_for(problem, &Arch::SM_90).unwrap_err().to_string();
    let start = "invalid value 'phase' for invariant: expected a problem that family decode computes: ";
    let of = |dim, dtypes: &str| cache(1, 1, 100, (dim, dtypes.parse().unwrap()));
    let mut dropped = of(128, "bf16");
    dropped.dropout = Some(0.5);
    for (problem, reason) in [
        (of(80, "bf16"), "invalid value '80' for head_dim: "),
        (of(128, "f32"), "invalid value 'f32' for dtype with family decode: "),
        (dropped, "family decode does not support dropout"),
    ] {
        let told = told(&problem);
        assert!(told.starts_with(&format!("{start}{reason}")), "{told}");
    }
}

#[test]
fn defaults_assemble_with_few_spills() {
    let types = ["f16", "bf16", "bf16/e4m3/e4m3"].map(|dtypes| dtypes.parse::<DTypes>().unwrap());
    let mut cases = Vec::new();
    for (dim, dtypes) in [32, 64, 96, 128, 192, 256].into_iter().flat_map(|dim| types.map(|of| (dim, of))) {
        for arch in [Arch::SM_80, Arch::SM_89, Arch::SM_90] {
            let problem = cache(2, 1, 4096, (dim, dtypes));
            let fits = Family::Decode.default_for(&problem, &arch).is_ok();
            assert!(fits || dtypes.has_narrow_cache(), "{dim} {dtypes} sm_{}", arch.sm);
            cases.extend(fits.then_some((problem, arch)));
        }
    }
    assert!(cases.len() > 40, "{}", cases.len());
    let kernels = each(&cases, |(problem, arch)| {
        let plan = Plan::default_for(problem, arch).unwrap();
        emit(problem, &plan, arch).unwrap().kernel(0)
    });
    let Some(facts) = tools::facts(&kernels.iter().collect::<Vec<_>>()) else { return };
    for ((problem, arch), Facts { registers, spills, .. }) in cases.iter().zip(facts) {
        let (dim, dtypes, sm) = (problem.head_dim, problem.dtypes, arch.sm);
        // The registers of the merged pieces are used once in a piece. Little shared memory leaves a wide
        // head one warp, which has all columns of O twice.
        let most = match dim {
            ..=128 => 0,
            _ if sm == 90 => 128,
            _ => continue,
        };
        assert!(spills <= most, "head_dim {dim} {dtypes} sm_{sm}: {registers} registers, {spills} spilled");
    }
}

/// Warps that divide the head dims keep no pieces apart.
#[test]
fn wide_heads_are_refused_by_name() {
    let wide = cache(1, 1, 100, (320, "f16".parse().unwrap()));
    let refused = Family::Decode.default_for(&wide, &Arch::SM_90).unwrap_err().to_string();
    assert!(refused.contains("'320' for head_dim"), "{refused}");
    let device = Device { name: "NVIDIA H200", arch: Arch::SM_90 };
    let refused = choose(&wide, &device, TunedTable::builtin()).unwrap_err().to_string();
    assert!(refused.contains("invariant"), "{refused}");
}
