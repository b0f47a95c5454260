//! Tests of the gate on the `decode` family: lines of tiles cut at any place, sequences of any lengths, and
//! faults in the merge of the last arriver.

use crate::common::passes;
use emu::{Emulator, Options, Schedule};
use flashcore_check::gate::mutate::{Fault, mutant, sites};
use flashcore_check::gate::{Feed, Settings, Verdict, bind, check_kernel, trial};
use flashcore_check::launchfile::Bound;
use judge::inputs::Style;
use kernels::forward::decode::DecodePlan;
use kernels::{Arch, Plan};
use problem::{Band, DType, DTypes, Layout, Problem, ScaleLayout, Scales, SideLengths};
use ptx::{Item, Kernel, MemSem, Op, Statement};

/// A GPU with so few SMs that a CTA computes several tiles, and tiles are divided at odd places.
pub(crate) const SMALL: Arch = Arch { multiprocessors: 5, ..Arch::SM_90 };

/// `batch` sequences of at most `keys` keys, in pages of `page` rows, or at strides if `page` is 0.
pub(crate) fn problem(
    batch: usize,
    group: usize,
    (rows, keys): (usize, usize),
    page: usize,
    (dim, dtypes): (usize, impl Into<DTypes>),
) -> Problem {
    let problem = Problem::new(batch, 2 * group, rows, dim, DType::F16).with_dtypes(dtypes.into());
    let problem = Problem { heads_kv: 2, ..problem };
    let problem = problem.with_seq_kv(keys, Layout::Bshd).with_lse(true);
    match page {
        0 => problem,
        _ => problem.with_pages(page, batch * keys.div_ceil(page) + 2),
    }
}

fn plan(problem: &Problem) -> DecodePlan {
    let default = DecodePlan::default_for(problem, &SMALL);
    DecodePlan {
        warps: 2,
        warp_keys: 16,
        stages: 3,
        least_blocks: 1,
        resident_ctas: 1,
        tma: false,
        ..default
    }
}

/// The plan with copies by threads, and with copies by TMA if the problem allows them.
fn with_copies(problem: &Problem, plan: DecodePlan) -> Vec<DecodePlan> {
    let plans = [false, true].map(|tma| DecodePlan { tma, ..plan.clone() });
    let pages = problem.storage.pages().is_some_and(|pages| pages.rows % 8 == 0);
    let columns = problem.head_dim * problem.dtypes.k.bytes();
    let allowed = pages && !problem.lengths.left_padded && columns.is_multiple_of(128);
    assert_eq!(plans[1].check(problem, &SMALL).is_ok(), allowed, "{problem:?}");
    plans.into_iter().filter(|plan| !plan.tma || allowed).collect()
}

pub(crate) fn bound(problem: &Problem, plan: &DecodePlan) -> Bound {
    bind(&Plan::Decode(plan.clone()), problem, &SMALL).unwrap()
}

pub(crate) fn check(problem: &Problem, plan: &DecodePlan, settings: &Settings) {
    passes(&check_kernel(&bound(problem, plan), settings).unwrap(), &(problem, plan));
}

/// Every size of pages, with lengths around it, groups and bands. The four runs of a check have other
/// lengths, page tables and schedules, as a graph that is replayed.
#[test]
fn pages_of_any_size_and_lengths_around_them() {
    for (i, page) in [0, 1, 3, 16, 64, 256].into_iter().enumerate() {
        let around = page.max(16);
        for (j, keys) in [1, around - 1, around, around + 1, 131].into_iter().enumerate() {
            let (group, dtype) = ([1, 4, 5, 8][(i + j) % 4], [DType::F16, DType::Bf16][(i + j) % 2]);
            let mut problem = problem(3, group, ([1, 2, 1][j % 3], keys), page, ([64, 128][i % 2], dtype));
            problem.band = [Band::CAUSAL, Band::FULL, Band::window(30, 0)][j % 3];
            problem.lengths.kv.used = j % 2 == 0;
            problem.lengths.left_padded = (i + j) % 5 == 4;
            problem.score.sink = j % 3 == 1;
            problem.score.softcap = (i % 3 == 2).then_some(4.0);
            let warps = [1, 2, 4][(i + j) % 3];
            let plan =
                DecodePlan { warps, warp_keys: [16, 32][i % 2], overlapping: j % 2 == 0, ..plan(&problem) };
            for plan in with_copies(&problem, plan) {
                check(&problem, &DecodePlan { piece: Some(128), ..plan.clone() }, &Settings::quick());
                check(&problem, &plan, &Settings::quick());
            }
        }
    }
}

/// More sequences than a warp has lanes, some without keys.
#[test]
fn many_sequences_are_found() {
    let mut problem = problem(70, 1, (1, 40), 16, (64, DType::Bf16));
    problem.lengths.kv.used = true;
    for least_blocks in [1, 7] {
        check(&problem, &DecodePlan { least_blocks, ..plan(&problem) }, &Settings::quick());
    }
}

