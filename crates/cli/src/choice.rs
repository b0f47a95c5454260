//! `flashcore explain --problem … --device …`: which plan computes a problem on a device, and why that one.

use std::io::Write;

use emu::model::{Gpu, machine};
use kernels::select::{Device, TunedTable, choose};
use kernels::{Arch, Plan};
use problem::{DType, Layout, Mask, Problem};
use serde_json::{Value, json};

use crate::args::Explain;
use crate::error::CliError;
use crate::{Status, unless_closed};

/// What `--problem` takes.
const ACCEPTED: &str = "BATCH,HEADS,SEQ,DIM,DTYPE[,causal] as in 1,8,512,64,f16; HEADS may be QUERY/KEY heads as in 32/8, SEQ \
                        may be QUERIESxKEYS as in 1x8192, DTYPE is f16, bf16 or f32";

/// A device by name, and what it is.
struct Named {
    name: String,
    arch: Arch,
}

/// Prints the choice for a problem, or judges the plan that is given instead.
pub fn explain(args: &Explain, problem: &str) -> Result<Status, CliError> {
    let problem = parse(problem)?;
    let device = device(args.device.as_deref().unwrap_or("cuda"))?;
    let (plan, source, why) = match &args.plan {
        Some(text) => (given(text, &problem, &device.arch)?, json!({ "source": "given" }), Vec::new()),
        None => {
            let named = Device { name: &device.name, arch: device.arch };
            let choice = choose(&problem, &named, TunedTable::builtin())?;
            (choice.plan, json!(choice.source), choice.why)
        }
    };
    let mut out = std::io::stdout().lock();
    unless_closed(if args.json {
        let mut object = json!({
            "problem": lab::bench::problem_json(&problem), "device": device.name, "arch": device.arch,
            "plan": plan, "why": why,
        });
        if let (Value::Object(object), Value::Object(source)) = (&mut object, source) {
            object.extend(source);
        }
        writeln!(out, "{object}").map_err(CliError::from)
    } else {
        let source = source["source"].as_str().unwrap_or_default();
        print(&mut out, &device, &plan, source, &why)
    })?;
    Ok(Status::Proven)
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

/// `--plan`, if it computes the problem.
fn given(text: &str, problem: &Problem, arch: &Arch) -> Result<Plan, CliError> {
    let plan: Plan = serde_json::from_str(text).map_err(|error| CliError::Argument {
        argument: "--plan",
        value: text.to_owned(),
        accepted: format!("a plan as JSON, as this command prints it ({error})"),
    })?;
    plan.check(problem, arch).map_err(kernels::KernelError::from)?;
    Ok(plan)
}

/// `--device`: the GPU of this machine, or one that the time model's table knows.
fn device(name: &str) -> Result<Named, CliError> {
    let refuse =
        |accepted: String| CliError::Argument { argument: "--device", value: name.to_owned(), accepted };
    let names = || machine::MACHINES.map(|gpu| gpu.name).join(", ");
    let (name, sm, multiprocessors) = if name == "cuda" {
        let gpu = driver::Gpu::open(0).map_err(|error| refuse(format!("{} here ({error})", names())))?;
        let (major, minor) = gpu.info().capability;
        (gpu.info().name.clone(), major * 10 + minor, gpu.info().sms)
    } else {
        let gpu = Gpu::named(name).ok_or_else(|| refuse(format!("cuda, {}", names())))?;
        (gpu.name.to_owned(), gpu.sm, gpu.sms)
    };
    let arch = Arch::of(sm).ok_or_else(|| {
        let targets = Arch::ALL.map(|arch| format!("sm_{}", arch.sm)).join(", ");
        refuse(format!("a device of {targets}; this one is sm_{sm}"))
    })?;
    Ok(Named { name, arch: Arch { multiprocessors, ..arch } })
}

/// A problem as `--problem` takes it.
pub fn parse(text: &str) -> Result<Problem, CliError> {
    let refuse = || CliError::Argument {
        argument: "--problem",
        value: text.to_owned(),
        accepted: ACCEPTED.to_owned(),
    };
    let fields: Vec<&str> = text.split(',').map(str::trim).collect();
    let (fields, mask) = match fields.as_slice() {
        [fields @ .., "causal"] => (fields, Mask::Causal),
        fields => (fields, Mask::None),
    };
    let [batch, heads, seq, dim, dtype] = fields else { return Err(refuse()) };
    let number = |text: &str| text.parse::<usize>().map_err(|_| refuse());
    // One number for both, or two.
    let pair = |text: &str, between: char| match text.split_once(between) {
        Some((a, b)) => Ok((number(a)?, number(b)?)),
        None => number(text).map(|n| (n, n)),
    };
    let ((heads_q, heads_kv), (seq_q, seq_kv)) = (pair(heads, '/')?, pair(seq, 'x')?);
    let dtype: DType = dtype.parse()?;
    let mut problem = Problem::new(number(batch)?, heads_q, seq_q, number(dim)?, dtype).with_mask(mask);
    (problem.heads_kv, problem.seq_kv) = (heads_kv, seq_kv);
    let problem = problem.with_layout(Layout::Bhsd);
    problem.check()?;
    Ok(problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problems_as_written() {
        assert_eq!(parse("1,8,512,64,f16").unwrap(), Problem::mission());
        let decode = parse("4, 32/8, 1x8192, 128, bf16, causal").unwrap();
        assert_eq!((decode.heads_q, decode.heads_kv, decode.seq_q, decode.seq_kv), (32, 8, 1, 8192));
        assert_eq!(decode.mask, Mask::Causal);
        for bad in
            ["", "1,8,512,64", "1,8,512,64,f16,full", "1,8,-1,64,f16", "1,8,512,64,f8", "1,8/3,512,64,f16"]
        {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
