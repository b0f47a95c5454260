//! Detects failures of the infrastructure: a lost device, a worker that cannot be started, an incumbent that
//! cannot race. Later evaluations show whether the candidate is at fault: a candidate that fails twice while
//! a later one succeeds is itself at fault. Several failures in a row are not the fault of the candidates;
//! without this rule, every candidate would be rejected.

use std::collections::HashSet;

use kernels::select::Shape;

use super::error::EvolveError;
use super::task::{Finding, Outcome, Stage};
use ledger::{CandidateId, Reason, Rejection};

/// Reasons that do not count against a candidate when they come in a row.
const REASONS: [Reason; 3] = [Reason::Crashed, Reason::Device, Reason::Incumbent];
/// Number of failures in a row that cannot be chance: of the kernels that passed the gate, fewer than one in
/// a hundred makes its worker fail.
const MOST: usize = 5;

#[derive(Debug, Default)]
pub struct Faults {
    /// Failures since the last success, for the stages of the host and of the device.
    rows: [usize; 2],
    last: Option<Rejection>,
    again: HashSet<(CandidateId, Stage, Shape)>,
    /// Failures that may be their candidates' fault.
    held: Vec<Outcome>,
}

/// What to do with an outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// Accept the outcome: it is a result of the candidate.
    Answer,
    /// Hand out the task once more.
    TryAgain,
    /// Hold the outcome back until the cause is known: the task failed again.
    HeldBack,
}

/// Whether this outcome means that the evaluator has lost its device or crashed.
pub fn is_lost(outcome: &Outcome) -> bool {
    matches!(&outcome.finding, Finding::Rejected(found) if matches!(found.reason, Reason::Hangs | Reason::Crashed))
}

/// Whether an outcome may be a failure of the infrastructure.
pub fn is_fault(outcome: &Outcome) -> bool {
    matches!(&outcome.finding, Finding::Rejected(rejection) if REASONS.contains(&rejection.reason))
}

fn place_of(outcome: &Outcome) -> usize {
    usize::from(outcome.stage.is_of_device())
}

impl Faults {
    /// Classifies an outcome.
    pub fn saw(&mut self, outcome: &Outcome) -> Word {
        let row = &mut self.rows[place_of(outcome)];
        match &outcome.finding {
            Finding::Rejected(rejection) if is_fault(outcome) => {
                *row += 1;
                self.last = Some(rejection.clone());
            }
            _ => {
                *row = 0;
                return Word::Answer;
            }
        }
        if self.again.insert((outcome.candidate, outcome.stage, outcome.problem)) {
            return Word::TryAgain;
        }
        self.held.push(outcome.clone());
        Word::HeldBack
    }

    /// Failures that are held back.
    pub fn held(&self) -> &[Outcome] {
        &self.held
    }

    /// Releases the failures that this success shows to be the fault of their candidates.
    pub fn shown_by(&mut self, success: &Outcome) -> Vec<Outcome> {
        self.held.extract_if(.., |held| place_of(held) == place_of(success)).collect()
    }

    /// Releases all failures that are held back.
    pub fn all(&mut self) -> Vec<Outcome> {
        std::mem::take(&mut self.held)
    }

    /// The error that ends the run after too many failures.
    pub fn too_many(&self) -> Option<EvolveError> {
        self.row(self.rows.iter().position(|&row| row >= MOST)?)
    }

    /// The error for the series of failures to which this one belongs, even if it is still short.
    pub fn row_of(&self, outcome: &Outcome) -> Option<EvolveError> {
        self.row(place_of(outcome))
    }

    fn row(&self, place: usize) -> Option<EvolveError> {
        let Rejection { reason, detail, .. } = self.last.clone()?;
        let (count, place) = (self.rows[place], ["evaluations", "evaluations on the device"][place]);
        Some(EvolveError::Faults { count, place, reason, detail })
    }
}
