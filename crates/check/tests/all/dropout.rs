//! Tests of the gate with dropout: every family that has it computes the mask that the oracle states, and
//! the others refuse it by name.

use attend::Order;
use emu::Schedule;
use flashcore_check::gate::{Settings, bind, check_kernel};
use judge::inputs::Style;
use kernels::backward::fused::FusedPlan;
use kernels::backward::split::SplitPlan;
use kernels::forward::mma::{MmaPlan, QueryHome};
use kernels::forward::wgmma::WgmmaPlan;
use kernels::{Arch, Plan, PlanError};
use problem::{Band, DType, ElementType, Gradients, Layout, Pass, Problem, Program, SideLengths, Table};

use crate::common::{passes, plain_mma};

const SCHEDULES: [Schedule; 3] = [Schedule::Late, Schedule::Early, Schedule::Random];

fn check(problem: &Problem, plan: impl Into<Plan>, number: usize) {
    // The first architecture with products of 8-bit inputs.
    let (plan, arch) = (plan.into(), Arch::SM_89);
    let run = (Style::Normal, number as u64, SCHEDULES[number % 3]);
    let settings = Settings { runs: vec![run], lagging: false, ..Settings::quick() };
    let bound = bind(&plan, problem, &arch).unwrap_or_else(|error| panic!("{problem:?}: {error}"));
    passes(&check_kernel(&bound, &settings).unwrap(), &(problem, plan));
}

/// Two batch entries with grouped heads, and rows and keys that no block divides.
fn base(number: usize, dropout: f32) -> Problem {
    let dtype = [DType::F16, DType::Bf16][number % 2];
    let mut p = Problem::new(2, 4, [70, 45][number % 2], 64, dtype).with_seq_kv(133, Layout::Bshd);
    p.dropout = Some(dropout);
    p.with_heads_kv(2, Layout::Bshd).with_lse(number.is_multiple_of(2))
}

/// Problems with dropout and each feature that changes which scores a lane holds.
fn problems() -> Vec<Problem> {
    let packed = |rows| SideLengths { packed: Some(rows), used: false };
    let mut all: Vec<Problem> = (0..6).map(|number| base(number, [0.1, 0.5][number % 2])).collect();
    all[1].band = Band::CAUSAL;
    all[2].band = Band::window(40, 3);
    (all[3].lengths.q, all[3].lengths.kv) = (packed(120), packed(250));
    (all[3].band, all[3].score.sink) = (Band::CAUSAL, true);
    (all[4].lengths.kv.used, all[4].lengths.left_padded) = (true, true);
    all[5].programs.score = "s - 0.25 * float(abs(q - k))".parse::<Program>().ok();
    all[5].score.softcap = Some(3.0);
    all.into_iter().map(|p| p.with_layout(Layout::Bshd)).collect()
}

/// Blocks of 16, 48 and 64 keys; warps that divide keys, rows or head dims; split keys; all types.
#[test]
fn the_forward_family_computes_the_mask() {
    for (number, problem) in problems().into_iter().enumerate() {
        let plan = plain_mma(&problem, &Arch::SM_89);
        check(&problem, MmaPlan { block_n: [64, 16, 48][number % 3], ..plan }, number);
    }
    let p = base(0, 0.25);
    let plan = plain_mma(&p, &Arch::SM_89);
    let splits = MmaPlan { splits: 2, ..plan.clone() };
    let shared = MmaPlan { warps: 4, kv_warps: 2, block_n: 64, ..plan.clone() };
    let narrow = MmaPlan { warps: 4, kv_warps: 2, block_n: 32, ..plan.clone() };
    let ahead = MmaPlan { products: Order::ScoresAhead, queries: QueryHome::Shared, ..plan.clone() };
    let halves = MmaPlan { warps: 4, dim_warps: 2, queries: QueryHome::Shared, ..plan };
    for (number, plan) in [splits, shared, narrow, ahead, halves].into_iter().enumerate() {
        check(&p, plan, number);
    }
    for (number, dtype) in [DType::F32, DType::E4m3].into_iter().enumerate() {
        let p = base(number, 0.5).with_dtypes(dtype.into()).with_layout(Layout::Bshd);
        check(&p, MmaPlan::default_for(&p, &Arch::SM_89), number);
    }
}

