//! Tables and plots in the documents, generated from rows of `evidence/`: no figure in them is typed by hand.
//!
//! A document marks a region with the file and the suite of its table:
//!
//! ```text
//! <!-- table:h200/mission -->
//! …
//! <!-- /table -->
//! ```
//!
//! In a suite `ideas_FAMILY`, the columns compare a plan with its variants (`cargo xtask measure ideas`); in
//! other suites, FlashCore with its peers. Rows of mode `predicted` in `evidence/predicted.jsonl` have
//! separate columns, which say that they are predicted.
//!
//! A suite's table holds only its own problems. `other` is the table of problems that are in no suite. The
//! table `suites` has one line for each suite of a file.
//!
//! For each problem and mode, the newest run in which FlashCore was timed with a peer counts, or else the
//! newest run.

mod accuracy;
mod bandwidth;
mod evolution;
mod features;
mod first_call;
mod ideas;
mod named;
mod quantize;
mod regret;
mod render;
mod sanitizer;
mod speed;
mod suites;

use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;

use bench::suites::OTHER;
use bench::{Comparison, Mode, OURS, Suite};
use host::store::{StoreError, write};

/// Why tables cannot be generated, or are stale.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A region without an end mark.
    #[error("{path}: `<!-- table:{name} -->` has no `<!-- /table -->` after it")]
    Open { path: PathBuf, name: String },
    /// The name is not of the form DEVICE/SUITE.
    #[error("{path}: invalid value '{name}' for a table: expected DEVICE/SUITE, as in h200/mission")]
    Name { path: PathBuf, name: String },
    /// The table would be empty: its file is missing, or has no rows of the suite.
    #[error(
        "{path}: invalid value '{name}' for a table: expected DEVICE/SUITE with rows in {file}, in the folder of \
         --root"
    )]
    NoRows {
        path: PathBuf,
        name: String,
        /// The file that should hold the rows.
        file: PathBuf,
    },
    /// A line is not a valid row.
    #[error("{path}, line {line}: {error}")]
    Row {
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        error: serde_json::Error,
    },
    /// Tables that differ from their rows.
    #[error("stale: {}; `cargo xtask tables` regenerates them", list(.0))]
    Stale(Vec<PathBuf>),
}

