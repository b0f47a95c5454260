//! Tests of head dims of every size on the emulator: large ones, whose columns two warps divide, and those
//! that are not a multiple of a 16-byte chunk.

use crate::common;
use crate::common::each::each;
use crate::tools::{self, Facts};

use attend::{Order, Packing, Sums, Tiles};
use emu::{Emulator, Options, Schedule};
use flashcore_kernels::forward::mma::{MmaPlan, QueryHome};
use flashcore_kernels::forward::wgmma::{Ends, Rescaling, Share, WgmmaPlan};
use flashcore_kernels::{Arch, Family, Plan, emit};
use problem::{Band, DType, DTypes, Layout, PassKind, Problem, Strides, Tensor};
use ptx::Kernel;
use tile::{CopyMode, Turns};

fn check(problem: &Problem, plan: MmaPlan, arch: &Arch, seed: u64) {
    check_plan(problem, &Plan::Mma(plan), arch, seed);
}

fn check_plan(problem: &Problem, plan: &Plan, arch: &Arch, seed: u64) {
    let schedule = [Schedule::Late, Schedule::Early, Schedule::Random][seed as usize % 3];
    let options = Options { seed, schedule, ..Options::default() };
    common::run(&mut Emulator::new(options), problem, plan, arch, seed).check();
}

/// Queries and keys of `dim` columns and values of `dim_v`, with ragged ends; query heads share a KV head.
fn problem(i: usize, (dim, dim_v): (usize, usize), heads: (usize, usize)) -> Problem {
    let (seq_q, seq_kv) = [(37, 70), (70, 37), (33, 129)][i % 3];
    let mut problem = Problem::new(1, heads.0, seq_q, dim, [DType::F16, DType::Bf16][i % 2]);
    (problem.heads_kv, problem.head_dim_v, problem.seq_kv) = (heads.1, dim_v, seq_kv);
    let layout = [Layout::Bhsd, Layout::Bshd][i / 2 % 2];
    problem.with_band(Band::NAMED[i % Band::NAMED.len()]).with_lse(!i.is_multiple_of(3)).with_layout(layout)
}

/// The problem with rows that begin at multiples of 16 bytes, with NaN between them.
fn padded(problem: &Problem) -> Problem {
    let strides = |tensor| {
        let [_, heads, rows, dim] = problem.extents(tensor);
        let row = dim.next_multiple_of(8) as i64 + 8;
        let head = row * rows as i64;
        Strides { batch: head * heads as i64, head, row }
    };
    let [q, k, v, out] = Tensor::FORWARD.map(strides);
    Problem { q, k, v, out, ..problem.clone() }
}

/// Smaller tiles than those of the default, so that there are several blocks and CTAs.
fn small_plan(problem: &Problem, arch: &Arch) -> MmaPlan {
    let default = MmaPlan::default_for(problem, arch);
    let warps = 2 * default.dim_warps;
    MmaPlan {
        block_m: 32,
        block_n: 16,
        warps,
        kv_warps: 1,
        splits: 1,
        stages: 1,
        products: Order::InTurn,
        queries: QueryHome::Shared,
        resident_ctas: None,
        ..default
    }
}

const WIDE: [(usize, usize); 9] = [
    (264, 264),
    (280, 296),
    (320, 320),
    (384, 512),
    (512, 512),
    (576, 512),
    (512, 64),
    (64, 512),
    (576, 128),
];

#[test]
fn wide_head_dims_are_right() {
    for (i, dims) in WIDE.into_iter().enumerate() {
        let problem = problem(i, dims, (2, 1));
        let arch = Arch::ALL[i % Arch::ALL.len()];
        check(&problem, MmaPlan::default_for(&problem, &arch), &arch, i as u64);
        let plan = small_plan(&problem, &Arch::SM_90);
        check(&problem, plan.clone(), &Arch::SM_90, i as u64);
        let ahead = MmaPlan { stages: 2, products: Order::ScoresAhead, splits: 2, ..plan };
        check(&problem, ahead, &Arch::SM_90, i as u64);
    }
}

/// Two warpgroups divide the head dims: with one stage and with several, alone and in clusters, and with
/// packed heads.
#[test]
fn wide_head_dims_are_right_in_wgmma() {
    for (i, dims) in WIDE.into_iter().chain([(64, 64), (72, 96), (128, 200)]).enumerate() {
        let problem = problem(i, dims, (4, 2));
        let default = WgmmaPlan::default_for(&problem, &Arch::SM_90);
        check_plan(&problem, &Plan::Wgmma(default.clone()), &Arch::SM_90, i as u64);
        let plan = WgmmaPlan {
            consumers: 2,
            share: Share::HeadDim,
            block_n: 16,
            stages: [1, 2][i % 2],
            cluster: [1, 2][i / 2 % 2],
            packing: [Packing::Apart, Packing::Packed][i % 2],
            products: [Order::ScoresAhead, Order::InTurn][i / 2 % 2],
            rescale: [Rescaling::Beyond(8), Rescaling::Always][i % 2],
            sums: Sums::Lanes,
            ends: Ends::Common,
            tiles: Tiles::InTurn,
            turns: Turns::Free,
            ..default
        };
        check_plan(&problem, &Plan::Wgmma(plan), &Arch::SM_90, i as u64);
    }
}

