//! The race on this machine's CPU: the native kernels, and PyTorch in a child process.

use std::time::Instant;

use cpu::{CpuError, CpuPlan};
use judge::values::{Inputs, Values};
use problem::{DType, OperandMap, Problem, ProblemError, Tensor};

use super::race::{Race, RaceError, RaceInputs, Rules, race as run};
use super::sensors::Reading;
use super::stage::{Entrant, Mode, Origin, Slot, Stage, Timing, Work};
use super::torch::{Torch, TorchError};

/// A note on the times of CPU kernels, in a build with debug assertions.
pub const SLOW_BUILD: Option<&str> = if cfg!(debug_assertions) {
    Some("CPU kernels are up to three times as fast in a release build (cargo run --release)")
} else {
    None
};

/// Why a race on the CPU did not take place or does not count.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The native kernels reject the problem or the plan.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// The oracle rejects the problem.
    #[error(transparent)]
    Oracle(#[from] ProblemError),
    /// The PyTorch process failed.
    #[error(transparent)]
    Torch(#[from] TorchError),
    /// There is no contestant.
    #[error("invalid value '0' for contestants: expected at least one")]
    Nobody,
    /// A native kernel was disqualified.
    #[error("{name} cannot race: {fault}")]
    Out { name: String, fault: super::TimingFault },
}

/// The problems that `bench` races by default: the reference problem and a longer one, in each dtype.
pub fn suite() -> Vec<Problem> {
    let mission = DType::OUTPUTS.map(|dtype| Problem::new(1, 8, 512, 64, dtype));
    let long = DType::OUTPUTS.map(|dtype| Problem::new(1, 8, 2048, 64, dtype));
    mission.into_iter().chain(long).collect()
}

/// Minimum number of rounds on a CPU, where a round takes long.
const LEAST_ROUNDS: usize = 8;
/// Minimum length of a sample of native plans, µs. A shorter call is repeated within the sample.
const SAMPLE_US: f64 = 300.0;
/// Maximum number of calls in a sample.
const MOST_CALLS: u32 = 1000;
/// The inputs are copied before a call on new inputs. Calls of 2.5 µs then take 5 µs.
const COLD_US: f64 = 10.0;
/// Maximum number of rounds; a busy machine would otherwise need more.
const MOST_ROUNDS: usize = 200;

/// Races the native kernels against PyTorch, if it is installed, for about `seconds`.
///
/// # Errors
/// When a contestant fails, or the native kernel is disqualified.
pub fn race(
    problem: &Problem,
    plan: &CpuPlan,
    peer: Option<&mut Torch>,
    seconds: f64,
) -> Result<Race, BenchError> {
    let drawn = RaceInputs::draw(problem, 1)?;
    let mut entrants = vec![Entrant::ours(None, 1)];
    entrants.extend(peer.iter().map(|torch| Entrant {
        name: format!("torch {} SDPA", torch.version),
        origin: Origin::Peer,
        calls: 1,
    }));
    let mut stage = CpuStage::new(&drawn.problem, std::slice::from_ref(plan), 1, peer);
    let race = run_race(&mut stage, &drawn, &entrants, seconds)?;
    match &race.first().fault {
        Some(fault) => Err(BenchError::Out { name: race.first().name.clone(), fault: fault.clone() }),
        None => Ok(race),
    }
}

/// Races native plans for about `seconds`. All plans are compared with the first.
///
/// # Errors
/// When there are no plans, or one is rejected. A plan with wrong outputs is disqualified and carries its
/// fault.
pub fn race_plans(drawn: &RaceInputs, plans: &[CpuPlan], seconds: f64) -> Result<Race, BenchError> {
    let mut timer = CpuTimer::new(&drawn.problem);
    let mut calls = 1;
    for plan in plans {
        timer.time(plan)?;
        calls = calls.max(((SAMPLE_US / timer.time(plan)?).ceil() as u32).min(MOST_CALLS));
    }
    let entrants: Vec<Entrant> =
        (0..plans.len()).map(|plan| Entrant::ours(Some(&format!("plan {plan}")), calls)).collect();
    run_race(&mut CpuStage::new(&drawn.problem, plans, calls, None), drawn, &entrants, seconds)
}

fn run_race(
    stage: &mut CpuStage<'_>,
    drawn: &RaceInputs,
    entrants: &[Entrant],
    seconds: f64,
) -> Result<Race, BenchError> {
    let rules = Rules {
        least_rounds: LEAST_ROUNDS,
        most_rounds: MOST_ROUNDS,
        cold_us: COLD_US,
        ..Rules::new(Mode::Warm, seconds, None)
    };
    run(stage, drawn, entrants, &rules).map_err(|error| match error {
        RaceError::Stage(error) => error,
        RaceError::Nobody => BenchError::Nobody,
    })
}

/// Times plans on one draw of inputs without checking their outputs, for a first ranking.
pub struct CpuTimer {
    problem: Problem,
    inputs: Inputs,
    out: Values,
    lse: Vec<f32>,
}

impl CpuTimer {
    /// Prepares inputs for the dense form of a problem.
    pub fn new(problem: &Problem) -> CpuTimer {
        let problem = super::answer::dense(problem);
        let inputs = super::answer::normal_inputs(&problem, 1);
        let elements = problem.span(Tensor::Out).map_or(0, |(elements, _)| elements);
        CpuTimer { inputs, out: Values::zeros(problem.dtypes.out, elements), lse: lse_of(&problem), problem }
    }

    /// Time of a call, µs: one untimed call, then as many timed calls as fill `SAMPLE_US`.
    ///
    /// # Errors
    /// When the plan is rejected.
    pub fn time(&mut self, plan: &CpuPlan) -> Result<f64, CpuError> {
        let once = self.calls(plan, 1)?;
        match (SAMPLE_US / once).ceil() as u32 {
            calls @ 2.. => self.calls(plan, calls.min(MOST_CALLS)),
            // Such a long call warms itself up, except for its first memory pages.
            _ => self.calls(plan, 1),
        }
    }

    fn calls(&mut self, plan: &CpuPlan, calls: u32) -> Result<f64, CpuError> {
        let start = Instant::now();
        for _ in 0..calls {
            let lse = self.problem.pass.lse().then_some(&mut self.lse[..]);
            self.inputs.attention_into(&self.problem, plan, &mut self.out, lse)?;
        }
        std::hint::black_box(&self.out);
        Ok(start.elapsed().as_secs_f64() * 1e6 / f64::from(calls))
    }
}

/// Memory for the LSE, if the problem asks for it.
fn lse_of(problem: &Problem) -> Vec<f32> {
    vec![0.0; if problem.pass.lse() { problem.batch * problem.heads_q * problem.seq_q } else { 0 }]
}

/// The CPU as a stage. The first contestants are native plans, the one after them is the peer. CPU races have
/// no cold mode, so `flush` does nothing.
struct CpuStage<'a> {
    problem: &'a Problem,
    plans: &'a [CpuPlan],
    calls: u32,
    staged: [Option<Inputs>; 2],
    inputs: Inputs,
    out: Values,
    lse: Vec<f32>,
    torch: Option<&'a mut Torch>,
}

