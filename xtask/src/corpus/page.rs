//! Writes the counts of public kernels into their page of the guide, and the findings into a document beside
//! the lists.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use super::{Class, Fate, Reason, Repository, Row};
use crate::XtaskError;

/// The page that shows the counts, and the marks of its generated part.
const PAGE: &str = "docs/src/guide/public-kernels.md";
const BEGIN: &str = "<!-- corpus: begin -->\n";
const END: &str = "<!-- corpus: end -->\n";

/// The rows of test suites of other projects, and the marks of their table.
const SUITES: &str = "xtask/corpus/suites.jsonl";
const SUITES_BEGIN: &str = "<!-- suites: begin -->\n";
const SUITES_END: &str = "<!-- suites: end -->\n";

/// The document with the findings.
const FINDINGS: &str = "xtask/corpus/findings.md";

/// Writes the generated part of the page, and the document with the findings.
pub(super) fn write(root: &Path, lists: &[Repository], rows: &[Row]) -> Result<(), XtaskError> {
    let io = |path: &Path| {
        let path = path.to_path_buf();
        |source| XtaskError::Io { path, source }
    };
    let path = root.join(PAGE);
    let page = std::fs::read_to_string(&path).map_err(io(&path))?;
    let page = between(&page, BEGIN, END, &counts(lists, rows))?;
    let suites = root.join(SUITES);
    let suites = std::fs::read_to_string(&suites).map_err(io(&suites))?;
    let page = between(&page, SUITES_BEGIN, SUITES_END, &suite_counts(&suites)?)?;
    std::fs::write(&path, page).map_err(io(&path))?;
    let path = root.join(FINDINGS);
    std::fs::write(&path, findings(lists, rows)).map_err(io(&path))
}

/// A page with another text between two marks.
fn between(page: &str, begin: &str, end: &str, text: &str) -> Result<String, XtaskError> {
    let parts = page
        .split_once(begin)
        .and_then(|(before, rest)| rest.split_once(end).map(|(_, after)| (before, after)));
    let Some((before, after)) = parts else {
        return Err(XtaskError::Check(format!("{PAGE} has no lines {begin:?} and {end:?}")));
    };
    Ok(format!("{before}{begin}{text}{end}{after}"))
}

/// The counts of a test suite, as `python/check/tools/survey.py` writes them.
#[derive(serde::Deserialize)]
struct Suite {
    project: String,
    commit: String,
    triton: String,
    functions: usize,
    judged: usize,
    without_kernel: usize,
    skipped: usize,
    not_run: usize,
    hazards: usize,
}

/// The table of test suites.
fn suite_counts(rows: &str) -> Result<String, XtaskError> {
    let mut text = String::from(
        "\n| project | commit | Triton | functions | judged | without a kernel | skipped by the suite | not run \
         | hazards |\n|---|---|---|--:|--:|--:|--:|--:|--:|\n",
    );
    for row in rows.lines() {
        let suite: Suite =
            serde_json::from_str(row).map_err(|error| XtaskError::Check(format!("{SUITES}: {error}")))?;
        let Suite { project, commit, triton, .. } = &suite;
        let counts = [
            suite.functions,
            suite.judged,
            suite.without_kernel,
            suite.skipped,
            suite.not_run,
            suite.hazards,
        ];
        let counts = counts.map(|count| count.to_string()).join(" | ");
        let _ = writeln!(text, "| {project} | `{commit}` | {triton} | {counts} |");
    }
    text.push('\n');
    Ok(text)
}

/// The counts of kernels and of mutants.
fn counts(lists: &[Repository], rows: &[Row]) -> String {
    let mut text = String::from(
        "\n| repository | commit | kernels | passed | faults | by the letter | false alarms | incomplete | refused | \
         not explained |\n|---|---|--:|--:|--:|--:|--:|--:|--:|--:|\n",
    );
    let mut line = |name: &str, commit: &str, classes: &[Class]| {
        let counts = Class::ALL.map(|class| classes.iter().filter(|c| **c == class).count().to_string());
        let _ = writeln!(text, "| {name} | {commit} | {} | {} |", classes.len(), counts.join(" | "));
    };
    let mut all = Vec::new();
    for list in lists {
        let own = rows.iter().filter(|row| row.repository == list.repository);
        let own: Vec<Class> = own.map(|row| list.class(row)).collect();
        let name = format!("[{0}](https://github.com/{0})", list.repository);
        line(&name, &format!("`{}`", list.commit), &own);
        all.extend(own);
    }
    line("all", "", &all);
    let listed: usize = lists.iter().map(|list| list.entries().count()).sum();
    let mut builds: BTreeMap<&str, usize> = BTreeMap::new();
    rows.iter().for_each(|row| *builds.entry(&row.build).or_default() += 1);
    let builds = builds.iter().map(|(build, count)| match *build {
        "" => format!("{count} of earlier builds"),
        build => format!("{count} of the build `{build}`"),
    });
    let builds = builds.collect::<Vec<_>>().join(", ");
    let with_row = rows.len();
    text.push('\n');
    text += &paragraph(&format!("The lists name {listed} kernels. {with_row} have a row: {builds}."));
    text += &mutant_counts(rows);
    text.push('\n');
    text
}

