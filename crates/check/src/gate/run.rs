//! Runs a kernel under the gate's settings and judges the outputs.

use std::ops::Range;

use emu::{Buffer, Counters, EmuError, HazardKind, Options, Placement, Schedule};
use kernels::Operand;
use oracle::OracleError;
use problem::{Problem, Tensor};
use ptx::{BarKind, Kernel, Launch, Op, Space, Statement};

use super::feed::{Feed, row_ranges};
use super::inputs::Style;
use super::{CheckReport, Coverage, Verdict, Watch, residency};
use crate::launchfile::{Bound, Init, Memory, Role};
use crate::reference::ReferenceError;

/// Default limit of warp instructions per CTA: ten seconds or more.
const STEP_LIMIT: u64 = 50_000_000;

/// Default limit of warp instructions per grid: some minutes on two cores. The slowest rung on the mission
/// problem takes a fiftieth. A kernel that needs more should be checked on a smaller problem.
const GRID_LIMIT: u64 = 1 << 31;

/// The most CTAs of a cluster on every GPU with clusters (CUDA C++ Programming Guide, "Thread Block
/// Clusters").
const PORTABLE_CLUSTER: u64 = 8;

/// The runs and limits of a check.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The runs: input style, seed and schedule of each.
    pub runs: Vec<(Style, u64, Schedule)>,
    /// Number of CTAs of the first run that are recorded for the time model.
    pub traced_ctas: u64,
    /// Warp instructions that a CTA may issue.
    pub step_limit: u64,
    /// Warp instructions that all CTAs of a run may issue together.
    pub grid_limit: u64,
    /// Whether a kernel with mbarriers or counted barriers also runs with each warp and each warpgroup
    /// lagging behind the others.
    pub lagging: bool,
    /// Where the variables of shared memory lie.
    pub placement: Placement,
    /// Whether shuffles and other warp collectives count as ordering memory.
    pub collectives_order: bool,
}

impl Settings {
    /// Every style once, with varying schedules and seeds, and normal draws under every schedule.
    pub fn thorough() -> Settings {
        let schedules = [Schedule::Late, Schedule::Early, Schedule::Random];
        let normal = schedules.iter().enumerate().map(|(i, &s)| (Style::Normal, i as u64 + 1, s));
        let others = Style::ALL.into_iter().filter(|&s| s != Style::Normal).enumerate();
        let others = others.map(|(i, style)| (style, i as u64 + 11, schedules[i % 3]));
        Settings {
            runs: normal.chain(others).collect(),
            traced_ctas: 4,
            step_limit: STEP_LIMIT,
            grid_limit: GRID_LIMIT,
            lagging: true,
            placement: Placement::Ptxas,
            collectives_order: false,
        }
    }

    /// Normal draws, inputs whose row max moves, and poisoned padding: for a first look, and for the many
    /// torture problems.
    pub fn quick() -> Settings {
        let runs = vec![
            (Style::Normal, 1, Schedule::Late),
            (Style::Rising, 2, Schedule::Random),
            (Style::Falling, 3, Schedule::Late),
            (Style::PoisonedPadding, 4, Schedule::Early),
        ];
        Settings { runs, lagging: false, ..Settings::thorough() }
    }
}

impl Settings {
    /// The settings with the first run only.
    pub fn first_run(&self) -> Settings {
        Settings { runs: self.runs.iter().take(1).copied().collect(), lagging: false, ..self.clone() }
    }

    /// The runs of a kernel. A phase of an mbarrier that its parity cannot tell from another one shows only
    /// when the one warp lags that takes them for each other.
    fn runs_of(&self, bound: &Bound) -> Vec<(Style, u64, Schedule)> {
        let mut runs = self.runs.clone();
        if self.lagging && waits_by_count(&bound.kernel) {
            let Launch { block, cluster, .. } = bound.kernel.launch;
            let warps = block.count().div_ceil(32) * cluster.count();
            let seeds = (0..warps).map(|w| 2 * w).chain((0..warps.div_ceil(4)).map(|g| 2 * g + 1));
            runs.extend(seeds.map(|seed| (Style::Normal, seed, Schedule::Lagging)));
        }
        runs
    }
}

