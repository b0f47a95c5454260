//! What is said beside the result, on standard error. A reader who has gone is no error: the work and its exit code stand.

use std::fmt::Display;
use std::io::Write;

/// A message. What a file holds may be quoted in it, and must not steer the terminal.
pub fn tell(message: impl Display) {
    let _ = writeln!(std::io::stderr().lock(), "flashcore: {}", escaped(&message.to_string()));
}

/// With the control characters as in Rust's literals, except those of plain text.
fn escaped(text: &str) -> String {
    let steers = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    text.chars().map(|c| if steers(c) { c.escape_default().to_string() } else { c.to_string() }).collect()
}

/// How far it is; what is said next goes over it.
pub fn progress(words: &str) {
    let mut error = std::io::stderr().lock();
    let _ = write!(error, "{words:<40}\r").and_then(|()| error.flush());
}
