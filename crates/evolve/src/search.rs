//! The plans that an exhaustive search tries. Genes form groups, the coarse ones first. In each group every
//! combination is applied to the fastest plans so far, and the fastest results go on to the next group.

use kernels::{Arch, Family, Plan};
use problem::Problem;
use serde_json::{Value, json};

use check::genes::{product, values, with_genes};

/// Number of plans that each group starts from.
pub const KEPT: usize = 2;

/// The gene groups of a family.
pub fn groups(family: Family, problem: &Problem) -> Vec<Vec<Value>> {
    let genes = genes(family, problem);
    // The declared values of a gene, as objects.
    let of = |gene: &str| match genes.iter().find(|(name, _)| *name == gene) {
        Some((name, searched)) => values(name, searched.iter().cloned()),
        None => Vec::new(),
    };
    match family {
        Family::Mma => mma(&of),
        Family::Decode => decode(&of),
        Family::Wgmma => wgmma(&of),
        Family::SmallAtOnce => small_at_once(&of),
        Family::SmallStreamed => small_streamed(&of),
        Family::BackwardSplit => backward_split(&of),
        Family::BackwardFused => {
            vec![
                product(&[of("query_stages"), of("gradient_stages"), of("products")]),
                of("tile_order"),
            ]
        }
    }
}

/// The genes that an exhaustive search changes, with their values, as the family declares them.
pub fn genes(family: Family, problem: &Problem) -> Vec<(&'static str, Vec<Value>)> {
    let genes = family.genes(problem).into_iter().map(|gene| (gene.name, gene.searched));
    genes.filter(|(_, values)| !values.is_empty()).collect()
}

/// Applies each gene object of a group to a plan and keeps the plans that fit the problem.
pub fn vary(plan: &Plan, group: &[Value], problem: &Problem, arch: &Arch) -> Vec<Plan> {
    let plans = group.iter().filter_map(|genes| with_genes(plan, genes).ok());
    plans.filter(|plan| plan.check(problem, arch).is_ok()).collect()
}

/// A gene's declared values as objects; none if it has no effect on the problem.
type Declared<'a> = &'a dyn Fn(&str) -> Vec<Value>;

fn decode(of: Declared<'_>) -> Vec<Vec<Value>> {
    vec![
        product(&[of("warps"), of("warp_keys"), of("stages"), of("resident_ctas")]),
        product(&[of("least_blocks"), of("rescale")]),
        of("tanh"),
    ]
}

fn wgmma(of: Declared<'_>) -> Vec<Vec<Value>> {
    let alone = product(&[values("resident_ctas", [1]), of("consumers"), of("block_n"), of("turns")]);
    // Several CTAs on an SM hide one another's latency.
    let together = product(&[values("resident_ctas", [2, 3]), values("consumers", [1, 2]), of("block_n")]);
    // The tiles of the last wave can be shared by a static schedule of tiles of equal length.
    let tails = of("tail").into_iter().map(|tail| match tail["tail"].as_str() {
        Some("shared") => json!({ "tail": "shared", "handout": "static", "ends": "common" }),
        _ => tail,
    });
    vec![
        [alone, together].concat(),
        product(&[of("rescale"), of("ends"), of("sums")]),
        product(&[of("handout"), of("tile_order"), of("tiles")]),
        product(&[of("cluster"), of("stages")]),
        product(&[of("diagonal"), of("store"), of("queries_ahead")]),
        of("chains"),
        of("section_mib"),
        of("products"),
        of("probabilities"),
        of("tables"),
        of("producer_registers"),
        of("exps_by_fma"),
        of("packing"),
        tails.collect(),
    ]
}

/// The two kernels have genes of their own.
fn backward_split(of: Declared<'_>) -> Vec<Vec<Value>> {
    vec![
        product(&[of("dq_rows"), of("dq_warps"), of("dq_keys")]),
        product(&[of("dkv_keys"), of("dkv_warps"), of("dkv_rows")]),
        product(&[of("dq_stages"), of("dq_operands")]),
        product(&[of("dkv_stages"), of("dkv_operands"), of("dkv_dim_warps")]),
        of("tile_order"),
        of("tanh"),
    ]
}

fn small_at_once(of: Declared<'_>) -> Vec<Vec<Value>> {
    let shapes = product(&[
        of("cluster"),
        of("kv_warpgroups"),
        values("row_warpgroups", [1, 2]),
        values("block_n", [64, 128, 192, 256]),
        vec![
            json!({ "key_copies": 1, "qk_pieces": 1, "softmax_steps": 1, "pv_pieces": 2 }),
            json!({ "key_copies": 2, "qk_pieces": 2, "softmax_steps": 2, "pv_pieces": 2 }),
        ],
    ]);
    vec![
        shapes,
        of("row_warpgroups"),
        of("block_n"),
        product(&[of("key_copies"), of("qk_pieces"), of("softmax_steps"), of("pv_pieces")]),
        product(&[of("requests"), of("scores"), of("merge")]),
        of("tile_order"),
        of("paths"),
        of("packing"),
    ]
}

