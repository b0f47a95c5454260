//! Everything known of one problem's candidates: a fold over the ledger's facts, the same whether they come as they happen or are
//! read again after a crash.

use std::collections::{BTreeMap, HashMap, HashSet};

use kernels::select::Shape;
use serde_json::Value;

use super::bandit::{Bandit, Operator};
use super::candidate::Candidate;
use super::cascade;
use super::faults::INCUMBENT;
use super::insight::Insights;
use super::niches::{Entry, Niche, Niches};
use super::space::family;
use super::task::{Finding, Outcome, Stage};
use crate::bench::SpeedVerdict;
use crate::ledger::{Against, Arm, CandidateId, NewCandidate, Rejection, Screening, TimeKind};

/// Where a candidate stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The next stage can be asked for.
    Ready(Stage),
    /// One of a draw of which the model's best go on, once all are screened.
    Held,
    /// It has a time.
    Timed,
    /// It went no further.
    Dead,
}

/// A time to rank by, µs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Time {
    /// Lower end of its interval.
    pub low: f64,
    /// Expected.
    pub us: f64,
    /// Upper end.
    pub high: f64,
}

/// A candidate with all that is known of it.
#[derive(Clone, Debug)]
pub struct Member {
    /// Its number.
    pub id: CandidateId,
    /// What it computes.
    pub problem: Shape,
    /// What is run.
    pub candidate: Candidate,
    /// Of it.
    pub hash: String,
    /// Why it is in the run.
    pub arm: Arm,
    /// How it was made.
    pub operator: String,
    /// From what.
    pub parents: Vec<CandidateId>,
    /// What differs from the first of these.
    pub changes: Value,
    /// Where it stands.
    pub place: Place,
    /// What it is.
    pub screening: Option<Screening>,
    /// What it is expected to take: low, expected, high, µs.
    pub predicted: Option<[f64; 3]>,
    /// What slows it down.
    pub findings: Value,
    /// What it took.
    pub time: Option<Time>,
    /// Whether that was measured.
    pub kind: Option<TimeKind>,
    /// Whether an earlier run measured it.
    pub is_taken_over: bool,
    /// How its race against the baseline ended.
    pub race: Option<Against>,
    /// The median of its last race against the baseline, µs.
    pub race_us: Option<f64>,
    /// How its races once it had won ended, by problem, or the reason why there was none: its second race among them.
    pub held_out: BTreeMap<String, Result<Against, String>>,
    /// Why it died.
    pub rejection: Option<Rejection>,
    /// The candidate that is the same kernel.
    pub same_as: Option<CandidateId>,
}

impl Member {
    /// A new candidate.
    pub fn new(id: CandidateId, new: &NewCandidate) -> Member {
        Member {
            id,
            problem: new.problem,
            candidate: new.candidate.clone(),
            hash: new.candidate.hash(),
            arm: new.arm,
            operator: new.operator.clone(),
            parents: new.parents.clone(),
            changes: new.changes.clone(),
            place: Place::Ready(Stage::Screen),
            screening: None,
            predicted: None,
            findings: Value::Null,
            time: None,
            kind: None,
            is_taken_over: false,
            race: None,
            race_us: None,
            held_out: BTreeMap::new(),
            rejection: None,
            same_as: None,
        }
    }

    /// Whether the budget counts it: what is compared with does not.
    pub fn counts(&self) -> bool {
        matches!(self.arm, Arm::Evolution | Arm::Random)
    }

    /// Whether it is one of the draws that the time model picks from.
    pub fn is_drawn(&self) -> bool {
        self.operator == cascade::DRAWN
    }

    /// How its second race against the baseline ended, which was run because it won the first: chance that made it win
    /// that one has no part in it.
    pub fn confirmed(&self) -> Option<Against> {
        self.held_out.get(&key(&self.problem))?.as_ref().ok().copied()
    }

    /// Whether it is on its way.
    pub fn is_open(&self) -> bool {
        matches!(self.place, Place::Ready(_))
    }

    /// Whether it may be used as a parent or win: it has a time and nothing is wrong with it.
    pub fn is_fit(&self) -> bool {
        self.time.is_some() && self.place == Place::Timed
    }

    /// Whether its time counts: it is right, even if it lost its race.
    pub fn is_timed(&self) -> bool {
        self.is_fit() || self.time.is_some() && self.race.is_some()
    }

    /// The time that orders the queues: candidates with a shorter one are checked and timed first.
    pub fn expected_us(&self) -> f64 {
        self.time.map(|time| time.us).or(self.predicted.map(|p| p[1])).unwrap_or(f64::INFINITY)
    }