/// Head dims that are not a multiple of 8, in rows that tensor maps can describe: TMA fills the tiles with
/// zeros.
#[test]
fn tensor_maps_fill_narrow_rows_with_zeros() {
    let dims = [(60, 60), (59, 59), (100, 36), (120, 250), (20, 72), (332, 300), (130, 129)];
    for (i, dims) in dims.into_iter().enumerate() {
        let problem = padded(&problem(i, dims, (4, 2)));
        let plan = WgmmaPlan::default_for(&problem, &Arch::SM_90);
        check_plan(&problem, &Plan::Wgmma(plan), &Arch::SM_90, i as u64);
    }
}

/// f32 is computed as three products of tf32: the sums differ from f64 by less than 1e-5 of the terms.
#[test]
fn f32_is_right() {
    let dims =
        [(64, 64), (8, 8), (40, 72), (59, 59), (128, 128), (192, 128), (256, 256), (320, 264), (576, 512)];
    check_f32(DTypes::uniform(DType::F32), &dims);
}

/// With products in tf32, P is rounded to 11 bits.
#[test]
fn tf32_is_right() {
    let dims = [(64, 64), (8, 8), (40, 72), (59, 59), (128, 128), (320, 264), (192, 130)];
    check_f32(DTypes::TF32, &dims);
}

/// Plans of every kind on tensors in f32.
fn check_f32(dtypes: DTypes, dims: &[(usize, usize)]) {
    for (i, &dims) in dims.iter().enumerate() {
        let mut problem = problem(i, dims, (4, 2));
        problem.dtypes = dtypes;
        for (problem, arch) in [(&problem, Arch::SM_80), (&padded(&problem), Arch::SM_90)] {
            check(problem, MmaPlan::default_for(problem, &arch), &arch, i as u64);
            let plan = small_plan(problem, &arch);
            check(problem, plan.clone(), &arch, i as u64);
            let ahead = MmaPlan { stages: 2, products: Order::ScoresAhead, splits: 2, ..plan.clone() };
            check(problem, ahead, &Arch::SM_90, i as u64);
            if problem.head_dim_v <= 256 && arch.sm == 90 {
                // Two warps share 32 rows, as on large grids.
                let shared = MmaPlan { block_m: 64, warps: 4, dim_warps: 2, ..plan.clone() };
                check(problem, shared, &arch, i as u64);
            }
            if dims.0 <= 64 {
                let registers = MmaPlan { queries: QueryHome::Registers, dim_warps: 2, warps: 4, ..plan };
                check(problem, registers, &arch, i as u64);
            }
        }
    }
}

/// Small head dims whose columns two warps divide anyway, at every position in a swizzle group.
#[test]
fn halves_of_the_head_dim_are_added() {
    for (i, dim) in [8, 32, 40, 64, 96, 160, 192].into_iter().enumerate() {
        let problem = problem(i, (dim, dim), (2, 2));
        let mut plan = MmaPlan { dim_warps: 2, warps: 4, stages: 2, ..small_plan(&problem, &Arch::SM_80) };
        if i % 2 == 1 && dim <= 128 {
            (plan.queries, plan.products) = (QueryHome::Registers, Order::ScoresAhead);
        }
        check(&problem, plan, &Arch::SM_80, i as u64);
    }
}

/// Rows that end within a chunk of 16 bytes, with every alignment of rows and every copy mode that it allows.
#[test]
fn any_head_dim_is_right() {
    let dims =
        [(1, 1), (3, 5), (12, 20), (59, 59), (60, 60), (62, 30), (111, 111), (64, 59), (59, 64), (300, 300)];
    for (i, dims) in dims.into_iter().enumerate() {
        let dense = problem(i, dims, (2, 1));
        for problem in [padded(&dense), dense] {
            let default = MmaPlan::default_for(&problem, &Arch::SM_90);
            check(&problem, default.clone(), &Arch::SM_90, i as u64);
            for copy in CopyMode::ALL {
                let plan = MmaPlan { copy, ..small_plan(&problem, &Arch::SM_80) };
                if copy.bytes() <= default.copy.bytes() {
                    check(&problem, plan.clone(), &Arch::SM_80, i as u64);
                }
                if copy == default.copy {
                    check(&problem, MmaPlan { splits: 2, ..plan }, &Arch::SM_80, i as u64);
                }
            }
        }
    }
}

