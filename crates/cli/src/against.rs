//! An earlier version of a kernel, beside which it is checked: `check --against FILE`.

use std::collections::HashMap;
use std::io::Write;
use std::path::Path;

use check::causes::Cause;
use check::gate::{CheckReport, Settings, Verdict, judge_by_version};
use check::launchfile::Bound;
use check::sources::Sources;
use emu::HazardKind;
use host::store;
use serde_json::{Value, json};

use crate::args::Check;
use crate::error::CliError;
use crate::findings::{Found, sentence};
use crate::progress::watched;
use crate::source::Origin;
use crate::terminal::Out;

/// An earlier version, checked in the same launch.
pub struct Earlier<'a> {
    file: &'a Path,
    bound: Bound,
    settings: Settings,
    check: CheckReport,
    found: Found,
    /// The kinds of its findings by the text of their line.
    known: HashMap<String, Vec<HazardKind>>,
}

impl<'a> Earlier<'a> {
    /// Checks the version.
    ///
    /// # Errors
    /// When it does not compile or has another signature, or the emulator cannot run it.
    pub fn check(file: &'a Path, args: &Check, settings: &Settings) -> Result<Earlier<'a>, CliError> {
        if [Some(file), args.launch.as_deref()].into_iter().flatten().any(store::is_standard) {
            let accepted = "files for both versions and for their launch".to_owned();
            return Err(CliError::Argument { argument: "--against", value: "-".to_owned(), accepted });
        }
        let origin = Origin { file, sm: args.sm, compiling: &args.compiling, beside: Some(&args.file) };
        let (bound, text) = match &args.launch {
            Some(launch) => origin.load(launch)?,
            None => origin.load_stated(&args.stated)?,
        };
        let sources = Sources::new(text, file.parent());
        let allowed = sources.allowed(|_, _| Vec::new())?;
        let settings = Settings { allowed, keep_outputs: true, ..settings.clone() };
        let check = watched(&bound, &settings, args.timeout, args.json)?;
        let found = Found::in_sources(&check, &sources);
        let mut known: HashMap<_, Vec<_>> = HashMap::new();
        for cause in found.causes.iter().chain(&found.notes) {
            if let Some(line) = line_of(cause) {
                known.entry(line).or_default().push(cause.kind);
            }
        }
        Ok(Earlier { file, bound, settings, check, found, known })
    }

    /// Lets the outputs of a version that passes judge those of the kernel.
    ///
    /// # Errors
    /// When the version has other buffers.
    pub fn judge(&self, bound: &mut Bound) -> Result<(), CliError> {
        if self.check.verdict != Verdict::Passed {
            return Ok(());
        }
        let path = self.file.display().to_string();
        let judging = judge_by_version(bound, &path, &self.bound, (&self.settings, &self.check));
        judging.map_err(|error| CliError::Argument {
            argument: "--against",
            value: path,
            accepted: format!("a version of the kernel: {error}"),
        })
    }

    /// The kinds of its findings at a line of this text, each with the reason why it does not fail the check.
    pub fn kinds(&self, text: &str) -> Vec<(HazardKind, String)> {
        let kinds = self.known.get(text).into_iter().flatten();
        kinds.map(|kind| (*kind, format!("{} has it", self.file.display()))).collect()
    }

    /// Its findings that the kernel does not have.
    fn mended(&self, now: &Found) -> Vec<String> {
        let has = |cause: &&Cause| {
            let mut all = now.causes.iter().chain(&now.notes);
            all.any(|other| other.kind == cause.kind && line_of(other) == line_of(cause))
        };
        self.found.causes.iter().filter(|cause| !has(cause)).map(sentence).collect()
    }

    /// Prints what became of the version.
    pub fn print(&self, out: &mut Out, now: &Found) -> Result<(), CliError> {
        let means = match self.check.verdict {
            Verdict::Passed => "its outputs judge those that nothing else judges",
            Verdict::Failed => {
                "its findings are notes where the kernel has them too, and its outputs judge nothing"
            }
            Verdict::Incomplete => "its outputs judge nothing",
        };
        writeln!(out, "against {}: {}; {means}", self.file.display(), self.check.verdict)?;
        if self.check.verdict == Verdict::Incomplete {
            for reason in &self.check.reasons {
                writeln!(out, "  {}", ptx::quote::words(reason))?;
            }
        }
        for sentence in self.mended(now) {
            writeln!(out, "no longer found: {}", ptx::quote::words(&sentence))?;
        }
        Ok(())
    }

    /// The version as JSON.
    pub fn object(&self, now: &Found) -> Value {
        json!({
            "file": self.file.display().to_string(),
            "verdict": self.check.verdict,
            "findings": self.found.sentences(),
            "mended": self.mended(now),
        })
    }
}

/// The text of a finding's line in the source, or in the PTX where there is no source.
fn line_of(cause: &Cause) -> Option<String> {
    let text = match &cause.source {
        Some(source) => source.text.as_deref(),
        None => cause.text.as_deref(),
    };
    text.map(|text| text.trim().to_owned())
}
