//! Keys and values in pages in the family `wgmma`: the choice of the family, what it refuses, and the output
//! of ptxas for its kernels.

use flashcore_kernels::forward::wgmma::WgmmaPlan;
use flashcore_kernels::{Arch, Family, Plan, emit};
use problem::{Band, DType, Layout, Problem, SideLengths};
use tile::{Handout, Tail};

use crate::common::each::each;
use crate::tools::{self, Facts};

const ARCH: Arch = Arch::SM_90;

/// Queries of `rows` rows over 32k keys in pages of `page` rows, with the lengths of a cache in device
/// memory.
fn chunk(rows: usize, page: usize, dim: usize, band: Band) -> Problem {
    let problem = Problem::new(1, 32, rows, dim, DType::Bf16).with_heads_kv(8, Layout::Bshd);
    let mut problem = problem.with_seq_kv(1 << 15, Layout::Bshd).with_band(band);
    problem.lengths.kv.used = true;
    problem.with_pages(page, (1 << 15) / page)
}

fn default_plan(problem: &Problem) -> WgmmaPlan {
    match Plan::default_for(problem, &ARCH).unwrap() {
        Plan::Wgmma(plan) => plan,
        other => panic!("{other:?}"),
    }
}

/// Chunks of rows have this family; few rows, and pages that no tensor map describes, have another one.
#[test]
fn chunks_of_rows_are_loaded_by_tma() {
    for page in [16, 64, 128, 256] {
        for band in [Band::FULL, Band::CAUSAL] {
            let plan = default_plan(&chunk(512, page, 128, band));
            assert_eq!((plan.handout, plan.tail, plan.cluster), (Handout::Dynamic, Tail::Whole, 1));
            assert_eq!(plan.block_n as usize % page.min(64), 0, "{page}");
        }
    }
    for (rows, page, family) in [(1, 16, Family::Decode), (512, 1, Family::Mma), (512, 3, Family::Mma)] {
        let plan = Plan::default_for(&chunk(rows, page, 128, Band::CAUSAL), &ARCH).unwrap();
        assert_eq!(plan.family(), family.name(), "{rows} rows, pages of {page}");
    }
}

/// Default kernels on chunks, and on packed queries, for several head dims and pages.
#[test]
fn defaults_assemble_without_spills() {
    let mut cases = Vec::new();
    for (dim, page) in
        [(64, 16), (96, 16), (128, 16), (128, 64), (128, 256), (192, 16), (256, 16), (256, 128)]
    {
        for band in [Band::FULL, Band::CAUSAL, Band::window(1024, 0)] {
            let even = chunk(512, page, dim, band);
            let mut packed = even.clone();
            packed.lengths.q = SideLengths { packed: Some(512), used: false };
            packed.q.batch = 0;
            packed.out.batch = 0;
            cases.extend([even.with_lse(true), packed]);
        }
    }
    // Fewer consumers than the head dim has by default.
    for rows in [64, 128] {
        cases.push(Problem { batch: 16, ..chunk(rows, 16, 64, Band::CAUSAL) });
    }
    let kernels = each(&cases, |problem| {
        let plan = Plan::Wgmma(default_plan(problem));
        emit(problem, &plan, &ARCH).unwrap_or_else(|error| panic!("{plan:?}: {error}")).kernel(0)
    });
    let Some(facts) = tools::facts(&kernels.iter().collect::<Vec<_>>()) else { return };
    for (problem, Facts { registers, spills, .. }) in cases.iter().zip(facts) {
        let plan = default_plan(problem);
        assert_eq!(spills, 0, "head_dim {} {plan:?}: {registers} registers", problem.head_dim);
    }
}

/// Each refusal names what does not fit.
#[test]
fn what_does_not_fit_is_refused() {
    type Change = fn(&mut Problem, &mut WgmmaPlan);
    let refused = |change: Change| {
        let mut problem = chunk(512, 16, 128, Band::CAUSAL);
        let mut plan = default_plan(&problem);
        change(&mut problem, &mut plan);
        problem.check().unwrap();
        Plan::Wgmma(plan).check(&problem, &ARCH).unwrap_err().to_string()
    };
    let cases: [(Change, &str); 6] = [
        (
            |problem, _| *problem = problem.clone().with_pages(3, 11_000),
            "invalid value '3' for page_size with family wgmma: expected multiples of 8 with keys in pages",
        ),
        (
            |problem, _| problem.lengths.left_padded = true,
            "invalid value 'present' for left padding with family wgmma: expected none with keys in pages",
        ),
        (
            |problem, plan| {
                problem.lengths.kv.used = false;
                plan.cluster = 2;
            },
            "invalid value '2' for cluster with family wgmma: expected 1 with keys in pages",
        ),
        (
            |problem, plan| {
                *problem = problem.clone().with_pages(8, 1 << 12);
                plan.block_n = 144;
            },
            "invalid value '18' for boxes of a block with family wgmma: expected at most 16 (block_n 144)",
        ),
        (
            |problem, _| problem.v.batch += 8,
            "for v batch stride with family wgmma: expected multiples of the row stride with keys in pages",
        ),
        (
            |problem, _| problem.k.row += 4,
            "for k row stride with family wgmma: expected multiples of 8 from 8 to 2^39 elements",
        ),
    ];
    for (change, told) in cases {
        let found = refused(change);
        assert!(found.contains(told), "{found}");
    }
}
