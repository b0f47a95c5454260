//! The state of one problem's candidates, computed by applying the ledger's facts in order. Reading the facts
//! again after a crash gives the same state.

use std::collections::{BTreeMap, HashMap, HashSet};

use kernels::select::Shape;

use super::bandit::Bandit;
use super::cascade;
use super::guidance::Guidance;
use super::member::{CandidateState, Member, Time, key};
use super::niches::{Entry, Niches};
use super::space::family;
use super::task::{Finding, Outcome, Stage};
use bench::SpeedVerdict;
use ledger::{Against, Arm, Candidate, CandidateId, NewCandidate, Operator, Reason, Rejection};
use ledger::{MeasurementFact, TimeKind};

/// The candidates of one problem.
#[derive(Clone, Debug)]
pub struct Population {
    pub problem: Shape,
    pub members: BTreeMap<CandidateId, Member>,
    /// The elites of the evolution arm.
    pub niches: Niches,
    /// Chooses the operator of the next candidate.
    pub bandit: Bandit,
    /// The candidate to beat.
    pub baseline: Option<CandidateId>,
    /// The baseline as a new candidate.
    pub control: Option<CandidateId>,
    /// The evolution arm's fastest candidate by its short timing.
    pub best: Option<CandidateId>,
    /// Times of the evolution arm's candidates in the order of arrival, µs.
    pub curve: Vec<f64>,
    /// Number of candidates of each arm.
    made: HashMap<Arm, usize>,
    /// The first candidate of each plan.
    plans: HashMap<String, CandidateId>,
    /// Plans of the evolution arm, including the baseline.
    own: HashSet<String>,
    kernels: HashMap<String, CandidateId>,
    draws: usize,
}

/// The reward of an operator for a candidate that is ...
mod reward {
    /// ... the fastest so far,
    pub const BEST: f64 = 1.0;
    /// the first or the fastest of its niche,
    pub const ELITE: f64 = 0.4;
    /// faster than its parent.
    pub const BETTER: f64 = 0.2;
}

impl Population {
    /// An empty population. The model picks the best of `draws` random samples.
    pub fn new(problem: Shape, draws: usize) -> Population {
        Population {
            problem,
            members: BTreeMap::new(),
            niches: Niches::default(),
            bandit: Bandit::default(),
            baseline: None,
            control: None,
            best: None,
            curve: Vec::new(),
            made: HashMap::new(),
            plans: HashMap::new(),
            own: HashSet::new(),
            kernels: HashMap::new(),
            draws,
        }
    }

    /// Whether the evolution arm has made this plan. Plans of random samples do not count.
    pub fn knows(&self, candidate: &Candidate) -> bool {
        self.own.contains(&candidate.hash())
    }

    /// Number of candidates of an arm.
    pub fn made(&self, arm: Arm) -> usize {
        self.made.get(&arm).copied().unwrap_or(0)
    }

    /// Number of candidates with stages left.
    pub fn open(&self) -> usize {
        self.members.values().filter(|m| m.is_open()).count()
    }

    /// The baseline's time, once it is known.
    pub fn baseline_us(&self) -> Option<f64> {
        Some(self.members.get(&self.baseline?)?.time?.us)
    }

    /// The noise floor of this run's races on the problem, as a ratio: differences below it cannot be
    /// distinguished from noise. It is the largest [floor](MeasurementFact::noise_floor) of all races;
    /// [`Ledger::noise_floor`](ledger::Ledger::noise_floor) is the same figure from the ledger.
    pub fn noise_floor(&self) -> Option<f64> {
        self.members.values().filter_map(|m| m.noise).max_by(f64::total_cmp)
    }

    /// Adds a candidate. Returns the rejection if its plan is known. The rejection is
    /// [applied](Population::learn) like every other outcome, so that a run read from the ledger rejects the
    /// same candidates in the same order.
    pub fn admit(&mut self, id: CandidateId, new: &NewCandidate) -> Option<Rejection> {
        let mut member = Member::new(id, new);
        match new.arm {
            Arm::Baseline if new.problem == self.problem && self.baseline.is_none() => {
                self.baseline = Some(id)
            }
            Arm::Control => self.control = Some(id),
            Arm::Evolution | Arm::Random => member.same_as = self.plans.get(&member.hash).copied(),
            // A reference takes part only in comparisons at the end.
            Arm::Baseline => member.place = CandidateState::Timed,
        }
        let rejection = member.same_as.map(|first| cascade::identical(first, Stage::Screen));
        self.plans.entry(member.hash.clone()).or_insert(id);
        if matches!(new.arm, Arm::Baseline | Arm::Evolution) {
            self.own.insert(member.hash.clone());
        }
        self.enlist(member);
        rejection
    }

