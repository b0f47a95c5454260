//! The end of a run: the fastest few, the best blind draw and the control race against the baseline, and who won is tried on
//! problems that the search never saw.

use kernels::select::Shape;
use serde_json::{Value, json};

use super::cascade;
use super::config::Config;
use super::engine::{Evolution, EvolveError};
use super::population::{Member, Place, Population, key};
use super::space::Domain;
use super::task::{Stage, Task};
use crate::bench::SpeedVerdict;
use crate::ledger::{Against, Arm, CandidateId, Rejection};

/// Of a budget of seconds, the most that is kept for the end.
const MOST: f64 = 0.3;
/// A race's seconds with what is around it: uploads, proofs on the device, compilation.
const AROUND: f64 = 1.5;

/// Seconds that are kept for the end.
pub fn reserve(config: &Config) -> f64 {
    // The fastest with those beside them, the best of both arms, the control, the winner once more, and what ships.
    let races = |held_out: usize| most_finalists(config.finalists) + 5 + held_out;
    let count: usize = config.cases.iter().map(|case| races(case.held_out.len())).sum();
    let wanted = count as f64 * config.timing[1] * AROUND;
    wanted.min(MOST * config.seconds.unwrap_or(f64::INFINITY))
}

/// The next race; `None` when all are over.
pub(super) fn next(evolution: &mut Evolution) -> Result<Option<Task>, EvolveError> {
    for case in 0..evolution.searches.len() {
        let problem = evolution.searches[case].population.problem;
        let racers = racers(&evolution.searches[case].population, evolution.config.finalists);
        if let Some(id) = racers.into_iter().find(|id| !evolution.was_told(*id, Stage::Race, &problem)) {
            return Ok(evolution.task(case, id, Stage::Race));
        }
        if let Some(task) = held_out(evolution, case)? {
            return Ok(Some(task));
        }
        if let Some(task) = against_shipped(evolution, case)? {
            return Ok(Some(task));
        }
    }
    Ok(None)
}

/// Who races against the baseline.
fn racers(population: &Population, finalists: usize) -> Vec<CandidateId> {
    let mut racers = fastest(population, finalists);
    let equal = population.equal_budget();
    let beside = [Arm::Random, Arm::Evolution].map(|arm| population.best_of(arm, equal).map(|m| m.id));
    let control = population.control.filter(|id| population.members.get(id).is_some_and(Member::is_timed));
    for id in beside.into_iter().flatten().chain(control) {
        if !racers.contains(&id) && Some(id) != population.baseline {
            racers.push(id);
        }
    }
    racers
}

/// Candidates that race at most, where so many are to race and others cannot be told from the last of them.
const fn most_finalists(finalists: usize) -> usize {
    2 * finalists
}

/// The fastest few by their short timings, whoever made them, and those whose intervals overlap the last one's.
fn fastest(population: &Population, count: usize) -> Vec<CandidateId> {
    let mut all: Vec<&Member> = population.members.values().filter(|m| m.counts() && m.is_timed()).collect();
    all.sort_by(|a, b| a.expected_us().total_cmp(&b.expected_us()).then(a.id.cmp(&b.id)));
    let last = count.checked_sub(1).and_then(|last| all.get(last)?.time);
    let overlaps = |m: &Member| m.time.zip(last).is_some_and(|(time, last)| time.low <= last.high);
    let among = all.iter().enumerate().filter(|(rank, m)| *rank < count || overlaps(m));
    among.take(most_finalists(count)).map(|(_, m)| m.id).collect()
}

/// Those that beat the baseline, the best first.
fn victors(population: &Population) -> Vec<&Member> {
    let faster = |m: &&Member| m.counts() && m.race.is_some_and(|race| race.verdict == SpeedVerdict::Faster);
    let mut all: Vec<&Member> = population.members.values().filter(faster).collect();
    let ratio = |m: &Member| m.race.map_or(0.0, |race| race.ratio);
    all.sort_by(|a, b| ratio(b).total_cmp(&ratio(a)));
    all
}

/// How a victor did on a held-out problem.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HeldOut {
    /// It was not tried yet.
    Open,
    /// It computes no such problem; nobody would choose it there.
    NotComputed,
    /// It was wrong there.
    Wrong,
    /// It raced.
    Raced(Against),
}

/// How a candidate did on a held-out problem.
pub(super) fn fate(evolution: &Evolution, member: &Member, shape: &Shape) -> HeldOut {
    let domain = match evolution.config.arch {
        Some(arch) => Domain::Gpu(shape.problem(), arch),
        None => Domain::Cpu(shape.problem()),
    };
    let is_foreign = matches!(member.candidate, super::Candidate::Kernel(_));
    match member.held_out.get(&key(shape)) {
        Some(Some(against)) => HeldOut::Raced(*against),
        Some(None) => HeldOut::Wrong,
        None if *shape == member.problem => HeldOut::Open,
        None if is_foreign || domain.check(&member.candidate).is_err() => HeldOut::NotComputed,
        None => HeldOut::Open,
    }
}

fn fails(fate: HeldOut) -> bool {
    match fate {
        HeldOut::Raced(against) => against.verdict == SpeedVerdict::Slower,
        HeldOut::Wrong => true,
        HeldOut::Open | HeldOut::NotComputed => false,
    }
}

