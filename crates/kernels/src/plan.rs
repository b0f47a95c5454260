use problem::Problem;
use serde::{Deserialize, Serialize};

use crate::Program;
use crate::forward::mma::MmaPlan;
use crate::forward::small::SmallPlan;
use crate::forward::wgmma::WgmmaPlan;
use crate::ladder::RungPlan;
use crate::{Arch, Features, KernelError, PlanError};

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

impl Plan {
    /// Name of the family.
    pub fn family(&self) -> &'static str {
        self.of_family().map_or("ladder", |(family, _)| family.name())
    }

    /// Whether a kernel can be emitted.
    ///
    /// # Errors
    /// The first reason why not.
    pub fn check(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        let problem = &*problem.canonical();
        match self.of_family() {
            Ok((family, plan)) => {
                family.features().check(problem, family.name())?;
                plan.check(problem, arch)
            }
            Err(rung) => {
                Features::default().check(problem, rung.name())?;
                rung.check(problem, arch)
            }
        }
    }
}

/// Emits the kernels of a plan with their launch contracts, for the [canonical](Problem::canonical) form of
/// the problem, so keys that no row sees cost nothing. Buffers of tensors and of the LSE have exactly the
/// size that the problem's strides span.
///
/// # Errors
///
/// When the problem is invalid, or the plan does not fit the problem or the architecture.
pub fn emit(problem: &Problem, plan: &Plan, arch: &Arch) -> Result<Program, KernelError> {
    problem.check()?;
    plan.check(problem, arch)?;
    let canonical = &*problem.canonical();
    let emitted = match plan.of_family() {
        Ok((_, plan)) => plan.emit(canonical, arch),
        Err(rung) => rung.emit(canonical, arch),
    };
    let mut program =
        emitted.map_err(|violations| KernelError::Generator { family: plan.family(), violations })?;
    if canonical.seq_kv != problem.seq_kv {
        program.span_tensors_of(problem);
    }
    Ok(program)
}
