//! Which plans are tried, and in which order.

use attend::Order;
use kernels::backward::split::SplitPlan;
use kernels::forward::decode::DecodePlan;
use kernels::forward::mma::{MmaPlan, QueryHome};
use kernels::select::{self, Source, TunedTable};
use kernels::{Arch, KernelError, Plan};
use problem::Problem;
use tile::CopyMode;

/// Where a plan came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PlanSource {
    /// The caller gave the plan. It is tried alone, and its failure is returned.
    Given,
    /// A row of the tuned table, measured on a device: for this problem or the nearest one.
    Tuned,
    /// A plan whose time for this problem is predicted.
    Predicted,
    /// The default plan of a family for the problem and the device.
    Default,
    /// A small `mma` plan that every driver compiles without spilling.
    Safe,
}

/// A plan to try.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Candidate {
    pub plan: Plan,
    pub source: PlanSource,
}

/// The plans for a problem, best first, and the reasons in words for the first plan.
///
/// # Errors
/// When the problem is not valid, or no family supports it.
pub(super) fn candidates(
    problem: &Problem,
    device: &select::Device<'_>,
    given: Option<&Plan>,
) -> Result<(Vec<Candidate>, Vec<String>), KernelError> {
    problem.check()?;
    // The default plans depend on the keys that rows see, which the canonical problem has.
    let problem = &*problem.canonical();
    let of = |plan: &Plan, source| Candidate { plan: plan.clone(), source };
    if let Some(plan) = given {
        return Ok((vec![of(plan, PlanSource::Given)], vec!["chosen: the plan that was given".to_owned()]));
    }
    let choice = select::choose(problem, device, TunedTable::builtin())?;
    let default = Plan::default_for(problem, &device.arch)?;
    let source = match choice.source {
        Source::Tuned { .. } => PlanSource::Tuned,
        Source::Predicted { .. } | Source::Swept { .. } => PlanSource::Predicted,
        Source::Default => PlanSource::Default,
    };
    let mut all = vec![of(&choice.plan, source)];
    let universal = MmaPlan::default_for(problem, &device.arch);
    let safe = Plan::Mma(safe(&universal, problem));
    for (plan, source) in [
        (default, PlanSource::Default),
        (Plan::Mma(universal), PlanSource::Default),
        (safe, PlanSource::Safe),
    ] {
        let candidate = of(&plan, source);
        let fits = candidate.plan.check(problem, &device.arch).is_ok();
        if fits && all.iter().all(|known| known.plan != candidate.plan) {
            all.push(candidate);
        }
    }
    Ok((all, choice.why))
}

/// 16 rows per warp, few keys per block, one stage: about half of the registers and a fraction of the shared
/// memory of the default.
fn safe(default: &MmaPlan, problem: &Problem) -> MmaPlan {
    MmaPlan {
        block_m: 64 / default.dim_warps,
        block_n: if problem.dtypes.v.is_fp8() { 32 } else { 16 },
        warps: 4,
        kv_warps: 1,
        dim_warps: default.dim_warps,
        stages: 1,
        products: Order::InTurn,
        resident_ctas: None,
        queries: QueryHome::Shared,
        ..default.clone()
    }
}

/// A plan for tensors at any address: a plan of the family that runs everywhere, with element copies. It is
/// the given plan if that is of the family, else the default.
pub(super) fn unaligned(plan: &Plan, problem: &Problem, arch: &Arch) -> Plan {
    if problem.pass.is_backward() {
        let plan = match plan {
            Plan::BackwardSplit(plan) => plan.clone(),
            _ => SplitPlan::default_for(&problem.canonical(), arch),
        };
        return Plan::BackwardSplit(SplitPlan { copy: CopyMode::Elements, ..plan });
    }
    let plan = match plan {
        Plan::Decode(plan) if problem.dtypes.has_narrow_cache() || problem.pass.invariant().is_some() => {
            return Plan::Decode(DecodePlan { copy: CopyMode::Elements, ..plan.clone() });
        }
        Plan::Mma(plan) => plan.clone(),
        _ => MmaPlan::default_for(&problem.canonical(), arch),
    };
    Plan::Mma(MmaPlan { copy: CopyMode::Elements, ..plan })
}

#[cfg(test)]
mod tests {
    use super::*;
    use problem::program::library;
    use problem::{Band, DType, DTypes, ElementType, Layout, Pass, Program, Table};

    const H200: select::Device<'_> = select::Device { name: "NVIDIA H200", arch: Arch::SM_90 };

