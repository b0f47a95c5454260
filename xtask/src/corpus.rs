//! Checks kernels of public repositories, whose sources are not kept here. `xtask/corpus` lists the
//! repositories with their kernels and launches, and what is known about each kernel that does not pass.

mod page;

use std::io::{Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde::{Deserialize, Serialize};

use crate::XtaskError;

/// The rows from which the page is made.
const ROWS: &str = "xtask/corpus/rows.jsonl";

/// Mutants of one kernel, and the seconds that its own check may take if mutants are to be checked: each of
/// them takes as long.
const MUTANTS: usize = 4;
const SECONDS: f64 = 2.0;

#[derive(Debug, clap::Args)]
pub struct Corpus {
    /// Folder with a checkout of each repository, under the repository's name without its owner
    folder: PathBuf,
    /// Check only repositories, files or kernels whose name contains one of these words; the other rows stay
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Check only kernels that have no row of this build of the command
    #[arg(long)]
    missing: bool,
    /// The command to use; default: target/debug/flashcore
    #[arg(long)]
    flashcore: Option<PathBuf>,
    /// Seconds that one check may take
    #[arg(long, default_value_t = 60)]
    timeout: u32,
    /// Also check mutants of every kernel that passes within two seconds
    #[arg(long)]
    mutants: bool,
}

/// A list of `xtask/corpus`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Repository {
    /// Owner and name on GitHub.
    repository: String,
    commit: String,
    file: Vec<File>,
    /// The known reasons of kernels that do not pass.
    #[serde(default)]
    known: Vec<Known>,
    /// The known reasons of mutants that pass with the outputs of the original kernel.
    #[serde(default)]
    equal: Vec<Equal>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    path: String,
    /// Options with which this file is compiled.
    #[serde(default)]
    options: Vec<String>,
    /// The environment variable that names a Python with the version of Triton for which the file was
    /// written, if that is not the usual one.
    python: Option<String>,
    /// One line for each kernel: `name | grid block dynamic-shared | arguments | options`, or
    /// `name | LAUNCH.toml | | options` with a launch file of `xtask/corpus/launches`.
    kernels: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Known {
    kernel: String,
    /// The path of the file, where two files have a kernel of this name.
    path: Option<String>,
    class: Class,
    /// The kind of hazard that the check must name; for a check without a verdict, a part of its reason.
    kind: Option<String>,
    what: String,
    cure: Option<String>,
}

/// Why the outputs of mutants are those of the original kernel.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Equal {
    /// Kernels, each with the faults for which the reason holds: `kernel: fault line, fault line`.
    mutants: Vec<String>,
    /// The reason, for the reasons of all repositories together.
    reason: Reason,
    what: String,
}

impl Equal {
    fn explains(&self, row: &Row, mutant: &Mutant) -> bool {
        let place = format!("{} {}", mutant.fault, mutant.line);
        self.mutants
            .iter()
            .filter_map(|text| text.rsplit_once(": "))
            .any(|(kernel, faults)| kernel == row.kernel && faults.split(", ").any(|fault| fault == place))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Reason {
    RedundantBarrier,
    SameValue,
    Masked,
    Rounded,
}

impl Reason {
    const fn words(self) -> &'static str {
        match self {
            Reason::RedundantBarrier => "the barrier or fence orders nothing at this launch",
            Reason::SameValue => "another thread or another store writes the same value",
            Reason::Masked => "a second condition hides the change",
            Reason::Rounded => "the change is lost in rounding",
        }
    }
}

/// The outcome of a mutant, as `check --json` writes it; `line` is counted from the entry of CUDA C++, whose
/// PTX begins with the variables of CUDA's headers.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Mutant {
    fault: String,
    orders: bool,
    line: u32,
    fate: Fate,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Fate {
    Failed(String),
    Differs(String),
    Incomplete(String),
    Same,
    NotExecuted,
    NoEffect,
}

impl Fate {
    /// The column of the table of mutants, or of the sites at which no mutant was made.
    const fn column(&self) -> Result<usize, usize> {
        match self {
            Fate::Failed(_) => Ok(0),
            Fate::Differs(_) => Ok(1),
            Fate::Incomplete(_) => Ok(2),
            Fate::Same => Ok(3),
            Fate::NotExecuted => Err(0),
            Fate::NoEffect => Err(1),
        }
    }
}

/// The meaning of a check that does not pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
enum Class {
    Passed,
    /// A fault of the kernel.
    Bug,
    /// A fault by the PTX memory model that no GPU is known to show.
    Letter,
    /// The kernel is correct, and the check fails.
    FalseAlarm,
    Incomplete,
    /// The check does not begin: the kernel does not compile, or its launch cannot be stated.
    Refused,
    /// Nothing is known about this result.
    Unexpected,
}

impl Class {
    /// The classes in the order of the table's columns.
    const ALL: [Class; 7] = [
        Class::Passed,
        Class::Bug,
        Class::Letter,
        Class::FalseAlarm,
        Class::Incomplete,
        Class::Refused,
        Class::Unexpected,
    ];
}

/// The result of one kernel.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    repository: String,
    commit: String,
    path: String,
    kernel: String,
    /// The commit from which the command was built, where it knows that.
    #[serde(default)]
    build: String,
    verdict: String,
    seconds: f64,
    /// Share of instructions executed, percent.
    coverage: Option<f64>,
    reasons: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    mutants: Vec<Mutant>,
}