impl<'a> CpuStage<'a> {
    fn new(
        problem: &'a Problem,
        plans: &'a [CpuPlan],
        calls: u32,
        torch: Option<&'a mut Torch>,
    ) -> CpuStage<'a> {
        let elements = problem.span(Tensor::Out).map_or(0, |(elements, _)| elements);
        let inputs = Inputs { operands: OperandMap::default() };
        let out = Values::zeros(problem.dtypes.out, elements);
        CpuStage { problem, plans, calls, staged: [None, None], inputs, out, lse: lse_of(problem), torch }
    }

    fn peer(&mut self) -> Result<&mut Torch, BenchError> {
        self.torch.as_deref_mut().ok_or(BenchError::Nobody)
    }
}

impl Stage for CpuStage<'_> {
    type Error = BenchError;

    fn stage(&mut self, slot: Slot, inputs: &Inputs) -> Result<(), BenchError> {
        self.staged[slot as usize] = Some(inputs.clone());
        Ok(())
    }

    fn load(&mut self, slot: Slot) -> Result<(), BenchError> {
        let Some(inputs) = &self.staged[slot as usize] else { return Ok(()) };
        self.inputs.copy_from(inputs);
        match (&mut self.torch, self.plans.first()) {
            (Some(torch), Some(plan)) => Ok(torch.set_up(self.problem, inputs, plan.threads)?),
            _ => Ok(()),
        }
    }

    fn flush(&mut self) -> Result<(), BenchError> {
        Ok(())
    }

    fn poison(&mut self, who: usize) -> Result<(), BenchError> {
        if who >= self.plans.len() {
            return Ok(self.peer()?.forget()?);
        }
        self.out.fill_nan();
        Ok(())
    }

    fn run(&mut self, who: usize, work: Work) -> Result<(), BenchError> {
        self.time(who, work).map(|_| ())
    }

    fn time(&mut self, who: usize, work: Work) -> Result<Timing, BenchError> {
        let us = match self.plans.get(who) {
            None => self.peer()?.run()?,
            Some(plan) => {
                let calls = match work {
                    Work::Single => 1,
                    Work::Batches(batches) => batches * self.calls,
                };
                let start = Instant::now();
                for _ in 0..calls {
                    let lse = self.problem.pass.lse().then_some(&mut self.lse[..]);
                    self.inputs.attention_into(self.problem, plan, &mut self.out, lse)?;
                }
                let us = start.elapsed().as_secs_f64() * 1e6;
                std::hint::black_box(&self.out);
                us
            }
        };
        Ok(Timing { us, host_us: us })
    }

    fn output(&mut self, who: usize) -> Result<Values, BenchError> {
        if who < self.plans.len() {
            return Ok(self.out.clone());
        }
        let dtype = self.problem.dtypes.out;
        Ok(Values::from_bytes(dtype, &self.peer()?.output()?))
    }

    fn read(&mut self) -> Reading {
        Reading::default()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Measurement, TimingFault};
    use super::*;

    #[test]
    fn our_kernels_race_their_twin() {
        let problem = Problem::new(1, 2, 64, 32, DType::F32);
        let race = race(&problem, &CpuPlan::for_problem(&problem), None, 0.0).unwrap();
        let ours = race.first();
        assert_eq!((ours.name.as_str(), race.rounds), ("flashcore", LEAST_ROUNDS));
        assert!(ours.us() > 0.0 && ours.looked_at > 3 && ours.error.is_some());
        assert!(ours.samples.len() >= 2 * LEAST_ROUNDS && ours.comparison.is_some());
    }

    #[test]
    fn plans_race_plans() {
        // A call is far shorter than a sample, even on a busy machine.
        let problem = Problem::new(1, 1, 48, 32, DType::F32);
        let drawn = RaceInputs::draw(&problem, 1).unwrap();
        let plan = CpuPlan::for_problem(&problem);
        let other = CpuPlan { threads: 1, block_q: 16, ..plan };
        let race = race_plans(&drawn, &[plan, other], 0.0).unwrap();
        let [first, second] = &race.measurements[..] else { panic!("two") };
        // On a busy machine a single call may be delayed for as long as a batch takes.
        let held_up = |m: &Measurement| matches!(m.fault, Some(TimingFault::Batched { .. }));
        for measurement in [first, second] {
            assert!(measurement.fault.is_none() || held_up(measurement), "{:?}", measurement.fault);
        }
        assert!(second.comparison.is_some() || held_up(first) || held_up(second));
        // Short calls are sampled in batches.
        assert!(first.calls > 1 && first.looked_at > 3, "{} calls, {} samples", first.calls, first.looked_at);
        let foreign = CpuPlan { block_kv: 0, ..plan };
        assert!(matches!(race_plans(&drawn, &[plan, foreign], 0.0), Err(BenchError::Cpu(_))));
        assert!(matches!(race_plans(&drawn, &[], 0.0), Err(BenchError::Nobody)));
    }
}
