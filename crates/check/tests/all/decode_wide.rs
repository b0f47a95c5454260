//! Tests of the gate on plans of the `decode` family whose warps divide the head dims.

use crate::common::passes;
use crate::decode::{SMALL, bound, check, problem};
use flashcore_check::gate::mutate::{Fault, mutant, sites};
use flashcore_check::gate::{Settings, Verdict, bind, check_kernel};
use flashcore_check::launchfile::Bound;
use kernels::forward::decode::{DecodePlan, ProductUnit};
use kernels::{Arch, Plan};
use problem::{Band, DType, Layout, Problem, SideLengths};
use ptx::Kernel;

/// The default plan, for 16 rows and with blocks of 16 keys in three stages.
fn plan(problem: &Problem) -> DecodePlan {
    DecodePlan {
        products: ProductUnit::Warp,
        warps: 4,
        dim_warps: 4,
        warp_keys: 16,
        stages: 3,
        tma: false,
        ..DecodePlan::default_for(problem, &SMALL)
    }
}

/// Both wide head dims in both types, with pages of every kind and lengths around them, groups of 1 to 16
/// heads, bands, caps and sinks. Five CTAs divide the tiles at odd places.
#[test]
fn wide_heads_in_pages_and_lengths_around_them() {
    for (i, page) in [0, 1, 16, 64].into_iter().enumerate() {
        let around = page.max(16);
        for (j, keys) in [1, around - 1, around, around + 1, 131].into_iter().enumerate() {
            let keys = keys.max(1);
            let (group, dtype) = ([1, 16, 5, 8][(i + j) % 4], [DType::F16, DType::Bf16][(i + j) % 2]);
            let mut problem = problem(2, group, ([1, 2, 1][j % 3], keys), page, ([512, 320][i % 2], dtype));
            problem.band = [Band::CAUSAL, Band::FULL, Band::window(30, 0)][j % 3];
            problem.lengths.kv.used = j % 2 == 0;
            problem.lengths.left_padded = (i + j) % 5 == 4;
            problem.score.sink = j % 3 == 1;
            problem.score.softcap = (i % 3 == 2).then_some(4.0);
            let plan = match j % 3 {
                0 => plan(&problem),
                1 => DecodePlan { warps: [2, 4][i % 2], dim_warps: 2, stages: 2, ..plan(&problem) },
                _ => DecodePlan { warp_keys: 32, stages: 2, overlapping: true, ..plan(&problem) },
            };
            check(&problem, &plan, &Settings::quick());
        }
    }
}

/// A problem of latent attention: one KV head, rows of 576 elements, of which the first 512 are the value.
pub(crate) fn latent(
    batch: usize,
    heads: usize,
    (rows, keys): (usize, usize),
    page: usize,
    dtype: DType,
) -> Problem {
    let problem = problem(batch, heads, (rows, keys), page, (576, dtype));
    let problem = Problem { heads_q: heads, heads_kv: 1, ..problem }.with_layout(Layout::Bshd);
    let problem = match page {
        0 => problem,
        _ => problem.with_pages(page, batch * keys.div_ceil(page) + 2),
    };
    problem.with_v_in_k(512)
}

#[test]
fn values_are_read_from_the_keys() {
    for (i, page) in [0, 1, 16, 64].into_iter().enumerate() {
        let around = page.max(16);
        for (j, keys) in [1, around - 1, around, around + 1, 131].into_iter().enumerate() {
            let (heads, dtype) = ([16, 20, 128, 40][(i + j) % 4], [DType::Bf16, DType::F16][(i + j) % 2]);
            let mut problem = latent(2, heads, ([1, 2, 1][j % 3], keys.max(1)), page, dtype);
            problem.band = [Band::CAUSAL, Band::FULL, Band::window(30, 0)][j % 3];
            problem.lengths.kv.used = j % 2 == 0;
            problem.score.sink = (i + j) % 3 == 1;
            problem.score.softcap = (i % 3 == 2).then_some(4.0);
            let plan = match j % 4 {
                0 => plan(&problem),
                1 => DecodePlan { warp_keys: 32, stages: 2, overlapping: true, ..plan(&problem) },
                2 => DecodePlan { warps: 8, ..plan(&problem) },
                _ => DecodePlan { warps: 8, warp_keys: 32, stages: 2, ..plan(&problem) },
            };
            check(&problem, &plan, &Settings::quick());
        }
    }
}

