//! Variations of a problem's default plan, gene by gene, so that every branch of the generator is run.

use kernels::{Arch, Plan};
use problem::Problem;
use serde_json::{Value, json};

/// A variation: genes by their names in a plan's serde form. Genes that the family does not have change nothing.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Variant {
    /// For tables.
    pub name: &'static str,
    genes: Value,
}

impl Variant {
    /// The default first; then those that between them reach every gene.
    pub fn all() -> Vec<Variant> {
        let variant = |name, genes| Variant { name, genes };
        vec![
            variant("default", json!({})),
            variant("queries in shared memory", json!({ "queries": "shared" })),
            variant("keys shared by two warps", json!({ "block_m": 32, "warps": 4, "kv_warps": 2 })),
            variant("copies of elements", json!({ "copy": "elements" })),
            variant("one stage", json!({ "stages": 1 })),
            variant("three stages", json!({ "stages": 3, "resident_ctas": null })),
            variant("one warp", json!({ "block_m": 16, "warps": 1, "kv_warps": 1 })),
            variant(
                "32 rows a warp",
                json!({ "block_m": 64, "warps": 2, "kv_warps": 1, "queries": "shared" }),
            ),
            variant(
                "eight warps",
                json!({ "block_m": 128, "warps": 8, "kv_warps": 1, "resident_ctas": null }),
            ),
            variant("16 keys a block", json!({ "block_n": 16 })),
            variant("48 keys a block", json!({ "block_n": 48, "resident_ctas": null })),
            variant("rescaled always", json!({ "rescale": "always" })),
            variant("rescaled late", json!({ "rescale": { "beyond": 15 } })),
            variant("heads first", json!({ "grid": "heads_first" })),
            variant("rows first", json!({ "grid": "rows_first" })),
            variant("four warps on one row tile", json!({ "block_m": 16, "warps": 4, "kv_warps": 4 })),
        ]
    }

    /// The plan, with LSE; `None` where it does not fit the problem or is the default under another name.
    pub fn plan(&self, problem: &Problem, arch: &Arch) -> Option<Plan> {
        let mut default = json!(Plan::default_for(problem, arch).ok()?);
        default["lse"] = true.into();
        let mut varied = default.clone();
        let known = self.genes.as_object()?.iter().filter(|(gene, _)| default.get(*gene).is_some());
        for (gene, value) in known {
            varied[gene] = value.clone();
        }
        if varied == default && self.genes != json!({}) {
            return None;
        }
        let plan: Plan = serde_json::from_value(varied).ok()?;
        plan.check(problem, arch).is_ok().then_some(plan)
    }
}

#[cfg(test)]
mod tests {
    use problem::DType;

    use super::*;

    #[test]
    fn variants_are_plans_and_differ() {
        let problem = Problem::new(1, 2, 300, 64, DType::F16);
        let plans: Vec<Plan> = Variant::all().iter().filter_map(|v| v.plan(&problem, &Arch::SM_90)).collect();
        assert!(plans.len() >= 10, "{}", plans.len());
        for (i, plan) in plans.iter().enumerate() {
            assert!(!plans[..i].contains(plan), "{plan:?}");
            assert_eq!(json!(plan)["lse"], true);
        }
    }
}
