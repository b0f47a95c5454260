//! A proposer that may reach neither the network nor the user's files: its line of the shell is run through a program that restricts
//! itself first, `flashcore sandboxed`.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// What a proposer in a sandbox may see besides the system's programs and libraries.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sandbox {
    /// Environment variables by name.
    pub env: Vec<String>,
    /// Files and folders that may be read.
    pub read: Vec<PathBuf>,
}

impl Sandbox {
    /// Allows these variables and places, and the files that a line of the shell names, such as the script of an interpreter.
    pub fn for_line(line: &str, env: &[String], read: &[PathBuf]) -> Sandbox {
        let words = line.split_whitespace().map(|word| Path::new(word.trim_matches(['\'', '"'])));
        let named = words.filter(|word| word.is_file()).map(Path::to_path_buf);
        Sandbox { env: env.to_vec(), read: read.iter().cloned().chain(named).collect() }
    }

    /// The words of the command that runs a line of the shell: `program` is `flashcore`, and `folder` is the line's own.
    pub(super) fn command(&self, program: &Path, folder: &Path, line: &str) -> Vec<OsString> {
        let mut words: Vec<OsString> =
            vec![program.into(), "sandboxed".into(), "--folder".into(), folder.into()];
        for name in &self.env {
            words.extend(["--env".into(), name.into()]);
        }
        for path in &self.read {
            words.extend(["--read".into(), path.into()]);
        }
        words.extend(["--".into(), line.into()]);
        words
    }
}
