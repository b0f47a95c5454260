//! `flashcore explain --problem … --device …`: which plan computes a problem on a device, and why.

use std::io::Write;
use std::path::Path;

use bench::suites::{self, WordsError};
use host::store;
use kernels::select::{Choice, Device, Shape, TunedTable, choose};
use kernels::{Arch, KernelError, Plan};
use predict::{Gpu, machine};
use problem::{PassKind, Problem};
use serde_json::{Value, json};

use crate::args::Explain;
use crate::error::CliError;
use crate::{Status, plan, unless_closed};

/// A device with its name.
pub struct Named {
    name: String,
    /// The architecture, with this device's number of SMs.
    pub arch: Arch,
}

/// Prints the plan that is chosen for a problem, or checks the plan given with `--plan`.
pub fn explain(args: &Explain, problem: &str) -> Result<Status, CliError> {
    let problem = parse(problem)?;
    let device = match (&args.device, &args.gpu) {
        (None, Some(gpu)) => device("--gpu", gpu)?,
        (name, _) => device("--device", name.as_deref().unwrap_or("cuda"))?,
    };
    let (plan, source, why) = match &args.plan {
        Some(text) => (given(text, &problem, &device.arch)?, json!({ "source": "given" }), Vec::new()),
        None => {
            let choice = chosen(&problem, &device)?;
            (choice.plan, json!(choice.source), choice.why)
        }
    };
    let mut out = crate::terminal::out();
    unless_closed(if args.json {
        let mut object = json!({
            "problem": bench::problem_json(&problem), "device": device.name, "arch": device.arch,
            "plan": plan, "why": why,
        });
        if let (Value::Object(object), Value::Object(source)) = (&mut object, source) {
            object.extend(source);
        }
        out.json("explain-problem", &object).map_err(CliError::from)
    } else {
        let source = source["source"].as_str().unwrap_or_default();
        print(&mut out, &device, &plan, source, &why)
    })?;
    Ok(Status::Passed)
}

fn print(
    out: &mut impl Write,
    device: &Named,
    plan: &Plan,
    source: &str,
    why: &[String],
) -> Result<(), CliError> {
    let Named { name, arch } = device;
    writeln!(out, "{name}: sm_{}, {} multiprocessors", arch.sm, arch.multiprocessors)?;
    writeln!(out, "plan ({source}): {}", json!(plan))?;
    why.iter().try_for_each(|line| writeln!(out, "  {line}"))?;
    Ok(())
}

/// Reads `--plan`, JSON or a file (`-`: standard input). A plan that cannot compute the problem is an error.
fn given(text: &str, problem: &Problem, arch: &Arch) -> Result<Plan, CliError> {
    let json = match text.trim_start().starts_with('{') {
        true => text.to_owned(),
        false => store::read_text(Path::new(text))?,
    };
    let plan = plan::gpu("--plan", text, &json)?;
    plan.check(problem, arch).map_err(kernels::KernelError::from)?;
    Ok(plan)
}

/// The plan that a user of the device gets, and why.
pub fn chosen(problem: &Problem, device: &Named) -> Result<Choice, KernelError> {
    choose(problem, &Device { name: &device.name, arch: device.arch }, TunedTable::builtin())
}

/// Reads the value of `--device` or `--gpu`: the GPU of this machine, or a machine of the time model.
fn device(argument: &'static str, name: &str) -> Result<Named, CliError> {
    let refuse = |accepted: String| CliError::Argument { argument, value: name.to_owned(), accepted };
    let names = || machine::MACHINES.map(|gpu| gpu.name).join(", ");
    if name == "cuda" {
        let gpu = driver::Gpu::open(0).map_err(|error| refuse(format!("{} here ({error})", names())))?;
        let (major, minor) = gpu.info().capability;
        return named(&gpu.info().name, major * 10 + minor, gpu.info().sms);
    }
    model(Gpu::named(name).ok_or_else(|| refuse(format!("cuda, {}", names())))?)
}

/// A machine of the time model as a device.
pub fn model(gpu: &Gpu) -> Result<Named, CliError> {
    named(gpu.name, gpu.sm, gpu.sms)
}

fn named(name: &str, sm: u32, multiprocessors: u32) -> Result<Named, CliError> {
    let arch = Arch::of(sm).ok_or_else(|| {
        let targets = Arch::ALL.map(|arch| format!("sm_{}", arch.sm)).join(", ");
        CliError::Argument {
            argument: "--device",
            value: name.to_owned(),
            accepted: format!("a device of {targets}; this one is sm_{sm}"),
        }
    })?;
    Ok(Named { name: name.to_owned(), arch: Arch { multiprocessors, ..arch } })
}

/// Reads the value of `--problem`.
pub fn parse(text: &str) -> Result<Problem, CliError> {
    suites::parse(text).map_err(|error| refused("--problem", text, &error))
}

/// Reads the shape of a problem from the value of an argument, which errors name.
pub fn parse_shape(argument: &'static str, text: &str) -> Result<Shape, CliError> {
    suites::parse_shape(text).map_err(|error| refused(argument, text, &error))
}

/// Rejects a backward pass: the plans of the CPU that are timed and kept are those of the forward pass.
pub fn forward(argument: &'static str, text: &str, problem: &Problem) -> Result<(), CliError> {
    if problem.pass.kind() == PassKind::Forward {
        return Ok(());
    }
    let accepted = "a forward pass on the CPU".to_owned();
    Err(CliError::Argument { argument, value: text.to_owned(), accepted })
}

fn refused(argument: &'static str, text: &str, error: &WordsError) -> CliError {
    CliError::Argument { argument, value: text.to_owned(), accepted: error.to_string() }
}
