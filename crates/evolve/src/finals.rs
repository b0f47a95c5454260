//! The races at the end of a run. The fastest few candidates, the best of each arm and the control race
//! against the baseline. The winner then runs a second race, races on held-out problems, and a race against
//! the shipped plan. With a time limit, a race starts only if the remaining time suffices.

use kernels::select::Shape;
use serde::Serialize;

use super::cascade;
use super::engine::Evolution;
use super::error::EvolveError;
use super::member::{CandidateState, Member, key};
use super::population::Population;
use super::rank;
use super::report::HeldOutEnd;
use super::space::{self, Domain};
use super::task::{Stage, Task};
use bench::SpeedVerdict;
use ledger::{Against, Arm, CandidateId, Operator, Reason, Rejection, TimeKind};

/// Maximum fraction of the time budget that is reserved for the end.
const MOST: f64 = 0.5;
/// Factor on a race's duration for uploads, checks on the device and compilation.
const AROUND: f64 = 1.5;

/// Seconds reserved for the end.
pub fn reserve(evolution: &Evolution) -> f64 {
    (0..evolution.searches.len()).map(|case| share(evolution, case)).sum()
}

/// Seconds that all races of a case need.
fn wanted(evolution: &Evolution, case: usize) -> f64 {
    // The best of both arms, and the control.
    let first = most_finalists(evolution.config.finalists) + 3;
    (first + closing(evolution, case)) as f64 * cost(evolution, case)
}

/// Number of the winner's further races: the second race, the held-out problems, and the shipped plan.
fn closing(evolution: &Evolution, case: usize) -> usize {
    let case = &evolution.config.cases[case];
    1 + case.held_out.len() + usize::from(case.shipped.is_some())
}

/// Seconds of a race: the planned duration, or the longest evaluation of the problem on the device so far.
fn cost(evolution: &Evolution, case: usize) -> f64 {
    (evolution.config.timing[1] * AROUND).max(evolution.searches[case].longest)
}

/// The part of the reserved time that a case gets: all that it needs, or its proportion of the maximum.
fn share(evolution: &Evolution, case: usize) -> f64 {
    let all: f64 = (0..evolution.searches.len()).map(|case| wanted(evolution, case)).sum();
    let kept = MOST * evolution.config.seconds.unwrap_or(f64::INFINITY);
    wanted(evolution, case) * (kept / all).min(1.0)
}

/// Whether `races` more races of a case fit before the reserved time of the other cases begins.
fn in_time(evolution: &Evolution, case: usize, races: usize) -> bool {
    let Some(seconds) = evolution.config.seconds else { return true };
    let of_others: f64 = (case + 1..evolution.searches.len()).map(|other| share(evolution, other)).sum();
    evolution.elapsed + races as f64 * cost(evolution, case) <= seconds - of_others
}

/// The next race; `None` when all are done, or the time does not suffice for another.
pub(super) fn next(evolution: &mut Evolution) -> Result<Option<Task>, EvolveError> {
    for case in 0..evolution.searches.len() {
        if let Some(task) = first_race(evolution, case, closing(evolution, case)) {
            return Ok(Some(task));
        }
        if !in_time(evolution, case, 1) {
            continue;
        }
        if let Some(task) = held_out(evolution, case)? {
            return Ok(Some(task));
        }
        // While there is no winner, the time reserved for the winner's races goes to candidates that have not
        // raced. One of them may still win, and the shipped plan races only once.
        if contender(evolution, case).is_none()
            && let Some(task) = first_race(evolution, case, 0)
        {
            return Ok(Some(task));
        }
        if let Some(task) = against_shipped(evolution, case)? {
            return Ok(Some(task));
        }
    }
    Ok(None)
}

/// The next first race. After the first two, a race starts only if it leaves time for `kept` races of the
/// winner.
fn first_race(evolution: &Evolution, case: usize, kept: usize) -> Option<Task> {
    let population = &evolution.searches[case].population;
    let racers = racers(population, evolution.config.finalists);
    let open = |id: &CandidateId| !evolution.was_reported(*id, Stage::Race, &population.problem);
    let (rank, id) = racers.into_iter().enumerate().find(|(_, id)| open(id))?;
    let kept = if rank < 2 { 0 } else { kept };
    if in_time(evolution, case, 1 + kept) { evolution.task(case, id, Stage::Race) } else { None }
}

