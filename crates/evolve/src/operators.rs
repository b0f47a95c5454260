//! Operators, which make new candidates from old ones.

use rand::Rng;
use rand::seq::IndexedRandom;
use serde_json::{Value, json};

use super::config::Configuration;
use super::guidance::{Guidance, cure};
use super::member::Member;
use super::population::Population;
use super::space::{Space, changes};
use ledger::{Arm, Candidate, CandidateId, MadeBy, Operator};

/// Attempts of an operator to find an unknown candidate.
const TRIES: usize = 24;
/// Number of best candidates from which a large part of the offspring comes.
const FEW: usize = 3;

/// A candidate before it has a number.
#[derive(Clone, Debug, PartialEq)]
pub struct Draft {
    pub candidate: Candidate,
    pub arm: Arm,
    /// The operator that made the candidate.
    pub operator: MadeBy,
    pub parents: Vec<CandidateId>,
    /// The changes against the first parent.
    pub changes: Value,
}

impl Draft {
    /// A draft without parents.
    pub fn of(candidate: Candidate, arm: Arm, operator: impl Into<MadeBy>) -> Draft {
        Draft { candidate, arm, operator: operator.into(), parents: Vec::new(), changes: json!({}) }
    }

    /// A draft made from parents.
    pub fn from_parents(candidate: Candidate, operator: impl Into<MadeBy>, parents: &[&Member]) -> Draft {
        let operator = operator.into();
        let changes = parents.first().map_or(json!({}), |parent| changes(&parent.candidate, &candidate));
        let parents = parents.iter().map(|parent| parent.id).collect();
        Draft { candidate, arm: Arm::Evolution, operator, parents, changes }
    }

    /// The draft, with the names of the changed genes in the operator's detail.
    fn naming_genes(mut self) -> Draft {
        let changed = self.changes.as_object().into_iter().flatten();
        self.operator.detail = changed.map(|(gene, _)| gene.as_str()).collect::<Vec<_>>().join("+");
        self
    }
}

/// The data from which an operator makes candidates.
pub struct Workshop<'a> {
    pub population: &'a Population,
    pub space: &'a Space,
    pub guidance: &'a Guidance,
    pub configuration: Configuration,
}

impl Workshop<'_> {
    /// A new draft of an operator; `None` when it finds nothing unknown.
    pub fn make(&self, operator: Operator, rng: &mut impl Rng) -> Option<Draft> {
        if operator == Operator::Neighbour {
            return self.neighbour(rng);
        }
        (0..TRIES).find_map(|_| {
            let draft = match operator {
                Operator::Mutate => self.mutate(rng),
                Operator::Cross => self.cross(rng),
                Operator::Guided => self.guided(rng),
                Operator::Restart => {
                    self.space.random(rng).map(|plan| Draft::of(plan, Arm::Evolution, Operator::Restart))
                }
                // `neighbour` returned above, and the proposer is asked elsewhere. The remaining operators
                // only label candidates that no operator makes.
                _ => None,
            }?;
            (!self.population.knows(&draft.candidate)).then_some(draft)
        })
    }

    /// The candidates that can be parents, fastest first; only the baseline if there are no others.
    pub fn parents(&self) -> Vec<&Member> {
        let members = &self.population.members;
        let elites = self.population.niches.ranked();
        elites.iter().filter_map(|(_, elite)| members.get(&elite.candidate)).filter(|m| m.is_fit()).collect()
    }

    /// Chooses a parent: the best candidate; with niches, one of the best few or any elite, with equal
    /// probability.
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
        Some(Draft::from_parents(child, Operator::Mutate, &[parent]).naming_genes())
    }

    fn cross(&self, rng: &mut impl Rng) -> Option<Draft> {
        let (mother, father) = (self.parent(rng)?, *self.parents().choose(rng)?);
        let child = self.space.cross(&mother.candidate, &father.candidate, rng)?;
        Some(Draft::from_parents(child, Operator::Cross, &[mother, father]))
    }

    /// An untried step from the best candidate that has one.
    fn neighbour(&self, rng: &mut impl Rng) -> Option<Draft> {
        self.parents().into_iter().take(FEW).find_map(|parent| {
            let mut near = self.space.neighbours(&parent.candidate);
            near.retain(|plan| !self.population.knows(plan));
            let step = near.choose(rng)?.clone();
            Some(Draft::from_parents(step, Operator::Neighbour, &[parent]).naming_genes())
        })
    }

    /// A cure for a finding, or a value that helped elsewhere, with equal probability.
    fn guided<R: Rng>(&self, rng: &mut R) -> Option<Draft> {
        let parent = self.parent(rng)?;
        let bound = parent.screening.as_ref().and_then(|s| s.bound.as_deref());
        let cured = |rng: &mut R| cure(&parent.candidate, &parent.findings, bound, self.space, rng);
        let helped = |rng: &mut R| self.guidance.apply(&parent.candidate, self.space, rng);
        let (child, what) = match rng.random_bool(0.5) {
            true => cured(rng).or_else(|| helped(rng)),
            false => helped(rng).or_else(|| cured(rng)),
        }?;
        let operator = Operator::Guided.with(what.replace(' ', "_"));
        Some(Draft::from_parents(child, operator, &[parent]))
    }
}
