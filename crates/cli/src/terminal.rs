//! All output of the program, to standard output and to standard error, goes through this module. Text from a
//! file, a kernel or a ledger can hold characters that control a terminal. This module escapes them.

use std::borrow::Cow;
use std::fmt::{Display, Write as _};
use std::io::{IsTerminal, StdoutLock, Write};
use std::sync::OnceLock;

use check::gate::Verdict;
use clap::builder::styling::{AnsiColor, Style};
use ptx::quote;
use serde_json::{Value, json};

use crate::args::{Colour, Output};
use crate::bar;

/// The version of every JSON output. It is raised when a key is removed or changes its meaning; new keys do
/// not raise it.
pub const SCHEMA: u32 = 1;

/// The amount of output, and the outputs that are coloured.
#[derive(Debug, Default)]
struct Settings {
    quiet: bool,
    verbose: bool,
    /// Whether standard output is coloured.
    out: bool,
    /// Whether standard error is coloured.
    err: bool,
}

static SETTINGS: OnceLock<Settings> = OnceLock::new();

/// Applies the options of the command line. Only the first call has an effect.
pub fn configure(output: &Output) {
    let colour = |is_terminal: bool| match output.color {
        Colour::Always => true,
        Colour::Never => false,
        Colour::Auto => {
            is_terminal && unset("NO_COLOR") && std::env::var_os("TERM").is_none_or(|t| t != "dumb")
        }
    };
    SETTINGS.get_or_init(|| Settings {
        quiet: output.quiet,
        verbose: output.verbose && !output.quiet,
        out: colour(std::io::stdout().is_terminal()),
        err: colour(std::io::stderr().is_terminal()),
    });
}

/// Whether an environment variable is missing or empty (<https://no-color.org>).
fn unset(variable: &str) -> bool {
    std::env::var_os(variable).is_none_or(|value| value.is_empty())
}

fn settings() -> &'static Settings {
    SETTINGS.get_or_init(Settings::default)
}

/// Whether `--quiet` was given.
pub fn is_quiet() -> bool {
    settings().quiet
}

/// Whether `--verbose` was given.
pub fn is_verbose() -> bool {
    settings().verbose
}

/// The meaning of a colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    Good,
    Bad,
    Doubtful,
    /// A name that introduces a paragraph.
    Name,
}

impl Tone {
    fn style(self) -> Style {
        let colour = |colour: AnsiColor| colour.on_default().bold();
        match self {
            Tone::Good => colour(AnsiColor::Green),
            Tone::Bad => colour(AnsiColor::Red),
            Tone::Doubtful => colour(AnsiColor::Yellow),
            Tone::Name => Style::new().bold(),
        }
    }
}

impl From<Verdict> for Tone {
    fn from(verdict: Verdict) -> Tone {
        match verdict {
            Verdict::Passed => Tone::Good,
            Verdict::Failed => Tone::Bad,
            Verdict::Incomplete => Tone::Doubtful,
        }
    }
}

/// Output for people, to standard output or to memory. Characters that control a terminal are escaped.
pub struct Out<W = StdoutLock<'static>> {
    to: W,
    is_coloured: bool,
}

/// Standard output, locked.
pub fn out() -> Out {
    Out { to: std::io::stdout().lock(), is_coloured: settings().out }
}

/// The text that `print` writes, without colours.
pub fn text<E>(print: impl FnOnce(&mut Out<Vec<u8>>) -> Result<(), E>) -> Result<String, E> {
    let mut out = Out { to: Vec::new(), is_coloured: false };
    print(&mut out)?;
    Ok(String::from_utf8_lossy(&out.to).into_owned())
}

impl<W: Write> Out<W> {
    /// Prints an object as one line of JSON, with the name and version of its schema. A value that is not an
    /// object becomes `rows` of such an object.
    pub fn json(&mut self, name: &str, value: &Value) -> std::io::Result<()> {
        let mut object = match value {
            Value::Object(_) => value.clone(),
            rows => json!({ "rows": rows }),
        };
        object["schema"] = json!(format!("flashcore.{name}/{SCHEMA}"));
        writeln!(self.to, "{}", escaped_as(&object.to_string(), json_escape))
    }

