//! The plans that a search for the fastest one tries. Genes form groups, the coarse ones first. In each group
//! every combination is applied to the fastest plans so far, and the fastest results go on to the next group.

use kernels::{Arch, Family, Plan};
use problem::{Band, Problem};
use serde_json::{Value, json};

use check::genes::{product, values, with_genes};

/// Number of plans that each group starts from.
pub const KEPT: usize = 2;

/// The gene groups of a family.
pub fn groups(family: Family, problem: &Problem) -> Vec<Vec<Value>> {
    match family {
        Family::Mma => mma(problem),
        Family::Wgmma => wgmma(problem),
        Family::Small => small(problem),
    }
}

/// Each gene in the groups with its values, in the order of the groups.
pub fn genes(family: Family, problem: &Problem) -> Vec<(String, Vec<Value>)> {
    let mut genes: Vec<(String, Vec<Value>)> = Vec::new();
    let groups = groups(family, problem);
    for (gene, value) in groups.iter().flatten().filter_map(Value::as_object).flatten() {
        match genes.iter_mut().find(|(name, _)| name == gene) {
            Some((_, values)) if values.contains(value) => {}
            Some((_, values)) => values.push(value.clone()),
            None => genes.push((gene.clone(), vec![value.clone()])),
        }
    }
    genes
}

/// Applies each gene object of a group to a plan and keeps the plans that fit the problem.
pub fn vary(plan: &Plan, group: &[Value], problem: &Problem, arch: &Arch) -> Vec<Plan> {
    let plans = group.iter().filter_map(|genes| with_genes(plan, genes).ok());
    plans.filter(|plan| plan.check(problem, arch).is_ok()).collect()
}

fn wgmma(problem: &Problem) -> Vec<Vec<Value>> {
    let optimistic = |limit: u32| json!({ "softmax": { "optimistic": { "slack": 8, "limit": limit } } });
    let keys = [64, 80, 96, 112, 128, 144, 160, 176];
    let alone = product(&[
        vec![json!({ "resident": 1 })],
        values("consumers", [1, 2, 3]),
        values("block_n", keys),
        values("turns", ["free", "ping_pong"]),
    ]);
    // Several CTAs of an SM hide one another's latency.
    let together =
        product(&[values("resident", [2, 3]), values("consumers", [1, 2]), values("block_n", keys)]);
    let softmax = vec![
        json!({ "softmax": "classic" }),
        // The row max without slack, but O is not rescaled when no row of the warp has a new max.
        json!({ "softmax": { "lazy": { "slack": 0 } } }),
        json!({ "softmax": { "lazy": { "slack": 8 } } }),
        optimistic(15),
        optimistic(40),
    ];
    let tails = match problem.band {
        Band::FULL => vec![
            json!({ "tail": "whole" }),
            json!({ "tail": "shared", "handout": "static", "ends": "common" }),
        ],
        _ => Vec::new(),
    };
    vec![
        [alone, together].concat(),
        product(&[softmax, values("ends", ["common", "own"]), values("sums", ["lanes", "product"])]),
        product(&[
            values("handout", ["static", "folded", "dynamic", "grid"]),
            values("order", ["in_order", "longest_first", "strided"]),
            values("tiles", ["in_turn", "overlapped"]),
        ]),
        product(&[values("cluster", [1, 2]), values("stages", [2, 3, 4])]),
        product(&[
            values("diagonal", ["whole", "halved"]),
            values("store", ["direct", "bulk"]),
            values("queries_ahead", [0, 1]),
        ]),
        values("chains", [1, 2, 4].map(|max| json!({ "max": max, "sum": 1 }))),
        values("section_mib", [16, 32, 48, 64, 96, 128]),
        values("products", ["in_turn"]),
        values("probabilities", ["shared"]),
        values("producer_registers", [24, 32, 40]),
        values("exps_by_fma", [0, 1, 2, 3]),
        packings(problem),
        tails,
    ]
}

fn small(problem: &Problem) -> Vec<Vec<Value>> {
    let at_once = product(&[
        vec![json!({ "stages": 1, "rescale": "always", "guess": null, "turns": "free" })],
        values("cluster", [1, 2]),
        values("kv_warpgroups", [1, 2]),
        values("row_warpgroups", [1, 2]),
        values("block_n", [64, 128, 192, 256]),
        vec![
            json!({ "key_copies": 1, "qk_pieces": 1, "softmax_steps": 1, "pv_pieces": 2 }),
            json!({ "key_copies": 2, "qk_pieces": 2, "softmax_steps": 2, "pv_pieces": 2 }),
        ],
    ]);
    let shapes = STREAMS.map(|(rows, cluster, parts, block_n, resident)| {
        json!({
            "row_warpgroups": rows, "cluster": cluster, "kv_warpgroups": parts, "block_n": block_n,
            "resident_ctas": resident, "merge": "shares", "rescale": { "beyond": 8 },
            "key_copies": 1, "qk_pieces": 1, "softmax_steps": 1, "pv_pieces": 1,
        })
    });
    let streamed = product(&[shapes.to_vec(), values("stages", [2, 3, 4, 8])]);
    let paths = match problem.band {
        Band::FULL => Vec::new(),
        _ => values("paths", [1, 2, 4]),
    };
    vec![
        [at_once, streamed].concat(),
        product(&[
            values("key_copies", [1, 2, 4]),
            values("qk_pieces", [1, 2, 4]),
            values("softmax_steps", [1, 2]),
            values("pv_pieces", [1, 2, 4]),
        ]),
        product(&[
            values("requests", ["at_once", "values_late", "first_keys_only"]),
            values("scores", ["all_at_once", "step_by_step"]),
            values("merge", ["shares", "peer_first"]),
        ]),
        values("resident_ctas", [1, 2, 3]),
        product(&[
            values("order", ["by_head", "longest_first", "folded"]),
            values("guess", [json!(null), json!(12)]),
            values("turns", ["free", "ping_pong"]),
        ]),
        paths,
        packings(problem),
    ]
}

