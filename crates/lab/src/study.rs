//! Everything about one kernel: check, resources, predicted times and diagnosis.

use emu::model::{CacheState, Gpu, ModelError, Prediction, Subject, predict};
use emu::resources::{Ptxas, Resources, estimate};
use emu::trace::{CtaTrace, sample_ctas};
use emu::{Buffer, Checks, EmuError, Fidelity, Options, Report};
use ptx::{Access, Launch};

use crate::diagnose::{Evidence, Finding, LineCost, diagnose};
use crate::forecast::architecture;
use crate::gate::{CheckReport, GateError, Settings, check_kernel, contents};
use crate::launchfile::Bound;

/// A kernel, studied.
pub struct Study {
    /// The kernel.
    pub bound: Bound,
    /// What the gate says.
    pub check: CheckReport,
    /// Registers, spills and shared memory; from ptxas where it is present.
    pub resources: Option<Resources>,
    /// The predicted times, one for each machine asked for; why not, otherwise.
    pub predictions: Vec<Result<Prediction, ModelError>>,
    /// Root causes, by the first machine's prediction.
    pub findings: Vec<Finding>,
    /// What each line costs.
    pub lines: Vec<LineCost>,
    /// PTX as printed, to which line numbers refer.
    pub text: String,
}

impl Study {
    /// The prediction for the first machine asked for.
    pub fn prediction(&self) -> Option<&Prediction> {
        self.predictions.first().and_then(|p| p.as_ref().ok())
    }
}

/// Checks, predicts and diagnoses. `text` is the source that line numbers refer to; the module is printed when `None`.
/// A kernel that failed is predicted and diagnosed too, since it ran once.
///
/// # Errors
/// When the kernel cannot be launched.
pub fn study(
    bound: Bound,
    text: Option<String>,
    settings: &Settings,
    machines: &[Gpu],
    ptxas: Option<&Ptxas>,
) -> Result<Study, GateError> {
    let check = check_kernel(&bound, settings)?;
    let launch = bound.kernel.launch;
    Ok(analyse(bound, &launch, text, check, machines, ptxas))
}

/// Predicts and diagnoses a kernel that was checked already. `launch` is the one to predict for: it may have more CTAs of the kind
/// that were recorded (more heads) than the kernel was run with.
pub fn analyse(
    bound: Bound,
    launch: &Launch,
    text: Option<String>,
    check: CheckReport,
    machines: &[Gpu],
    ptxas: Option<&Ptxas>,
) -> Study {
    let kernel = &bound.kernel;
    let text = text.unwrap_or_else(|| kernel.module.to_string());
    let resources = machines.first().and_then(|gpu| {
        let assembled = ptxas.and_then(|p| p.resources(&text, &architecture(gpu.sm), &kernel.entry).ok());
        assembled.or_else(|| estimate(&kernel.module, &kernel.entry))
    });
    let predictions: Vec<_> = match &resources {
        Some(resources) if !check.traces.is_empty() => {
            machines.iter().map(|gpu| forecast(&bound, launch, &check.traces, resources, gpu)).collect()
        }
        _ => Vec::new(),
    };
    let prediction = predictions.first().and_then(|p| p.as_ref().ok());
    let evidence = Evidence::new(kernel, &check.counters, &check.traces, prediction, resources.as_ref());
    let (findings, lines) = (diagnose(&evidence), evidence.line_costs());
    Study { check, resources, predictions, findings, lines, text, bound }
}

fn subject<'a>(
    bound: &'a Bound,
    launch: &'a Launch,
    traces: &'a [CtaTrace],
    resources: &'a Resources,
) -> Subject<'a> {
    let kernel = &bound.kernel;
    let times = launch.grid.count() / kernel.launch.grid.count().max(1);
    // A buffer both read and written passes twice.
    let passes = |access: Access| if access == Access::ReadWrite { 2 } else { 1 };
    Subject {
        module: &kernel.module,
        launch,
        traced: kernel.launch.grid,
        traces,
        resources,
        footprint: times * kernel.buffers.iter().map(|b| b.bytes as u64 * passes(b.access)).sum::<u64>(),
        cache: CacheState::Warm,
    }
}

/// As [`record`] for kernels that nothing but time is wanted of: products of matrices are not computed, buffers hold zeros, and a
/// CTA that takes its tiles from a counter is given its share. Their control flow must not depend on data, or as it does on zeros.
///
/// # Errors
/// When the kernel cannot be launched or does not end.
pub fn sketch(bound: &Bound, count: u64) -> Result<Report, EmuError> {
    let mut buffers: Vec<Buffer> = bound.kernel.buffers.iter().map(|b| Buffer::zeroed(b.bytes)).collect();
    run_some(bound, count, Fidelity::Sketch, Options::default().step_limit, &mut buffers)
}

/// Records CTAs spread evenly over a kernel's grid, and runs no others: what a forecast needs where no check is asked for.
///
/// # Errors
/// When the kernel cannot be launched or does not end.
pub fn record(bound: &Bound, count: u64) -> Result<Report, EmuError> {
    let mut buffers: Vec<Buffer> = contents(bound, 1).iter().map(|data| Buffer::from_bytes(data)).collect();
    run_some(bound, count, Fidelity::default(), RECORDED_STEPS, &mut buffers)
}

/// Warp instructions that a CTA which is recorded may issue: each keeps its addresses, so what never ends would take all memory.
pub(crate) const RECORDED_STEPS: u64 = 8_000_000;

fn run_some(
    bound: &Bound,
    count: u64,
    fidelity: Fidelity,
    step_limit: u64,
    buffers: &mut [Buffer],
) -> Result<Report, EmuError> {
    let ctas = sample_ctas(bound.kernel.launch.grid.count(), count);
    let checks = Checks { races: false, uninitialised: false, unwritten: false };
    let options = Options {
        traced_ctas: ctas.clone(),
        only: Some(ctas),
        checks,
        fidelity,
        step_limit,
        ..Options::default()
    };
    emu::run(&bound.kernel, &mut buffers.iter_mut().collect::<Vec<_>>(), &options)
}

/// Predicts the time of `launch` from CTAs recorded from a kernel of the same work.
///
/// # Errors
/// When the machine cannot run it.
pub fn forecast(
    bound: &Bound,
    launch: &Launch,
    traces: &[CtaTrace],
    resources: &Resources,
    gpu: &Gpu,
) -> Result<Prediction, ModelError> {
    predict(&subject(bound, launch, traces, resources), gpu)
}
