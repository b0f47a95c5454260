//! Detects that the path of a ledger no longer leads to the open file. Without this check, a process could go
//! on writing to a deleted file, which the system discards when the process ends.

use std::fs::{File, Metadata};
use std::path::Path;

use super::{Ledger, LedgerError};

/// Device and inode of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Identity(u64, u64);

impl Identity {
    /// The identity of the file at a path; `None` on systems without such numbers.
    pub fn of(path: &Path) -> std::io::Result<Option<Identity>> {
        std::fs::metadata(path).map(|found| Identity::from(&found))
    }

    /// The identity of an open file.
    pub fn of_open(file: &File) -> std::io::Result<Option<Identity>> {
        file.metadata().map(|found| Identity::from(&found))
    }

    #[cfg(unix)]
    fn from(found: &Metadata) -> Option<Identity> {
        use std::os::unix::fs::MetadataExt;
        Some(Identity(found.dev(), found.ino()))
    }

    #[cfg(not(unix))]
    fn from(_: &Metadata) -> Option<Identity> {
        None
    }
}

impl Ledger {
    /// Fails when the path no longer leads to the file that was opened for writing.
    pub(super) fn still_there(&self) -> Result<(), LedgerError> {
        let Some(opened) = self.identity else { return Ok(()) };
        let path = self.path.clone();
        match Identity::of(&self.path) {
            Ok(found) if found == Some(opened) => Ok(()),
            Ok(_) => Err(LedgerError::Gone { path, what: "replaced by another file" }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Err(LedgerError::Gone { path, what: "deleted" })
            }
            Err(source) => Err(LedgerError::File { path, source }),
        }
    }
}