/// The racing candidates in order: the fastest and the control, which every race needs; the best of each arm;
/// then the others.
fn racers(population: &Population, finalists: usize) -> Vec<CandidateId> {
    let fastest = fastest(population, finalists);
    let control = population.control.filter(|id| population.members.get(id).is_some_and(Member::is_timed));
    let equal = population.equal_budget();
    let beside = [Arm::Random, Arm::Evolution].map(|arm| population.best_of(arm, equal).map(|m| m.id));
    let beside = beside.into_iter().flatten().filter(|id| Some(*id) != population.baseline);
    let mut racers = Vec::new();
    let (first, rest) = fastest.split_at(fastest.len().min(1));
    for id in first.iter().copied().chain(control).chain(beside).chain(rest.iter().copied()) {
        if !racers.contains(&id) {
            racers.push(id);
        }
    }
    racers
}

/// Maximum number of finalists if times of further candidates overlap with that of the last finalist.
const fn most_finalists(finalists: usize) -> usize {
    2 * finalists
}

/// The fastest candidates by their short timings, and those whose intervals overlap with the last one's.
fn fastest(population: &Population, count: usize) -> Vec<CandidateId> {
    let mut all: Vec<&Member> = population.members.values().filter(|m| m.counts() && m.is_timed()).collect();
    all.sort_by(|a, b| a.expected_us().total_cmp(&b.expected_us()).then(a.id.cmp(&b.id)));
    let last = count.checked_sub(1).and_then(|last| all.get(last)?.time);
    let overlaps = |m: &Member| m.time.zip(last).is_some_and(|(time, last)| time.low <= last.high);
    let among = all.iter().enumerate().filter(|(rank, m)| *rank < count || overlaps(m));
    among.take(most_finalists(count)).map(|(_, m)| m.id).collect()
}

/// The candidates that beat the baseline, best first. Among candidates that the noise of the best one's race
/// does not distinguish from it, the one with the fewest changed genes comes first: a change without gain is
/// dropped.
fn victors(population: &Population) -> Vec<&Member> {
    let faster = |m: &&Member| m.counts() && m.race.is_some_and(|race| race.verdict == SpeedVerdict::Faster);
    let mut all: Vec<&Member> = population.members.values().filter(faster).collect();
    let ratio = |m: &Member| m.race.map_or(0.0, |race| race.ratio);
    all.sort_by(|a, b| ratio(b).total_cmp(&ratio(a)));
    let Some(floor) = all.first().and_then(|best| Some(best.race?.ratio / best.race?.noise)) else {
        return all;
    };
    let equal = all.iter().take_while(|m| ratio(m) >= floor).count();
    all[..equal].sort_by_key(|m| changed(population, m));
    all
}

/// The number of genes in which a candidate differs from the baseline. A whole kernel counts as the largest
/// number.
fn changed(population: &Population, member: &Member) -> usize {
    let baseline = population.baseline.and_then(|id| population.members.get(&id));
    let changes = baseline.map(|baseline| space::changes(&baseline.candidate, &member.candidate));
    changes.and_then(|changes| changes.as_object().map(serde_json::Map::len)).unwrap_or(usize::MAX)
}

/// The result of a winner on a held-out problem.
#[derive(Clone, Debug, PartialEq)]
pub enum HeldOut {
    Open,
    /// The plan does not support the problem, so it would not be chosen there.
    NotComputed,
    /// The outputs were wrong.
    Wrong,
    /// The race failed for this reason, so the result is unknown.
    Failed(Reason),
    Raced(Against),
}

