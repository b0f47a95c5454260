//! The result of a check as JUnit XML, which CI servers list as a test.

use std::fmt::Write;
use std::path::Path;

use check::gate::Verdict;
use check::names::demangle;
use check::study::Study;

use crate::findings::{Found, sentence};
use crate::unjudged::Unjudged;

/// The test suite of one check: one case, which fails for a failed check and is an error for an incomplete
/// one. `seconds` is the time that the check took.
pub fn suite(study: &Study, found: &Found, file: &Path, seconds: f64) -> String {
    let verdict = study.check.verdict;
    let count = |wanted: Verdict| usize::from(verdict == wanted);
    let counts = format!(
        "tests=\"1\" failures=\"{}\" errors=\"{}\" skipped=\"0\" time=\"{seconds:.3}\"",
        count(Verdict::Failed),
        count(Verdict::Incomplete)
    );
    let kernel = &study.bound.kernel;
    let name =
        format!("{}, grid {}, block {}", demangle(&kernel.entry), kernel.launch.grid, kernel.launch.block);
    let mut text = head(&counts, file, &name, seconds);
    let element = match verdict {
        Verdict::Passed => None,
        Verdict::Failed => Some("failure"),
        Verdict::Incomplete => Some("error"),
    };
    if let Some(element) = element {
        let causes = found.causes.iter().map(|cause| format!("{}\n  cure: {}", sentence(cause), cause.cure));
        let said: Vec<String> = causes.chain(found.reasons.iter().cloned()).collect();
        let first = said.first().and_then(|said| said.lines().next()).unwrap_or(verdict.name());
        let other = if verdict == Verdict::Failed { "wrong_result" } else { verdict.name() };
        let kind = found.causes.first().map_or(other, |cause| cause.kind.name());
        let _ = writeln!(
            text,
            "      <{element} type=\"{kind}\" message=\"{}\">{}</{element}>",
            escaped(first),
            escaped(&said.join("\n"))
        );
    }
    let notes = found.notes.iter().map(sentence).chain(found.warnings.iter().cloned());
    let notes: Vec<String> = notes.collect();
    if !notes.is_empty() {
        let _ = writeln!(text, "      <system-out>{}</system-out>", escaped(&notes.join("\n")));
    }
    text + TAIL
}

/// The test suite of a kernel that did not run: one case, which is an error.
pub fn unjudged(unjudged: &Unjudged, seconds: f64) -> String {
    let counts = format!("tests=\"1\" failures=\"0\" errors=\"1\" skipped=\"0\" time=\"{seconds:.3}\"");
    let said = unjudged.to_string();
    let first = escaped(said.lines().next().unwrap_or_default());
    let error = format!("      <error type=\"incomplete\" message=\"{first}\">{}</error>\n", escaped(&said));
    head(&counts, &unjudged.file, &unjudged.kernel, seconds) + &error + TAIL
}

/// Everything before the outcome of the only case.
fn head(counts: &str, file: &Path, name: &str, seconds: f64) -> String {
    let (file, name) = (escaped(&file.display().to_string()), escaped(name));
    format!(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites {counts}>\n  <testsuite name=\"flashcore check\" \
         {counts}>\n    <testcase classname=\"{file}\" name=\"{name}\" time=\"{seconds:.3}\">\n"
    )
}

const TAIL: &str = "    </testcase>\n  </testsuite>\n</testsuites>\n";

/// Text for XML. Characters that XML 1.0 does not allow become U+FFFD.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\n' | '\t' => escaped.push(c),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::escaped;

    #[test]
    fn markup_and_control_characters_are_escaped() {
        assert_eq!(escaped("a<b & \"c\">\u{1b}\n"), "a&lt;b &amp; &quot;c&quot;&gt;\u{fffd}\n");
    }
}
