//! The harness of the text tests in `filetests/`, for tests of other crates.
//!
//! The folder of a file says what is tested and decides which crate tests the file: `parse`, `verify` and
//! `emit` belong to `ptx`, `run` and `hazard` to `emu`, the `.txt` files of `emit` to `kernels`. A test
//! passes its purposes to [`main`], each with a function that judges one case. Every case is a separate test,
//! so that `cargo test -p flashcore-ptx --test filetests -- parse/mma` runs a subset.
//!
//! A file whose name begins with `cases_` holds several cases: a preamble, then the cases, each after a line
//! `//# name`. The preamble is put before each case. A brace that the preamble leaves open is closed after
//! the case.
//!
//! `//# name of run/base` begins a case that is the file `run/base.ptx` with changes, given in the order of
//! that file: `//- line` removes the next line that is equal to it, `//= line` goes on behind that line and
//! gives it the comment that it has here, and any other line is added. Comments behind code do not count in
//! a comparison, and `…` at the end stands for the rest of a line.
//!
//! Expected errors are given in comments on the line of the error, see [`expected_errors`]. Expected output
//! is in a separate file, see [`golden`].

pub mod cuda;
mod not_run;
mod share;

use std::fs;
use std::path::{Path, PathBuf};

use libtest_mimic::{Arguments, Trial};

pub use not_run::{LIST, REQUIRE, not_run};
pub use share::{SHARE, is_due};

/// The environment variable that makes [`golden`] write the files before it compares them.
pub const BLESS: &str = "FLASHCORE_BLESS";

/// The folder `filetests/` of the repository.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../filetests")
}

/// One test.
#[derive(Clone, Debug)]
pub struct Case {
    /// `purpose/file`, or `purpose/group/case` for one of several cases of a file.
    pub name: String,
    /// The file that holds the case.
    pub path: PathBuf,
    /// The PTX text with its comments.
    pub text: String,
}

impl Case {
    /// An error, with the text that its lines refer to if that text is not a whole file.
    fn shown(&self, error: String) -> String {
        if self.name.matches('/').count() < 2 {
            return error;
        }
        let lines = self.text.lines().zip(1..).map(|(line, number)| format!("{number:4} {line}\n"));
        format!("{error}\n{}", lines.collect::<String>())
    }
}

/// Judges a case. The error says what is wrong.
pub type Judge = fn(&Case) -> Result<(), String>;

/// Runs the cases of the given purposes as tests and ends the process.
pub fn main(purposes: &[(&str, Judge)]) -> ! {
    let arguments = Arguments::from_args();
    let trials = purposes.iter().flat_map(|&(purpose, judge)| {
        let trial = move |case: Case| {
            Trial::test(case.name.clone(), move || Ok(judge(&case).map_err(|error| case.shown(error))?))
        };
        cases(purpose).into_iter().map(trial)
    });
    libtest_mimic::run(&arguments, trials.collect()).exit()
}

/// The names of the kernels in `corpus`, sorted: those of its PTX files and those that [`corpus`] makes.
///
/// # Panics
/// When a folder cannot be read.
pub fn corpus_names() -> Vec<String> {
    let folder = root().join("corpus");
    let mut names: Vec<String> = files(&folder, "ptx").iter().map(|path| stem(path)).collect();
    let sources = files(&folder.join("src"), "cu").into_iter();
    names.extend(sources.map(|path| format!("cuda_{}_sm{}", stem(&path), cuda::target(&read(&path)))));
    let of_sm89: Vec<String> =
        names.iter().filter_map(|name| Some(name.strip_suffix("80")?.to_owned() + "89")).collect();
    names.extend(of_sm89);
    names.sort();
    names.dedup();
    names
}

/// The PTX of a kernel in `corpus`. NVRTC makes `cuda_NAME_sm…` of `src/NAME.cu`. If there is no file,
/// `NAME_sm89` is `NAME_sm80` with another target, because the compiler writes the same instructions for
/// both, at most in another order. `None` where NVRTC is needed and not installed.
///
/// # Panics
/// When the file cannot be read, and as for [`cuda::ptx`].
pub fn corpus(name: &str) -> Option<String> {
    let folder = root().join("corpus");
    let file = folder.join(format!("{name}.ptx"));
    if let Some(base) = name.strip_suffix("_sm89").filter(|_| !file.exists()) {
        let ptx = corpus(&format!("{base}_sm80"))?;
        return Some(ptx.replace("\n.target sm_80\n", "\n.target sm_89\n"));
    }
    let source = name.strip_prefix("cuda_").and_then(|name| name.rsplit_once("_sm"));
    match source {
        Some((source, _)) => cuda::compiled(&folder.join("src").join(format!("{source}.cu"))),
        None => Some(read(&file)),
    }
}

