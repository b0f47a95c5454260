//! The full study of one kernel: correctness check, resources, predicted times and diagnosis.

use emu::trace::{CtaTrace, sample_ctas};
use emu::{Buffer, Checks, EmuError, Fidelity, Options, Report};
use predict::resources::{Ptxas, Resources, estimate};
use predict::{CacheState, Gpu, ModelError, Prediction, Subject, predict};
use ptx::{Access, Launch};

use crate::diagnose::{Evidence, Finding, LineCost, SourceCost, diagnose};
use crate::forecast::architecture;
use crate::gate::{CheckReport, GateError, Settings, check_kernel, contents};
use crate::launchfile::Bound;
use crate::sources::Sources;

/// The results of [`study()`].
pub struct Study {
    pub bound: Bound,
    /// The gate's verdict.
    pub check: CheckReport,
    /// Registers, spills and shared memory, from ptxas where it is present.
    pub resources: Option<Resources>,
    /// One predicted time per requested machine, or the reason why there is none.
    pub predictions: Vec<Result<Prediction, ModelError>>,
    /// Root causes, by the first machine's prediction.
    pub findings: Vec<Finding>,
    pub lines: Vec<LineCost>,
    /// The cost of source lines, where the PTX has line information.
    pub source_lines: Vec<SourceCost>,
    /// The PTX text that line numbers refer to, with its source.
    pub sources: Sources,
}

impl Study {
    /// The prediction for the first requested machine.
    pub fn prediction(&self) -> Option<&Prediction> {
        self.predictions.first().and_then(|p| p.as_ref().ok())
    }
}

/// Checks, predicts and diagnoses a kernel. `sources` has the PTX that line numbers refer to; `None` prints
/// the module. A kernel that failed the check is predicted and diagnosed too, because it ran once.
///
/// # Errors
/// When the kernel cannot be launched.
pub fn study(
    bound: Bound,
    sources: Option<Sources>,
    settings: &Settings,
    machines: &[Gpu],
    ptxas: Option<&Ptxas>,
) -> Result<Study, GateError> {
    let check = check_kernel(&bound, settings)?;
    let launch = bound.kernel.launch;
    Ok(analyse(bound, &launch, sources, check, machines, ptxas))
}

/// Predicts and diagnoses a kernel that was checked already. The prediction is for `launch`, which may have
/// more CTAs of the recorded kind (more heads) than the run had.
pub fn analyse(
    bound: Bound,
    launch: &Launch,
    sources: Option<Sources>,
    check: CheckReport,
    machines: &[Gpu],
    ptxas: Option<&Ptxas>,
) -> Study {
    let kernel = &bound.kernel;
    let sources = sources.unwrap_or_else(|| kernel.module.to_string().into());
    let resources = machines.first().and_then(|gpu| {
        let assembled =
            ptxas.and_then(|p| p.resources(sources.ptx(), &architecture(gpu.sm), &kernel.entry).ok());
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
    let evidence = evidence.in_sources(&sources);
    let (findings, lines, source_lines) =
        (diagnose(&evidence), evidence.line_costs(), evidence.source_costs());
    Study { check, resources, predictions, findings, lines, source_lines, sources, bound }
}

fn subject<'a>(
    bound: &'a Bound,
    launch: &'a Launch,
    traces: &'a [CtaTrace],
    resources: &'a Resources,
) -> Subject<'a> {
    let kernel = &bound.kernel;
    let times = launch.grid.count() / kernel.launch.grid.count().max(1);
    // A buffer that is both read and written moves twice.
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

/// Like [`record`], but only for times: matrix products are not computed, buffers hold zeros, and a CTA that
/// takes its tiles from a counter gets its share. The kernel's control flow must not depend on data, or zeros
/// must be typical.
///
/// # Errors
/// When the kernel cannot be launched or does not end.
pub fn sketch(bound: &Bound, count: u64) -> Result<Report, EmuError> {
    let mut buffers: Vec<Buffer> = bound.kernel.buffers.iter().map(|b| Buffer::zeroed(b.bytes)).collect();
    run_some(bound, count, Fidelity::Sketch, Options::default().step_limit, &mut buffers)
}

/// Runs and records a few CTAs, spread evenly over the grid, and no others. A forecast needs no more.
///
/// # Errors
/// When the kernel cannot be launched or does not end.
pub fn record(bound: &Bound, count: u64) -> Result<Report, EmuError> {
    let mut buffers: Vec<Buffer> = contents(bound, 1).iter().map(|data| Buffer::from_bytes(data)).collect();
    run_some(bound, count, Fidelity::default(), RECORDED_STEPS, &mut buffers)
}

/// Warp instructions that a recorded CTA may issue. A trace keeps the addresses of each, so an endless loop
/// would use up all memory.
pub const RECORDED_STEPS: u64 = 8_000_000;

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

/// Predicts the time of `launch` from recorded CTAs of a kernel that does the same work per CTA.
///
/// # Errors
/// When the machine cannot run the kernel.
pub fn forecast(
    bound: &Bound,
    launch: &Launch,
    traces: &[CtaTrace],
    resources: &Resources,
    gpu: &Gpu,
) -> Result<Prediction, ModelError> {
    predict(&subject(bound, launch, traces, resources), gpu)
}
