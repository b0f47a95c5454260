//! The ledger: every candidate, forecast, verdict, measurement and decision, in one SQLite file that many
//! processes share.
//!
//! Facts are only ever added (`facts.rs`, one record type per table), each in its own transaction. An
//! [`Outcome`] is stored completely and at most once ([`Ledger::tell`]). A process that is killed loses only
//! the write in progress. Commits wait for the operating system, not for the disk (`synchronous = NORMAL`): a
//! power failure may lose the last commits, but does not damage the ledger. `schema.rs` describes the tables.
//!
//! POSIX locks belong to a process, not to a file handle. A process that writes a ledger through this crate
//! must not open it with another copy of SQLite, such as Python's `sqlite3`: within one process, each copy
//! releases the other's locks.
//!
//! [`Outcome`]: crate::Outcome

mod candidate;
mod check;
mod checksum;
mod claim;
mod conclusion;
mod earlier;
mod error;
mod export;
mod facts;
mod gain;
mod identity;
mod operator;
mod outcome;
mod pages;
mod rank;
mod read;
mod reason;
pub mod schema;
mod score;
mod stage;
mod totals;
mod write;

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rusqlite::{Connection, OpenFlags, TransactionBehavior};

use host::store::Scratch;

pub use candidate::{Candidate, KernelText, Language, TooLong};
pub use check::{Disagreement, Soundness};
pub use checksum::Altered;
pub use conclusion::Conclusion;
pub use earlier::EarlierKernel;
pub use error::LedgerError;
pub use export::{Exported, Format};
pub use facts::*;
pub use gain::{CHANCE, Gain, gain};
pub use operator::{MadeBy, Operator};
pub use outcome::{Finding, Outcome};
pub use pages::Line;
pub use rank::{Ancestor, EQUAL, Ranked, Win};
pub use read::{Decided, Dossier, Known, Resumed, RunLine};
pub use reason::Reason;
pub use score::{ByHand, Recalibration, SCORED, Score};
pub use stage::Stage;
pub use totals::{Corner, Cost, CostItem, Earnings, Entered, Niche, Pair, RejectionCount, Tally};

/// Default time that a writer waits for another writer.
pub const PATIENCE: Duration = Duration::from_secs(15);

/// Pages of 4 KiB that the write-ahead log holds before they are moved to the ledger. SQLite's own default is
/// 1,000, with which a ledger of 0.4 MB would need 4 MB more on the disk.
const LOG_PAGES: u32 = 250;

/// Ledgers up to this size in bytes are checked when they are opened. Larger ones are checked by `flashcore
/// ledger check` only.
const LOOKED_OVER: u64 = 16 << 20;

/// An open ledger. It can be sent to another thread but not shared, so each thread opens its own.
#[derive(Debug)]
pub struct Ledger {
    connection: Connection,
    path: PathBuf,
    patience: Duration,
    together: Cell<bool>,
    /// The file that was opened for writing.
    identity: Option<identity::Identity>,
    claims: RefCell<Vec<claim::Claim>>,
    /// The folder of the copy that is read instead of a ledger whose log cannot be read in its folder. The
    /// connection is closed before the folder is removed.
    _copy: Option<Scratch>,
}

impl Ledger {
    /// Opens a ledger for writing and reading. Creates the ledger if there is no file.
    ///
    /// # Errors
    /// When the file is not a ledger, is damaged or of another version, stays locked for [`PATIENCE`], or is
    /// not writable.
    pub fn open(path: &Path) -> Result<Ledger, LedgerError> {
        Ledger::open_patient(path, PATIENCE)
    }

    /// Like [`Ledger::open`] for an existing ledger; never creates one.
    ///
    /// # Errors
    /// When the file is missing or empty, and as for [`Ledger::open`].
    pub fn open_existing(path: &Path) -> Result<Ledger, LedgerError> {
        must_exist(path)?;
        Ledger::open(path)
    }

    /// Like [`Ledger::open`], with another limit on the time to wait for other writers.
    ///
    /// # Errors
    /// As for [`Ledger::open`].
    pub fn open_patient(path: &Path, patience: Duration) -> Result<Ledger, LedgerError> {
        recognise(path)?;
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let mut ledger = Ledger::connect(path, flags, patience)?;
        ledger.make_current()?;
        ledger.look_over()?;
        ledger.identity = identity::Identity::of(path)
            .map_err(|source| LedgerError::File { path: path.to_path_buf(), source })?;
        Ok(ledger)
    }