/// The result of a candidate on a held-out problem.
pub(super) fn fate(evolution: &Evolution, member: &Member, shape: &Shape) -> HeldOut {
    let domain = match evolution.config.arch {
        Some(arch) => Domain::Gpu(shape.problem(), arch),
        None => Domain::Cpu(shape.problem()),
    };
    let is_foreign = matches!(member.candidate, super::Candidate::Kernel(_));
    match member.held_out.get(&key(shape)) {
        Some(Ok(against)) => HeldOut::Raced(*against),
        Some(Err(Reason::Wrong | Reason::Fault)) => HeldOut::Wrong,
        Some(Err(reason)) => HeldOut::Failed(*reason),
        None if *shape == member.problem => HeldOut::Open,
        None if is_foreign || domain.check(&member.candidate).is_err() => HeldOut::NotComputed,
        None => HeldOut::Open,
    }
}

/// A reason against promoting a winner, given its races so far.
#[derive(Clone, Debug, PartialEq)]
enum Objection {
    /// The baseline differs from itself in the A/A control.
    Control,
    /// The candidate did not win its second race.
    Second(HeldOut),
    /// The last race's ratio is below the noise floor of the run's races.
    Noise { ratio: f64, floor: f64 },
    /// The candidate lost on a held-out problem, was wrong there, or could not be tried.
    HeldOut(Shape, HeldOut),
    /// The shipped plan is faster, or could not race.
    Shipped(Option<Against>),
}

/// The state of a promotion.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Promotion {
    /// No candidate beat the baseline.
    Nobody,
    Granted(CandidateId),
    /// The best candidate that beat the baseline, and why it is not promoted.
    Refused(CandidateId, String),
}

/// The objection from a winner's races on its own and on held-out problems; `None` while there is none.
fn objection(evolution: &Evolution, case: usize, member: &Member) -> Option<Objection> {
    match fate(evolution, member, &member.problem) {
        HeldOut::Open => {}
        HeldOut::Raced(against) if against.verdict == SpeedVerdict::Faster => {}
        lost => return Some(Objection::Second(lost)),
    }
    // A race knows only its own noise.
    let floor = evolution.searches[case].population.noise_floor();
    if let Some((race, floor)) = rank::race(member).zip(floor)
        && race.ratio < floor
    {
        return Some(Objection::Noise { ratio: race.ratio, floor });
    }
    let mut held = evolution.config.cases[case].held_out.iter().map(|(shape, _)| shape);
    held.find_map(|shape| match fate(evolution, member, shape) {
        HeldOut::Raced(against) if against.verdict != SpeedVerdict::Slower => None,
        HeldOut::Open | HeldOut::NotComputed => None,
        lost => Some(Objection::HeldOut(*shape, lost)),
    })
}

/// The first winner without an objection. The fastest of several races is subject to selection bias; only its
/// second race gives an unbiased ratio. There is no winner if the A/A control of the baseline fails.
fn contender(evolution: &Evolution, case: usize) -> Option<&Member> {
    let population = &evolution.searches[case].population;
    is_sound(population).filter(|sound| *sound)?;
    victors(population).into_iter().find(|m| objection(evolution, case, m).is_none())
}

/// The promotion: a winner without an objection after all its races, the last one against the shipped plan.
pub(super) fn promotion(evolution: &Evolution, case: usize) -> Promotion {
    let population = &evolution.searches[case].population;
    let Some(first) = victors(population).first().copied() else { return Promotion::Nobody };
    let refused = |member: &Member, why: String| Promotion::Refused(member.id, why);
    match is_sound(population) {
        None => {
            return refused(first, "the control did not race: there was no time, or it failed".to_owned());
        }
        Some(false) => return refused(first, Objection::Control.words()),
        Some(true) => {}
    }
    let Some(member) = contender(evolution, case) else {
        let why = objection(evolution, case, first).map_or(String::new(), Objection::words);
        return refused(first, why);
    };
    if let Some(race) = open_races(evolution, case, member).first() {
        return refused(member, format!("it was not tried {race}: there was no time"));
    }
    if evolution.config.cases[case].shipped.is_some() {
        let race = shipped_against(population, member.id);
        if race.is_none_or(|race| race.verdict == SpeedVerdict::Faster) {
            return refused(member, Objection::Shipped(race).words());
        }
    }
    Promotion::Granted(member.id)
}

