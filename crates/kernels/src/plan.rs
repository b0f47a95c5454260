use problem::Problem;
use ptx::Kernel;
use serde::{Deserialize, Serialize};

use crate::forward::contract::tensor_buffers;
use crate::forward::mma::MmaPlan;
use crate::forward::small::SmallPlan;
use crate::forward::wgmma::WgmmaPlan;
use crate::ladder::RungPlan;
use crate::{Arch, KernelError, PlanError};

/// How a problem is computed: a kernel family and its genes. Pure data, and the only input of a generator
/// besides the problem and the architecture.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "family", rename_all = "snake_case")]
pub enum Plan {
    /// Forward attention on `mma.sync`, for every GPU since sm_80.
    Mma(MmaPlan),
    /// Forward attention for large grids on `wgmma` and TMA, for sm_90a only.
    Wgmma(WgmmaPlan),
    /// Forward attention for small grids, optimised for latency, on `wgmma` and TMA, for sm_90a only.
    Small(SmallPlan),
    /// A kernel of the [ladder](crate::ladder).
    Ladder {
        /// Which one.
        rung: RungPlan,
    },
}

/// The families of forward attention for which a default plan can be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Family {
    Mma,
    Wgmma,
    Small,
}

impl Family {
    /// All families; those with the lowest requirements on the GPU come first.
    pub const ALL: [Family; 3] = [Family::Mma, Family::Wgmma, Family::Small];

    /// The name as it is written in plans.
    pub const fn name(self) -> &'static str {
        match self {
            Family::Mma => "mma",
            Family::Wgmma => "wgmma",
            Family::Small => "small",
        }
    }

    /// The family of that name.
    pub fn named(name: &str) -> Option<Family> {
        Family::ALL.into_iter().find(|family| family.name() == name)
    }

    /// The family's default for the problem.
    ///
    /// # Errors
    /// When the problem cannot be stated or the family does not compute it on the architecture.
    pub fn default_for(self, problem: &Problem, arch: &Arch) -> Result<Plan, KernelError> {
        problem.check()?;
        let plan = self.proposal(problem, arch);
        plan.check(problem, arch)?;
        Ok(plan)
    }

    /// Like [`Family::default_for`], but unchecked: a starting point for a search.
    pub fn proposal(self, problem: &Problem, arch: &Arch) -> Plan {
        let problem = &*problem.canonical();
        match self {
            Family::Mma => Plan::Mma(MmaPlan::default_for(problem, arch)),
            Family::Wgmma => Plan::Wgmma(WgmmaPlan::default_for(problem, arch)),
            Family::Small => Plan::Small(SmallPlan::default_for(problem, arch)),
        }
    }

    /// Whether the grid is of the kind that the family was made for.
    fn suits(self, problem: &Problem, arch: &Arch) -> bool {
        let (sms, heads) = (u64::from(arch.multiprocessors), (problem.batch * problem.heads_q) as u64);
        let row_tiles = |rows: u32| problem.seq_q.div_ceil(rows as usize) as u64 * heads;
        match self {
            // Warpgroups have 64 rows and each SM gets a CTA, so few rows leave most of both idle.
            Family::Wgmma => row_tiles(64) >= sms,
            // A wave of CTAs that do not overlap costs the whole chain of loads and products.
            Family::Small => {
                let narrow = problem.head_dim.max(problem.head_dim_v) <= 64;
                row_tiles(64) <= if narrow { 8 * sms } else { 2 * sms }
            }
            Family::Mma => true,
        }
    }
}

impl Plan {
    /// A good plan for the problem on the architecture, where nothing was measured: on sm_90 the first of
    /// `small`, `wgmma` and `mma` that computes it and suits its grid.
    ///
    /// # Errors
    /// When the problem cannot be stated or no family computes it.
    pub fn default_for(problem: &Problem, arch: &Arch) -> Result<Plan, KernelError> {
        let specific = Family::ALL.into_iter().rev().filter(|&family| family != Family::Mma);
        for family in specific {
            if let Ok(plan) = family.default_for(problem, arch)
                && family.suits(problem, arch)
            {
                return Ok(plan);
            }
        }
        Family::Mma.default_for(problem, arch)
    }

    /// Name of the family.
    pub const fn family(&self) -> &'static str {
        match self {
            Plan::Mma(_) => Family::Mma.name(),
            Plan::Wgmma(_) => Family::Wgmma.name(),
            Plan::Small(_) => Family::Small.name(),
            Plan::Ladder { .. } => "ladder",
        }
    }

    /// Whether a kernel can be emitted.
    ///
    /// # Errors
    /// The first reason why not.
    pub fn check(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        let problem = &*problem.canonical();
        match self {
            Plan::Mma(plan) => plan.check(problem, arch),
            Plan::Small(plan) => plan.check(problem, arch),
            Plan::Wgmma(plan) => plan.check(problem, arch),
            Plan::Ladder { rung } => rung.check(problem, arch),
        }
    }
}

/// Emits the kernel of a plan with its launch contract, for the [canonical](Problem::canonical) form of the
/// problem, so keys that no row sees cost nothing.
///
/// Buffers are `q`, `k`, `v`, `out` and, where the problem asks for it, `lse`, in this order and of exactly the
/// size that the problem's strides span. A family with dynamic scheduling adds a `counter`; one that shares
/// its last round adds `scratch` and then a `counter`. Counters must be zero at the first launch, and each
/// launch leaves them zero. Scratch memory may hold anything.
///
/// # Errors
///
/// When the problem is invalid, or the plan does not fit the problem or the architecture.
pub fn emit(problem: &Problem, plan: &Plan, arch: &Arch) -> Result<Kernel, KernelError> {
    problem.check()?;
    plan.check(problem, arch)?;
    let canonical = &*problem.canonical();
    let emitted = match plan {
        Plan::Mma(plan) => plan.emit(canonical, arch),
        Plan::Small(plan) => plan.emit(canonical),
        Plan::Wgmma(plan) => plan.emit(canonical, arch),
        Plan::Ladder { rung } => rung.emit(canonical, arch),
    };
    let mut kernel =
        emitted.map_err(|violations| KernelError::Generator { family: plan.family(), violations })?;
    if canonical.seq_kv != problem.seq_kv {
        for (buffer, whole) in kernel.buffers.iter_mut().zip(tensor_buffers(problem, false)) {
            buffer.bytes = whole.bytes;
        }
    }
    Ok(kernel)
}
