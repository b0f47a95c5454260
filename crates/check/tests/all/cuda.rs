//! Tests the kernels of `filetests/cuda`: CUDA C++ and Triton, with the launch and the expected hazards in
//! comments.
//!
//! ```text
//! // What the kernel does.
//! // sm: 90                                   (the architecture, 80 unless given)
//! //! [launch]                                (the launch file)
//! x[i] = tile[63 - i];  // hazard: race       (on the line of either access; several kinds may follow)
//! x[i] = four.x;  // note: unpromised_alignment
//! ```
//!
//! Each file has the entries `wrong` and `right`. `wrong` has the announced hazards on the announced source
//! lines and no others, and `right` passes. NVRTC compiles CUDA C++ (`filetest::cuda`); without NVRTC, those
//! files are not run. The PTX of Triton is stored next to each source. Where Triton is installed, the source
//! is compiled again and that PTX is checked, too; `FLASHCORE_BLESS=1` then writes the committed PTX.
//!
//! In a Triton file the comments begin with `#`, and each kernel has a PTX file of its own (`x_wrong.ptx`).
//! Triton compiles for sm_90a where the file says 90.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use filetest::cuda::{self, folder, portable};
use flashcore_check::causes::{Cause, causes};
use flashcore_check::gate::{Settings, Verdict, check_kernel};
use flashcore_check::launchfile::LaunchSpec;
use flashcore_check::sources::Sources;
use host::triton::{self, TritonError};
use rayon::prelude::*;

/// The sources in one language, by the ending of their names.
fn sources(language: &str) -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().path());
    let mut files: Vec<PathBuf> =
        files.filter(|path| path.extension().is_some_and(|ending| ending == language)).collect();
    files.sort();
    files
}

/// The launch file in a source.
fn launch(source: &str) -> String {
    let line = |line: &str| {
        let rest = line.strip_prefix("//!").or_else(|| line.strip_prefix("#!"))?;
        Some(rest.trim_start().to_owned() + "\n")
    };
    source.lines().filter_map(line).collect()
}

/// The announced kinds with their lines, from `mark` to the end or the next comment.
fn announced(source: &str, mark: &str) -> BTreeSet<(String, u32)> {
    let lines = source
        .lines()
        .zip(1..)
        .filter_map(|(text, line)| Some((text.split_once(mark)?.1.split("//").next()?, line)));
    lines
        .flat_map(|(kinds, line)| kinds.split_whitespace().map(move |kind| (kind.to_owned(), line)))
        .collect()
}

/// The kinds of some causes with the source lines of both places.
fn found(causes: &[Cause]) -> BTreeSet<(String, u32)> {
    let lines = causes.iter().flat_map(|cause| {
        let places = [&cause.source, &cause.other_source].into_iter().flatten();
        places.map(|source| (cause.kind.name().to_owned(), source.line))
    });
    lines.collect()
}

/// The PTX of an entry, and for Triton the dynamic shared memory.
struct Compiled {
    ptx: String,
    shared: Option<u32>,
}

/// The committed PTX of an entry of a Triton file.
fn committed(file: &Path, entry: &str) -> Compiled {
    let ptx = std::fs::read_to_string(of_entry(file, entry)).unwrap();
    let shared = ptx.lines().find_map(|line| line.strip_prefix("// shared: ")?.parse().ok());
    Compiled { ptx, shared: Some(shared.unwrap()) }
}

fn of_entry(file: &Path, entry: &str) -> PathBuf {
    file.with_file_name(format!("{}_{entry}.ptx", file.file_stem().unwrap().to_string_lossy()))
}