impl Objection {
    fn words(self) -> String {
        let lost = |fate: HeldOut| match fate {
            HeldOut::Raced(Against { ratio, low, high, verdict, .. }) => {
                format!("{} at {ratio:.3}× ({low:.3} to {high:.3})", verdict.name())
            }
            HeldOut::Wrong => "a failure".to_owned(),
            HeldOut::Failed(reason) => format!("not run to its end ({reason})"),
            HeldOut::Open | HeldOut::NotComputed => "not run".to_owned(),
        };
        match self {
            Objection::Control => {
                "the control, the baseline against itself, did not come out even".to_owned()
            }
            Objection::Second(fate) => format!("its second race against the baseline was {}", lost(fate)),
            Objection::Noise { ratio, floor } => {
                format!("it is {ratio:.3}× as fast, which is below the run's noise floor of {floor:.3}×")
            }
            Objection::HeldOut(shape, fate) => {
                format!("its race on the held-out problem {} was {}", shape, lost(fate))
            }
            Objection::Shipped(Some(Against { ratio, low, high, .. })) => {
                format!("the shipped plan is {ratio:.3}× as fast ({low:.3} to {high:.3})")
            }
            Objection::Shipped(None) => "the shipped plan could not be raced against it".to_owned(),
        }
    }
}

/// The races of a winner that are still open, in words.
fn open_races(evolution: &Evolution, case: usize, member: &Member) -> Vec<String> {
    let mut open = Vec::new();
    if fate(evolution, member, &member.problem) == HeldOut::Open {
        open.push("in a second race against the baseline".to_owned());
    }
    for (shape, _) in &evolution.config.cases[case].held_out {
        if fate(evolution, member, shape) == HeldOut::Open {
            open.push(format!("on the held-out problem {shape}"));
        }
    }
    let population = &evolution.searches[case].population;
    let is_told = |m: &Member| evolution.was_reported(m.id, Stage::Race, &population.problem);
    if evolution.config.cases[case].shipped.is_some() && !shipped(population).is_some_and(is_told) {
        open.push("against the shipped plan".to_owned());
    }
    open
}

/// The races at the end that were left out for lack of time, in words.
pub(super) fn skipped(evolution: &Evolution, case: usize) -> Vec<String> {
    let late = unraced_racers(evolution, case);
    let mut skipped: Vec<String> =
        late.into_iter().map(|id| format!("candidate {} against the baseline", id.0)).collect();
    if let Some(member) = contender(evolution, case) {
        let open = open_races(evolution, case, member);
        skipped.extend(open.into_iter().map(|race| format!("candidate {} {race}", member.id.0)));
    }
    skipped
}

/// Finalists that did not race.
fn unraced_racers(evolution: &Evolution, case: usize) -> Vec<CandidateId> {
    let population = &evolution.searches[case].population;
    let mut racers = racers(population, evolution.config.finalists);
    racers.retain(|id| !evolution.was_reported(*id, Stage::Race, &population.problem));
    racers
}

/// Whether the A/A control of the baseline is undecided, as it must be; `None` if it did not race.
pub(super) fn is_sound(population: &Population) -> Option<bool> {
    let control = population.members.get(&population.control?)?;
    Some(control.race?.verdict == SpeedVerdict::Undecided)
}

/// The winner's next race: once more against the baseline, then on held-out problems against the plan chosen
/// there.
fn held_out(evolution: &mut Evolution, case: usize) -> Result<Option<Task>, EvolveError> {
    let Some(id) = contender(evolution, case).map(|m| m.id) else { return Ok(None) };
    let own = evolution.searches[case].population.problem;
    if !evolution.was_reported(id, Stage::HeldOut, &own) {
        return Ok(evolution.task(case, id, Stage::HeldOut));
    }
    let held = evolution.config.cases[case].held_out.clone();
    for (shape, theirs) in held {
        let Some(member) = evolution.searches[case].population.members.get(&id) else { continue };
        let is_open = fate(evolution, member, &shape) == HeldOut::Open;
        if !is_open || evolution.was_reported(id, Stage::HeldOut, &shape) {
            continue;
        }
        // The baseline of another case of this run can be used too.
        let mut members = evolution.searches.iter().flat_map(|search| search.population.members.values());
        let known = members.find(|m| m.arm == Arm::Baseline && m.problem == shape && m.candidate == theirs);
        let incumbent = match known.map(|m| m.id) {
            Some(known) => known,
            None => evolution.add_reference(case, shape, theirs.clone(), Operator::HeldOut)?,
        };
        let task = evolution.task(case, id, Stage::HeldOut);
        return Ok(task.map(|task| Task { problem: shape, incumbent: Some((incumbent, theirs)), ..task }));
    }
    Ok(None)
}

