//! The gate on 8-bit inputs in the family `mma`: the default plans with descale factors.

use flashcore_check::gate::{CheckReport, Settings, Verdict, bind, check_kernel};
use kernels::{Arch, Family};
use problem::{Band, DTypes, Layout, Problem, ScaleLayout, Scales};

fn passes(check: &CheckReport, of: &dyn std::fmt::Debug) {
    assert_eq!(check.verdict, Verdict::Passed, "{of:?}: {:#?}", check.reasons);
}

/// Groups of 1 and 8 query heads, each mask, both types, head dims 64, 128 and 256.
#[test]
fn default_plans_pass_with_factors() {
    for (i, (heads_kv, dim, band, types)) in [
        (8, 64, Band::FULL, "e4m3"),
        (1, 128, Band::CAUSAL, "e4m3"),
        (1, 64, Band::window(40, 0), "e5m2"),
        (8, 256, Band::CAUSAL, "e5m2:f16"),
        (1, 128, Band::FULL, "e4m3/e5m2/f16"),
    ]
    .into_iter()
    .enumerate()
    {
        let dtypes: DTypes = types.parse().unwrap();
        let problem = Problem::new(1, 8, 70, dim, dtypes).with_heads_kv(heads_kv, Layout::Bshd);
        let scales = Scales {
            q: Some(ScaleLayout::TENSOR),
            k: Some(ScaleLayout::per_head(heads_kv)),
            v: dtypes.v.is_fp8().then(|| ScaleLayout::per_head(heads_kv)),
        };
        let problem = Problem { scales, ..problem.with_seq_kv(200, Layout::Bshd).with_band(band) };
        let arch = [Arch::SM_89, Arch::SM_120][i % 2];
        let plan = Family::Mma.default_for(&problem, &arch).unwrap();
        let bound = bind(&plan, &problem, &arch).unwrap();
        passes(&check_kernel(&bound, &Settings::quick()).unwrap(), &(plan, problem));
    }
}