    /// Opens a ledger for reading. No fact is written, and writers are not blocked. Where SQLite may write,
    /// it removes its log and its shared memory when the last process closes the ledger. A ledger with a
    /// write-ahead log in a folder that is not writable is read through a copy, which shows the state at the
    /// time of opening.
    ///
    /// # Errors
    /// When the file is missing or empty, and as for [`Ledger::open`].
    pub fn read(path: &Path) -> Result<Ledger, LedgerError> {
        must_exist(path)?;
        recognise(path)?;
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let ledger = match Ledger::connect(path, flags, PATIENCE) {
            Err(LedgerError::ReadOnly { .. }) => Ledger::connect_unwritable(path)?,
            other => other?,
        };
        ledger.connection.pragma_update(None, "query_only", true).map_err(|e| ledger.error(e))?;
        match ledger.known_version()? {
            // Another process is about to create the ledger.
            0 => Err(LedgerError::Empty { path: path.to_path_buf() }),
            _ => Ok(ledger),
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs several writes in one transaction: either all of them take effect, or none after an error.
    ///
    /// # Errors
    /// The error of the first failed write; [`LedgerError::Gone`] when the file was deleted or replaced.
    pub fn together<T, E: From<LedgerError>>(
        &self,
        writes: impl FnOnce(&Ledger) -> Result<T, E>,
    ) -> Result<T, E> {
        if self.together.get() {
            return writes(self);
        }
        self.still_there()?;
        let begun = rusqlite::Transaction::new_unchecked(&self.connection, TransactionBehavior::Immediate)
            .map_err(|e| self.error(e))?;
        self.together.set(true);
        let written = writes(self);
        self.together.set(false);
        // On an error the transaction is dropped, which rolls it back.
        let written = written?;
        begun.commit().map_err(|e| self.error(e))?;
        self.still_there()?;
        Ok(written)
    }

    fn connect(path: &Path, flags: OpenFlags, patience: Duration) -> Result<Ledger, LedgerError> {
        let error = |e| LedgerError::of(path, patience.as_secs_f64(), e);
        let connection = Connection::open_with_flags(path, flags).map_err(error)?;
        Ledger::with(connection, path, patience)
    }

    /// Opens a ledger in a folder that this process cannot write and that has no shared memory (`PATH-shm`)
    /// through which SQLite could read a write-ahead log. A process that writes the ledger has made that
    /// memory. A killed process may have left a log with committed facts, which `immutable` ignores.
    fn connect_unwritable(path: &Path) -> Result<Ledger, LedgerError> {
        // SQLite names the log after the file to which a link leads.
        let mut log = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf()).into_os_string();
        log.push("-wal");
        if std::fs::metadata(&log).is_ok_and(|log| log.len() > 0) {
            return Ledger::connect_copy(path, Path::new(&log))
                .map_err(|source| LedgerError::File { path: path.to_path_buf(), source })?;
        }
        let escaped: String = path
            .to_string_lossy()
            .chars()
            .map(|c| match c {
                '%' => "%25".to_owned(),
                '?' => "%3f".to_owned(),
                '#' => "%23".to_owned(),
                c => c.to_string(),
            })
            .collect();
        let flags =
            OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX | OpenFlags::SQLITE_OPEN_URI;
        let error = |e| LedgerError::of(path, 0.0, e);
        let connection =
            Connection::open_with_flags(format!("file:{escaped}?immutable=1"), flags).map_err(error)?;
        Ledger::with(connection, path, PATIENCE)
    }

    /// Opens a temporary copy of a ledger and its write-ahead log.
    fn connect_copy(path: &Path, log: &Path) -> std::io::Result<Result<Ledger, LedgerError>> {
        let folder = Scratch::new().map_err(std::io::Error::other)?;
        for (from, name) in [(path, "ledger"), (log, "ledger-wal")] {
            // `std::fs::copy` would keep the mode, and SQLite must be able to write the log's copy.
            std::io::copy(&mut File::open(from)?, &mut File::create(folder.path(name))?)?;
        }
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let copy = Ledger::connect(&folder.path("ledger"), flags, PATIENCE);
        Ok(copy.map(|copy| Ledger { path: path.to_path_buf(), _copy: Some(folder), ..copy }))
    }

    fn with(connection: Connection, path: &Path, patience: Duration) -> Result<Ledger, LedgerError> {
        let (together, claims) = (Cell::new(false), RefCell::default());
        let ledger = Ledger {
            connection,
            path: path.to_path_buf(),
            patience,
            together,
            claims,
            identity: None,
            _copy: None,
        };
        let set = |c: &Connection| {
            checksum::register(c)?;
            c.busy_timeout(patience)?;
            c.set_prepared_statement_cache_capacity(96);
            c.pragma_update(None, "foreign_keys", true)?;
            // REPLACE deletes rows. Without this setting it does not fire the triggers that forbid deletion.
            c.pragma_update(None, "recursive_triggers", true)?;
            c.pragma_update(None, "synchronous", "NORMAL")?;
            c.pragma_update(None, "wal_autocheckpoint", LOG_PAGES)?;
            // A log that a slow reader made longer is cut when it begins anew.
            c.pragma_update(None, "journal_size_limit", LOG_PAGES * 4096)?;
            c.pragma_update(None, "cache_size", -65_536)?;
            c.pragma_update(None, "temp_store", "MEMORY")?;
            // This statement is the first to read the file, and reports any error in it.
            c.query_row("SELECT count(*) FROM sqlite_schema", [], |_| Ok(()))
        };
        set(&ledger.connection).map_err(|e| ledger.error(e))?;
        Ok(ledger)
    }

    /// Sets up the write-ahead log, the tables and the version.
    fn make_current(&self) -> Result<(), LedgerError> {
        let found = self.known_version()?;
        self.log_ahead()?;
        if found == 0 {
            schema::create(&self.connection).map_err(|e| self.error(e))?;
            self.known_version()?;
        }
        Ok(())
    }

    /// Switches to a write-ahead log. The switch needs exclusive access, for which SQLite does not wait.
    fn log_ahead(&self) -> Result<(), LedgerError> {
        let begun = Instant::now();
        loop {
            let mode = self
                .connection
                .pragma_update_and_check(None, "journal_mode", "WAL", |row| row.get::<_, String>(0));
            match mode.map_err(|e| self.error(e)) {
                Err(LedgerError::Locked { .. }) if begun.elapsed() < self.patience => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                other => return other.map(|_| ()),
            }
        }
    }

    fn look_over(&self) -> Result<(), LedgerError> {
        let bytes = std::fs::metadata(&self.path).map(|m| m.len()).unwrap_or(0);
        if bytes > LOOKED_OVER { Ok(()) } else { self.sound("quick_check(1)") }
    }

    /// Runs `PRAGMA quick_check` or `integrity_check`.
    fn sound(&self, check: &str) -> Result<(), LedgerError> {
        let found: String = self
            .connection
            .query_row(&format!("PRAGMA {check}"), [], |row| row.get(0))
            .map_err(|e| self.error(e))?;
        if found == "ok" {
            return Ok(());
        }
        Err(LedgerError::Damaged { path: self.path.clone(), what: found.replace('\n', "; ") })
    }

    fn version(&self) -> Result<i64, LedgerError> {
        // A single statement reads one consistent state: between two statements another process may create
        // the ledger.
        const HEAD: &str = "SELECT (SELECT count(*) FROM sqlite_schema), application_id, user_version
             FROM pragma_application_id, pragma_user_version";
        let (tables, application, version): (i64, i64, i64) = self
            .connection
            .query_row(HEAD, [], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))
            .map_err(|e| self.error(e))?;
        let foreign = match application {
            schema::APPLICATION_ID => false,
            // A new file has no tables yet.
            0 => tables > 0,
            _ => true,
        };
        if foreign {
            let what = format!("it is another program's database (application_id {application:#x})");
            return Err(LedgerError::NotALedger { path: self.path.clone(), what });
        }
        Ok(version)
    }

