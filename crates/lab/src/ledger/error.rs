//! What can go wrong with a ledger: which file, what happened, what to do.

use std::path::{Path, PathBuf};

use rusqlite::ErrorCode;

/// Why the ledger could not be opened, read or written. Nothing of the operation took place.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// There is no such file, and only reading was asked for.
    #[error("{path}: there is no ledger here; `flashcore evolve --ledger {path}` begins one")]
    Missing {
        /// The file.
        path: PathBuf,
    },
    /// A file without a byte, and only reading was asked for.
    #[error("{path} is empty: there is no ledger in it yet; `flashcore evolve --ledger {path}` begins one")]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The file is something else.
    #[error("{path} is not a FlashCore ledger: {what}; name another file with --ledger")]
    NotALedger {
        /// The file.
        path: PathBuf,
        /// What it is.
        what: String,
    },
    /// It was written by a newer FlashCore.
    #[error(
        "{path} is a ledger of version {found}, and this FlashCore knows versions up to {known}; use the newer FlashCore that wrote it, or another \
         file with --ledger"
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// Its version.
        found: i64,
        /// The newest one known here.
        known: i64,
    },
    /// Its pages contradict each other.
    #[error(
        "{path} is damaged: {what}; nothing more is written to it. Restore it from a copy, or save what is readable with `flashcore ledger export \
         FILE.jsonl --ledger {path}`"
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What SQLite found.
        what: String,
    },
    /// Another process writes, and did not end in time.
    #[error(
        "{path} was locked by another process for more than {seconds} s; end it (`fuser {path}` names it), or try again once it is done; a run \
         that this one ended goes on with `flashcore evolve --resume --ledger {path}`"
    )]
    Locked {
        /// The file.
        path: PathBuf,
        /// How long it was waited for.
        seconds: f64,
    },
    /// Another process drives the run.
    #[error(
        "run {run} of {path} goes on in another process, which holds {lock}; end that one first (`fuser {lock}` names it), or go on with \
         another run"
    )]
    Driven {
        /// The file.
        path: PathBuf,
        /// The run.
        run: i64,
        /// What the other process holds.
        lock: PathBuf,
    },
    /// The path leads to no file or to another one than was opened.
    #[error(
        "{path} was {what} while this process had it open: what was written last is lost, and nothing more is \
         written. Restore the ledger from a copy, or begin a new one; {path}-wal and {path}-shm, where they were \
         left behind, belong to the lost file and may be deleted"
    )]
    Gone {
        /// The file.
        path: PathBuf,
        /// What became of it.
        what: &'static str,
    },
    /// No room.
    #[error(
        "{path}: no room for another fact ({what}); free some, then go on with `flashcore evolve --resume --ledger {path}`"
    )]
    Full {
        /// The file.
        path: PathBuf,
        /// Which limit was hit.
        what: String,
    },
    /// The file or its folder may not be written.
    #[error(
        "{path} cannot be written ({what}): the file and its folder must be writable, as SQLite keeps its log beside it"
    )]
    ReadOnly {
        /// The file.
        path: PathBuf,
        /// What SQLite says.
        what: String,
    },
    /// A number that names nothing in this ledger.
    #[error("{path} has no {what}")]
    Unknown {
        /// The file.
        path: PathBuf,
        /// What was named.
        what: String,
    },
    /// An idea's forecast has one outcome.
    #[error(
        "forecast {forecast} of {path} came out already, at {us} µs; accepted: one outcome, and a new forecast for a new one"
    )]
    CameOut {
        /// The file.
        path: PathBuf,
        /// The forecast.
        forecast: i64,
        /// Its outcome.
        us: f64,
    },
    /// A candidate's forecast comes out when that is measured.
    #[error(
        "forecast {forecast} of {path} is of candidate {candidate}, whose measurement is its outcome; accepted: a forecast of an idea"
    )]
    OfCandidate {
        /// The file.
        path: PathBuf,
        /// The forecast.
        forecast: i64,
        /// The candidate.
        candidate: i64,
    },
    /// A value that cannot be a fact.
    #[error("{what} = {value} cannot be kept; accepted: {accepted}")]
    Value {
        /// Which.
        what: &'static str,
        /// Its value.
        value: String,
        /// What would be.
        accepted: &'static str,
    },
    /// The system's, of a file beside the ledger.
    #[error("{path}: {source}")]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Anything else.
    #[error("{path}: {source}")]
    Sql {
        /// The file.
        path: PathBuf,
        /// What SQLite says.
        source: rusqlite::Error,
    },
}

impl LedgerError {
    /// What an error of SQLite's means for this file.
    pub(super) fn of(path: &Path, waited: f64, error: rusqlite::Error) -> LedgerError {
        let path = path.to_path_buf();
        let what = error.to_string();
        // An I/O error while writing, under a limit on the file's size (EFBIG): as good as a full disk.
        const IOERR_WRITE: i32 = rusqlite::ffi::SQLITE_IOERR_WRITE;
        match error.sqlite_error().map(|e| (e.code, e.extended_code)) {
            Some((ErrorCode::DatabaseBusy | ErrorCode::DatabaseLocked, _)) => {
                LedgerError::Locked { path, seconds: waited }
            }
            Some((ErrorCode::DiskFull, _) | (ErrorCode::SystemIoFailure, IOERR_WRITE)) => {
                LedgerError::Full { path, what }
            }
            Some((ErrorCode::ReadOnly | ErrorCode::CannotOpen | ErrorCode::PermissionDenied, _)) => {
                LedgerError::ReadOnly { path, what }
            }
            Some((ErrorCode::NotADatabase, _)) => LedgerError::NotALedger { path, what },
            Some((ErrorCode::DatabaseCorrupt, _)) => LedgerError::Damaged { path, what },
            // A row that is not what was written.
            None if matches!(error, rusqlite::Error::FromSqlConversionFailure(..)) => {
                LedgerError::Damaged { path, what }
            }
            _ => LedgerError::Sql { path, source: error },
        }
    }
}
