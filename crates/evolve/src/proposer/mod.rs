//! Proposers: external programs that read a brief on their standard input and answer with a plan or a whole
//! kernel.
//!
//! The program may be a script or a client of a language model, and it may misbehave. It runs with limits in
//! a process group that ends with it, and its answer is checked like every other candidate.
//! `docs/src/reference/proposers.md` describes the brief and the answers for authors of proposers.

mod answer;
mod sandbox;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use super::children::{Confinement, ProcessLimits, ProgramOutput, run, run_command};
use super::task::{Stage, reject};
pub use answer::Proposal;
use host::store::{Scratch, StoreError};
use ledger::{Reason, Rejection};
pub use sandbox::Sandbox;

/// Default limits of a proposer. A model that is queried over a network needs minutes.
pub const LIMITS: ProcessLimits =
    ProcessLimits { wall: Duration::from_secs(300), cpu_seconds: 120, memory: 8 << 30, output: 16 << 20 };

/// Characters of an answer that a rejection quotes.
const QUOTED: usize = 300;

/// A program that proposes candidates.
#[derive(Clone, Debug, PartialEq)]
pub struct Proposer {
    /// A shell command line.
    line: String,
    limits: ProcessLimits,
    /// The program that sets up the sandbox, and the permissions of the sandbox.
    sandbox: Option<(PathBuf, Sandbox)>,
}

/// Why a program gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum Unheard {
    #[error(transparent)]
    Confinement(#[from] Confinement),
    /// The program's folder cannot be created.
    #[error("the program's folder cannot be created: {0}")]
    Folder(#[from] StoreError),
}

impl Proposer {
    /// A proposer that runs a shell command line, such as `python3 examples/proposer.py`.
    pub fn new(line: &str, limits: ProcessLimits) -> Proposer {
        Proposer { line: line.to_owned(), limits, sandbox: None }
    }

    /// Replaces the limits.
    #[must_use]
    pub fn within(self, limits: ProcessLimits) -> Proposer {
        Proposer { limits, ..self }
    }

    /// Runs the line in a sandbox. `program` is `flashcore`, which restricts itself before it runs the line.
    #[must_use]
    pub fn sandboxed(self, program: PathBuf, sandbox: Sandbox) -> Proposer {
        Proposer { sandbox: Some((program, sandbox)), ..self }
    }

    /// Runs the line with an input, within its limits and in its sandbox. A sandboxed program has its own
    /// folder, which is removed when the program ends.
    ///
    /// # Errors
    /// When the line cannot be started or exceeds a limit.
    pub fn run(&self, input: Vec<u8>) -> Result<ProgramOutput, Unheard> {
        let Some((program, sandbox)) = &self.sandbox else {
            return Ok(run(&self.line, input, &self.limits)?);
        };
        let folder = Scratch::new()?;
        let command = sandbox.command(program, &folder.path(""), &self.line);
        Ok(run_command(&command, input, &self.limits)?)
    }

    /// Asks the proposer. `brief` is an object with the problem, the device and the known results. The
    /// description of answers is added to it.
    ///
    /// # Errors
    /// The rejection, when the program hangs, crashes, writes too much or gives no valid answer. Defects of
    /// the candidate itself are found in its evaluation.
    pub fn propose(&self, brief: &Value) -> Result<Proposal, Rejection> {
        let mut brief = brief.clone();
        if let Some(object) = brief.as_object_mut() {
            object.insert("answers".to_owned(), answer::help());
        }
        let said = self.run(format!("{brief}\n").into_bytes()).map_err(|fault| match fault {
            Unheard::Confinement(Confinement::Time(_)) => reject(Stage::Propose, Reason::Hangs, fault),
            _ => reject(Stage::Propose, Reason::Proposer, fault),
        })?;
        if !said.status.success() {
            let detail = format!("it ended with {}: {}", said.status, end(&said.stderr));
            return Err(reject(Stage::Propose, Reason::Proposer, detail));
        }
        let text = String::from_utf8(said.output).map_err(|error| {
            reject(
                Stage::Propose,
                Reason::Proposer,
                format!("invalid answer ({error}): expected one JSON object in UTF-8"),
            )
        })?;
        Proposal::parse(&text).map_err(|error| {
            reject(
                Stage::Propose,
                Reason::Proposer,
                format!("{error}; it answered {:?}", quoted(text.trim())),
            )
        })
    }
}

/// The program at the start of a command line, if the shell does not find it. A line that does not start with
/// a plain word (but with quotes or an assignment, for example) is not checked.
pub fn missing(line: &str) -> Option<&str> {
    let word = line.split_whitespace().next()?;
    let is_plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '/' | '+');
    if word.starts_with('-') || !word.chars().all(is_plain) {
        return None;
    }
    let mut shell = Command::new("sh");
    shell.args(["-c", "command -v \"$1\"", "sh", word]).stdin(Stdio::null()).stdout(Stdio::null());
    // Without a shell, the error is reported when the proposer is asked.
    let is_missing = shell.stderr(Stdio::null()).status().is_ok_and(|status| !status.success());
    is_missing.then_some(word)
}

/// The beginning of a text.
fn quoted(text: &str) -> String {
    let mut begin: String = text.chars().take(QUOTED).collect();
    if begin.len() < text.len() {
        begin.push('…');
    }
    begin
}

/// The end of a text, where the message of a traceback is.
fn end(text: &str) -> String {
    let skipped = text.chars().count().saturating_sub(QUOTED);
    let kept: String = text.chars().skip(skipped).collect();
    if skipped > 0 { format!("…{kept}") } else { kept }
}

#[cfg(test)]
mod tests;
