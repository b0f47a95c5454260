//! Comments that allow a finding: `// flashcore: allow race because all writers store the same value`.

use std::collections::HashMap;

use emu::{Allowed, HazardKind};
use strum::VariantArray as _;

use super::{File, Sources};

/// The beginning of such a comment.
const MARK: &str = "flashcore: allow ";

/// A comment that allows something which fails no check, or that gives no reason.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{file}:{line}: invalid comment `{comment}`: expected `flashcore: allow KIND because REASON` with one of the \
     kinds {}",
    kinds().map(HazardKind::name).collect::<Vec<_>>().join(", ")
)]
pub struct CommentError {
    pub file: String,
    pub line: u32,
    pub comment: String,
}

/// The kinds that fail a check.
fn kinds() -> impl Iterator<Item = HazardKind> {
    HazardKind::VARIANTS.iter().copied().filter(|kind| kind.fails())
}

type Comments = HashMap<u32, Vec<(HazardKind, String)>>;

impl Sources {
    /// The findings that comments allow, and those that are known. A comment applies to its own line, or to
    /// the next line of code if it has a line of its own, and to what is inlined there. PTX without line
    /// information is its own source. `known` returns the kinds of findings that are known at a file (empty
    /// without line information) and the text of a line, each with the reason why it is allowed.
    ///
    /// # Errors
    /// A comment has no known kind, or no reason.
    pub fn allowed(
        &self,
        known: impl Fn(&str, &str) -> Vec<(HazardKind, String)>,
    ) -> Result<Allowed, CommentError> {
        let mut files: HashMap<&str, Comments> = HashMap::new();
        for (name, file) in self.files.iter().filter(|(_, file)| !file.library) {
            files.insert(name, comments(file)?);
        }
        let lines = self.ptx.lines().map(str::to_owned).collect();
        let text = comments(&File { shown: "PTX".to_owned(), library: false, lines })?;
        let mut allowed = HashMap::new();
        for (ptx_line, line) in (1..).zip(self.ptx.lines()) {
            let frames = self.table.frames(ptx_line);
            let own =
                self.own(&frames).and_then(|own| self.text(&frames[own]).map(|text| (&frames[own], text)));
            let kinds = match own {
                Some((frame, text)) => known(self.shown(frame.file), text.trim()),
                None if self.is_empty() => known("", line.trim()),
                None => Vec::new(),
            };
            for (kind, reason) in kinds {
                allowed.insert((kind, ptx_line), reason);
            }
            let named = frames.iter().filter_map(|frame| files.get(frame.file)?.get(&frame.line));
            for (kind, reason) in named.chain(text.get(&ptx_line)).flatten() {
                allowed.entry((*kind, ptx_line)).or_insert_with(|| reason.clone());
            }
        }
        Ok(allowed.into())
    }
}

/// The comments of a file, by the line to which they apply.
fn comments(file: &File) -> Result<Comments, CommentError> {
    let mut comments = Comments::new();
    let mut above = Vec::new();
    for (number, text) in (1..).zip(&file.lines) {
        if let Some(at) = text.find(MARK) {
            let comment = text[at..].trim_end_matches("*/").trim();
            above.push(parse(comment, number, file)?);
        }
        let text = text.trim_start();
        if !text.is_empty()
            && !["//", "#", "/*"].iter().any(|begin| text.starts_with(begin))
            && !above.is_empty()
        {
            comments.insert(number, std::mem::take(&mut above));
        }
    }
    Ok(comments)
}

fn parse(comment: &str, line: u32, file: &File) -> Result<(HazardKind, String), CommentError> {
    let (kind, reason) = comment[MARK.len()..].split_once(" because ").unwrap_or_default();
    match kinds().find(|known| known.name() == kind.trim()) {
        Some(kind) if !reason.trim().is_empty() => {
            Ok((kind, format!("{}:{line} allows it because {}", file.shown, reason.trim())))
        }
        _ => Err(CommentError { file: file.shown.clone(), line, comment: comment.to_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_comment_applies_to_its_line_or_to_the_next_code() {
        let text = "// flashcore: allow race because it is the last\n// further words\n\n  st.u32 [a], b;\n  \
                    ld.u32 b, [a]; // flashcore: allow weak_order because of the flag\n  ret;\n";
        let allowed = Sources::from(text.to_owned()).allowed(|_, _| Vec::new()).unwrap();
        assert_eq!(allowed.len(), 2);
        assert_eq!(allowed[&(HazardKind::Race, 4)], "PTX:1 allows it because it is the last");
        assert_eq!(allowed[&(HazardKind::WeakOrder, 5)], "PTX:5 allows it because of the flag");
    }

    #[test]
    fn a_comment_needs_a_kind_and_a_reason() {
        for comment in
            ["races because why", "race", "race because ", " because it works", "unused_read because why"]
        {
            let comment = format!("{MARK}{comment}");
            let error =
                Sources::from(format!("\n// {comment}\nret;")).allowed(|_, _| Vec::new()).unwrap_err();
            assert_eq!(
                error,
                CommentError { file: "PTX".to_owned(), line: 2, comment: comment.trim().to_owned() }
            );
            assert!(error.to_string().contains("one of the kinds race, uninitialised_read, "), "{error}");
        }
    }
}
