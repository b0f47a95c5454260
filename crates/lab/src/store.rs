//! Files: written whole or not at all, and scratch folders that go when they are dropped.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// A file that cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "path and cause")]
pub enum StoreError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("cannot write {path}: {source}")]
    Write { path: PathBuf, source: std::io::Error },
}

static COUNTER: AtomicU64 = AtomicU64::new(0);

fn unique() -> String {
    format!("{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed))
}

/// Writes a file under another name in the same folder and renames it, so that no one ever sees half of it.
///
/// # Errors
/// When the folder cannot be written; then nothing is left behind.
pub fn write(path: &Path, contents: &[u8]) -> Result<(), StoreError> {
    let fail = |source| StoreError::Write { path: path.to_path_buf(), source };
    let draft = draft(path)?;
    let written = std::fs::write(&draft, contents).and_then(|()| std::fs::rename(&draft, path));
    written.map_err(|source| {
        // The first error is the one to tell; a draft that never came to be cannot be removed.
        let _ = std::fs::remove_file(&draft);
        fail(source)
    })
}

/// A file that is written piece by piece under another name in the same folder, and has its own once it is whole. Dropped before that, it
/// leaves nothing behind.
#[derive(Debug)]
pub struct Draft {
    file: std::io::BufWriter<std::fs::File>,
    draft: PathBuf,
    path: PathBuf,
    kept: bool,
}

impl Draft {
    /// Begins it.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn new(path: &Path) -> Result<Draft, StoreError> {
        let (path, draft) = (path.to_path_buf(), draft(path)?);
        match std::fs::File::create(&draft) {
            Ok(file) => Ok(Draft { file: std::io::BufWriter::new(file), draft, path, kept: false }),
            Err(source) => Err(StoreError::Write { path, source }),
        }
    }

    /// It is whole.
    ///
    /// # Errors
    /// When it cannot be written to its end or be named.
    pub fn keep(mut self) -> Result<(), StoreError> {
        let named = self.file.flush().and_then(|()| std::fs::rename(&self.draft, &self.path));
        self.kept = named.is_ok();
        named.map_err(|source| StoreError::Write { path: self.path.clone(), source })
    }
}

impl Write for Draft {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.file.flush()
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.kept {
            // What cannot be removed is the user's to clean.
            let _ = std::fs::remove_file(&self.draft);
        }
    }
}

/// Whether a file can be written: to be asked before a minute's work, not after.
///
/// # Errors
/// As [`write()`] would.
pub fn writable(path: &Path) -> Result<(), StoreError> {
    let fail = |source| StoreError::Write { path: path.to_path_buf(), source };
    if path.is_dir() {
        return Err(fail(std::io::Error::other("it is a folder; accepted: the name of a file")));
    }
    let draft = draft(path)?;
    std::fs::write(&draft, b"").and_then(|()| std::fs::remove_file(&draft)).map_err(fail)
}

/// The name that a file has until it is whole.
fn draft(path: &Path) -> Result<PathBuf, StoreError> {
    let Some(name) = path.file_name() else {
        let source = std::io::Error::other("it does not name a file");
        return Err(StoreError::Write { path: path.to_path_buf(), source });
    };
    Ok(path.with_file_name(format!(".{}.{}", name.to_string_lossy(), unique())))
}

/// Appends one line to a file; when it cannot be written whole, the file is as it was.
///
/// # Errors
/// When it cannot be opened or written.
pub fn append_line(path: &Path, line: &str) -> Result<(), StoreError> {
    let fail = |source| StoreError::Write { path: path.to_path_buf(), source };
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(fail)?;
    }
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path).map_err(fail)?;
    // One write call, so that rows of two processes do not mix.
    let before = file.metadata().map_err(fail)?.len();
    file.write_all(format!("{line}\n").as_bytes()).map_err(|source| {
        // The first error is the one to tell.
        let _ = file.set_len(before);
        fail(source)
    })
}

/// A folder of our own under the system's temporary folder.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// Makes it.
    ///
    /// # Errors
    /// When the temporary folder cannot be written.
    pub fn new() -> Result<Scratch, StoreError> {
        let path = std::env::temp_dir().join(format!("flashcore-{}", unique()));
        std::fs::create_dir_all(&path).map_err(|source| StoreError::Write { path: path.clone(), source })?;
        Ok(Scratch(path))
    }

    /// A path inside.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // What cannot be removed is the system's to clean.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_nothing() {
        let scratch = Scratch::new().unwrap();
        let file = scratch.path("report.html");
        write(&file, b"first").unwrap();
        write(&file, b"second").unwrap();
        assert_eq!(std::fs::read(&file).unwrap(), b"second");
        std::fs::create_dir(scratch.path("folder")).unwrap();
        std::fs::write(scratch.path("folder").join("x"), b"").unwrap();
        let error = write(&scratch.path("folder"), b"x").unwrap_err().to_string();
        assert!(error.contains("folder"), "{error}");
        assert_eq!(std::fs::read_dir(scratch.path("")).unwrap().count(), 2);
        assert!(write(&scratch.path("none/x"), b"").is_err());
        for (path, accepted) in [("report.html", true), ("new", true), ("none/x", false), ("folder", false)] {
            assert_eq!(writable(&scratch.path(path)).is_ok(), accepted, "{path}");
        }
        assert_eq!(std::fs::read_dir(scratch.path("")).unwrap().count(), 2);
        // Every write to this device fails as on a full disk.
        if Path::new("/dev/full").exists() {
            assert!(append_line(Path::new("/dev/full"), "x").is_err());
        }
    }
}
