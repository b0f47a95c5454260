//! Implements the registry's trait for the family, and declares its genes.

use problem::{Band, PassKind, Problem};

use super::AtOncePlan;
use crate::Symptom;
use crate::draft::Draft;
use crate::family::FamilyPlan;
use crate::forward::contract::{default_tanh, tanh_gene};
use crate::forward::small::{self, common, emit, wave};
use crate::genes::Gene;
use crate::genes::Turn::Up;
use crate::{Arch, Baked, Features, Plan, PlanError};

impl FamilyPlan for AtOncePlan {
    fn pass() -> PassKind {
        PassKind::Forward
    }

    fn features() -> Features {
        common::features()
    }

    fn default_for(problem: &Problem, arch: &Arch) -> AtOncePlan {
        AtOncePlan::default_for(problem, arch)
    }

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

    fn check(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        self.check(problem, arch)
    }

    fn baked(&self, problem: &Problem) -> Baked {
        emit::baked(self, problem)
    }

    fn drafts<'a>(&'a self, problem: &'a Problem, baked: &'a Baked, _: &Arch) -> Vec<Draft<'a>> {
        vec![emit::draft(self, problem, baked)]
    }

    fn tile(&self) -> [u32; 2] {
        [self.rows(), self.cluster_keys()]
    }

    fn adapted(mut self, problem: &Problem, _: &Arch, own_shape: bool) -> AtOncePlan {
        self.tanh = default_tanh(problem);
        if own_shape { self.fitted(problem) } else { self.filled(problem).fitted(problem) }
    }
}
