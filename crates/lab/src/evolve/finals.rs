//! The end of a run: the fastest few, the best of each arm and the control race against the baseline; who won is raced once more, then on
//! problems that the search never saw, and against what ships. Where there are seconds, no race is begun that they do not suffice for.

use kernels::select::Shape;
use serde_json::{Value, json};

use super::cascade;
use super::engine::{Evolution, EvolveError, words};
use super::population::{Member, Place, Population, key};
use super::rank;
use super::space::Domain;
use super::task::{Stage, Task};
use crate::bench::SpeedVerdict;
use crate::ledger::{Against, Arm, CandidateId, Rejection};

/// Of a budget of seconds, the most that is kept for the end.
const MOST: f64 = 0.5;
/// The seconds of a race with its uploads, its check on the device and its compilation, over the race's own.
const AROUND: f64 = 1.5;

/// Seconds that are kept for the end.
pub fn reserve(evolution: &Evolution) -> f64 {
    (0..evolution.searches.len()).map(|case| share(evolution, case)).sum()
}

/// Seconds of a case's races, all of them.
fn wanted(evolution: &Evolution, case: usize) -> f64 {
    // The best of both arms, and the control.
    let first = most_finalists(evolution.config.finalists) + 3;
    (first + closing(evolution, case)) as f64 * cost(evolution, case)
}

/// Races of who won: once more, on the problems that are held out, and against what ships.
fn closing(evolution: &Evolution, case: usize) -> usize {
    let case = &evolution.config.cases[case];
    1 + case.held_out.len() + usize::from(case.shipped.is_some())
}

/// Seconds of a race: as many as it is to take, or as the longest evaluation of the problem on the device took.
fn cost(evolution: &Evolution, case: usize) -> f64 {
    (evolution.config.timing[1] * AROUND).max(evolution.searches[case].longest)
}

/// Seconds of the end that are a case's own: all that it wants, or its part of what can be kept.
fn share(evolution: &Evolution, case: usize) -> f64 {
    let all: f64 = (0..evolution.searches.len()).map(|case| wanted(evolution, case)).sum();
    let kept = MOST * evolution.config.seconds.unwrap_or(f64::INFINITY);
    wanted(evolution, case) * (kept / all).min(1.0)
}

/// Whether so many races more of a case come to an end in time: before the others' part begins.
fn in_time(evolution: &Evolution, case: usize, races: usize) -> bool {
    let Some(seconds) = evolution.config.seconds else { return true };
    let of_others: f64 = (case + 1..evolution.searches.len()).map(|other| share(evolution, other)).sum();
    evolution.elapsed + races as f64 * cost(evolution, case) <= seconds - of_others
}

/// The next race; `None` when all are over, or there is no time for another.
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
        // Nobody won so far: what was kept for who does is for those who have not raced. One of them may win yet, and what ships races once.
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

/// The next race of those who race at all. Beyond the first two, only what leaves time for so many races of who won.
fn first_race(evolution: &Evolution, case: usize, kept: usize) -> Option<Task> {
    let population = &evolution.searches[case].population;
    let racers = racers(population, evolution.config.finalists);
    let open = |id: &CandidateId| !evolution.was_told(*id, Stage::Race, &population.problem);
    let (rank, id) = racers.into_iter().enumerate().find(|(_, id)| open(id))?;
    let kept = if rank < 2 { 0 } else { kept };
    if in_time(evolution, case, 1 + kept) { evolution.task(case, id, Stage::Race) } else { None }
}

/// Who races against the baseline, in order: the fastest and the control, without which no race is worth anything; the best of each arm;
/// the others.
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
#[derive(Clone, Debug, PartialEq)]
pub enum HeldOut {
    /// It was not tried yet.
    Open,
    /// It computes no such problem; nobody would choose it there.
    NotComputed,
    /// It was wrong there.
    Wrong,
    /// Its race broke down, for this reason: nothing is known of it there.
    Failed(String),
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
        Some(Ok(against)) => HeldOut::Raced(*against),
        Some(Err(reason)) if matches!(reason.as_str(), "wrong" | "fault") => HeldOut::Wrong,
        Some(Err(reason)) => HeldOut::Failed(reason.clone()),
        None if *shape == member.problem => HeldOut::Open,
        None if is_foreign || domain.check(&member.candidate).is_err() => HeldOut::NotComputed,
        None => HeldOut::Open,
    }
}

