//! Files that are written completely or not at all, and scratch folders that are removed on drop.

use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};

/// A file that cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("cannot write {path}: {source}")]
    Write { path: PathBuf, source: std::io::Error },
}

/// Whether a path is `-`, which stands for standard input and standard output.
pub fn is_standard(path: &Path) -> bool {
    path == Path::new("-")
}

/// The maximum length of a text file, in bytes. Kernels, launch files, plans and machine descriptions are
/// much shorter.
const LONGEST: u64 = 64 << 20;

/// Reads a text file that a user wrote, or standard input for `-`. A byte order mark at the beginning is
/// skipped.
///
/// # Errors
/// When the file cannot be read, is longer than 64 MiB or is not text.
pub fn read_text(path: &Path) -> Result<String, StoreError> {
    let fail = |source| StoreError::Read { path: path.to_path_buf(), source };
    let mut bytes = Vec::new();
    // The read is bounded even if the file reports a small length: a device or a pipe may have no end.
    let read = match is_standard(path) {
        true => std::io::stdin().lock().take(LONGEST + 1).read_to_end(&mut bytes),
        false => std::fs::File::open(path).and_then(|file| file.take(LONGEST + 1).read_to_end(&mut bytes)),
    };
    read.map_err(fail)?;
    if bytes.len() as u64 > LONGEST {
        return Err(fail(std::io::Error::other(format!("it is longer than {LONGEST} bytes"))));
    }
    match bytes.iter().position(|&byte| byte == 0) {
        Some(at) => Err(fail(std::io::Error::other(format!("not a text file (NUL at byte {at})")))),
        None => {
            let text = String::from_utf8_lossy(&bytes);
            Ok(text.strip_prefix('\u{feff}').unwrap_or(&text).to_owned())
        }
    }
}

/// A suffix that other processes and users cannot predict.
fn random_suffix() -> String {
    // Each `RandomState` has its own keys, which begin with random numbers of the operating system.
    format!("{:016x}", RandomState::new().hash_one(()))
}

/// Calls `create` with new paths until it succeeds or fails for another reason than that the path exists.
fn create_new<T>(
    mut path: impl FnMut() -> PathBuf,
    create: impl Fn(&Path) -> std::io::Result<T>,
) -> std::io::Result<(PathBuf, T)> {
    loop {
        let path = path();
        match create(&path) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
            created => return created.map(|created| (path, created)),
        }
    }
}

/// Writes a file completely or not at all, through a [`Draft`]. The path `-` means standard output.
///
/// # Errors
/// When the file cannot be written; no partial file is left behind.
pub fn write(path: &Path, contents: &[u8]) -> Result<(), StoreError> {
    let fail = |source| StoreError::Write { path: path.to_path_buf(), source };
    if is_standard(path) {
        let mut out = std::io::stdout().lock();
        return out.write_all(contents).and_then(|()| out.flush()).map_err(fail);
    }
    let mut draft = Draft::new(path)?;
    draft.write_all(contents).map_err(fail)?;
    draft.keep()
}

/// A file that is written in pieces under a temporary name in its folder, and renamed when it is complete, so
/// that no reader sees a partial file. Dropping an unfinished draft removes the temporary file. A symbolic
/// link is kept and its target is written. A device or a pipe is written directly.
#[derive(Debug)]
pub struct Draft {
    file: std::io::BufWriter<File>,
    /// The path as the caller gave it.
    path: PathBuf,
    /// The temporary and the final name; `None` for a device or a pipe.
    names: Option<(PathBuf, PathBuf)>,
}

impl Draft {
    /// # Errors
    /// When the folder cannot be written.
    pub fn new(path: &Path) -> Result<Draft, StoreError> {
        let fail = |source| StoreError::Write { path: path.to_path_buf(), source };
        let (file, names) = match place(path).map_err(fail)? {
            Some(name) => {
                let (draft, file) = draft(&name).map_err(fail)?;
                (file, Some((draft, name)))
            }
            None => (std::fs::OpenOptions::new().write(true).open(path).map_err(fail)?, None),
        };
        Ok(Draft { file: std::io::BufWriter::new(file), path: path.to_path_buf(), names })
    }

    /// Renames the complete file to its final name.
    ///
    /// # Errors
    /// When the rest cannot be written or the file cannot be renamed.
    pub fn keep(mut self) -> Result<(), StoreError> {
        let name = |(draft, name): &(PathBuf, PathBuf)| std::fs::rename(draft, name);
        let kept = self.file.flush().and_then(|()| self.names.as_ref().map_or(Ok(()), name));
        if kept.is_ok() {
            self.names = None;
        }
        kept.map_err(|source| StoreError::Write { path: self.path.clone(), source })
    }
}

