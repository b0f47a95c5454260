//! What is said beside the result, on standard error. A reader who has gone is no error: the work and its exit code stand.

use std::fmt::Display;
use std::io::Write;

/// A message.
pub fn tell(message: impl Display) {
    let _ = writeln!(std::io::stderr().lock(), "flashcore: {message}");
}

/// How far it is; what is said next goes over it.
pub fn progress(words: &str) {
    let mut error = std::io::stderr().lock();
    let _ = write!(error, "{words:<40}\r").and_then(|()| error.flush());
}
