//! The full study of one kernel: correctness check, resources, predicted times and diagnosis.

use emu::trace::{CtaTrace, sample_ctas};
use emu::{Buffer, Checks, EmuError, Fidelity, HazardKind, Options};
use predict::resources::{Ptxas, Resources, estimate};
use predict::{CacheState, Gpu, ModelError, Prediction, Subject, predict};
use ptx::{Access, BufferSpec, Kernel, Launch, Target};

use crate::diagnose::{Evidence, Finding, LineCost, LoopCost, SourceCost, diagnose, loops};
use crate::gate::{CheckReport, GateError, Recorded, Settings, check_kernel, contents};
use crate::launchfile::Bound;
use crate::sources::Sources;

/// The results of [`study()`].
pub struct Study {
    pub bound: Bound,
    /// The gate's verdict.
    pub check: CheckReport,
    /// Registers, spills and shared memory of the first kernel, from ptxas if it is present.
    pub resources: Option<Resources>,
    /// One predicted time of all kernels per requested machine, or the reason why there is none.
    pub predictions: Vec<Result<Prediction, ModelError>>,
    /// Root causes, by the first machine's prediction.
    pub findings: Vec<Finding>,
    pub lines: Vec<LineCost>,
    /// The loops, the most expensive first; empty without a prediction.
    pub loops: Vec<LoopCost>,
    /// The cost of source lines, if the PTX has line information.
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

/// Checks, predicts and diagnoses a program. `sources` has the PTX to which line numbers refer; `None` prints
/// the module. A program that failed the check is also predicted and diagnosed if all its kernels ran.
///
/// # Errors
/// When a kernel cannot be launched.
pub fn study(
    bound: Bound,
    sources: Option<Sources>,
    settings: &Settings,
    machines: &[Gpu],
    ptxas: Option<&Ptxas>,
) -> Result<Study, GateError> {
    let check = check_kernel(&bound, settings)?;
    Ok(analyse(bound, None, sources, check, machines, ptxas))
}

/// Predicts and diagnoses a program that was already checked. The prediction is for the launches of `whole`,
/// which may have more CTAs of the recorded kind (more heads) than the run had; `None` means the program
/// itself.
pub fn analyse(
    bound: Bound,
    whole: Option<&Bound>,
    sources: Option<Sources>,
    check: CheckReport,
    machines: &[Gpu],
    ptxas: Option<&Ptxas>,
) -> Study {
    let sources = sources.unwrap_or_else(|| bound.kernel.module.to_string().into());
    let of_step = |kernel: &Kernel| {
        let gpu = machines.first()?;
        let assembled = ptxas.and_then(|p| {
            p.resources(sources.ptx(), &Target::of_device(gpu.sm).to_string(), &kernel.entry).ok()
        });
        assembled.or_else(|| estimate(&kernel.module, &kernel.entry))
    };
    let resources: Vec<Resources> = bound.steps().map_while(of_step).collect();
    let steps: Vec<_> = if resources.len() == bound.steps().count() && check.recorded.len() == resources.len()
    {
        let whole = whole.unwrap_or(&bound);
        machines.iter().map(|gpu| forecast_steps(&bound, whole, &check.recorded, &resources, gpu)).collect()
    } else {
        Vec::new()
    };
    let first = steps.first().and_then(|p| p.as_deref().ok()).unwrap_or_default();
    let Diagnosis { findings, lines, loops, source_lines } =
        diagnose_steps(&bound, &check.recorded, first, &resources, Some(&sources));
    let total = |steps: Result<Vec<Prediction>, ModelError>| {
        steps.map(|steps| Prediction::in_a_row(&steps)).transpose()
    };
    let predictions = steps.into_iter().filter_map(total).collect();
    let resources = resources.into_iter().next();
    Study { check, resources, predictions, findings, lines, loops, source_lines, sources, bound }
}

/// Root causes and costs of lines.
#[derive(Clone, Debug, Default)]
pub struct Diagnosis {
    /// Root causes, the largest expected gain first.
    pub findings: Vec<Finding>,
    /// The cost of PTX lines.
    pub lines: Vec<LineCost>,
    /// The loops, the most expensive first; empty without a prediction.
    pub loops: Vec<LoopCost>,
    /// The cost of source lines; empty without line information.
    pub source_lines: Vec<SourceCost>,
}

/// Diagnoses a program's kernels. `predictions` and `resources` are those of each kernel, or empty. A
/// finding's share and gain are those of the whole program.
pub fn diagnose_steps(
    bound: &Bound,
    recorded: &[Recorded],
    predictions: &[Prediction],
    resources: &[Resources],
    sources: Option<&Sources>,
) -> Diagnosis {
    let mut diagnosis = Diagnosis::default();
    let issues = |r: &Recorded| r.counters.instructions.iter().map(|c| c.issues as f64).sum::<f64>();
    let (all_us, all_issues): (f64, f64) =
        (predictions.iter().map(|p| p.us).sum(), recorded.iter().map(issues).sum::<f64>().max(1.0));
    for (at, (kernel, record)) in bound.steps().zip(recorded).enumerate() {
        let prediction = predictions.get(at);
        let evidence = Evidence::new(kernel, &record.counters, &record.traces, prediction, resources.get(at));
        let evidence = match sources {
            Some(sources) => evidence.in_sources(sources),
            None => evidence,
        };
        let of_issues = issues(record).max(1.0) / all_issues;
        let part = prediction.map_or(of_issues, |p| p.us / all_us);
        diagnosis.findings.extend(diagnose(&evidence).into_iter().map(|finding| finding.within(part)));
        let within = |cost: LineCost| LineCost {
            share: cost.share * of_issues,
            stall: cost.stall.map(|stall| stall * part),
            ..cost
        };
        diagnosis.loops.extend(loops(&evidence).into_iter().map(|l| LoopCost { stall: l.stall * part, ..l }));
        diagnosis.lines.extend(evidence.line_costs().into_iter().map(within));
        let source_costs = evidence.source_costs().into_iter();
        diagnosis.source_lines.extend(source_costs.map(|l| SourceCost { cost: within(l.cost), ..l }));
    }
    diagnosis.findings.sort_by(|a, b| b.expected_gain.total_cmp(&a.expected_gain));
    diagnosis.loops.sort_by(|a, b| b.stall.total_cmp(&a.stall));
    diagnosis
}

fn subject<'a>(
    kernel: &'a Kernel,
    launch: &'a Launch,
    traces: &'a [CtaTrace],
    resources: &'a Resources,
) -> Subject<'a> {
    let times = launch.grid.count() / kernel.launch.grid.count().max(1);
    // A buffer that is both read and written moves twice.
    let passes = |access: Access| if access == Access::ReadWrite { 2 } else { 1 };
    let used = kernel.buffers.iter().enumerate().filter(|(index, _)| kernel.uses(*index));
    Subject {
        module: &kernel.module,
        launch,
        traced: kernel.launch.grid,
        traces,
        resources,
        footprint: times * used.map(|(_, b)| b.bytes as u64 * passes(b.access)).sum::<u64>(),
        cache: CacheState::Warm,
    }
}