    #[test]
    fn every_candidate_fits_every_problem_of_the_family() {
        for arch in Arch::ALL {
            for dim in [8, 40, 59, 64, 96, 128, 192, 256, 320, 512] {
                for mask in Band::NAMED {
                    let problem = Problem::new(2, 4, 300, dim, DType::Bf16).with_band(mask).with_lse(true);
                    let device = select::Device { name: "unknown", arch };
                    let (all, _) = candidates(&problem, &device, None).unwrap();
                    assert!((1..=4).contains(&all.len()));
                    for candidate in all {
                        assert_eq!(candidate.plan.check(&problem, &arch), Ok(()), "{candidate:?}");
                        assert_eq!(candidate.plan.alignment(), if dim % 8 == 0 { 16 } else { 2 });
                        let unaligned = unaligned(&candidate.plan, &problem, &arch);
                        assert_eq!(unaligned.check(&problem, &arch), Ok(()));
                        assert_eq!(unaligned.alignment(), 2);
                        let program = kernels::emit(&problem, &unaligned, &arch).unwrap();
                        assert_eq!(
                            program.contracts.buffers.last().unwrap().kind,
                            problem::Operand::Lse.into()
                        );
                    }
                }
            }
        }
    }

    /// A call with equal bits has plans of one order of sums alone, also for tensors at any address.
    #[test]
    fn invariant_calls_have_one_order_of_sums() {
        let problem = Problem::new(2, 4, 300, 64, DType::Bf16).with_invariant(problem::Invariant::Batch);
        let (all, _) = candidates(&problem, &H200, None).unwrap();
        let [Candidate { plan: plan @ Plan::Decode(decode), .. }] = &all[..] else { panic!("{all:?}") };
        let unaligned = unaligned(plan, &problem, &H200.arch);
        assert_eq!(unaligned, Plan::Decode(DecodePlan { copy: CopyMode::Elements, ..decode.clone() }));
        assert_eq!(unaligned.check(&problem, &H200.arch), Ok(()));
    }

    /// The backward pass has plans of its own, also for tensors at any address.
    #[test]
    fn gradients_have_candidates_on_every_architecture() {
        for arch in Arch::ALL {
            for dim in [8, 59, 64, 128, 256] {
                let problem = Problem::new(2, 4, 300, dim, DType::Bf16).with_pass(Pass::DETERMINISTIC);
                let device = select::Device { name: "unknown", arch };
                let (all, _) = candidates(&problem, &device, None).unwrap();
                for candidate in all {
                    assert_eq!(candidate.plan.check(&problem, &arch), Ok(()), "{candidate:?}");
                    let unaligned = unaligned(&candidate.plan, &problem, &arch);
                    assert_eq!(unaligned.check(&problem, &arch), Ok(()));
                    assert_eq!(unaligned.alignment(), 2);
                }
            }
        }
    }

    /// A bias that is loaded by TMA must be aligned, and other tables of the problem need not be. A bias at
    /// another address gets a plan that passes the check, too.
    #[test]
    fn tables_that_are_loaded_by_tma_must_be_aligned() {
        let mut problem = Problem::new(1, 16, 4096, 64, DType::Bf16).with_layout(Layout::Bshd);
        let slopes = Table::dense(ElementType::F32, &[1, 16]);
        let bias = Table::dense(ElementType::Bf16, &[1, 16, 4096, 4096]);
        let score = library::alibi(0) + (library::bias(1) - library::score());
        problem.programs.score = Some(Program::new(&score).unwrap());
        problem.programs.tables = vec![slopes, bias];
        let plan = Plan::default_for(&problem, &Arch::SM_90).unwrap();
        assert_eq!(plan.aligned_tables(&problem), [1]);
        let unaligned = plan.with_unaligned_tables();
        assert_eq!(unaligned.check(&problem, &Arch::SM_90), Ok(()));
        assert!(unaligned.aligned_tables(&problem).is_empty());
    }

    #[test]
    fn a_given_plan_is_tried_alone() {
        let problem = Problem::mission();
        let plan = Plan::default_for(&problem, &Arch::SM_90).unwrap();
        let (all, _) = candidates(&problem, &H200, Some(&plan)).unwrap();
        assert_eq!(all, [Candidate { plan, source: PlanSource::Given }]);
    }

    /// f32 runs in `mma`, and 8-bit inputs with an output in f32 in `wgmma`, on an architecture that has it.
    #[test]
    fn outputs_in_f32_have_a_default_plan() {
        for (types, family) in [("f32", "mma"), ("e4m3:f32", "wgmma")] {
            let problem = Problem::new(1, 4, 300, 64, types.parse::<DTypes>().unwrap());
            let (all, _) = candidates(&problem, &H200, None).unwrap();
            assert_eq!(all[0].plan.family(), family, "{types}");
        }
    }

    #[test]
    fn what_no_family_computes_is_refused_with_what_is_accepted() {
        let refuse = |problem: Problem| candidates(&problem, &H200, None).unwrap_err().to_string();
        let wide = Problem { head_dim_v: 520, ..Problem::new(1, 1, 8, 64, DType::F16) };
        let wide = refuse(wide.with_layout(Layout::Bhsd));
        assert!(wide.contains("invalid value '520' for head_dim_v: expected 1 to 512"), "{wide}");
        assert!(
            refuse(Problem::new(1, 1, 8, 600, DType::F16))
                .contains("invalid value '600' for head_dim: expected 1 to 576")
        );
    }
}
