//! Tests of sliding windows and softcap in every forward family, on the emulator: no hazards with every check
//! on, and results within the rounding of P and O.

use crate::common;
use crate::common::small_plan;
use attend::{Order, Packing, Sums, Tanh, Tiles};
use emu::{Emulator, Options, Schedule};
use flashcore_kernels::forward::mma::{MmaPlan, QueryHome};
use flashcore_kernels::forward::small::{AtOncePlan, StreamedPlan};
use flashcore_kernels::forward::wgmma::{Diagonal, Ends, Rescaling, WgmmaPlan};
use flashcore_kernels::{Arch, Family, Plan, emit};
use problem::{Band, Corner, DType, Layout, PassKind, Problem};
use tile::{Handout, TileOrder, Turns};

const TANH: [Tanh; 2] = [Tanh::Exp2, Tanh::Approx];
const SCHEDULES: [Schedule; 3] = [Schedule::Late, Schedule::Early, Schedule::Random];
/// A Hopper GPU with so few SMs that a CTA computes several tiles.
const SMALL: Arch = Arch { multiprocessors: 3, ..Arch::SM_90 };

/// Bands that are narrower than a KV block, about as wide, and wider; with one bound and with both; aligned
/// to both corners.
fn bands() -> Vec<Band> {
    let bands = [
        Band::window(0, 0),
        Band::window(31, 0),
        Band::window(90, 0),
        Band::window(20, 13),
        Band::window(0, 64),
        Band { corner: Corner::BottomRight, before: Some(40), after: None },
        Band { corner: Corner::BottomRight, before: None, after: Some(25) },
    ];
    bands.into_iter().flat_map(|band| [band, band.aligned(Corner::TopLeft)]).collect()
}

/// Lengths with rows that see no key, keys that no row sees, and ragged ends.
const LENGTHS: [(usize, usize); 4] = [(150, 150), (100, 230), (210, 90), (64, 320)];

/// Problems with each band, some of them with softcap.
fn problems(seed: usize) -> Vec<Problem> {
    let lengths = LENGTHS.into_iter().cycle().skip(seed);
    let problem = |(i, (band, (seq_q, seq_kv)))| {
        let dtype = [DType::F16, DType::Bf16][(i + seed) % 2];
        let mut problem = Problem::new(1, 2, seq_q, 64, dtype).with_band(band);
        problem.score.softcap = [None, Some(2.0), None, Some(30.0)][(i + seed) % 4];
        problem.score.scale = (i % 3 == 1).then_some(-0.25);
        let heads_kv = 1 + i % 2;
        problem.with_seq_kv(seq_kv, Layout::Bshd).with_heads_kv(heads_kv, Layout::Bshd)
    };
    bands().into_iter().zip(lengths).enumerate().map(problem).collect()
}

/// Bounds as large as the type allows, beside narrow ones.
#[test]
fn bounds_of_any_size_are_applied() {
    let largest = [i32::MAX as u32 - 1, i32::MAX as u32, 1 << 31, u32::MAX - 1, u32::MAX];
    for (seed, bound) in largest.into_iter().enumerate() {
        for band in [Band::window(bound, 0), Band::window(3, bound), Band::window(bound, bound)] {
            for band in [band, band.aligned(Corner::TopLeft)] {
                let problem = Problem::new(1, 1, 70, 64, DType::F16).with_band(band);
                let problem = problem.with_seq_kv(100, Layout::Bhsd);
                for family in Family::of_pass(PassKind::Forward) {
                    let plan = family.default_for(&problem, &SMALL).unwrap();
                    check(&problem, &plan, &SMALL, seed);
                }
            }
        }
    }
}

/// Checks a plan. The LSE is requested unless products compute the sums.
fn check(problem: &Problem, plan: &Plan, arch: &Arch, seed: usize) {
    let by_products = matches!(plan, Plan::Wgmma(plan) if plan.sums == Sums::Product);
    let problem = &problem.clone().with_lse(!by_products);
    let options = Options { seed: seed as u64, schedule: SCHEDULES[seed % 3], ..Options::default() };
    common::run(&mut Emulator::new(options), problem, plan, arch, seed as u64).check();
}

#[test]
fn mma_is_right() {
    for (i, order) in [Order::InTurn, Order::ScoresAhead].into_iter().enumerate() {
        for (j, problem) in problems(i).iter().enumerate() {
            let arch = Arch::ALL[j % Arch::ALL.len()];
            let plan = MmaPlan {
                block_m: 64,
                block_n: [16, 32, 48][j % 3],
                warps: 4,
                kv_warps: 1,
                stages: if order == Order::InTurn { 1 + j as u32 % 3 } else { 2 + j as u32 % 2 },
                products: order,
                queries: [QueryHome::Shared, QueryHome::Registers][j / 2 % 2],
                resident_ctas: None,
                tanh: TANH[j / 2 % 2],
                ..MmaPlan::default_for(problem, &arch)
            };
            check(problem, &Plan::Mma(plan), &arch, j);
        }
    }
}

