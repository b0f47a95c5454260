//! A time limit that several runs share, and the progress of the current run.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::EmuError;

/// A wall-clock limit for runs, and the progress of the current run. Other threads may read the progress.
#[derive(Debug, Default)]
pub struct Stopwatch {
    limit: Option<(Duration, Instant)>,
    done: AtomicU64,
    ctas: AtomicU64,
}

impl Stopwatch {
    /// Starts now. Runs that have not ended after `limit` stop with [`EmuError::TimeLimit`].
    pub fn start(limit: Duration) -> Stopwatch {
        // A limit beyond the range of the clock means no limit.
        let limit = Instant::now().checked_add(limit).map(|end| (limit, end));
        Stopwatch { limit, ..Stopwatch::default() }
    }

    /// The number of CTAs of the current run that have ended, and the total number of its CTAs.
    pub fn progress(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.ctas.load(Ordering::Relaxed))
    }

    /// Returns an error once the limit is over.
    pub(crate) fn check(&self) -> Result<(), EmuError> {
        match self.limit {
            Some((limit, end)) if Instant::now() >= end => Err(EmuError::TimeLimit { limit }),
            _ => Ok(()),
        }
    }

    /// Resets the progress before the next run begins.
    pub fn reset(&self) {
        self.begin(0);
    }

    pub(crate) fn begin(&self, ctas: u64) {
        self.done.store(0, Ordering::Relaxed);
        self.ctas.store(ctas, Ordering::Relaxed);
    }

    pub(crate) fn finish(&self, ctas: u64) {
        self.done.fetch_add(ctas, Ordering::Relaxed);
    }
}
