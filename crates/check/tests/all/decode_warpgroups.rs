//! Tests of the gate on latent attention by warpgroups, in the `decode` family.

use crate::common::passes;
use crate::decode::{SMALL, check};
use crate::decode_wide::latent;
use emu::Schedule;
use filetest::is_due;
use flashcore_check::gate::mutate::{Fault, mutant, sites};
use flashcore_check::gate::{Settings, Verdict, bind, check_kernel};
use flashcore_check::launchfile::Bound;
use judge::inputs::Style;
use kernels::forward::decode::DecodePlan;
use kernels::{Arch, Plan};
use problem::{Band, DType, Layout, Problem, SideLengths};

/// The plan with products of warpgroups, and copies by TMA where the problem allows them.
fn plan(problem: &Problem) -> DecodePlan {
    let plan = DecodePlan::default_for(problem, &SMALL).of_warpgroups();
    let tma = plan.check(problem, &SMALL).is_ok();
    DecodePlan { tma, ..plan }
}

/// Every size of pages, with lengths around pages and blocks, heads that fill tiles or do not, and bands.
/// Five CTAs divide the tiles at odd places, so that either warpgroup has the first block of a tile.
#[test]
fn pages_of_any_size_and_lengths_around_them() {
    for (i, page) in [0, 1, 3, 16, 64, 256].into_iter().enumerate() {
        let around = page.max(64);
        for (j, keys) in [1, around - 1, around, around + 1, 197].into_iter().enumerate() {
            let (heads, rows) = [(64, 1), (16, 4), (128, 1), (20, 3), (64, 2)][(i + j) % 5];
            let dtype = [DType::Bf16, DType::F16][(i + j) % 2];
            let mut problem = latent(2, heads, (rows, keys), page, dtype);
            problem.band = [Band::CAUSAL, Band::FULL, Band::window(30, 0)][j % 3];
            problem.lengths.kv.used = j % 2 == 0;
            problem.score.sink = (i + j) % 3 == 1;
            problem.score.softcap = (i % 3 == 2).then_some(4.0);
            problem.lengths.left_padded = (i + j) % 5 == 4;
            let plan = DecodePlan { overlapping: j % 2 == 1, ..plan(&problem) };
            // A tensor map of several batch entries of one row has no rows between entries.
            let whole = if page == 0 { keys > 1 } else { page.is_multiple_of(8) };
            assert_eq!(plan.tma, whole && !problem.lengths.left_padded, "{problem:?}");
            check(&problem, &plan, &Settings::quick());
        }
    }
}

/// TMA and threads copy the same.
#[test]
fn threads_copy_what_tma_copies() {
    for page in [0, 8, 64] {
        let mut problem = latent(3, 64, (1, 200), page, DType::Bf16);
        problem.lengths.kv.used = true;
        for tma in [false, true] {
            check(&problem, &DecodePlan { tma, ..plan(&problem) }, &Settings::quick());
        }
    }
}

/// Packed queries: sequences without rows, single rows and several tiles in one launch.
#[test]
fn packed_queries_share_a_launch() {
    let mut problem = latent(5, 40, (4, 160), 16, DType::F16).with_band(Band::CAUSAL);
    problem.lengths.q = SideLengths { packed: Some(12), used: false };
    problem.lengths.kv.used = true;
    (problem.q, problem.out) = (Layout::Bshd.strides(40, 1, 576), Layout::Bshd.strides(40, 1, 512));
    check(&problem, &plan(&problem), &Settings::quick());
}

/// All styles of inputs under all schedules, of a dense cache and of pages that threads copy.
#[test]
fn every_style_passes_under_every_schedule() {
    let mut dense = latent(2, 20, (1, 200), 0, DType::F16);
    dense.lengths.kv.used = true;
    check(&dense, &plan(&dense), &Settings::thorough());
    let mut pages = latent(2, 64, (1, 150), 3, DType::Bf16);
    pages.lengths.kv.used = true;
    check(&pages, &plan(&pages), &Settings::thorough());
}

/// A tile of 30 blocks that 29 CTAs divide, so that parts are merged in two steps, and blocks of a sequence
/// that one CTA has.
#[test]
fn many_parts_are_merged_in_two_steps() {
    let problem = latent(1, 64, (1, 1900), 64, DType::Bf16);
    let arch = Arch { multiprocessors: 29, ..SMALL };
    let plan = Plan::Decode(plan(&problem));
    let bound = bind(&plan, &problem, &arch).unwrap();
    passes(&check_kernel(&bound, &Settings::quick()).unwrap(), &(problem, plan));
}

/// Whether a check of the mutant fails, over several schedules.
fn fails(right: &Bound, fault: Fault, site: usize) -> bool {
    let kernel = mutant(&right.kernel, fault, site).unwrap();
    let random = (11..13).map(|seed| (Style::Normal, seed, Schedule::Random));
    let runs = [(Style::Normal, 1, Schedule::Late), (Style::Normal, 2, Schedule::Early)];
    let settings = Settings { runs: runs.into_iter().chain(random).collect(), ..Settings::quick() };
    check_kernel(&Bound { kernel, ..right.clone() }, &settings).unwrap().verdict == Verdict::Failed
}

/// Every barrier, arrival, fence and wait is needed, with both kinds of copies: those that hand over P and
/// the row max, those of the stages, and those of the merge. Two CTAs compute several tiles each, of one
/// block or of more. A share of the tests takes the even places with one kind of copies and the odd ones with
/// the other.
///
/// The emulator ends a product for all warps of a warpgroup at once. So it does not need the two barriers of
/// a warpgroup (2 and 4) after which P takes the place of the last columns of K.
#[test]
fn missing_barriers_are_refused() {
    let faults = [
        Fault::DropBarrier,
        Fault::DropArrival,
        Fault::DropFence,
        Fault::DropPhaseWait,
        Fault::WrongPhase,
        Fault::DropProductWait,
        Fault::DropProductFence,
        Fault::DropAsyncWait,
    ];
    let arch = Arch { multiprocessors: 2, ..SMALL };
    let mut survivors = Vec::new();
    for page in [16, 3] {
        let mut problem = latent(4, 64, (1, 200), page, DType::F16);
        problem.lengths.kv.used = true;
        let right = bind(&Plan::Decode(plan(&problem)), &problem, &arch).unwrap();
        passes(&check_kernel(&right, &Settings::quick()).unwrap(), &problem);
        for fault in faults {
            let count = sites(&right.kernel, fault);
            assert!(count > 0, "{fault:?}");
            for site in (0..count).filter(|site| is_due(site + page, 2)) {
                if !fails(&right, fault, site) {
                    survivors.push((page, fault, site));
                }
            }
        }
    }
    let of_warpgroups = [16, 3].into_iter().flat_map(|page| [2, 4].map(|site| (page, site)));
    let of_warpgroups = of_warpgroups.filter(|(page, site)| is_due(site + page, 2));
    let of_warpgroups: Vec<_> = of_warpgroups.map(|(page, site)| (page, Fault::DropBarrier, site)).collect();
    assert_eq!(survivors, of_warpgroups);
}
