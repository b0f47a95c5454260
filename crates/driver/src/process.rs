//! Rejects CUDA calls in a forked child. The driver's state does not survive `fork` (CUDA C++ Programming
//! Guide, "Initialization"), and a call in the child may never return.
#![allow(unsafe_code, reason = "a handler of fork")]

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::DriverError;

/// Whether this process was forked from one that had started the driver.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Returns an error in a process that was forked after its parent started the driver. The function takes no
/// lock, so it returns even if another thread of the parent held one.
///
/// # Errors
/// [`DriverError::Forked`].
pub fn check() -> Result<(), DriverError> {
    // A single atomic load, because every call executes it.
    if FORKED.load(Ordering::Relaxed) { Err(DriverError::Forked) } else { Ok(()) }
}

/// From now on, forked children of this process get an error from [`check`].
pub(crate) fn watch() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        #[cfg(unix)]
        {
            extern "C" fn in_child() {
                FORKED.store(true, Ordering::Relaxed);
            }
            // SAFETY: the handler only stores to an atomic, which is allowed after a fork. If there is no
            // memory for the handler, children get no error from [`check`].
            let _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        }
    });
}