/// Packed queries: sequences without rows, single rows, and chunks of several tiles in one launch.
#[test]
fn chunks_and_single_rows_share_a_launch() {
    let mut problem = problem(6, 4, (21, 90), 16, (64, DType::F16)).with_band(Band::CAUSAL);
    problem.lengths.q = SideLengths { packed: Some(60), used: false };
    problem.lengths.kv.used = true;
    (problem.q, problem.out) = (Layout::Bshd.strides(8, 1, 64), Layout::Bshd.strides(8, 1, 64));
    check(&problem, &plan(&problem), &Settings::quick());
    check(&problem, &DecodePlan { warp_keys: 32, stages: 2, ..plan(&problem) }, &Settings::quick());
    check(&problem, &DecodePlan { piece: Some(32), ..plan(&problem) }, &Settings::quick());
}

/// All styles of inputs under all schedules, with entries that are no pages and with a negative scale.
#[test]
fn every_style_passes_under_every_schedule() {
    let mut problem = problem(3, 4, (1, 100), 3, (64, DType::Bf16));
    problem.lengths.kv.used = true;
    problem.score.scale = Some(-0.2);
    check(&problem, &plan(&problem), &Settings::thorough());
}

/// 16-bit queries and caches of both 8-bit types, with descale factors of K and V, of heads and of the
/// tensor: lengths around pages, groups, bands, head dims, and numbers of warps.
#[test]
fn caches_of_8_bits_are_widened() {
    let types = ["f16/e4m3/e4m3:f16", "bf16/e4m3/e4m3", "bf16/e5m2/e4m3", "f16/e5m2/e5m2:bf16"];
    for (i, page) in [0, 1, 3, 16, 64].into_iter().enumerate() {
        let around = page.max(16);
        for (j, keys) in [1, around - 1, around + 1, 131].into_iter().enumerate() {
            let dtypes: DTypes = types[(i + j) % 4].parse().unwrap();
            let group = [1, 4, 8][(i + j) % 3];
            let mut problem = problem(3, group, ([1, 2][j % 2], keys), page, ([64, 128, 256][i % 3], dtypes));
            problem.band = [Band::CAUSAL, Band::FULL, Band::window(30, 0)][j % 3];
            problem.lengths.kv.used = j % 2 == 0;
            problem.lengths.left_padded = (i + j) % 5 == 4;
            problem.score.sink = j % 3 == 1;
            problem.score.softcap = (i % 3 == 2).then_some(4.0);
            let layouts = [None, Some(ScaleLayout::TENSOR), Some(ScaleLayout::per_head(2))];
            problem.scales = Scales { q: None, k: layouts[(i + j) % 3], v: layouts[j % 3] };
            let warps = [1, 2, 4][(i + j) % 3];
            for plan in with_copies(&problem, DecodePlan { warps, ..plan(&problem) }) {
                check(&problem, &plan, &Settings::quick());
            }
        }
    }
}

/// All styles of inputs: outliers in Q that f16 cannot hold, near ties, NaN, and factors that are not
/// accepted.
#[test]
fn every_style_passes_on_8_bit_caches() {
    for (dtypes, scale) in [("bf16/e4m3/e4m3", -0.2), ("f16/e4m3/e5m2:f16", 0.2)] {
        let dtypes: DTypes = dtypes.parse().unwrap();
        let mut problem = problem(3, 4, (1, 100), 3, (64, dtypes));
        problem.lengths.kv.used = true;
        problem.score.scale = Some(scale);
        problem.scales = Scales { q: None, k: Some(ScaleLayout::per_head(2)), v: Some(ScaleLayout::TENSOR) };
        check(&problem, &plan(&problem), &Settings::thorough());
        let copy = tile::CopyMode::Elements;
        check(&problem, &DecodePlan { copy, warp_keys: 32, ..plan(&problem) }, &Settings::quick());
    }
}

/// Parts are merged in the order of the keys, whichever CTA is last.
#[test]
fn results_are_bitwise_equal_under_every_schedule() {
    let problem = problem(2, 4, (1, 300), 16, (128, DType::F16));
    let pieces = DecodePlan { piece: Some(64), ..plan(&problem) };
    for bound in [bound(&problem, &plan(&problem)), bound(&problem, &pieces), divided()] {
        let feed = Feed::draw(&bound, Style::Normal, 5).unwrap();
        let outputs = [Schedule::Late, Schedule::Early, Schedule::Random].map(|schedule| {
            let mut machine = Emulator::new(Options { schedule, seed: 3, ..Options::default() });
            trial(&mut machine, &bound, &feed, None).unwrap().outputs(&bound)
        });
        assert!(outputs.iter().all(|output| *output == outputs[0]));
    }
}