fn list(paths: &[PathBuf]) -> String {
    paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// The fields of a row that tables need. Rows of other kinds lack some of them and are skipped.
#[derive(Clone, Debug, Deserialize)]
struct Row {
    suite: String,
    #[serde(rename = "impl")]
    implementation: String,
    problem: Problem,
    mode: String,
    us_median: Option<f64>,
    tflops: Option<f64>,
    err_max: Option<f64>,
    #[serde(default)]
    err_rel: Option<f64>,
    #[serde(default)]
    ratio_vs: Value,
    #[serde(default)]
    fault: Option<String>,
    device: String,
    driver: String,
    #[serde(default)]
    commit: Option<String>,
    run: String,
    when: String,
}

impl Row {
    /// The suite of the row. A row may have a suite's name although its problem is not in the suite; it
    /// counts as `other`.
    fn suite(&self) -> &str {
        let outside =
            |suite: Suite| !suite.problems().iter().any(|problem| self.problem == Problem::of(problem));
        if Suite::named(&self.suite).is_some_and(outside) { OTHER } else { &self.suite }
    }

    fn is_ours(&self) -> bool {
        self.implementation == OURS
    }

    /// FlashCore against the best peer: the peer's name and the comparison.
    fn against_best(&self) -> Option<(&str, Comparison)> {
        let comparison = serde_json::from_value(self.ratio_vs.get("comparison")?.clone()).ok()?;
        Some((self.ratio_vs.get("peer")?.as_str()?, comparison))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
struct Problem {
    head_dim: usize,
    dtype: String,
    batch: usize,
    heads_q: usize,
    heads_kv: usize,
    seq_q: usize,
    seq_kv: usize,
    mask: String,
    #[serde(default)]
    softcap: Option<Cap>,
    #[serde(default)]
    lse: bool,
}

/// A positive number as its bits, which have the same order as the number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(from = "f32")]
struct Cap(u32);

impl From<f32> for Cap {
    fn from(cap: f32) -> Cap {
        Cap(cap.to_bits())
    }
}

impl std::fmt::Display for Cap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f32::from_bits(self.0).fmt(f)
    }
}

impl Problem {
    fn of(problem: &problem::Problem) -> Problem {
        Problem {
            head_dim: problem.head_dim,
            dtype: problem.dtypes.to_string(),
            batch: problem.batch,
            heads_q: problem.heads_q,
            heads_kv: problem.heads_kv,
            seq_q: problem.seq_q,
            seq_kv: problem.seq_kv,
            mask: problem.band.to_string(),
            softcap: problem.score.softcap.map(Cap::from),
            lse: problem.pass.lse(),
        }
    }
}

/// One problem in one mode: FlashCore's and the peers' rows of one run.
#[derive(Clone)]
struct Entry {
    ours: Row,
    /// FlashCore with other kinds of launches.
    variants: Vec<Row>,
    peers: Vec<Row>,
}

/// The rows of a file that are times of a suite. Rows of other kinds are skipped.
fn rows(path: &Path, suite: &str) -> Result<Vec<Row>, TableError> {
    let mut rows: Vec<Row> = parsed(path, |value| {
        let named = value["suite"].as_str().unwrap_or_default();
        (named == suite || (suite == OTHER && Suite::named(named).is_some()))
            && value.get("mode").is_some()
            && value.get("us_median").is_some()
    })?;
    rows.retain(|row| row.suite() == suite);
    Ok(rows)
}

/// The matching lines of a file; empty if there is no file.
fn parsed<T: serde::de::DeserializeOwned>(
    path: &Path,
    wanted: impl Fn(&Value) -> bool,
) -> Result<Vec<T>, TableError> {
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(source) => return Err(StoreError::Read { path: path.to_path_buf(), source }.into()),
        Ok(text) => text,
    };
    let mut rows = Vec::new();
    for (index, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let fail = |error| TableError::Row { path: path.to_path_buf(), line: index + 1, error };
        let value: Value = serde_json::from_str(line).map_err(fail)?;
        if wanted(&value) {
            rows.push(serde_json::from_value(value).map_err(fail)?);
        }
    }
    Ok(rows)
}

/// The run that counts for each problem and mode, in a stable order.
fn entries(rows: &[Row]) -> Vec<Entry> {
    let mut ours: Vec<&Row> = rows.iter().filter(|row| row.is_ours()).collect();
    let others_of = |ours: &Row| -> (Vec<Row>, Vec<Row>) {
        let same = |row: &&Row| row.run == ours.run && row.problem == ours.problem && row.mode == ours.mode;
        let others = rows.iter().filter(same).filter(|row| !row.is_ours()).cloned();
        others.partition(|row| row.implementation.starts_with(OURS))
    };
    // Sorts the run that counts to the end of its group.
    ours.sort_by_cached_key(|row| {
        let mode = Mode::ALL.iter().position(|mode| mode.name() == row.mode);
        (row.problem.clone(), mode, row.mode.clone(), !others_of(row).1.is_empty(), row.when.clone())
    });
    let last = |index: usize| {
        ours.get(index + 1)
            .is_none_or(|next| (&next.problem, &next.mode) != (&ours[index].problem, &ours[index].mode))
    };
    let counting = (0..ours.len()).filter(|&index| last(index));
    let entry = |ours: &Row| {
        let (variants, peers) = others_of(ours);
        Entry { ours: ours.clone(), variants, peers }
    };
    counting.map(|index| entry(ours[index])).collect()
}

/// A function that makes part of a table from the rows of a file. `None` if the file has no such rows.
type OfFile<T> = fn(&Path) -> Result<Option<T>, TableError>;