/// What speaks against promoting a victor, as far as it was tried.
#[derive(Clone, Debug, PartialEq)]
enum Objection {
    /// The baseline did not come out even with itself.
    Control,
    /// It did not win its second race.
    Second(HeldOut),
    /// It lost on a held-out problem, was wrong there, or could not be tried.
    HeldOut(Shape, HeldOut),
    /// What ships is faster, or could not race.
    Shipped(Option<Against>),
}

/// How it stands with a promotion.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Promotion {
    /// Nobody beat the baseline.
    Nobody,
    /// Who is promoted.
    Granted(CandidateId),
    /// The best who beat the baseline, and why it is not promoted.
    Refused(CandidateId, String),
}

/// The objection that a victor's races on problems, its own and those held out, give; `None` where there is none so far.
fn objection(evolution: &Evolution, case: usize, member: &Member) -> Option<Objection> {
    match fate(evolution, member, &member.problem) {
        HeldOut::Open => {}
        HeldOut::Raced(against) if against.verdict == SpeedVerdict::Faster => {}
        lost => return Some(Objection::Second(lost)),
    }
    let mut held = evolution.config.cases[case].held_out.iter().map(|(shape, _)| shape);
    held.find_map(|shape| match fate(evolution, member, shape) {
        HeldOut::Raced(against) if against.verdict != SpeedVerdict::Slower => None,
        HeldOut::Open | HeldOut::NotComputed => None,
        lost => Some(Objection::HeldOut(*shape, lost)),
    })
}

/// The first victor that nothing speaks against so far: the fastest of several races is the luckiest of them, and only a race that luck did
/// not choose says how fast it is. Where the baseline does not come out even with itself there is none.
fn contender(evolution: &Evolution, case: usize) -> Option<&Member> {
    let population = &evolution.searches[case].population;
    is_sound(population).filter(|sound| *sound)?;
    victors(population).into_iter().find(|m| objection(evolution, case, m).is_none())
}

/// Who is promoted: whom nothing speaks against once all its races are run, the last of them against what ships.
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
        let race =
            shipped(population).and_then(|shipped| shipped.race).filter(|race| race.incumbent == member.id);
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
            Objection::HeldOut(shape, fate) => {
                format!("its race on the held-out problem {} was {}", words(&shape), lost(fate))
            }
            Objection::Shipped(Some(Against { ratio, low, high, .. })) => {
                format!("what ships is {ratio:.3}× as fast ({low:.3} to {high:.3})")
            }
            Objection::Shipped(None) => "what ships could not be raced against it".to_owned(),
        }
    }
}

/// Races of a victor that were not run, in words.
fn open_races(evolution: &Evolution, case: usize, member: &Member) -> Vec<String> {
    let mut open = Vec::new();
    if fate(evolution, member, &member.problem) == HeldOut::Open {
        open.push("in a second race against the baseline".to_owned());
    }
    for (shape, _) in &evolution.config.cases[case].held_out {
        if fate(evolution, member, shape) == HeldOut::Open {
            open.push(format!("on the held-out problem {}", words(shape)));
        }
    }
    let population = &evolution.searches[case].population;
    let is_told = |m: &Member| evolution.was_told(m.id, Stage::Race, &population.problem);
    if evolution.config.cases[case].shipped.is_some() && !shipped(population).is_some_and(is_told) {
        open.push("against what ships".to_owned());
    }
    open
}

/// Races at the end for which there was no time, in words.
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

