//! Shortens quoted text in messages, so that a message stays short however long the file is.

use std::borrow::Cow;

/// Maximum length of a quoted piece, in characters.
pub const LONGEST: usize = 200;
/// Number of characters kept from the end of a longer piece.
const END: usize = 50;
/// Number of names that a list shows.
const NAMES: usize = 10;

/// The piece itself if it has at most [`LONGEST`] characters, else its beginning and its end.
pub fn cut(piece: &str) -> Cow<'_, str> {
    // A character has at least one byte, so a short byte length needs no count.
    if piece.len() <= LONGEST || piece.chars().count() <= LONGEST {
        return Cow::Borrowed(piece);
    }
    let at = |n: usize| piece.char_indices().nth(n).map_or(piece.len(), |(at, _)| at);
    let from_end = |n: usize| piece.char_indices().nth_back(n - 1).map_or(0, |(at, _)| at);
    Cow::Owned(format!("{} … {}", &piece[..at(LONGEST - END - 3)], &piece[from_end(END)..]))
}

/// The text with every word (a run without white space) cut to [`LONGEST`] characters.
pub fn words(text: &str) -> Cow<'_, str> {
    if text.split_whitespace().all(|word| word.len() <= LONGEST) {
        return Cow::Borrowed(text);
    }
    let pieces = text.split_inclusive(char::is_whitespace).map(|piece| {
        let word = piece.trim_end();
        [cut(word), Cow::Borrowed(&piece[word.len()..])].concat()
    });
    Cow::Owned(pieces.collect())
}

/// The first ten names and the number of further names: `a, b and 3 more`.
pub fn list<S: AsRef<str>>(names: impl IntoIterator<Item = S>) -> String {
    let mut names = names.into_iter();
    let shown: Vec<String> = names.by_ref().take(NAMES).map(|name| cut(name.as_ref()).into_owned()).collect();
    match (names.count(), shown.is_empty()) {
        (_, true) => "none".to_owned(),
        (0, false) => shown.join(", "),
        (more, false) => format!("{} and {} more", shown.join(", "), grouped(more)),
    }
}

/// The count with thousands separators: `199,990`.
fn grouped(count: usize) -> String {
    let digits = count.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().filter_map(|g| str::from_utf8(g).ok()).collect();
    groups.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_piece_keeps_both_ends() {
        let long = format!("é{}é", "x".repeat(1_000_000));
        let short = cut(&long);
        assert_eq!(short.chars().count(), LONGEST);
        assert!(short.starts_with("éx") && short.ends_with("xé") && short.contains(" … "), "{short}");
        let full = "é".repeat(LONGEST);
        assert_eq!(cut(&full), full.as_str());
    }

    #[test]
    fn only_long_words_of_a_text_are_cut() {
        let text = format!("expected `{}`\n  found b", "a".repeat(300));
        let short = words(&text);
        assert!(short.starts_with("expected `aaa") && short.ends_with("`\n  found b"), "{short}");
        assert_eq!(short.chars().count(), "expected ".len() + LONGEST + "\n  found b".len());
        assert_eq!(words("as it is"), "as it is");
    }

    #[test]
    fn a_list_names_ten() {
        let names = |count: usize| list((0..count).map(|i| format!("k{i}")));
        assert_eq!(names(2), "k0, k1");
        assert!(names(10).ends_with("k8, k9"));
        assert!(names(200_000).ends_with("k8, k9 and 199,990 more"), "{}", names(200_000));
        assert_eq!(names(0), "none");
    }
}