    /// Adds the failed answer of a proposer, whose [rejection](Population::learn) follows. Equal failures are
    /// separate candidates.
    pub fn admit_failure(&mut self, id: CandidateId, new: &NewCandidate) {
        self.enlist(Member::new(id, new));
    }

    fn enlist(&mut self, member: Member) {
        let operator = member.operator.operator;
        if Operator::CHOSEN.contains(&operator) {
            self.bandit.pulled(member.id.0, operator);
        }
        *self.made.entry(member.arm).or_default() += 1;
        self.members.insert(member.id, member);
    }

    /// Applies an outcome. Returns the candidates that it rejects, with the reasons.
    pub fn learn(&mut self, outcome: &Outcome, guidance: &mut Guidance) -> Vec<(CandidateId, Rejection)> {
        let id = outcome.candidate;
        let mut rejected = Vec::new();
        if !self.members.contains_key(&id) {
            return rejected;
        }
        match &outcome.finding {
            Finding::Rejected(rejection) if outcome.stage == Stage::HeldOut => {
                self.note_held_out(id, &outcome.problem, Err(rejection.reason));
                if let Some(member) = self.members.get_mut(&id) {
                    // The rejection is stored, but the time remains valid: it does not depend on another
                    // problem.
                    member.rejection.get_or_insert_with(|| rejection.clone());
                }
            }
            // The ledger stores this rejection together with the outcome.
            Finding::Rejected(rejection) => {
                self.reject(id, rejection.clone());
                self.take_over(id);
            }
            Finding::Screened { screening, predicted_us, findings } => {
                if let Some(member) = self.members.get_mut(&id) {
                    member.screening = Some(screening.clone());
                    member.predicted = *predicted_us;
                    member.findings = findings.clone();
                }
                rejected.extend(self.after_screening(id));
                self.take_over(id);
            }
            Finding::Judged(check) => match cascade::judged(check, Stage::Check) {
                Some(rejection) => rejected.push((id, rejection)),
                None => self.place(id, CandidateState::Ready(Stage::Microbench)),
            },
            Finding::Timed { check, measurement } => {
                let wrong = check.as_ref().and_then(|check| cascade::judged(check, outcome.stage));
                match (outcome.stage, wrong) {
                    (Stage::HeldOut, wrong) => {
                        let race = match (wrong, measurement.against) {
                            (Some(rejection), _) => Err(rejection.reason),
                            (None, against) => against.ok_or_else(|| Reason::Incumbent.to_owned()),
                        };
                        let has_raced = race.is_ok();
                        self.note_held_out(id, &outcome.problem, race);
                        if outcome.problem == self.problem && has_raced {
                            self.note_race(id, measurement);
                        }
                    }
                    (_, Some(rejection)) => rejected.push((id, rejection)),
                    (Stage::Race, None) => {
                        self.note_race(id, measurement);
                        rejected.extend(self.after_race(id, measurement.against));
                    }
                    (_, None) => {
                        let time =
                            Time { low: measurement.low_us, us: measurement.us, high: measurement.high_us };
                        if let Some(member) = self.members.get_mut(&id) {
                            member.is_taken_over = measurement.samples.is_empty();
                        }
                        self.after_timing(id, time, measurement.kind, guidance);
                    }
                }
            }
        }
        if self.members.get(&id).is_some_and(Member::is_drawn) {
            rejected.extend(self.pick_of_draw());
        }
        for (id, rejection) in &rejected {
            self.reject(*id, rejection.clone());
        }
        rejected
    }

    /// Rejects a candidate.
    pub fn reject(&mut self, id: CandidateId, rejection: Rejection) {
        self.niches.leave(id);
        if let Some(member) = self.members.get_mut(&id) {
            member.place = CandidateState::Rejected;
            member.rejection = Some(rejection);
        }
        if self.best == Some(id) {
            let fit = self.members.values().filter(|m| m.arm == Arm::Evolution && m.is_fit());
            self.best = fit.min_by(|a, b| a.expected_us().total_cmp(&b.expected_us())).map(|m| m.id);
        }
    }

    fn place(&mut self, id: CandidateId, place: CandidateState) {
        if let Some(member) = self.members.get_mut(&id) {
            member.place = place;
        }
    }

    fn note_held_out(&mut self, id: CandidateId, problem: &Shape, race: Result<Against, Reason>) {
        if let Some(member) = self.members.get_mut(&id) {
            member.held_out.insert(key(problem), race);
        }
    }

