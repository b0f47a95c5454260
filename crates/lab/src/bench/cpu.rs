//! The race on this machine's CPU: our native kernels, and PyTorch's in a child process.

use std::time::Instant;

use cpu::{CpuError, CpuPlan};
use problem::{DType, Problem, Tensor};

use super::race::{Deck, Race, RaceError, Rules, race as run};
use super::sensors::Reading;
use super::stage::{Entrant, Mode, Origin, Slot, Stage, Timing, Work};
use super::torch::{Torch, TorchError};
use crate::values::{Inputs, Values};

/// Why a race on the CPU did not take place, or does not count.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// Our kernels refused.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// The peer broke down.
    #[error(transparent)]
    Torch(#[from] TorchError),
    /// Nobody to race.
    #[error("contestants = 0; accepted: at least one")]
    Nobody,
    /// Our own kernel is out.
    #[error("{name} is out: {fault}")]
    Out {
        /// Who.
        name: String,
        /// Why.
        fault: super::Fault,
    },
}

/// The problems that `bench` races by default: the mission, and a longer one, in each dtype.
pub fn suite() -> Vec<Problem> {
    let mission = DType::ALL.map(|dtype| Problem::new(1, 8, 512, 64, dtype));
    let long = DType::ALL.map(|dtype| Problem::new(1, 8, 2048, 64, dtype));
    mission.into_iter().chain(long).collect()
}

/// Fewest rounds on a CPU, where one takes long.
const LEAST_ROUNDS: usize = 8;
/// Most, where it is busy with other things as well.
const MOST_ROUNDS: usize = 200;

/// Races our kernels against PyTorch's, if it is there, for about `seconds`.
///
/// # Errors
/// When a contestant breaks down, or ours is out.
pub fn race(
    problem: &Problem,
    plan: &CpuPlan,
    peer: Option<&mut Torch>,
    seconds: f64,
) -> Result<Race, BenchError> {
    let deck = Deck::draw(problem, 1)?;
    let mut entrants = vec![Entrant::ours(None, 1)];
    entrants.extend(peer.iter().map(|torch| Entrant {
        name: format!("torch {} SDPA", torch.version),
        origin: Origin::Peer,
        calls: 1,
    }));
    let elements = deck.problem.span(Tensor::Out).map_or(0, |(elements, _)| elements);
    let nothing = || Values::zeros(problem.dtype, 0);
    let mut stage = CpuStage {
        plan,
        staged: [None, None],
        inputs: Inputs { q: nothing(), k: nothing(), v: nothing() },
        out: Values::zeros(problem.dtype, elements),
        problem: &deck.problem,
        torch: peer,
    };
    let rules = Rules {
        least_rounds: LEAST_ROUNDS,
        most_rounds: MOST_ROUNDS,
        ..Rules::new(Mode::Warm, seconds, None)
    };
    let race = run(&mut stage, &deck, &entrants, &rules).map_err(|error| match error {
        RaceError::Stage(error) => error,
        RaceError::Nobody => BenchError::Nobody,
    })?;
    match &race.first().fault {
        Some(fault) => Err(BenchError::Out { name: race.first().name.clone(), fault: fault.clone() }),
        None => Ok(race),
    }
}

/// Contestant 0 is ours, 1 is the peer. There is no cold race here, so nothing is flushed.
struct CpuStage<'a> {
    problem: &'a Problem,
    plan: &'a CpuPlan,
    staged: [Option<Inputs>; 2],
    inputs: Inputs,
    out: Values,
    torch: Option<&'a mut Torch>,
}

impl CpuStage<'_> {
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
        self.inputs.q.copy_from(&inputs.q);
        self.inputs.k.copy_from(&inputs.k);
        self.inputs.v.copy_from(&inputs.v);
        match &mut self.torch {
            Some(torch) => Ok(torch.set_up(self.problem, inputs, self.plan.threads)?),
            None => Ok(()),
        }
    }

    fn flush(&mut self) -> Result<(), BenchError> {
        Ok(())
    }

    fn poison(&mut self, who: usize) -> Result<(), BenchError> {
        if who > 0 {
            return Ok(self.peer()?.forget()?);
        }
        self.out.fill_nan();
        Ok(())
    }

    fn run(&mut self, who: usize, work: Work) -> Result<(), BenchError> {
        self.time(who, work).map(|_| ())
    }

    fn time(&mut self, who: usize, _: Work) -> Result<Timing, BenchError> {
        let us = if who > 0 {
            self.peer()?.run()?
        } else {
            let start = Instant::now();
            self.inputs.attention_into(self.problem, self.plan, &mut self.out, None)?;
            let us = start.elapsed().as_secs_f64() * 1e6;
            std::hint::black_box(&self.out);
            us
        };
        Ok(Timing { us, host_us: us })
    }

    fn output(&mut self, who: usize) -> Result<Values, BenchError> {
        if who == 0 {
            return Ok(self.out.clone());
        }
        let dtype = self.problem.dtype;
        Ok(Values::from_bytes(dtype, &self.peer()?.output()?))
    }

    fn read(&mut self) -> Reading {
        Reading::default()
    }
}

#[cfg(test)]
mod tests {
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
}
