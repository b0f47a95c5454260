//! Evaluations that fail though no candidate is to blame: a lost device, a worker that cannot be started, an incumbent that cannot
//! race. Whether it is the candidate shows only in what comes after: who fails twice where another one then succeeds failed by itself.
//! Several failures in a row are nobody's, and would end every candidate there is.

use std::collections::HashSet;

use kernels::select::Shape;

use super::engine::EvolveError;
use super::task::{Finding, Outcome, Stage};
use super::workers::is_of_device;
use crate::ledger::{CandidateId, Rejection};

/// Reasons that say nothing of a candidate if they come one after the other.
const REASONS: [&str; 3] = ["crashed", "device", INCUMBENT];
/// The reason where the one to race against was at fault.
pub const INCUMBENT: &str = "incumbent";
/// More failures than this in a row are not chance: of kernels that passed their check, hardly one in a hundred ends its worker.
const MOST: usize = 5;

/// What failed of late.
#[derive(Debug, Default)]
pub struct Faults {
    /// Failures without a success since: of the stages of the host, and of the device's.
    rows: [usize; 2],
    last: Option<Rejection>,
    again: HashSet<(CandidateId, Stage, Shape)>,
    /// Failures that may be their candidates' own.
    held: Vec<Outcome>,
}

/// What an answer says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// Something of its candidate, and that evaluations succeed.
    Answer,
    /// Nothing yet: the task is to be given out once more.
    TryAgain,
    /// It failed again, and is held back until it is known why.
    HeldBack,
}

/// Whether an answer is a failure that may be nobody's fault.
pub fn is_fault(outcome: &Outcome) -> bool {
    matches!(&outcome.finding, Finding::Rejected(rejection) if REASONS.contains(&rejection.reason.as_str()))
}

fn place_of(outcome: &Outcome) -> usize {
    usize::from(is_of_device(outcome.stage))
}

impl Faults {
    /// An answer came.
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

    /// Those that are their candidates' own, now that this one succeeded where they failed.
    pub fn shown_by(&mut self, success: &Outcome) -> Vec<Outcome> {
        self.held.extract_if(.., |held| place_of(held) == place_of(success)).collect()
    }

    /// All that are held back.
    pub fn all(&mut self) -> Vec<Outcome> {
        std::mem::take(&mut self.held)
    }

    /// Why it is of no use to go on.
    pub fn too_many(&self) -> Option<EvolveError> {
        self.row(self.rows.iter().position(|&row| row >= MOST)?)
    }

    /// The row that this failure is the latest of, where it is as good as too many.
    pub fn row_of(&self, outcome: &Outcome) -> Option<EvolveError> {
        self.row(place_of(outcome))
    }

    fn row(&self, place: usize) -> Option<EvolveError> {
        let Rejection { reason, detail, .. } = self.last.clone()?;
        let (count, place) = (self.rows[place], ["evaluations", "evaluations on the device"][place]);
        Some(EvolveError::Faults { count, place, reason, detail })
    }
}