/// The path of the regular file that exists or will be created, with links resolved. `None` for a device, a
/// pipe or a socket.
fn place(path: &Path) -> std::io::Result<Option<PathBuf>> {
    match std::fs::metadata(path) {
        Ok(found) if found.is_file() => std::fs::canonicalize(path).map(Some),
        Ok(found) if found.is_dir() => {
            Err(std::io::Error::other("it is a folder: expected the name of a file"))
        }
        Ok(_) => Ok(None),
        Err(_) if path.to_string_lossy().ends_with(std::path::is_separator) => {
            Err(std::io::Error::other("it ends as a folder does: expected the name of a file"))
        }
        Err(_) if path.is_symlink() => Err(std::io::Error::other("it is a link that leads nowhere")),
        // Any other error is reported when the draft is created.
        Err(_) => Ok(Some(path.to_path_buf())),
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
        if let Some((draft, _)) = &self.names {
            // A draft that cannot be removed is left for the user to delete.
            let _ = std::fs::remove_file(draft);
        }
    }
}

/// Checks that a file can be written, before minutes of work are spent on its contents.
///
/// # Errors
/// As for [`write()`].
pub fn writable(path: &Path) -> Result<(), StoreError> {
    if is_standard(path) {
        return Ok(());
    }
    let fail = |source| StoreError::Write { path: path.to_path_buf(), source };
    // A device or a pipe is not opened here: opening a pipe would block until there is a reader.
    let Some(name) = place(path).map_err(fail)? else { return Ok(()) };
    draft(&name).and_then(|(draft, _)| std::fs::remove_file(draft)).map_err(fail)
}

/// Checks that [`append_line`] can append to a file, before minutes of work are spent. Leaves no file behind.
///
/// # Errors
/// As for [`append_line`].
pub fn appendable(path: &Path) -> Result<(), StoreError> {
    let fail = |source| StoreError::Write { path: path.to_path_buf(), source };
    match place(path).map_err(fail)? {
        None => Ok(()),
        Some(file) if file.exists() => {
            std::fs::OpenOptions::new().append(true).open(file).map(drop).map_err(fail)
        }
        Some(file) => {
            let tried = has_folder(&file).and_then(|()| draft(&file));
            tried.and_then(|(draft, _)| std::fs::remove_file(draft)).map_err(fail)
        }
    }
}

/// Whether the folder of a file exists. It is not created: a missing folder is more often a misspelt path, or
/// a command that was started in another folder.
fn has_folder(file: &Path) -> std::io::Result<()> {
    match file.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.exists()) {
        Some(folder) => {
            let why = format!("there is no folder {}; create it, or name another file", folder.display());
            Err(std::io::Error::new(ErrorKind::NotFound, why))
        }
        None => Ok(()),
    }
}

/// Creates the temporary file of a file that is not complete yet. An existing file or link is not written.
fn draft(path: &Path) -> std::io::Result<(PathBuf, File)> {
    let Some(name) = path.file_name() else {
        return Err(std::io::Error::other("it does not name a file"));
    };
    let draft = || path.with_file_name(format!(".{}.{}", name.to_string_lossy(), random_suffix()));
    create_new(draft, |path| File::create_new(path))
}

/// Appends one line to a file. If the line cannot be written completely, the file is cut back to its old
/// length. The file is locked meanwhile, so that the lines of other processes are neither mixed with the line
/// nor cut off.
///
/// # Errors
/// When the file cannot be opened, locked or written.
pub fn append_line(path: &Path, line: &str) -> Result<(), StoreError> {
    let fail = |source| StoreError::Write { path: path.to_path_buf(), source };
    has_folder(path).map_err(fail)?;
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path).map_err(fail)?;
    // Closing the file releases the lock.
    file.lock().map_err(fail)?;
    let before = file.metadata().map_err(fail)?.len();
    file.write_all(format!("{line}\n").as_bytes()).map_err(|source| {
        // The first error is the one to report.
        let _ = file.set_len(before);
        fail(source)
    })
}

