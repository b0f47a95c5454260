//! The CPU kernels, and PyTorch's in the same run.

use std::io::Write;
use std::path::Path;

use cpu::CpuPlan;
use lab::bench::{Identity, Race, Torch, problem_json, race_cpu, suite_cpu};
use lab::provenance::Provenance;
use lab::store;
use problem::{Problem, Tensor};
use serde_json::json;

use super::{ratio, verdict};
use crate::args::Bench;
use crate::error::CliError;
use crate::{Status, choice, table};

/// Seconds for each problem, unless said otherwise.
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
    let mut torch = match Torch::start() {
        Ok(torch) => Some(torch),
        Err(error) => {
            eprintln!("flashcore: no peer in this run: {error}");
            None
        }
    };
    let mut races = Vec::new();
    for problem in &problems {
        eprint!("\r{} …                                ", problem_json(problem)["dtype"]);
        let plan = CpuPlan { threads, ..CpuPlan::for_problem(problem) };
        let race = race_cpu(problem, &plan, torch.as_mut(), args.seconds.unwrap_or(SECONDS))?;
        let identity = Identity { plan: Some(json!(plan)), kernel_hash: None };
        for row in race.rows("cpu", &[identity], &provenance) {
            let line = serde_json::to_string(&row).unwrap_or_default();
            if args.json {
                writeln!(std::io::stdout(), "{line}")?;
            }
            if let Some(path) = &args.evidence {
                store::append_line(path.as_deref().unwrap_or(Path::new("evidence/cpu.jsonl")), &line)?;
            }
        }
        races.push(race);
    }
    eprint!("\r");
    let sgemm = torch.as_mut().and_then(|t| t.sgemm_gflops(1024).ok());
    if !args.json {
        print(&races, sgemm)?;
    }
    Ok(Status::Proven)
}

/// What one run of a problem may take: some minutes on a laptop, and its memory.
const MOST_FLOPS: f64 = 1e13;
const MOST_BYTES: f64 = 8e9;

fn problems(args: &Bench) -> Result<Vec<Problem>, CliError> {
    if !args.problem.is_empty() {
        return args
            .problem
            .iter()
            .map(|text| choice::parse(text).and_then(|p| affordable(p, "--problem", text)))
            .collect();
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
    let problem = Problem::new(batch, heads, seq, dim, args.dtype.parse()?).with_mask(args.mask.parse()?);
    problem.check()?;
    Ok(vec![affordable(problem, "--shape", shape)?])
}

/// The problem, unless a run of it would take too much.
fn affordable(problem: Problem, argument: &'static str, value: &str) -> Result<Problem, CliError> {
    let bytes: f64 =
        Tensor::ALL.iter().map(|&t| problem.extents(t).iter().map(|&n| n as f64).product::<f64>()).sum();
    if problem.flops() > MOST_FLOPS || bytes * problem.dtype.bytes() as f64 > MOST_BYTES {
        return Err(CliError::Argument {
            argument,
            value: value.to_owned(),
            accepted: format!("at most {MOST_FLOPS:.0e} operations and {MOST_BYTES:.0e} bytes of tensors"),
        });
    }
    Ok(problem)
}

fn print(races: &[Race], sgemm: Option<f64>) -> Result<(), CliError> {
    let rows: Vec<Vec<String>> = races
        .iter()
        .map(|race| {
            let p = &race.problem;
            let gflops = |us: f64| format!("{:.1}", p.flops() / us * 1e-3);
            let us = race.first().us();
            let peer = race.measurements.get(1);
            let peer_us = peer.map(lab::bench::Measurement::us);
            vec![
                format!("{} B{} H{} S{} D{} {}", p.dtype, p.batch, p.heads_q, p.seq_q, p.head_dim, p.mask),
                format!("{us:.0}"),
                gflops(us),
                peer_us.map_or("–".into(), |us| format!("{us:.0}")),
                peer_us.map_or("–".into(), gflops),
                peer.map_or("–".into(), ratio),
                peer.map_or("–", verdict).to_owned(),
                sgemm.map_or("–".into(), |rate| format!("{:.0} %", 100.0 * p.flops() / us * 1e-3 / rate)),
            ]
        })
        .collect();
    let mut out = std::io::stdout().lock();
    let header =
        ["problem", "µs", "GFLOP/s", "torch µs", "GFLOP/s", "speed-up [95 %] ±noise", "verdict", "of sgemm"];
    table::print(&mut out, &header, &rows)?;
    if let Some(rate) = sgemm {
        writeln!(out, "sgemm (torch, n = 1024): {rate:.1} GFLOP/s")?;
    }
    Ok(())
}
