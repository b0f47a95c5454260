//! The source lines from which the lines of a PTX text were compiled.

mod allowed;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use ptx::{LineTable, SourceFrame};
use serde::Serialize;

use crate::gate::Coverage;
use crate::names::demangle;

pub use allowed::CommentError;

/// Largest source file that is read, in bytes.
const LARGEST_FILE: u64 = 1 << 24;

/// Maximum number of source files that are read.
const MOST_FILES: usize = 256;

/// Extensions of files that are read. PTX names its source files itself, so untrusted PTX could otherwise
/// name any file of the machine.
const ENDINGS: [&str; 14] =
    ["cu", "cuh", "h", "hh", "hpp", "hxx", "inl", "inc", "c", "cc", "cpp", "cxx", "py", "ptx"];

/// A PTX text, and the source files that its line information names.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    ptx: String,
    table: LineTable,
    /// By the names in the line information.
    files: BTreeMap<String, File>,
}

#[derive(Clone, Debug, Default)]
struct File {
    /// The path relative to the working directory if it lies there.
    shown: String,
    /// Whether the file belongs to CUDA or to an installed Python package.
    library: bool,
    /// The lines; empty if the file cannot be read.
    lines: Vec<String>,
}

/// A line of the source, with the calls around it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SourceLine {
    /// The file, relative to the working directory if it lies within it.
    pub file: String,
    /// The line, from 1.
    pub line: u32,
    /// The column, from 1; 0 if it is not known.
    pub column: u32,
    /// The text of the line; `None` if the file cannot be read.
    pub text: Option<String>,
    /// The function that contains the line.
    pub function: Option<String>,
    /// The calls that were inlined, from the inside out, when the line is in an inlined function.
    pub inlined_at: Vec<SourceCall>,
    /// Lines of libraries (such as CUDA's headers) that this line calls, from the inside out.
    pub within: Vec<SourceCall>,
}

/// A line of a call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SourceCall {
    pub file: String,
    /// From 1.
    pub line: u32,
    /// The function that contains the line.
    pub function: Option<String>,
}

impl SourceLine {
    /// File and line: `row.cu:12`.
    pub fn name(&self) -> String {
        format!("{}:{}", self.file, self.line)
    }
}

/// Neighbouring lines of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SourceRange {
    pub file: String,
    /// From 1.
    pub first: u32,
    pub last: u32,
}

impl std::fmt::Display for SourceRange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}:{}", self.file, self.first)?;
        if self.last > self.first { write!(f, "–{}", self.last) } else { Ok(()) }
    }
}

impl From<String> for Sources {
    /// The source files are read where the line information says.
    fn from(ptx: String) -> Sources {
        Sources::new(ptx, None)
    }
}

impl Sources {
    /// Reads the source files that the line information of `ptx` names. A file that is not at the path in the
    /// PTX is searched for in the folder `beside`.
    pub fn new(ptx: String, beside: Option<&Path>) -> Sources {
        let table = LineTable::of(&ptx);
        let here = std::env::current_dir().unwrap_or_default();
        let names: BTreeSet<&str> = if table.is_empty() { BTreeSet::new() } else { table.files().collect() };
        let files = names.into_iter().take(MOST_FILES);
        let files = files.map(|name| (name.to_owned(), File::find(name, &here, beside))).collect();
        Sources { table, files, ptx }
    }

    /// The PTX text.
    pub fn ptx(&self) -> &str {
        &self.ptx
    }

    /// Whether the PTX has no line information.
    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    /// The lines of the PTX text, without surrounding space.
    pub fn ptx_lines(&self) -> Vec<&str> {
        self.ptx.lines().map(str::trim).collect()
    }

    /// The source line of a PTX line: the innermost line that belongs to no library, or else the innermost
    /// line.
    pub fn line(&self, ptx_line: u32) -> Option<SourceLine> {
        let frames = self.table.frames(ptx_line);
        let own = self.own(&frames)?;
        let frame = &frames[own];
        let text = self.text(frame);
        let calls = |frames: &[SourceFrame]| frames.iter().map(|frame| self.call(frame)).collect();
        let SourceCall { file: shown, line, function } = self.call(frame);
        Some(SourceLine {
            file: shown,
            line,
            column: frame.column,
            text: text.map(|text| text.trim().to_owned()),
            function,
            inlined_at: calls(&frames[own + 1..]),
            within: calls(&frames[..own]),
        })
    }

    /// The name of a PTX line in messages: its source line; without one, its number.
    pub fn place(&self, ptx_line: u32) -> String {
        match self.line(ptx_line) {
            Some(source) => source.name(),
            None if self.is_empty() => format!("line {ptx_line}"),
            None => format!("PTX line {ptx_line}"),
        }
    }

