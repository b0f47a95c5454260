//! Variations of each family's default plan, gene by gene, so that every branch of the generators runs.

use attend::Sums;
use kernels::{Arch, Family, Plan};
use problem::{DType, Problem};
use serde_json::{Value, json};

use check::genes::with_genes;

/// A variation of a plan: genes by their serde names.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Variant {
    pub family: Family,
    /// The name in tables.
    pub name: &'static str,
    genes: Value,
}

impl Variant {
    /// The name of a check of the variant.
    pub fn title(&self, dtype: DType, dim: usize) -> String {
        format!("{} {dtype} dim {dim}, {}", self.family.name(), self.name)
    }

    /// For each family the default first, then variations that together reach every gene.
    pub fn all() -> Vec<Variant> {
        let variants = [
            (Family::Mma, mma()),
            (Family::SmallAtOnce, small_at_once()),
            (Family::SmallStreamed, small_streamed()),
            (Family::Wgmma, wgmma()),
        ];
        let of = |(family, list): (Family, Vec<(&'static str, Value)>)| {
            std::iter::once(("default", json!({}))).chain(list).map(move |(name, genes)| Variant {
                family,
                name,
                genes,
            })
        };
        variants.into_iter().flat_map(of).collect()
    }

    /// The first `count` variations of each family.
    pub fn first(count: usize) -> Vec<Variant> {
        let all = Variant::all();
        let of = |family| all.iter().filter(move |variant| variant.family == family).take(count).cloned();
        let families = [Family::Mma, Family::SmallAtOnce, Family::SmallStreamed, Family::Wgmma];
        families.into_iter().flat_map(of).collect()
    }

    pub fn is_default(&self) -> bool {
        self.genes == json!({})
    }

    /// The plan, and the problem that asks for the LSE if the plan can return it. `None` where the plan does
    /// not fit the problem or equals the default.
    pub fn plan(&self, problem: &Problem, arch: &Arch) -> Option<(Problem, Plan)> {
        let problem = problem.clone().with_lse(true);
        // A variation may fit the problem even if the default does not.
        let default = self.family.proposal(&problem, arch);
        let plan = with_genes(&default, &self.genes).ok()?;
        let problem = asking(&problem, &plan);
        let same = plan == default && !self.is_default();
        (!same && plan.check(&problem, arch).is_ok()).then_some((problem, plan))
    }
}

/// The problem with the LSE requested, unless the plan computes row sums by products: such a plan cannot
/// return the LSE.
pub(super) fn asking(problem: &Problem, plan: &Plan) -> Problem {
    let by_products = matches!(plan, Plan::Wgmma(plan) if plan.sums == Sums::Product);
    problem.clone().with_lse(!by_products)
}

fn mma() -> Vec<(&'static str, Value)> {
    vec![
        ("queries in shared memory", json!({ "queries": "shared" })),
        ("keys shared by two warps", json!({ "block_m": 32, "warps": 4, "kv_warps": 2 })),
        ("copies of elements", json!({ "copy": "elements" })),
        ("one stage", json!({ "stages": 1 })),
        ("three stages", json!({ "stages": 3, "resident_ctas": null })),
        ("one warp", json!({ "block_m": 16, "warps": 1, "kv_warps": 1 })),
        ("32 rows a warp", json!({ "block_m": 64, "warps": 2, "kv_warps": 1, "queries": "shared" })),
        ("eight warps", json!({ "block_m": 128, "warps": 8, "kv_warps": 1, "resident_ctas": null })),
        ("16 keys a block", json!({ "block_n": 16 })),
        ("48 keys a block", json!({ "block_n": 48, "resident_ctas": null })),
        ("rescaled always", json!({ "rescale": "always" })),
        ("rescaled early", json!({ "rescale": { "beyond": 2 } })),
        ("heads first", json!({ "tile_order": "heads_first" })),
        ("rows first", json!({ "tile_order": "rows_first" })),
        (
            "head dims shared by two warps",
            json!({ "block_m": 32, "warps": 4, "kv_warps": 1, "dim_warps": 2 }),
        ),
        ("copies of 4 bytes", json!({ "copy": "async4" })),
        ("keys divided over three CTAs", json!({ "splits": 3 })),
        ("four warps on one row tile", json!({ "block_m": 16, "warps": 4, "kv_warps": 4 })),
    ]
}

fn wgmma() -> Vec<(&'static str, Value)> {
    vec![
        // A short list takes the first entries, which cover each kind of memory and of synchronisation.
        (
            "a cluster, output by TMA, tiles by a counter",
            json!({ "cluster": 2, "store": "bulk", "handout": "dynamic", "block_n": 32 }),
        ),
        (
            "last tiles shared",
            json!({ "tail": "shared", "handout": "static", "ends": "common", "tile_order": "in_order" }),
        ),
        ("sums by products", json!({ "sums": "product" })),
        (
            "half of the diagonal, tiles folded",
            json!({
                "diagonal": "halved", "ends": "own", "handout": "folded", "tile_order": "longest_first",
            }),
        ),
        ("one consumer", json!({ "consumers": 1, "turns": "free" })),
        ("two consumers in turns", json!({ "consumers": 2, "turns": "ping_pong", "block_n": 64 })),
        ("three consumers", json!({ "consumers": 3, "turns": "free", "block_n": 64 })),
        ("tiles by a counter", json!({ "handout": "dynamic" })),
        ("tiles by number", json!({ "handout": "static" })),
        ("tiles by number, folded", json!({ "handout": "folded", "tile_order": "longest_first" })),
        ("long tiles first", json!({ "tile_order": "longest_first" })),
        ("tiles in order", json!({ "tile_order": "in_order" })),
        ("rescaled at every block", json!({ "rescale": "always" })),
        ("lazy rescaling", json!({ "rescale": { "beyond": 8 } })),
        ("speculative row max", json!({ "rescale": { "speculative": { "beyond": 4, "limit": 12 } } })),
        ("tiles overlapped", json!({ "tiles": "overlapped" })),
        ("tiles in turn", json!({ "tiles": "in_turn" })),
        ("one stage", json!({ "stages": 1 })),
        ("three stages", json!({ "stages": 3, "block_n": 32 })),
        ("16 keys a block", json!({ "block_n": 16 })),
        ("80 keys a block", json!({ "block_n": 80 })),
        ("a cluster of two CTAs", json!({ "cluster": 2 })),
        ("two CTAs resident", json!({ "resident_ctas": 2, "consumers": 1, "turns": "free", "block_n": 32 })),
        ("rows of heads packed", json!({ "packing": "packed" })),
        ("two tiles' queries at once", json!({ "queries_ahead": 1, "block_n": 32 })),
        ("output by TMA", json!({ "store": "bulk", "block_n": 32 })),
        ("warpgroups end together", json!({ "ends": "common" })),
        ("warpgroups end where their rows do", json!({ "ends": "own" })),
        ("half of the diagonal", json!({ "diagonal": "halved", "ends": "own" })),
        ("many chains", json!({ "chains": { "max": 4, "sum": 4 } })),
        ("probabilities in shared memory", json!({ "probabilities": "shared", "block_n": 32 })),
        ("products in turn", json!({ "products": "in_turn" })),
        (
            "exponentials by FMAs",
            json!({ "exps_by_fma": 8, "rescale": { "speculative": { "beyond": 4, "limit": 12 } } }),
        ),
        ("a CTA for each tile", json!({ "handout": "grid", "tail": "whole" })),
        ("tiles by a coprime stride", json!({ "tile_order": "strided" })),
        ("more registers for the producer", json!({ "producer_registers": 40, "block_n": 32 })),
        ("sums by lanes", json!({ "sums": "lanes" })),
        (
            "head dims shared by two warpgroups",
            json!({
                "share": "head_dim", "consumers": 2, "turns": "free", "tiles": "in_turn", "ends": "common",
                "diagonal": "whole", "tail": "whole", "store": "direct", "sums": "lanes", "block_n": 32,
                "probabilities": "registers", "rescale": { "beyond": 8 }, "exps_by_fma": 0,
            }),
        ),
    ]
}

fn small_at_once() -> Vec<(&'static str, Value)> {
    let pieces = |n: u32| json!({ "key_copies": n, "qk_pieces": n, "pv_pieces": n });
    vec![
        ("four CTAs", json!({ "cluster": 4, "merge": "shares" })),
        ("one CTA", json!({ "cluster": 1, "kv_warpgroups": 1, "merge": "shares" })),
        ("parts exchanged by shares", json!({ "merge": "shares" })),
        ("may overlap", json!({ "overlapping": true })),
        ("two warpgroups share rows", json!({ "kv_warpgroups": 2, "merge": "shares" })),
        ("two warpgroups of rows", json!({ "row_warpgroups": 2 })),
        ("rows of heads packed", json!({ "packing": "packed" })),
        ("one path for all that see a part", json!({ "paths": 1 })),
        ("256 keys a warpgroup", json!({ "block_n": 256 })),
        ("in one piece", pieces(1)),
        ("in two pieces", pieces(2)),
        ("in four pieces", pieces(4)),
        ("one step of the softmax", json!({ "softmax_steps": 1 })),
        ("two steps of the softmax", json!({ "softmax_steps": 2, "qk_pieces": 2 })),
        ("scores step by step", json!({ "softmax_steps": 2, "qk_pieces": 2, "scores": "step_by_step" })),
        ("all requested at once", json!({ "requests": "at_once" })),
        ("values requested late", json!({ "requests": "values_late" })),
        ("first keys alone requested first", json!({ "requests": "first_keys_only" })),
        ("pairs stored", json!({ "store": "pairs" })),
        ("chunks stored", json!({ "store": "chunks" })),
        ("long tiles first", json!({ "tile_order": "longest_first" })),
        ("long tiles beside short ones", json!({ "tile_order": "folded" })),
    ]
}

fn small_streamed() -> Vec<(&'static str, Value)> {
    // Blocks of 64 keys with further genes.
    let streams = |genes: Value| {
        let mut all = json!({ "stages": 2, "block_n": 64, "cluster": 1, "kv_warpgroups": 1 });
        if let (Value::Object(all), Value::Object(genes)) = (&mut all, genes) {
            all.extend(genes);
        }
        all
    };
    vec![
        ("to a cluster", streams(json!({ "cluster": 2, "row_warpgroups": 2 }))),
        ("speculative row max", streams(json!({ "rescale": { "beyond": 8 }, "speculative": 12 }))),
        ("ping-pong", streams(json!({ "row_warpgroups": 2, "turns": "ping_pong" }))),
        ("rows of heads packed", streams(json!({ "packing": "packed", "row_warpgroups": 2 }))),
        ("64 keys a block", streams(json!({}))),
        ("all blocks stay", streams(json!({ "stages": 8 }))),
        ("to two warpgroups of rows", streams(json!({ "row_warpgroups": 2, "stages": 3 }))),
        ("in two parts", streams(json!({ "kv_warpgroups": 2, "block_n": 32 }))),
        ("rescaled always", streams(json!({ "rescale": "always" }))),
        ("every speculation fails", streams(json!({ "speculative": 1 }))),
        ("may overlap", streams(json!({ "overlapping": true }))),
        ("pairs stored", streams(json!({ "store": "pairs" }))),
        ("two CTAs resident", streams(json!({ "resident_ctas": 2 }))),
        ("long tiles beside short ones", streams(json!({ "tile_order": "folded" }))),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variants_are_plans_and_differ() {
        let problem = Problem::new(1, 2, 300, 64, DType::F16);
        let mut counts = [0; 4];
        let mut plans: Vec<Plan> = Vec::new();
        for variant in Variant::all() {
            // A renamed gene would be skipped silently.
            let proposal = variant.family.proposal(&problem, &Arch::SM_90);
            with_genes(&proposal, &variant.genes).unwrap_or_else(|error| panic!("{}: {error}", variant.name));
            let Some((_, plan)) = variant.plan(&problem, &Arch::SM_90) else { continue };
            assert!(!plans.contains(&plan), "{plan:?}");
            counts[variant.family as usize] += 1;
            plans.push(plan);
        }
        assert!(counts.iter().all(|&count| count >= 10), "{counts:?}");
        assert!(Variant::first(2).len() == 8 && Variant::first(usize::MAX) == Variant::all());
    }
}