/// Rows of pages beyond a sequence's keys hold NaN and are not read, entries beyond its length are no pages,
/// and the page after the last one is not touched, with boxes of 8, 16 and 32 rows.
#[test]
fn boxes_of_pages_end_with_the_keys() {
    for (page, warp_keys) in [(8, 32), (24, 16), (16, 32), (32, 32), (64, 32)] {
        let mut problem = problem(4, 4, (1, 3 * page), page, (128, DType::Bf16));
        problem.lengths.kv.used = true;
        let plan = DecodePlan { tma: true, warp_keys, ..plan(&problem) };
        check(&problem, &plan, &Settings::thorough());
    }
}

/// Two tiles of 33 blocks that 46 CTAs divide, so that the parts of each are merged in two steps. CTA 16 has
/// the end of the first tile, a group of one part, and the begin of the second one.
fn divided() -> Bound {
    let problem = problem(2, 16, (1, 1050), 16, (128, DType::F16));
    let problem = Problem { heads_q: 16, heads_kv: 1, ..problem }.with_layout(Layout::Bshd);
    let problem = problem.with_pages(16, 134);
    let arch = Arch { multiprocessors: 46, ..SMALL };
    bind(&Plan::Decode(plan(&problem)), &problem, &arch).unwrap()
}

fn verdict(right: &Bound, kernel: Kernel) -> (Verdict, usize) {
    let random = (11..17).map(|seed| (Style::Normal, seed, Schedule::Random));
    let runs = [(Style::Normal, 1, Schedule::Late), (Style::Normal, 2, Schedule::Early)];
    let settings = Settings { runs: runs.into_iter().chain(random).collect(), ..Settings::quick() };
    let check = check_kernel(&Bound { kernel, ..right.clone() }, &settings).unwrap();
    (check.verdict, check.hazards.len())
}

/// Every barrier, wait and fence is needed. With TMA, shuffles order the lanes of a warp on GPUs, and the
/// warp barriers are needed by the letter of PTX alone.
#[test]
fn missing_barriers_are_refused() {
    let faults = [Fault::DropBarrier, Fault::DropWarpBarrier, Fault::DropAsyncWait];
    let of_tma = [Fault::DropBarrier, Fault::DropPhaseWait, Fault::DropFence];
    // Stages are filled again and again.
    let long = problem(2, 4, (1, 400), 16, (64, DType::F16));
    let long = bound(&long, &DecodePlan { tma: true, stages: 2, ..plan(&long) });
    for (right, faults) in [(divided(), &faults[..]), (long, &of_tma)] {
        for &fault in faults {
            let count = sites(&right.kernel, fault);
            assert!(count > 0, "{fault:?}");
            for site in 0..count {
                let found = verdict(&right, mutant(&right.kernel, fault, site).unwrap());
                assert_eq!(found.0, Verdict::Failed, "{fault:?} {site}: {found:?}");
            }
        }
    }
}

/// The counts of the arrivals, of a group and of a tile, order the parts: each releases those of its warp and
/// acquires those of the others.
#[test]
fn a_count_without_order_is_a_hazard() {
    for weaker in [MemSem::Relaxed, MemSem::Acquire, MemSem::Release] {
        let right = divided();
        let mut kernel = right.kernel.clone();
        let mut module = kernel.module.clone().into_module();
        let mut changed = 0;
        for item in &mut module.items {
            let Item::Function(function) = item else { continue };
            for statement in function.body.iter_mut().flat_map(|body| &mut body.statements) {
                if let Statement::Inst(inst) = statement
                    && let Op::Atom(atomic) = &mut inst.op
                {
                    atomic.sem = weaker;
                    changed += 1;
                }
            }
        }
        assert_eq!(changed, 2);
        kernel.module = module.verify().unwrap();
        let (verdict, hazards) = verdict(&right, kernel);
        assert!(verdict == Verdict::Failed && hazards > 0, "{weaker:?}: {verdict:?}, {hazards} hazards");
    }
}

/// The default for few rows with keys in pages, on every GPU and for every head dim that the family has.
#[test]
fn defaults_decode_pages() {
    for arch in Arch::ALL {
        for dim in [64, 96, 128, 192, 256, 320, 512] {
            let problem = problem(4, 8, (1, 1000), 16, (dim, DType::Bf16));
            let plan = Plan::default_for(&problem, &arch).unwrap();
            assert_eq!(plan.family(), "decode", "{arch:?} {dim}");
        }
        let narrow: DTypes = "bf16/e4m3/e4m3".parse().unwrap();
        let of_8_bits = problem(4, 8, (40, 1000), 16, (128, narrow));
        match Plan::default_for(&of_8_bits, &arch) {
            Ok(plan) => assert_eq!(plan.family(), "decode"),
            Err(_) => assert!(arch.sm < 89),
        }
        let many_rows = problem(4, 8, (40, 1000), 16, (128, DType::Bf16));
        assert_eq!(Plan::default_for(&many_rows, &arch).unwrap().family(), "mma");
    }
}
