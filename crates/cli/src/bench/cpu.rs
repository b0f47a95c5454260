//! Times the CPU kernels and PyTorch's attention in turns.

use std::io::Write;
use std::path::Path;

use bench::provenance::Provenance;
use bench::{BenchError, Identity, Mode, OURS, Race, Row, Torch, TorchError, race_cpu, suite_cpu};
use cpu::CpuPlan;
use host::store;
use problem::Problem;
use serde_json::json;

use super::{Limits, affordable, keep, parse, ratio, title, verdict};
use crate::args::Bench;
use crate::error::CliError;
use crate::terminal::{self, tell};
use crate::{Status, choice, table, unless_closed};

/// Default seconds for each problem.
const SECONDS: f64 = 3.0;

pub fn bench(args: &Bench) -> Result<Status, CliError> {
    let problems = problems(args)?;
    let most = std::thread::available_parallelism().map_or(1, usize::from);
    if let Some(threads) = args.threads.filter(|&n| n == 0 || n > 64 * most) {
        return Err(CliError::Argument {
            argument: "--threads",
            value: threads.to_string(),
            accepted: format!("1 to {}, 64 for each core", 64 * most),
        });
    }
    let threads = args.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
    let provenance = Provenance::of_cpu(Path::new("."), threads);
    if args.evidence.is_some() && provenance.commit.is_none() {
        return Err(CliError::Unclean);
    }
    super::tell_of_slow_build();
    let mut torch = match Torch::start() {
        Ok(torch) => Some(torch),
        Err(error) => {
            tell(format_args!("no peer in this run: {error}"));
            None
        }
    };
    let (mut races, mut wrong) = (Vec::new(), 0);
    let default = Path::new("evidence/cpu.jsonl");
    let evidence = args.evidence.as_ref().map(|given| given.as_deref().unwrap_or(default));
    evidence.map_or(Ok(()), store::appendable)?;
    let seconds = args.seconds.unwrap_or(SECONDS);
    let bar = super::races(problems.len(), args.json);
    for (index, problem) in problems.iter().enumerate() {
        bar.at(index as u64, &format!("race {} of {}: {}", index + 1, problems.len(), title(problem)));
        let plan = CpuPlan { threads, ..CpuPlan::for_problem(problem) };
        let raced = match race_cpu(problem, &plan, torch.as_mut(), seconds) {
            // If PyTorch fails, FlashCore's kernel is still timed.
            Err(BenchError::Torch(error)) => {
                tell(format_args!("{}: no peer: {error}", title(problem)));
                if !matches!(error, TorchError::Refused(_)) {
                    torch = None;
                }
                race_cpu(problem, &plan, None, seconds)
            }
            other => other,
        };
        let race = match raced {
            Ok(race) => race,
            Err(error @ BenchError::Out { .. }) => {
                wrong += 1;
                let why = error.to_string();
                terminal::fault(format_args!("{}: {why}", title(problem)));
                let row = Row::failed("cpu", OURS, problem, Mode::Warm, &why, &provenance);
                keep(&json!(row), evidence, args.json)?;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        for measurement in &race.measurements {
            if let Some(fault) = &measurement.fault {
                terminal::fault(format_args!("{}: {}: {fault}", title(problem), measurement.name));
            }
        }
        let identity = Identity { plan: Some(json!(plan)), kernel_hash: None };
        for row in race.rows("cpu", &[identity], &provenance) {
            keep(&json!(row), evidence, args.json)?;
        }
        races.push(race);
    }
    drop(bar);
    let sgemm = torch.as_mut().and_then(|t| t.sgemm_gflops(1024).ok());
    if !args.json {
        unless_closed(print(&races, sgemm))?;
    }
    Ok(if wrong == 0 { Status::Passed } else { Status::Failed })
}

/// A race at these limits takes some minutes on a laptop.
const LIMITS: Limits = Limits { flops: 6e11, bytes: 8e9 };

fn problems(args: &Bench) -> Result<Vec<Problem>, CliError> {
    if !args.problem.is_empty() {
        let of = |text: &String| {
            let problem = parse(text, &LIMITS)?;
            choice::forward("--problem", text, &problem)?;
            Ok(problem)
        };
        return args.problem.iter().map(of).collect();
    }
    let Some(shape) = &args.shape else { return Ok(suite_cpu()) };
    let refuse = || CliError::Argument {
        argument: "--shape",
        value: shape.clone(),
        accepted: "BATCHxHEADSxSEQxDIM, as in 1x8x512x64".into(),
    };
    let numbers: Vec<usize> =
        shape.split('x').map(str::parse).collect::<Result<_, _>>().map_err(|_| refuse())?;
    let [batch, heads, seq, dim] = numbers[..] else { return Err(refuse()) };
    let problem = Problem::new(batch, heads, seq, dim, args.dtype).with_band(args.mask);
    problem.check()?;
    Ok(vec![affordable(problem, &LIMITS, "--shape", shape)?])
}

fn print(races: &[Race], sgemm: Option<f64>) -> Result<(), CliError> {
    let rows: Vec<Vec<String>> = races
        .iter()
        .map(|race| {
            let p = &race.problem;
            let gflops = |us: f64| format!("{:.1}", p.flops() / us * 1e-3);
            let us = race.first().us();
            let peer = race.measurements.get(1);
            let of_peer = |cell: &dyn Fn(f64) -> String| match peer {
                None => "–".to_owned(),
                Some(peer) if peer.fault.is_some() => "n/a".to_owned(),
                Some(peer) => cell(peer.us()),
            };
            vec![
                title(p),
                format!("{us:.0}"),
                gflops(us),
                of_peer(&|us| format!("{us:.0}")),
                of_peer(&gflops),
                peer.map_or("–".into(), ratio),
                peer.map_or("–", verdict).to_owned(),
                sgemm.map_or("–".into(), |rate| format!("{:.0} %", 100.0 * p.flops() / us * 1e-3 / rate)),
            ]
        })
        .collect();
    let mut out = crate::terminal::out();
    let header =
        ["problem", "µs", "GFLOP/s", "torch µs", "GFLOP/s", "speed-up [95 %] ±noise", "verdict", "of sgemm"];
    table::print(&mut out, &header, &rows)?;
    if let Some(rate) = sgemm {
        writeln!(
            out,
            "of sgemm: of {rate:.1} GFLOP/s, the rate of torch's f32 matrix product with n = 1024 here"
        )?;
    }
    Ok(())
}
