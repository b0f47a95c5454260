//! Which plans a search for the fastest tries: groups of genes, the coarse ones first. In each group every combination is tried on
//! the fastest plans so far; what was good stays.

use kernels::{Arch, Family, Plan};
use problem::{Mask, Problem};
use serde_json::{Value, json};

use crate::genes::{product, values, with_genes};

/// Plans that each group begins with.
pub const KEPT: usize = 3;

/// The groups of a family.
pub fn groups(family: Family, problem: &Problem) -> Vec<Vec<Value>> {
    match family {
        Family::Mma => mma(problem),
        Family::Wgmma => wgmma(),
        Family::Small => small(),
    }
}

/// The plans that a group makes of one: those that fit the problem.
pub fn vary(plan: &Plan, group: &[Value], problem: &Problem, arch: &Arch) -> Vec<Plan> {
    let plans = group.iter().filter_map(|genes| with_genes(plan, genes).ok());
    plans.filter(|plan| plan.check(problem, arch).is_ok()).collect()
}

fn wgmma() -> Vec<Vec<Value>> {
    let optimistic = |limit: u32| json!({ "softmax": { "optimistic": { "slack": 8, "limit": limit } } });
    vec![
        product(&[
            values("consumers", [1, 2, 3]),
            values("block_n", [64, 80, 96, 112, 128, 144, 160, 176, 192]),
            values("turns", ["free", "ping_pong"]),
        ]),
        vec![
            json!({ "softmax": "classic" }),
            json!({ "softmax": { "lazy": { "slack": 8 } } }),
            optimistic(15),
            optimistic(40),
        ],
        product(&[
            values("handout", ["static", "dynamic"]),
            values("order", ["in_order", "longest_first"]),
            values("tiles", ["in_turn", "overlapped"]),
            values("stages", [2, 3]),
        ]),
        product(&[values("chains", [1, 2, 4].map(|max| json!({ "max": max, "sum": 1 })))]),
        product(&[values("chains", [1, 2, 4].map(|max| json!({ "max": max, "sum": 2 })))]),
    ]
}

fn small() -> Vec<Vec<Value>> {
    vec![
        product(&[
            values("cluster", [1, 2, 4]),
            values("kv_warpgroups", [1, 2]),
            values("row_warpgroups", [1, 2]),
            values("block_n", [64, 96, 128, 192, 256]),
            vec![
                json!({ "key_copies": 1, "qk_pieces": 1, "softmax_steps": 1, "pv_pieces": 2 }),
                json!({ "key_copies": 2, "qk_pieces": 2, "softmax_steps": 2, "pv_pieces": 2 }),
            ],
            values("merge", ["shares", "peer_first"]),
        ]),
        product(&[
            values("key_copies", [1, 2, 4]),
            values("qk_pieces", [1, 2, 4]),
            values("softmax_steps", [1, 2]),
            values("pv_pieces", [1, 2, 4]),
        ]),
        product(&[
            values("requests", ["at_once", "values_late", "first_keys_only"]),
            values("scores", ["all_at_once", "step_by_step"]),
            values("store", ["pairs", "chunks"]),
        ]),
        values("resident_ctas", [1, 2, 3]),
    ]
}

/// Rows, warps, warps that share rows, and the keys of a block that go with them: shapes that were among the fastest on some
/// problem when every shape was tried, and their neighbours.
const TILES: [(u32, u32, u32, &[u32]); 11] = [
    (16, 4, 4, &[64, 128, 256]),
    (16, 8, 8, &[128, 256]),
    (32, 4, 2, &[64, 128, 256]),
    (32, 4, 4, &[128, 256]),
    (32, 8, 4, &[128, 256]),
    (48, 3, 1, &[48, 96]),
    (64, 8, 2, &[64, 128]),
    (64, 4, 1, &[32, 48, 64, 80, 96, 128]),
    (64, 2, 1, &[32, 48, 64, 80]),
    (128, 4, 1, &[32, 48, 64, 96, 128]),
    (128, 8, 1, &[32, 48, 64, 80, 96, 128]),
];

fn mma(problem: &Problem) -> Vec<Vec<Value>> {
    let tiles = TILES.iter().flat_map(|&(block_m, warps, kv_warps, keys)| {
        keys.iter().map(move |&block_n| {
            json!({ "block_m": block_m, "warps": warps, "kv_warps": kv_warps, "block_n": block_n, "resident_ctas": null })
        })
    });
    let depth = product(&[values("stages", [1, 2, 3, 4]), values("queries", ["registers", "shared"])]);
    let orders = vec![
        json!({ "order": "in_turn", "rescale": { "beyond": 8 } }),
        json!({ "order": "scores_ahead", "rescale": { "beyond": 8 } }),
        json!({ "order": "scores_ahead", "rescale": "always" }),
    ];
    let grids = match problem.mask {
        Mask::Causal => values("grid", ["heads_first", "rows_first"]),
        _ => Vec::new(),
    };
    vec![product(&[tiles.collect(), values("stages", [1, 2])]), depth, orders, grids]
}

#[cfg(test)]
mod tests {
    use problem::DType;

    use super::*;

    /// A gene that was renamed would be left out without a word.
    #[test]
    fn every_group_changes_something() {
        for problem in [
            Problem::new(1, 8, 512, 64, DType::Bf16).with_mask(Mask::Causal),
            Problem::new(4, 16, 4096, 128, DType::Bf16).with_mask(Mask::Causal),
        ] {
            for family in Family::ALL {
                let Ok(plan) = family.default_for(&problem, &Arch::SM_90) else { continue };
                for group in groups(family, &problem) {
                    assert!(
                        group.iter().all(|genes| with_genes(&plan, genes).is_ok()),
                        "{family:?} {group:?}"
                    );
                    let plans = vary(&plan, &group, &problem, &Arch::SM_90);
                    assert!(plans.iter().any(|varied| *varied != plan), "{family:?} {group:?}");
                }
            }
        }
    }
}
