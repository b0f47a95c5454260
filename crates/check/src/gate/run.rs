//! Runs a kernel under the gate's settings and judges the outputs.

use std::time::{Duration, Instant};

use emu::{Allowed, Buffer, Checks, Counters, EmuError, HazardKind, Options, Placement, Report, Schedule};
use judge::inputs::Style;
use problem::Problem;
use ptx::{BarKind, Kernel, Launch, Op};

use super::feed::{Feed, Start};
use super::outcome::{GateError, RunOutcome};
use super::sampler::{Next, Sampler};
use super::steps::run_steps;
use super::{CheckReport, Coverage, Verdict, Watch, repeat, residency, starts};
use crate::launchfile::Bound;

/// Default limit of warp instructions per CTA, equivalent to ten seconds or more.
const STEP_LIMIT: u64 = 50_000_000;

/// Default limit of warp instructions per grid, equivalent to some minutes on two cores. The slowest kernel
/// of the ladder on the reference problem needs a fiftieth of it. A kernel that needs more should be checked
/// on a smaller problem.
const GRID_LIMIT: u64 = 1 << 31;

/// Maximum number of CTAs of a cluster on every GPU with clusters (CUDA C++ Programming Guide, "Thread Block
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
    /// Findings that fail no check.
    pub allowed: Allowed,
    /// Whether findings fail that only the PTX memory model forbids ([`Options::by_the_letter`]).
    pub by_the_letter: bool,
    /// Whether a kernel whose accesses race is run again with equal inputs, to see if its outputs differ.
    pub repeat_races: bool,
    /// The time for all runs together; `None` means no limit. A check with a budget runs CTAs that represent
    /// the others ([`super::Choice`]), and has no records for the time model.
    pub budget: Option<Duration>,
    /// The checks of each run.
    pub checks: Checks,
    /// Whether CTAs that communicate also run in other orders, with little room and with older values.
    pub reordered: bool,
    /// Whether the report keeps the buffers as they are after the first run.
    pub keep_outputs: bool,
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
            allowed: Allowed::default(),
            by_the_letter: true,
            repeat_races: false,
            budget: None,
            checks: Checks::ALL,
            reordered: true,
            keep_outputs: false,
        }
    }

    /// One run on given memory, whose results the report keeps. CTAs that communicate also run in other
    /// orders.
    pub fn once() -> Settings {
        Settings::on_given_memory().first_run()
    }

    /// Several schedules on given memory.
    pub fn on_given_memory() -> Settings {
        Settings { traced_ctas: 0, repeat_races: true, keep_outputs: true, ..Settings::thorough() }
    }

    /// One run for its results alone. Accesses out of bounds and deadlocks are still found.
    pub fn unchecked() -> Settings {
        let checks = Checks { races: false, uninitialised: false, unwritten: false };
        Settings { checks, reordered: false, ..Settings::once() }
    }

    /// Normal draws, inputs whose row max moves, and poisoned padding: for a quick check, and for the many
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

    /// The options of one run.
    pub(super) fn options(&self, seed: u64, schedule: Schedule, watch: &Watch) -> Options {
        Options {
            seed,
            schedule,
            step_limit: self.step_limit,
            grid_limit: self.grid_limit,
            placement: self.placement,
            collectives_order: self.collectives_order,
            allowed: self.allowed.clone(),
            by_the_letter: self.by_the_letter,
            checks: self.checks,
            stopwatch: Some(watch.stopwatch()),
            ..Options::default()
        }
    }

    /// The runs of a kernel. Inputs that are not finite come last: a kernel that fails only them is right for
    /// all finite inputs that ran. Confusing two phases of an mbarrier with equal parity shows only when the
    /// warp that confuses them lags. Without a problem the inputs do not vary, so only runs with different
    /// schedules are useful.
    pub(super) fn runs_of(&self, bound: &Bound) -> Vec<(Style, u64, Schedule)> {
        let mut runs = self.runs.clone();
        let fp8 = bound.problem.as_ref().is_some_and(|problem| problem.dtypes.has_fp8());
        if fp8 && runs.iter().any(|&(style, ..)| style == Style::NonFinite) {
            let seeds = [31, 32, 33, 34];
            runs.extend(seeds.map(|seed| (Style::BadFactors, seed, Schedule::Early)));
            runs.push((Style::Saturated, 35, Schedule::Late));
        }
        if bound.problem.as_ref().is_some_and(|problem| problem.storage.pages().is_some()) && runs.len() > 1 {
            runs.push((Style::BadPages, 41, Schedule::Random));
        }
        if self.lagging && waits_by_count(&bound.kernel) {
            let warps = |kernel: &Kernel| {
                let Launch { block, cluster, .. } = kernel.launch;
                block.count().div_ceil(32) * cluster.count()
            };
            let warps = bound.steps().map(warps).max().unwrap_or(0);
            let seeds = (0..warps).map(|w| 2 * w).chain((0..warps.div_ceil(4)).map(|g| 2 * g + 1));
            runs.extend(seeds.map(|seed| (Style::Normal, seed, Schedule::Lagging)));
        }
        runs.sort_by_key(|(style, ..)| !style.is_finite());
        // A NaN in one key spoils all gradients, and nothing would be left to judge.
        let is_backward = bound.problem.as_ref().is_some_and(|problem| problem.pass.is_backward());
        runs.retain(|(style, ..)| style.is_finite() || !bound.finite_inputs && !is_backward);
        let runs = runs
            .into_iter()
            .enumerate()
            .filter(|(index, (style, ..))| bound.problem.is_some() || *index == 0 || *style == Style::Normal);
        runs.map(|(_, run)| run).collect()
    }
}