    /// A message of the emulator or of the gate with source lines in place of lines of the PTX, and with
    /// names as in the source.
    pub fn readable(&self, message: &str) -> String {
        const WORD: &str = "line ";
        // A finding about the whole kernel has line 0.
        let message = message.replace(" at line 0:", ":");
        let mut readable = String::new();
        let mut rest = &*message;
        while let Some(at) = rest.find(WORD) {
            let (before, after) = rest.split_at(at);
            let digits = after[WORD.len()..].bytes().take_while(u8::is_ascii_digit).count();
            let (name, after) = after.split_at(WORD.len() + digits);
            readable += before;
            match name[WORD.len()..].parse() {
                // An assertion names its own file and line.
                Ok(line) if is_begin_of_word(&readable) && !message.contains("the assertion `") => {
                    readable += &self.place(line);
                }
                _ => readable += name,
            }
            rest = after;
        }
        demangle(&(readable + rest)).into_owned()
    }

    /// The index of the innermost frame that belongs to no library, or else of the innermost frame.
    fn own(&self, frames: &[SourceFrame]) -> Option<usize> {
        let of_library = |frame: &SourceFrame| self.files.get(frame.file).is_some_and(|file| file.library);
        let own = frames.iter().position(|frame| !of_library(frame)).unwrap_or(0);
        (!frames.is_empty()).then_some(own)
    }

    fn text(&self, frame: &SourceFrame) -> Option<&String> {
        self.files.get(frame.file)?.lines.get((frame.line as usize).checked_sub(1)?)
    }

    /// The path of a file as messages show it.
    fn shown<'a>(&'a self, file: &'a str) -> &'a str {
        self.files.get(file).map_or(file, |file| &file.shown)
    }

    fn call(&self, frame: &SourceFrame) -> SourceCall {
        SourceCall {
            file: self.shown(frame.file).to_owned(),
            line: frame.line,
            function: frame.function.map(|name| demangle(name).into_owned()),
        }
    }

    /// The source lines of some PTX lines, in the order of files and lines; neighbouring lines are joined.
    pub fn ranges(&self, ptx_lines: impl IntoIterator<Item = u32>) -> Vec<SourceRange> {
        let lines: BTreeSet<(String, u32)> =
            ptx_lines.into_iter().filter_map(|at| self.line(at)).map(|line| (line.file, line.line)).collect();
        let mut ranges: Vec<SourceRange> = Vec::new();
        for (file, line) in lines {
            match ranges.last_mut() {
                Some(range) if range.file == file && range.last + 1 == line => range.last = line,
                _ => ranges.push(SourceRange { file, first: line, last: line }),
            }
        }
        ranges
    }
}

/// Whether a word begins after this text, which is not the word "PTX".
fn is_begin_of_word(before: &str) -> bool {
    !before.ends_with("PTX ") && !before.ends_with(|c: char| c.is_alphanumeric() || c == '_')
}

/// The instructions of one source line, and how many of them ran.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LineCoverage {
    pub file: String,
    /// From 1.
    pub line: u32,
    /// The text of the line; `None` if the file cannot be read.
    pub text: Option<String>,
    pub executed: usize,
    pub instructions: usize,
}

impl Sources {
    /// The source lines with an instruction that never ran, in the order of files and lines.
    pub fn uncovered(&self, coverage: &Coverage) -> Vec<LineCoverage> {
        let mut lines: BTreeMap<(String, u32), LineCoverage> = BTreeMap::new();
        for (ptx_line, executed) in coverage.lines() {
            let Some(SourceLine { file, line, text, .. }) = self.line(ptx_line) else { continue };
            let found = lines.entry((file.clone(), line)).or_insert_with(|| LineCoverage {
                file,
                line,
                text,
                executed: 0,
                instructions: 0,
            });
            found.executed += usize::from(executed);
            found.instructions += 1;
        }
        lines.into_values().filter(|line| line.executed < line.instructions).collect()
    }
}

impl File {
    fn find(name: &str, here: &Path, beside: Option<&Path>) -> File {
        let named = PathBuf::from(name);
        let moved = beside.and_then(|folder| Some(folder.join(named.file_name()?)));
        let found = [Some(named), moved].into_iter().flatten();
        let found = found.map(|path| (read(&path), path)).find_map(|(text, path)| Some((text?, path)));
        let library = is_library(Path::new(name), here);
        let Some((text, path)) = found else {
            return File { shown: relative(Path::new(name), here), library, lines: Vec::new() };
        };
        File { shown: relative(&path, here), library, lines: text.lines().map(str::to_owned).collect() }
    }
}

