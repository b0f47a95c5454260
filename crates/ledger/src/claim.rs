//! Claims on runs. Only one process at a time drives a run, however many processes share the ledger.
//!
//! A claim is a lock on a separate file in the folder of the ledger (`LEDGER.run-N.lock`). The system
//! releases the lock when the process that holds it ends for any reason. The process deletes the file while
//! it still holds the lock. The file of a process that was killed stays, and the next process that claims a
//! run of the ledger deletes it. A lock on the ledger's own file would not work: closing that file would
//! release SQLite's locks.
//!
//! A process may open a file that its holder deletes before the process has locked it. A lock therefore
//! counts only while the path still leads to the locked file.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::identity::Identity;
use super::{Ledger, LedgerError, RunId};

/// A run that this process has claimed.
#[derive(Debug)]
pub(super) struct Claim {
    run: RunId,
    path: PathBuf,
    /// The open lock file. Closing it releases the lock.
    file: File,
}

impl Drop for Claim {
    /// Deletes the file before the lock is released. A file that cannot be deleted is locked by the next
    /// process that claims the run.
    fn drop(&mut self) {
        if is_at(&self.file, &self.path).unwrap_or(false) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
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
        let ledger = self.path.canonicalize().map_err(fault)?;
        let path = lock_of(&ledger, run);
        let fault = |source| LedgerError::File { path: path.clone(), source };
        let file = match take(&path, PATIENCE) {
            Ok(file) => file,
            Err(TryLockError::WouldBlock) => {
                return Err(LedgerError::Driven { path: self.path.clone(), run: run.0, lock: path });
            }
            Err(TryLockError::Error(source)) => return Err(fault(source)),
        };
        self.claims.borrow_mut().push(Claim { run, path, file });
        // An error leaves a file behind, which harms no one.
        let _ = clear(&ledger);
        Ok(())
    }

    /// Releases a run, so that another process may claim it.
    pub fn release(&self, run: RunId) {
        self.claims.borrow_mut().retain(|claim| claim.run != run);
    }

    /// The lock files of this process. A process that ends without closing the ledger deletes them first.
    pub fn lock_files(&self) -> Vec<PathBuf> {
        self.claims.borrow().iter().map(|claim| claim.path.clone()).collect()
    }
}

/// Opens and locks a file. On a file system without locks, other processes cannot be excluded.
fn take(path: &Path, patience: Duration) -> Result<File, TryLockError> {
    loop {
        // Opening a pipe would wait for a reader.
        if std::fs::metadata(path).is_ok_and(|found| !found.is_file()) {
            return Err(TryLockError::Error(std::io::Error::other("it is not a regular file; remove it")));
        }
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(TryLockError::Error)?;
        match lock(&file, patience) {
            Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => return Ok(file),
            locked => locked?,
        }
        if is_at(&file, path).map_err(TryLockError::Error)? {
            return Ok(file);
        }
    }
}

/// Whether a path still leads to an open file.
fn is_at(file: &File, path: &Path) -> std::io::Result<bool> {
    match Identity::of(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        found => Ok(found? == Identity::of_open(file)?),
    }
}

/// Deletes the lock files of a ledger that no process holds: those of processes that were killed.
fn clear(ledger: &Path) -> std::io::Result<()> {
    let (Some(folder), Some(name)) = (ledger.parent(), ledger.file_name()) else { return Ok(()) };
    let prefix = format!("{}.run-", name.to_string_lossy());
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let run = name.to_str().and_then(|name| name.strip_prefix(&prefix)?.strip_suffix(".lock"));
        // A pipe would not open.
        if run.is_none_or(|run| run.parse::<i64>().is_err()) || !entry.file_type()?.is_file() {
            continue;
        }
        let file = OpenOptions::new().append(true).open(entry.path())?;
        if file.try_lock().is_ok() && is_at(&file, &entry.path())? {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// How long to wait for a lock that another process holds. `PAUSE` is the time between two attempts.
const PATIENCE: Duration = Duration::from_millis(500);
const PAUSE: Duration = Duration::from_millis(10);

/// Locks a file. A child process holds its parent's locks between fork and exec, so a released lock may stay
/// held for a moment.
fn lock(file: &File, patience: Duration) -> Result<(), TryLockError> {
    let start = Instant::now();
    loop {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) if start.elapsed() < patience => std::thread::sleep(PAUSE),
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
        lock(&wanted, PATIENCE).unwrap();
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
        // A ledger that is closed leaves no lock file.
        drop(one);
        assert!(!lock_of(&path, first).exists());
        two.claim(first).unwrap();
        two.release(first);
        assert!(!lock_of(&path, first).exists() && lock_of(&path, second).exists());
        assert_eq!(two.lock_files(), [lock_of(&path.canonicalize().unwrap(), second)]);
        two.release(second);
        Ledger::open(&path).unwrap().claim(second).unwrap();
    }

    #[test]
    fn lock_files_of_killed_processes_are_deleted() {
        let folder = Scratch::new().unwrap();
        let path = folder.path("flashcore.ledger");
        let (ledger, other) = (Ledger::open(&path).unwrap(), Ledger::open(&path).unwrap());
        let [run, held, killed] = [0; 3].map(|_| begin(&ledger));
        other.claim(held).unwrap();
        // A process that is killed leaves a file that is not locked.
        let stays = ["flashcore.ledger.run-x.lock", "other.ledger.run-1.lock", "flashcore.ledger.lock"];
        stays.iter().for_each(|name| std::fs::write(folder.path(name), "").unwrap());
        std::fs::write(lock_of(&path, killed), "").unwrap();
        ledger.claim(run).unwrap();
        assert!(!lock_of(&path, killed).exists());
        assert!(lock_of(&path, held).exists() && stays.iter().all(|name| folder.path(name).exists()));
        assert!(matches!(ledger.claim(held), Err(LedgerError::Driven { .. })));
    }

    #[cfg(unix)]
    #[test]
    fn a_lock_file_that_is_no_file_is_named() {
        let folder = Scratch::new().unwrap();
        let path = folder.path("flashcore.ledger");
        let ledger = Ledger::open(&path).unwrap();
        let [run, piped, inside] = [0; 3].map(|_| begin(&ledger));
        let pipe = std::process::Command::new("mkfifo").arg(lock_of(&path, piped)).status().unwrap();
        assert!(pipe.success());
        std::fs::create_dir(lock_of(&path, inside)).unwrap();
        for run in [piped, inside] {
            let refused = ledger.claim(run).unwrap_err().to_string();
            let lock = lock_of(&path, run);
            assert!(refused.contains(&lock.display().to_string()) && refused.contains("regular file"));
        }
        // The claim of another run leaves both alone.
        ledger.claim(run).unwrap();
        assert!(lock_of(&path, piped).exists() && lock_of(&path, inside).exists());
    }

    /// The holder deletes the file after another process has opened it and before that process locks it.
    #[cfg(unix)]
    #[test]
    fn a_lock_on_a_deleted_file_does_not_count() {
        let folder = Scratch::new().unwrap();
        let path = folder.path("lock");
        let held = take(&path, Duration::ZERO).unwrap();
        assert!(is_at(&held, &path).unwrap());
        std::fs::remove_file(&path).unwrap();
        assert!(!is_at(&held, &path).unwrap());
        let next = take(&path, Duration::ZERO).unwrap();
        assert!(is_at(&next, &path).unwrap() && !is_at(&held, &path).unwrap());
        assert!(matches!(take(&path, Duration::ZERO), Err(TryLockError::WouldBlock)));
    }
}
