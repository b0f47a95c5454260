//! The initial candidates of a search: the tuned table, the nearest problems in the ledger, shipped plans of
//! every family, and random samples from which the time model picks; or a single plan that the user names.

use kernels::select::{Device, Shape, TunedTable, choose};
use kernels::{Arch, Family, KernelError, Plan};

use super::config::{Case, neighbours};
use super::space::Domain;
use ledger::{Candidate, MadeBy, Operator};
use problem::Tensor;

/// Number of rows of the tuned table that become seeds.
const ROWS: usize = 3;
/// Maximum distance of related problems, in powers of two.
const FARTHEST: f64 = 3.0;

/// Options of a case.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Wishes {
    /// The only seed, which is also the baseline.
    pub only: Option<Candidate>,
    /// Winners in the ledger for this and other problems.
    pub known: Vec<(Shape, Candidate)>,
    /// Held-out problems. If `None`, the neighbours on a GPU and none on a CPU.
    pub held_out: Option<Vec<Shape>>,
    /// Number of random samples.
    pub draws: usize,
}

/// The shipped plan for a problem on a GPU.
///
/// # Errors
/// When no family supports the problem.
pub fn ships(shape: &Shape, device: &str, arch: &Arch) -> Result<Candidate, KernelError> {
    let device = Device { name: device, arch: *arch };
    choose(&shape.problem(), &device, TunedTable::builtin()).map(|choice| Candidate::Gpu(choice.plan))
}

/// A case for a GPU. The baseline is the shipped plan.
///
/// # Errors
/// When no family supports the problem.
pub fn gpu(problem: &Shape, device: &str, arch: &Arch, wishes: &Wishes) -> Result<Case, KernelError> {
    let ships = |shape: &Shape| ships(shape, device, arch);
    let shipped = ships(problem)?;
    let held = wishes.held_out.clone().unwrap_or_else(|| neighbours(problem));
    let held_out = held.into_iter().filter_map(|shape| Some((shape, ships(&shape).ok()?))).collect();
    if let Some(only) = &wishes.only {
        let (baseline, seeds) = (only.clone(), Vec::new());
        return Ok(Case { problem: *problem, baseline, seeds, draws: 0, held_out, shipped: Some(shipped) });
    }
    let domain = Domain::Gpu(problem.problem(), *arch);
    let mut seeds = Vec::new();
    let rows = TunedTable::builtin().rows().iter().filter(|row| row.sm == arch.sm);
    let rows = rows.map(|row| (row.problem, Candidate::Gpu(row.plan.clone())));
    nearest(problem, rows, ROWS, "tuned", &mut seeds);
    nearest(problem, wishes.known.iter().cloned(), ROWS, "ledger", &mut seeds);
    let defaults =
        Family::ALL.into_iter().filter_map(|family| family.default_for(&problem.problem(), arch).ok());
    seeds.extend(defaults.map(|plan: Plan| (Operator::Seed.with("default"), Candidate::Gpu(plan))));
    let seeds = distinct(seeds, &shipped, &domain);
    Ok(Case { problem: *problem, baseline: shipped, seeds, draws: wishes.draws, held_out, shipped: None })
}

/// A case for this machine's processor. The baseline is the plan that calls use: the kept one, or the
/// default. Unless asked for, nothing is held out: calls of other problems do not use the plan that is kept.
pub fn cpu(problem: &Shape, wishes: &Wishes) -> Case {
    let ships = |shape: &Shape| Candidate::Cpu(cpu::kept::chosen(&shape.problem(), cpu::threads()).plan);
    let shipped = ships(problem);
    let held_out = wishes.held_out.iter().flatten();
    let held_out = held_out.map(|shape| (*shape, ships(shape))).collect();
    let baseline = wishes.only.clone().unwrap_or_else(|| shipped.clone());
    let mut seeds = Vec::new();
    if wishes.only.is_none() {
        nearest(problem, wishes.known.iter().cloned(), ROWS, "ledger", &mut seeds);
        seeds = distinct(seeds, &baseline, &Domain::Cpu(problem.problem()));
    }
    let shipped = wishes.only.is_some().then_some(shipped);
    Case { problem: *problem, baseline, seeds, draws: 0, held_out, shipped }
}

/// Adds the plans of the nearest problems to the seeds.
fn nearest(
    problem: &Shape,
    known: impl Iterator<Item = (Shape, Candidate)>,
    most: usize,
    from: &str,
    seeds: &mut Vec<(MadeBy, Candidate)>,
) {
    // A kernel from another source computes only its own problem.
    let known = known.filter(|(shape, plan)| shape == problem || !matches!(plan, Candidate::Kernel(_)));
    let near = known.filter_map(|(shape, plan)| Some((apart(problem, &shape)?, plan)));
    let mut near: Vec<(f64, Candidate)> = near.filter(|(distance, _)| *distance <= FARTHEST).collect();
    near.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut taken = Vec::new();
    for (_, plan) in near {
        if taken.len() < most && !taken.contains(&plan) {
            taken.push(plan);
        }
    }
    seeds.extend(taken.into_iter().map(|plan| (Operator::Seed.with(from), plan)));
}

