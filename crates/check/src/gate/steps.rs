//! Runs the launches of a program once.

use emu::{Buffer, EmuError, Options, Report};

use crate::launchfile::Bound;

/// Runs the kernels of a program one after another on the same buffers, up to the first kernel with a hazard
/// that fails the check. The hazards of a program of several kernels name their launch.
pub(super) fn run_steps(
    bound: &Bound,
    buffers: &mut [Buffer],
    options: &Options,
    traced: u64,
) -> Result<Vec<Report>, EmuError> {
    let count = bound.steps().count();
    let mut reports = Vec::with_capacity(count);
    for (number, kernel) in (1..).zip(bound.steps()) {
        let cooperative = bound.is_cooperative(number - 1);
        let traced_ctas = match traced {
            0 => Vec::new(),
            count => emu::trace::sample_ctas(kernel.launch.grid.count(), count),
        };
        let options = Options { traced_ctas, cooperative, ..options.clone() };
        let mut report = emu::run(kernel, &mut buffers.iter_mut().collect::<Vec<_>>(), &options)?;
        if count > 1 {
            let launch = format!(" (launch {number} of {count}, {})", ptx::quote::cut(&kernel.entry));
            report.hazards.iter_mut().for_each(|hazard| hazard.message += &launch);
        }
        let failed = report.hazards.iter().any(|hazard| hazard.fails());
        reports.push(report);
        if failed {
            break;
        }
    }
    Ok(reports)
}