/// The text of a source file; `None` if it is not a file or cannot be read.
fn read(path: &Path) -> Option<String> {
    let ending = path.extension()?.to_str()?.to_ascii_lowercase();
    let found = std::fs::metadata(path).ok()?;
    let fits = ENDINGS.contains(&&*ending) && found.is_file() && found.len() <= LARGEST_FILE;
    let bytes = fits.then(|| std::fs::read(path).ok()).flatten()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

fn relative(path: &Path, here: &Path) -> String {
    let inside = path.strip_prefix(here).ok().filter(|rest| !rest.as_os_str().is_empty());
    let shown = inside.unwrap_or(path);
    shown.strip_prefix(".").unwrap_or(shown).display().to_string()
}

/// Whether a file belongs to CUDA's headers or to an installed Python package, such as Triton's own library:
/// its path contains the folder `site-packages`, or the folder `include` below a folder `cuda`, `cuda-12.4`
/// or `cu13`. A folder `cuda` in the working directory `here` belongs to the project.
fn is_library(path: &Path, here: &Path) -> bool {
    // The headers that NVRTC brings have no folder.
    if path.to_string_lossy().starts_with("__nv_nvrtc") {
        return true;
    }
    let is_inside = path.is_relative() || here.parent().is_some() && path.starts_with(here);
    let mut cuda = false;
    path.components().any(|part| {
        let part = part.as_os_str().to_string_lossy();
        let version = part.strip_prefix("cuda-").or_else(|| part.strip_prefix("cu"));
        cuda |= part == "cuda" && !is_inside
            || version.is_some_and(|version| version.starts_with(|c: char| c.is_ascii_digit()));
        matches!(&*part, "site-packages" | "dist-packages") || cuda && part == "include"
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &str = ".version 7.0
.target sm_80
.visible .entry _Z1kPf(.param .u64 a)
{
    .loc 1 2 5
    bar.sync 0;
    .loc 3 7 1, function_name $F, inlined_at 1 2 5
    bar.sync 1;
    .loc 1 3 5
    ret;
}
    .file 1 \"/nowhere/build/n.cu\"
    .file 3 \"/usr/local/cuda/include/cuda_fp16.hpp\"
    .section .debug_str
    {
$F: .b8 95,90,54,95,95,104,97,100,100,118,0
    }
";

    #[test]
    fn a_moved_file_is_found_beside_the_kernel_and_libraries_come_last() {
        let folder = std::env::temp_dir().join(format!("flashcore-sources-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("n.cu"), "// one\n  __syncthreads();\n}").unwrap();
        let sources = Sources::new(PTX.to_owned(), Some(&folder));
        let line = sources.line(8).unwrap();
        assert_eq!((line.line, line.text.as_deref()), (2, Some("__syncthreads();")));
        assert_eq!(line.file, folder.join("n.cu").display().to_string());
        assert_eq!(line.function.as_deref(), Some("k"));
        assert_eq!((line.inlined_at.len(), line.within.len()), (0, 1));
        assert_eq!(line.within[0].function.as_deref(), Some("__hadd"));
        let ranges = sources.ranges([6, 8, 10]);
        assert_eq!((ranges.len(), ranges[0].first, ranges[0].last), (1, 2, 3));
        assert!(ranges[0].to_string().ends_with("n.cu:2–3"));
        std::fs::remove_dir_all(&folder).unwrap();
        let without = Sources::from(PTX.to_owned()).line(6).unwrap();
        assert_eq!((without.name(), without.text), ("/nowhere/build/n.cu:2".to_owned(), None));
    }

    #[test]
    fn messages_name_source_lines() {
        let sources = Sources::from(PTX.to_owned());
        for (said, readable) in [
            (
                "race at line 6 (and line 10): writes _Z1kPf",
                "race at /nowhere/build/n.cu:2 (and /nowhere/build/n.cu:3): writes k",
            ),
            ("line 6: the emulator does not", "/nowhere/build/n.cu:2: the emulator does not"),
            ("PTX line 6, a deadline 6, line x", "PTX line 6, a deadline 6, line x"),
            ("unwritten_output at line 0: 4 bytes", "unwritten_output: 4 bytes"),
            ("the assertion `a` of f (a.cu, line 6) fails", "the assertion `a` of f (a.cu, line 6) fails"),
            ("at line 1", "at PTX line 1"),
        ] {
            assert_eq!(sources.readable(said), readable);
        }
        assert_eq!(Sources::from(PTX.replace(".loc", "//")).readable("at line 6"), "at line 6");
    }

    #[test]
    fn only_source_files_are_read() {
        let named = |file: &str| PTX.replace("/nowhere/build/n.cu", file);
        let folder = std::env::temp_dir().join(format!("flashcore-secret-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let secret = folder.join("secret.key");
        std::fs::write(&secret, "one\ntwo\nthree").unwrap();
        for file in [secret.display().to_string(), folder.display().to_string(), "/dev/zero".to_owned()] {
            assert_eq!(Sources::from(named(&file)).line(6).unwrap().text, None, "{file}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn libraries_are_known_by_their_paths() {
        for (path, library) in [
            ("/usr/local/cuda-12.4/targets/x86_64-linux/include/cuda_fp16.hpp", true),
            ("/x/nvidia/cu13/include/cccl/cuda/std/array", true),
            ("/x/site-packages/triton/language/standard.py", true),
            ("/home/me/project/include/tile.cuh", false),
            ("/home/me/cuda-kernels/src/row.cu", false),
            ("/home/me/cuda-kernels/include/tile.cuh", false),
            ("/home/me/cuda_kernels/include/tile.cuh", false),
            ("/project/cuda/include/tile.cuh", false),
            ("/project/venv/lib/python3.11/site-packages/triton/language/standard.py", true),
            ("include/tile.cuh", false),
            ("__nv_nvrtc_builtin_header.h", true),
        ] {
            assert_eq!(is_library(Path::new(path), Path::new("/project")), library, "{path}");
        }
    }
}
