//! Implements the registry's trait for the family, and declares its genes.

use problem::{Band, Problem};

use super::AtOncePlan;
use crate::Symptom;
use crate::family::{FamilyPlan, of_plan};
use crate::forward::contract::tanh_gene;
use crate::forward::small::{self, common, emit::of_small_plan, wave};
use crate::genes::Gene;
use crate::genes::Turn::Up;
use crate::{Arch, Features, Plan};

impl FamilyPlan for AtOncePlan {
    fn features() -> Features {
        common::features()
    }

    of_plan!(default_for);

    /// Suits small grids, unless streaming blocks are better.
    fn suits(problem: &Problem, arch: &Arch) -> bool {
        wave::is_small(problem, arch) && matches!(small::default_for(problem, arch), Plan::SmallAtOnce(_))
    }

    fn genes(problem: &Problem) -> Vec<Gene> {
        // Without a mask every row sees all keys.
        let paths = if problem.band == Band::FULL { &[][..] } else { &[1, 2, 4] };
        let mut genes = common::genes(problem);
        genes.extend([
            Gene::new("key_copies").searched([1, 2, 4]),
            Gene::new("qk_pieces").searched([1, 2, 4]),
            Gene::new("softmax_steps").searched([1, 2]).curing(&[(Symptom::Serial, Up)]),
            Gene::new("pv_pieces").searched([1, 2, 4]),
            Gene::new("paths").searched(paths.iter().copied()),
            Gene::new("requests").searched(["at_once", "values_late", "first_keys_only"]),
            Gene::new("scores").searched(["all_at_once", "step_by_step"]),
            Gene::new("merge").searched(["shares", "peer_first"]),
            tanh_gene(problem),
        ]);
        genes
    }

    of_plan!(check);
    of_small_plan!();
}
