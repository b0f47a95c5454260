//! Candidates from outside: a program that reads what is known on its standard input and answers with a plan or a whole kernel.
//!
//! The program may be anything, a script or a client of a language model, and it may do anything wrong: it runs with limits, in a
//! process group that ends with it, and what it answers is judged like every other candidate.
//! `docs/src/reference/proposers.md` tells its author what it is given and what it may answer.

mod answer;
mod sandbox;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use super::children::{Confinement, Limits, Said, run, run_command};
use super::task::Stage;
use crate::ledger::Rejection;
use crate::store::{Scratch, StoreError};
pub use answer::Proposal;
pub use sandbox::Sandbox;

/// What a proposer may take unless its caller says otherwise: a model that is asked over a network needs minutes.
pub const LIMITS: Limits =
    Limits { wall: Duration::from_secs(300), cpu_seconds: 120, memory: 8 << 30, output: 16 << 20 };

/// Characters of an answer that a rejection quotes.
const QUOTED: usize = 300;

/// A program that proposes candidates.
#[derive(Clone, Debug, PartialEq)]
pub struct Proposer {
    /// A line of the shell.
    line: String,
    limits: Limits,
    /// The program that restricts itself, and what it leaves.
    sandbox: Option<(PathBuf, Sandbox)>,
}

/// Why a program said nothing.
#[derive(Debug, thiserror::Error)]
pub enum Unheard {
    /// It broke a limit or never began.
    #[error(transparent)]
    Confinement(#[from] Confinement),
    /// There is no folder for it.
    #[error("its folder cannot be made: {0}")]
    Folder(#[from] StoreError),
}

impl Proposer {
    /// The program that a line of the shell runs, as in `python3 examples/proposer.py`.
    pub fn new(line: &str, limits: Limits) -> Proposer {
        Proposer { line: line.to_owned(), limits, sandbox: None }
    }

    /// The same with other limits.
    #[must_use]
    pub fn within(self, limits: Limits) -> Proposer {
        Proposer { limits, ..self }
    }

    /// The same in a sandbox: `program` is `flashcore`, which restricts itself before it runs the line.
    #[must_use]
    pub fn sandboxed(self, program: PathBuf, sandbox: Sandbox) -> Proposer {
        Proposer { sandbox: Some((program, sandbox)), ..self }
    }

    /// Runs the line with an input, within its limits and in its sandbox. A sandbox comes with a folder of
    /// its own, which goes with the program.
    ///
    /// # Errors
    /// When the line cannot be started or breaks a limit.
    pub fn run(&self, input: Vec<u8>) -> Result<Said, Unheard> {
        let Some((program, sandbox)) = &self.sandbox else {
            return Ok(run(&self.line, input, &self.limits)?);
        };
        let folder = Scratch::new()?;
        let command = sandbox.command(program, &folder.path(""), &self.line);
        Ok(run_command(&command, input, &self.limits)?)
    }

    /// Asks it. `brief` is an object: what is to be made faster, where, and what is known of it. How answers look is added.
    ///
    /// # Errors
    /// Why there is no candidate: it hangs, crashes, says too much or nothing that is one. What is wrong with a candidate
    /// itself shows when it is evaluated.
    pub fn propose(&self, brief: &Value) -> Result<Proposal, Rejection> {
        let mut brief = brief.clone();
        if let Some(object) = brief.as_object_mut() {
            object.insert("answers".to_owned(), answer::help());
        }
        let said = self.run(format!("{brief}\n").into_bytes()).map_err(|fault| match fault {
            Unheard::Confinement(Confinement::Time(_)) => rejection("hangs", fault),
            _ => rejection("proposer", fault),
        })?;
        if !said.status.success() {
            let detail = format!("it ended with {}: {}", said.status, end(&said.complaint));
            return Err(rejection("proposer", detail));
        }
        let text = String::from_utf8(said.output).map_err(|error| {
            rejection(
                "proposer",
                format!("its answer is no text: {error}; accepted: one JSON object in UTF-8"),
            )
        })?;
        Proposal::parse(&text)
            .map_err(|error| rejection("proposer", format!("{error}; it answered {:?}", quoted(text.trim()))))
    }
}

/// The program that a line of the shell begins with, where the shell finds none of that name. A line that begins with more than a plain
/// word, quotes or an assignment say, is taken at its word.
pub fn missing(line: &str) -> Option<&str> {
    let word = line.split_whitespace().next()?;
    let is_plain = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '.' | '/' | '+');
    if word.starts_with('-') || !word.chars().all(is_plain) {
        return None;
    }
    let mut shell = Command::new("sh");
    shell.args(["-c", "command -v \"$1\"", "sh", word]).stdin(Stdio::null()).stdout(Stdio::null());
    // Without a shell it is told when it is asked.
    let is_missing = shell.stderr(Stdio::null()).status().is_ok_and(|status| !status.success());
    is_missing.then_some(word)
}

fn rejection(reason: &str, detail: impl ToString) -> Rejection {
    Rejection { stage: Stage::Propose, reason: reason.to_owned(), detail: detail.to_string() }
}

/// The beginning of a text.
fn quoted(text: &str) -> String {
    let mut begin: String = text.chars().take(QUOTED).collect();
    if begin.len() < text.len() {
        begin.push('…');
    }
    begin
}

/// The end of a text, where a traceback says what is wrong.
fn end(text: &str) -> String {
    let skipped = text.chars().count().saturating_sub(QUOTED);
    let kept: String = text.chars().skip(skipped).collect();
    if skipped > 0 { format!("…{kept}") } else { kept }
}

#[cfg(test)]
mod tests;
