//! The command `flashcore version`: prints the version of this build.

use std::io::Write;

use serde_json::json;

use crate::args::Version;
use crate::error::CliError;
use crate::{Status, terminal, unless_closed};

/// Prints the version of this build and the commit that it was built from, as far as that is known.
pub fn version(args: &Version) -> Result<Status, CliError> {
    let (number, commit) = (env!("CARGO_PKG_VERSION"), bench::provenance::built_from());
    let (os, arch) = (std::env::consts::OS, std::env::consts::ARCH);
    let mut out = terminal::out();
    unless_closed(
        if args.json {
            let object = json!({
                "version": number, "commit": commit, "rustc": bench::provenance::RUSTC, "os": os, "arch": arch,
            });
            out.json("version", &object)
        } else {
            let commit = commit.map_or(String::new(), |commit| format!(" (commit {commit})"));
            writeln!(out, "flashcore {number}{commit}, {os} {arch}, {}", bench::provenance::RUSTC)
        }
        .map_err(CliError::from),
    )?;
    Ok(Status::Passed)
}
