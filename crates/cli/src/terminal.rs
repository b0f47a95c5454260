//! All output of the program, to standard output and to standard error, goes through this module. Text from a
//! file, a kernel or a ledger can hold characters that control a terminal. This module escapes them.

use std::borrow::Cow;
use std::fmt::{Display, Write as _};
use std::io::{StdoutLock, Write};

use ptx::quote;
use serde_json::Value;

use crate::progress;

/// Standard output for people. Characters that control a terminal are escaped.
pub struct Out(StdoutLock<'static>);

/// Standard output, locked.
pub fn out() -> Out {
    Out(std::io::stdout().lock())
}

impl Out {
    /// Prints a value as one line of JSON.
    pub fn json(&mut self, value: &Value) -> std::io::Result<()> {
        writeln!(self.0, "{}", escaped_as(&value.to_string(), json_escape))
    }
}

impl Write for Out {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.write_all(escaped(&String::from_utf8_lossy(bytes)).as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

/// Prints a message on standard error, beside the result. Words that are longer than a message may quote are
/// cut. Lines after the first are indented, so that quoted text never stands where a message of the program
/// begins. A closed standard error is no error.
pub fn tell(message: impl Display) {
    let message = message.to_string();
    aside(format_args!("flashcore: {}", quote::words(&message).replace('\n', "\n  ")));
}

/// Prints a line on standard error with terminal control characters escaped, and changes nothing else.
pub fn aside(line: impl Display) {
    let line = line.to_string();
    progress::beside(|| {
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