/// The faults of kernels, what the check cannot judge, and why mutants have the outputs of their kernels.
fn findings(lists: &[Repository], rows: &[Row]) -> String {
    let mut text = String::from("# Findings in public kernels\n\n");
    text += &paragraph(
        "`cargo xtask corpus` writes this page from the lists in this folder and from `rows.jsonl`. \
         [Public kernels under the check](../../docs/src/guide/public-kernels.md) has the counts and says what \
         the words mean.",
    );
    for (class, title) in [
        (Class::Bug, "Faults"),
        (Class::Letter, "By the letter of PTX"),
        (Class::FalseAlarm, "False alarms"),
        (Class::Incomplete, "Incomplete"),
        (Class::Refused, "Refused"),
    ] {
        let known = lists.iter().flat_map(|list| list.known.iter().map(move |known| (list, known)));
        let known: Vec<_> = known.filter(|(_, known)| known.class == class).collect();
        if known.is_empty() {
            continue;
        }
        let _ = writeln!(text, "\n## {title}\n");
        for (list, known) in known {
            let kind = known.kind.as_ref().map_or_else(String::new, |kind| format!(" (`{kind}`)"));
            let cure = known.cure.as_ref().map_or_else(String::new, |cure| format!(" Cure: {cure}"));
            let entry = format!("- {}, `{}`{kind}: {}{cure}", list.repository, known.kernel, known.what);
            text += &wrapped(&entry);
        }
    }
    text + &equal_outputs(lists, rows)
}

/// The counts of mutants.
fn mutant_counts(rows: &[Row]) -> String {
    let mut counts = [[0usize; 4]; 2];
    let mut without = [0usize; 2];
    for mutant in rows.iter().flat_map(|row| &row.mutants) {
        match mutant.fate.column() {
            Ok(at) => counts[usize::from(mutant.orders)][at] += 1,
            Err(at) => without[at] += 1,
        }
    }
    if counts.iter().flatten().sum::<usize>() == 0 {
        return String::new();
    }
    let mut text = String::from(
        "\n| fault | mutants | found by a hazard | outputs differ | no verdict | outputs equal |\n\
         |---|--:|--:|--:|--:|--:|\n",
    );
    let all = std::array::from_fn(|at| counts[0][at] + counts[1][at]);
    for (title, counts) in [("of values", counts[0]), ("of ordering", counts[1]), ("all", all)] {
        let all: usize = counts.iter().sum();
        let _ = writeln!(text, "| {title} | {all} | {} |", counts.map(|count| count.to_string()).join(" | "));
    }
    let [not_executed, no_effect] = without;
    text.push('\n');
    text += &paragraph(&format!(
        "No mutant was made at {} further sites, where a fault changes nothing at that launch: at \
         {not_executed} the instruction is not executed, and at {no_effect} the comparison has the same result \
         in every thread.",
        not_executed + no_effect
    ));
    text
}

/// Why the outputs of some mutants are those of the original kernel.
fn equal_outputs(lists: &[Repository], rows: &[Row]) -> String {
    let mutants = || rows.iter().flat_map(|row| row.mutants.iter().map(move |mutant| (row, mutant)));
    let mut explained: BTreeMap<Reason, (usize, String)> = BTreeMap::new();
    for list in lists {
        for equal in &list.equal {
            let own = mutants().filter(|(row, mutant)| {
                row.repository == list.repository && mutant.fate == Fate::Same && equal.explains(row, mutant)
            });
            let count = own.count();
            if count > 0 {
                let name = list.repository.rsplit('/').next().unwrap_or_default();
                let (all, text) = explained.entry(equal.reason).or_default();
                *all += count;
                *text += &wrapped(&format!("- {name}, {count}: {}", equal.what));
            }
        }
    }
    let mut text = String::new();
    for (reason, (count, items)) in explained {
        let _ = writeln!(
            text,
            "\n## Mutants with equal outputs since {}: {count}\n\n{}",
            reason.words(),
            items.trim_end()
        );
    }
    text
}

/// A paragraph in lines of at most 110 columns.
fn paragraph(text: &str) -> String {
    wrapped(text).replace("\n  ", "\n")
}

/// A list item in lines of at most 110 columns.
fn wrapped(item: &str) -> String {
    let (mut text, mut column) = (String::new(), 0);
    for word in item.split_whitespace() {
        let width = word.chars().count();
        if column > 0 && column + 1 + width > 110 {
            text += "\n  ";
            column = 2;
        } else if column > 0 {
            text.push(' ');
            column += 1;
        }
        text += word;
        column += width;
    }
    text + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_wrapped() {
        let text = wrapped(&format!("- {}", "word ".repeat(40)));
        assert!(text.lines().all(|line| line.chars().count() <= 110));
        assert_eq!(text.lines().count(), 2);
    }
}
