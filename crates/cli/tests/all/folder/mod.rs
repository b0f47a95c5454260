//! Helpers for the tests of the built command.

use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A folder for one test, deleted at its end.
pub struct Folder(pub PathBuf);

impl Folder {
    /// Creates an empty folder. Tests that run at the same time may use one name.
    pub fn new(name: &str) -> Folder {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("flashcore-cli-{}-{number}-{name}", std::process::id());
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }

    /// Writes a file and returns its path.
    pub fn write(&self, name: &str, contents: &str) -> String {
        let path = self.0.join(name);
        std::fs::write(&path, contents).unwrap();
        path.display().to_string()
    }

    /// The names of the files in the folder.
    #[allow(dead_code, reason = "not every test looks")]
    pub fn names(&self) -> std::collections::BTreeSet<std::ffi::OsString> {
        std::fs::read_dir(&self.0).unwrap().flatten().map(|entry| entry.file_name()).collect()
    }

    /// Runs the built command in the folder, with the plans that are kept in the folder.
    pub fn run(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_flashcore"));
        command.args(args).current_dir(&self.0).env("FLASHCORE_CONFIG_DIR", self.0.join("config"));
        command.output().unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Printed bytes as text.
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}