impl Row {
    /// The repository, the file and the kernel.
    fn place(&self) -> (&str, &str, &str) {
        (&self.repository, &self.path, &self.kernel)
    }
}

/// Runs the checks.
///
/// # Errors
/// When a list cannot be read, or a result differs from the known one.
pub fn check(root: &Path, args: &Corpus) -> Result<(), XtaskError> {
    let lists = lists(root)?;
    let mut rows = read_rows(root);
    let mut unexpected = 0;
    let binary = args.flashcore.clone().unwrap_or_else(|| root.join("target/debug/flashcore"));
    let runner = Runner { root, args, build: build_of(&binary)?, binary };
    // A file is compiled once for all its kernels.
    let ptx = std::env::temp_dir().join(format!("flashcore-corpus-{}.ptx", std::process::id()));
    let mut compiled = None;
    for list in &lists {
        let name = list.repository.rsplit('/').next().unwrap_or_default();
        let checkout = args.folder.join(name);
        if !checkout.is_dir() {
            eprintln!("not there: git clone https://github.com/{} {}", list.repository, checkout.display());
            continue;
        }
        for (file, line) in list.entries() {
            let entry = Entry::of(line);
            let named = |word: &String| {
                [name, &file.path, entry.kernel].iter().any(|text| text.contains(word.as_str()))
            };
            let is_row = |row: &Row| {
                row.repository == list.repository && row.path == file.path && row.kernel == entry.kernel
            };
            if !args.only.is_empty() && !args.only.iter().any(named)
                || args.missing && rows.iter().any(|row| is_row(row) && row.build == runner.build)
            {
                continue;
            }
            let key = (list.repository.clone(), file.path.clone());
            if compiled.replace(key.clone()) != Some(key) {
                let _ = std::fs::remove_file(&ptx);
            }
            let mut row = runner.one(&checkout, list, file, &entry, &ptx, 0)?;
            if args.mutants && row.verdict == "passed" && row.seconds <= SECONDS {
                row.mutants = runner.one(&checkout, list, file, &entry, &ptx, MUTANTS)?.mutants;
            }
            println!("{:11} {:6.1} s  {name} {} {}", row.verdict, row.seconds, file.path, entry.kernel);
            if list.class(&row) == Class::Unexpected {
                unexpected += 1;
                row.reasons.iter().for_each(|reason| println!("    {reason}"));
            }
            rows = add_row(root, &lists, Some(row))?;
        }
    }
    rows = add_row(root, &lists, None)?;
    page::write(root, &lists, &rows)?;
    match unexpected {
        0 => Ok(()),
        count => Err(XtaskError::Check(format!("{count} results are not the known ones"))),
    }
}