    fn niche(&self) -> Niche {
        let of = |text: Option<&String>| text.cloned().unwrap_or_else(|| "unknown".to_owned());
        let screening = self.screening.as_ref();
        (of(screening.and_then(|s| s.bound.as_ref())), of(screening.and_then(|s| s.tile.as_ref())))
    }
}

/// Candidates of one problem.
#[derive(Clone, Debug)]
pub struct Population {
    /// The problem.
    pub problem: Shape,
    /// In the order of their numbers.
    pub members: BTreeMap<CandidateId, Member>,
    /// The elites of the evolution's own.
    pub niches: Niches,
    /// Who gets the next candidate.
    pub bandit: Bandit,
    /// What is to be beaten.
    pub baseline: Option<CandidateId>,
    /// The baseline as if it were new.
    pub control: Option<CandidateId>,
    /// The evolution's fastest by its short timing.
    pub best: Option<CandidateId>,
    /// Times of the evolution's candidates in the order in which they became known, µs.
    pub curve: Vec<f64>,
    /// Candidates of each arm.
    made: HashMap<Arm, usize>,
    /// The first of each plan.
    plans: HashMap<String, CandidateId>,
    /// Plans of the search itself, its baseline among them.
    own: HashSet<String>,
    kernels: HashMap<String, CandidateId>,
    draws: usize,
}

/// What an operator earns for a candidate that is ...
mod reward {
    /// ... the fastest so far,
    pub const BEST: f64 = 1.0;
    /// the first or the fastest of its niche,
    pub const ELITE: f64 = 0.4;
    /// faster than its parent.
    pub const BETTER: f64 = 0.2;
}

impl Population {
    /// Nobody yet; the best of `draws` blind draws are picked by the model.
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

    /// Whether the search itself made a candidate of this plan already: what a blind draw found is no knowledge of its own.
    pub fn knows(&self, candidate: &Candidate) -> bool {
        self.own.contains(&candidate.hash())
    }

    /// Candidates of one arm.
    pub fn made(&self, arm: Arm) -> usize {
        self.made.get(&arm).copied().unwrap_or(0)
    }

    /// Candidates on their way.
    pub fn open(&self) -> usize {
        self.members.values().filter(|m| m.is_open()).count()
    }

    /// The baseline, once it has a time.
    pub fn baseline_us(&self) -> Option<f64> {
        Some(self.members.get(&self.baseline?)?.time?.us)
    }

    /// A candidate joins. Why it must die at once where it is of a plan that is known: its end is [learned](Population::learn) like
    /// every other, so that a run that is read again from the ledger dies the same deaths in the same order.
    pub fn admit(&mut self, id: CandidateId, new: &NewCandidate) -> Option<Rejection> {
        let mut member = Member::new(id, new);
        match new.arm {
            Arm::Baseline if new.problem == self.problem && self.baseline.is_none() => {
                self.baseline = Some(id)
            }
            Arm::Control => self.control = Some(id),
            Arm::Evolution | Arm::Random => member.same_as = self.plans.get(&member.hash).copied(),
            // Compared with at the end only.
            Arm::Baseline => member.place = Place::Timed,
        }
        let rejection = member.same_as.map(|first| cascade::identical(first, Stage::Screen));
        self.plans.entry(member.hash.clone()).or_insert(id);
        if matches!(new.arm, Arm::Baseline | Arm::Evolution) {
            self.own.insert(member.hash.clone());
        }
        self.enlist(member);
        rejection
    }

    /// What came of a proposer's answer that is no candidate joins, and has [its end](Population::learn) still to come: every
    /// failure is one of its own.
    pub fn admit_failure(&mut self, id: CandidateId, new: &NewCandidate) {
        self.enlist(Member::new(id, new));
    }

    fn enlist(&mut self, member: Member) {
        if let Some(operator) = Operator::of(&member.operator) {
            self.bandit.pulled(member.id.0, operator);
        }
        *self.made.entry(member.arm).or_default() += 1;
        self.members.insert(member.id, member);
    }

