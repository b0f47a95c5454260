//! Implements the registry's trait for the family, and declares its genes.

use problem::Problem;
use serde_json::{Value, json};

use super::StreamedPlan;
use crate::family::{FamilyPlan, of_plan};
use crate::forward::contract::tanh_gene;
use crate::forward::small::{common, emit::of_small_plan, wave};
use crate::genes::{Gene, RESIDENT_CTAS, STAGES, TURNS};
use crate::{Arch, Features};

impl FamilyPlan for StreamedPlan {
    fn features() -> Features {
        common::features()
    }

    of_plan!(default_for);

    fn suits(problem: &Problem, arch: &Arch) -> bool {
        wave::is_small(problem, arch)
    }

    fn genes(problem: &Problem) -> Vec<Gene> {
        let mut genes = common::genes(problem);
        genes.extend([
            Gene::new("stages").searched([2, 3, 4, 8]).wider([5, 6]).curing(STAGES),
            Gene::new("rescale")
                .searched([json!("always"), json!({ "beyond": 8 })])
                .wider([4, 14].map(|n| json!({ "beyond": n }))),
            Gene::new("speculative").searched([Value::Null, json!(12)]).wider([8, 15]),
            Gene::new("turns").searched(["free", "ping_pong"]).curing(TURNS),
            Gene::new("resident_ctas").searched([1, 2, 3, 4]).curing(RESIDENT_CTAS),
            tanh_gene(problem),
        ]);
        genes
    }

    of_plan!(check);
    of_small_plan!();
}