impl Repository {
    /// The files with the lines of their kernels.
    fn entries(&self) -> impl Iterator<Item = (&File, &str)> {
        self.file.iter().flat_map(|file| {
            file.kernels.lines().filter(|line| !line.trim().is_empty()).map(move |line| (file, line))
        })
    }

    fn known(&self, row: &Row) -> Option<&Known> {
        self.known.iter().find(|known| {
            known.kernel == row.kernel && known.path.as_ref().is_none_or(|path| *path == row.path)
        })
    }

    /// The class of a result, from what is known about the kernel.
    fn class(&self, row: &Row) -> Class {
        let Some(known) = self.known(row) else {
            return if row.verdict == "passed" { Class::Passed } else { Class::Unexpected };
        };
        let names = |test: fn(&str, &str) -> bool| {
            known.kind.as_ref().is_none_or(|kind| row.reasons.iter().any(|reason| test(reason, kind)))
        };
        match (row.verdict.as_str(), known.class) {
            ("failed", class @ (Class::Bug | Class::Letter | Class::FalseAlarm))
                if names(|reason, kind| reason.starts_with(kind)) =>
            {
                class
            }
            ("incomplete", Class::Incomplete) | ("refused", Class::Refused)
                if names(|reason, part| reason.contains(part)) =>
            {
                known.class
            }
            _ => Class::Unexpected,
        }
    }
}

/// The rows of earlier runs.
fn read_rows(root: &Path) -> Vec<Row> {
    let text = std::fs::read_to_string(root.join(ROWS)).unwrap_or_default();
    rows_of(&text)
}

fn rows_of(text: &str) -> Vec<Row> {
    text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Adds a row to the file, in place of an older one of the same kernel, and returns all rows in the order of
/// the lists. The file is locked meanwhile: another run may add rows at the same time.
fn add_row(root: &Path, lists: &[Repository], row: Option<Row>) -> Result<Vec<Row>, XtaskError> {
    let path = root.join(ROWS);
    let io = |source| XtaskError::Io { path: path.clone(), source };
    let mut options = std::fs::OpenOptions::new();
    let mut file = options.read(true).write(true).create(true).truncate(false).open(&path).map_err(io)?;
    file.lock().map_err(io)?;
    let mut text = String::new();
    file.read_to_string(&mut text).map_err(io)?;
    let mut rows = rows_of(&text);
    if let Some(row) = row {
        rows.retain(|old| old.place() != row.place());
        rows.push(row);
    }
    let order: Vec<(&str, &str, &str)> = lists
        .iter()
        .flat_map(|list| {
            list.entries().map(|(file, line)| (&*list.repository, &*file.path, Entry::of(line).kernel))
        })
        .collect();
    let at = |row: &Row| order.iter().position(|place| *place == row.place());
    rows.retain(|row| at(row).is_some());
    rows.sort_by_key(at);
    let mut text = String::new();
    for row in &rows {
        text += &serde_json::to_string(row).map_err(|error| XtaskError::Check(error.to_string()))?;
        text.push('\n');
    }
    file.set_len(0).map_err(io)?;
    file.rewind().map_err(io)?;
    file.write_all(text.as_bytes()).map_err(io)?;
    Ok(rows)
}

fn lists(root: &Path) -> Result<Vec<Repository>, XtaskError> {
    let folder = root.join("xtask/corpus");
    let entries = std::fs::read_dir(&folder).map_err(|source| XtaskError::Io { path: folder, source })?;
    let paths = entries.flatten().map(|entry| entry.path());
    let mut paths: Vec<PathBuf> =
        paths.filter(|path| path.extension().is_some_and(|e| e == "toml")).collect();
    paths.sort();
    let read = |path: &PathBuf| {
        let text =
            std::fs::read_to_string(path).map_err(|source| XtaskError::Io { path: path.clone(), source })?;
        toml::from_str(&text).map_err(|error| XtaskError::Check(format!("{}: {error}", path.display())))
    };
    paths.iter().map(read).collect()
}

/// A line of a list.
struct Entry<'a> {
    kernel: &'a str,
    launch: Vec<&'a str>,
    arguments: Vec<&'a str>,
    options: Vec<&'a str>,
}