/// Compares the findings on both entries with what the source announces.
fn judge(file: &Path, compiled: impl Fn(&str) -> Compiled) -> Vec<String> {
    let source = std::fs::read_to_string(file).unwrap();
    let name = file.file_stem().unwrap().to_string_lossy();
    let spec = launch(&source);
    let mark = if file.extension().is_some_and(|ending| ending == "py") { "#" } else { "//" };
    let announced = |what: &str| announced(&source, &format!("{mark} {what}:"));
    let mut faults = Vec::new();
    for (entry, wanted) in [
        ("wrong", [announced("hazard"), announced("note")]),
        ("right", [BTreeSet::new(), announced("note of right")]),
    ] {
        let Compiled { ptx, shared } = compiled(entry);
        let spec = spec.replacen("[launch]", &format!("[launch]\nentry = \"{entry}\""), 1);
        let module = ptx::parse(&ptx).unwrap().verify().unwrap();
        let mut spec = spec.parse::<LaunchSpec>().unwrap();
        if let Some(shared) = shared {
            spec.complete_triton(shared, module.entries().next().unwrap().params.len());
        }
        let bound = spec.bind(module).unwrap();
        let check = check_kernel(&bound, &Settings::thorough()).unwrap();
        let sources = Sources::new(ptx, Some(&folder()));
        let (hazards, notes) = (causes(&check.hazards, &sources), causes(&check.notes, &sources));
        let got = [found(&hazards), found(&notes)];
        let fails = !wanted[0].is_empty();
        let verdict = if fails { Verdict::Failed } else { Verdict::Passed };
        if got != wanted || check.verdict != verdict {
            faults.push(format!(
                "{name} {entry}: {}, found {got:?}, announced {wanted:?}: {:?}",
                check.verdict, check.reasons
            ));
        }
        for cause in hazards.iter().chain(&notes) {
            let text = cause.source.as_ref().and_then(|source| source.text.as_deref());
            if text.is_none_or(str::is_empty) {
                faults.push(format!("{name} {entry}: the source line is not quoted: {cause:?}"));
            }
        }
    }
    faults
}

#[test]
fn hazards_of_cuda_are_found_on_their_source_lines() {
    let files = sources("cu");
    assert!(files.len() >= 35, "{} sources", files.len());
    let faults: Vec<String> = files
        .par_iter()
        .flat_map_iter(|file| {
            let ptx = cuda::ptx(&file.file_stem().unwrap().to_string_lossy());
            ptx.map(|ptx| judge(file, |_| Compiled { ptx: ptx.clone(), shared: None })).unwrap_or_default()
        })
        .collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn hazards_of_triton_are_found_on_their_source_lines() {
    let files = sources("py");
    assert!(files.len() >= 6, "{} sources", files.len());
    let judged = files.iter().flat_map(|file| judge(file, |entry| committed(file, entry)));
    let faults: Vec<String> = judged.collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

fn blesses() -> bool {
    std::env::var_os("FLASHCORE_BLESS").is_some()
}

/// Writes committed PTX, with names of files that do not depend on the machine.
fn bless(path: &Path, ptx: &str) {
    let mut unread = false;
    let portable = portable(ptx);
    // Of debugging information, only the names of inlined functions are read.
    let is_read = |line: &&str| {
        if let Some(section) = line.trim().strip_prefix(".section") {
            unread = section.trim() != ".debug_str";
        }
        let is_read = !unread;
        unread &= !line.trim().starts_with('}');
        is_read
    };
    let lines = portable.trim_end().split_inclusive('\n').filter(is_read).map(of_no_machine);
    std::fs::write(path, lines.collect::<String>().trim_end().to_owned() + "\n").unwrap();
}

/// A line of PTX, in which the folder of installed Python packages has a name that does not depend on the
/// machine.
fn of_no_machine(line: &str) -> String {
    const PACKAGES: &str = "/site-packages/";
    match (line.find("\"/"), line.find(PACKAGES)) {
        (Some(start), Some(end)) if line.trim_start().starts_with(".file") && start < end => {
            format!("{}\"/usr/lib/python3{}", &line[..start], &line[end..])
        }
        _ => line.to_owned(),
    }
}

/// A newer compiler may place the instructions elsewhere; the source lines stay the same.
#[test]
fn triton_of_this_machine_gives_the_announced_lines() {
    let mut faults = Vec::new();
    for file in sources("py") {
        let source = std::fs::read_to_string(&file).unwrap();
        let spec: LaunchSpec = launch(&source).parse().unwrap();
        let sm = source.lines().find_map(|line| line.strip_prefix("# sm: ")).unwrap_or("80");
        let mut both = Vec::new();
        for function in ["wrong", "right"] {
            let request = triton::Request {
                file: file.clone(),
                function: function.to_owned(),
                types: spec.triton_types().unwrap(),
                constants: Vec::new(),
                warps: None,
                stages: None,
                sm: sm.parse().unwrap(),
            };
            match request.compile() {
                Ok(compiled) => both.push(compiled),
                Err(TritonError::Missing { .. } | TritonError::Python { .. }) => return,
                Err(error) => panic!("{}: {error}", file.display()),
            }
        }
        for (function, compiled) in ["wrong", "right"].into_iter().zip(&both) {
            if blesses() {
                let text = format!("// shared: {}\n{}", compiled.shared, compiled.ptx);
                bless(&of_entry(&file, function), &text);
            }
        }
        faults.extend(judge(&file, |entry| {
            let triton::Compiled { ptx, shared, .. } = &both[usize::from(entry == "right")];
            Compiled { ptx: ptx.clone(), shared: Some(*shared) }
        }));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