/// Like [`record`], but only for times: matrix products are not computed, buffers hold zeros, and a CTA that
/// takes its tiles from a counter gets its share. The control flow of the kernels must not depend on data, or
/// zeros must be typical data.
///
/// # Errors
/// When a kernel cannot be launched or does not end.
pub fn sketch(bound: &Bound, count: u64) -> Result<Vec<Recorded>, RecordError> {
    let mut buffers: Vec<Buffer> = bound.kernel.buffers.iter().map(|b| Buffer::zeroed(b.bytes)).collect();
    run_some(bound, count, Fidelity::Sketch, Options::default().step_limit, &mut buffers)
}

/// Runs and records a few CTAs of each kernel, spread evenly over the grid, and no other CTAs. A forecast
/// needs no more.
///
/// # Errors
/// When a kernel cannot be launched or does not end.
pub fn record(bound: &Bound, count: u64) -> Result<Vec<Recorded>, RecordError> {
    let mut buffers: Vec<Buffer> = contents(bound, 1).iter().map(|data| Buffer::from_bytes(data)).collect();
    run_some(bound, count, Fidelity::default(), RECORDED_STEPS, &mut buffers)
}

/// Why CTAs of a kernel could not be recorded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The emulator cannot run the kernel.
    #[error(transparent)]
    Emulator(#[from] EmuError),
    /// Threads of a CTA wait for each other forever, so that the record has no end.
    #[error("{0}")]
    Deadlock(String),
}

/// The buffer of block lists ([`kernels::forward::Visits`]).
const LISTS: &str = kernels::forward::BLOCK_LISTS;

/// Limit of warp instructions of a recorded CTA. A trace stores the addresses of each instruction, so an
/// endless loop would use up all memory.
pub const RECORDED_STEPS: u64 = 8_000_000;

fn run_some(
    bound: &Bound,
    count: u64,
    fidelity: Fidelity,
    step_limit: u64,
    buffers: &mut [Buffer],
) -> Result<Vec<Recorded>, RecordError> {
    let of_step = |kernel: &Kernel| {
        let ctas = sample_ctas(kernel.launch.grid.count(), count);
        // The blocks that a CTA of the next kernel visits depend on all lists.
        let lists = |b: &BufferSpec| b.name == LISTS && b.access != Access::Read;
        let writes_lists = kernel.buffers.iter().any(lists);
        let checks = Checks { races: false, uninitialised: false, unwritten: false };
        let options = Options {
            traced_ctas: ctas.clone(),
            only: (!writes_lists).then_some(ctas),
            checks,
            fidelity,
            step_limit,
            cooperative: bound.is_cooperative(0),
            ..Options::default()
        };
        let mut handles: Vec<&mut Buffer> = buffers.iter_mut().collect();
        let report = emu::run(kernel, &mut handles, &options)?;
        match report.hazards.iter().find(|hazard| hazard.kind == HazardKind::Deadlock) {
            Some(hazard) => Err(RecordError::Deadlock(hazard.to_string())),
            None => Ok(Recorded::from(report)),
        }
    };
    bound.steps().map(of_step).collect()
}

/// Predicts the time of `launch` from recorded CTAs of a kernel that does the same work per CTA.
///
/// # Errors
/// When the machine cannot run the kernel.
pub fn forecast(
    kernel: &Kernel,
    launch: &Launch,
    traces: &[CtaTrace],
    resources: &Resources,
    gpu: &Gpu,
) -> Result<Prediction, ModelError> {
    predict(&subject(kernel, launch, traces, resources), gpu)
}

/// Predicts the time of each kernel of `whole` from recorded CTAs of the kernels of `bound`, which do the
/// same work per CTA.
///
/// # Errors
/// When the machine cannot run a kernel.
pub fn forecast_steps(
    bound: &Bound,
    whole: &Bound,
    recorded: &[Recorded],
    resources: &[Resources],
    gpu: &Gpu,
) -> Result<Vec<Prediction>, ModelError> {
    let steps = bound.steps().zip(whole.steps()).zip(recorded.iter().zip(resources));
    let of_step = |((kernel, whole), (record, resources)): ((&Kernel, &Kernel), (&Recorded, &Resources))| {
        forecast(kernel, &whole.launch, &record.traces, resources, gpu)
    };
    steps.map(of_step).collect()
}