impl Entry<'_> {
    fn of(line: &str) -> Entry<'_> {
        let mut parts = line.split('|').map(str::trim);
        let kernel = parts.next().unwrap_or_default();
        let mut words = || parts.next().unwrap_or_default().split_whitespace().collect();
        Entry { kernel, launch: words(), arguments: words(), options: words() }
    }
}

/// What all checks of a run share.
struct Runner<'a> {
    root: &'a Path,
    args: &'a Corpus,
    binary: PathBuf,
    build: String,
}

/// The commit from which a command was built; empty where it does not know it.
fn build_of(binary: &Path) -> Result<String, XtaskError> {
    let output = Command::new(binary)
        .args(["version", "--json"])
        .output()
        .map_err(|source| XtaskError::Start { command: binary.display().to_string(), source })?;
    let version: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    Ok(version["commit"].as_str().unwrap_or_default().to_owned())
}

impl Runner<'_> {
    fn one(
        &self,
        checkout: &Path,
        list: &Repository,
        file: &File,
        entry: &Entry,
        ptx: &Path,
        mutants: usize,
    ) -> Result<Row, XtaskError> {
        let mut command = Command::new(&self.binary);
        // The default from Triton 3.10 on; the page says what happens without it.
        command.current_dir(checkout).args(["check", "--level", "ptx"]).env("TRITON_DEFAULT_FP_FUSION", "0");
        let launch_file = entry.launch.first().filter(|word| word.ends_with(".toml"));
        // A launch file names the entry.
        let named =
            |kernel: String| if launch_file.is_some() { vec![] } else { vec!["--entry".into(), kernel] };
        if let Some(python) = file.python.as_ref().and_then(std::env::var_os) {
            command.env("FLASHCORE_PYTHON", python);
        }
        if file.path.ends_with(".py") {
            command.arg(format!("{}:{}", file.path, entry.kernel));
        } else if ptx.is_file() {
            command.arg(ptx).args(named(spaced(entry.kernel)));
        } else {
            command.arg(&file.path).args(named(entry.kernel.to_owned())).arg("--keep-ptx").arg(ptx);
            command.args(&file.options);
            let entries = file.kernels.lines().map(|line| Entry::of(line).kernel);
            entries.filter(|kernel| kernel.contains('<')).for_each(|kernel| {
                command.args(["--instantiate", kernel]);
            });
        }
        if let Some(file) = launch_file {
            command.arg("--launch").arg(self.root.join("xtask/corpus/launches").join(file));
        }
        for (option, value) in ["--grid", "--block", "--dynamic-shared"].into_iter().zip(&entry.launch) {
            if *value != "-" && launch_file.is_none() {
                command.args([option, value]);
            }
        }
        entry.arguments.iter().for_each(|argument| {
            command.args(["--arg", argument]);
        });
        command.args(&entry.options);
        command.args(["--json", "--timeout", &self.args.timeout.to_string()]);
        if mutants > 0 {
            command.args(["--mutants", &mutants.to_string()]);
        }
        let began = std::time::Instant::now();
        let output = command
            .output()
            .map_err(|source| XtaskError::Start { command: self.binary.display().to_string(), source })?;
        let seconds = (began.elapsed().as_secs_f64() * 10.0).round() / 10.0;
        let answer: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let verdict = answer["verdict"].as_str().unwrap_or("refused").to_owned();
        let folders = [checkout, self.root, ptx];
        let reasons: Vec<String> = match answer["reasons"].as_array() {
            Some(reasons) => reasons.iter().filter_map(|r| r.as_str()).map(str::to_owned).collect(),
            None => vec![String::from_utf8_lossy(&output.stderr).trim().to_owned()],
        };
        Ok(Row {
            repository: list.repository.clone(),
            commit: list.commit.clone(),
            path: file.path.clone(),
            kernel: entry.kernel.to_owned(),
            build: self.build.clone(),
            verdict,
            seconds,
            coverage: answer["coverage"]["percent"].as_f64(),
            reasons: reasons.into_iter().take(3).map(|reason| short(&reason, &folders)).collect(),
            mutants: from_entries(
                serde_json::from_value(answer["mutants"].clone()).unwrap_or_default(),
                &std::fs::read_to_string(ptx).unwrap_or_default(),
            ),
        })
    }
}

