//! Refuses CUDA in a forked child: the driver's state does not survive `fork` (CUDA C++ Programming Guide,
//! "Initialization"), and a call in the child may wait for ever.
#![allow(unsafe_code, reason = "a handler of fork")]

use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::DriverError;

/// Whether this process is a child, made by `fork`, of one that had started the driver.
static FORKED: AtomicBool = AtomicBool::new(false);

/// Refuses to go on in a process that was forked after its parent started the driver. It takes no lock, so
/// that it answers where another thread of the parent held one.
///
/// # Errors
/// [`DriverError::Forked`].
pub fn check() -> Result<(), DriverError> {
    // One load: it is asked at every call.
    if FORKED.load(Ordering::Relaxed) { Err(DriverError::Forked) } else { Ok(()) }
}

/// From here on children know that they are children.
pub(crate) fn watch() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        #[cfg(unix)]
        {
            extern "C" fn in_child() {
                FORKED.store(true, Ordering::Relaxed);
            }
            // SAFETY: the handler only stores to an atomic, which is allowed after a fork. Without memory for
            // the handler the children stay unwarned.
            let _ = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        }
    });
}
