//! Evaluators of candidates, one implementation per kind of target, behind one trait. An evaluator does not
//! know the search, and the search does not know threads, devices and processes.

pub mod cpu;
mod cpu_check;
mod cpu_model;
pub mod cuda;
mod kept;
pub mod kernel;
pub mod model;
mod ridge;
mod subject;

use std::time::Instant;

use super::task::{Finding, Outcome, Task};
pub use cuda::{Cuda, EmulatedCard, GpuCard};
use host::panics::contain;
pub use kept::Evaluators;
use ledger::{Environment, Reason, Rejection};
pub use subject::{TaskFault, bound};

/// The reason for which a disqualified contestant is rejected: its outputs are wrong, or its times are not
/// valid.
const fn word_of(fault: &bench::TimingFault) -> Reason {
    use bench::TimingFault::{
        Batched, FasterOnSeenInputs, Stale, TimerDisagrees, UnderFloor, Unwritten, Wrong,
    };
    match fault {
        Wrong { .. } | Unwritten { .. } | Stale => Reason::Wrong,
        FasterOnSeenInputs { .. } | Batched { .. } | TimerDisagrees { .. } | UnderFloor { .. } => {
            Reason::Fault
        }
    }
}

/// The time of samples in µs with its 95 % interval: low, time, high. The time is the statistic of the
/// interval, the trimmed mean of the logarithms.
fn time_of(samples: &[f64]) -> [f64; 3] {
    let logs: Vec<f64> = samples.iter().map(|us| us.ln()).collect();
    let found = bench::interval(&logs);
    let least = samples.iter().copied().fold(f64::INFINITY, f64::min);
    let most = samples.iter().copied().fold(0.0, f64::max);
    // A single sample has no interval, and for equal samples rounding of the logarithms could reverse the
    // interval.
    [found.low, found.middle, found.high].map(|log| log.exp().clamp(least, most))
}

/// The result of an evaluation.
#[derive(Clone, Debug, PartialEq)]
pub struct Look {
    pub finding: Finding,
    /// Seconds for which the device was held.
    pub device_seconds: f64,
}

impl Look {
    /// A finding that needed no device.
    pub const fn without_device(finding: Finding) -> Look {
        Look { finding, device_seconds: 0.0 }
    }
}

/// Evaluates candidates for one target. Each worker has its own; shared data is behind an `Arc`.
pub trait Evaluator: Send {
    /// Carries out a task. An `Err` rejects the candidate. A failure of the evaluator itself is a rejection
    /// too, with the reason `crashed`, so that the run continues.
    ///
    /// # Errors
    /// The rejection of the candidate.
    fn look(&mut self, task: &Task) -> Result<Look, Rejection>;

    /// The environment of the figures.
    fn environment(&self) -> Environment;

    /// The timed outcome of a task. A panic rejects the candidate and affects nothing else.
    fn evaluate(&mut self, task: &Task) -> Outcome {
        let began = Instant::now();
        let look = match contain(|| self.look(task)) {
            Ok(Ok(look)) => look,
            Ok(Err(rejection)) => Look::without_device(Finding::Rejected(rejection)),
            Err(panic) => Look::without_device(Finding::Rejected(Rejection {
                stage: task.stage,
                reason: Reason::Crashed,
                detail: panic.to_string(),
            })),
        };
        Outcome {
            candidate: task.candidate,
            stage: task.stage,
            problem: task.problem,
            seconds: began.elapsed().as_secs_f64(),
            device_seconds: look.device_seconds,
            finding: look.finding,
        }
    }
}
