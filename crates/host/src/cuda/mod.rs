//! Compiles ordinary `.cu` files, with host code, host headers, templates and several files.
//!
//! NVRTC compiles device code only. Three steps make ordinary files compile:
//!
//! - Host headers (`<stdio.h>`, `<vector>`, …) are replaced by stubs (`stubs`): types and macros that device
//!   code uses, and nothing else.
//! - Host functions (`main`, functions with `<<<…>>>`, functions marked only `__host__`) are blanked before
//!   the first attempt, also in the project's own headers. Line numbers do not change.
//! - Other functions without a specifier may be host or device code; NVRTC compiles them as device code. A
//!   function in which NVRTC finds an error is taken for host code and blanked before the next attempt.

mod blank;
mod stubs;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use crate::tools::{Compiled, NvrtcError, Request, headers, missing_header, nvrtc};
use blank::{Include, Text};

/// A source file.
#[derive(Clone, Debug)]
pub struct Source {
    pub file: PathBuf,
    pub text: String,
}

/// Options of a compilation.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Virtual architecture, such as `compute_80`.
    pub arch: String,
    /// The standard of C++, such as `20`; default: 17.
    pub standard: Option<String>,
    /// Include folders, searched after the folder of the source.
    pub include: Vec<PathBuf>,
    /// Macros: `NAME` or `NAME=VALUE`.
    pub define: Vec<String>,
    /// Template instances, such as `scale<float, 64>`.
    pub instantiate: Vec<String>,
}

/// Maximum number of attempts. Each attempt blanks at least one more declaration of a file.
const ATTEMPTS: usize = 32;

/// Compiles the device code of one or more files.
///
/// # Errors
/// When NVRTC is not found or rejects the device code. The messages name the files.
pub fn compile_files(sources: &[Source], options: &Options) -> Result<Compiled, NvrtcError> {
    let library = nvrtc().ok_or(NvrtcError::NotFound)?;
    let cuda = headers(&library);
    // nvcc includes the runtime's headers, and with them <math.h>, in every file.
    let mut flags = vec![format!("--gpu-architecture={}", options.arch)];
    flags.push(format!("--std=c++{}", options.standard.as_deref().unwrap_or("17")));
    // A narrowing conversion of a variable is a warning for nvcc's host compilers, an error in NVRTC.
    flags.extend(
        ["-default-device", "-lineinfo", "--pre-include=math.h", "--diag-warn=2361"].map(str::to_owned),
    );
    flags.extend(options.define.iter().map(|define| format!("--define-macro={define}")));
    let folders = sources.iter().map(|source| folder_of(&source.file));
    let folders: Vec<PathBuf> = folders.chain(options.include.iter().cloned()).collect();
    let path = |folder: &PathBuf| format!("--include-path={}", folder.display());
    flags.extend(folders.iter().chain(&cuda).map(path));
    let mut texts: BTreeMap<PathBuf, Text> = BTreeMap::new();
    for source in sources {
        let mut text = Text::new(&source.text);
        text.blank_host_functions();
        texts.insert(source.file.clone(), text);
    }
    add_headers(&folders, &mut texts);
    let mut stubs: BTreeMap<String, String> = stubs::known(cuda.is_empty());
    let mut empty = BTreeSet::new();
    let mut log = String::new();
    for _ in 0..ATTEMPTS {
        let (name, source, own) = unit(sources, &texts, &folders);
        let headers = stubs.iter().map(|(name, text)| (name.clone(), text.clone())).chain(own).collect();
        let request = Request {
            source,
            name,
            options: flags.clone(),
            headers,
            expressions: options.instantiate.clone(),
        };
        log = match request.compile(&library) {
            Ok(compiled) => return Ok(compiled),
            Err(NvrtcError::Source(log)) => log,
            Err(error) => return Err(error),
        };
        if let Some(header) = missing_header(&log) {
            let header = header.to_owned();
            if is_of_cuda(&header) && cuda.is_empty() {
                return Err(NvrtcError::NoHeaders { header, library });
            }
            // A header included in quotes belongs to the project, and the device code needs it.
            let is_own = is_quoted(&header, &texts) && !stubs::is_host(&header);
            if is_own || is_of_cuda(&header) || !empty.insert(header.clone()) {
                break;
            }
            let text = stubs::missing(&header);
            stubs.insert(header, text);
        } else if !blank_faults(&log, &folders, &mut texts) {
            break;
        }
    }
    Err(NvrtcError::Source(with_notes(log, &texts, &empty)))
}

