//! A sandbox for a proposer, without the network and the user's files. The shell line runs through
//! `flashcore sandboxed`, which restricts itself first.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// What a sandboxed proposer may access besides the system's programs and libraries.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sandbox {
    /// Names of environment variables.
    pub env: Vec<String>,
    /// Readable files and folders.
    pub read: Vec<PathBuf>,
}

impl Sandbox {
    /// Permits these variables and paths, and the files that the shell line names, such as a script for an
    /// interpreter.
    pub fn for_line(line: &str, env: &[String], read: &[PathBuf]) -> Sandbox {
        let words = line.split_whitespace().map(|word| Path::new(word.trim_matches(['\'', '"'])));
        let named = words.filter(|word| word.is_file()).map(Path::to_path_buf);
        Sandbox { env: env.to_vec(), read: read.iter().cloned().chain(named).collect() }
    }

    /// The command that runs a shell line. `program` is `flashcore`, and `folder` is the line's own folder.
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