/// Whether a kernel's module has mbarriers, or barriers for a given number of threads.
fn waits_by_count(kernel: &Kernel) -> bool {
    kernel.module.instructions().any(|inst| match inst.op {
        Op::Mbarrier(_) => true,
        Op::Bar { kind: BarKind::Arrive, .. } => true,
        Op::Bar { kind: BarKind::Sync, .. } => inst.operands.len() > 1,
        _ => false,
    })
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
    residency::require_room(bound, &mut check);
    if check.verdict != Verdict::Passed {
        return Ok(check);
    }
    let runs = settings.runs_of(bound);
    // Every CTA of a backward pass may add to the same gradients, so all of them run.
    let is_backward = bound.problem.as_ref().is_some_and(|problem| problem.pass.is_backward());
    let budget = settings.budget.filter(|_| !is_backward);
    let sampler = budget.map(|budget| Sampler::new(bound, budget, runs.len()));
    let mut sampler = sampler.transpose().map_err(GateError::Launch)?;
    for (number, &(style, seed, schedule)) in runs.iter().enumerate() {
        watch.begin(number + 1, runs.len());
        let mut options = settings.options(seed, schedule, watch);
        let mut next = Next::All;
        if let Some(sampler) = &mut sampler {
            if number == 0
                && let Some(feed) = Feed::draw(bound, style, seed)
                && let Err(error) = sampler.search(bound, &feed, &options)
            {
                check.leave_incomplete(unfinished(error, watch)?);
                break;
            }
            next = sampler.next(runs.len() - number);
        }
        match &next {
            Next::All => {}
            Next::Some(ctas) => (options.only, options.survey) = (Some(ctas.clone()), true),
            Next::Stop => break,
        }
        let started = Instant::now();
        run_once(bound, (style, seed), &options, settings, watch, &mut check)?;
        if let Some(sampler) = &mut sampler {
            sampler.note(&next, started.elapsed());
        }
        if check.verdict != Verdict::Passed {
            explain_failure(bound, settings, (style, seed), &options, &mut check);
            break; // further runs would only repeat the finding
        }
    }
    // A budget may have ended before the last run.
    if let Some(&(_, seed, schedule)) = runs.last().filter(|_| settings.reordered) {
        conclude(
            bound,
            (seed, settings.lagging),
            &settings.options(seed, schedule, watch),
            watch,
            &mut check,
        )?;
    }
    check.sample = sampler.map(|sampler| sampler.sample());
    check.close();
    Ok(check)
}

/// After a run that did not pass: adds whether the outputs differ from run to run, and which inputs do not
/// fail.
fn explain_failure(
    bound: &Bound,
    settings: &Settings,
    (style, seed): (Style, u64),
    options: &Options,
    check: &mut CheckReport,
) {
    let races = settings.repeat_races && check.hazards.iter().any(|hazard| hazard.kind == HazardKind::Race);
    if races && let Some(feed) = Feed::draw(bound, style, seed) {
        // The verdict is final, whether or not these runs end in time.
        let _ = repeat::check_determinism(bound, &feed, options, check);
    }
    if check.verdict == Verdict::Failed && !style.is_finite() {
        check.fail(format!(
            "only inputs that are not finite fail ({}): all runs on finite inputs passed, and `inputs = \"finite\"` \
             in the launch file leaves the others out",
            style.name()
        ));
    }
}

/// After the runs of a kernel that passed them all. If its CTAs communicate, runs it with little room for its
/// CTAs, with one CTA before all others, and with reads that return older values. A thorough check notes
/// outputs that depend on the order of atomics. Leaves the check incomplete if an output was not judged.
fn conclude(
    bound: &Bound,
    (seed, thorough): (u64, bool),
    options: &Options,
    watch: &Watch,
    check: &mut CheckReport,
) -> Result<(), GateError> {
    if check.verdict == Verdict::Passed
        && let Some(feed) = Feed::draw(bound, Style::Normal, seed)
    {
        let checks = [residency::check, starts::check, repeat::check_weak_order];
        for next in checks.into_iter().take(if check.communicates { 3 } else { 0 }) {
            if check.verdict == Verdict::Passed
                && let Err(error) = next(bound, &feed, options, check)
            {
                check.leave_incomplete(unfinished(error, watch)?);
            }
        }
        if thorough && check.verdict == Verdict::Passed {
            // The verdict is final, whether or not these runs end in time.
            let _ = repeat::note_determinism(bound, &feed, options, check);
        }
    }
    if check.verdict == Verdict::Passed && check.runs > 0 {
        require_judged(bound, check);
    }
    Ok(())
}