fn folder_of(file: &Path) -> PathBuf {
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new(".")).to_path_buf()
}

/// Adds the project's headers that the files include, and those that these include, with host functions
/// blanked.
fn add_headers(folders: &[PathBuf], texts: &mut BTreeMap<PathBuf, Text>) {
    let mut open: Vec<PathBuf> = texts.keys().cloned().collect();
    while let Some(file) = open.pop() {
        let includes: Vec<Include> = texts[&file].includes().cloned().collect();
        let found = includes.iter().filter_map(|include| place(&file, folders, include));
        for header in found.collect::<BTreeSet<_>>() {
            if texts.contains_key(&header) {
                continue;
            }
            let Ok(source) = std::fs::read_to_string(&header) else { continue };
            let mut text = Text::new(&source);
            text.blank_host_functions();
            texts.insert(header.clone(), text);
            open.push(header);
        }
    }
}

/// The file of the project that a directive in `file` includes.
fn place(file: &Path, folders: &[PathBuf], include: &Include) -> Option<PathBuf> {
    if !include.is_quoted && stubs::is_host(&include.name) {
        return None;
    }
    let own = include.is_quoted.then(|| folder_of(file));
    let mut places = own.iter().chain(folders).map(|folder| plain(&folder.join(&include.name)));
    places.find(|place| place.is_file())
}

/// A path without `.` and `..` inside: one file has one name.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for component in path.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir if matches!(plain.components().next_back(), Some(Component::Normal(_))) => {
                plain.pop();
            }
            other => plain.push(other),
        }
    }
    plain
}

/// The translation unit: name, text, and the headers of the project by their paths. All directives name these
/// paths, since two headers may be included by the same words.
fn unit(
    sources: &[Source],
    texts: &BTreeMap<PathBuf, Text>,
    folders: &[PathBuf],
) -> (String, String, BTreeMap<String, String>) {
    let text = |file: &Path| {
        let path = |include: &Include| place(file, folders, include).filter(|path| texts.contains_key(path));
        texts.get(file).map(|text| text.with_includes(path)).unwrap_or_default()
    };
    let headers = texts.keys().filter(|file| sources.iter().all(|source| source.file != **file));
    let mut own: BTreeMap<String, String> =
        headers.map(|file| (file.display().to_string(), text(file))).collect();
    match sources {
        [only] => (only.file.display().to_string(), text(&only.file), own),
        all => {
            let mut source = String::new();
            for one in all {
                let name = one.file.display().to_string();
                source += &format!("#include \"{name}\"\n");
                own.insert(name, text(&one.file));
            }
            ("files.cu".to_owned(), source, own)
        }
    }
}

/// Blanks, in each file, the first declaration without a device specifier in which NVRTC found an error, and
/// those with the same error, such as the same unknown type. Other errors may be consequences of the first.
/// Returns whether any declaration was blanked.
fn blank_faults(log: &str, folders: &[PathBuf], texts: &mut BTreeMap<PathBuf, Text>) -> bool {
    let mut done: BTreeMap<PathBuf, &str> = BTreeMap::new();
    for (file, line, message) in blank::faults(log) {
        if done.get(&file).is_some_and(|first| *first != message) {
            continue;
        }
        if !texts.contains_key(&file) {
            // Only headers of the project are changed, not those of CUDA or other installations.
            let is_own = folders.iter().any(|folder| file.starts_with(folder) || file.is_relative());
            let Some(text) = std::fs::read_to_string(&file).ok().filter(|_| is_own) else { continue };
            texts.insert(file.clone(), Text::new(&text));
        }
        if texts.get_mut(&file).is_some_and(|text| text.blank_line(line)) {
            done.insert(file, message);
        }
    }
    !done.is_empty()
}

