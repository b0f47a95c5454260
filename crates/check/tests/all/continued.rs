//! Tests of the gate on calls that continue from a result over other keys.

use crate::common::{SMALL, passes, plain_mma, plain_wgmma};
use flashcore_check::gate::{Settings, Verdict, bind, check_kernel};
use judge::inputs::Style;
use judge::inputs::draw;
use kernels::forward::mma::MmaPlan;
use kernels::forward::wgmma::{Ends, Share, Store, WgmmaPlan};
use kernels::{Arch, Family, Plan};
use problem::{Band, DType, Layout, Lengths, Operand, Pass, PassKind, Problem, SideLengths};
use tile::Tail;

const CONTINUES: Pass = Pass::Forward { lse: true, continues: true, invariant: None };

fn problem(dims: [usize; 2], rows: usize, keys: usize, dtype: DType) -> Problem {
    let [dim, head_dim_v] = dims;
    let problem = Problem { head_dim_v, heads_kv: 2, ..Problem::new(2, 4, rows, dim, dtype) };
    problem.with_seq_kv(keys, Layout::Bshd).with_pass(CONTINUES)
}

fn packed(problem: Problem) -> Problem {
    let packed = |rows| SideLengths { packed: Some(rows), used: false };
    Problem { lengths: Lengths { q: packed(120), kv: packed(170), left_padded: false }, ..problem }
}

fn with_sink(mut problem: Problem) -> Problem {
    problem.score.sink = true;
    problem
}

/// Rows without a key on either side, windows, packed sequences, sinks, and a call without the LSE.
fn problems(dims: [usize; 2], dtype: DType) -> Vec<Problem> {
    let of = |rows, keys| problem(dims, rows, keys, dtype);
    vec![
        of(70, 100),
        of(70, 0),
        of(101, 37).with_band(Band::CAUSAL),
        with_sink(of(67, 67).with_band(Band::window(20, 3))),
        packed(of(90, 70)).with_band(Band::CAUSAL),
        of(40, 130).with_pass(Pass::Forward { lse: false, continues: true, invariant: None }),
    ]
}

fn check(problem: &Problem, plan: Plan, arch: &Arch) {
    let bound = bind(&plan, problem, arch).unwrap_or_else(|error| panic!("{plan:?}: {error}"));
    passes(&check_kernel(&bound, &Settings::quick()).unwrap(), &(problem, &plan));
}

/// One warp, warps that divide keys, and warps that divide columns; columns and strides that are odd.
#[test]
fn mma_continues() {
    for (i, (dims, dtype)) in
        [([64, 64], DType::F16), ([48, 33], DType::Bf16), ([128, 80], DType::Bf16), ([32, 40], DType::F32)]
            .into_iter()
            .enumerate()
    {
        for (j, problem) in problems(dims, dtype).into_iter().enumerate() {
            let plain = plain_mma(&problem, &Arch::SM_80);
            let wide = MmaPlan { kv_warps: 2, warps: 4, block_n: 64, ..plain.clone() };
            let divides = problem.head_dim_v % 16 == 0;
            let plan = if (i + j) % 2 == 0 && divides { wide } else { plain };
            check(&problem, Plan::Mma(plan), &Arch::SM_80);
        }
    }
}

/// Every way of storing O, grouped heads, tiles that CTAs share, and warpgroups that divide columns.
#[test]
fn wgmma_continues() {
    let with_keys = |problem: &Problem| problem.seq_kv > 0; // a tensor map has no empty dimension
    for (j, problem) in problems([64, 64], DType::Bf16).into_iter().filter(with_keys).enumerate() {
        let store = [Store::Direct, Store::Bulk, Store::OverQueries][j % 3];
        let plan = WgmmaPlan { store, ..plain_wgmma(&problem) };
        let plan = if plan.check(&problem, &SMALL).is_ok() { plan } else { plain_wgmma(&problem) };
        check(&problem, Plan::Wgmma(plan), &SMALL);
    }
    for problem in problems([128, 72], DType::F16).into_iter().filter(with_keys) {
        check(&problem, Plan::Wgmma(plain_wgmma(&problem)), &SMALL);
    }
    let shared = problem([64, 64], 150, 150, DType::F16);
    let plan = WgmmaPlan { ends: Ends::Common, tail: Tail::Shared, ..plain_wgmma(&shared) };
    check(&shared, Plan::Wgmma(plan), &SMALL);
    let wide = problem([64, 320], 70, 90, DType::Bf16);
    let plan = WgmmaPlan::default_for(&wide, &SMALL);
    assert_eq!(plan.share, Share::HeadDim);
    check(&wide, Plan::Wgmma(plan), &SMALL);
}

/// A kernel that keeps its own result, or takes the earlier LSE without its O, fails.
#[test]
fn a_result_that_is_forgotten_is_seen() {
    let problem = problem([64, 64], 70, 100, DType::F16);
    let plan = Plan::Mma(plain_mma(&problem, &Arch::SM_80));
    let bound = bind(&plan, &problem, &Arch::SM_80).unwrap();
    let inputs = draw(&problem, Style::Normal, 1);
    let lse = inputs.operands.get(Operand::LseBefore).expect("an input");
    assert!((0..lse.len()).any(|i| lse.get(i) == Some(f32::NEG_INFINITY)), "no row without a key before");
    for (name, other) in [("lse_before", "lse"), ("out_before", "out")] {
        let text = bound.kernel.module.to_string();
        let forgotten = text.replace(&format!("[{name}]"), &format!("[{other}]"));
        assert_ne!(text, forgotten, "{name} is no parameter");
        let mut wrong = bound.clone();
        wrong.kernel.module = ptx::parse(&forgotten).unwrap().verify().unwrap();
        let verdict = check_kernel(&wrong, &Settings::quick()).map(|check| check.verdict);
        assert_ne!(verdict.ok(), Some(Verdict::Passed), "{name}");
    }
}

/// Families that cannot continue refuse by name, and so do splits.
#[test]
fn others_refuse_by_name() {
    let problem = problem([64, 64], 1, 300, DType::F16);
    for family in Family::of_pass(PassKind::Forward) {
        let name = family.name();
        if ["mma", "wgmma"].contains(&name) {
            continue;
        }
        let told = family.default_for(&problem, &Arch::SM_90).unwrap_err().to_string();
        assert!(told.contains(name) && told.contains("an earlier result"), "{told}");
    }
    let plan = MmaPlan { splits: 2, ..plain_mma(&problem, &Arch::SM_80) };
    let told = plan.check(&problem, &Arch::SM_80).unwrap_err().to_string();
    assert!(told.contains("'2' for splits") && told.contains("continues from a result"), "{told}");
    assert_eq!(MmaPlan::default_for(&problem, &Arch::SM_90).splits, 1);
}
