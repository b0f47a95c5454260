//! The command `flashcore doctor`: says what this machine has, and which commands can use it.

use std::io::Write;
use std::path::Path;

use bench::Torch;
use bench::provenance::Provenance;
use driver::{Context, CubinCache, DeviceInfo, DriverError};
use predict::resources::Ptxas;
use serde_json::{Value, json};

use crate::Status;
use crate::args::Doctor;
use crate::error::CliError;
use crate::terminal::Tone;

/// Something that the machine has or lacks.
struct Finding {
    what: &'static str,
    present: bool,
    /// A description in words.
    has: String,
    /// The use that the finding allows.
    enables: &'static str,
    /// The finding as data.
    details: Value,
}

impl Finding {
    fn new(what: &'static str, present: bool, has: impl Into<String>, enables: &'static str) -> Finding {
        Finding { what, present, has: has.into(), enables, details: Value::Null }
    }

    fn with(self, details: Value) -> Finding {
        Finding { details, ..self }
    }
}

pub fn doctor(args: &Doctor) -> Result<Status, CliError> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let provenance = Provenance::of_cpu(Path::new("."), threads);
    let mut findings = vec![cpu(&provenance.device)];
    findings.extend(gpus());
    findings.extend([cubins(), ptxas(), nvrtc(), triton(), torch(), commit(provenance.commit)]);
    let mut out = crate::terminal::out();
    if args.json {
        let list: Vec<Value> = findings.iter().map(as_json).collect();
        out.json("doctor", &Value::Array(list))?;
        return Ok(Status::Passed);
    }
    for Finding { what, present, has, enables, .. } in findings {
        out.paint(if present { Tone::Good } else { Tone::Doubtful }, format_args!("{what:<8}"))?;
        writeln!(out, " {has}\n         {enables}")?;
    }
    Ok(Status::Passed)
}

fn as_json(finding: &Finding) -> Value {
    let Finding { what, present, has, enables, details } = finding;
    json!({ "what": what, "present": present, "has": has, "enables": enables, "details": details })
}

fn cpu(device: &str) -> Finding {
    let sets: Vec<&str> = cpu::Isa::available().into_iter().map(cpu::Isa::name).collect();
    let enables = "attention runs on native kernels; GPU kernels run in the emulator";
    Finding::new("cpu", true, format!("{device}; {}", sets.join(", ")), enables)
        .with(json!({ "device": device, "instruction_sets": sets }))
}

/// The GPUs, or the reason why there is none.
fn gpus() -> Vec<Finding> {
    match driver::devices() {
        Ok(devices) if !devices.is_empty() => devices.iter().map(gpu).collect(),
        Ok(_) => vec![no_gpu(&DriverError::NoDevice { ordinal: 0, count: 0 })],
        Err(error) => vec![no_gpu(&error)],
    }
}

fn no_gpu(error: &DriverError) -> Finding {
    Finding::new("gpu", false, format!("none ({error})"), "times of GPU kernels are predicted, not measured")
        .with(json!({ "reason": error.to_string() }))
}

fn gpu(device: &DeviceInfo) -> Finding {
    let details = json!({
        "ordinal": device.ordinal, "name": device.name, "uuid": device.uuid, "sm": device.sm(),
        "multiprocessors": device.sms, "memory_bytes": device.memory, "l2_bytes": device.l2,
        "cuda": device.driver, "driver": device.driver_build,
    });
    let build = device.driver_build.as_deref().unwrap_or("of unknown version");
    let has = format!(
        "{}: {}, sm_{}, {} multiprocessors, {:.1} GiB; driver {build}, CUDA {}.{}",
        device.ordinal,
        device.name,
        device.sm(),
        device.sms,
        device.memory as f64 / (1u64 << 30) as f64,
        device.driver / 1000,
        device.driver % 1000 / 10
    );
    // A GPU that the driver lists may still be unusable, for example because another user holds it in
    // exclusive mode. Only opening a context shows that.
    match Context::open(device.ordinal) {
        Ok(_) if device.sm() >= 80 => {
            Finding::new("gpu", true, has, "attention runs on it, and kernels can be measured").with(details)
        }
        Ok(_) => {
            let enables = "kernels of your own can be measured; ours need sm_80 or later";
            Finding::new("gpu", true, has, enables).with(details)
        }
        Err(error) => {
            let enables = "it cannot be used; times of GPU kernels are predicted, not measured";
            Finding::new("gpu", false, format!("{has}; {error}"), enables).with(details)
        }
    }
}

/// The folder of the cache of compiled kernels.
fn cubins() -> Finding {
    let usage = CubinCache::of_environment().usage();
    let folder = usage.folder.as_ref().map(|folder| folder.display().to_string());
    let details = json!({
        "folder": folder, "writable": usage.writable, "entries": usage.entries, "bytes": usage.bytes,
    });
    let place = folder.as_deref().unwrap_or("no folder for caches");
    let has = match usage.writable {
        true => format!("{place}: {} kernels, {:.1} MB", usage.entries, usage.bytes as f64 / 1e6),
        false => format!("{place}: cannot be written"),
    };
    let enables = match usage.writable {
        true => "GPU kernels are compiled once for all processes",
        false => {
            "each process compiles its GPU kernels anew; set FLASHCORE_CACHE_DIR to a folder that can be written"
        }
    };
    Finding::new("cubins", usage.writable, has, enables).with(details)
}

fn ptxas() -> Finding {
    match Ptxas::find() {
        Ok(ptxas) => {
            Finding::new("ptxas", true, ptxas.version(), "registers and spills are the assembler's own")
        }
        Err(error) => Finding::new("ptxas", false, format!("none ({error})"), "registers are estimated"),
    }
}

fn nvrtc() -> Finding {
    match host::tools::nvrtc() {
        Some(path) => {
            Finding::new("nvrtc", true, path.display().to_string(), "`flashcore check` takes CUDA C++")
        }
        None => {
            let enables = "`flashcore check` takes no CUDA C++; `pip install nvidia-cuda-nvrtc \
                           nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl` brings it (with uvx name \
                           these after --with, separated by commas), or a CUDA toolkit";
            Finding::new("nvrtc", false, "none", enables)
        }
    }
}

fn triton() -> Finding {
    match host::triton::version() {
        Ok(version) => {
            Finding::new("triton", true, version, "`flashcore check FILE.py:FUNCTION` takes Triton kernels")
        }
        Err(_) => {
            let enables = "`flashcore check` takes no Triton kernels; `pip install triton` (`uvx --with triton`) brings \
                 it, and needs no GPU";
            Finding::new("triton", false, format!("none in {}", host::tools::python()), enables)
        }
    }
}

fn torch() -> Finding {
    match Torch::start() {
        Ok(torch) => Finding::new("torch", true, torch.version.clone(), "`flashcore bench` races against it"),
        Err(error) => {
            let enables = "`flashcore bench` times our kernels alone";
            Finding::new("torch", false, format!("none ({error})"), enables)
        }
    }
}

fn commit(commit: Option<String>) -> Finding {
    match commit {
        Some(commit) => Finding::new("commit", true, commit, "measurements can become evidence"),
        None => {
            let enables = "measurements are shown but not kept as evidence";
            Finding::new("commit", false, "none, or with changes", enables)
        }
    }
}
