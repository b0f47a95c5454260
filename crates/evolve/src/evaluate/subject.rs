//! Turns a candidate into kernels with buffer roles, or into a fault.

use kernels::select::Shape;
use kernels::{Arch, KernelError, Plan, emit};
use problem::{Operand, Problem, Tensor};

use crate::{Candidate, KernelText, Language, Stage};
use check::launchfile::{Bound, LaunchSpec, Role};
use host::tools::{NvrtcError, compile_cuda};
use ledger::{Reason, Rejection};

/// Why a candidate is rejected, without the stage.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{reason}: {detail}")]
pub struct TaskFault {
    pub reason: Reason,
    pub detail: String,
}

impl TaskFault {
    pub fn new(reason: Reason, detail: impl ToString) -> TaskFault {
        TaskFault { reason, detail: detail.to_string() }
    }

    /// The rejection at a stage.
    pub fn at(self, stage: Stage) -> Rejection {
        Rejection { stage, reason: self.reason, detail: self.detail }
    }
}

/// Number of CTAs that a launch for any problem may have.
const FEW_CTAS: u64 = 4096;

/// The kernels of a candidate on a device of this architecture.
///
/// # Errors
/// A fault with the reason `plan`, `emit`, `source` (it does not compile or is not valid PTX), `launch` (its
/// launch file), or `problem` (it computes a different one).
pub fn bound(candidate: &Candidate, problem: &Problem, arch: &Arch) -> Result<Bound, TaskFault> {
    match candidate {
        Candidate::Gpu(plan) => of_plan(plan, problem, arch),
        Candidate::Kernel(source) => of_source(source, problem, arch),
        Candidate::Cpu(_) => Err(TaskFault::new(
            Reason::Plan,
            "invalid value 'cpu' for the family of its plan: expected a family of GPU kernels",
        )),
    }
}

fn of_plan(plan: &Plan, problem: &Problem, arch: &Arch) -> Result<Bound, TaskFault> {
    plan.check(problem, arch).map_err(|error| TaskFault::new(Reason::Plan, error))?;
    let program = emit(problem, plan, arch).map_err(|error| match error {
        KernelError::Plan(error) => TaskFault::new(Reason::Plan, error),
        error => TaskFault::new(Reason::Emit, error),
    })?;
    Ok(Bound::of_program(program, problem))
}

fn of_source(source: &KernelText, problem: &Problem, arch: &Arch) -> Result<Bound, TaskFault> {
    source.check_lengths().map_err(|error| TaskFault::new(Reason::Source, error))?;
    // The launch file is cheaper to parse, so it comes first.
    let launch: LaunchSpec = source.launch.parse().map_err(|error| TaskFault::new(Reason::Launch, error))?;
    let found = launch.problem.as_ref().ok_or_else(|| {
        TaskFault::new(
            Reason::Problem,
            "its launch file has no problem: expected [problem] with what is to be computed",
        )
    })?;
    if Shape::of(found) != Shape::of(problem) || found.softmax_scale() != problem.softmax_scale() {
        let shape = |problem: &Problem| serde_json::json!(Shape::of(problem));
        let (found, accepted) = (shape(found), shape(problem));
        return Err(TaskFault::new(
            Reason::Problem,
            format!("invalid value '{found}' for the problem of its launch file: expected {accepted}"),
        ));
    }
    // No kernel needs more than four CTAs per output row, and running more CTAs takes minutes.
    let rows = problem.batch * problem.heads_q * problem.seq_q;
    let ctas = launch.launches.iter().map(|step| step.grid.count()).sum::<u64>();
    let most = FEW_CTAS.max(4 * rows as u64);
    if ctas > most {
        return Err(TaskFault::new(
            Reason::Launch,
            format!("invalid value '{ctas}' for the CTAs of its grid: expected at most {most}"),
        ));
    }
    let compiled;
    let text = match source.language {
        Language::Ptx => &source.text,
        Language::Cuda => {
            compiled =
                compile_cuda(&source.text, &virtual_architecture(arch)).map_err(|error| match error {
                    NvrtcError::Source(_) | NvrtcError::NoHeaders { .. } => {
                        TaskFault::new(Reason::Source, error)
                    }
                    NvrtcError::NotFound | NvrtcError::Python { .. } | NvrtcError::Load { .. } => {
                        TaskFault::new(Reason::Compiler, error)
                    }
                })?;
            &compiled
        }
    };
    let module = ptx::parse(text).map_err(|error| TaskFault::new(Reason::Source, error))?;
    let target = module.target;
    let module = module.verify().map_err(|violations| TaskFault::new(Reason::Source, violations))?;
    let module = module.for_device(arch.sm).ok_or_else(|| {
        let detail = format!(
            "invalid value '{target}' for the target of its code: expected one that sm_{} runs",
            arch.sm
        );
        TaskFault::new(Reason::Source, detail)
    })?;
    let bound = launch.bind(module).map_err(|error| TaskFault::new(Reason::Launch, error))?;
    if !bound.then.is_empty() {
        let detail =
            format!("invalid value '{}' for its number of launches: expected 1", 1 + bound.then.len());
        return Err(TaskFault::new(Reason::Launch, detail));
    }
    // A race needs these tensors.
    if let Some(missing) =
        Tensor::FORWARD.into_iter().find(|&t| !bound.roles.contains(&Role::Operand(t.into())))
    {
        let detail =
            format!("no argument is {}: expected all of q, k, v and out, and lse or not", missing.name());
        return Err(TaskFault::new(Reason::Launch, detail));
    }
    let other = bound
        .roles
        .iter()
        .position(|role| !matches!(role, Role::Operand(Operand::Tensor(_)) | Role::Operand(Operand::Lse)));
    other.map_or(Ok(()), |index| {
        let name = &bound.kernel.buffers[index].name;
        Err(TaskFault::new(
            Reason::Launch,
            format!("invalid value '{name}' for a buffer: expected q, k, v, out or lse"),
        ))
    })?;
    Ok(bound)
}

