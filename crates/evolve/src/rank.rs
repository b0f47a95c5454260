//! The order of candidates. The ledger, its pages and `topk` use this order too (`standing.grade`,
//! `standing.us`).
//!
//! Confirmed winners come first: a second race removes the selection bias. Then come the other candidates
//! that raced, by the ratio of the last race against the incumbent, then candidates with only a short timing,
//! by that time. Baselines, controls and references are not ranked.

use std::cmp::Ordering;

use super::member::Member;
use super::population::Population;
use bench::SpeedVerdict;
use ledger::{Against, Arm, EQUAL};

/// The evidence behind a candidate's rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Grade {
    /// A short timing.
    Timed,
    /// A race.
    Raced,
    /// A won second race.
    Confirmed,
}

/// The race that decides the rank: the second if there is one. The second race is run because the first one
/// was won, so it is free of selection bias.
pub fn race(member: &Member) -> Option<Against> {
    member.confirmed().or(member.race)
}

fn grade(member: &Member) -> Grade {
    match (member.confirmed(), member.race) {
        (Some(second), _) if second.verdict == SpeedVerdict::Faster => Grade::Confirmed,
        (None, None) => Grade::Timed,
        _ => Grade::Raced,
    }
}

/// A candidate's time, µs: the baseline's time divided by the ratio of its race or, without a race, the short
/// timing.
pub fn us(population: &Population, member: &Member) -> Option<f64> {
    let raced = race(member).zip(population.baseline_us()).map(|(race, baseline)| baseline / race.ratio);
    raced.or(member.time.map(|time| time.us))
}

/// Better candidates come first; those with the same time are ordered by age.
fn better(a: &Member, b: &Member) -> Ordering {
    let by_time = match (race(a), race(b)) {
        (Some(a), Some(b)) => b.ratio.total_cmp(&a.ratio),
        _ => a.expected_us().total_cmp(&b.expected_us()),
    };
    grade(b).cmp(&grade(a)).then(by_time).then(a.id.cmp(&b.id))
}

/// The nearest first parent with an equal time and grade, or else the candidate: a change that gains nothing
/// is dropped.
fn plainest<'a>(population: &'a Population, best: &'a Member) -> &'a Member {
    let is_equal = |parent: &&Member| {
        let times = us(population, parent).zip(us(population, best));
        parent.counts()
            && parent.is_timed()
            && grade(parent) == grade(best)
            && times.is_some_and(|(parent, best)| parent <= best * EQUAL)
    };
    let parent = best.parents.first().and_then(|id| population.members.get(id));
    parent.filter(is_equal).map_or(best, |parent| plainest(population, parent))
}

fn best_where(population: &Population, is_meant: impl Fn(&Member) -> bool) -> Option<&Member> {
    let meant = population.members.values().filter(|m| m.is_timed() && is_meant(m));
    meant.min_by(|a, b| better(a, b)).map(|best| plainest(population, best))
}

pub fn best(population: &Population) -> Option<&Member> {
    best_where(population, Member::counts)
}

pub fn best_of(population: &Population, arm: Arm) -> Option<&Member> {
    best_where(population, |m| m.arm == arm)
}