fn small_streamed(of: Declared<'_>) -> Vec<Vec<Value>> {
    let shapes = STREAMS.map(|(rows, cluster, parts, block_n, resident)| {
        json!({
            "row_warpgroups": rows, "cluster": cluster, "kv_warpgroups": parts, "block_n": block_n,
            "resident_ctas": resident, "rescale": { "beyond": 8 },
        })
    });
    vec![
        product(&[shapes.to_vec(), of("stages")]),
        of("block_n"),
        of("rescale"),
        product(&[of("tile_order"), of("speculative"), of("turns")]),
        of("packing"),
    ]
}

/// Shapes of streaming plans: warpgroups of rows, CTAs of a cluster, parts of a CTA's keys, keys of
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

/// The plans that differ from `plan` in a single gene, each named by the gene and its value: they show the
/// effect of each gene. `named` restricts the genes, if it is not empty. The values are those that a search
/// tries.
pub fn ideas(plan: &Plan, problem: &Problem, arch: &Arch, named: &[String]) -> Vec<(String, Plan)> {
    let mut genes = Family::named(plan.family()).map(|family| genes(family, problem)).unwrap_or_default();
    genes.retain(|(gene, _)| named.is_empty() || named.iter().any(|name| name == gene));
    let mut found: Vec<(String, Plan)> = Vec::new();
    for (gene, value) in genes.iter().flat_map(|(gene, values)| values.iter().map(move |v| (gene, v))) {
        let Ok(varied) = with_genes(plan, &json!({ *gene: value })) else { continue };
        if varied != *plan && varied.check(problem, arch).is_ok() {
            found.push((format!("{gene} {}", plain(value)), varied));
        }
    }
    found
}

/// A value in words, such as `lazy slack 8`.
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

fn mma(of: Declared<'_>) -> Vec<Vec<Value>> {
    let tiles = TILES.iter().flat_map(|&(block_m, warps, kv_warps, keys)| {
        keys.iter().map(move |&block_n| {
            json!({ "block_m": block_m, "warps": warps, "kv_warps": kv_warps, "block_n": block_n, "resident_ctas": null })
        })
    });
    let orders = vec![
        json!({ "products": "in_turn", "rescale": { "beyond": 8 } }),
        json!({ "products": "scores_ahead", "rescale": { "beyond": 8 } }),
        json!({ "products": "scores_ahead", "rescale": "always" }),
    ];
    let depth = product(&[of("stages"), of("queries")]);
    let tiles = product(&[tiles.collect(), values("stages", [1, 2])]);
    vec![tiles, of("splits"), depth, orders, of("tile_order")]
}

#[cfg(test)]
mod tests {
    use problem::program::library;
    use problem::{Band, DType, ElementType, Layout, PassKind, Program, Table};

    use super::*;

    #[test]
    fn ideas_differ_in_one_gene() {
        let problem = Problem::new(1, 8, 512, 64, DType::Bf16);
        for family in Family::of_pass(PassKind::Forward) {
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

    /// The groups hold the values that the families declare, all of them and no others.
    #[test]
    fn groups_hold_the_declared_values() {
        let mission = Problem::mission();
        let grouped = Problem::new(4, 16, 16, 128, DType::Bf16).with_heads_kv(4, Layout::Bhsd);
        for problem in [mission.clone(), mission.with_band(Band::CAUSAL), grouped] {
            for family in Family::of_pass(PassKind::Forward) {
                let groups = groups(family, &problem);
                let members = || groups.iter().flatten().filter_map(Value::as_object).flatten();
                let genes = genes(family, &problem);
                for (gene, value) in members() {
                    let declared = genes.iter().find(|(name, _)| name == gene).map(|(_, values)| values);
                    assert!(
                        declared.is_some_and(|values| values.contains(value)),
                        "{family:?} {gene} {value}"
                    );
                }
                for (gene, value) in
                    genes.iter().flat_map(|(gene, values)| values.iter().map(move |v| (gene, v)))
                {
                    let tried = members().any(|(name, tried)| name == gene && tried == value);
                    assert!(tried, "{family:?}: no group has {gene} {value}");
                }
            }
        }
    }

    /// A renamed gene would be skipped silently.
    #[test]
    fn every_group_changes_something() {
        let mut biased = Problem::new(1, 16, 4096, 64, DType::Bf16);
        biased.programs.score = Some(Program::new(&library::bias(0)).unwrap());
        biased.programs.tables = vec![Table::dense(ElementType::Bf16, &[1, 16, 4096, 4096])];
        let problems = [
            biased,
            Problem::new(1, 8, 512, 64, DType::Bf16).with_band(Band::CAUSAL),
            Problem::new(1, 8, 512, 64, DType::Bf16),
            Problem::new(4, 16, 4096, 128, DType::Bf16).with_band(Band::CAUSAL),
            Problem::new(4, 16, 4096, 128, DType::Bf16),
            Problem { heads_kv: 4, ..Problem::new(4, 16, 16, 128, DType::Bf16) }.with_layout(Layout::Bhsd),
        ];
        for family in Family::of_pass(PassKind::Forward) {
            let mut changes: Vec<bool> = Vec::new();
            for problem in &problems {
                let Ok(plan) = family.default_for(problem, &Arch::SM_90) else { continue };
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
