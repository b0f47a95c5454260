//! Adds candidates to a run: drafts, references and proposers' answers, also when a run is resumed.

use kernels::select::Shape;
use serde_json::json;

use super::config::Case;
use super::engine::{Evolution, Question, Search, write};
use super::error::EvolveError;
use super::member::Member;
use super::operators::Draft;
use super::proposer::Proposal;
use super::task::{Finding, Outcome, Stage};
use ledger::{Arm, CandidateId, Forecast, NewCandidate, Operator, Reason, Rejection};
use ledger::{Candidate, KernelText, Language};

/// The proposer's report, apart from its candidate.
#[derive(Default)]
pub(super) struct Said {
    /// Why the answer contains no candidate.
    failure: Option<Rejection>,
    /// Duration of the answer, s.
    seconds: f64,
    /// The hypothesis and the forecast time, µs.
    forecast: Option<(String, f64)>,
}

/// Relative half-width of the interval of a proposer's forecast; the same as for a person's forecast without
/// an interval.
const MARGIN: f64 = 0.1;

fn forecast(id: CandidateId, hypothesis: &str, us: f64, device: &str, problem: Shape) -> Forecast {
    Forecast {
        candidate: Some(id),
        hypothesis: hypothesis.to_owned(),
        author: Operator::Propose.name().to_owned(),
        device: device.to_owned(),
        problem: Some(problem),
        low_us: us * (1.0 - MARGIN),
        us,
        high_us: us * (1.0 + MARGIN),
    }
}

impl Evolution {
    /// Accepts the answer of a proposer: a candidate, or the reason why there is none.
    ///
    /// # Errors
    /// When the ledger cannot be written.
    pub fn answer(
        &mut self,
        question: &Question,
        answer: Result<Proposal, Rejection>,
    ) -> Result<(), EvolveError> {
        let Some(search) = self.searches.get_mut(question.case) else { return Ok(()) };
        search.questions[1] += 1;
        let mut said = Said { seconds: (self.elapsed - question.asked).max(0.0), ..Said::default() };
        let candidate = match answer {
            Ok(Proposal { candidate, hypothesis, predicted_us }) => {
                said.forecast = predicted_us.map(|us| (hypothesis.unwrap_or_default(), us));
                if let Err(detail) = search.space.domain.check(&candidate) {
                    said.failure = Some(Rejection { stage: Stage::Propose, reason: Reason::Plan, detail });
                }
                candidate
            }
            // A rejection needs a candidate, so the raw text of the answer is stored as one.
            Err(rejection) => {
                let (text, launch) = (rejection.detail.clone(), String::new());
                said.failure = Some(rejection);
                Candidate::Kernel(KernelText { language: Language::Ptx, text, launch })
            }
        };
        let parents: Vec<&Member> =
            search.population.best.iter().filter_map(|id| search.population.members.get(id)).collect();
        let draft = Draft::from_parents(candidate, Operator::Propose, &parents);
        self.add(question.case, draft, said)?;
        Ok(())
    }

    /// Adds a candidate that serves only for comparison.
    pub(super) fn add_reference(
        &mut self,
        case: usize,
        problem: Shape,
        candidate: Candidate,
        operator: Operator,
    ) -> Result<CandidateId, EvolveError> {
        let new = NewCandidate {
            run: self.run,
            problem,
            candidate,
            arm: Arm::Baseline,
            operator: operator.into(),
            parents: Vec::new(),
            changes: json!({}),
        };
        let id = self.ledger.add_candidate(&new)?;
        self.searches[case].population.admit(id, &new);
        Ok(id)
    }

    /// Adds a candidate from the ledger again. If `is_failure`, its rejection follows with the outcomes.
    pub(super) fn admit(&mut self, id: CandidateId, new: &NewCandidate, is_failure: bool) {
        // A searched problem belongs to the case that searches it, a held-out problem to the case that lists
        // it.
        let names = |case: &Case| case.held_out.iter().any(|(shape, _)| *shape == new.problem);
        let is_parent =
            |search: &Search| new.parents.iter().any(|id| search.population.members.contains_key(id));
        let cases = &self.config.cases;
        let case = (self.searches.iter().position(is_parent))
            .or_else(|| cases.iter().position(|case| case.problem == new.problem))
            .or_else(|| cases.iter().position(names));
        let Some(search) = case.map(|case| &mut self.searches[case]) else { return };
        if is_failure {
            search.population.admit_failure(id, new);
        } else {
            search.population.admit(id, new);
        }
        if new.operator.operator == Operator::Propose {
            search.questions = search.questions.map(|n| n + 1);
        }
    }

    /// Adds a candidate; `None` if it is rejected at once.
    pub(super) fn add(
        &mut self,
        case: usize,
        draft: Draft,
        said: Said,
    ) -> Result<Option<CandidateId>, EvolveError> {
        let (run, problem) = (self.run, self.searches[case].population.problem);
        let Draft { candidate, arm, operator, parents, changes } = draft;
        let new = NewCandidate { run, problem, candidate, arm, operator, parents, changes };
        let (searches, guidance, device) = (&mut self.searches, &mut self.guidance, &self.config.device);
        // The candidate and its rejection or forecast are written together.
        let (id, end) = self.ledger.together(|ledger| {
            let id = ledger.add_candidate(&new)?;
            let population = &mut searches[case].population;
            let rejection = match said.failure {
                Some(failure) => {
                    population.admit_failure(id, &new);
                    Some(failure)
                }
                None => population.admit(id, &new),
            };
            let Some(rejection) = rejection else {
                said.forecast.iter().try_for_each(|(hypothesis, us)| {
                    ledger.forecast(&forecast(id, hypothesis, *us, device, problem)).map(|_| ())
                })?;
                return Ok::<_, EvolveError>((id, None));
            };
            let (stage, seconds, finding) = (rejection.stage, said.seconds, Finding::Rejected(rejection));
            let outcome = Outcome { candidate: id, stage, problem, seconds, device_seconds: 0.0, finding };
            let rejected = population.learn(&outcome, guidance);
            write(ledger, &outcome, &rejected)?;
            Ok((id, Some(outcome)))
        })?;
        if let Some(outcome) = &end {
            self.account(outcome);
        }
        Ok(end.is_none().then_some(id))
    }
}
