//! Whoever finds out about candidates: one implementation for each kind of target, behind one seam. An evaluator knows nothing of
//! the search, and the search nothing of threads, devices and processes.

pub mod cpu;
mod cpu_proof;
pub mod cuda;
mod kept;
pub mod kernel;
pub mod model;
mod subject;

use std::time::Instant;

use super::task::{Finding, Outcome, Task};
use crate::ledger::{Environment, Rejection};
use crate::panics::contain;
pub use cuda::{Cuda, EmulatedCard, GpuCard};
pub use kept::Evaluators;
pub use subject::{Fault, bound};

/// What a contestant that is out of a race is counted under: its answers are no good, or its times.
const fn word_of(fault: &crate::bench::Fault) -> &'static str {
    use crate::bench::Fault::{
        Batched, FasterOnSeenInputs, Stale, TimerDisagrees, UnderFloor, Unwritten, Wrong,
    };
    match fault {
        Wrong { .. } | Unwritten { .. } | Stale => "wrong",
        FasterOnSeenInputs { .. } | Batched { .. } | TimerDisagrees { .. } | UnderFloor { .. } => "fault",
    }
}

/// What came of a look at a candidate.
#[derive(Clone, Debug, PartialEq)]
pub struct Look {
    /// What is known now.
    pub finding: Finding,
    /// Seconds that the device was held.
    pub device_seconds: f64,
}

impl Look {
    /// A finding for which no device was needed.
    pub const fn without_device(finding: Finding) -> Look {
        Look { finding, device_seconds: 0.0 }
    }
}

/// Finds out about candidates for one target. Each worker has its own; what several share is behind an `Arc` inside.
pub trait Evaluator: Send {
    /// Does what the task asks for. An `Err` is the candidate's end, with its reason; whatever is the evaluator's own trouble and
    /// not the candidate's is a rejection too, with the reason `crashed`, so that the run goes on.
    ///
    /// # Errors
    /// Why the candidate goes no further.
    fn look(&mut self, task: &Task) -> Result<Look, Rejection>;

    /// Where its figures come from.
    fn environment(&self) -> Environment;

    /// The whole answer to a task: timed, and a panic inside is the candidate's end and nobody else's.
    fn evaluate(&mut self, task: &Task) -> Outcome {
        let began = Instant::now();
        let look = match contain(|| self.look(task)) {
            Ok(Ok(look)) => look,
            Ok(Err(rejection)) => Look::without_device(Finding::Rejected(rejection)),
            Err(panic) => Look::without_device(Finding::Rejected(Rejection {
                stage: task.stage,
                reason: "crashed".to_owned(),
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