/// Those that were to race and did not come to it.
fn unraced_racers(evolution: &Evolution, case: usize) -> Vec<CandidateId> {
    let population = &evolution.searches[case].population;
    let mut racers = racers(population, evolution.config.finalists);
    racers.retain(|id| !evolution.was_told(*id, Stage::Race, &population.problem));
    racers
}

/// Whether the baseline came out even with itself; `None` where it did not race.
pub(super) fn is_sound(population: &Population) -> Option<bool> {
    let control = population.members.get(&population.control?)?;
    Some(control.race?.verdict == SpeedVerdict::Undecided)
}

/// The victor's next race: once more against the baseline, then on other problems against what is chosen there.
fn held_out(evolution: &mut Evolution, case: usize) -> Result<Option<Task>, EvolveError> {
    let Some(id) = contender(evolution, case).map(|m| m.id) else { return Ok(None) };
    let own = evolution.searches[case].population.problem;
    if !evolution.was_told(id, Stage::HeldOut, &own) {
        return Ok(evolution.task(case, id, Stage::HeldOut));
    }
    let held = evolution.config.cases[case].held_out.clone();
    for (shape, theirs) in held {
        let Some(member) = evolution.searches[case].population.members.get(&id) else { continue };
        let is_open = fate(evolution, member, &shape) == HeldOut::Open;
        if !is_open || evolution.was_told(id, Stage::HeldOut, &shape) {
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

/// What ships against who would be promoted, or else against the best, where the run began elsewhere.
fn against_shipped(evolution: &mut Evolution, case: usize) -> Result<Option<Task>, EvolveError> {
    let Some(plan) = evolution.config.cases[case].shipped.clone() else { return Ok(None) };
    let population = &evolution.searches[case].population;
    let problem = population.problem;
    let known = shipped(population).map(|m| m.id);
    if known.is_some_and(|id| evolution.was_told(id, Stage::Race, &problem)) {
        return Ok(None);
    }
    let opponent = contender(evolution, case).or_else(|| rank::best(population));
    let Some(opponent) = opponent.map(|m| (m.id, m.candidate.clone())) else { return Ok(None) };
    let id = match known {
        Some(id) => id,
        None => evolution.add_reference(case, problem, plan, SHIPPED)?,
    };
    Ok(evolution.task(case, id, Stage::Race).map(|task| Task { incumbent: Some(opponent), ..task }))
}

/// What ships, where it came to a race.
pub(super) fn shipped(population: &Population) -> Option<&Member> {
    population.members.values().find(|m| m.operator == SHIPPED)
}

/// The operator of what ships, where the run began elsewhere.
const SHIPPED: &str = "shipped";

/// The figures behind a promotion, or behind its refusal.
pub(super) fn evidence(evolution: &Evolution, case: usize, member: &Member) -> Value {
    let held = evolution.config.cases[case].held_out.iter();
    let held: Vec<Value> = held.map(|(shape, _)| told(shape, fate(evolution, member, shape))).collect();
    let shipped = shipped(&evolution.searches[case].population).and_then(|shipped| shipped.race);
    json!({
        "race": rank::race(member), "first_race": member.race, "us": member.time.map(|time| time.us), "kind": member.kind,
        "held_out": held, "shipped": shipped.filter(|race| race.incumbent == member.id),
    })
}

/// A held-out problem's end in JSON.
pub(super) fn told(shape: &Shape, fate: HeldOut) -> Value {
    let (end, against, reason) = match fate {
        HeldOut::Open => ("not_tried", None, None),
        HeldOut::NotComputed => ("not_computed", None, None),
        HeldOut::Wrong => ("wrong", None, None),
        HeldOut::Failed(reason) => ("failed", None, Some(reason)),
        HeldOut::Raced(against) => ("raced", Some(against), None),
    };
    json!({ "problem": shape, "end": end, "race": against, "reason": reason })
}

/// The ends of those that came to none on their way: not among the fastest, or cut short by the budget.
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
    let cut = population.members.values().filter(|m| m.counts() && (m.is_open() || m.place == Place::Held));
    timed.chain(cut.map(|m| (m.id, cascade::not_reached(m.place)))).collect()
}
