//! The progress bar on the terminal, which other lines must not cut.

use std::sync::{Mutex, PoisonError};

use indicatif::ProgressBar;

static BAR: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Sets the bar that other lines suspend while they are written.
pub fn show(bar: Option<&ProgressBar>) {
    *BAR.lock().unwrap_or_else(PoisonError::into_inner) = bar.cloned();
}

/// Hides the bar while `write` writes to standard error.
pub fn beside(write: impl FnOnce()) {
    let bar = BAR.lock().unwrap_or_else(PoisonError::into_inner).clone();
    match bar {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}