/// Whether a kernel has mbarriers, or barriers for a given number of threads.
fn waits_by_count(kernel: &Kernel) -> bool {
    let mut statements = kernel.module.functions().flat_map(|f| f.body.iter().flat_map(|b| &b.statements));
    statements.any(|statement| match statement {
        Statement::Inst(inst) => match inst.op {
            Op::Mbarrier(_) => true,
            Op::Bar { kind: BarKind::Arrive, .. } => true,
            Op::Bar { kind: BarKind::Sync, .. } => inst.operands.len() > 1,
            _ => false,
        },
        Statement::Label(_) | Statement::Pragma(_) => false,
    })
}

/// Why there is no verdict.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// The launch contract and the kernel do not fit each other.
    #[error("the kernel cannot be launched: {0}")]
    Launch(EmuError),
    #[error("the oracle refuses the problem: {0}")]
    Oracle(#[from] OracleError),
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    #[error("{0}")]
    Other(String),
}

/// Checks a kernel.
///
/// # Errors
/// When the kernel cannot be launched, or the problem cannot be computed.
pub fn check_kernel(bound: &Bound, settings: &Settings) -> Result<CheckReport, GateError> {
    check_watched(bound, settings, &Watch::default())
}

/// Checks a kernel within a time limit. A check that has not ended by then is incomplete.
///
/// # Errors
/// As for [`check_kernel`].
pub fn check_watched(bound: &Bound, settings: &Settings, watch: &Watch) -> Result<CheckReport, GateError> {
    let mut check = CheckReport::empty();
    // Without a problem the inputs do not vary, so only runs with different schedules are useful.
    let counts = |&(index, (style, ..)): &(usize, &(Style, u64, Schedule))| match (&bound.problem, index) {
        (Some(_), _) | (None, 0) => true,
        (None, _) => *style == Style::Normal,
    };
    let runs = settings.runs_of(bound);
    let runs: Vec<_> = runs.iter().enumerate().filter(counts).collect();
    for (number, &(index, &(style, seed, schedule))) in runs.iter().enumerate() {
        watch.begin(number + 1, runs.len());
        let traced_ctas = match index {
            0 => emu::trace::sample_ctas(bound.kernel.launch.grid.count(), settings.traced_ctas),
            _ => Vec::new(),
        };
        let options = Options {
            seed,
            schedule,
            traced_ctas,
            step_limit: settings.step_limit,
            grid_limit: settings.grid_limit,
            placement: settings.placement,
            collectives_order: settings.collectives_order,
            stopwatch: Some(watch.stopwatch()),
            must_write: must_write(bound),
            ..Options::default()
        };
        run_once(bound, (style, seed), &options, watch, &mut check)?;
        if number + 1 == runs.len() && check.communicates && check.verdict == Verdict::Passed {
            let options = Options { traced_ctas: Vec::new(), ..options };
            if let Some(feed) = Feed::draw(bound, style, seed)
                && let Err(error) = residency::check(bound, &feed, &options, &mut check)
            {
                unfinished(error, watch, &mut check)?;
            }
        }
        if check.verdict != Verdict::Passed {
            break; // further runs would only repeat the finding
        }
    }
    check.close();
    Ok(check)
}

/// Checks a generator: one kernel for each problem. `emit` returns `None` for problems that the generator
/// does not support.
///
/// # Errors
/// As for [`check_kernel`].
pub fn check_family(
    problems: &[super::torture::Torture],
    settings: &Settings,
    emit: impl Fn(&Problem) -> Option<Bound>,
) -> Result<CheckReport, GateError> {
    let mut family = CheckReport::empty();
    for torture in problems {
        if let Some(bound) = emit(&torture.problem) {
            family.absorb(check_kernel(&bound, settings)?, torture.name);
        }
    }
    family.close();
    Ok(family)
}