    /// Records the time and the noise of a race on the run's problem.
    fn note_race(&mut self, id: CandidateId, measurement: &MeasurementFact) {
        if let Some(member) = self.members.get_mut(&id) {
            member.race_us = Some(measurement.us);
            let floor = measurement.noise_floor(member.arm);
            member.noise = member.noise.into_iter().chain(floor).max_by(f64::total_cmp);
        }
    }

    /// Compares the kernel with known ones, checks spills and the prediction, and then admits it to the gate.
    fn after_screening(&mut self, id: CandidateId) -> Vec<(CandidateId, Rejection)> {
        let Some(member) = self.members.get(&id) else { return Vec::new() };
        let is_drawn = member.is_drawn();
        let mut rejected = Vec::new();
        let hashes =
            member.screening.iter().flat_map(|s| [Some(s.ptx_hash.clone()), s.sass_hash.clone()]).flatten();
        let hashes: Vec<String> = hashes.collect();
        let first =
            hashes.iter().find_map(|hash| self.kernels.get(hash).copied()).filter(|first| *first != id);
        let rejection = match first {
            Some(first) if member.counts() => self.members.get_mut(&id).map(|m| {
                m.same_as = Some(first);
                cascade::identical(first, Stage::Screen)
            }),
            _ if member.counts() => {
                // At least one random sample passes, however slow, so that the arm has a time for the
                // comparison.
                let standard = self.standard().filter(|_| member.arm != Arm::Random || self.draws_beside(id));
                cascade::screened(member, standard.filter(|standard| !cascade::is_audited(member, standard)))
            }
            _ => None,
        };
        for hash in hashes {
            self.kernels.entry(hash).or_insert(id);
        }
        match rejection {
            Some(rejection) => {
                // Rejected before it is placed, so that no later draw can pick it.
                self.reject(id, rejection.clone());
                rejected.push((id, rejection));
            }
            None if is_drawn => self.place(id, CandidateState::Held),
            None => self.place(id, CandidateState::Ready(Stage::Check)),
        }
        rejected
    }

    /// Whether another random sample has passed its screening.
    fn draws_beside(&self, id: CandidateId) -> bool {
        let passed = |m: &Member| m.screening.is_some() && m.place != CandidateState::Rejected;
        self.members.values().any(|m| m.arm == Arm::Random && m.id != id && passed(m))
    }

    /// Once all samples of a draw are screened or rejected, the model's best continue.
    fn pick_of_draw(&mut self) -> Vec<(CandidateId, Rejection)> {
        let done = |m: &&Member| m.is_drawn() && m.place != CandidateState::Ready(Stage::Screen);
        if self.members.values().filter(done).count() < self.draws {
            return Vec::new();
        }
        let mut held: Vec<(CandidateId, f64)> = self
            .members
            .values()
            .filter(|m| m.place == CandidateState::Held)
            .map(|m| (m.id, m.expected_us()))
            .collect();
        held.sort_by(|a, b| a.1.total_cmp(&b.1));
        let mut rejected = Vec::new();
        for (rank, (id, _)) in held.into_iter().enumerate() {
            if rank < cascade::PICKED {
                self.place(id, CandidateState::Ready(Stage::Check));
            } else {
                rejected.push((id, cascade::not_picked(rank)));
            }
        }
        rejected
    }

    /// The prediction for comparison: that of the fastest known candidate or, without one, the baseline's.
    fn standard(&self) -> Option<[f64; 3]> {
        let of = |id: CandidateId| self.members.get(&id).and_then(|m| m.predicted);
        let fit = self.members.values().filter(|m| m.is_fit());
        let fastest =
            fit.min_by(|a, b| a.expected_us().total_cmp(&b.expected_us())).and_then(|m| m.predicted);
        fastest.or_else(|| self.baseline.and_then(of))
    }

    /// Normalises a short timing in turns with the baseline: the baseline's own time divided by the ratio, so
    /// that a slow phase of the machine does not count against the candidate. The ledger stores the
    /// normalised time.
    pub fn normalised(&self, outcome: &Outcome) -> Outcome {
        let mut outcome = outcome.clone();
        if let (Stage::Microbench, Finding::Timed { measurement: m, .. }, Some(us)) =
            (outcome.stage, &mut outcome.finding, self.baseline_us())
            && let Some(against) = m.against.filter(|a| Some(a.incumbent) == self.baseline && a.low > 0.0)
        {
            (m.low_us, m.us, m.high_us) = (us / against.high, us / against.ratio, us / against.low);
        }
        outcome
    }