/// A table of rows of a kind of their own.
enum OwnTable {
    Text(OfFile<String>),
    /// With a picture, which is described.
    Drawn(&'static str, OfFile<(String, String)>),
}

/// The suites whose rows are of a kind of their own.
const OF_THEIR_OWN: [(&str, OwnTable); 11] = [
    (accuracy::SUITE, OwnTable::Drawn("error of 8-bit attention over the number of keys", accuracy::table)),
    (bandwidth::SUITE, OwnTable::Drawn("rates of reading a cache in decode", bandwidth::table)),
    (evolution::SUITE, OwnTable::Text(evolution::table)),
    (features::SUITE, OwnTable::Text(features::table)),
    (first_call::SUITE, OwnTable::Text(first_call::table)),
    (quantize::SUITE, OwnTable::Text(quantize::table)),
    (regret::SUITE, OwnTable::Drawn("excess of the chosen plan's time over the shortest one", regret::table)),
    (sanitizer::SUITE, OwnTable::Text(sanitizer::table)),
    (sanitizer::TIMES, OwnTable::Text(sanitizer::times)),
    (speed::SUITE, OwnTable::Text(speed::table)),
    (suites::SUITE, OwnTable::Text(suites::table)),
];

/// A document or picture with its expected contents.
#[derive(Debug)]
struct Made {
    path: PathBuf,
    contents: String,
}

/// All documents with their tables filled, and a picture for each table.
fn make(root: &Path, documents: &[PathBuf]) -> Result<Vec<Made>, TableError> {
    let mut made = Vec::new();
    for document in documents {
        let path = root.join(document);
        let text = std::fs::read_to_string(&path)
            .map_err(|source| StoreError::Read { path: path.clone(), source })?;
        let mut pictures = Vec::new();
        let contents = fill(&path, &text, |device, suite| {
            let file = root.join(format!("evidence/{device}.jsonl"));
            let none = || TableError::NoRows {
                path: path.clone(),
                name: format!("{device}/{suite}"),
                file: file.clone(),
            };
            let mut picture = |alt: &str, contents: String| {
                let file = format!("{device}-{suite}.svg");
                let shown = format!("![{alt}]({}{file})", images_from(root, document));
                pictures.push(Made { path: root.join(IMAGES).join(file), contents });
                shown
            };
            match OF_THEIR_OWN.iter().find(|(name, _)| *name == suite) {
                Some((_, OwnTable::Text(table))) => return table(&file)?.ok_or_else(none),
                Some((_, OwnTable::Drawn(alt, table))) => {
                    let (text, drawn) = table(&file)?.ok_or_else(none)?;
                    return Ok(format!("{}\n\n{text}", picture(alt, drawn)));
                }
                None => {}
            }
            if let Some(of) = suite.strip_suffix(PICTURE) {
                let (contents, caption) = render::picture(&entries(&rows(&file, of)?)).ok_or_else(none)?;
                let shown = picture(&format!("times of FlashCore and other libraries on {device}"), contents);
                return Ok(format!("{shown}  \n{caption}"));
            }
            let measured = rows(&file, suite)?;
            if suite.starts_with("ideas_") {
                return ideas::table(&measured).ok_or_else(none);
            }
            let predicted = rows(&root.join("evidence/predicted.jsonl"), suite)?;
            let entries = entries(&measured);
            let mut text = render::table(suite, &entries, &predicted).ok_or_else(none)?;
            if let Some((contents, caption)) = render::plot(suite, &entries) {
                let shown = picture(&format!("{suite} on {device}"), contents);
                text += &format!("\n\n{shown}  \n{caption}");
            }
            Ok(text)
        })?;
        made.push(Made { path, contents });
        made.extend(pictures);
    }
    Ok(made)
}

/// The end of a suite's name where a document shows its picture alone.
const PICTURE: &str = "_picture";

/// The pictures' folder from the root, within the book's pages.
const IMAGES: &str = "docs/src/images";

/// The pictures' folder relative to a document's folder, with a `/` at its end. The document is named
/// relative to `root` or by an absolute path.
fn images_from(root: &Path, document: &Path) -> String {
    let real = |folder: &Path| {
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        std::fs::canonicalize(folder).unwrap_or_else(|_| folder.to_path_buf())
    };
    let folder = real(root.join(document).parent().unwrap_or(root));
    let images = real(root).join(IMAGES);
    let shared = folder.ancestors().find(|parent| images.starts_with(parent));
    let shared = shared.unwrap_or(Path::new(""));
    let ups = folder.components().count() - shared.components().count();
    let down = images.strip_prefix(shared).unwrap_or(&images);
    format!("{}{}/", "../".repeat(ups), down.display())
}

/// The text with every marked region replaced.
fn fill(
    path: &Path,
    text: &str,
    mut table: impl FnMut(&str, &str) -> Result<String, TableError>,
) -> Result<String, TableError> {
    const START: &str = "<!-- table:";
    const END: &str = "<!-- /table -->";
    let (mut filled, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once(START) {
        let Some((name, after)) = after.split_once(" -->") else { break };
        let open = || TableError::Open { path: path.to_path_buf(), name: name.to_owned() };
        let (old, after) = after.split_once(END).ok_or_else(open)?;
        if old.contains(START) {
            return Err(open());
        }
        let wrong = || TableError::Name { path: path.to_path_buf(), name: name.to_owned() };
        let (device, suite) = name.split_once('/').ok_or_else(wrong)?;
        let plain =
            |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        if !plain(device) || !plain(suite) {
            return Err(wrong());
        }
        filled += &format!("{before}{START}{name} -->\n{}\n{END}", table(device, suite)?.trim_end());
        rest = after;
    }
    Ok(filled + rest)
}

/// Generates the tables of the documents and the pictures. Returns the changed files.
///
/// # Errors
/// When a document or the rows cannot be read, or a region is marked wrongly.
pub fn update(root: &Path, documents: &[PathBuf]) -> Result<Vec<PathBuf>, TableError> {
    let stale = stale(root, documents)?;
    for Made { path, contents } in &stale {
        write(path, contents.as_bytes())?;
    }
    Ok(stale.into_iter().map(|made| made.path).collect())
}

/// Checks that every table agrees with its rows.
///
/// # Errors
/// [`TableError::Stale`] when a table differs; otherwise as for [`update`].
pub fn check(root: &Path, documents: &[PathBuf]) -> Result<(), TableError> {
    let stale: Vec<PathBuf> = stale(root, documents)?.into_iter().map(|made| made.path).collect();
    if stale.is_empty() { Ok(()) } else { Err(TableError::Stale(stale)) }
}

fn stale(root: &Path, documents: &[PathBuf]) -> Result<Vec<Made>, TableError> {
    let mut made = make(root, documents)?;
    made.retain(|made| std::fs::read_to_string(&made.path).ok().as_ref() != Some(&made.contents));
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;
    use host::store::Scratch;
    use serde_json::json;

    fn row(name: &str, run: &str, when: &str, mode: &str, us: f64, ratio: Option<f64>) -> String {
        let comparison = ratio.map(|ratio| {
            json!({ "ratio": ratio, "low": ratio - 0.01, "high": ratio + 0.01, "noise": 1.001, "verdict": "FASTER" })
        });
        json!({
            "suite": "mission", "impl": name, "mode": mode, "us_median": us, "tflops": 500.0 / us, "err_max": 1e-4,
            "problem": {
                "batch": 1, "heads_q": 8, "heads_kv": 8, "seq_q": 512, "seq_kv": 512, "head_dim": 64,
                "head_dim_v": 64, "dtype": "f16", "mask": "none",
            },
            "ratio_vs": { "peer": "cudnn", "comparison": comparison }, "device": "NVIDIA H200", "driver": "CUDA 13.0",
            "commit": "abc", "run": run, "when": when,
        })
        .to_string()
    }

    fn folder(rows: &[String]) -> Scratch {
        let folder = Scratch::new().unwrap();
        std::fs::create_dir_all(folder.path("evidence")).unwrap();
        std::fs::create_dir_all(folder.path("docs/src/images")).unwrap();
        std::fs::write(folder.path("evidence/h200.jsonl"), rows.join("\n")).unwrap();
        let text = "Before.\n<!-- table:h200/mission -->\nold\n<!-- /table -->\nAfter.\n";
        std::fs::write(folder.path("README.md"), text).unwrap();
        folder
    }

    #[test]
    fn pictures_are_named_from_the_document_s_folder() {
        let folder = folder(&[]);
        for below in ["docs/src/how", "python"] {
            std::fs::create_dir_all(folder.path(below)).unwrap();
        }
        let root = folder.path("");
        for (document, images) in [
            ("README.md", "docs/src/images/"),
            ("docs/src/benchmarks.md", "images/"),
            ("docs/src/how/hopper.md", "../images/"),
            ("python/README.md", "../docs/src/images/"),
        ] {
            assert_eq!(images_from(&root, Path::new(document)), images, "{document}");
            let other = Path::new("docs/..").join(document);
            assert_eq!(images_from(&root, &other), images, "{document}");
            assert_eq!(images_from(&root, &root.join(document)), images, "{document}");
        }
    }

    #[test]
    fn the_newest_run_with_peers_fills_the_region() {
        let folder = folder(&[
            row("flashcore", "1", "2026-01-01", "warm", 6.0, Some(1.5)),
            row("cudnn", "1", "2026-01-01", "warm", 9.0, None),
            row("flashcore", "2", "2026-01-02", "warm", 4.5, Some(2.0)),
            row("fa2", "2", "2026-01-02", "warm", 10.25, None),
            row("math", "2", "2026-01-02", "warm", 77.75, None),
            row("cudnn", "2", "2026-01-02", "warm", 9.0, None),
            r#"{"suite":"mission","impl":"fa3","mode":"warm","us_median":null,"tflops":null,"err_max":null,"fault":"no f16",
               "problem":{"batch":1,"heads_q":8,"heads_kv":8,"seq_q":512,"seq_kv":512,"head_dim":64,"dtype":"f16","mask":"none"},
               "device":"NVIDIA H200","driver":"CUDA 13.0","run":"2","when":"2026-01-02"}"#.replace('\n', ""),
            row("flashcore", "3", "2026-01-03", "warm", 4.0, None),
            row("flashcore other", "3", "2026-01-03", "warm", 3.0, None),
            r#"{"suite":"emulator","check":"mma bits"}"#.into(),
        ]);
        let (root, documents) = (folder.path(""), [PathBuf::from("README.md")]);
        assert!(matches!(check(&root, &documents), Err(TableError::Stale(paths)) if paths.len() == 2));
        update(&root, &documents).unwrap();
        check(&root, &documents).unwrap();
        let text = std::fs::read_to_string(folder.path("README.md")).unwrap();
        assert!(
            text.starts_with("Before.\n<!-- table:h200/mission -->\n|")
                && text.ends_with("<!-- /table -->\nAfter.\n")
        );
        for part in [
            "| 4.50 |",
            "10.25",
            "| **9.00** |",
            "2.00× [1.99, 2.01]",
            "FASTER",
            "geometric mean",
            "fa3: no f16",
            "nowhere within 1.5 times the best peer's time: math.",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(
            !text.contains("77.75")
                && !text.contains("6.0")
                && !text.contains("3.00")
                && !text.contains("old"),
            "{text}"
        );
        let plot = std::fs::read_to_string(folder.path("docs/src/images/h200-mission.svg")).unwrap();
        assert!(plot.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\"") && plot.contains("B1 H8 S512"));
        // A prediction has its own column, marked as predicted.
        let predicted =
            row("flashcore", "9", "2026-01-09", "predicted", 37.5, None).replace("NVIDIA H200", "L4");
        std::fs::write(folder.path("evidence/predicted.jsonl"), predicted).unwrap();
        update(&root, &documents).unwrap();
        let text = std::fs::read_to_string(folder.path("README.md")).unwrap();
        assert!(text.contains("| L4, predicted µs | against") && text.contains("| 37.50 | 2.00×"), "{text}");
        // A new row makes the table stale.
        let more = [
            std::fs::read_to_string(folder.path("evidence/h200.jsonl")).unwrap(),
            row("flashcore", "4", "2026-01-04", "cold", 7.0, None),
            row("flashcore", "5", "2026-01-03", "sustained", 5.0, Some(1.25)),
            row("cudnn", "5", "2026-01-03", "sustained", 6.25, None),
        ];
        std::fs::write(folder.path("evidence/h200.jsonl"), more.join("\n")).unwrap();
        assert!(check(&root, &documents).unwrap_err().to_string().contains("README.md"));
        update(&root, &documents).unwrap();
        let text = std::fs::read_to_string(folder.path("README.md")).unwrap();
        let places =
            ["| warm | 4.50 |", "| cold | 7.00 |", "| sustained | 5.00 |"].map(|cells| text.find(cells));
        assert!(places.is_sorted() && places[0].is_some(), "{text}");
        assert!(text.contains("Sustained: geometric mean of 1 1.25× the best peer"), "{text}");
    }

    #[test]
    fn a_problem_stands_in_its_own_suite_alone() {
        let other = row("flashcore", "1", "2026-01-01", "warm", 7.5, None).replace("512", "131072");
        let folder = folder(&[row("flashcore", "1", "2026-01-01", "warm", 4.5, None), other]);
        let table = |suite: &str| {
            let document = folder.path("README.md");
            std::fs::write(&document, format!("<!-- table:h200/{suite} -->\n<!-- /table -->\n")).unwrap();
            update(&folder.path(""), &[PathBuf::from("README.md")]).unwrap();
            std::fs::read_to_string(document).unwrap()
        };
        let (mission, other) = (table("mission"), table("other"));
        assert!(mission.contains("4.50") && !mission.contains("S131072"), "{mission}");
        assert!(other.contains("S131072") && other.contains("7.50") && !other.contains("S512"), "{other}");
    }

    #[test]
    fn faults_are_named() {
        let folder = folder(&["{".into()]);
        let error = update(&folder.path(""), &[PathBuf::from("README.md")]).unwrap_err().to_string();
        assert!(error.contains("h200.jsonl, line 1"), "{error}");
        for (text, expected) in [
            ("<!-- table:h200/mission -->\nno end", "has no"),
            ("<!-- table:h200/a --><!-- table:h200/b --><!-- /table -->", "table:h200/a"),
            ("<!-- table:../etc/x --><!-- /table -->", "as in h200/mission"),
            ("<!-- table:mission --><!-- /table -->", "as in h200/mission"),
        ] {
            std::fs::write(folder.path("README.md"), text).unwrap();
            let error = update(&folder.path(""), &[PathBuf::from("README.md")]).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_table_without_rows_stays_as_it_is() {
        let folder = folder(&[row("flashcore", "1", "2026-01-01", "warm", 4.5, None)]);
        for name in ["l4/mission", "h200/missing", "h200/ideas_small", "h200/evolution", "foo/bar"] {
            let text = format!("<!-- table:{name} -->\nwhat was there\n<!-- /table -->\n");
            std::fs::write(folder.path("README.md"), &text).unwrap();
            let error = update(&folder.path(""), &[PathBuf::from("README.md")]).unwrap_err().to_string();
            let file = format!("evidence/{}.jsonl", name.split_once('/').unwrap().0);
            assert!(
                error.contains(&format!(
                    "invalid value '{name}' for a table: expected DEVICE/SUITE with rows in "
                )),
                "{error}"
            );
            assert!(error.contains(&file), "{error}");
            assert_eq!(std::fs::read_to_string(folder.path("README.md")).unwrap(), text);
        }
    }

    #[test]
    fn ideas_stand_beside_the_newest_plan() {
        let idea = |name: &str, run: &str, when: &str, us| {
            row(name, run, when, "warm", us, None).replace("\"mission\"", "\"ideas_small\"")
        };
        let folder = folder(&[
            idea("flashcore", "1", "2026-01-01", 4.0),
            idea("flashcore stages 2", "1", "2026-01-01", 4.4),
            idea("flashcore", "2", "2026-01-02", 5.0),
            idea("flashcore stages 3", "2", "2026-01-02", 6.0),
        ]);
        let document = folder.path("README.md");
        std::fs::write(&document, "<!-- table:h200/ideas_small -->\n<!-- /table -->\n").unwrap();
        update(&folder.path(""), &[PathBuf::from("README.md")]).unwrap();
        let text = std::fs::read_to_string(document).unwrap();
        assert!(
            text.contains("| the plan, µs | 5.00 |\n| stages 3 | 1.200 |") && !text.contains("stages 2"),
            "{text}"
        );
    }
}