/// Packed queries: sequences without rows, single rows and several tiles in one launch.
#[test]
fn packed_queries_share_a_launch() {
    let mut problem = latent(5, 20, (4, 60), 16, DType::F16).with_band(Band::CAUSAL);
    problem.lengths.q = SideLengths { packed: Some(12), used: false };
    problem.lengths.kv.used = true;
    (problem.q, problem.out) = (Layout::Bshd.strides(20, 1, 576), Layout::Bshd.strides(20, 1, 512));
    for warps in [4, 8] {
        check(&problem, &DecodePlan { warps, ..plan(&problem) }, &Settings::quick());
    }
}

/// The default plan of each GPU, with many more CTAs than blocks.
#[test]
fn default_plans_of_every_gpu_are_right() {
    for arch in Arch::ALL {
        let mut wide = problem(2, 8, (1, 70), 64, (512, DType::Bf16));
        wide.lengths.kv.used = true;
        for problem in [wide, latent(1, 40, (1, 150), 64, DType::Bf16)] {
            let plan = Plan::default_for(&problem, &arch).unwrap();
            assert_eq!(plan.family(), "decode", "{arch:?} {problem:?}");
            let bound = bind(&plan, &problem, &arch).unwrap();
            passes(&check_kernel(&bound, &Settings::quick()).unwrap(), &(problem, plan));
        }
    }
}

/// All styles of inputs under all schedules, of a dense cache and of pages.
#[test]
fn every_style_passes_under_every_schedule() {
    let dense = latent(2, 20, (1, 70), 0, DType::F16);
    check(&dense, &DecodePlan { warps: 8, ..plan(&dense) }, &Settings::thorough());
    let mut wide = problem(2, 3, (1, 70), 3, (320, DType::Bf16));
    wide.lengths.kv.used = true;
    wide.score.scale = Some(-0.1);
    check(&wide, &plan(&wide), &Settings::thorough());
}

/// The verdict on another kernel, and the number of hazards.
fn verdict(right: &Bound, kernel: Kernel) -> (Verdict, usize) {
    let check = check_kernel(&Bound { kernel, ..right.clone() }, &Settings::quick()).unwrap();
    (check.verdict, check.hazards.len())
}

/// The kernel with other lines of text.
fn edited(kernel: &Kernel, line: impl Fn(&str) -> String) -> Kernel {
    let text = kernel.module.to_string();
    let other = text.lines().map(|text| line(text) + "\n").collect::<String>();
    assert_ne!(text, other, "no line is changed");
    Kernel { module: ptx::parse(&other).unwrap().verify().unwrap(), ..kernel.clone() }
}

/// Other columns of K than those behind V are seen in the result.
#[test]
fn wrong_columns_are_refused() {
    let problem = latent(2, 16, (1, 150), 16, DType::Bf16);
    let right = bound(&problem, &plan(&problem));
    let shifted = |line: &str| match line.trim().starts_with("cp.async.c") {
        true => line.replace("+1024]", "+1008]"),
        false => line.to_owned(),
    };
    assert_eq!(verdict(&right, edited(&right.kernel, shifted)), (Verdict::Failed, 0));
}

/// Every barrier is needed, with one tile of rows and with several, and so are the two buffers of the sum.
#[test]
fn missing_barriers_and_buffers_are_refused() {
    let problem = latent(2, 32, (1, 150), 16, DType::F16);
    for warps in [4, 8] {
        let right = bound(&problem, &DecodePlan { warps, ..plan(&problem) });
        for fault in [Fault::DropBarrier, Fault::DropAsyncWait] {
            let count = sites(&right.kernel, fault);
            assert!(count > 0, "{fault:?}");
            for site in 0..count {
                let found = verdict(&right, mutant(&right.kernel, fault, site).unwrap());
                assert_eq!(found.0, Verdict::Failed, "{warps} {fault:?} {site}: {found:?}");
            }
        }
    }
    let right = bound(&problem, &plan(&problem));
    let without_turn = |line: &str| match line.trim().starts_with("xor.b32") && line.ends_with(", 4096;") {
        true => String::new(),
        false => line.to_owned(),
    };
    let found = verdict(&right, edited(&right.kernel, without_turn));
    assert!(found.0 == Verdict::Failed && found.1 > 0, "{found:?}");
}