#[test]
fn wgmma_is_right() {
    let plain = WgmmaPlan::PLAIN;
    let speculative = Rescaling::Speculative { beyond: 0, limit: 7 };
    let two = WgmmaPlan { consumers: 2, ..plain.clone() };
    let plans = [
        plain.clone(),
        WgmmaPlan { rescale: speculative, block_n: 16, ..plain.clone() },
        WgmmaPlan { ends: Ends::Own, tiles: Tiles::Overlapped, rescale: speculative, ..two.clone() },
        WgmmaPlan { ends: Ends::Own, turns: Turns::PingPong, block_n: 48, stages: 1, ..two.clone() },
        // Warpgroups skip up to eight blocks at each end of a tile, which is more than there are stages.
        WgmmaPlan { ends: Ends::Own, turns: Turns::PingPong, block_n: 16, consumers: 3, ..plain.clone() },
        WgmmaPlan { ends: Ends::Own, block_n: 16, consumers: 3, stages: 3, ..plain.clone() },
        WgmmaPlan { tiles: Tiles::Overlapped, handout: Handout::Dynamic, block_n: 16, ..two.clone() },
        WgmmaPlan { cluster: 2, ends: Ends::Own, rescale: Rescaling::Always, ..two.clone() },
        WgmmaPlan {
            ends: Ends::Own,
            tiles: Tiles::Overlapped,
            handout: Handout::Folded,
            tile_order: TileOrder::LongestFirst,
            consumers: 3,
            stages: 3,
            ..plain.clone()
        },
        WgmmaPlan { packing: Packing::Packed, rescale: speculative, ..two },
        WgmmaPlan { sums: Sums::Product, ..plain },
    ];
    for (i, plan) in plans.into_iter().enumerate() {
        for (j, problem) in problems(i).iter().enumerate() {
            let mut plan = plan.clone();
            let halves = plan.ends == Ends::Own && problem.band.after.is_some() && plan.block_n % 32 == 0;
            plan.diagonal = if halves && j % 2 == 0 { Diagonal::Halved } else { Diagonal::Whole };
            plan.tanh = TANH[j / 2 % 2];
            let plan = Plan::Wgmma(plan);
            match plan.check(problem, &SMALL) {
                Ok(()) => check(problem, &plan, &SMALL, j),
                Err(reason) => {
                    let reason = reason.to_string();
                    let known = ["dtype", "mask", "packing"].iter().any(|part| reason.contains(part));
                    assert!(known, "{plan:?} {problem:?}: {reason}");
                }
            }
        }
    }
}

#[test]
fn small_is_right() {
    let (at_once, streamed) = (small_plan::at_once(), small_plan::streamed());
    let at_once = [
        AtOncePlan { block_n: 256, ..at_once.clone() },
        AtOncePlan { cluster: 2, qk_pieces: 4, softmax_steps: 2, pv_pieces: 2, ..at_once },
    ];
    let streamed = [
        streamed.clone(),
        StreamedPlan { block_n: 16, stages: 3, row_warpgroups: 2, speculative: Some(7), ..streamed.clone() },
        StreamedPlan { kv_warpgroups: 2, cluster: 2, ..streamed.clone() },
        StreamedPlan { row_warpgroups: 2, turns: Turns::PingPong, ..streamed.clone() },
        StreamedPlan { block_n: 48, stages: 8, packing: Packing::Packed, ..streamed },
    ];
    let plans = at_once.map(Plan::SmallAtOnce).into_iter().chain(streamed.map(Plan::SmallStreamed));
    for (i, mut plan) in plans.enumerate() {
        for (j, problem) in problems(i).iter().enumerate() {
            match &mut plan {
                Plan::SmallAtOnce(plan) => plan.tanh = TANH[j / 2 % 2],
                Plan::SmallStreamed(plan) => plan.tanh = TANH[j / 2 % 2],
                _ => unreachable!("all plans are of the two families"),
            }
            match plan.check(problem, &Arch::SM_90) {
                Ok(()) => check(problem, &plan, &Arch::SM_90, j),
                Err(reason) => {
                    assert!(reason.to_string().contains("seq_kv"), "{plan:?} {problem:?}: {reason}");
                }
            }
        }
    }
}

/// The default plans of every family are right. Sizes of bounds are launch parameters, so the kernels of two
/// windows have identical text.
#[test]
fn defaults_are_right_and_sizes_are_parameters() {
    let problem = |before, softcap| {
        let problem = Problem::new(1, 2, 300, 128, DType::Bf16).with_band(Band::window(before, 0));
        problem.with_softcap(softcap).with_layout(Layout::Bshd)
    };
    for family in Family::of_pass(PassKind::Forward) {
        let text = |problem: &Problem| {
            let plan = family.default_for(problem, &Arch::SM_90).ok()?;
            check(problem, &plan, &Arch::SM_90, 0);
            Some(emit(problem, &plan, &Arch::SM_90).unwrap().module.to_string())
        };
        assert_eq!(text(&problem(100, 30.0)), text(&problem(33, 50.0)), "{family:?}");
    }
}