    /// Prints words in a tone, without a line feed.
    pub fn paint(&mut self, tone: Tone, words: impl Display) -> std::io::Result<()> {
        let words = words.to_string();
        let style = if self.is_coloured { tone.style() } else { Style::new() };
        write!(self.to, "{style}{}{style:#}", escaped(&words))
    }

    /// Writes bytes of data as they are.
    pub fn data(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.to.write_all(bytes)
    }
}

impl<W: Write> Write for Out<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.to.write_all(escaped(&String::from_utf8_lossy(bytes)).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.to.flush()
    }
}

/// Prints a note on standard error, in addition to the result, unless `--quiet` was given. Quoted text that
/// is too long is cut. Lines after the first are indented, so that quoted text never stands where a message
/// of the program begins. Errors of standard error itself are ignored.
pub fn tell(message: impl Display) {
    if !is_quiet() {
        message_line(Tone::Name, message);
    }
}

/// Prints what went wrong on standard error, also with `--quiet`.
pub fn fault(message: impl Display) {
    message_line(Tone::Bad, message);
}

/// Prints a detail on standard error if `--verbose` was given.
pub fn detail(message: impl Display) {
    if is_verbose() {
        message_line(Tone::Name, message);
    }
}

fn message_line(tone: Tone, message: impl Display) {
    let style = if settings().err { tone.style() } else { Style::new() };
    let message = message.to_string();
    let message = quote::words(&message).replace('\n', "\n  ");
    bar::beside(|| {
        let _ = writeln!(std::io::stderr().lock(), "{style}flashcore:{style:#} {}", escaped(&message));
    });
}

/// Prints a line on standard error with terminal control characters escaped, unless `--quiet` was given.
pub fn aside(line: impl Display) {
    if is_quiet() {
        return;
    }
    let line = line.to_string();
    bar::beside(|| {
        let _ = writeln!(std::io::stderr().lock(), "{}", escaped(&line));
    });
}

/// Escapes characters that control a terminal, hide text or change its order. The escapes are those of Rust
/// literals. Line feeds and tabs stay.
pub fn escaped(text: &str) -> Cow<'_, str> {
    escaped_as(
        text,
        |c| if matches!(c, '\n' | '\t') { c.to_string() } else { c.escape_default().to_string() },
    )
}

/// Like [`escaped`], but also escapes line feeds and tabs: the result is one line.
pub fn one_line(text: &str) -> Cow<'_, str> {
    escaped_as(text, |c| c.escape_default().to_string())
}

fn escaped_as(text: &str, escape: impl Fn(char) -> String) -> Cow<'_, str> {
    if !text.contains(steers) {
        return Cow::Borrowed(text);
    }
    Cow::Owned(text.chars().map(|c| if steers(c) { escape(c) } else { c.to_string() }).collect())
}

/// The JSON escape of a control character. Such characters occur only inside JSON strings.
fn json_escape(c: char) -> String {
    let mut text = String::new();
    for unit in c.encode_utf16(&mut [0; 2]) {
        // Writing to a `String` does not fail.
        let _ = write!(text, "\\u{unit:04x}");
    }
    text
}

/// Control characters, line separators, and the invisible Unicode characters that hide text or change its
/// order.
fn steers(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{feff}')
        || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}')
        || matches!(c, '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_steers_a_terminal_is_escaped() {
        let hostile = "\x1b[2K\rpassed\u{9b}8m\u{202e}x\u{200b}\u{2028}\u{e0041}\u{7f}";
        let shown = escaped(hostile);
        assert_eq!(shown, "\\u{1b}[2K\\rpassed\\u{9b}8m\\u{202e}x\\u{200b}\\u{2028}\\u{e0041}\\u{7f}");
        assert_eq!(escaped("µs\tof\n“é”"), "µs\tof\n“é”");
        assert_eq!(one_line("a\nb"), "a\\nb");
    }

    #[test]
    fn escaped_json_is_the_same_value() {
        let value = serde_json::json!({ "text": "\u{202e}\u{9b}\u{e0041}\x1b\x7f é" });
        let text = value.to_string();
        let escaped = escaped_as(&text, json_escape);
        assert!(!escaped.contains(steers), "{escaped}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&escaped).unwrap(), value);
    }
}
