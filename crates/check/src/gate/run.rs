//! Runs a kernel under the gate's settings and judges the outputs.

use std::ops::Range;

use emu::{Buffer, EmuError, Options, Schedule};
use kernels::Operand;
use oracle::OracleError;
use problem::{Problem, Tensor};

use super::feed::{Feed, row_ranges};
use super::inputs::Style;
use super::{CheckReport, Coverage, Verdict, Watch};
use crate::launchfile::{Bound, Role};

/// Default limit of warp instructions per CTA: ten seconds or more.
const STEP_LIMIT: u64 = 50_000_000;

/// Default limit of warp instructions per grid: some minutes on two cores. The slowest rung on the mission
/// problem takes a fiftieth. A kernel that needs more should be checked on a smaller problem.
const GRID_LIMIT: u64 = 1 << 31;

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
        Settings { runs, traced_ctas: 4, step_limit: STEP_LIMIT, grid_limit: GRID_LIMIT }
    }
}

impl Settings {
    /// The settings with the first run only.
    pub fn first_run(&self) -> Settings {
        Settings { runs: self.runs.iter().take(1).copied().collect(), ..self.clone() }
    }
}

/// Why there is no verdict.
#[derive(Debug, thiserror::Error)]
pub enum GateError {
    /// The launch contract and the kernel do not fit each other.
    #[error("the kernel cannot be launched: {0}")]
    Launch(EmuError),
    #[error("the oracle refuses the problem: {0}")]
    Oracle(#[from] OracleError),
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
    let runs: Vec<_> = settings.runs.iter().enumerate().filter(counts).collect();
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
            stopwatch: Some(watch.stopwatch()),
            must_write: must_write(bound),
            ..Options::default()
        };
        run_once(bound, (style, seed), &options, watch, &mut check)?;
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
    let mut handles: Vec<&mut Buffer> = buffers.iter_mut().collect();
    let report = match emu::run(&bound.kernel, &mut handles, options) {
        Ok(report) => report,
        Err(
            error @ (EmuError::Unsupported { .. }
            | EmuError::StepLimit { .. }
            | EmuError::GridLimit { .. }
            | EmuError::GridSize { .. }
            | EmuError::MemoryLimit { .. }),
        ) => {
            check.leave_incomplete(error.to_string());
            return Ok(());
        }
        Err(error @ EmuError::TimeLimit { .. }) => {
            let (run, runs) = watch.runs();
            check.leave_incomplete(format!("run {run} of {runs} did not end: {error}"));
            return Ok(());
        }
        Err(error) => return Err(GateError::Launch(error)),
    };
    check.runs += 1;
    check.steps += report.steps;
    let coverage = check.coverage.get_or_insert_with(|| Coverage::of(&bound.kernel));
    coverage.add(&bound.kernel, &report.counters);
    if check.runs == 1 {
        check.counters = report.counters;
        check.traces = report.traces;
    }
    check.add_hazards(report.hazards);
    let after: Vec<Vec<u8>> = buffers.iter().map(Buffer::to_bytes).collect();
    feed.check_inputs_kept(bound, &before, &after, check);
    if bound.problem.is_some() {
        // State that one launch leaves for the next could be a cached output.
        for name in report.changed {
            check.fail(format!("the kernel keeps something in {name} from one launch to the next"));
        }
    }
    if let Some(references) = feed.references(bound)? {
        feed.check_outputs(bound, &references, &after, check);
    }
    if check.quantisation.is_none() {
        check.quantisation = feed.quantisation(bound)?;
    }
    Ok(())
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
