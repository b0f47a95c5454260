//! Kernels whose CTAs wait for each other. A GPU starts the CTAs of a grid in waves, in any order, unless the
//! launch is cooperative. A kernel that spins on a later CTA hangs when that CTA finds no room.

use emu::{Buffer, Hazard, HazardKind, Options, Report, Schedule};
use predict::Gpu;
use predict::machine::MACHINES;
use predict::resources::{estimate, occupancy};

use super::CheckReport;
use super::feed::Feed;
use crate::launchfile::Bound;

/// Runs the kernel with one resident cluster at a time, in ascending order. `options` are those of a run
/// without hazards.
pub(super) fn check(
    bound: &Bound,
    feed: &Feed,
    options: &Options,
    check: &mut CheckReport,
) -> Result<(), emu::EmuError> {
    let launch = &bound.kernel.launch;
    let ctas = launch.grid.count();
    let rooms = MACHINES.into_iter().filter(|gpu| bound.kernel.module.target.runs_on(gpu.sm));
    let most = rooms.map(|gpu| (resident(bound, gpu), gpu.name)).max().unwrap_or_default();
    if launch.cluster.count() >= ctas || bound.cooperative && ctas <= most.0 {
        return Ok(());
    }
    let alone = Options { resident: Some(1), schedule: Schedule::Late, ..options.clone() };
    let report = run(bound, feed, &alone)?;
    let Some(hang) = report.hazards.iter().find(|h| h.kind == HazardKind::Deadlock) else { return Ok(()) };
    let Hazard { line, .. } = hang;
    let needs = format!(
        "CTAs wait for later CTAs (line {line}): all of them must be resident together, which only a \
         cooperative launch promises"
    );
    if ctas <= most.0 {
        check.leave_incomplete(format!("{needs}; state `cooperative = true` under [launch] if it is one"));
        return Ok(());
    }
    check.add_hazards(vec![Hazard {
        message: format!("{needs}; the grid has {ctas}, and {} holds at most {}", most.1, most.0),
        ..hang.clone()
    }]);
    Ok(())
}

fn run(bound: &Bound, feed: &Feed, options: &Options) -> Result<Report, emu::EmuError> {
    let mut buffers = feed.buffers(bound);
    emu::run(&bound.kernel, &mut buffers.iter_mut().collect::<Vec<&mut Buffer>>(), options)
}

/// The number of CTAs that a GPU holds at a time. Registers are estimated.
fn resident(bound: &Bound, gpu: &Gpu) -> u64 {
    let kernel = &bound.kernel;
    let registers = estimate(&kernel.module, &kernel.entry).map_or((1, 0), |r| (r.registers, r.shared));
    let shared = registers.1.saturating_add(kernel.launch.dynamic_shared);
    let held = occupancy(gpu, kernel.launch.block.count(), registers.0, shared);
    held.map_or(0, |held| u64::from(held.ctas) * u64::from(gpu.sms))
}
