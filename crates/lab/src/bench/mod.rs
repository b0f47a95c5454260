//! Times under one law: same process tree, same operation, same inputs, interleaved A/B/B/A, every sample kept.

mod row;
mod stats;
mod torch;

use std::time::Instant;

use cpu::{CpuError, CpuPlan};
use problem::{DType, Problem};
use serde::Serialize;

use crate::gate::inputs::{Style, draw};
use crate::gate::judge::{ErrorFigures, judge};
use crate::values::{Inputs, Values};
pub use row::{Mode, Row, problem_json};
pub use stats::{Comparison, Round, SpeedVerdict, compare, median, quantile};
pub use torch::{Torch, TorchError, python};

/// What one contestant did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Measured {
    /// `flashcore`, or the peer's name.
    pub name: String,
    /// Every sample, µs, in the order in which they were taken.
    pub samples: Vec<f64>,
    /// How right it was.
    pub error: ErrorFigures,
}

impl Measured {
    /// Median, µs.
    pub fn us(&self) -> f64 {
        median(&self.samples)
    }
}

/// A race on one problem.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Race {
    /// The problem.
    pub problem: Problem,
    /// The plan our kernels ran with.
    pub plan: CpuPlan,
    /// Our kernels.
    pub ours: Measured,
    /// The peer, if it was there.
    pub peer: Option<Measured>,
    /// Ours against the peer's.
    pub comparison: Option<Comparison>,
}

/// Why a race did not take place.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// Our kernels refused.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// The peer broke down.
    #[error(transparent)]
    Torch(#[from] TorchError),
    /// An output was wrong: no time is taken of it.
    #[error("{name} is wrong and is not timed: {reasons}")]
    Wrong {
        /// Whose output.
        name: String,
        /// What is wrong with it.
        reasons: String,
    },
}

/// The problems that `bench` races by default: the mission, and a longer one, in each dtype.
pub fn suite() -> Vec<Problem> {
    let mission = DType::ALL.map(|dtype| Problem::new(1, 8, 512, 64, dtype));
    let long = DType::ALL.map(|dtype| Problem::new(1, 8, 2048, 64, dtype));
    mission.into_iter().chain(long).collect()
}

/// Races our kernels against PyTorch's, if it is there, for about `seconds`.
///
/// # Errors
/// When a contestant fails or is wrong.
pub fn race(
    problem: &Problem,
    plan: &CpuPlan,
    peer: Option<&mut Torch>,
    seconds: f64,
) -> Result<Race, BenchError> {
    let inputs = draw(problem, Style::Normal, 1);
    let oracle = inputs.oracle(problem)?;
    let standard = inputs.reference_in_precision(problem)?;
    let check = |name: &str, out: &Values| {
        let out: Vec<f64> = (0..out.len()).filter_map(|i| out.get(i)).map(f64::from).collect();
        let error = judge(problem, &out, None, &oracle, &standard);
        match error.reasons() {
            // A peer rounds as it likes; it is shown beside ours and not held to our bounds.
            reasons if reasons.is_empty() || name != "flashcore" => Ok(error),
            reasons => Err(BenchError::Wrong { name: name.to_owned(), reasons: reasons.join("; ") }),
        }
    };
    let (out, _) = inputs.attention(problem, plan)?;
    let error = check("flashcore", &out)?;
    let mut runner = Runner { problem, plan, inputs: &inputs, out };
    let mut ours = Measured { name: "flashcore".into(), samples: Vec::new(), error };
    let Some(torch) = peer else {
        ours.samples = alone(&mut runner, seconds)?;
        return Ok(Race { problem: problem.clone(), plan: *plan, ours, peer: None, comparison: None });
    };
    torch.set_up(problem, &inputs, plan.threads)?;
    let out = Values::from_bytes(problem.dtype, &torch.output()?);
    let name = format!("torch {} SDPA", torch.version);
    let mut theirs = Measured { error: check(&name, &out)?, name, samples: Vec::new() };
    let rounds = interleaved(&mut runner, torch, seconds)?;
    ours.samples = rounds.iter().flat_map(|r| [r.a1, r.a2]).collect();
    theirs.samples = rounds.iter().flat_map(|r| [r.b1, r.b2]).collect();
    let comparison = Some(compare(&rounds));
    Ok(Race { problem: problem.clone(), plan: *plan, ours, peer: Some(theirs), comparison })
}

/// Fewest rounds: what a bootstrap needs to say anything.
const LEAST_ROUNDS: usize = 8;

fn alone(runner: &mut Runner, seconds: f64) -> Result<Vec<f64>, BenchError> {
    let (start, mut samples) = (Instant::now(), Vec::new());
    while samples.len() < 2 * LEAST_ROUNDS || start.elapsed().as_secs_f64() < seconds {
        samples.push(runner.time()?);
    }
    Ok(samples)
}

fn interleaved(runner: &mut Runner, torch: &mut Torch, seconds: f64) -> Result<Vec<Round>, BenchError> {
    let (start, mut rounds) = (Instant::now(), Vec::new());
    while rounds.len() < LEAST_ROUNDS || start.elapsed().as_secs_f64() < seconds {
        let a1 = runner.time()?;
        let (b1, b2) = (torch.run()?, torch.run()?);
        rounds.push(Round { a1, b1, b2, a2: runner.time()? });
    }
    Ok(rounds)
}

/// Our side of a race.
struct Runner<'a> {
    problem: &'a Problem,
    plan: &'a CpuPlan,
    inputs: &'a Inputs,
    out: Values,
}

impl Runner<'_> {
    /// One run, µs.
    fn time(&mut self) -> Result<f64, BenchError> {
        let start = Instant::now();
        self.inputs.attention_into(self.problem, self.plan, &mut self.out, None)?;
        let us = start.elapsed().as_secs_f64() * 1e6;
        std::hint::black_box(&self.out);
        Ok(us)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provenance::Provenance;

    #[test]
    fn a_race_gives_rows_with_everything_in_them() {
        let problem = Problem::new(1, 2, 64, 32, DType::F32);
        let race = race(&problem, &CpuPlan::for_problem(&problem), None, 0.0).unwrap();
        let provenance = Provenance::of_cpu(std::path::Path::new(env!("CARGO_MANIFEST_DIR")), 2);
        let rows = race.rows(&provenance);
        let row = serde_json::to_value(&rows[0]).unwrap();
        for key in [
            "suite",
            "impl",
            "plan",
            "problem",
            "mode",
            "us_median",
            "us_low",
            "us_high",
            "samples",
            "tflops",
            "gbps",
            "err_max",
            "err_rel",
            "ratio_vs",
            "device",
            "driver",
            "clocks_mhz",
            "compiler",
            "kernel_hash",
            "commit",
            "run",
            "when",
        ] {
            assert!(row.get(key).is_some(), "{key} is missing");
        }
        assert_eq!(row["samples"].as_array().unwrap().len(), 2 * LEAST_ROUNDS);
        assert!(row["us_median"].as_f64().unwrap() > 0.0);
    }
}
