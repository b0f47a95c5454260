//! Checks kernels whose CTAs wait for each other. A GPU starts the CTAs of a grid in waves, in any order,
//! unless the launch is cooperative. A kernel that spins on a later CTA hangs if there is no room for that
//! CTA.

use emu::{Buffer, EmuError, Hazard, HazardKind, Options, Schedule};
use predict::Gpu;
use predict::machine::MACHINES;
use predict::resources::{estimate, occupancy};
use ptx::Kernel;

use super::CheckReport;
use super::feed::Feed;
use super::polls::polls;
use crate::launchfile::Bound;

/// Warp instructions that a CTA may issue in any case.
const LEAST_STEPS: u64 = 1 << 20;

/// Runs each kernel with one resident cluster at a time, in ascending order. `options` are those of a run
/// without hazards.
pub(super) fn check(
    bound: &Bound,
    feed: &Feed,
    options: &Options,
    check: &mut CheckReport,
) -> Result<(), EmuError> {
    for (at, kernel) in bound.steps().enumerate() {
        let Some(most) = wait_for_room(kernel, bound.is_cooperative(at)) else { continue };
        let mut buffers = feed.buffers(bound);
        let mut handles: Vec<&mut Buffer> = buffers.iter_mut().collect();
        // The kernels before this one write its inputs.
        for before in bound.steps().take(at) {
            emu::run(before, &mut handles, options)?;
        }
        let cooperative = bound.is_cooperative(at);
        // No CTA of the runs before has issued more than all of them together.
        let step_limit = options.step_limit.min(check.steps.max(LEAST_STEPS));
        let schedule = Schedule::Late;
        let alone = Options { cooperative, resident: Some(1), schedule, step_limit, ..options.clone() };
        let hang = match emu::run(kernel, &mut handles, &alone) {
            Ok(report) => report.hazards.into_iter().find(|h| h.kind == HazardKind::Deadlock),
            Err(EmuError::StepLimit { line, .. }) => Some(endless(kernel, line)),
            Err(error) => return Err(error),
        };
        if let Some(hang) = hang {
            note(&hang, kernel.launch.grid.count(), most, check);
            return Ok(());
        }
    }
    Ok(())
}

/// A CTA that issues instructions without end while it waits for a later CTA. `line` is one of them.
fn endless(kernel: &Kernel, line: u32) -> Hazard {
    let poll = polls(&kernel.module).first().map(|poll| poll.line);
    Hazard {
        kind: HazardKind::Deadlock,
        line: poll.unwrap_or(line),
        other_line: None,
        threads: Vec::new(),
        place: None,
        message: String::new(),
        count: 1,
        allowed: false,
    }
}

/// Fails the check if no GPU can hold all CTAs of a cooperative launch, which every GPU then refuses.
pub(super) fn require_room(bound: &Bound, check: &mut CheckReport) {
    for (at, kernel) in bound.steps().enumerate().filter(|(at, _)| bound.is_cooperative(*at)) {
        let ctas = kernel.launch.grid.count();
        if let Some((most, gpu)) = wait_for_room(kernel, true).filter(|(_, gpu)| !gpu.is_empty()) {
            check.fail(format!(
                "launch {} ({}) is cooperative, so all its CTAs must be resident together; the grid has {ctas}, and \
                 {gpu} holds at most {most}",
                at + 1,
                ptx::quote::cut(&kernel.entry)
            ));
        }
    }
}

/// The largest number of CTAs that any GPU holds at the same time, and the name of that GPU. `None` for a
/// kernel whose CTAs are guaranteed to be resident together.
fn wait_for_room(kernel: &Kernel, cooperative: bool) -> Option<(u64, &'static str)> {
    let ctas = kernel.launch.grid.count();
    // Registers are estimated.
    let resources = estimate(&kernel.module, &kernel.entry).map_or((1, 0), |r| (r.registers, r.shared));
    let rooms = MACHINES.into_iter().filter(|gpu| kernel.module.target.runs_on(gpu.sm));
    let most = rooms.map(|gpu| (resident(kernel, resources, gpu), gpu.name)).max().unwrap_or_default();
    let promised = kernel.launch.cluster.count() >= ctas || cooperative && ctas <= most.0;
    (!promised).then_some(most)
}

/// Reports that CTAs wait for CTAs that were not started yet.
fn note(hang: &Hazard, ctas: u64, most: (u64, &str), check: &mut CheckReport) {
    let Hazard { line, .. } = hang;
    let needs = format!(
        "CTAs wait for later CTAs (line {line}): all of them must be resident together, which only a \
         cooperative launch promises"
    );
    if ctas <= most.0 {
        check.leave_incomplete(format!(
            "{needs}. If the launch is cooperative, state `cooperative = true` under [launch] or give --cooperative."
        ));
        return;
    }
    check.add_hazards(vec![Hazard {
        message: format!("{needs}; the grid has {ctas}, and {} holds at most {}", most.1, most.0),
        ..hang.clone()
    }]);
}

/// The number of CTAs that a GPU holds at the same time. `resources` are registers of a thread, and static
/// shared memory of a CTA.
fn resident(kernel: &Kernel, (registers, shared): (u32, u32), gpu: &Gpu) -> u64 {
    let shared = shared.saturating_add(kernel.launch.dynamic_shared);
    let held = occupancy(gpu, kernel.launch.block.count(), registers, shared);
    held.map_or(0, |held| u64::from(held.ctas) * u64::from(gpu.sms))
}
