//! Plans: a kernel family with its genes.

use problem::Problem;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::backward::split::SplitPlan;
use crate::forward::mma::MmaPlan;
use crate::forward::small::{AtOncePlan, StreamedPlan};
use crate::forward::wgmma::WgmmaPlan;
use crate::ladder::RungPlan;
use crate::{Arch, Baked, Contracts, Features, KernelError, PlanError, Program};

/// How a problem is computed: a kernel family and its genes. A plan is pure data. A generator has no other
/// input besides the problem and the architecture.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "family", rename_all = "snake_case", try_from = "Stored")]
pub enum Plan {
    /// Forward attention on `mma.sync`, for every GPU since sm_80.
    Mma(MmaPlan),
    /// Forward attention for large grids on `wgmma` and TMA, for sm_90a only.
    Wgmma(WgmmaPlan),
    /// Forward attention for small grids, optimised for latency, on `wgmma` and TMA, for sm_90a only. KV
    /// blocks are streamed.
    SmallStreamed(StreamedPlan),
    /// Forward attention for small grids, optimised for latency, on `wgmma` and TMA, for sm_90a only. Each
    /// warpgroup holds the scores of all its keys at once.
    SmallAtOnce(AtOncePlan),
    /// Backward.
    BackwardSplit(SplitPlan),
    /// A kernel of the [ladder](crate::ladder).
    Ladder {
        /// The kernel.
        rung: RungPlan,
    },
}

/// A plan as stored in files, including plans of the former family `small`, which was split into two.
#[derive(Deserialize)]
#[serde(tag = "family", rename_all = "snake_case")]
enum Stored {
    Mma(MmaPlan),
    Wgmma(WgmmaPlan),
    SmallStreamed(StreamedPlan),
    SmallAtOnce(AtOncePlan),
    BackwardSplit(SplitPlan),
    Small(Map<String, Value>),
    Ladder { rung: RungPlan },
}

impl TryFrom<Stored> for Plan {
    type Error = serde_json::Error;

    fn try_from(stored: Stored) -> serde_json::Result<Plan> {
        Ok(match stored {
            Stored::Mma(plan) => Plan::Mma(plan),
            Stored::BackwardSplit(plan) => Plan::BackwardSplit(plan),
            Stored::Wgmma(plan) => Plan::Wgmma(plan),
            Stored::SmallStreamed(plan) => Plan::SmallStreamed(plan),
            Stored::SmallAtOnce(plan) => Plan::SmallAtOnce(plan),
            // With one stage, the former family held all keys at once.
            Stored::Small(genes) => {
                let one_stage = genes.get("stages").and_then(Value::as_u64) == Some(1);
                let genes = Value::Object(genes);
                if one_stage {
                    Plan::SmallAtOnce(serde_json::from_value(genes)?)
                } else {
                    Plan::SmallStreamed(serde_json::from_value(genes)?)
                }
            }
            Stored::Ladder { rung } => Plan::Ladder { rung },
        })
    }
}

impl Plan {
    /// Name of the family.
    pub fn family(&self) -> &'static str {
        self.of_family().map_or("ladder", |(family, _)| family.name())
    }

    /// Whether a kernel can be emitted.
    ///
    /// # Errors
    /// The first reason why no kernel can be emitted.
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
/// the problem, in which keys that no row sees cost nothing. The buffers of tensors and of the LSE have
/// exactly the size that the problem's strides span.
///
/// # Errors
///
/// When the problem is invalid, or the plan does not fit the problem or the architecture.
pub fn emit(problem: &Problem, plan: &Plan, arch: &Arch) -> Result<Program, KernelError> {
    problem.check()?;
    plan.check(problem, arch)?;
    let canonical = &*problem.canonical();
    let emitted = match plan.of_family() {
        Ok((_, plan)) => {
            let baked = plan.baked(canonical);
            plan.drafts(canonical, &baked, arch).emit().map(|(module, mut contracts)| {
                contracts.size_operands_of(problem);
                Program::new(module, contracts)
            })
        }
        Err(rung) => rung.emit(canonical, arch),
    };
    emitted.map_err(|violations| KernelError::Generator { family: plan.family(), violations })
}

/// The properties on which the code for a problem depends, and the launch contracts, without the code that
/// [`emit`] would make. Code that was emitted for equal [`Baked`] and an equal plan runs with these
/// contracts.
///
/// # Errors
///
/// As [`emit`], and for kernels of the [ladder](crate::ladder).
pub fn bind(problem: &Problem, plan: &Plan, arch: &Arch) -> Result<(Baked, Contracts), KernelError> {
    problem.check()?;
    plan.check(problem, arch)?;
    let canonical = &*problem.canonical();
    let (_, plan) = plan.of_family().map_err(KernelError::ladder)?;
    let baked = plan.baked(canonical);
    let mut contracts = plan.drafts(canonical, &baked, arch).into_contracts();
    contracts.size_operands_of(problem);
    Ok((baked, contracts))
}
