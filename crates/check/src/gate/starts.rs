//! Runs in which one CTA starts before the others. In the other runs all CTAs advance evenly, and a CTA that
//! polls a flag of another one mostly finds it set.

use emu::{EmuError, Options, Schedule};
use ptx::Kernel;

use super::CheckReport;
use super::feed::Feed;
use super::polls::{Poll, polls};
use super::steps::run_steps;
use crate::launchfile::Bound;

/// The most CTAs of a grid that start before the others, each in a run of its own.
const STARTS: u64 = 8;

/// Runs a kernel that polls with each CTA first; of a large grid, with CTAs that are spread evenly. The other
/// CTAs start when the first one waits.
pub(super) fn check(
    bound: &Bound,
    feed: &Feed,
    options: &Options,
    check: &mut CheckReport,
) -> Result<(), EmuError> {
    let polls = polls(&bound.kernel.module);
    if polls.is_empty() {
        return Ok(());
    }
    let ctas = |kernel: &Kernel| kernel.launch.grid.count();
    for first in spread(bound.steps().map(ctas).max().unwrap_or(0)) {
        let options = Options { first: Some(first), schedule: Schedule::Late, ..options.clone() };
        let mut buffers = feed.buffers(bound);
        for (kernel, report) in bound.steps().zip(run_steps(bound, &mut buffers, &options, 0)?) {
            check.steps += report.steps;
            if let Some(coverage) = &mut check.coverage {
                coverage.add(kernel, &report.counters);
            }
            check.add_hazards(report.hazards);
        }
    }
    warn_of_idle_polls(&polls, check);
    Ok(())
}

/// Warns of polls that every run found answered.
fn warn_of_idle_polls(polls: &[Poll], check: &mut CheckReport) {
    let Some(coverage) = check.coverage.clone() else { return };
    let waited = |line: u32| {
        let same = polls.iter().filter(|poll| poll.line == line);
        same.clone().any(|poll| coverage.executed(poll.back))
            || !same.clone().any(|poll| coverage.executed(poll.read))
    };
    for poll in polls.iter().filter(|poll| !waited(poll.line)) {
        check
            .warn(format!("the poll at line {} never had to wait: no run says what happens then", poll.line));
    }
}

/// Some indices below `count`, the first and the last among them.
fn spread(count: u64) -> impl Iterator<Item = u64> {
    let starts = if count > 1 { count.min(STARTS) } else { 0 };
    (0..starts).map(move |at| at * (count - 1) / (starts - 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_and_the_last_cta_start_first() {
        assert_eq!(spread(1).count(), 0);
        assert_eq!(spread(2).collect::<Vec<_>>(), [0, 1]);
        assert_eq!(spread(8).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(spread(1000).collect::<Vec<_>>(), [0, 142, 285, 428, 570, 713, 856, 999]);
    }
}