/// The first victor that loses on no held-out problem and wins its second race, too: the fastest of several races is the luckiest of
/// them, and only a race that luck did not choose says how fast it is. Where the baseline does not come out even with itself nobody wins.
pub(super) fn winner(evolution: &Evolution, case: usize) -> Option<CandidateId> {
    let population = &evolution.searches[case].population;
    if !is_sound(population)? {
        return None;
    }
    let held = &evolution.config.cases[case].held_out;
    let wins = |m: &&&Member| match fate(evolution, m, &population.problem) {
        HeldOut::Open => true,
        HeldOut::Raced(against) => against.verdict == SpeedVerdict::Faster,
        HeldOut::Wrong | HeldOut::NotComputed => false,
    };
    let holds = |m: &&&Member| held.iter().all(|(shape, _)| !fails(fate(evolution, m, shape)));
    victors(population).iter().filter(wins).find(holds).map(|m| m.id)
}

/// Whether the baseline came out even with itself; `None` where it did not race.
pub(super) fn is_sound(population: &Population) -> Option<bool> {
    let control = population.members.get(&population.control?)?;
    Some(control.race?.verdict == SpeedVerdict::Undecided)
}

/// The victor's next race: once more against the baseline, then on other problems against what is chosen there.
fn held_out(evolution: &mut Evolution, case: usize) -> Result<Option<Task>, EvolveError> {
    let Some(id) = winner(evolution, case) else { return Ok(None) };
    let own = evolution.searches[case].population.problem;
    if !evolution.was_told(id, Stage::HeldOut, &own) {
        return Ok(evolution.task(case, id, Stage::HeldOut));
    }
    let held = evolution.config.cases[case].held_out.clone();
    for (shape, theirs) in held {
        let Some(member) = evolution.searches[case].population.members.get(&id) else { continue };
        if fate(evolution, member, &shape) != HeldOut::Open {
            continue;
        }
        // Another case's is as good.
        let mut members = evolution.searches.iter().flat_map(|search| search.population.members.values());
        let known = members.find(|m| m.arm == Arm::Baseline && m.problem == shape && m.candidate == theirs);
        let incumbent = match known.map(|m| m.id) {
            Some(known) => known,
            None => evolution.add_reference(case, shape, theirs.clone(), "held_out")?,
        };
        let task = evolution.task(case, id, Stage::HeldOut);
        return Ok(task.map(|task| Task { problem: shape, incumbent: Some((incumbent, theirs)), ..task }));
    }
    Ok(None)
}

/// What ships against the best, where the run began elsewhere.
fn against_shipped(evolution: &mut Evolution, case: usize) -> Result<Option<Task>, EvolveError> {
    let Some(shipped) = evolution.config.cases[case].shipped.clone() else { return Ok(None) };
    let population = &evolution.searches[case].population;
    let Some(best) = best(population).map(|m| (m.id, m.candidate.clone())) else { return Ok(None) };
    let known = population.members.values().find(|m| m.operator == SHIPPED).map(|m| m.id);
    let problem = population.problem;
    let id = match known {
        Some(id) => id,
        None => evolution.add_reference(case, problem, shipped, SHIPPED)?,
    };
    if evolution.was_told(id, Stage::Race, &problem) {
        return Ok(None);
    }
    Ok(evolution.task(case, id, Stage::Race).map(|task| Task { incumbent: Some(best), ..task }))
}

/// The operator of what ships, where the run began elsewhere.
pub const SHIPPED: &str = "shipped";

/// Who did best: by the races, and where nobody raced yet by the short timings.
pub fn best(population: &Population) -> Option<&Member> {
    let raced = population.members.values().filter(|m| m.counts() && m.is_timed() && m.race.is_some());
    let ratio = |m: &Member| m.race.map_or(0.0, |race| race.ratio);
    // Of equals the first.
    raced.max_by(|a, b| ratio(a).total_cmp(&ratio(b)).then(b.id.cmp(&a.id))).or_else(|| {
        let timed = population.members.values().filter(|m| m.counts() && m.is_timed());
        timed.min_by(|a, b| a.expected_us().total_cmp(&b.expected_us()))
    })
}

/// The figures behind a promotion.
pub(super) fn evidence(evolution: &Evolution, case: usize, winner: CandidateId) -> Value {
    let population = &evolution.searches[case].population;
    let Some(member) = population.members.get(&winner) else { return Value::Null };
    let held = evolution.config.cases[case].held_out.iter();
    let held: Vec<Value> = held.map(|(shape, _)| told(shape, fate(evolution, member, shape))).collect();
    json!({ "race": member.confirmed(), "first_race": member.race, "us": member.time.map(|time| time.us), "kind": member.kind, "held_out": held })
}

/// A held-out problem's end in JSON.
pub(super) fn told(shape: &Shape, fate: HeldOut) -> Value {
    let (end, against) = match fate {
        HeldOut::Open => ("not_tried", None),
        HeldOut::NotComputed => ("not_computed", None),
        HeldOut::Wrong => ("wrong", None),
        HeldOut::Raced(against) => ("raced", Some(against)),
    };
    json!({ "problem": shape, "end": end, "race": against })
}

/// Those that were timed and are not among the fastest, with that as their end, and those that the budget cut short.
pub(super) fn unraced(population: &Population) -> Vec<(CandidateId, Rejection)> {
    let best = best(population).map_or(f64::NAN, Member::expected_us);
    let beaten = population.members.values().filter(|m| m.counts() && m.is_fit() && m.race.is_none());
    let beaten = beaten.map(|m| (m.id, cascade::not_among_the_fastest(m.expected_us(), best)));
    let late = population.members.values().filter(|m| m.counts() && (m.is_open() || m.place == Place::Held));
    beaten.chain(late.map(|m| (m.id, cascade::not_reached(m.place)))).collect()
}
