//! Tests of the gate on the `decode` family: pages of any size, lengths around them, and page tables with
//! entries that are no pages.

use crate::common::passes;
use flashcore_check::gate::{Settings, bind, check_kernel};
use kernels::forward::decode::DecodePlan;
use kernels::{Arch, Family, Plan};
use problem::{Band, DType, Layout, Problem};

/// A GPU with so few SMs that a CTA computes several tiles, and tiles are divided at odd places.
const SMALL: Arch = Arch { multiprocessors: 5, ..Arch::SM_90 };

/// Three sequences of at most `keys` keys, in pages of `page` rows, or at strides if `page` is 0.
fn problem(page: usize, group: usize, (rows, keys): (usize, usize), dim: usize, dtype: DType) -> Problem {
    let problem = Problem { heads_kv: 2, ..Problem::new(3, 2 * group, rows, dim, dtype) };
    let problem = problem.with_seq_kv(keys, Layout::Bshd).with_lse(true);
    if page == 0 { problem } else { problem.with_pages(page, 3 * keys.div_ceil(page) + 2) }
}

/// Every size of pages, with lengths around it, groups and bands. The runs of a check have other lengths,
/// page tables and schedules, as a graph that is replayed, and one has entries that are no pages.
#[test]
fn pages_of_any_size_and_lengths_around_them() {
    for (i, page) in [0, 1, 3, 16, 64].into_iter().enumerate() {
        for (j, keys) in [1, 15, 16, 17, 131, 400].into_iter().enumerate() {
            let (group, dtype) = ([1, 4, 5, 8][(i + j) % 4], [DType::F16, DType::Bf16][(i + j) % 2]);
            let mut problem = problem(page, group, ([1, 2, 5][j % 3], keys), [64, 128][(i + j) % 2], dtype);
            problem.band = [Band::CAUSAL, Band::FULL, Band::window(30, 0)][j % 3];
            problem.lengths.kv.used = j % 2 == 0;
            problem.score.sink = j % 3 == 1;
            let plan = Plan::Decode(DecodePlan {
                warps: [1, 2, 4][j % 3],
                least_blocks: [1, 2][i % 2],
                stages: [3, 2, 4][i % 3],
                ..DecodePlan::default_for(&problem, &SMALL)
            });
            let bound = bind(&plan, &problem, &SMALL).unwrap();
            passes(&check_kernel(&bound, &Settings::quick()).unwrap(), &(&problem, &plan));
        }
    }
}

/// The default for keys in pages, on every GPU; the other families refuse them by name.
#[test]
fn defaults_read_pages() {
    let problem = problem(16, 4, (1, 300), 128, DType::Bf16);
    for arch in Arch::ALL {
        assert_eq!(Plan::default_for(&problem, &arch).unwrap().family(), "decode");
    }
    for family in Family::ALL {
        let refused = family.default_for(&problem, &Arch::SM_90).unwrap_err().to_string();
        assert_eq!(refused, format!("family {} does not support keys and values in pages", family.name()));
    }
}