    /// The version, which is 0 for a new file.
    fn known_version(&self) -> Result<i64, LedgerError> {
        match self.version()? {
            found @ (0 | schema::VERSION) => Ok(found),
            found => Err(LedgerError::Version { path: self.path.clone(), found, known: schema::VERSION }),
        }
    }

    fn count(&self, sql: &str) -> Result<i64, LedgerError> {
        self.connection.query_row(sql, [], |row| row.get(0)).map_err(|e| self.error(e))
    }

    fn error(&self, error: rusqlite::Error) -> LedgerError {
        LedgerError::of(&self.path, self.patience.as_secs_f64(), error)
    }
}

fn must_exist(path: &Path) -> Result<(), LedgerError> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_file() && found.len() == 0 => {
            Err(LedgerError::Empty { path: path.to_path_buf() })
        }
        Ok(_) => Ok(()),
        Err(_) => Err(LedgerError::Missing { path: path.to_path_buf() }),
    }
}

/// Rejects files that cannot be ledgers. SQLite would give less clear errors for a folder or a short text
/// file.
fn recognise(path: &Path) -> Result<(), LedgerError> {
    use std::io::Read;
    let not = |what: &str| LedgerError::NotALedger { path: path.to_path_buf(), what: what.to_owned() };
    if path.is_dir() {
        return Err(not("it is a folder"));
    }
    let mut file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(LedgerError::File { path: path.to_path_buf(), source }),
    };
    let mut head = Vec::new();
    file.by_ref()
        .take(16)
        .read_to_end(&mut head)
        .map_err(|source| LedgerError::File { path: path.to_path_buf(), source })?;
    if head.is_empty() || head == b"SQLite format 3\0" {
        return Ok(());
    }
    Err(not("it is not a SQLite file, or its first page was overwritten"))
}

#[cfg(test)]
mod crash;
#[cfg(test)]
mod integrity;
#[cfg(test)]
mod opening;
#[cfg(test)]
mod tests;
