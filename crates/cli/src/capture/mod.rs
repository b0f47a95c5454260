//! The command `flashcore capture`: runs a program under the library of the crate `capture`, and makes launch
//! files of the records that the library writes.

mod convert;
mod modules;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use capture::{Record, protocol};
use check::names::demangle;
use host::store;
use serde_json::{Value, json};

use crate::args::Capture;
use crate::error::CliError;
use crate::terminal::{self, Tone, fault, tell};
use crate::{Status, unless_closed};
use convert::{Converted, Converter};

/// The folder for records, below that of the launches.
const RECORDS: &str = ".records";

/// A launch that was selected.
struct Selected {
    record: Record,
    result: Result<Converted, String>,
}

pub fn capture(args: &Capture) -> Result<Status, CliError> {
    let Some(preload) = capture::library() else {
        return Err(CliError::Argument {
            argument: "capture",
            value: std::env::consts::OS.to_owned(),
            accepted: "Linux with glibc on x86-64 or aarch64".to_owned(),
        });
    };
    let records = args.out.join(RECORDS);
    let write = |path: &Path| {
        let path = path.to_path_buf();
        move |source| CliError::Write { path, source }
    };
    // Records of a run that was interrupted are not those of this run.
    let _ = std::fs::remove_dir_all(&records);
    std::fs::create_dir_all(&records).map_err(write(&records))?;
    let records = std::path::absolute(&records).map_err(write(&records))?;
    let library = records.join("libflashcore_capture.so");
    store::write(&library, &preload)?;
    let ended = run(args, &records, &library);
    let made = ended.and_then(|ended| Ok((ended, converted(args, &records)?, counts(&records)?)));
    let _ = std::fs::remove_dir_all(&records);
    // Stays if it has a launch.
    let _ = std::fs::remove_dir(&args.out);
    let (ended, selected, counts) = made?;
    if let Some(how) = ended {
        fault(format_args!("{} ended with {how}", args.program[0].display()));
    }
    unless_closed(print(args, &selected, &counts))?;
    let wanted = args.kernel.is_some() && selected.is_empty();
    if let Some(kernel) = args.kernel.as_ref().filter(|_| wanted) {
        fault(missing(kernel, &args.at, &counts));
    }
    Ok(match selected.iter().any(|selected| selected.result.is_err()) {
        _ if wanted => Status::Failed,
        true => Status::Incomplete,
        false => Status::Passed,
    })
}

/// Runs the program. Returns how it ended, if it failed.
fn run(args: &Capture, records: &Path, library: &Path) -> Result<Option<String>, CliError> {
    let program = &args.program[0];
    let mut command = Command::new(program);
    command.args(&args.program[1..]);
    let mut preload = OsString::from(library);
    if let Some(others) = std::env::var_os("LD_PRELOAD").filter(|others| !others.is_empty()) {
        preload.push(":");
        preload.push(others);
    }
    command.env("LD_PRELOAD", preload).env(protocol::FOLDER, records);
    command.env(protocol::LIMIT, args.limit.to_string());
    if let Some(kernel) = &args.kernel {
        let at: Vec<String> = args.at.iter().map(u64::to_string).collect();
        command.env(protocol::KERNEL, kernel).env(protocol::AT, at.join(","));
    }
    if args.after {
        command.env(protocol::AFTER, "1");
    }
    if !args.cached {
        // Each tensor is then an allocation of the driver, whose end the record knows.
        command.env("PYTORCH_NO_CUDA_MEMORY_CACHING", "1");
    }
    if args.json {
        command.stdout(std::io::stderr());
    }
    let status = command.status().map_err(|source| CliError::Read { path: program.into(), source })?;
    Ok((!status.success()).then(|| status.to_string()))
}

