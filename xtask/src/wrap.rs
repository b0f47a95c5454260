//! Wraps prose and comments at the columns that [`crate::columns`] checks. rustfmt does so for code only.
//! A paragraph without a long line stays as it is.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::book::File;
use crate::columns::{COLUMNS, exempt, held, without_destinations};
use crate::{XtaskError, run};

/// Formats the Rust code, then wraps the comments and documents.
///
/// # Errors
/// When rustfmt fails, or a file cannot be read or written.
pub fn format(root: &Path) -> Result<(), XtaskError> {
    run(Command::new(env!("CARGO")).current_dir(root).args(["fmt", "--all"]))?;
    for file in held(root)? {
        let text = wrapped(&file);
        if text != file.text {
            let path = root.join(&file.path);
            fs::write(&path, text).map_err(|source| XtaskError::Io { path, source })?;
            println!("wrapped {}", file.path);
        }
    }
    Ok(())
}

/// The text of a file with its paragraphs wrapped.
fn wrapped(file: &File) -> String {
    let markers: &[&str] = match file.extension() {
        "rs" => &["///", "//!", "//"],
        "py" => &["#"],
        _ => return prose(&file.text, 0),
    };
    let (mut text, mut block, mut lead) = (String::new(), String::new(), "");
    for line in file.text.split_inclusive('\n') {
        let own = lead_of(line, markers);
        // A comment without text has no space after its marker.
        if own.trim_end() != lead.trim_end() {
            text += &put(lead, &block);
            (block, lead) = (String::new(), own);
        }
        if own.is_empty() {
            text += line;
        } else {
            lead = if own.len() > lead.len() { own } else { lead };
            block += line.strip_prefix(lead).unwrap_or("\n");
        }
    }
    text + &put(lead, &block)
}

/// The indentation, the marker and a space of a line that is a comment; else nothing.
fn lead_of<'l>(line: &'l str, markers: &[&str]) -> &'l str {
    let start = line.len() - line.trim_start_matches(' ').len();
    let marker = markers.iter().find(|marker| line[start..].starts_with(**marker));
    let Some(end) = marker.map(|marker| start + marker.len()) else { return "" };
    match line[end..].chars().next() {
        Some(' ') => &line[..=end],
        Some('\n') | None => &line[..end],
        // `//-----` and `#!`
        Some(_) => "",
    }
}

/// A block of comments with its lead before each line again.
fn put(lead: &str, block: &str) -> String {
    let lines = prose(block, lead.chars().count());
    lines.split_inclusive('\n').map(|line| (lead.to_owned() + line).trim_end().to_owned() + "\n").collect()
}

/// Markdown with its paragraphs wrapped, in lines that begin after some columns.
fn prose(text: &str, before: usize) -> String {
    let exempt = exempt(text);
    let (mut result, mut paragraph, mut start) = (String::new(), Vec::new(), 0);
    for line in text.split_inclusive('\n') {
        let end = start + line.len();
        let is_fixed = exempt.iter().any(|range| range.start < end && start < range.end)
            || line.trim().is_empty()
            || line.trim_start().starts_with(['#', '|', '<', '>', '['])
            || line.ends_with("  \n");
        if is_fixed || marker_width(line.trim_start()) > 0 {
            result += &filled(&paragraph, before);
            paragraph.clear();
        }
        if is_fixed {
            result += line;
        } else {
            paragraph.push(line);
        }
        start = end;
    }
    result + &filled(&paragraph, before)
}

/// The characters of a list's marker at the start of a line.
fn marker_width(line: &str) -> usize {
    let Some((word, _)) = line.split_once(' ') else { return 0 };
    let number = word.strip_suffix(['.', ')']).unwrap_or_default();
    let is_number = !number.is_empty() && number.chars().all(|c| c.is_ascii_digit());
    if is_number || ["-", "*", "+"].contains(&word) { word.len() + 1 } else { 0 }
}

/// A paragraph in lines that fit, if one of its lines does not. A comment has characters before its text;
/// there the destinations of links count.
fn filled(paragraph: &[&str], before: usize) -> String {
    let fits = |line: &str| match before {
        0 => without_destinations(line) <= COLUMNS,
        _ => before + line.trim_end().chars().count() <= COLUMNS,
    };
    if paragraph.iter().all(|line| fits(line)) {
        return paragraph.concat();
    }
    let first = paragraph[0];
    let indent = first.len() - first.trim_start().len();
    let hang = " ".repeat(indent + marker_width(first.trim_start()));
    let (mut text, mut line) = (String::new(), first[..indent].to_owned());
    for word in paragraph.iter().flat_map(|line| line.split_whitespace()) {
        let is_first = line.trim().is_empty();
        let longer = if is_first { format!("{line}{word}") } else { format!("{line} {word}") };
        // At the start of a line this word would begin a list or a heading.
        let is_marker = marker_width(&format!("{word} ")) > 0 || word.starts_with(['#', '|', '>']);
        if is_first || is_marker || fits(&longer) {
            line = longer;
        } else {
            text += &format!("{line}\n");
            line = format!("{hang}{word}");
        }
    }
    format!("{text}{line}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(path: &str, text: &str) -> String {
        let once = wrapped(&File { path: path.to_owned(), text: text.to_owned() });
        assert_eq!(wrapped(&File { path: path.to_owned(), text: once.clone() }), once, "a second time");
        once
    }

    #[test]
    fn long_comments_are_wrapped_with_their_lead() {
        let words = "word ".repeat(24);
        let text = format!("    /// {words}end.\n    ///\n    /// - {words}end.\n    fn f() {{}}\n");
        let (most, rest) = ("word ".repeat(20), "word word word word end.");
        let wanted = format!(
            "    /// {0}\n    /// {rest}\n    ///\n    /// - {0}\n    ///   {rest}\n    fn f() {{}}\n",
            most.trim_end()
        );
        assert_eq!(of("a.rs", &text), wanted);
        let python = format!("    # {words}end.\n");
        assert_eq!(of("a.py", &python), format!("    # {most}word\n    # word word word end.\n"));
    }

    #[test]
    fn what_fits_or_cannot_be_broken_stays() {
        let wide = "x".repeat(130);
        for text in [
            "//! short\n//! lines\n\n// - a\n//   b\n".to_owned(),
            format!("//! | {wide} {wide} |\n"),
            format!("/// ```text\n/// {wide} {wide}\n/// ```\nfn f() {{}}\n"),
            format!("let text = \"{wide} {wide}\";\n"),
            format!("// {wide}\n"),
            "//----- a line of its own".to_owned(),
        ] {
            assert_eq!(of("a.rs", &text), text);
        }
        let page =
            format!("# Title {wide}\n\n| a |\n|---|\n| {wide} {wide} |\n\n    code {wide}\n\nline  \nline\n");
        assert_eq!(of("a.md", &page), page);
        let link = format!("See [the page]({wide}) and [another]({wide}).\n");
        assert_eq!(of("a.md", &link), link);
        assert_eq!(of("a.rs", &format!("/// {link}")).lines().count(), 4, "in a comment, destinations count");
    }

    #[test]
    fn no_line_of_a_paragraph_begins_a_list() {
        let text = format!("{}- 1. # end\n", "word ".repeat(22));
        assert_eq!(of("a.md", &text), format!("{}- 1. #\nend\n", "word ".repeat(22)));
        let item = format!("10. {}end\n", "word ".repeat(22));
        assert_eq!(of("a.md", &item), format!("10. {}\n    word end\n", "word ".repeat(21).trim_end()));
    }
}
