//! Repeats runs with equal inputs and another order of events, to see whether outputs depend on the order.

use emu::{Buffer, EmuError, Hazard, HazardKind, Options, Schedule};
use ptx::{Access, AtomicOp, Instruction, MemSem, Op, Operand, Space};

use super::CheckReport;
use super::feed::Feed;
use super::steps::run_steps;
use crate::launchfile::Bound;

/// Number of runs with weak memory, for a kernel whose strong accesses may be reordered.
const WEAK_RUNS: u64 = 6;

/// For a kernel whose accesses race, reports whether its outputs differ from run to run.
pub(super) fn check_determinism(
    bound: &Bound,
    feed: &Feed,
    options: &Options,
    check: &mut CheckReport,
) -> Result<(), EmuError> {
    let first = outputs(bound, feed, &Options { schedule: Schedule::Late, ..options.clone() })?;
    for (seed, schedule) in repetitions(options.seed.wrapping_add(check.runs.into())) {
        let next = outputs(bound, feed, &Options { schedule, seed, ..options.clone() })?;
        if let Some((name, bytes, all)) = difference(bound, &first, &next) {
            check.fail(format!(
                "nondeterministic: {bytes} of {all} bytes of {name} differ between two runs with equal inputs"
            ));
            return Ok(());
        }
    }
    Ok(())
}

/// For a kernel with atomics whose order may decide a result, notes whether its outputs differ between runs
/// with equal inputs: under another order of warps, and with the last CTA before all others.
pub(super) fn note_determinism(
    bound: &Bound,
    feed: &Feed,
    options: &Options,
    check: &mut CheckReport,
) -> Result<(), EmuError> {
    let coverage = check.coverage.as_ref();
    let ran = |index: usize| coverage.is_some_and(|coverage| coverage.executed(index));
    let mut instructions = bound.kernel.module.instructions().enumerate();
    let Some((_, atomic)) = instructions.find(|(index, inst)| order_matters(inst) && ran(*index)) else {
        return Ok(());
    };
    let first = outputs(bound, feed, &Options { schedule: Schedule::Late, ..options.clone() })?;
    let last_cta = bound.steps().map(|kernel| kernel.launch.grid.count()).max().unwrap_or(1) - 1;
    let orders =
        [(Schedule::Late, Some(last_cta)), (Schedule::Early, None), (Schedule::Random, Some(last_cta))];
    for (schedule, first_cta) in orders {
        let next = outputs(bound, feed, &Options { schedule, first: first_cta, ..options.clone() })?;
        if let Some((name, bytes, all)) = difference(bound, &first, &next) {
            let message = format!(
                "{bytes} of {all} bytes of {name} differ between two runs with equal inputs: they depend on the order of \
                 atomics"
            );
            let (kind, line) = (HazardKind::Nondeterministic, atomic.line);
            let (other_line, threads, place) = (None, Vec::new(), None);
            check.add_hazards(vec![Hazard {
                kind,
                line,
                other_line,
                threads,
                place,
                message,
                count: 1,
                allowed: false,
            }]);
            return Ok(());
        }
    }
    Ok(())
}

/// Whether the order of an atomic may decide a result: its threads use what it returns, it replaces the
/// value, or its sum is rounded.
fn order_matters(inst: &Instruction) -> bool {
    let is_used = matches!(inst.op, Op::Atom(_)) && inst.operands.first() != Some(&Operand::Sink);
    match inst.op {
        Op::Atom(a) | Op::Red(a) => {
            is_used || a.ty.is_float() || matches!(a.op, AtomicOp::Exch | AtomicOp::Cas)
        }
        Op::CpReduceAsyncBulk(_) | Op::CpReduceAsyncBulkTensor(_) => true,
        _ => false,
    }
}

/// The seeds and schedules of the repetitions.
fn repetitions(seed: u64) -> impl Iterator<Item = (u64, Schedule)> {
    let seeds = (0..).map(move |index| seed.wrapping_add(index).wrapping_mul(2) + 1);
    seeds.zip([Schedule::Early, Schedule::Random, Schedule::Random])
}

/// Repeats a kernel with relaxed or volatile reads so that these reads return older values. If the outputs
/// depend on them, and on nothing else in the order of events, the reads are hazards.
pub(super) fn check_weak_order(
    bound: &Bound,
    feed: &Feed,
    options: &Options,
    check: &mut CheckReport,
) -> Result<(), EmuError> {
    if !bound.steps().any(|kernel| kernel.module.instructions().any(reads_relaxed)) {
        return Ok(());
    }
    let plain = |seed, schedule| outputs(bound, feed, &Options { seed, schedule, ..options.clone() });
    let first = plain(options.seed, Schedule::Late)?;
    for seed in 1..=WEAK_RUNS {
        let schedule = if seed % 2 == 0 { Schedule::Random } else { Schedule::Early };
        let mut buffers = feed.buffers(bound);
        let weak = Options { seed, schedule, weak: true, ..options.clone() };
        let reports = run_steps(bound, &mut buffers, &weak, 0)?;
        let hazards: Vec<_> = reports.into_iter().flat_map(|report| report.hazards).collect();
        let stale: Vec<_> = hazards.iter().filter(|h| h.kind == HazardKind::WeakOrder).cloned().collect();
        let hangs = hazards.iter().any(|h| h.kind == HazardKind::Deadlock);
        let after: Vec<Vec<u8>> = buffers.iter().map(Buffer::to_bytes).collect();
        if stale.is_empty() || !hangs && difference(bound, &first, &after).is_none() {
            continue;
        }
        // With the newest values, this schedule must give the outputs of the first schedule.
        if difference(bound, &first, &plain(seed, schedule)?).is_none() {
            check.add_hazards(stale);
            return Ok(());
        }
    }
    Ok(())
}

/// The contents of all buffers after a run.
pub(super) fn outputs(bound: &Bound, feed: &Feed, options: &Options) -> Result<Vec<Vec<u8>>, EmuError> {
    let mut buffers = feed.buffers(bound);
    run_steps(bound, &mut buffers, options, 0)?;
    Ok(buffers.iter().map(Buffer::to_bytes).collect())
}

/// The first buffer that the kernel may write and that differs, the number of differing bytes, and its size.
pub(super) fn difference<'b>(
    bound: &'b Bound,
    a: &[Vec<u8>],
    b: &[Vec<u8>],
) -> Option<(&'b str, usize, usize)> {
    let specs = bound.kernel.buffers.iter().zip(a.iter().zip(b));
    specs.filter(|(spec, _)| spec.access != Access::Read).find_map(|(spec, (a, b))| {
        let differ = a.iter().zip(b).filter(|(a, b)| a != b).count();
        (differ > 0).then_some((spec.name.as_str(), differ, a.len()))
    })
}

/// Whether an instruction is a relaxed or volatile read of global memory.
fn reads_relaxed(inst: &Instruction) -> bool {
    matches!(
        inst.op,
        Op::Ld(m) if matches!(m.space, Space::Global | Space::Generic)
            && matches!(m.sem, MemSem::Relaxed | MemSem::Volatile)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_repetitions_are_equal() {
        for seed in [0, 7, u64::MAX] {
            let all: Vec<_> = repetitions(seed).collect();
            assert!((1..all.len()).all(|i| !all[..i].contains(&all[i])), "{all:?}");
        }
    }
}
