//! Who is better: the one order of candidates, which the ledger, its pages and `topk` keep, too (`standing.grade`, `standing.us`).
//!
//! First come those that won a second race, which luck did not choose; then the others that raced, each by the ratio of its last race
//! against the incumbent; then those with a short timing alone, whose best is the luckiest, by that. What is compared with has no place.

use std::cmp::Ordering;

use super::population::{Member, Population};
use crate::bench::SpeedVerdict;
use crate::ledger::{Against, Arm};

/// How well founded a candidate's place is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Grade {
    /// By a short timing.
    Timed,
    /// By a race.
    Raced,
    /// By a second race, which it won.
    Confirmed,
}

/// The race that counts: the second where there is one, since it was run because the first was won, and chance that made it win that one has
/// no part in it.
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

/// A candidate's time, µs: of one that raced what its race gives of the baseline's, else the short timing.
pub fn us(population: &Population, member: &Member) -> Option<f64> {
    let raced = race(member).zip(population.baseline_us()).map(|(race, baseline)| baseline / race.ratio);
    raced.or(member.time.map(|time| time.us))
}

/// The better first; of equals the older.
fn better(a: &Member, b: &Member) -> Ordering {
    let by_time = match (race(a), race(b)) {
        (Some(a), Some(b)) => b.ratio.total_cmp(&a.ratio),
        _ => a.expected_us().total_cmp(&b.expected_us()),
    };
    grade(b).cmp(&grade(a)).then(by_time).then(a.id.cmp(&b.id))
}

/// The best candidate of a problem.
pub fn best(population: &Population) -> Option<&Member> {
    population.members.values().filter(|m| m.counts() && m.is_timed()).min_by(|a, b| better(a, b))
}

/// The best of one arm.
pub fn best_of(population: &Population, arm: Arm) -> Option<&Member> {
    population.members.values().filter(|m| m.arm == arm && m.is_timed()).min_by(|a, b| better(a, b))
}
