//! Checks the links of the documents. A relative link or image must lead to a file of the repository, and an
//! anchor to a heading. A page of the book must be named in the summary and must not link to files outside
//! the book, because the built book does not contain them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use crate::book::File;

/// The folder of the book's pages, and the page that lists them.
const BOOK: &str = "docs/src/";
const SUMMARY: &str = "docs/src/SUMMARY.md";

/// The faults of the links of these pages, one line per fault.
pub fn faults(root: &Path, pages: &[File]) -> Vec<String> {
    let outlines: BTreeMap<&str, Outline> =
        pages.iter().map(|page| (page.path.as_str(), outline(&page.text))).collect();
    let mut faults = Vec::new();
    let mut listed = BTreeSet::from([SUMMARY.to_owned()]);
    for page in pages {
        for link in &outlines[page.path.as_str()].links {
            let (target, anchor) = target(&page.path, link);
            let why = match (outlines.get(target.as_str()), anchor) {
                _ if page.path.starts_with(BOOK) && !target.starts_with(BOOK) => "leads out of the book",
                _ if !root.join(&target).exists() => "leads to no file",
                (Some(page), Some(anchor)) if !page.anchors.contains(anchor) => "leads to no heading",
                _ => {
                    if page.path == SUMMARY {
                        listed.insert(target);
                    }
                    continue;
                }
            };
            faults.push(format!("{}: the link `{link}` {why}", page.path));
        }
    }
    let in_book = pages.iter().filter(|page| page.path.starts_with(BOOK) && !listed.contains(&page.path));
    faults.extend(in_book.map(|page| format!("{}: the page is not named in {SUMMARY}", page.path)));
    faults
}

/// The file that a link names, relative to the root, and the anchor in that file.
fn target<'a>(page: &str, link: &'a str) -> (String, Option<&'a str>) {
    let (path, anchor) = link.split_once('#').map_or((link, None), |(path, anchor)| (path, Some(anchor)));
    if path.is_empty() {
        return (page.to_owned(), anchor);
    }
    let folder = page.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in path.split('/') {
        match part {
            "." | "" => {}
            ".." if parts.pop().is_some() => {}
            part => parts.push(part),
        }
    }
    (parts.join("/"), anchor)
}

/// The links of a page, and the anchors that other pages can link to.
#[derive(Default)]
struct Outline {
    /// Destinations of links and images, without those that have a scheme.
    links: Vec<String>,
    anchors: BTreeSet<String>,
}

fn outline(text: &str) -> Outline {
    let mut outline = Outline::default();
    let mut heading: Option<String> = None;
    for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. })
                if !dest_url.contains("://") && !dest_url.starts_with("mailto:") =>
            {
                outline.links.push(dest_url.into_string());
            }
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::End(TagEnd::Heading(_)) => {
                let id = anchor(&heading.take().unwrap_or_default());
                let again = (1..).map(|n| format!("{id}-{n}"));
                let free = std::iter::once(id.clone()).chain(again).find(|id| !outline.anchors.contains(id));
                outline.anchors.extend(free);
            }
            Event::Text(part) | Event::Code(part) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(&part);
                }
            }
            _ => {}
        }
    }
    outline
}

/// The anchor of a heading, as mdBook and the usual forges make it.
fn anchor(heading: &str) -> String {
    let kept = |c: char| match c {
        c if c.is_alphanumeric() || c == '_' || c == '-' => Some(c.to_ascii_lowercase()),
        c if c.is_whitespace() => Some('-'),
        _ => None,
    };
    heading.trim().chars().filter_map(kept).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(path: &str, text: &str) -> File {
        File { path: path.to_owned(), text: text.to_owned() }
    }

    fn root() -> &'static Path {
        Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
    }

    #[test]
    fn links_that_lead_somewhere_are_no_faults() {
        let pages = [
            page(
                "README.md",
                "[a](docs/src/SUMMARY.md) [b](#what-is-it) [c](https://x.y/#z)\n\n## What `is` it?",
            ),
            page("docs/src/SUMMARY.md", "- [Benchmarks](benchmarks.md)"),
            page(
                "docs/src/benchmarks.md",
                "[twice](#again-1)\n\n# Again\n\n# Again\n\n![p](images/climb.png)",
            ),
        ];
        assert_eq!(faults(root(), &pages), Vec::<String>::new());
    }

    #[test]
    fn each_broken_link_is_named() {
        let pages = [
            page(
                "README.md",
                "[a](no-such.md) ![b](docs/no-such.png) [c](#nothing) [d](docs/src/benchmarks.md#no)",
            ),
            page("docs/src/SUMMARY.md", "[out](../../README.md)"),
            page("docs/src/benchmarks.md", "# Benchmarks"),
        ];
        assert_eq!(
            faults(root(), &pages),
            [
                "README.md: the link `no-such.md` leads to no file",
                "README.md: the link `docs/no-such.png` leads to no file",
                "README.md: the link `#nothing` leads to no heading",
                "README.md: the link `docs/src/benchmarks.md#no` leads to no heading",
                "docs/src/SUMMARY.md: the link `../../README.md` leads out of the book",
                "docs/src/benchmarks.md: the page is not named in docs/src/SUMMARY.md",
            ]
        );
    }
}