/// The race of the shipped plan against the candidate to promote or, without one, against the best candidate,
/// if the run started from another plan.
fn against_shipped(evolution: &mut Evolution, case: usize) -> Result<Option<Task>, EvolveError> {
    let Some(plan) = evolution.config.cases[case].shipped.clone() else { return Ok(None) };
    let population = &evolution.searches[case].population;
    let problem = population.problem;
    let known = shipped(population).map(|m| m.id);
    if known.is_some_and(|id| evolution.was_reported(id, Stage::Race, &problem)) {
        return Ok(None);
    }
    let opponent = contender(evolution, case).or_else(|| rank::best(population));
    let Some(opponent) = opponent.map(|m| (m.id, m.candidate.clone())) else { return Ok(None) };
    let id = match known {
        Some(id) => id,
        None => evolution.add_reference(case, problem, plan, Operator::Shipped)?,
    };
    Ok(evolution.task(case, id, Stage::Race).map(|task| Task { incumbent: Some(opponent), ..task }))
}

/// The shipped plan, if it was added for a race.
pub(super) fn shipped(population: &Population) -> Option<&Member> {
    population.members.values().find(|m| m.operator.operator == Operator::Shipped)
}

/// The race of the shipped plan against this candidate.
pub(super) fn shipped_against(population: &Population, candidate: CandidateId) -> Option<Against> {
    shipped(population)?.race.filter(|race| race.incumbent == candidate)
}

/// The figures behind a promotion or its refusal.
#[derive(Clone, Debug, Serialize)]
pub struct Evidence {
    /// The race that decides: the second race if there was one, else the first.
    pub race: Option<Against>,
    pub first_race: Option<Against>,
    pub us: Option<f64>,
    pub kind: Option<TimeKind>,
    pub held_out: Vec<HeldOutEnd>,
    /// The race of the shipped plan against this candidate.
    pub shipped: Option<Against>,
}

/// The figures behind a promotion or its refusal.
pub(super) fn evidence(evolution: &Evolution, case: usize, member: &Member) -> Evidence {
    let held = evolution.config.cases[case].held_out.iter();
    Evidence {
        race: rank::race(member),
        first_race: member.race,
        us: member.time.map(|time| time.us),
        kind: member.kind,
        held_out: held.map(|(shape, _)| HeldOutEnd::new(*shape, fate(evolution, member, shape))).collect(),
        shipped: shipped_against(&evolution.searches[case].population, member.id),
    }
}

/// Rejections of candidates that are still open: not among the fastest, or cut short by the budget.
pub(super) fn ends(evolution: &Evolution, case: usize) -> Vec<(CandidateId, Rejection)> {
    let population = &evolution.searches[case].population;
    let late = unraced_racers(evolution, case);
    let fastest = population.members.values().filter(|m| m.counts() && m.is_timed());
    let fastest = fastest.map(Member::expected_us).fold(f64::INFINITY, f64::min);
    let timed = population.members.values().filter(|m| m.counts() && m.is_fit() && m.race.is_none());
    let timed = timed.map(|m| match late.contains(&m.id) {
        true => (m.id, cascade::not_raced()),
        false => (m.id, cascade::not_among_the_fastest(m.expected_us(), fastest)),
    });
    let cut = population
        .members
        .values()
        .filter(|m| m.counts() && (m.is_open() || m.place == CandidateState::Held));
    timed.chain(cut.map(|m| (m.id, cascade::not_reached(m.place)))).collect()
}