/// The distance of two problems in powers of two; `None` when their kernels are not interchangeable.
fn apart(a: &Shape, b: &Shape) -> Option<f64> {
    let alike = (a.head_dim, a.head_dim_v, a.mask) == (b.head_dim, b.head_dim_v, b.mask)
        && Tensor::FORWARD.map(|t| a.dtypes.of(t).bytes()) == Tensor::FORWARD.map(|t| b.dtypes.of(t).bytes());
    let twice = |a: usize, b: usize| (a.max(1) as f64 / b.max(1) as f64).log2().abs();
    let tiles = |s: &Shape| s.batch * s.heads_q * s.seq_q.div_ceil(64);
    let group = |s: &Shape| s.heads_q / s.heads_kv.max(1);
    alike.then(|| {
        twice(tiles(a), tiles(b))
            + twice(a.seq_kv, b.seq_kv)
            + 0.5 * twice(a.seq_q, b.seq_q)
            + 0.25 * twice(group(a), group(b))
    })
}

/// The seeds without duplicates and without the baseline, and only those that support the problem.
fn distinct(
    seeds: Vec<(MadeBy, Candidate)>,
    baseline: &Candidate,
    domain: &Domain,
) -> Vec<(MadeBy, Candidate)> {
    let mut kept: Vec<(MadeBy, Candidate)> = Vec::new();
    for (name, plan) in seeds {
        let known = plan == *baseline || kept.iter().any(|(_, other)| *other == plan);
        if !known && domain.check(&plan).is_ok() {
            kept.push((name, plan));
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use problem::Problem;

    use super::*;
    use crate::{KernelText, Language};

    fn mission() -> Shape {
        Shape::of(&Problem::mission())
    }

    fn foreign(text: &str) -> Candidate {
        let (text, launch) = (text.into(), String::new());
        Candidate::Kernel(KernelText { language: Language::Ptx, text, launch })
    }

    #[test]
    fn a_search_begins_with_what_others_found() {
        let longer = Shape { seq_q: 640, seq_kv: 640, ..mission() };
        let far = Shape { seq_q: 65_536, seq_kv: 65_536, ..mission() };
        let plan = |block_n| {
            let mut plan = kernels::forward::mma::MmaPlan::default_for(&Problem::mission(), &Arch::SM_90);
            (plan.block_m, plan.kv_warps, plan.stages, plan.products, plan.block_n) =
                (64, 1, 1, attend::Order::InTurn, block_n);
            Candidate::Gpu(Plan::Mma(plan))
        };
        let known = vec![
            (far, plan(32)),
            (longer, plan(48)),
            (longer, foreign("of another problem")),
            (mission(), foreign("of this one")),
        ];
        let case =
            gpu(&mission(), "NVIDIA H200", &Arch::SM_90, &Wishes { known, ..Wishes::default() }).unwrap();
        let of = |from: &str| case.seeds.iter().filter(|seed| seed.0 == Operator::Seed.with(from)).count();
        assert!(case.seeds.contains(&(Operator::Seed.with("ledger"), plan(48))), "{:?}", case.seeds);
        assert!(!case.seeds.iter().any(|seed| seed.1 == plan(32)));
        assert!(!case.seeds.iter().any(|seed| seed.1 == foreign("of another problem")));
        assert!(case.seeds.iter().any(|seed| seed.1 == foreign("of this one")));
        assert!(of("default") >= 1 && of("tuned") >= 1, "{:?}", case.seeds);
        assert!(case.seeds.iter().all(|seed| seed.1 != case.baseline));
        assert_eq!((case.held_out.len(), case.shipped), (2, None));
    }

    /// A plan for a CPU is kept for its own problem only.
    #[test]
    fn a_cpu_holds_out_only_what_is_asked_for() {
        assert!(cpu(&mission(), &Wishes::default()).held_out.is_empty());
        let asked = Shape { seq_q: 64, seq_kv: 64, ..mission() };
        let wishes = Wishes { held_out: Some(vec![asked]), ..Wishes::default() };
        assert_eq!(cpu(&mission(), &wishes).held_out.len(), 1);
    }

    #[test]
    fn one_seed_is_all_there_is() {
        let kernel = foreign("alone");
        let wishes = Wishes { only: Some(kernel.clone()), held_out: Some(Vec::new()), ..Wishes::default() };
        let case = gpu(&mission(), "NVIDIA H200", &Arch::SM_90, &wishes).unwrap();
        assert_eq!((&case.baseline, case.seeds.len(), case.held_out.len()), (&kernel, 0, 0));
        assert!(case.shipped.is_some_and(|shipped| shipped != kernel));
    }
}