/// Makes the launch files, in the order of kernels and launches.
fn converted(args: &Capture, records: &Path) -> Result<Vec<Selected>, CliError> {
    let mut found: Vec<(PathBuf, Record)> = Vec::new();
    for folder in listed(records)?.into_iter().filter(|path| path.is_dir()) {
        // A launch during which the program ended has no record.
        let Ok(text) = std::fs::read_to_string(folder.join("record.json")) else { continue };
        match Record::parse(&text) {
            Ok(record) => found.push((folder, record)),
            Err(error) => fault(format_args!("a record cannot be read: {error}")),
        }
    }
    found.sort_by(|(a, x), (b, y)| (&x.kernel, x.number, a).cmp(&(&y.kernel, y.number, b)));
    let mut converter = Converter::new(records, &args.out, &args.ptx);
    let selected = found.into_iter().map(|(folder, record)| {
        let result = converter.convert(&folder, &record).map_err(|error| error.to_string());
        Selected { record, result }
    });
    Ok(selected.collect())
}

/// The paths in a folder, in their order.
fn listed(folder: &Path) -> Result<Vec<PathBuf>, CliError> {
    let read = |source| CliError::Read { path: folder.to_path_buf(), source };
    let mut paths: Vec<PathBuf> =
        std::fs::read_dir(folder).map_err(read)?.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    Ok(paths)
}

/// The numbers of launches by kernel, of all processes together.
fn counts(records: &Path) -> Result<BTreeMap<String, u64>, CliError> {
    let mut counts = BTreeMap::new();
    for path in listed(records)? {
        let is_counts = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("counts-"));
        if !is_counts {
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        for (count, kernel) in text.lines().filter_map(|line| line.split_once(' ')) {
            *counts.entry(kernel.to_owned()).or_default() += count.parse::<u64>().unwrap_or(0);
        }
    }
    Ok(counts)
}

/// Why nothing was recorded.
fn missing(kernel: &str, at: &[u64], counts: &BTreeMap<String, u64>) -> String {
    let named: Vec<String> = counts
        .iter()
        .filter(|(name, _)| name.contains(kernel))
        .map(|(name, count)| format!("{name} was launched {count} times"))
        .collect();
    if !named.is_empty() {
        return format!("no launch has a number of --at {at:?}: {}", named.join(", "));
    }
    let names: Vec<&str> = counts.keys().map(String::as_str).collect();
    let launched = if names.is_empty() {
        "the program launched none by the CUDA driver".to_owned()
    } else {
        format!("the program launched {}", ptx::quote::list(&names))
    };
    format!("no kernel has '{kernel}' in its name: {launched}")
}

fn print(args: &Capture, selected: &[Selected], counts: &BTreeMap<String, u64>) -> Result<(), CliError> {
    let mut out = terminal::out();
    if args.json {
        return Ok(out.json("capture", &object(selected, counts))?);
    }
    use std::io::Write;
    for Selected { record, result } in selected {
        let name = demangle(&record.kernel);
        match result {
            Ok(Converted { folder, bytes }) => {
                out.paint(Tone::Good, "captured")?;
                writeln!(
                    out,
                    " {name}, launch {}: {} buffers, {bytes} bytes",
                    record.number,
                    record.buffers.len()
                )?;
                let folder = folder.display();
                writeln!(out, "  flashcore check {folder}/kernel.ptx --launch {folder}/launch.toml")?;
            }
            Err(why) => {
                out.paint(Tone::Doubtful, "not captured")?;
                writeln!(out, " {name}, launch {}: {why}", record.number)?;
            }
        }
    }
    if args.kernel.is_none() && selected.is_empty() {
        tell("choose launches by --kernel and --at");
        for (kernel, count) in counts {
            writeln!(out, "{count:>9}  {kernel}")?;
        }
    }
    Ok(())
}

fn object(selected: &[Selected], counts: &BTreeMap<String, u64>) -> Value {
    let launches = selected.iter().map(|Selected { record, result }| {
        json!({
            "kernel": { "name": demangle(&record.kernel), "entry": record.kernel },
            "number": record.number,
            "in_graph": record.in_graph,
            "folder": result.as_ref().ok().map(|converted| converted.folder.display().to_string()),
            "bytes": result.as_ref().ok().map(|converted| converted.bytes),
            "reason": result.as_ref().err(),
        })
    });
    json!({ "launches": launches.collect::<Value>(), "counts": counts })
}
