//! The time limit and the progress of a check.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use emu::Stopwatch;

/// Applies one time limit to all runs of a check. Other threads may print the progress.
#[derive(Debug, Default)]
pub struct Watch {
    stopwatch: Arc<Stopwatch>,
    /// The current run, from 1 on; `runs` is their number.
    run: AtomicUsize,
    runs: AtomicUsize,
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
        self.run.store(run, Ordering::Relaxed);
        self.runs.store(runs, Ordering::Relaxed);
    }

    /// The current run, from 1 on, and the number of runs.
    pub fn runs(&self) -> (usize, usize) {
        (self.run.load(Ordering::Relaxed), self.runs.load(Ordering::Relaxed))
    }
}

impl fmt::Display for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ((run, runs), (done, ctas)) = (self.runs(), self.stopwatch.progress());
        write!(f, "run {run} of {runs}, {done} of {ctas} CTAs")
    }
}
