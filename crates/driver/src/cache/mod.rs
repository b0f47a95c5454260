//! Compiled kernels on disk, so that a second process need not compile them again.
//!
//! A file is named after its key and holds magic, version, key, length and checksum before the cubin. It is written under
//! another name in the same folder and renamed, so that any number of processes may use a folder at once. Whatever is wrong
//! with a file or the folder costs a compilation and is counted; it is never an error and never a wrong kernel.

mod file;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use file::Damage;
pub use file::Key;

/// Bytes of files that a folder keeps; beyond that those go that were not used longest.
const LIMIT: u64 = 256 << 20;

/// The cache in one folder, or none.
#[derive(Debug)]
pub struct CubinCache {
    /// `None` where the system names no place for caches.
    folder: Option<PathBuf>,
    limit: u64,
    hits: AtomicU64,
    misses: AtomicU64,
    stored: AtomicU64,
    damaged: AtomicU64,
    unwritable: AtomicU64,
}

/// What a cache did since the process began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Kernels taken from the folder.
    pub hits: u64,
    /// Kernels that were not there.
    pub misses: u64,
    /// Kernels put there.
    pub stored: u64,
    /// Files that were torn, corrupt, foreign or refused by the driver: compiled anew.
    pub damaged: u64,
    /// Kernels that could not be put there: read-only, full or missing folder.
    pub unwritable: u64,
}

/// What a cache's folder holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheUsage {
    /// The folder; `None` where the system names no place for caches.
    pub folder: Option<PathBuf>,
    /// Whether a file can be put there.
    pub writable: bool,
    /// Kernels there.
    pub entries: usize,
    /// Their bytes.
    pub bytes: u64,
}

impl CubinCache {
    /// The cache in `folder`, which is made when it is first needed.
    pub fn new(folder: Option<PathBuf>, limit: u64) -> CubinCache {
        let zero = || AtomicU64::new(0);
        let (hits, misses, stored, damaged, unwritable) = (zero(), zero(), zero(), zero(), zero());
        CubinCache { folder, limit, hits, misses, stored, damaged, unwritable }
    }

    /// The cache of this user: in `FLASHCORE_CACHE_DIR`, else in `flashcore` under `XDG_CACHE_HOME`, else under `.cache` of
    /// the home folder (`LOCALAPPDATA` on Windows).
    pub fn of_environment() -> CubinCache {
        let variable =
            |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        CubinCache::new(folder_of(variable), LIMIT)
    }

    /// The folder; `None` where the system names no place for caches.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// What it did since the process began.
    pub fn stats(&self) -> CacheStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        CacheStats {
            hits: read(&self.hits),
            misses: read(&self.misses),
            stored: read(&self.stored),
            damaged: read(&self.damaged),
            unwritable: read(&self.unwritable),
        }
    }

    /// What the folder holds, and whether a file can be put there.
    pub fn usage(&self) -> CacheUsage {
        let Some(folder) = &self.folder else {
            return CacheUsage { folder: None, writable: false, entries: 0, bytes: 0 };
        };
        let files = file::list(folder);
        CacheUsage {
            folder: Some(folder.clone()),
            writable: file::is_writable(folder),
            entries: files.len(),
            bytes: files.iter().map(|file| file.bytes).sum(),
        }
    }

    /// The cubin of that key, if a sound file holds it.
    pub fn get(&self, key: &Key) -> Option<Vec<u8>> {
        let found = self.folder.as_ref().map(|folder| file::read(folder, key));
        match found {
            Some(Ok(cubin)) => {
                count(&self.hits);
                return Some(cubin);
            }
            Some(Err(Damage::Damaged)) => count(&self.damaged),
            Some(Err(Damage::Missing)) | None => count(&self.misses),
        }
        None
    }

    /// Keeps a cubin, in the place of what was there, and lets the oldest go where that is too much.
    pub fn put(&self, key: &Key, cubin: &[u8]) {
        let Some(folder) = &self.folder else { return count(&self.unwritable) };
        match file::write(folder, key, cubin) {
            Ok(()) => {
                count(&self.stored);
                file::trim(folder, self.limit, key);
            }
            Err(_) => count(&self.unwritable),
        }
    }

    /// Forgets a cubin that the driver refused.
    pub fn reject(&self, key: &Key) {
        count(&self.damaged);
        if let Some(folder) = &self.folder {
            file::remove(folder, key);
        }
    }
}

fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// The folder that the environment names.
fn folder_of(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    variable("FLASHCORE_CACHE_DIR")
        .or_else(|| Some(variable("XDG_CACHE_HOME").filter(|path| path.is_absolute())?.join("flashcore")))
        .or_else(|| Some(variable("HOME")?.join(".cache").join("flashcore")))
        .or_else(|| Some(variable("LOCALAPPDATA")?.join("flashcore").join("cache")))
}