    /// Takes in an answer: who dies of it, and why.
    pub fn learn(&mut self, outcome: &Outcome, insights: &mut Insights) -> Vec<(CandidateId, Rejection)> {
        let id = outcome.candidate;
        let mut died = Vec::new();
        if !self.members.contains_key(&id) {
            return died;
        }
        match &outcome.finding {
            Finding::Rejected(rejection) if outcome.stage == Stage::HeldOut => {
                self.note_held_out(id, &outcome.problem, Err(rejection.reason.clone()));
                if let Some(member) = self.members.get_mut(&id) {
                    // Its end, though its time counts: what it does on another problem is not what it does on its own.
                    member.rejection.get_or_insert_with(|| rejection.clone());
                }
            }
            // It is in the ledger with the outcome.
            Finding::Rejected(rejection) => {
                self.kill(id, rejection.clone());
                self.take_over(id);
            }
            Finding::Screened { screening, predicted_us, findings } => {
                if let Some(member) = self.members.get_mut(&id) {
                    member.screening = Some(screening.clone());
                    member.predicted = *predicted_us;
                    member.findings = findings.clone();
                }
                died.extend(self.after_screening(id));
                self.take_over(id);
            }
            Finding::Judged(check) => match cascade::judged(check, Stage::Check) {
                Some(rejection) => died.push((id, rejection)),
                None => self.place(id, Place::Ready(Stage::Microbench)),
            },
            Finding::Timed { check, measurement } => {
                let wrong = check.as_ref().and_then(|check| cascade::judged(check, outcome.stage));
                match (outcome.stage, wrong) {
                    (Stage::HeldOut, wrong) => {
                        let race = match (wrong, measurement.against) {
                            (Some(rejection), _) => Err(rejection.reason),
                            (None, against) => against.ok_or_else(|| INCUMBENT.to_owned()),
                        };
                        let has_raced = race.is_ok();
                        self.note_held_out(id, &outcome.problem, race);
                        if outcome.problem == self.problem && has_raced {
                            self.note_race_us(id, measurement.us);
                        }
                    }
                    (_, Some(rejection)) => died.push((id, rejection)),
                    (Stage::Race, None) => {
                        self.note_race_us(id, measurement.us);
                        died.extend(self.after_race(id, measurement.against));
                    }
                    (_, None) => {
                        let time =
                            Time { low: measurement.low_us, us: measurement.us, high: measurement.high_us };
                        if let Some(member) = self.members.get_mut(&id) {
                            member.is_taken_over = measurement.samples.is_empty();
                        }
                        self.after_timing(id, time, measurement.kind, insights);
                    }
                }
            }
        }
        if self.members.get(&id).is_some_and(Member::is_drawn) {
            died.extend(self.pick_of_draw());
        }
        for (id, rejection) in &died {
            self.kill(*id, rejection.clone());
        }
        died
    }

    /// A candidate dies.
    pub fn kill(&mut self, id: CandidateId, rejection: Rejection) {
        self.niches.leave(id);
        if let Some(member) = self.members.get_mut(&id) {
            member.place = Place::Dead;
            member.rejection = Some(rejection);
        }
        if self.best == Some(id) {
            let fit = self.members.values().filter(|m| m.arm == Arm::Evolution && m.is_fit());
            self.best = fit.min_by(|a, b| a.expected_us().total_cmp(&b.expected_us())).map(|m| m.id);
        }
    }

    fn place(&mut self, id: CandidateId, place: Place) {
        if let Some(member) = self.members.get_mut(&id) {
            member.place = place;
        }
    }

    fn note_held_out(&mut self, id: CandidateId, problem: &Shape, race: Result<Against, String>) {
        if let Some(member) = self.members.get_mut(&id) {
            member.held_out.insert(key(problem), race);
        }
    }

    fn note_race_us(&mut self, id: CandidateId, us: f64) {
        if let Some(member) = self.members.get_mut(&id) {
            member.race_us = Some(us);
        }
    }

