//! The time limit of a check, and its progress.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use emu::Stopwatch;

/// Bounds all runs of a check by one time limit. Other threads may print the progress.
#[derive(Debug, Default)]
pub struct Watch {
    stopwatch: Arc<Stopwatch>,
    /// The present run, from 1 on, and all of them.
    run: AtomicUsize,
    runs: AtomicUsize,
}

impl Watch {
    /// Starts now.
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

    /// The present run, from 1 on, and all of them.
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