/// Mutants whose lines are counted from the `.entry` before them.
fn from_entries(mut mutants: Vec<Mutant>, ptx: &str) -> Vec<Mutant> {
    let entries: Vec<u32> =
        ptx.lines().zip(1..).filter_map(|(line, at)| line.contains(".entry ").then_some(at)).collect();
    for mutant in &mut mutants {
        let entry = entries.iter().rfind(|entry| **entry <= mutant.line);
        mutant.line -= entry.copied().unwrap_or(0);
    }
    mutants
}

/// A reason without the names of this machine's folders, cut to 400 characters.
fn short(reason: &str, folders: &[&Path]) -> String {
    let named = folders.iter().fold(reason.to_owned(), |text, folder| {
        let folder = folder.display().to_string();
        text.replace(&format!("{folder}/"), "").replace(&folder, "")
    });
    // Other absolute paths, of tools: their last part.
    let words = named.split_inclusive([' ', '"', '\'', '\n']).map(|word| match word.strip_prefix('/') {
        Some(path) => path.rsplit('/').next().unwrap_or_default(),
        None => word,
    });
    words.collect::<String>().chars().take(400).collect()
}

/// The name of a template instance as C++ names are demangled: `sum<float, 4>`.
fn spaced(kernel: &str) -> String {
    kernel.replace(", ", ",").replace(',', ", ").replace("half", "__half")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lists_are_read_and_each_known_kernel_is_listed() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let lists = lists(root).unwrap();
        assert!(lists.len() >= 15, "{} repositories", lists.len());
        let mut kernels = 0;
        for list in &lists {
            kernels += list.entries().count();
            for known in &list.known {
                let listed = list.entries().any(|(_, line)| Entry::of(line).kernel == known.kernel);
                assert!(listed, "{}: {} is not listed", list.repository, known.kernel);
                assert!(known.class != Class::Bug || known.cure.is_some(), "{} has no cure", known.kernel);
            }
        }
        assert!(kernels >= 200, "{kernels} kernels");
    }

    #[test]
    fn each_listed_kernel_has_a_row_that_is_understood() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let rows = read_rows(root);
        for list in lists(root).unwrap() {
            for (file, line) in list.entries() {
                let kernel = Entry::of(line).kernel;
                let is_row = |row: &&Row| {
                    row.repository == list.repository && row.path == file.path && row.kernel == kernel
                };
                let row = rows.iter().find(is_row).unwrap_or_else(|| panic!("{} {kernel}", file.path));
                assert_ne!(list.class(row), Class::Unexpected, "{} {kernel}: {:?}", file.path, row.reasons);
                for mutant in row.mutants.iter().filter(|mutant| mutant.fate == Fate::Same) {
                    let reasons = list.equal.iter().filter(|equal| equal.explains(row, mutant)).count();
                    assert_eq!(reasons, 1, "{} {kernel}: {mutant:?}", file.path);
                }
            }
        }
    }

    #[test]
    fn lines_of_mutants_are_counted_from_their_entry() {
        let mutant = |line| Mutant { fault: String::new(), orders: false, line, fate: Fate::Same };
        let lines = |ptx| from_entries([0, 2, 5].map(mutant).into(), ptx).iter().map(|m| m.line).collect();
        let found: Vec<u32> = lines("//\n.entry a(\n\n.entry b(\nret;\n");
        assert_eq!(found, [0, 0, 1]);
        let found: Vec<u32> = lines("");
        assert_eq!(found, [0, 2, 5]);
    }

    #[test]
    fn reasons_name_no_folders_of_the_machine() {
        let reason = "race at /home/a/repo/k.cu:3; File \"/opt/python/lib/ir.py\", line 3";
        assert_eq!(short(reason, &[Path::new("/home/a/repo")]), "race at k.cu:3; File \"ir.py\", line 3");
    }
}