fn run_once(
    bound: &Bound,
    (style, seed): (Style, u64),
    options: &Options,
    watch: &Watch,
    check: &mut CheckReport,
) -> Result<(), GateError> {
    let Some(feed) = Feed::draw(bound, style, seed) else { return Ok(()) };
    let mut buffers = feed.buffers(bound);
    let before: Vec<Vec<u8>> = buffers.iter().map(Buffer::to_bytes).collect();
    let report = match run_all(bound, &mut buffers, options, check) {
        Ok(report) => report,
        Err(error) => return unfinished(error, watch, check),
    };
    check.runs += 1;
    let cluster = bound.kernel.launch.cluster.count();
    if cluster > PORTABLE_CLUSTER {
        check.warn(format!(
            "a cluster of {cluster} CTAs needs the attribute for non-portable cluster sizes, and a GPU may have no \
             room for it"
        ));
    }
    // A wrong output that follows from an access outside its memory is not reported again.
    let lost = |h: &emu::Hazard| matches!(h.kind, HazardKind::Misaligned | HazardKind::OutOfBounds);
    let whole = !report.hazards.iter().any(lost);
    check.add_hazards(report.hazards);
    if !report.stores {
        check.warn("a run executed no store to global memory, so the kernel has no result".into());
    }
    for ((spec, role), buffer) in bound.kernel.buffers.iter().zip(&bound.roles).zip(&buffers) {
        if matches!(role, Role::Fill(Memory { init: Init::Uninitialised, .. })) && buffer.is_uninitialised() {
            check.warn(format!("a run wrote nothing to the uninitialised buffer {}", spec.name));
        }
    }
    let after: Vec<Vec<u8>> = buffers.iter().map(Buffer::to_bytes).collect();
    feed.check_inputs_kept(bound, &before, &after, check);
    if bound.problem.is_some() {
        // State that one launch leaves for the next could be a cached output.
        for name in report.changed {
            check.fail(format!("the kernel keeps something in {name} from one launch to the next"));
        }
    }
    if whole {
        judge_references(bound, &feed, options, &before, &buffers, check)?;
    }
    if whole && let Some(references) = feed.references(bound)? {
        feed.check_outputs(bound, &references, &after, check);
    }
    if check.quantisation.is_none() {
        check.quantisation = feed.quantisation(bound)?;
    }
    Ok(())
}

/// What all launches of a run reported together.
struct Ran {
    hazards: Vec<emu::Hazard>,
    changed: Vec<String>,
    /// Whether some launch stored to global memory.
    stores: bool,
}

/// Runs all launches on the same buffers.
fn run_all(
    bound: &Bound,
    buffers: &mut [Buffer],
    options: &Options,
    check: &mut CheckReport,
) -> Result<Ran, EmuError> {
    let mut ran = Ran { hazards: Vec::new(), changed: Vec::new(), stores: false };
    let count = 1 + bound.then.len();
    for (at, (kernel, cooperative)) in bound.launches().enumerate() {
        let traced_ctas = if at == 0 { options.traced_ctas.clone() } else { Vec::new() };
        let options = Options { traced_ctas, ..options.clone() };
        let mut report = emu::run(kernel, &mut buffers.iter_mut().collect::<Vec<_>>(), &options)?;
        check.steps += report.steps;
        let coverage = check.coverage.get_or_insert_with(|| Coverage::of(&bound.kernel));
        coverage.join(kernel);
        coverage.add(kernel, &report.counters);
        ran.stores |= stores(kernel, &report.counters);
        let number = at + 1;
        if count > 1 {
            for hazard in &mut report.hazards {
                hazard.message +=
                    &format!(" (launch {number} of {count}, {})", ptx::quote::cut(&kernel.entry));
            }
        }
        if number < count && !report.changed.is_empty() {
            let names = ptx::quote::list(&report.changed);
            check.leave_incomplete(format!(
                "launch {number} of {count} changes {names}, and variables of a module start anew in each launch here; use \
                 a buffer"
            ));
        }
        if at == 0 {
            check.communicates |= report.communicates;
        } else if report.communicates && !cooperative {
            check.warn(format!(
                "whether the CTAs of launch {number} of {count} must be resident together was not checked"
            ));
        }
        // The counters, traces and prints of a check are those of its first launch.
        if check.runs == 0 && at == 0 {
            check.counters = report.counters;
            check.traces = report.traces;
        }
        if check.runs == 0 {
            check.printed.extend(report.printed);
        }
        ran.hazards.extend(report.hazards);
        ran.changed.extend(report.changed);
    }
    if count > 1 {
        // A single launch must write its outputs whole, which the emulator checks.
        let outputs = must_write(bound).into_iter().filter(|(index, _)| bound.memory(*index).is_none());
        for (index, ranges) in outputs {
            let missing = ranges.into_iter().filter_map(|range| buffers[index].missing(range));
            let bytes: usize = missing.map(|(_, bytes)| bytes).sum();
            if bytes > 0 {
                let name = &bound.kernel.buffers[index].name;
                check.fail(format!("{bytes} bytes of {name} were never written"));
            }
        }
    }
    Ok(ran)
}