/// Without grouped heads there is nothing to pack.
fn packings(problem: &Problem) -> Vec<Value> {
    if problem.group_size() > 1 { values("packing", ["apart", "packed"]) } else { Vec::new() }
}

/// Streaming plans of the small family: warpgroups of rows, CTAs of a cluster, parts of a CTA's keys, keys of
/// a block and resident CTAs per SM. Nearly all rows put two to four warpgroups on an SM.
const STREAMS: [(u32, u32, u32, u32, u32); 18] = [
    (1, 1, 1, 128, 3),
    (1, 1, 1, 128, 2),
    (1, 1, 1, 64, 4),
    (1, 1, 1, 64, 3),
    (1, 1, 1, 64, 2),
    (1, 1, 1, 48, 3),
    (1, 1, 2, 128, 1),
    (1, 1, 2, 64, 2),
    (1, 2, 1, 128, 1),
    (1, 2, 1, 64, 4),
    (2, 1, 1, 128, 1),
    (2, 1, 1, 64, 1),
    (2, 1, 1, 64, 2),
    (2, 1, 2, 64, 1),
    (2, 2, 1, 128, 1),
    (2, 2, 1, 64, 1),
    (3, 1, 1, 128, 1),
    (4, 1, 1, 64, 1),
];

/// The plans that differ from `plan` in a single gene, each named by the gene and its value: they show what
/// each gene is worth. `named` restricts the genes, if it is not empty. The values are those that a search
/// tries.
pub fn ideas(plan: &Plan, problem: &Problem, arch: &Arch, named: &[String]) -> Vec<(String, Plan)> {
    let family = Family::ALL.into_iter().find(|family| family.name() == plan.family());
    let mut genes = family.map(|family| genes(family, problem)).unwrap_or_default();
    genes.retain(|(gene, _)| named.is_empty() || named.contains(gene));
    let mut found: Vec<(String, Plan)> = Vec::new();
    for (gene, value) in genes.iter().flat_map(|(gene, values)| values.iter().map(move |v| (gene, v))) {
        let Ok(varied) = with_genes(plan, &json!({ gene: value })) else { continue };
        if varied != *plan && varied.check(problem, arch).is_ok() {
            found.push((format!("{gene} {}", plain(value)), varied));
        }
    }
    found
}

/// A value in words: `lazy slack 8`.
fn plain(value: &Value) -> String {
    match value {
        Value::String(word) => word.clone(),
        Value::Object(parts) => {
            let parts = parts.iter().map(|(name, value)| format!("{name} {}", plain(value)));
            parts.collect::<Vec<_>>().join(" ")
        }
        other => other.to_string(),
    }
}

/// Rows, warps, warps that share rows, and matching numbers of keys per block. The list holds shapes that
/// were among the fastest on some problem when every shape was tried, and their neighbours.
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
    let grids = match problem.band {
        Band::FULL => Vec::new(),
        _ => values("grid", ["heads_first", "rows_first"]),
    };
    vec![product(&[tiles.collect(), values("stages", [1, 2])]), depth, orders, grids]
}

#[cfg(test)]
mod tests {
    use problem::{DType, Layout};

    use super::*;

    #[test]
    fn ideas_differ_in_one_gene() {
        let problem = Problem::new(4, 16, 4096, 128, DType::Bf16);
        for family in Family::ALL {
            let plan = family.default_for(&problem, &Arch::SM_90).unwrap();
            let ideas = |genes: &[String]| super::ideas(&plan, &problem, &Arch::SM_90, genes);
            let all = ideas(&[]);
            assert!(all.len() > 5, "{family:?}: {all:?}");
            for (name, varied) in &all {
                let [one, other] = [&plan, varied].map(|plan| json!(plan));
                let genes = one.as_object().unwrap().keys().filter(|gene| one[*gene] != other[*gene]);
                let gene = name.split(' ').next().unwrap();
                assert_eq!(genes.collect::<Vec<_>>(), [gene], "{name}");
                let named = ideas(&[gene.to_owned()]);
                assert!(named.contains(&(name.clone(), varied.clone())) && named.len() < all.len());
            }
        }
    }

    /// A renamed gene would be skipped silently. In a streaming plan the genes of non-streaming plans change
    /// nothing.
    #[test]
    fn every_group_changes_something() {
        let problems = [
            Problem::new(1, 8, 512, 64, DType::Bf16).with_band(Band::CAUSAL),
            Problem::new(4, 16, 4096, 128, DType::Bf16).with_band(Band::CAUSAL),
            Problem::new(4, 16, 4096, 128, DType::Bf16),
            Problem { heads_kv: 4, ..Problem::new(4, 16, 16, 128, DType::Bf16) }.with_layout(Layout::Bhsd),
        ];
        for family in Family::ALL {
            let mut changes: Vec<bool> = Vec::new();
            for problem in &problems {
                let plan = family.default_for(problem, &Arch::SM_90).unwrap();
                let groups = groups(family, problem);
                changes.resize(groups.len(), false);
                for (group, changes) in groups.iter().zip(&mut changes) {
                    for genes in group {
                        with_genes(&plan, genes)
                            .unwrap_or_else(|error| panic!("{family:?} {genes}: {error}"));
                    }
                    let plans = vary(&plan, group, problem, &Arch::SM_90);
                    *changes |= plans.iter().any(|varied| *varied != plan);
                }
            }
            assert!(changes.iter().all(|&changes| changes), "{family:?} {changes:?}");
        }
    }
}
