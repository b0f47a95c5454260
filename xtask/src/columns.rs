//! Checks that prose and comments keep to 110 columns. rustfmt applies that limit to code only.

use std::ops::Range;
use std::path::Path;

use pulldown_cmark::{Event, Options, Parser, Tag};

use crate::XtaskError;
use crate::book::{self, File};

/// The width limit, as in `rustfmt.toml`.
pub const COLUMNS: usize = 110;

/// Files and folders whose lines are checked, relative to the root. A folder stands for its Markdown, Rust
/// and Python files.
const HELD: [&str; 12] = [
    "bridges",
    "crates",
    "docs/src",
    "evidence",
    "examples",
    "xtask",
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "python",
];

/// The lines that are too long, one line per fault.
///
/// # Errors
/// When a file cannot be read.
pub fn faults(root: &Path) -> Result<Vec<String>, XtaskError> {
    Ok(held(root)?.iter().flat_map(long).collect())
}

/// The files whose lines are checked.
///
/// # Errors
/// When a file cannot be read.
pub fn held(root: &Path) -> Result<Vec<File>, XtaskError> {
    let mut files = Vec::new();
    for held in HELD {
        if root.join(held).is_dir() {
            files.extend(book::files(root, held, &["md", "rs", "py"])?);
        } else {
            files.push(book::file(root, held)?);
        }
    }
    Ok(files)
}

/// The lines of a file that are too long.
fn long(file: &File) -> Vec<String> {
    let extension = file.extension();
    let exempt = if extension == "md" { exempt(&file.text) } else { Vec::new() };
    let mut faults = Vec::new();
    let mut start = 0;
    for (number, line) in file.text.split_inclusive('\n').enumerate() {
        let end = start + line.len();
        let counts = match extension {
            "rs" => line.trim_start().starts_with("//") && !is_table_row(line),
            "py" => line.trim_start().starts_with('#'),
            _ => !exempt.iter().any(|range| range.start < end && start < range.end),
        };
        let width =
            if extension == "md" { without_destinations(line) } else { line.trim_end().chars().count() };
        if counts && width > COLUMNS {
            let place = format!("{}:{}", file.path, number + 1);
            faults.push(format!(
                "{place}: {width} columns where prose has at most {COLUMNS}; `cargo xtask fmt` wraps"
            ));
        }
        start = end;
    }
    faults
}

/// Whether a comment line of Rust is a row of a Markdown table, which cannot be broken.
fn is_table_row(line: &str) -> bool {
    line.trim_start_matches([' ', '/', '!']).starts_with('|')
}

/// The ranges of a page that are exempt: tables, code, and the regions that `cargo xtask tables` writes.
pub fn exempt(text: &str) -> Vec<Range<usize>> {
    let blocks = Parser::new_ext(text, Options::ENABLE_TABLES).into_offset_iter();
    let mut ranges: Vec<_> = blocks
        .filter(|(event, _)| matches!(event, Event::Start(Tag::Table(_) | Tag::CodeBlock(_))))
        .map(|(_, range)| range)
        .collect();
    for (start, _) in text.match_indices("<!-- table:") {
        let end = text[start..].find("<!-- /table -->").map_or(text.len(), |length| start + length);
        ranges.push(start..end);
    }
    ranges
}

/// The width of a line of Markdown without the destinations of its links.
pub fn without_destinations(line: &str) -> usize {
    let mut parts = line.trim_end().split("](");
    let first = parts.next().unwrap_or_default().chars().count();
    first + parts.map(|part| part.find(')').map_or(part, |end| &part[end..]).chars().count()).sum::<usize>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<String> {
        long(&File { path: path.to_owned(), text: text.to_owned() })
    }

    #[test]
    fn long_prose_is_found_by_its_line() {
        let wide = "x".repeat(111);
        let fault = |path: &str, line: usize| {
            format!("{path}:{line}: 111 columns where prose has at most 110; `cargo xtask fmt` wraps")
        };
        assert_eq!(found("a.md", &format!("short\n{wide}\n")), [fault("a.md", 2)]);
        let comment = format!("    // {}", "é".repeat(104));
        assert_eq!(found("a.rs", &comment), [fault("a.rs", 1)]);
        assert_eq!(found("a.py", &format!("x = 1\n#{}", &wide[1..])), [fault("a.py", 2)]);
    }

    #[test]
    fn what_cannot_be_broken_is_exempt() {
        let wide = "x".repeat(120);
        let table = format!("| a |\n| :-- |\n| {wide} |\n");
        let code = format!("```text\n{wide}\n```\n\n    indented {wide}\n");
        let made = format!("<!-- table:h200/mission -->\n{wide}\n<!-- /table -->\n");
        let link = format!("See [the page]({wide}).\n");
        for text in [table, code, made, link] {
            assert_eq!(found("a.md", &text), Vec::<String>::new(), "{text}");
        }
        for code in [format!("let a = \"{wide}\";"), format!("//! | {wide} |")] {
            assert_eq!(found("a.rs", &code), Vec::<String>::new());
        }
    }
}
