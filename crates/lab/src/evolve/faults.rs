//! Evaluations that fail though no candidate is to blame: a lost device, a worker that cannot be started, an incumbent that cannot
//! race. One such failure is its candidate's bad luck; several in a row would end every candidate there is.

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
/// So many in a row are no chance: of kernels that are proven hardly one in a hundred brings its worker down.
const MOST: usize = 5;

/// What failed of late.
#[derive(Debug, Default)]
pub struct Faults {
    /// Failures without a success since: of the stages of the host, and of the device's.
    rows: [usize; 2],
    last: Option<Rejection>,
    again: HashSet<(CandidateId, Stage, Shape)>,
}

impl Faults {
    /// Whether an answer is to be asked for a second time: the candidate had no part in it.
    pub fn is_to_be_tried_again(&mut self, outcome: &Outcome) -> bool {
        matches!(&outcome.finding, Finding::Rejected(rejection) if rejection.reason == INCUMBENT)
            && self.again.insert((outcome.candidate, outcome.stage, outcome.problem))
    }

    /// An answer came.
    pub fn saw(&mut self, outcome: &Outcome) {
        let row = &mut self.rows[usize::from(is_of_device(outcome.stage))];
        match &outcome.finding {
            Finding::Rejected(rejection) if REASONS.contains(&rejection.reason.as_str()) => {
                *row += 1;
                self.last = Some(rejection.clone());
            }
            _ => *row = 0,
        }
    }

    /// Why it is of no use to go on.
    pub fn too_many(&self) -> Option<EvolveError> {
        let place = self.rows.iter().position(|&row| row >= MOST)?;
        let Rejection { reason, detail, .. } = self.last.clone()?;
        let (count, place) = (self.rows[place], ["evaluations", "evaluations on the device"][place]);
        Some(EvolveError::Faults { count, place, reason, detail })
    }
}