/// All elements dropped, and a probability below the resolution.
#[test]
fn probabilities_at_the_ends() {
    for (number, p) in [1.0, 1e-6].into_iter().enumerate() {
        let problem = base(number, p);
        check(&problem, plain_mma(&problem, &Arch::SM_89), number);
        let problem = problem.with_pass(Pass::DETERMINISTIC);
        check(&problem, SplitPlan::default_for(&problem, &Arch::SM_89), number);
    }
}

/// Warps with 16 and 32 rows and blocks of 16 to 48; dLSE, gradients of sinks, of a bias and of slopes.
#[test]
fn the_backward_family_computes_the_mask() {
    for (number, mut problem) in problems().into_iter().enumerate() {
        if number == 5 {
            problem.programs.score =
                "s + t0[h, q, k] - 0.01 * t1[h] * float(abs(q - k))".parse::<Program>().ok();
            problem.programs.tables =
                [&[4, 45, 133][..], &[4]].map(|extents| Table::dense(ElementType::F32, extents)).into();
        }
        let tables = if number == 5 { 3 } else { 0 };
        let wants = Gradients { sinks: problem.score.sink, tables };
        let pass = Pass::Backward { deterministic: true, d_lse: number % 3 == 0, wants };
        let problem = problem.with_pass(pass);
        // Programs need registers of their own.
        let size = if number == 5 { 3 } else { number % 3 };
        let plan = SplitPlan {
            dq_rows: if number == 5 { 32 } else { [32, 64][number % 2] },
            dq_keys: [16, 32, 48, 16][size],
            dq_warps: 2,
            dkv_keys: [64, 64, 32, 32][size],
            dkv_rows: [32, 16, 48, 16][size],
            dkv_warps: 2,
            ..SplitPlan::default_for(&problem, &Arch::SM_89)
        };
        check(&problem, plan, number);
    }
    let mut wide = Problem::new(1, 2, 40, 256, DType::Bf16).with_pass(Pass::DETERMINISTIC);
    wide.dropout = Some(0.25);
    check(&wide, SplitPlan::default_for(&wide, &Arch::SM_89), 1); // two warps divide the head dims
}

/// Families without dropout refuse it by name, and the choice falls to those that have it. Another
/// probability has the code of the first.
#[test]
fn families_without_dropout_refuse_it() {
    let arch = Arch::SM_90;
    let mut p = Problem::new(1, 16, 1024, 128, DType::Bf16);
    p.dropout = Some(0.1);
    let backward = p.clone().with_pass(Pass::BACKWARD);
    let wgmma = Plan::from(WgmmaPlan::default_for(&p, &arch)).check(&p, &arch);
    let fused = Plan::from(FusedPlan::default_for(&backward, &arch)).check(&backward, &arch);
    for refused in [wgmma, fused] {
        assert!(matches!(refused, Err(PlanError::Feature { name: "dropout", .. })), "{refused:?}");
    }
    for problem in [p, backward] {
        let plan = Plan::default_for(&problem, &arch).unwrap();
        assert!(matches!(plan, Plan::Mma(_) | Plan::BackwardSplit(_)), "{plan:?}");
        let other = Problem { dropout: Some(0.5), ..problem.clone() };
        let baked = |problem: &Problem| kernels::bind(problem, &plan, &arch).unwrap().0;
        assert_eq!(baked(&problem), baked(&other));
        assert_ne!(baked(&problem), baked(&Problem { dropout: None, ..problem.clone() }));
    }
}
