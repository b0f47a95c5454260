//! Tests of the gate on keys and values in pages: pages of any size, lengths around them, and page tables
//! with entries that are no pages.

use crate::common::{SMALL, passes, plain_mma, plain_wgmma};
use attend::{Order, Packing, Tiles};
use flashcore_check::gate::{Settings, bind, check_kernel};
use kernels::forward::mma::{MmaPlan, QueryHome};
use kernels::forward::wgmma::{Ends, WgmmaPlan};
use kernels::{Arch, Family, Plan};
use problem::{Band, DType, Layout, PassKind, Problem, SideLengths};
use tile::{Handout, Tail};

/// Sizes of pages: smaller than a copy's rows, no power of two, and larger than a block of keys.
const PAGES: [usize; 5] = [1, 3, 16, 64, 256];

/// A problem with `group` query heads to a KV head, with keys in pages of `page` rows.
fn problem(page: usize, group: usize, (rows, keys): (usize, usize), dim: usize, dtype: DType) -> Problem {
    let mut problem = Problem::new(3, 2 * group, rows, dim, dtype);
    problem.heads_kv = 2;
    let problem = problem.with_seq_kv(keys, Layout::Bshd).with_lse(true);
    let pages = 3 * keys.div_ceil(page) + 2;
    problem.with_pages(page, pages)
}

/// Numbers of keys around a page, and one that is prime.
fn lengths(page: usize) -> [usize; 5] {
    [1, page - usize::from(page > 1), page, page + 1, 131]
}

fn mma_plans(problem: &Problem) -> [MmaPlan; 4] {
    let base = MmaPlan { block_n: 32, ..plain_mma(problem, &Arch::SM_80) };
    [
        MmaPlan { products: Order::InTurn, stages: 3, ..base.clone() },
        MmaPlan { products: Order::InTurn, stages: 1, queries: QueryHome::Shared, ..base.clone() },
        MmaPlan {
            products: Order::ScoresAhead,
            stages: 2,
            kv_warps: 2,
            block_m: 16,
            warps: 2,
            ..base.clone()
        },
        MmaPlan { products: Order::InTurn, stages: 2, splits: 3, ..base },
    ]
}

/// Every size of pages, with lengths around it, ragged and even, one row and chunks of rows.
#[test]
fn mma_reads_pages_of_any_size() {
    for (i, page) in PAGES.into_iter().enumerate() {
        for (j, keys) in lengths(page).into_iter().enumerate() {
            let (group, dtype) = ([1, 4, 5, 8][(i + j) % 4], [DType::F16, DType::Bf16][(i + j) % 2]);
            let rows = [1, 20][j % 2];
            // Warps that divide keys merge whole chunks of O.
            let odd = if (i + j) % 4 == 2 { 48 } else { 40 };
            let mut problem = problem(page, group, (rows, keys), [64, 128, odd][(i + j) % 3], dtype);
            problem.band = [Band::CAUSAL, Band::FULL, Band::window(30, 0)][j % 3];
            problem.lengths.kv.used = j % 2 == 0;
            problem.lengths.left_padded = (i + j) % 4 == 3;
            if i % 2 == 1 {
                // Heads before rows.
                let strides = |dim| Layout::Bhsd.strides(problem.heads_kv, page, dim);
                (problem.k, problem.v) = (strides(problem.head_dim), strides(problem.head_dim_v));
            }
            let plan = Plan::Mma(mma_plans(&problem)[(i + j) % 4].clone());
            let bound = bind(&plan, &problem, &Arch::SM_80).unwrap();
            passes(&check_kernel(&bound, &Settings::quick()).unwrap(), &(&problem, &plan));
        }
    }
}

/// Pages that divide a block, are as long as one, are longer, or have a divisor in common with it.
const PAGES_OF_BOXES: [usize; 7] = [8, 16, 24, 64, 80, 128, 256];

fn wgmma_plans(problem: &Problem) -> [WgmmaPlan; 5] {
    let base = WgmmaPlan { handout: Handout::Dynamic, ..plain_wgmma(problem) };
    let wide = if problem.head_dim > 128 { 80 } else { 128 };
    [
        base.clone(),
        WgmmaPlan { consumers: 1, block_n: 48, stages: 3, ..base.clone() },
        WgmmaPlan { block_n: wide, packing: Packing::Packed, ..base.clone() },
        WgmmaPlan { block_n: 32, tiles: Tiles::Overlapped, queries_ahead: 1, ..base.clone() },
        WgmmaPlan { handout: Handout::Static, ..base },
    ]
}

