//! `flashcore bench`: the CPU kernels, and PyTorch's in the same run.

use std::io::Write;
use std::path::Path;

use cpu::CpuPlan;
use lab::bench::{Race, Torch, problem_json, race, suite};
use lab::provenance::Provenance;
use lab::store;
use problem::{Problem, Tensor};

use crate::Status;
use crate::args::Bench;
use crate::error::CliError;
use crate::table;

pub fn bench(args: &Bench) -> Result<Status, CliError> {
    let problems = problems(args)?;
    let most = std::thread::available_parallelism().map_or(1, usize::from);
    if !(args.seconds > 0.0 && args.seconds <= 3600.0) {
        return Err(CliError::Argument {
            argument: "--seconds",
            value: args.seconds.to_string(),
            accepted: "more than 0, at most 3600".into(),
        });
    }
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
        let race = race(problem, &plan, torch.as_mut(), args.seconds)?;
        for row in race.rows(&provenance) {
            let line = serde_json::to_string(&row).unwrap_or_default();
            if args.json {
                writeln!(std::io::stdout(), "{line}")?;
            }
            if let Some(path) = &args.evidence {
                store::append_line(path, &line)?;
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
    let Some(shape) = &args.shape else { return Ok(suite()) };
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
    let bytes: f64 =
        Tensor::ALL.iter().map(|&t| problem.extents(t).iter().map(|&n| n as f64).product::<f64>()).sum();
    if problem.flops() > MOST_FLOPS || bytes * problem.dtype.bytes() as f64 > MOST_BYTES {
        return Err(CliError::Argument {
            argument: "--shape",
            value: shape.clone(),
            accepted: format!("at most {MOST_FLOPS:.0e} operations and {MOST_BYTES:.0e} bytes of tensors"),
        });
    }
    Ok(vec![problem])
}

fn print(races: &[Race], sgemm: Option<f64>) -> Result<(), CliError> {
    let rows: Vec<Vec<String>> = races
        .iter()
        .map(|race| {
            let p = &race.problem;
            let gflops = |us: f64| format!("{:.1}", p.flops() / us * 1e-3);
            let us = race.ours.us();
            let peer = race.peer.as_ref().map(|m| m.us());
            let ratio = race
                .comparison
                .map_or("–".into(), |c| format!("{:.2} [{:.2}, {:.2}]", c.ratio, c.low, c.high));
            let verdict = race.comparison.map_or("–".into(), |c| format!("{:?}", c.verdict).to_uppercase());
            vec![
                format!("{} B{} H{} S{} D{} {}", p.dtype, p.batch, p.heads_q, p.seq_q, p.head_dim, p.mask),
                format!("{us:.0}"),
                gflops(us),
                peer.map_or("–".into(), |us| format!("{us:.0}")),
                peer.map_or("–".into(), gflops),
                ratio,
                verdict,
                sgemm.map_or("–".into(), |rate| format!("{:.0} %", 100.0 * p.flops() / us * 1e-3 / rate)),
            ]
        })
        .collect();
    let mut out = std::io::stdout().lock();
    let header =
        ["problem", "µs", "GFLOP/s", "torch µs", "GFLOP/s", "speed-up [95 %]", "verdict", "of sgemm"];
    table::print(&mut out, &header, &rows)?;
    if let Some(rate) = sgemm {
        writeln!(out, "sgemm (torch, n = 1024): {rate:.1} GFLOP/s")?;
    }
    Ok(())
}
