//! Claims on runs. Only one process at a time drives a run, however many processes share the ledger.
//!
//! A claim is a lock on a separate file in the folder of the ledger (`LEDGER.run-N.lock`). The system
//! releases the lock when the process that holds it ends for any reason. The file stays until the run has
//! finished. A lock on the ledger's own file would not work: closing that file would release SQLite's locks.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::{Ledger, LedgerError, RunEvent, RunId};

/// A run that this process has claimed.
#[derive(Debug)]
pub(super) struct Claim {
    run: RunId,
    path: PathBuf,
    /// The open lock file. Closing it releases the lock.
    _file: File,
}

impl Ledger {
    /// Claims a run for this process, until the ledger is closed or the run is [released](Ledger::release).
    ///
    /// # Errors
    /// When the ledger has no such run, or another process has claimed it.
    pub fn claim(&self, run: RunId) -> Result<(), LedgerError> {
        self.run_exists(run)?;
        if self.claims.borrow().iter().any(|claim| claim.run == run) {
            return Ok(());
        }
        // The canonical path makes the lock independent of symbolic links to the ledger.
        let fault = |source| LedgerError::File { path: self.path.clone(), source };
        let path = lock_of(&self.path.canonicalize().map_err(fault)?, run);
        let fault = |source| LedgerError::File { path: path.clone(), source };
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(fault)?;
        match lock(&file) {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                return Err(LedgerError::Driven { path: self.path.clone(), run: run.0, lock: path });
            }
            // The file system does not support locks, so other processes cannot be excluded.
            Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => {}
            Err(TryLockError::Error(source)) => return Err(fault(source)),
        }
        self.claims.borrow_mut().push(Claim { run, path, _file: file });
        Ok(())
    }

    /// Releases a run, so that another process may claim it. The lock file of a finished run is deleted. A
    /// process that opened the lock file earlier and locks it now sees that the run has finished.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn release(&self, run: RunId) -> Result<(), LedgerError> {
        let finished = self.events(run)?.last().is_some_and(|(_, event)| *event == RunEvent::Finished);
        self.claims.borrow_mut().retain(|claim| {
            if claim.run == run && finished {
                let _ = std::fs::remove_file(&claim.path);
            }
            claim.run != run
        });
        Ok(())
    }
}

/// How long to wait for a lock that another process holds. `PAUSE` is the time between two attempts.
const PATIENCE: Duration = Duration::from_millis(500);
const PAUSE: Duration = Duration::from_millis(10);

/// Locks a file. A child process holds its parent's locks between fork and exec, so a released lock may stay
/// held for a moment.
fn lock(file: &File) -> Result<(), TryLockError> {
    let start = Instant::now();
    loop {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) if start.elapsed() < PATIENCE => std::thread::sleep(PAUSE),
            outcome => return outcome,
        }
    }
}

/// The path of the lock file, such as `flashcore.ledger.run-3.lock`.
fn lock_of(ledger: &Path, run: RunId) -> PathBuf {
    let mut name = ledger.as_os_str().to_owned();
    name.push(format!(".run-{}.lock", run.0));
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::begin;
    use host::store::Scratch;

    #[test]
    fn a_lock_that_is_dropped_in_a_moment_is_waited_for() {
        let folder = Scratch::new().unwrap();
        let open = || OpenOptions::new().create(true).append(true).open(folder.path("lock")).unwrap();
        let (held, wanted) = (open(), open());
        held.try_lock().unwrap();
        let dropped = std::thread::spawn(move || {
            std::thread::sleep(PATIENCE / 5);
            drop(held);
        });
        lock(&wanted).unwrap();
        dropped.join().unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn a_run_is_driven_by_one_through_a_link_too() {
        let folder = Scratch::new().unwrap();
        let (path, link) = (folder.path("flashcore.ledger"), folder.path("link"));
        let one = Ledger::open(&path).unwrap();
        let run = begin(&one);
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let two = Ledger::open(&link).unwrap();
        one.claim(run).unwrap();
        let refused = two.claim(run).unwrap_err();
        assert!(matches!(refused, LedgerError::Driven { run: 1, .. }), "{refused}");
    }

    #[test]
    fn a_run_is_driven_by_one_at_a_time() {
        let folder = Scratch::new().unwrap();
        let path = folder.path("flashcore.ledger");
        let (one, two) = (Ledger::open(&path).unwrap(), Ledger::open(&path).unwrap());
        let (first, second) = (begin(&one), begin(&two));
        one.claim(first).unwrap();
        one.claim(first).unwrap();
        let refused = two.claim(first).unwrap_err();
        assert!(matches!(refused, LedgerError::Driven { run: 1, .. }), "{refused}");
        assert!(refused.to_string().contains("flashcore.ledger.run-1.lock"), "{refused}");
        two.claim(second).unwrap();
        assert!(matches!(one.claim(RunId(9)), Err(LedgerError::Unknown { .. })));
        assert!(!lock_of(&path, RunId(9)).exists());
        // Dropping the claim simulates a crash: the lock file stays and the lock is released.
        drop(one);
        assert!(lock_of(&path, first).exists());
        two.claim(first).unwrap();
        two.event(first, RunEvent::Finished).unwrap();
        two.release(first).unwrap();
        assert!(!lock_of(&path, first).exists() && lock_of(&path, second).exists());
        two.event(second, RunEvent::Stopped).unwrap();
        two.release(second).unwrap();
        Ledger::open(&path).unwrap().claim(second).unwrap();
    }
}