    fn after_timing(&mut self, id: CandidateId, time: Time, kind: TimeKind, guidance: &mut Guidance) {
        let Some(member) = self.members.get_mut(&id) else { return };
        (member.time, member.kind, member.place) = (Some(time), Some(kind), CandidateState::Timed);
        match member.arm {
            Arm::Control => {}
            Arm::Random => {
                if let Some(&own) = self.repeats_of(id).first() {
                    self.credit(id, own);
                }
            }
            Arm::Baseline | Arm::Evolution => {
                let member = &self.members[&id];
                if let Some(parent_us) = self.parent_us(member) {
                    guidance.learn(family(&member.candidate), &member.changes, parent_us, time.us);
                }
                self.credit(id, id);
            }
        }
    }

    fn parent_us(&self, member: &Member) -> Option<f64> {
        Some(self.members.get(member.parents.first()?)?.time?.us)
    }

    /// Called when the search repeats a plan of a random sample: that sample's time and niche then also
    /// belong to the search. Only the first such repeat is credited, so that a kernel is in the archive only
    /// once.
    fn take_over(&mut self, id: CandidateId) {
        let first = self.members.get(&id).filter(|m| m.same_as.is_some()).map(|m| self.origin(m));
        let Some(first) = first.filter(|first| first.arm == Arm::Random && first.time.is_some()) else {
            return;
        };
        let first = first.id;
        if self.repeats_of(first) == [id] {
            self.credit(first, id);
        }
    }

    /// The candidates of the evolution arm that repeat this kernel.
    fn repeats_of(&self, first: CandidateId) -> Vec<CandidateId> {
        let own = self.members.values().filter(|m| m.arm == Arm::Evolution && m.same_as.is_some());
        own.filter(|m| m.rejection.is_some() && self.origin(m).id == first).map(|m| m.id).collect()
    }

    /// The candidate whose kernel a candidate repeats, or the candidate itself. A repeated plan may itself
    /// have the kernel of an earlier one.
    fn origin<'a>(&'a self, member: &'a Member) -> &'a Member {
        let mut first = member;
        while let Some(earlier) = first.same_as.and_then(|id| self.members.get(&id)) {
            first = earlier;
        }
        first
    }

    /// Enters a timed kernel into the archive, and credits the operator that made it.
    fn credit(&mut self, id: CandidateId, maker: CandidateId) {
        let Some(member) = self.members.get(&id).filter(|m| m.is_fit()) else { return };
        let (niche, us, is_baseline) = (member.niche(), member.expected_us(), member.arm == Arm::Baseline);
        let parent_us = self.members.get(&maker).and_then(|maker| self.parent_us(maker));
        let entry = self.niches.enter(niche, id, us);
        if is_baseline {
            return;
        }
        let best_us = self.best.and_then(|best| self.members.get(&best)).map(Member::expected_us);
        let is_best = best_us.is_none_or(|best| us < best);
        self.curve.push(us);
        if is_best {
            self.best = Some(id);
        }
        // The reward for a new best candidate requires that it also beats the baseline.
        let beats = self.baseline_us().is_none_or(|baseline| us < baseline);
        let earned = match () {
            () if is_best && beats => reward::BEST,
            () if entry != Entry::None => reward::ELITE,
            () if parent_us.is_some_and(|parent| us < parent) => reward::BETTER,
            () => 0.0,
        };
        self.bandit.earned(maker.0, earned);
    }

    fn after_race(&mut self, id: CandidateId, against: Option<Against>) -> Vec<(CandidateId, Rejection)> {
        let Some(member) = self.members.get_mut(&id) else { return Vec::new() };
        member.race = against;
        let lost = against.filter(|a| a.verdict == SpeedVerdict::Slower && member.counts());
        lost.map(|against| (id, cascade::lost(&against))).into_iter().collect()
    }

    /// The first `count` candidates of an arm in order, each resolved to the kernel that it repeats.
    fn first_of(&self, arm: Arm, count: usize) -> impl Iterator<Item = &Member> {
        self.members.values().filter(move |m| m.arm == arm).take(count).map(|m| self.origin(m))
    }

    /// The fastest of the first `count` candidates of an arm, with repeats resolved.
    pub fn best_of(&self, arm: Arm, count: usize) -> Option<&Member> {
        let timed = self.first_of(arm, count).filter(|m| m.is_timed());
        timed.min_by(|a, b| a.expected_us().total_cmp(&b.expected_us()))
    }

    /// The smaller number of candidates of the two arms, for a fair comparison.
    pub fn equal_budget(&self) -> usize {
        self.made(Arm::Evolution).min(self.made(Arm::Random))
    }
}

#[cfg(test)]
mod tests;
