//! How new candidates are made of old ones.

use rand::Rng;
use rand::seq::IndexedRandom;
use serde_json::{Value, json};

use super::bandit::Operator;
use super::candidate::Candidate;
use super::config::Configuration;
use super::insight::{Insights, cure};
use super::population::{Member, Population};
use super::space::{Space, changes};
use crate::ledger::{Arm, CandidateId};

/// Attempts of an operator at something that is not known yet.
const TRIES: usize = 24;
/// The best from which a good part of the offspring comes.
const FEW: usize = 3;

/// A candidate before it has a number.
#[derive(Clone, Debug, PartialEq)]
pub struct Draft {
    /// What would be run.
    pub candidate: Candidate,
    /// Why it is in the run.
    pub arm: Arm,
    /// How it was made.
    pub operator: String,
    /// From what.
    pub parents: Vec<CandidateId>,
    /// What differs from the first parent.
    pub changes: Value,
}

impl Draft {
    /// Made of nothing.
    pub fn of(candidate: Candidate, arm: Arm, operator: &str) -> Draft {
        Draft { candidate, arm, operator: operator.to_owned(), parents: Vec::new(), changes: json!({}) }
    }

    /// Made of others.
    pub fn from_parents(candidate: Candidate, operator: String, parents: &[&Member]) -> Draft {
        let changes = parents.first().map_or(json!({}), |parent| changes(&parent.candidate, &candidate));
        let parents = parents.iter().map(|parent| parent.id).collect();
        Draft { candidate, arm: Arm::Evolution, operator, parents, changes }
    }
}

/// What an operator works with.
pub struct Workshop<'a> {
    /// Who there is.
    pub population: &'a Population,
    /// What may be drawn.
    pub space: &'a Space,
    /// What is known about genes.
    pub insights: &'a Insights,
    /// How parents are chosen.
    pub configuration: Configuration,
}

impl Workshop<'_> {
    /// Something new of an operator; `None` where it finds nothing that is not known yet.
    pub fn make(&self, operator: Operator, rng: &mut impl Rng) -> Option<Draft> {
        if operator == Operator::Neighbour {
            return self.neighbour(rng);
        }
        (0..TRIES).find_map(|_| {
            let draft = match operator {
                Operator::Mutate => self.mutate(rng),
                Operator::Cross => self.cross(rng),
                Operator::Insight => self.insight(rng),
                Operator::Restart => self
                    .space
                    .random(rng)
                    .map(|plan| Draft::of(plan, Arm::Evolution, Operator::Restart.name())),
                Operator::Neighbour | Operator::Propose => None,
            }?;
            (!self.population.knows(&draft.candidate)).then_some(draft)
        })
    }

    /// The candidates that offspring may come from, the fastest first. A baseline without rivals is the only one.
    pub fn parents(&self) -> Vec<&Member> {
        let members = &self.population.members;
        let elites = self.population.niches.ranked();
        elites.iter().filter_map(|(_, elite)| members.get(&elite.candidate)).filter(|m| m.is_fit()).collect()
    }

    /// A parent: the best; or, where there are niches, as often one of the best few as any elite.
    fn parent(&self, rng: &mut impl Rng) -> Option<&Member> {
        let all = self.parents();
        if !self.configuration.has_niches() {
            return all.first().copied();
        }
        let few = &all[..all.len().min(FEW)];
        if rng.random_bool(0.5) { few.choose(rng).copied() } else { all.choose(rng).copied() }
    }

    fn mutate(&self, rng: &mut impl Rng) -> Option<Draft> {
        let parent = self.parent(rng)?;
        let child = self.space.mutate(&parent.candidate, rng)?;
        let mut draft = Draft::from_parents(child, String::new(), &[parent]);
        draft.operator = named(Operator::Mutate, &draft.changes);
        Some(draft)
    }

    fn cross(&self, rng: &mut impl Rng) -> Option<Draft> {
        let (mother, father) = (self.parent(rng)?, *self.parents().choose(rng)?);
        let child = self.space.cross(&mother.candidate, &father.candidate, rng)?;
        Some(Draft::from_parents(child, Operator::Cross.name().to_owned(), &[mother, father]))
    }

    /// An untried step from the best that has one.
    fn neighbour(&self, rng: &mut impl Rng) -> Option<Draft> {
        self.parents().into_iter().take(FEW).find_map(|parent| {
            let mut near = self.space.neighbours(&parent.candidate);
            near.retain(|plan| !self.population.knows(plan));
            let mut draft = Draft::from_parents(near.choose(rng)?.clone(), String::new(), &[parent]);
            draft.operator = named(Operator::Neighbour, &draft.changes);
            Some(draft)
        })
    }

    /// As often a finding's cure as what helped elsewhere.
    fn insight<R: Rng>(&self, rng: &mut R) -> Option<Draft> {
        let parent = self.parent(rng)?;
        let bound = parent.screening.as_ref().and_then(|s| s.bound.as_deref());
        let cured = |rng: &mut R| cure(&parent.candidate, &parent.findings, bound, self.space, rng);
        let helped = |rng: &mut R| self.insights.apply(&parent.candidate, self.space, rng);
        let (child, what) = match rng.random_bool(0.5) {
            true => cured(rng).or_else(|| helped(rng)),
            false => helped(rng).or_else(|| cured(rng)),
        }?;
        let operator = format!("{}:{}", Operator::Insight.name(), what.replace(' ', "_"));
        Some(Draft::from_parents(child, operator, &[parent]))
    }
}

/// An operator with the genes that it changed.
fn named(operator: Operator, changes: &Value) -> String {
    let genes: Vec<&str> = changes.as_object().into_iter().flatten().map(|(gene, _)| gene.as_str()).collect();
    format!("{}:{}", operator.name(), genes.join("+"))
}