/// Every size of pages, with lengths around it, ragged and even, packed queries and chunks of rows.
#[test]
fn wgmma_loads_pages_in_boxes() {
    for (i, page) in PAGES_OF_BOXES.into_iter().enumerate() {
        for (j, keys) in lengths(page).into_iter().enumerate() {
            let (group, dtype) = ([1, 4, 8][(i + j) % 3], [DType::F16, DType::Bf16][(i + j) % 2]);
            let dim = [64, 128, 256, 40][(i + j) % 4];
            let mut problem = problem(page, group, ([20, 90][j % 2], keys), dim, dtype);
            problem.band = [Band::CAUSAL, Band::FULL, Band::window(30, 0)][(i + j) % 3];
            problem.lengths.kv.used = j != 4;
            problem.score.sink = j == 2;
            problem.score.softcap = (j == 3).then_some(4.0);
            if j % 2 == 1 {
                problem.lengths.q = SideLengths { packed: Some(110), used: false };
                problem.q = Layout::Bshd.strides(problem.heads_q, 110, dim);
                problem.out = problem.q;
            }
            if i % 2 == 1 {
                // Heads before rows.
                let strides = |dim| Layout::Bhsd.strides(problem.heads_kv, page, dim);
                (problem.k, problem.v) = (strides(problem.head_dim), strides(problem.head_dim_v));
            }
            let plan = Plan::Wgmma(wgmma_plans(&problem)[(i + j) % 5].clone());
            let bound = bind(&plan, &problem, &SMALL).unwrap();
            passes(&check_kernel(&bound, &Settings::quick()).unwrap(), &(&problem, &plan));
        }
    }
}

/// Many blocks of keys, in pages of both kinds: several to a block, and several blocks to a page.
#[test]
fn wgmma_visits_many_blocks_of_pages() {
    for page in [16, 256] {
        let mut problem = problem(page, 4, (20, 4096), 64, DType::Bf16).with_band(Band::CAUSAL);
        problem.lengths.kv.used = true;
        let plan = Plan::Wgmma(WgmmaPlan { handout: Handout::Dynamic, ..plain_wgmma(&problem) });
        let bound = bind(&plan, &problem, &SMALL).unwrap();
        passes(&check_kernel(&bound, &Settings::quick().first_run()).unwrap(), &(&problem, &plan));
    }
}

/// The tiles of the last wave are shared where all sequences have all keys.
#[test]
fn wgmma_shares_tiles_of_even_pages() {
    let small = Arch { multiprocessors: 5, ..Arch::SM_90 };
    let problem = problem(16, 2, (130, 150), 64, DType::Bf16);
    let plan = WgmmaPlan { tail: Tail::Shared, ends: Ends::Common, ..plain_wgmma(&problem) };
    let bound = bind(&Plan::Wgmma(plan.clone()), &problem, &small).unwrap();
    passes(&check_kernel(&bound, &Settings::quick()).unwrap(), &(&problem, &plan));
}

/// Every style of inputs, with entries that are no pages, in one memory for keys and values.
#[test]
fn every_style_passes_in_one_pool() {
    for (i, page) in [3, 16].into_iter().enumerate() {
        let mut problem = problem(page, 4, (2, 77), 64, DType::Bf16).with_band(Band::CAUSAL);
        problem.lengths.kv.used = true;
        // A page has the rows of K, then those of V.
        for strides in [&mut problem.k, &mut problem.v] {
            strides.batch *= 2;
        }
        let plan = Plan::Mma(mma_plans(&problem)[3 * i].clone());
        let bound = bind(&plan, &problem, &Arch::SM_80).unwrap();
        passes(&check_kernel(&bound, &Settings::thorough()).unwrap(), &(&problem, &plan));
        if page % 8 == 0 {
            let plan = Plan::Wgmma(wgmma_plans(&problem)[0].clone());
            let bound = bind(&plan, &problem, &Arch::SM_90).unwrap();
            passes(&check_kernel(&bound, &Settings::thorough()).unwrap(), &(&problem, &plan));
        }
    }
}

/// The defaults choose a family that reads pages, and the others refuse them by name.
#[test]
fn defaults_read_pages() {
    let problem = problem(16, 4, (1, 300), 128, DType::Bf16);
    for arch in Arch::ALL {
        let plan = Plan::default_for(&problem, &arch).unwrap();
        plan.check(&problem, &arch).unwrap();
    }
    for family in Family::of_pass(PassKind::Forward).filter(|family| !family.features().pages) {
        let refused = family.default_for(&problem, &Arch::SM_90).unwrap_err().to_string();
        assert_eq!(refused, format!("family {} does not support keys and values in pages", family.name()));
    }
}