    /// Identity, spills, the model's word; then the gate.
    fn after_screening(&mut self, id: CandidateId) -> Vec<(CandidateId, Rejection)> {
        let Some(member) = self.members.get(&id) else { return Vec::new() };
        let is_drawn = member.is_drawn();
        let mut died = Vec::new();
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
                // Of blind draws one is let pass, however slow: there must be something to compare with.
                let standard = self.standard().filter(|_| member.arm != Arm::Random || self.draws_beside(id));
                cascade::screened(member, standard)
            }
            _ => None,
        };
        for hash in hashes {
            self.kernels.entry(hash).or_insert(id);
        }
        match rejection {
            Some(rejection) => {
                // At once, so that it is none of those drawn.
                self.kill(id, rejection.clone());
                died.push((id, rejection));
            }
            None if is_drawn => self.place(id, Place::Held),
            None => self.place(id, Place::Ready(Stage::Check)),
        }
        died
    }

    /// Whether another blind draw is past its screening and alive.
    fn draws_beside(&self, id: CandidateId) -> bool {
        let passed = |m: &Member| m.screening.is_some() && m.place != Place::Dead;
        self.members.values().any(|m| m.arm == Arm::Random && m.id != id && passed(m))
    }

    /// Once all of a draw are screened or dead, the model's best go on.
    fn pick_of_draw(&mut self) -> Vec<(CandidateId, Rejection)> {
        let done = |m: &&Member| m.is_drawn() && m.place != Place::Ready(Stage::Screen);
        if self.members.values().filter(done).count() < self.draws {
            return Vec::new();
        }
        let mut held: Vec<(CandidateId, f64)> = self
            .members
            .values()
            .filter(|m| m.place == Place::Held)
            .map(|m| (m.id, m.expected_us()))
            .collect();
        held.sort_by(|a, b| a.1.total_cmp(&b.1));
        let mut died = Vec::new();
        for (rank, (id, _)) in held.into_iter().enumerate() {
            if rank < cascade::PICKED {
                self.place(id, Place::Ready(Stage::Check));
            } else {
                died.push((id, cascade::not_picked(rank)));
            }
        }
        died
    }

    /// What predictions are held against: that of the fastest known, or of the baseline.
    fn standard(&self) -> Option<[f64; 3]> {
        let of = |id: CandidateId| self.members.get(&id).and_then(|m| m.predicted);
        let fit = self.members.values().filter(|m| m.is_fit());
        let fastest =
            fit.min_by(|a, b| a.expected_us().total_cmp(&b.expected_us())).and_then(|m| m.predicted);
        fastest.or_else(|| self.baseline.and_then(of))
    }

    /// A short timing that was taken in turns with the baseline's, as time to rank by: the baseline's own time over the ratio, so that
    /// what slowed both is no candidate's fault. Whoever reads the ledger ranks by the same.
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

    fn after_timing(&mut self, id: CandidateId, time: Time, kind: TimeKind, insights: &mut Insights) {
        let Some(member) = self.members.get_mut(&id) else { return };
        (member.time, member.kind, member.place) = (Some(time), Some(kind), Place::Timed);
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
                    insights.learn(family(&member.candidate), &member.changes, parent_us, time.us);
                }
                self.credit(id, id);
            }
        }
    }

    fn parent_us(&self, member: &Member) -> Option<f64> {
        Some(self.members.get(member.parents.first()?)?.time?.us)
    }

    /// The search made what a blind draw had made before: the time and the niche of that one are its own, too. The first such repeat
    /// alone is credited: a kernel stands in the archive once.
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

    /// Those of the search's own that turned out to be this kernel again.
    fn repeats_of(&self, first: CandidateId) -> Vec<CandidateId> {
        let own = self.members.values().filter(|m| m.arm == Arm::Evolution && m.same_as.is_some());
        own.filter(|m| m.rejection.is_some() && self.origin(m).id == first).map(|m| m.id).collect()
    }

    /// The kernel that a candidate repeats, or itself. One may repeat a plan whose kernel was found to be another's.
    fn origin<'a>(&'a self, member: &'a Member) -> &'a Member {
        let mut first = member;
        while let Some(earlier) = first.same_as.and_then(|id| self.members.get(&id)) {
            first = earlier;
        }
        first
    }

    /// A kernel with a time joins the archive, and whoever made it earns for it.
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
        // Below the baseline everything is better than nothing; a new best must beat that, too.
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

    /// The first `count` candidates of an arm, in order, each as the kernel that it repeats.
    fn first_of(&self, arm: Arm, count: usize) -> impl Iterator<Item = &Member> {
        self.members.values().filter(move |m| m.arm == arm).take(count).map(|m| self.origin(m))
    }

    /// The fastest of the first `count` candidates of an arm, repeated kernels counted as those that they repeat.
    pub fn best_of(&self, arm: Arm, count: usize) -> Option<&Member> {
        let timed = self.first_of(arm, count).filter(|m| m.is_timed());
        timed.min_by(|a, b| a.expected_us().total_cmp(&b.expected_us()))
    }

    /// As many candidates as each arm has: what a fair comparison of the two looks at.
    pub fn equal_budget(&self) -> usize {
        self.made(Arm::Evolution).min(self.made(Arm::Random))
    }
}

/// A problem as a key.
pub fn key(problem: &Shape) -> String {
    serde_json::json!(problem).to_string()
}

#[cfg(test)]
mod tests;
