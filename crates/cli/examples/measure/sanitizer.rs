//! Compares the check in the emulator with NVIDIA's compute-sanitizer on the kernels of `filetests/cuda`,
//! each with a wrong and a right entry: `sanitizer ROWS.jsonl [KERNEL …]`. A row has the check's verdict, the
//! kinds of its hazards and its seconds, and of each tool of compute-sanitizer the number of errors and the
//! seconds.
//!
//! The tools watch this program with `--launch KERNEL ENTRY`, which makes one launch on the GPU; its seconds
//! without a tool are in the row, too. FLASHCORE_SANITIZER names another program than compute-sanitizer.
//! Launches that this program does not make on a GPU (cooperative ones, and tables of addresses) have the
//! tools' errors `null`.

use std::path::Path;
use std::process::Command;
use std::time::Instant;

use bench::provenance::Provenance;
use calibrate::selftest::sanitizer::{TOOLS, find};
use check::gate::{Settings, check_kernel, contents};
use check::launchfile::{Bound, Init, LaunchSpec, Role};
use driver::Gpu;
use filetest::cuda;
use host::store::append_line;
use ptx::Machine;
use serde_json::{Value, json};

use crate::{Outcome, Usage, with};

type Failure = Box<dyn std::error::Error>;

/// Seconds of one process. A kernel with a deadlock never ends.
const LIMIT: &str = "120";
const ENTRIES: [&str; 2] = ["wrong", "right"];

pub fn main(args: &[String]) -> Outcome {
    match args {
        [option, kernel, entry] if option == "--launch" => launch(&bound(kernel, entry)?).map(|()| true),
        [rows, kernels @ ..] if !rows.starts_with('-') => compare(Path::new(rows), kernels),
        _ => Err(Usage.into()),
    }
}

fn bound(kernel: &str, entry: &str) -> Result<Bound, Failure> {
    let source = std::fs::read_to_string(cuda::folder().join(kernel).with_extension("cu"))?;
    let stated =
        source.lines().filter_map(|line| Some(line.strip_prefix("//!")?.trim_start().to_owned() + "\n"));
    let stated =
        stated.collect::<String>().replacen("[launch]", &format!("[launch]\nentry = \"{entry}\""), 1);
    let text = cuda::ptx(kernel).ok_or("the kernels need NVRTC, which is not installed")?;
    let module = ptx::parse(&text).map_err(|error| error.to_string())?;
    Ok(stated.parse::<LaunchSpec>()?.bind(module.verify().map_err(|error| error.to_string())?)?)
}

/// The names of the kernels.
fn all() -> Result<Vec<String>, Failure> {
    let files = std::fs::read_dir(cuda::folder())?.flatten().map(|entry| entry.path());
    let sources = files.filter(|path| path.extension().is_some_and(|ending| ending == "cu"));
    let mut names: Vec<String> =
        sources.filter_map(|path| Some(path.file_stem()?.to_string_lossy().into_owned())).collect();
    names.sort();
    Ok(names)
}

/// Whether this program makes the launch on a GPU.
fn is_launched(bound: &Bound) -> bool {
    let has_table = bound.roles.iter().any(|role| matches!(role, Role::Words(_)));
    !has_table && !bound.steps().enumerate().any(|(step, _)| bound.is_cooperative(step))
}

/// Makes the launch. Buffers have no guards, so that memcheck sees where they end, and those without contents
/// are not written, so that initcheck sees that.
fn launch(bound: &Bound) -> Result<(), Failure> {
    let mut gpu = Gpu::open(0)?;
    let mut buffers = Vec::new();
    for (index, data) in contents(bound, 1).into_iter().enumerate() {
        let mut buffer = gpu.allocate(data.len())?;
        if bound.memory(index).is_none_or(|memory| memory.init != Init::Uninitialised) {
            gpu.upload(&mut buffer, &data)?;
        }
        buffers.push(buffer);
    }
    for kernel in bound.steps() {
        gpu.launch(kernel, &mut buffers.iter_mut().collect::<Vec<_>>())?;
    }
    let mut bytes = vec![0; buffers.first().map_or(0, |_| bound.kernel.buffers[0].bytes)];
    if let Some(buffer) = buffers.first() {
        // Waits for the launches.
        gpu.download(buffer, &mut bytes)?;
    }
    Ok(())
}

fn compare(rows: &Path, kernels: &[String]) -> Outcome {
    let program = find().ok_or("compute-sanitizer is not installed; FLASHCORE_SANITIZER can name it")?;
    let provenance = Gpu::open(0).ok().map(|gpu| Provenance::of_gpu(gpu.info()));
    let names = if kernels.is_empty() { all()? } else { kernels.to_vec() };
    println!("{:28} {:6} {:12} {}", "kernel", "entry", "check", TOOLS.join(" "));
    for name in &names {
        for entry in ENTRIES {
            let row = row(name, entry, &program)?;
            let tools: Vec<String> =
                TOOLS.iter().map(|tool| row["sanitizer"][tool]["errors"].to_string()).collect();
            println!(
                "{name:28} {entry:6} {:12} {}",
                row["check"]["verdict"].as_str().unwrap_or(""),
                tools.join(" ")
            );
            match &provenance {
                Some(provenance) if provenance.commit.is_some() => {
                    append_line(rows, &with(row, provenance).to_string())?;
                }
                _ => {}
            }
        }
    }
    if provenance.is_none() {
        println!("there is no GPU: no rows are appended");
    }
    Ok(true)
}

fn row(name: &str, entry: &str, program: &Path) -> Result<Value, Failure> {
    let bound = bound(name, entry)?;
    let start = Instant::now();
    let check = check_kernel(&bound, &Settings::thorough())?;
    let seconds = start.elapsed().as_secs_f64();
    let mut kinds: Vec<&str> = check.hazards.iter().map(|hazard| hazard.kind.name()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    let mut tools = serde_json::Map::new();
    let mut alone = Value::Null;
    if is_launched(&bound) {
        let this = std::env::current_exe()?;
        let child =
            [this.as_os_str(), "sanitizer".as_ref(), "--launch".as_ref(), name.as_ref(), entry.as_ref()];
        alone = timed(Command::new("timeout").arg(LIMIT).args(child))?["seconds"].clone();
        for tool in TOOLS {
            let mut command = Command::new("timeout");
            command.arg(LIMIT).arg(program).args(["--tool", tool, "--print-limit", "1"]).args(child);
            // Code in a disk cache was compiled without the sanitizer.
            tools.insert(tool.to_owned(), timed(command.env("CUDA_CACHE_DISABLE", "1"))?);
        }
    }
    Ok(json!({
        "suite": "sanitizer", "impl": "flashcore", "kernel": name, "entry": entry,
        "check": { "verdict": check.verdict, "kinds": kinds, "seconds": seconds },
        "sanitizer": tools, "launch_seconds": alone,
    }))
}

/// The errors that the last summary of a process counts, and the seconds of the process.
fn timed(command: &mut Command) -> Result<Value, Failure> {
    let start = Instant::now();
    let output = command.output()?;
    let seconds = start.elapsed().as_secs_f64();
    let text = String::from_utf8_lossy(&output.stdout) + &*String::from_utf8_lossy(&output.stderr);
    let summary = text.lines().rev().find_map(|line| line.split_once("SUMMARY:"));
    let errors: Option<u64> = summary.and_then(|(_, counts)| counts.split_whitespace().next()?.parse().ok());
    Ok(json!({ "errors": errors, "seconds": seconds, "exit": output.status.code() }))
}
