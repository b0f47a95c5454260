//! The command `flashcore bench`: times kernels by the rules of the crate `bench`, on the CPU together with
//! PyTorch, or on a GPU.

mod cpu;
mod cuda;

use std::path::Path;

use bench::{Measurement, SpeedVerdict, suites};
use host::store;
use kernels::select::Shape;
use problem::Problem;

use crate::args::Bench;
use crate::device::Device;
use crate::error::CliError;
use crate::progress::Progress;
use crate::terminal::tell;
use crate::{Status, choice, unless_closed};

pub fn bench(args: &Bench) -> Result<Status, CliError> {
    let gpu = match args.device.parse()? {
        Device::Cpu => None,
        Device::Cuda(ordinal) => Some(ordinal),
        Device::Auto => driver::devices().is_ok_and(|found| !found.is_empty()).then_some(0),
    };
    match gpu {
        None => {
            refuse(
                ("GPUs", "cuda"),
                [
                    ("--suite", args.suite.first().cloned()),
                    ("--plan", args.plan.first().map(|file| file.display().to_string())),
                    ("--mode", args.mode.clone()),
                    ("--control", args.control.map(|races| races.to_string())),
                ],
            )?;
            cpu::bench(args)
        }
        Some(ordinal) => {
            // `--dtype` and `--mask` belong to `--shape`.
            refuse(
                ("processors", "cpu"),
                [("--shape", args.shape.clone()), ("--threads", args.threads.map(|count| count.to_string()))],
            )?;
            cuda::bench(args, ordinal)
        }
    }
}

/// Rejects options that only apply to the other kind of device.
fn refuse<const N: usize>(
    (whose, device): (&'static str, &'static str),
    options: [(&'static str, Option<String>); N],
) -> Result<(), CliError> {
    match options.into_iter().find_map(|(argument, value)| Some((argument, value?))) {
        Some((argument, value)) => Err(CliError::OtherDevice { argument, value, whose, device }),
        None => Ok(()),
    }
}

/// The largest problem that a race accepts.
struct Limits {
    /// FLOP of one call. A race makes about a hundred calls.
    flops: f64,
    /// Memory of the host, bytes. A race draws the tensors four times.
    bytes: f64,
}

/// Reads a problem, and rejects one that is above the limits.
fn parse(text: &str, limits: &Limits) -> Result<Problem, CliError> {
    affordable(choice::parse(text)?, limits, "--problem", text)
}

fn affordable(
    problem: Problem,
    limits: &Limits,
    argument: &'static str,
    value: &str,
) -> Result<Problem, CliError> {
    let tensors = limits.bytes / 4.0;
    if problem.flops() > limits.flops || problem.bytes() > tensors {
        let accepted = format!("at most {:.0e} operations and {tensors:.0e} bytes of tensors", limits.flops);
        return Err(CliError::Argument { argument, value: value.to_owned(), accepted });
    }
    Ok(problem)
}

/// A short description of a problem. Problems that [`bench::suites::parse`] tells apart have different ones.
fn title(problem: &Problem) -> String {
    let mut title = Shape::of(problem).title();
    if let Some(cap) = problem.score.softcap {
        title += &format!(" softcap {cap}");
    }
    if problem.pass.lse() {
        title += " lse";
    }
    if suites::is_bshd(problem) {
        title += " bshd";
    }
    title
}

/// Says that CPU kernels are slow in this build, if they are.
pub fn tell_of_slow_build() {
    if let Some(note) = bench::SLOW_BUILD {
        tell(note);
    }
}

/// The progress of races. With `--json` no progress is shown.
fn races(count: usize, json: bool) -> Progress {
    if json { Progress::silent() } else { Progress::new(Some(count as u64)) }
}

/// Appends a row to the evidence file if there is one, then prints it if `json` is set. The file comes first,
/// so that a closed pipe does not lose the row.
fn keep(row: &serde_json::Value, evidence: Option<&Path>, json: bool) -> Result<(), CliError> {
    if let Some(file) = evidence {
        store::append_line(file, &row.to_string())?;
    }
    if json {
        unless_closed(crate::terminal::out().json("bench", row).map_err(CliError::from))?;
    }
    Ok(())
}

/// The table cell of the first contestant against this one: ratio, interval and noise.
fn ratio(measurement: &Measurement) -> String {
    measurement.comparison.map_or("–".into(), |c| {
        format!("{:.3}× [{:.3}, {:.3}] ±{:.1} %", c.ratio, c.low, c.high, 100.0 * (c.noise - 1.0))
    })
}

/// The verdict on the first contestant against this one.
fn verdict(measurement: &Measurement) -> &'static str {
    measurement.comparison.map_or("–", |c| SpeedVerdict::name(c.verdict))
}

#[cfg(test)]
mod tests {
    use super::title;

    #[test]
    fn rows_of_different_problems_have_different_titles() {
        for (problem, expected) in [
            ("1,8,512,64,f16", "f16 B1 H8 S512 D64"),
            ("1,8,512,64,f16,causal,softcap:50", "f16 B1 H8 S512 D64 causal softcap 50"),
            ("1,8,512,64,f16,lse,bshd", "f16 B1 H8 S512 D64 lse bshd"),
        ] {
            assert_eq!(title(&bench::suites::parse(problem).unwrap()), expected);
        }
    }
}
