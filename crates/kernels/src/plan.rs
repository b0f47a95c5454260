//! Plans are checked, bound and emitted as their families say.

use problem::{PassKind, Problem};

use crate::family::FamilyPlan;
use crate::{Arch, Baked, Contracts, Family, KernelError, Plan, PlanError, Program, draft};

impl Plan {
    /// Name of the family.
    pub fn family(&self) -> &'static str {
        self.of_family().0.name()
    }

    /// The pass that the plan's family computes.
    pub fn pass(&self) -> PassKind {
        self.of_family().0.pass()
    }

    fn genes(&self) -> &dyn FamilyPlan {
        self.of_family().1
    }

    /// Rows and keys of a tile.
    pub fn tile(&self) -> [u32; 2] {
        self.genes().tile()
    }

    /// Whether CTAs take tiles at run time, so that the work of a CTA depends on the whole grid.
    pub fn takes_tiles(&self) -> bool {
        self.genes().takes_tiles()
    }

    /// Maximum registers per thread of the first kernel, if the plan needs that many to be resident.
    pub fn max_registers(&self) -> Option<u32> {
        self.genes().max_registers()
    }

    /// Alignment in bytes that the plan needs of the addresses of tensors.
    pub fn alignment(&self) -> u64 {
        self.genes().alignment()
    }

    /// The tables of a problem whose addresses must be multiples of 16 bytes, because tensor maps describe
    /// them.
    pub fn aligned_tables(&self, problem: &Problem) -> Vec<u8> {
        self.genes().aligned_tables(&problem.canonical())
    }

    /// Whether a kernel can be emitted.
    ///
    /// # Errors
    /// The first reason why no kernel can be emitted.
    pub fn check(&self, problem: &Problem, arch: &Arch) -> Result<(), PlanError> {
        let problem = &*problem.canonical();
        let ((family, plan), pass) = (self.of_family(), problem.pass.kind());
        if family.pass() != pass {
            let accepted = family.pass().name();
            return Err(PlanError::unsupported(family.name(), "pass", pass.name(), accepted));
        }
        if let Some(invariant) = problem.pass.invariant()
            && family != Family::Decode
        {
            return Err(PlanError::unsupported(family.name(), "invariant", invariant, "family decode"));
        }
        family.features().check(problem, family.name())?;
        plan.check(problem, arch)
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
    let baked = plan.genes().baked(canonical);
    let emitted = draft::emit(plan.genes().drafts(canonical, &baked, arch));
    let mut program =
        emitted.map_err(|violations| KernelError::Generator { family: plan.family(), violations })?;
    program.contracts.size_operands_of(problem);
    Ok(program)
}

/// The properties on which the code for a problem depends, and the launch contracts, without the code that
/// [`emit`] would make. Code that was emitted for equal [`Baked`] and an equal plan runs with these
/// contracts.
///
/// # Errors
///
/// As [`emit`].
pub fn bind(problem: &Problem, plan: &Plan, arch: &Arch) -> Result<(Baked, Contracts), KernelError> {
    problem.check()?;
    plan.check(problem, arch)?;
    let canonical = &*problem.canonical();
    let baked = plan.genes().baked(canonical);
    let mut contracts = draft::contracts(plan.genes().drafts(canonical, &baked, arch));
    contracts.size_operands_of(problem);
    Ok((baked, contracts))
}