/// Makes the verdict incomplete when the CTAs that ran wrote nothing that can be judged.
fn require_judged(bound: &Bound, check: &mut CheckReport) {
    if bound.problem.is_some() && check.error.is_none() {
        check.leave_incomplete("no row of the output was written completely by the CTAs that ran".to_owned());
    }
    for reference in &bound.references {
        if check.judgements.iter().all(|judgement| judgement.output != reference.name) {
            check.leave_incomplete(format!(
                "no element of {} was written by the CTAs that ran",
                reference.name
            ));
        }
    }
}

/// Checks a generator with one kernel for each problem. `emit` returns `None` for problems that the generator
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
    settings: &Settings,
    watch: &Watch,
    check: &mut CheckReport,
) -> Result<(), GateError> {
    let Some(feed) = &Feed::draw(bound, style, seed) else { return Ok(()) };
    let Start { mut buffers, before, rows } = feed.start(bound);
    let options = &Options { must_write: rows.must_write.clone(), ..options.clone() };
    let is_first = check.runs == 0;
    let traced = if is_first && settings.budget.is_none() { settings.traced_ctas } else { 0 };
    let mut reports = match run_steps(bound, &mut buffers, options, traced) {
        Ok(reports) => reports,
        Err(error) => {
            check.leave_incomplete(unfinished(error, watch)?);
            return Ok(());
        }
    };
    let lost = |h: &emu::Hazard| matches!(h.kind, HazardKind::Misaligned | HazardKind::OutOfBounds);
    let complete = reports.len() == bound.steps().count();
    let whole = complete && !reports.iter().flat_map(|report| &report.hazards).any(lost);
    let changed = reports.iter_mut().map(|report| std::mem::take(&mut report.changed)).collect();
    account(bound, options, complete, reports, check);
    let after = buffers.iter().map(Buffer::to_bytes).collect();
    let (rows, before, buffers) = (&rows, before.as_slice(), buffers.as_slice());
    let outcome = RunOutcome { bound, feed, options, rows, before, buffers, after, complete, whole, changed };
    outcome.judge(check)?;
    if is_first && settings.keep_outputs {
        check.outputs = outcome.after;
    }
    Ok(())
}

/// Adds the hazards, counters and records of a run to the check.
fn account(
    bound: &Bound,
    options: &Options,
    complete: bool,
    mut reports: Vec<Report>,
    check: &mut CheckReport,
) {
    check.runs += 1;
    let mut counters = Counters::default();
    for (kernel, report) in bound.steps().zip(&reports) {
        check.steps += report.steps;
        check.communicates |= report.communicates;
        counters.add(&report.counters);
        check.coverage.get_or_insert_with(|| Coverage::of(bound)).add(kernel, &report.counters);
        let cluster = kernel.launch.cluster.count();
        if cluster > PORTABLE_CLUSTER {
            check.warn(format!(
                "a cluster of {cluster} CTAs needs the attribute for non-portable cluster sizes, and a GPU may have \
                 no room for it"
            ));
        }
    }
    reports.iter_mut().for_each(|report| check.add_hazards(std::mem::take(&mut report.hazards)));
    if complete && !stores(&bound.kernel, &counters) {
        check.warn("a run executed no store to global memory, so the kernel has no result".into());
    }
    if check.runs > 1 {
        return;
    }
    check.counters = counters;
    for mut report in reports {
        check.printed.append(&mut report.printed);
        // The time model needs the counters of the whole grid.
        if options.only.is_none() {
            check.recorded.push(report.into());
        }
    }
}

/// Why a run did not end, in words.
///
/// # Errors
/// When the kernel cannot be launched at all.
pub(super) fn unfinished(error: EmuError, watch: &Watch) -> Result<String, GateError> {
    match error {
        EmuError::Unsupported { .. }
        | EmuError::StepLimit { .. }
        | EmuError::GridLimit { .. }
        | EmuError::GridSize { .. }
        | EmuError::MemoryLimit { .. } => Ok(error.to_string()),
        EmuError::TimeLimit { .. } => {
            let (run, runs) = watch.runs();
            Ok(format!("run {run} of {runs} did not end: {error}"))
        }
        error => Err(GateError::Launch(error)),
    }
}

/// Whether any lane executed an instruction that may write global memory.
fn stores(kernel: &Kernel, counters: &Counters) -> bool {
    let mut instructions = kernel.module.instructions().zip(&counters.instructions);
    instructions.any(|(inst, counter)| inst.op.may_store_global() && counter.lanes > 0)
}