/// The architecture for which CUDA C++ is compiled, with architecture-specific features where they exist.
fn virtual_architecture(arch: &Arch) -> String {
    arch.full_target().to_string().replace("sm_", "compute_")
}

#[cfg(test)]
pub(crate) mod tests {
    use problem::DType;

    use super::*;

    /// A problem small enough for a hundred runs in the emulator.
    pub(crate) fn tiny() -> Problem {
        Problem::new(1, 1, 64, 64, DType::F16)
    }

    /// The default kernel of a problem as a proposer would submit it: text and launch file.
    pub(crate) fn as_source(problem: &Problem) -> KernelText {
        let arch = Arch::SM_80;
        let plan = kernels::Family::Mma.default_for(problem, &arch).unwrap();
        let bound = of_plan(&plan, problem, &arch).unwrap();
        let launch = bound.launch_file().unwrap();
        KernelText { language: Language::Ptx, text: bound.kernel.module.to_string(), launch }
    }

    #[test]
    fn a_kernel_as_text_is_the_kernel() {
        let (problem, arch) = (tiny(), Arch::SM_80);
        let source = as_source(&problem);
        let ours =
            of_plan(&kernels::Family::Mma.default_for(&problem, &arch).unwrap(), &problem, &arch).unwrap();
        let theirs = of_source(&source, &problem, &arch).unwrap();
        assert_eq!(theirs.roles, ours.roles);
        assert_eq!(theirs.kernel.module.to_string(), ours.kernel.module.to_string());
        assert_eq!(theirs.kernel.launch.grid, ours.kernel.launch.grid);
    }

    #[test]
    fn what_is_no_kernel_has_a_reason() {
        let (problem, arch) = (tiny(), Arch::SM_80);
        let good = as_source(&problem);
        let with = |text: &str, launch: &str| KernelText {
            text: text.into(),
            launch: launch.into(),
            ..good.clone()
        };
        let other = Problem::new(1, 2, 64, 64, DType::F16);
        let half = good.launch.replacen("[[arg]]\nrole = \"v\"\n", "", 1);
        assert_ne!(half, good.launch);
        for (source, problem, reason, said) in [
            (with("garbage", &good.launch), &problem, "source", "line 1"),
            (with(&good.text, "grid = 1"), &problem, "launch", "grid"),
            (with(&good.text, "[launch]\ngrid = [1]\n"), &problem, "problem", "has no problem"),
            (with(&good.text, &half), &problem, "launch", "parameters"),
            (good.clone(), &other, "problem", "\"heads_q\":2"),
            (with(&good.text.replace("sm_80", "sm_90a"), &good.launch), &problem, "source", "sm_90a"),
            (with(&"x".repeat((8 << 20) + 1), &good.launch), &problem, "source", "expected at most"),
            (
                with(&good.text, &good.launch.replace("grid = [", "grid = [99999999999, ")),
                &problem,
                "launch",
                "grid",
            ),
        ] {
            let fault = of_source(&source, problem, &arch).unwrap_err();
            assert!(fault.reason.name() == reason && fault.detail.contains(said), "{reason} {said}: {fault}");
        }
        // A kernel without an output, and one that reads no V: neither can be judged or raced.
        let nothing = ".version 7.4\n.target sm_80\n.address_size 64\n.visible .entry nothing(.param .u64 a, .param .u64 b, \
                       .param .u64 c)\n{\nret;\n}\n";
        let table = "[problem]\nheads_q = 1\nseq_q = 64\nhead_dim = 64\ndtype = \"f16\"\n[launch]\ngrid = [1]\nblock = [32]\n";
        for (roles, said) in
            [(["q", "k", "v"], "no [[arg]] is its output"), (["q", "k", "out"], "no argument is v")]
        {
            let args: String = roles.iter().map(|role| format!("[[arg]]\nrole = \"{role}\"\n")).collect();
            let fault = of_source(&with(nothing, &format!("{table}{args}")), &problem, &arch).unwrap_err();
            assert!(fault.reason == Reason::Launch && fault.detail.contains(said), "{said}: {fault}");
        }
        let plan = kernels::Family::Mma.default_for(&other, &arch).unwrap();
        let mut genes = serde_json::json!(plan);
        genes["block_n"] = 7.into();
        let plan = Candidate::Gpu(serde_json::from_value(genes).unwrap());
        assert_eq!(bound(&plan, &other, &arch).unwrap_err().reason, Reason::Plan);
    }
}
