use problem::Problem;
use ptx::Kernel;
use serde::{Deserialize, Serialize};

use crate::forward::mma::MmaPlan;
use crate::forward::small::SmallPlan;
use crate::forward::wgmma::WgmmaPlan;
use crate::ladder::RungPlan;
use crate::{Arch, KernelError, PlanError};

/// How a problem is computed: a kernel family and its genes. Pure data, the only input of a generator besides the
/// problem and the architecture.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "family", rename_all = "snake_case")]
pub enum Plan {
    /// Forward attention on `mma.sync`, for every GPU since sm_80.
    Mma(MmaPlan),
    /// Forward attention on `wgmma` for small grids, latency first, for Hopper.
    Small(SmallPlan),
    /// Forward attention for large grids on `wgmma` and TMA, for sm_90a alone.
    Wgmma(WgmmaPlan),
    /// A kernel of the seeds' story.
    Ladder {
        /// Which one.
        rung: RungPlan,
    },
}

impl Plan {
    /// A good plan for the problem on the architecture.
    ///
    /// # Errors
    /// When the problem cannot be stated or no family computes it.
    pub fn default_for(problem: &Problem, arch: &Arch) -> Result<Plan, KernelError> {
        problem.check()?;
        let plan = Plan::Mma(MmaPlan::default_for(problem, arch));
        plan.check(problem, arch)?;
        Ok(plan)
    }

    /// Name of the family.
    pub const fn family(&self) -> &'static str {
        match self {
            Plan::Mma(_) => "mma",
            Plan::Small(_) => "small",
            Plan::Wgmma(_) => "wgmma",
            Plan::Ladder { .. } => "ladder",
        }
    }

    /// Whether a kernel can be emitted.
    ///
    /// # Errors
    /// The first reason why not.
    pub fn check(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        match self {
            Plan::Mma(plan) => plan.check(problem, arch),
            Plan::Small(plan) => plan.check(problem, arch),
            Plan::Wgmma(plan) => plan.check(problem, arch),
            Plan::Ladder { rung } => rung.check(problem, arch),
        }
    }
}

/// The kernel of a plan, with its launch contract for the problem. Buffers are `q`, `k`, `v`, `out` and, where the plan
/// returns it, `lse`, in this order and of exactly the size the problem's strides span.
///
/// # Errors
/// When the problem cannot be stated or the plan does not fit it or the architecture.
pub fn emit(problem: &Problem, plan: &Plan, arch: &Arch) -> Result<Kernel, KernelError> {
    problem.check()?;
    plan.check(problem, arch)?;
    match plan {
        Plan::Mma(plan) => Ok(plan.emit(problem, arch)),
        Plan::Small(plan) => Ok(plan.emit(problem)),
        Plan::Wgmma(plan) => Ok(plan.emit(problem, arch)),
        Plan::Ladder { rung } => Ok(rung.emit(problem, arch)),
    }
}