/// The cases of a purpose, sorted by name.
///
/// # Panics
/// When the folder or one of its files cannot be read.
pub fn cases(purpose: &str) -> Vec<Case> {
    let paths = files(&root().join(purpose), "ptx");
    let mut cases: Vec<Case> = paths.into_iter().flat_map(|path| cases_of(purpose, path)).collect();
    cases.sort_by(|a, b| a.name.cmp(&b.name));
    cases
}

fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    paths.filter(|path| path.extension().is_some_and(|found| found == extension)).collect()
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

fn cases_of(purpose: &str, path: PathBuf) -> Vec<Case> {
    let text = read(&path);
    let stem = stem(&path);
    let Some(group) = stem.strip_prefix("cases_") else {
        return vec![Case { name: format!("{purpose}/{stem}"), path, text }];
    };
    let mut parts = text.split("//# ");
    let preamble = parts.next().unwrap_or_default();
    let open = preamble.matches('{').count() > preamble.matches('}').count();
    let close = if open { "}\n" } else { "" };
    let case = |part: &str| {
        let (title, body) = part.split_once('\n').unwrap_or((part, ""));
        let title = title.trim();
        let derived = title.split_once(" of ").filter(|(_, base)| base.contains('/'));
        let name = format!("{purpose}/{group}/{}", derived.map_or(title, |(title, _)| title));
        let text = match derived {
            None => format!("{preamble}{body}{close}"),
            Some((_, base)) => changed(&name, &read(&root().join(base).with_extension("ptx")), body),
        };
        Case { name, path: path.clone(), text }
    };
    parts.map(case).collect()
}

/// A text with changes.
///
/// # Panics
/// When the text lacks a line that is kept or removed.
fn changed(name: &str, base: &str, changes: &str) -> String {
    let mut base = base.lines();
    let mut text: Vec<&str> = Vec::new();
    for change in changes.lines() {
        let kept = change.strip_prefix("//= ");
        let Some(sought) = kept.or(change.strip_prefix("//- ")) else {
            text.push(change);
            continue;
        };
        loop {
            let line = base.next().unwrap_or_else(|| panic!("{name}: its base has no further `{sought}`"));
            if is(line, sought) {
                break;
            }
            text.push(line);
        }
        text.extend(kept);
    }
    text.extend(base);
    text.join("\n") + "\n"
}

/// Whether a line has the code, or is the comment, that is sought.
fn is(line: &str, sought: &str) -> bool {
    let code = |line: &'_ str| line.split("//").next().unwrap_or_default().trim().len();
    let (line, sought) = (line.trim(), sought.trim());
    match sought.strip_suffix('…') {
        Some(beginning) => line.starts_with(beginning),
        None if code(sought) == 0 => line == sought,
        None => line[..code(line)] == sought[..code(sought)],
    }
}

/// An error that a file expects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// The line of the error, from 1; 0 for an error that belongs to no line.
    pub line: u32,
    /// A part of the message.
    pub text: String,
}

impl Expected {
    /// Whether an actual error matches the expected one.
    pub fn fits(&self, line: u32, message: &str) -> bool {
        self.line == line && message.contains(&self.text)
    }
}

/// The errors that comments announce: `// error: TEXT` on the line of the error; `//! error: TEXT` on any
/// line for an error that belongs to no line.
pub fn expected_errors(text: &str) -> Vec<Expected> {
    let lines = text.lines().zip(1..);
    let found = lines.filter_map(|(line, number)| {
        let (number, text) = match line.split_once("//! error: ") {
            Some((_, text)) => (0, text),
            None => (number, line.split_once("// error: ")?.1),
        };
        Some(Expected { line: number, text: text.trim().to_owned() })
    });
    found.collect()
}

/// Compares a text with a golden file. With [`BLESS`] set, first writes the file.
///
/// # Errors
/// When the texts differ or the file cannot be read or written.
pub fn golden(path: &Path, text: &str) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    if std::env::var_os(BLESS).is_some() {
        fs::write(path, text).map_err(failed)?;
    }
    if fs::read_to_string(path).map_err(failed)? == text {
        return Ok(());
    }
    Err(format!("{} differs; {BLESS}=1 writes it anew. The text is now:\n{text}", path.display()))
}
