//! Catches and reports panics. A panic is a bug in this project. Where untrusted input may cause one, the
//! outermost caller catches the panic and reports it with its source line. Elsewhere, and in tests, panics
//! are not caught.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, Once, PoisonError};
use std::thread::{self, ThreadId};

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message} ({place})")]
pub struct Panic {
    pub message: String,
    /// Source file and line.
    pub place: String,
}

/// Panics seen while a [`contain`] is active, on any thread (the emulator runs on worker threads).
static SEEN: Mutex<Watch> = Mutex::new(Watch { depth: 0, seen: Vec::new() });
static HOOK: Once = Once::new();

struct Watch {
    depth: u32,
    seen: Vec<(ThreadId, Panic)>,
}

fn watch() -> std::sync::MutexGuard<'static, Watch> {
    SEEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `work` and catches its panic without printing it; the caller reports the panic.
///
/// # Errors
/// The first panic, with its source line.
pub fn contain<T>(work: impl FnOnce() -> T) -> Result<T, Panic> {
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let mut watch = watch();
            // Rust's usual message is also printed when a backtrace is requested, and always in tests.
            let asked = cfg!(test) || std::env::var_os("RUST_BACKTRACE").is_some_and(|v| v != "0");
            if watch.depth == 0 || asked {
                usual(info);
            }
            if watch.depth == 0 {
                return;
            }
            let place =
                info.location().map_or("unknown place".into(), |l| format!("{}:{}", l.file(), l.line()));
            let message = info.payload_as_str().unwrap_or("no message").to_owned();
            watch.seen.push((thread::current().id(), Panic { message, place }));
        }));
    });
    {
        let mut watch = watch();
        // Drops panics that an inner caller has already caught, so that a later panic is not reported with
        // their source lines.
        let outermost = watch.depth == 0;
        watch.seen.retain(|(thread, _)| !outermost && *thread != thread::current().id());
        watch.depth += 1;
    }
    let outcome = catch_unwind(AssertUnwindSafe(work));
    let mut watch = watch();
    watch.depth -= 1;
    outcome.map_err(|_| {
        let lost = || Panic { message: "no message".into(), place: "unknown place".into() };
        // A panic of this thread takes precedence over the first one of the worker threads.
        let own = watch.seen.iter().position(|(thread, _)| *thread == thread::current().id()).unwrap_or(0);
        let found = watch.seen.get(own).map(|(_, panic)| panic.clone());
        watch.seen.clear();
        found.unwrap_or_else(lost)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use rayon::prelude::*;

    #[test]
    fn a_panic_says_what_and_where() {
        assert_eq!(contain(|| 7), Ok(7));
        let here = contain(|| -> u32 { panic!("number {}", 1) }).unwrap_err();
        assert_eq!(here.message, "number 1");
        assert!(here.place.contains("panics.rs:"), "{here}");
        let there = contain(|| (0..8).into_par_iter().for_each(|i| assert!(i != 5, "five"))).unwrap_err();
        assert_eq!(there.message, "five");
        // A panic that was already caught is not reported for a later one.
        let later = contain(|| {
            let caught = catch_unwind(|| panic!("caught"));
            assert!(caught.is_err());
            contain(|| -> u32 { panic!("later") }).unwrap_err().message
        });
        assert_eq!(later.unwrap(), "later");
    }
}
