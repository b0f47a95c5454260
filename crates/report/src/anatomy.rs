//! Line costs and root causes of a candidate's kernel, computed on demand by running a few of its CTAs.

use emu::trace::sample_ctas;
use emu::{Buffer, Checks, EmuError, Fidelity, Options};
use kernels::select::Shape;
use kernels::{Arch, KernelError};
use predict::resources::{Ptxas, Resources, estimate};
use predict::{Gpu, Prediction, machine};
use problem::Problem;

use check::diagnose::{Finding, LineCost};
use check::gate::{Recorded, bind, contents};
use check::launchfile::{Bound, LaunchError, LaunchSpec};
use check::study::{Diagnosis, RECORDED_STEPS, diagnose_steps, forecast_steps};
use ledger::{Candidate, KernelText, Language};
use ptx::Target;

/// A kernel's PTX with its line costs, root causes and predicted time.
#[derive(Clone, Debug)]
pub struct Anatomy {
    pub text: String,
    pub lines: Vec<LineCost>,
    /// Root causes of the kernel's time.
    pub findings: Vec<Finding>,
    /// The predicted time; `None` when the machine cannot run the kernel.
    pub prediction: Option<Prediction>,
}

/// Why a candidate cannot be analysed.
#[derive(Debug, thiserror::Error)]
pub enum AnatomyError {
    /// A plan of the native CPU kernels.
    #[error("a plan of the native CPU kernels has no PTX to show")]
    Native,
    /// The candidate is CUDA C++, which would have to be compiled first.
    #[error("the kernel is stored as CUDA C++; only PTX is shown line by line")]
    Compiled,
    /// The device is not in the time model's table.
    #[error("invalid value '{0}' for the device: expected {accepted}", accepted = machine::MACHINES.map(|gpu| gpu.name).join(", "))]
    Device(String),
    /// The generator rejects the plan.
    #[error(transparent)]
    Kernel(#[from] KernelError),
    #[error(transparent)]
    Parse(#[from] ptx::ParseError),
    /// PTX that breaks the rules.
    #[error(transparent)]
    Verify(#[from] ptx::Violations),
    /// The launch file is malformed or does not fit the PTX.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// The emulator cannot run the kernel.
    #[error(transparent)]
    Emulator(#[from] EmuError),
}

/// CTAs that are run. They are spread evenly over the grid.
const CTAS: u64 = 3;

/// Finds a machine by the name that a driver reports (`NVIDIA H200`) or by the time model's name (`h200`).
fn machine_of(device: &str) -> Option<&'static Gpu> {
    Gpu::of_device(device).or_else(|| Gpu::named(device))
}

/// Emits the kernel, runs a few CTAs, predicts the time and diagnoses.
///
/// # Errors
/// When the candidate has no PTX, or the kernel does not run.
pub fn dissect(candidate: &Candidate, shape: &Shape, device: &str) -> Result<Anatomy, AnatomyError> {
    let no_device = || AnatomyError::Device(device.to_owned());
    match candidate {
        Candidate::Cpu(_) => Err(AnatomyError::Native),
        Candidate::Kernel(KernelText { language: Language::Cuda, .. }) => Err(AnatomyError::Compiled),
        Candidate::Kernel(KernelText { language: Language::Ptx, text, launch }) => {
            let gpu = machine_of(device).ok_or_else(no_device)?;
            let bound = launch.parse::<LaunchSpec>()?.bind(ptx::parse(text)?.verify()?)?;
            examine(&bound, &bound, gpu, Fidelity::Exact, Some(text.clone()))
        }
        Candidate::Gpu(plan) => {
            let gpu = machine_of(device).ok_or_else(no_device)?;
            let arch = Arch::of(gpu.sm).ok_or_else(no_device)?;
            let arch = Arch { multiprocessors: gpu.sms, ..arch };
            let whole = bind(plan, &shape.problem(), &arch)?;
            // As in a forecast, plans that take tiles at run time need the whole grid, the others one head.
            if plan.takes_tiles() {
                return examine(&whole, &whole, gpu, Fidelity::Sketch, None);
            }
            let (p, rows) = (shape.problem(), shape.seq_q);
            let head = Problem { seq_kv: p.seq_kv, ..Problem::new(1, 1, rows, p.head_dim, p.dtypes) };
            let head = Problem { head_dim_v: p.head_dim_v, band: p.band, ..head };
            let head = bind(plan, &head.with_layout(problem::Layout::Bhsd), &arch)?;
            examine(&head, &whole, gpu, Fidelity::Exact, None)
        }
    }
}

/// Runs CTAs of `bound` and predicts the time of the launches of `whole`. `text` is the PTX source of a
/// kernel that no generator emitted.
fn examine(
    bound: &Bound,
    whole: &Bound,
    gpu: &Gpu,
    fidelity: Fidelity,
    text: Option<String>,
) -> Result<Anatomy, AnatomyError> {
    let mut buffers: Vec<Buffer> = match fidelity {
        Fidelity::Sketch => bound.kernel.buffers.iter().map(|b| Buffer::zeroed(b.bytes)).collect(),
        Fidelity::Exact => contents(bound, 1).iter().map(|data| Buffer::from_bytes(data)).collect(),
    };
    let mut recorded = Vec::new();
    for kernel in bound.steps() {
        let ctas = sample_ctas(kernel.launch.grid.count(), CTAS);
        let options = Options {
            traced_ctas: ctas.clone(),
            only: Some(ctas),
            checks: Checks { races: false, uninitialised: false, unwritten: false },
            fidelity,
            step_limit: RECORDED_STEPS,
            grid_limit: RECORDED_STEPS,
            ..Options::default()
        };
        let report = emu::run(kernel, &mut buffers.iter_mut().collect::<Vec<_>>(), &options)?;
        recorded.push(Recorded::from(report));
    }
    let text = text.unwrap_or_else(|| bound.kernel.module.to_string());
    let (target, ptxas) = (Target::of_device(gpu.sm).to_string(), Ptxas::find().ok());
    let of_step = |kernel: &ptx::Kernel| {
        let assembled = ptxas.as_ref().and_then(|p| p.resources(&text, &target, &kernel.entry).ok());
        assembled.or_else(|| estimate(&kernel.module, &kernel.entry))
    };
    let resources: Vec<Resources> = bound.steps().map_while(of_step).collect();
    let steps = forecast_steps(bound, whole, &recorded, &resources, gpu).unwrap_or_default();
    // A prediction for only some of the kernels would be wrong.
    let steps = if steps.len() == recorded.len() { steps } else { Vec::new() };
    let Diagnosis { findings, lines, .. } = diagnose_steps(bound, &recorded, &steps, &resources, None);
    Ok(Anatomy { text, lines, findings, prediction: Prediction::in_a_row(&steps) })
}

#[cfg(test)]
mod tests {
    use kernels::{Family, Plan};
    use serde_json::json;

    use super::*;
    use check::genes::with_genes;

    #[test]
    fn a_plan_is_taken_apart() {
        let problem = Problem::mission();
        let plan = Plan::default_for(&problem, &Arch::SM_89).unwrap();
        let anatomy = dissect(&Candidate::Gpu(plan), &Shape::of(&problem), "NVIDIA L4").unwrap();
        let lines = anatomy.text.lines().count();
        let share: f64 = anatomy.lines.iter().map(|l| l.share).sum();
        assert!(
            (share - 1.0).abs() < 1e-6 && anatomy.lines.iter().all(|l| (l.line as usize) <= lines),
            "{share}"
        );
        assert!(anatomy.prediction.is_some());
    }

    /// One head is recorded; the prediction and the findings are those of all eight heads.
    #[test]
    fn a_grid_is_that_of_all_heads() {
        let problem = Problem::mission();
        let plan = Family::Mma.default_for(&problem, &Arch::SM_90).unwrap();
        let genes = json!({ "block_m": 64, "block_n": 64, "warps": 4, "kv_warps": 1 });
        let plan = with_genes(&plan, &genes).unwrap();
        let anatomy = dissect(&Candidate::Gpu(plan), &Shape::of(&problem), "H200").unwrap();
        assert_eq!(anatomy.prediction.unwrap().ctas, 64);
        let small =
            anatomy.findings.iter().find(|finding| finding.name == kernels::Symptom::SmallGrid).unwrap();
        assert_eq!(small.evidence, "64 CTAs give work to 48 % of the H200's multiprocessors");
    }

    #[test]
    fn what_has_no_ptx_says_so() {
        let problem = Problem::mission();
        let shape = Shape::of(&problem);
        let native = Candidate::Cpu(cpu::CpuPlan::for_problem(&problem));
        assert!(matches!(dissect(&native, &shape, "cpu"), Err(AnatomyError::Native)));
        let plan = Candidate::Gpu(Plan::default_for(&problem, &Arch::SM_89).unwrap());
        let error = dissect(&plan, &shape, "Voodoo 2").unwrap_err().to_string();
        assert!(error.contains("Voodoo 2") && error.contains("H200"), "{error}");
        let source =
            |text: &str| KernelText { language: Language::Ptx, text: text.into(), launch: String::new() };
        assert!(dissect(&Candidate::Kernel(source("no kernel")), &shape, "h200").is_err());
        assert_eq!(machine_of("NVIDIA A100-SXM4-80GB").map(|gpu| gpu.name), Some("A100"));
        assert_eq!(machine_of("NVIDIA GeForce RTX 4090").map(|gpu| gpu.name), Some("RTX 4090"));
    }
}
