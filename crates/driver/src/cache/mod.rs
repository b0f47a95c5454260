//! Compiled kernels on disk, so that later processes need not compile them again.
//!
//! A file is named after its key and holds magic, version, key, length and checksum before the cubin. The
//! file is written under another name in the same folder and then renamed, so that any number of processes
//! may use a folder at once. A damaged file or an unusable folder causes a compilation and is counted. It
//! never causes an error or a wrong kernel.

mod file;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use file::Damage;
pub use file::Key;

/// Maximum size of all files in a folder, in bytes. Beyond that, the least recently used files are removed.
const LIMIT: u64 = 256 << 20;

/// The cache in one folder, or a cache without a folder, which stores nothing.
#[derive(Debug)]
pub struct CubinCache {
    /// `None` if the environment names no folder for caches.
    folder: Option<PathBuf>,
    limit: u64,
    hits: AtomicU64,
    misses: AtomicU64,
    stored: AtomicU64,
    damaged: AtomicU64,
    unwritable: AtomicU64,
}

/// Counters of a cache since the process began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Number of kernels taken from the folder.
    pub hits: u64,
    /// Number of kernels that were not in the folder.
    pub misses: u64,
    /// Number of kernels written to the folder.
    pub stored: u64,
    /// Number of files that were truncated, corrupt, written for another key or rejected by the driver. Their
    /// kernels are compiled again.
    pub damaged: u64,
    /// Number of kernels that could not be written: the folder is read-only, full or missing.
    pub unwritable: u64,
}

/// The contents of a cache's folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheUsage {
    /// The folder; `None` if the environment names no folder for caches.
    pub folder: Option<PathBuf>,
    /// Whether files can be written to the folder.
    pub writable: bool,
    /// Number of kernels in the folder.
    pub entries: usize,
    /// Size of these kernels in bytes.
    pub bytes: u64,
}

impl CubinCache {
    /// The cache in `folder`, which is created when first needed, with at most `limit` bytes of files.
    pub fn new(folder: Option<PathBuf>, limit: u64) -> CubinCache {
        let zero = || AtomicU64::new(0);
        let (hits, misses, stored, damaged, unwritable) = (zero(), zero(), zero(), zero(), zero());
        CubinCache { folder, limit, hits, misses, stored, damaged, unwritable }
    }

    /// The user's cache: in `FLASHCORE_CACHE_DIR`, else in `flashcore` under `XDG_CACHE_HOME`, else in
    /// `flashcore` under `.cache` of the home folder (`LOCALAPPDATA` on Windows).
    pub fn of_environment() -> CubinCache {
        let variable =
            |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        CubinCache::new(folder_of(variable), LIMIT)
    }

    /// The folder; `None` if the environment names no folder for caches.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The counters since the process began.
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

    /// The contents of the folder, and whether files can be written to it.
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

    /// The cubin with this key, if an undamaged file holds it.
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

    /// Stores a cubin, replacing an earlier one with the same key. Removes the least recently used files
    /// beyond the limit.
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

    /// Removes a cubin that the driver rejected, and counts it as damaged.
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

/// The folder that the environment variables name.
fn folder_of(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    variable("FLASHCORE_CACHE_DIR")
        .or_else(|| Some(variable("XDG_CACHE_HOME").filter(|path| path.is_absolute())?.join("flashcore")))
        .or_else(|| Some(variable("HOME")?.join(".cache").join("flashcore")))
        .or_else(|| Some(variable("LOCALAPPDATA")?.join("flashcore").join("cache")))
}