/// Compares outputs with their references.
fn judge_references(
    bound: &Bound,
    feed: &Feed,
    options: &Options,
    before: &[Vec<u8>],
    after: &[Buffer],
    check: &mut CheckReport,
) -> Result<(), GateError> {
    for reference in &bound.references {
        let (buffer, memory) = (&after[reference.output], reference.memory);
        if memory.init == Init::Uninitialised {
            let size = memory.dtype.bytes();
            let unwritten = |place: &usize| buffer.missing(place * size..(place + 1) * size).is_some();
            let (view, elements) = (memory.shaped(), memory.shaped().len());
            let missing = view.places().filter(unwritten).count();
            if missing > 0 {
                check.fail(format!(
                    "{missing} of {elements} elements of {} were never written",
                    reference.name
                ));
                continue;
            }
        }
        match reference.expect(before, || feed.buffers(bound), options) {
            Ok(expected) => check.judge(reference.judge(&expected, &buffer.to_bytes())),
            Err(error @ ReferenceError::Kernel { .. }) => check.leave_incomplete(error.to_string()),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Notes that a run did not end.
///
/// # Errors
/// When the kernel cannot be launched at all.
fn unfinished(error: EmuError, watch: &Watch, check: &mut CheckReport) -> Result<(), GateError> {
    match error {
        EmuError::Unsupported { .. }
        | EmuError::StepLimit { .. }
        | EmuError::GridLimit { .. }
        | EmuError::GridSize { .. }
        | EmuError::MemoryLimit { .. } => check.leave_incomplete(error.to_string()),
        EmuError::TimeLimit { .. } => {
            let (run, runs) = watch.runs();
            check.leave_incomplete(format!("run {run} of {runs} did not end: {error}"));
        }
        error => return Err(GateError::Launch(error)),
    }
    Ok(())
}

/// Whether some lane executed an instruction that may write global memory.
fn stores(kernel: &Kernel, counters: &Counters) -> bool {
    let statements = kernel.module.functions().flat_map(|f| f.body.iter().flat_map(|b| &b.statements));
    let ops = statements.filter_map(|statement| match statement {
        Statement::Inst(inst) => Some(inst.op),
        Statement::Label(_) | Statement::Pragma(_) => None,
    });
    ops.zip(&counters.instructions).any(|(op, counter)| {
        let writes = match op {
            Op::St(m) => matches!(m.space, Space::Global | Space::Generic),
            Op::Atom(a) | Op::Red(a) => matches!(a.space, Space::Global | Space::Generic),
            Op::WmmaStore(_)
            | Op::CpAsyncBulk(_)
            | Op::CpReduceAsyncBulk(_)
            | Op::CpAsyncBulkTensor(_)
            | Op::CpReduceAsyncBulkTensor(_) => true,
            _ => false,
        };
        writes && counter.lanes > 0
    })
}

/// The bytes of `out` and `lse` that the kernel must write.
pub(super) fn must_write(bound: &Bound) -> std::collections::HashMap<usize, Vec<Range<usize>>> {
    let Some(problem) = &bound.problem else { return Default::default() };
    let at = bound.roles.iter().position(|&r| r == Role::Operand(Operand::Tensor(Tensor::Out)));
    let Some(index) = at else { return Default::default() };
    let bytes = problem.dtype.bytes();
    let mut rows = row_ranges(problem);
    rows.sort_by_key(|r| r.start);
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for row in rows {
        let (start, end) = (row.start * bytes, row.end * bytes);
        match ranges.last_mut() {
            Some(last) if last.end == start => last.end = end,
            _ => ranges.push(start..end),
        }
    }
    [(index, ranges)].into()
}
