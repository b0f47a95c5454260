//! The time limit and the progress of a check.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use emu::Stopwatch;

/// The fraction of the work that must be done before the remaining time is estimated.
const ENOUGH: f64 = 0.01;

/// Applies one time limit to all runs of a check. Other threads may print the progress.
#[derive(Debug)]
pub struct Watch {
    stopwatch: Arc<Stopwatch>,
    started: Instant,
    /// The current run, from 1 on; `runs` is their number.
    run: AtomicUsize,
    runs: AtomicUsize,
}

impl Default for Watch {
    /// No time limit.
    fn default() -> Watch {
        let (run, runs) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Watch { stopwatch: Arc::default(), started: Instant::now(), run, runs }
    }
}

impl Watch {
    /// Starts the time limit now.
    pub fn start(limit: Duration) -> Watch {
        Watch { stopwatch: Arc::new(Stopwatch::start(limit)), ..Watch::default() }
    }

    pub(super) fn stopwatch(&self) -> Arc<Stopwatch> {
        Arc::clone(&self.stopwatch)
    }

    pub(super) fn begin(&self, run: usize, runs: usize) {
        self.stopwatch.reset();
        self.run.store(run, Ordering::Relaxed);
        self.runs.store(runs, Ordering::Relaxed);
    }

    /// The current run, from 1 on, and the number of runs.
    pub fn runs(&self) -> (usize, usize) {
        (self.run.load(Ordering::Relaxed), self.runs.load(Ordering::Relaxed))
    }

    /// The estimated remaining time if all runs take equally long; `None` before a hundredth of the work is
    /// done.
    fn rest(&self) -> Option<Duration> {
        let ((run, runs), (done, ctas)) = (self.runs(), self.stopwatch.progress());
        let of_run = done.min(ctas) as f64 / ctas.max(1) as f64;
        let share = (run.saturating_sub(1) as f64 + of_run) / runs.max(1) as f64;
        let rest = self.started.elapsed().as_secs_f64() * (1.0 - share) / share;
        (share >= ENOUGH).then(|| Duration::try_from_secs_f64(rest).ok()).flatten()
    }
}

impl fmt::Display for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ((run, runs), (done, ctas)) = (self.runs(), self.stopwatch.progress());
        let done_runs = run.saturating_sub(1);
        write!(f, "{done_runs} of {runs} runs done")?;
        // The grid is known when the run begins.
        if ctas > 0 {
            write!(f, "; run {run}: {done} of {ctas} CTAs")?;
        }
        match self.rest() {
            Some(rest) => write!(f, "; about {} s left", rest.as_secs_f64().ceil()),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_shown_when_its_grid_is_known() {
        let watch = Watch::default();
        watch.begin(1, 3);
        assert_eq!(watch.to_string(), "0 of 3 runs done");
    }
}