fn is_quoted(header: &str, texts: &BTreeMap<PathBuf, Text>) -> bool {
    texts.values().any(|text| text.includes().any(|i| i.is_quoted && i.name == header))
}

/// Whether the header belongs to CUDA's device code. No stub replaces such a header.
fn is_of_cuda(header: &str) -> bool {
    let device =
        ["cuda_", "cooperative_groups", "cuda/", "cub/", "thrust/", "nv/", "cccl/", "cutlass/", "cute/"];
    header == "mma.h" || device.iter().any(|prefix| header.starts_with(prefix))
}

/// The compiler's messages with a note on the declarations that were blanked.
fn with_notes(mut log: String, texts: &BTreeMap<PathBuf, Text>, empty: &BTreeSet<String>) -> String {
    for (file, text) in texts {
        let lines = text.blanked_lines();
        if !lines.is_empty() {
            let lines = lines.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}–{b}") });
            let lines = lines.collect::<Vec<_>>().join(", ");
            log += &format!("\nnote: taken as host code and left out: {} lines {lines}", file.display());
        }
    }
    if !empty.is_empty() {
        let names = empty.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        log += &format!("\nnote: not found and taken as empty: {names}; -I names folders of headers");
    }
    log
}

/// The kernels that are function templates, and the instances that host code launches.
pub fn templates(sources: &[Source]) -> (Vec<String>, Vec<String>) {
    let texts: Vec<Text> = sources.iter().map(|source| Text::new(&source.text)).collect();
    let mut all = (Vec::new(), Vec::new());
    for text in &texts {
        all.0.extend(text.template_kernels());
        all.1.extend(text.launched_instances());
    }
    all.1.sort();
    all.1.dedup();
    all
}

/// An instance of a kernel that is a function template, as an example: `scale<float, 16>`.
pub fn example_instance(sources: &[Source], kernel: &str) -> Option<String> {
    sources.iter().find_map(|source| Text::new(&source.text).example_of(kernel))
}

/// A parameter of a kernel as its source declares it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameter {
    pub name: String,
    /// The type without qualifiers, such as `half*`, with template parameters replaced.
    pub ty: String,
    /// The declaration, in one line.
    pub text: String,
}

/// The parameters of the kernel with this name, an instance such as `scale<float, 2>` or a plain name, as its
/// source declares them; `None` if no file defines such a kernel.
pub fn parameters(sources: &[Source], kernel: &str) -> Option<Vec<Parameter>> {
    let (name, arguments) = kernel.split_once('<').unwrap_or((kernel, ""));
    let name = name.rsplit("::").next().unwrap_or(name).trim();
    let arguments = blank::separated(arguments.trim_end().trim_end_matches('>'));
    sources.iter().find_map(|source| Text::new(&source.text).parameters_of(name, &arguments))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn declarations_with_the_same_error_are_blanked_together() {
        let file = PathBuf::from("k.cuh");
        let text = "void a(Context & x);\nvoid b(Context & x);\nvoid c(float x);\n";
        let mut texts = BTreeMap::from([(file.clone(), Text::new(text))]);
        let log = "k.cuh(1): error: identifier \"Context\" is undefined\n\
                   k.cuh(2): error: identifier \"Context\" is undefined\n\
                   k.cuh(3): error: another one\n";
        assert!(blank_faults(log, &[], &mut texts));
        assert_eq!(texts[&file].to_string().trim(), "void c(float x);");
    }
}