/// A private folder under the system's temporary folder, removed on drop. No other user can read it.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// # Errors
    /// When the temporary folder does not exist or cannot be written.
    pub fn new() -> Result<Scratch, StoreError> {
        Scratch::named(|| format!("flashcore-{}", random_suffix()))
    }

    /// A folder with the first of the names that does not exist yet. The contents of an existing folder
    /// belong to someone else.
    fn named(mut name: impl FnMut() -> String) -> Result<Scratch, StoreError> {
        let folder = std::env::temp_dir();
        #[allow(unused_mut, reason = "only Unix has modes")]
        let mut builder = std::fs::DirBuilder::new();
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        let created = create_new(|| folder.join(name()), |path| builder.create(path));
        created
            .map(|(path, ())| Scratch(path))
            .map_err(|source| StoreError::Write { path: folder.clone(), source })
    }

    /// A path inside the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // A folder that cannot be removed is left to the system.
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
        for (path, accepted) in
            [("report.html", true), ("new", true), ("new/", false), ("none/x", false), ("folder", false)]
        {
            assert_eq!(writable(&scratch.path(path)).is_ok(), accepted, "{path}");
        }
        for (path, accepted) in [
            ("report.html", true),
            ("new", true),
            ("new/", false),
            ("none/x", false),
            ("folder", false),
            ("report.html/x", false),
        ] {
            assert_eq!(appendable(&scratch.path(path)).is_ok(), accepted, "{path}");
        }
        // A missing folder is named and not created.
        for fault in [appendable(&scratch.path("none/x")), append_line(&scratch.path("none/x"), "")] {
            assert!(fault.unwrap_err().to_string().contains("there is no folder"));
        }
        assert_eq!(std::fs::read_dir(scratch.path("")).unwrap().count(), 2);
        // Every write to this device fails as on a full disk.
        if Path::new("/dev/full").exists() {
            assert!(append_line(Path::new("/dev/full"), "x").is_err());
        }
    }

    #[cfg(unix)]
    #[test]
    fn scratch_folders_are_new_and_private() {
        use std::os::unix::fs::PermissionsExt;
        let mine = Scratch::new().unwrap();
        assert_eq!(std::fs::metadata(mine.path("")).unwrap().permissions().mode() & 0o777, 0o700);
        let taken = mine.0.file_name().unwrap().to_string_lossy().into_owned();
        let mut names = [taken.clone(), taken, format!("flashcore-{}", random_suffix())].into_iter();
        let other = Scratch::named(|| names.next().unwrap()).unwrap();
        assert_ne!(mine.0, other.0);
        // A link to a file that does not exist is not followed either.
        let (link, target) = (mine.path("link"), mine.path("target"));
        std::os::unix::fs::symlink(&target, &link).unwrap();
        let mut paths = [link, mine.path("free")].into_iter();
        let (path, _) = create_new(|| paths.next().unwrap(), |path| File::create_new(path)).unwrap();
        assert_eq!((path, target.exists()), (mine.path("free"), false));
    }

    #[test]
    fn a_line_is_appended_under_a_lock() {
        let scratch = Scratch::new().unwrap();
        let path = scratch.path("rows.jsonl");
        append_line(&path, "first").unwrap();
        let other = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
        other.lock().unwrap();
        let (tell, done) = std::sync::mpsc::channel();
        let writer = std::thread::spawn({
            let path = path.clone();
            move || tell.send(append_line(&path, "second")).unwrap()
        });
        assert!(done.recv_timeout(std::time::Duration::from_millis(200)).is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "first\n");
        other.unlock().unwrap();
        done.recv().unwrap().unwrap();
        writer.join().unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "first\nsecond\n");
    }

    #[cfg(unix)]
    #[test]
    fn links_and_pipes_stay_what_they_are() {
        use std::os::unix::fs::{FileTypeExt, symlink};
        let scratch = Scratch::new().unwrap();
        let [file, link, pipe, nowhere] = ["file", "link", "pipe", "nowhere"].map(|name| scratch.path(name));
        std::fs::write(&file, b"first").unwrap();
        symlink(&file, &link).unwrap();
        write(&link, b"second").unwrap();
        assert!(link.is_symlink());
        assert_eq!(std::fs::read(&file).unwrap(), b"second");
        symlink(scratch.path("none"), &nowhere).unwrap();
        assert!(writable(&nowhere).is_err() && write(&nowhere, b"x").is_err() && nowhere.is_symlink());
        if !std::process::Command::new("mkfifo").arg(&pipe).status().is_ok_and(|status| status.success()) {
            return;
        }
        writable(&pipe).unwrap();
        let reader = std::thread::spawn({
            let pipe = pipe.clone();
            move || std::fs::read(pipe).unwrap()
        });
        write(&pipe, b"third").unwrap();
        assert!(std::fs::metadata(&pipe).unwrap().file_type().is_fifo());
        assert_eq!(reader.join().unwrap(), b"third");
        // No other file remains in the folder.
        assert_eq!(std::fs::read_dir(scratch.path("")).unwrap().count(), 4);
    }
}
