//! Why a check or an explanation has no verdict: the kernel needs what the emulator does not have.

use std::path::{Path, PathBuf};

use check::names::demangle;
use check::sources::{SourceLine, Sources};
use ptx::{LeftOut, ParseError};

/// A kernel that uses a feature that the emulator does not support.
#[derive(Debug, thiserror::Error)]
#[error("{kernel} of {} cannot be judged: {place}: {what}\n  {text}", file.display())]
pub struct Unjudged {
    pub file: PathBuf,
    /// The name of the entry as in the source.
    pub kernel: String,
    /// The source line, and the line of the PTX.
    place: String,
    what: String,
    text: String,
    /// The place of the instruction in the source, and its line of the PTX.
    pub at: Option<SourceLine>,
    pub line: u32,
}

impl Unjudged {
    pub fn new(file: &Path, left_out: LeftOut, sources: &Sources) -> Unjudged {
        let LeftOut { function, error } = left_out;
        let ParseError { line, column, text, message } = error;
        let at = sources.line(line);
        let ptx = format!("line {line}, column {column}");
        Unjudged {
            file: file.to_path_buf(),
            kernel: ptx::quote::cut(&demangle(&function)).into_owned(),
            place: at.as_ref().map_or(ptx.clone(), |at| format!("{} (PTX {ptx})", at.name())),
            what: message,
            text: ptx::quote::cut(text.trim()).into_owned(),
            at,
            line,
        }
    }
}
