//! The family in the registry, and the declaration of its genes.

use problem::{Band, Problem};
use ptx::Violations;
use serde_json::{Value, json};

use super::SmallPlan;
use crate::family::{FamilyPlan, row_tiles};
use crate::forward::contract::{default_tanh, tanh_gene};
use crate::genes::Turn::{Down, Up};
use crate::genes::{BLOCK_N, CLUSTER, Gene, PACKING, RESIDENT_CTAS, STAGES, TURNS};
use crate::{Arch, Features, PlanError, Program};

impl FamilyPlan for SmallPlan {
    fn features() -> Features {
        Features { lengths: false, sink: true, programs: true, ..Features::default() }
    }

    fn default_for(problem: &Problem, arch: &Arch) -> SmallPlan {
        SmallPlan::default_for(problem, arch)
    }

    /// A wave of CTAs that do not overlap costs the whole chain of loads and products.
    fn suits(problem: &Problem, arch: &Arch) -> bool {
        let narrow = problem.head_dim.max(problem.head_dim_v) <= 64;
        let most = if narrow { 8 } else { 2 };
        row_tiles(problem, 64) <= most * u64::from(arch.multiprocessors)
    }

    fn genes(problem: &Problem) -> Vec<Gene> {
        // Without grouped heads there is nothing to pack, and without a mask every row sees its whole block.
        let packings = if problem.group_size() > 1 { &["apart", "packed"][..] } else { &[] };
        let paths = if problem.band == Band::FULL { &[][..] } else { &[1, 2, 4] };
        vec![
            Gene::new("row_warpgroups")
                .searched([1, 2, 3, 4])
                .curing(&[("small grid", Down), ("redundant loads", Up)]),
            Gene::new("packing")
                .searched(packings.iter().copied())
                .wider(["apart", "packed"])
                .curing(PACKING),
            Gene::new("cluster").searched([1, 2]).wider([4]).curing(CLUSTER),
            Gene::new("kv_warpgroups").searched([1, 2]).wider([4]).curing(&[("barriers", Down)]),
            Gene::new("block_n")
                .searched([48, 64, 128, 192, 256])
                .wider([32, 80, 96, 112, 160])
                .curing(BLOCK_N),
            Gene::new("stages").searched([1, 2, 3, 4, 8]).wider([5, 6]).curing(STAGES),
            Gene::new("rescale")
                .searched([json!("always"), json!({ "beyond": 8 })])
                .wider([4, 14].map(|n| json!({ "beyond": n }))),
            Gene::new("speculative").searched([Value::Null, json!(12)]).wider([8, 15]),
            Gene::new("turns").searched(["free", "ping_pong"]).curing(TURNS),
            Gene::new("tile_order").searched(["by_head", "longest_first", "folded"]),
            Gene::new("key_copies").searched([1, 2, 4]),
            Gene::new("qk_pieces").searched([1, 2, 4]),
            Gene::new("softmax_steps").searched([1, 2]).curing(&[("serial", Up)]),
            Gene::new("pv_pieces").searched([1, 2, 4]),
            Gene::new("paths").searched(paths.iter().copied()),
            Gene::new("requests").searched(["at_once", "values_late", "first_keys_only"]),
            Gene::new("scores").searched(["all_at_once", "step_by_step"]),
            Gene::new("merge").searched(["shares", "peer_first"]),
            Gene::new("store"),
            Gene::new("overlapping"),
            Gene::new("resident_ctas").searched([1, 2, 3, 4]).curing(RESIDENT_CTAS),
            tanh_gene(problem),
        ]
    }

    fn check(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        self.check(problem, arch)
    }

    fn emit(&self, problem: &Problem, _: &Arch) -> Result<Program, Violations> {
        self.emit(problem)
    }

    fn adapted(mut self, problem: &Problem, _: &Arch, own_shape: bool) -> SmallPlan {
        self.tanh = default_tanh(problem);
        if own_shape { self.fitted(problem) } else { self.filled(problem).fitted(problem) }
    }
}
