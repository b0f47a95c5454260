//! The errors of a ledger. Each names the file, the problem and the remedy.

use std::path::{Path, PathBuf};

use rusqlite::ErrorCode;

/// Why the ledger could not be opened, read or written. A failed operation changes nothing.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The file does not exist, and the caller wants to read it.
    #[error("{path}: there is no ledger; `flashcore evolve --ledger {path}` creates one")]
    Missing { path: PathBuf },
    /// The file is empty, and the caller wants to read it.
    #[error("{path} is empty: it contains no ledger yet; `flashcore evolve --ledger {path}` creates one")]
    Empty { path: PathBuf },
    #[error("{path} is not a FlashCore ledger: {what}; name another file with --ledger")]
    NotALedger {
        path: PathBuf,
        /// The kind of the file.
        what: String,
    },
    /// Another version of FlashCore wrote the file.
    #[error(
        "{path} is a ledger of version {found}, but this FlashCore reads version {known}; use the FlashCore \
        that wrote it, or name another file with --ledger"
    )]
    Version {
        path: PathBuf,
        found: i64,
        /// The version that this program reads.
        known: i64,
    },
    /// The database pages are inconsistent.
    #[error(
        "{path} is damaged: {what}. Restore it from a copy, or save what is readable with `flashcore ledger export \
         FILE.jsonl --ledger {path}`"
    )]
    Damaged {
        path: PathBuf,
        /// SQLite's finding.
        what: String,
    },
    /// Another process held the write lock for too long.
    #[error(
        "{path} was locked by another process for more than {seconds} s; end that process (`fuser {path}` \
        names it), or try again later; to continue a run that this error stopped, use `flashcore evolve \
        --resume --ledger {path}`"
    )]
    Locked {
        path: PathBuf,
        /// How long this process waited, s.
        seconds: f64,
    },
    #[error(
        "run {run} of {path} is driven by another process, which holds {lock}; end that process first \
        (`fuser {lock}` names it), or resume another run"
    )]
    Driven {
        path: PathBuf,
        run: i64,
        /// The lock file that the other process holds.
        lock: PathBuf,
    },
    /// The path leads to no file, or to a file other than the opened one.
    #[error(
        "{path} was {what} while this process had it open: the latest data is lost, and no more data is \
        written. Restore the ledger from a copy, or begin a new one; {path}-wal and {path}-shm, if they \
        still exist, belong to the lost file and can be deleted"
    )]
    Gone { path: PathBuf, what: &'static str },
    /// The disk is full, or the file has reached a size limit.
    #[error(
        "{path}: no space for another fact ({what}); free some space, then continue with `flashcore \
        evolve --resume --ledger {path}`, or begin again if the ledger has no run yet"
    )]
    Full {
        path: PathBuf,
        /// Which limit was hit.
        what: String,
    },
    /// The file or its folder is not writable.
    #[error(
        "{path} cannot be written ({what}): the file and its folder must be writable, because SQLite \
        writes its log beside the file"
    )]
    ReadOnly {
        path: PathBuf,
        /// SQLite's message.
        what: String,
    },
    /// The ledger has no row with this number.
    #[error("{path} has no {what}")]
    Unknown {
        path: PathBuf,
        /// The missing row in words.
        what: String,
    },
    /// The forecast already has an outcome.
    #[error(
        "forecast {forecast} of {path} already has an outcome, {us} µs: expected a forecast without an \
        outcome; add a new forecast for a new measurement"
    )]
    CameOut {
        path: PathBuf,
        forecast: i64,
        /// The stored outcome, µs.
        us: f64,
    },
    /// The forecast belongs to a candidate, so its outcome is the candidate's measurement.
    #[error(
        "invalid value '{forecast}' for a forecast of {path}: expected a forecast of an idea; the outcome of this one \
         is the measurement of candidate {candidate}"
    )]
    OfCandidate { path: PathBuf, forecast: i64, candidate: i64 },
    /// A value that the ledger does not accept.
    #[error("invalid value '{value}' for {what}: expected {accepted}")]
    Value {
        /// The name of the value.
        what: &'static str,
        value: String,
        /// Accepted values.
        accepted: &'static str,
    },
    /// The operating system's error for a file in the folder of the ledger.
    #[error("{path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
    /// Any other error of SQLite.
    #[error("{path}: {source}")]
    Sql { path: PathBuf, source: rusqlite::Error },
}

impl LedgerError {
    /// Translates an error of SQLite.
    pub(super) fn of(path: &Path, waited: f64, error: rusqlite::Error) -> LedgerError {
        let path = path.to_path_buf();
        let what = error.to_string();
        // A write error under a limit on the file size (EFBIG) counts as a full disk.
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
            _ => match error {
                // A stored value that cannot be parsed is damage: FlashCore never writes such a value.
                rusqlite::Error::FromSqlConversionFailure(..) | rusqlite::Error::Utf8Error(..) => {
                    LedgerError::Damaged { path, what }
                }
                error => LedgerError::Sql { path, source: error },
            },
        }
    }
}