/// The widest copy that strides allow is the default, and wider ones are rejected.
#[test]
fn copies_are_as_wide_as_rows_are_aligned() {
    let of = |dim| {
        let problem = Problem::new(1, 2, 40, dim, DType::F16);
        MmaPlan::default_for(&problem, &Arch::SM_80).copy
    };
    assert_eq!(
        [64, 60, 62, 59].map(of),
        [CopyMode::Async16, CopyMode::Async8, CopyMode::Async4, CopyMode::Elements]
    );
    let problem = Problem::new(1, 2, 40, 60, DType::F16);
    let plan = MmaPlan { copy: CopyMode::Async16, ..MmaPlan::default_for(&problem, &Arch::SM_80) };
    let refused = Plan::Mma(plan).check(&problem, &Arch::SM_80).unwrap_err().to_string();
    assert!(refused.contains("'60' for row stride of q: expected a multiple of 8 elements"), "{refused}");
}

/// Groups of query heads whose size divides no tile: every family packs them, or computes the heads
/// separately.
#[test]
fn any_group_of_query_heads_is_right() {
    for (i, (heads_q, heads_kv)) in [(5, 1), (7, 1), (14, 2), (16, 1), (6, 2)].into_iter().enumerate() {
        for (seq_q, seq_kv) in [(1, 90), (13, 70), (150, 150)] {
            let mut problem = Problem::new(1, heads_q, seq_q, 64, [DType::F16, DType::Bf16][i % 2]);
            (problem.heads_kv, problem.seq_kv) = (heads_kv, seq_kv);
            let problem = problem.with_band(Band::CAUSAL).with_lse(true).with_layout(Layout::Bshd);
            let packed = WgmmaPlan {
                packing: Packing::Packed,
                consumers: [1, 2][i % 2],
                block_n: 64,
                turns: Turns::Free,
                ..WgmmaPlan::default_for(&problem, &Arch::SM_90)
            };
            check_plan(&problem, &Plan::Wgmma(packed), &Arch::SM_90, i as u64);
            for family in Family::of_pass(PassKind::Forward) {
                let plan = family.default_for(&problem, &Arch::SM_90).unwrap();
                let options = Options { seed: i as u64, ..Options::default() };
                common::run(&mut Emulator::new(options), &problem, &plan, &Arch::SM_90, i as u64).check();
            }
        }
    }
}

/// The default plans of large and of odd head dims, on every architecture.
#[test]
fn defaults_assemble_without_spills() {
    let mut cases = Vec::new();
    for (i, dims) in WIDE.into_iter().chain([(59, 59), (111, 111), (300, 300)]).enumerate() {
        for arch in Arch::ALL {
            let mut problem = Problem::new(2, 16, 4096, dims.0, [DType::F16, DType::Bf16][i % 2]);
            problem.head_dim_v = dims.1;
            let problem = problem.with_band(Band::NAMED[i % 2]).with_layout(Layout::Bshd);
            cases.push((problem.clone(), arch));
        }
    }
    none_spills(&cases);
}

#[test]
fn defaults_of_f32_assemble_without_spills() {
    let mut cases = Vec::new();
    for (i, dim) in [32, 59, 64, 96, 128, 192, 256, 320, 512].into_iter().enumerate() {
        for arch in Arch::ALL {
            for (batch, seq) in [(2, 4096), (1, 256)] {
                for dtypes in [DType::F32.into(), DTypes::TF32] {
                    let problem = Problem::new(batch, 16, seq, dim, dtypes).with_band(Band::NAMED[i % 2]);
                    cases.push((problem, arch));
                }
            }
        }
    }
    none_spills(&cases);
}

/// No kernel of the default plans spills.
fn none_spills(cases: &[(Problem, Arch)]) {
    let programs = each(cases, |(problem, arch)| {
        let plan = Plan::default_for(problem, arch).unwrap();
        let program = emit(problem, &plan, arch).unwrap();
        (format!("{problem:?} {plan:?} sm_{}", arch.sm), program)
    });
    let steps =
        programs.iter().flat_map(|(what, program)| program.kernels().into_iter().map(move |k| (what, k)));
    let (names, kernels): (Vec<&String>, Vec<Kernel>) = steps.unzip();
    let Some(facts) = tools::facts(&kernels.iter().collect::<Vec<_>>()) else { return };
    let spilled = names.into_iter().zip(facts).filter(|(_, facts)| facts.spills > 0);
    let spilled: Vec<String> = spilled
        .map(|(what, Facts { registers, spills, .. })| {
            format!("{what}: {registers} registers, {spills} bytes")
        })
        .collect();
    assert!(spilled.is_empty(), "{}", spilled.join("\n"));
}
