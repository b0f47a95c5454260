//! The search space: the families that support a problem, their genes and the values of each gene, as data.
//! Every plan that leaves this module passes its own check.

use kernels::genes::Cure;
use kernels::{Arch, Family};
use problem::Problem;
use rand::Rng;
use rand::seq::{IndexedRandom, IteratorRandom, SliceRandom};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::search;
use ledger::Candidate;

/// Number of random samples of which one must fit. If none does, genes are changed one by one.
const DRAWS: usize = 400;
/// Attempts at a variation that fits and differs.
const TRIES: usize = 60;

/// The problem and the kind of device.
#[derive(Clone, Debug, PartialEq)]
pub enum Domain {
    Gpu(Problem, Arch),
    Cpu(Problem),
}

impl Domain {
    pub const fn problem(&self) -> &Problem {
        match self {
            Domain::Gpu(problem, _) | Domain::Cpu(problem) => problem,
        }
    }

    /// Whether the candidate supports the problem here. For a whole kernel, only a run can tell.
    ///
    /// # Errors
    /// The reason in words.
    pub fn check(&self, candidate: &Candidate) -> Result<(), String> {
        match (self, candidate) {
            (Domain::Gpu(problem, arch), Candidate::Gpu(plan)) => {
                plan.check(problem, arch).map_err(|error| error.to_string())
            }
            (Domain::Cpu(problem), Candidate::Cpu(plan)) => {
                plan.check(problem).map_err(|error| error.to_string())
            }
            (Domain::Gpu(..), Candidate::Kernel(_)) => Ok(()),
            (Domain::Gpu(..), Candidate::Cpu(_)) => {
                Err("invalid candidate, a plan for a CPU: expected a plan for a GPU".to_owned())
            }
            (Domain::Cpu(_), _) => {
                Err("invalid candidate, a kernel for a GPU: expected a plan for a CPU".to_owned())
            }
        }
    }
}

/// A gene and its values.
#[derive(Clone, Debug, PartialEq)]
pub struct Gene {
    /// The field's name in the plan's serde form.
    pub name: &'static str,
    /// Numeric values ascend.
    pub values: Vec<Value>,
    /// Findings and bottlenecks that another value may cure.
    pub cures: &'static [Cure],
}

/// The genes of one family.
#[derive(Clone, Debug, PartialEq)]
pub struct FamilySpace {
    /// The name of the family in plans; `cpu` for the native kernels.
    pub name: &'static str,
    /// A valid plan, which provides the fields that are not genes.
    pub template: Candidate,
    pub genes: Vec<Gene>,
    /// Combinations of genes that are worth changing together.
    pub moves: Vec<Value>,
}

/// The search space of a problem.
#[derive(Clone, Debug, PartialEq)]
pub struct Space {
    pub domain: Domain,
    /// The families that support the problem.
    pub families: Vec<FamilySpace>,
}

/// The genes of a plan by name; empty for a whole kernel.
pub fn genome(candidate: &Candidate) -> Map<String, Value> {
    let plan = match candidate {
        Candidate::Gpu(plan) => json!(plan),
        Candidate::Cpu(plan) => json!(plan),
        Candidate::Kernel(_) => Value::Null,
    };
    let Value::Object(mut genes) = plan else { return Map::new() };
    genes.remove("family");
    genes
}

/// The name of a candidate's family: `mma`, `ladder`, `cpu`, `ptx`, ….
pub fn family(candidate: &Candidate) -> &'static str {
    match candidate {
        Candidate::Gpu(plan) => plan.family(),
        Candidate::Cpu(_) => "cpu",
        Candidate::Kernel(source) => match source.language {
            super::Language::Ptx => "ptx",
            super::Language::Cuda => "cuda",
        },
    }
}

/// The plan with some genes replaced; `None` for an unknown gene or value.
pub fn with_genes(candidate: &Candidate, genes: &Map<String, Value>) -> Option<Candidate> {
    let mut whole = written(candidate)?;
    for (gene, value) in genes {
        *whole.get_mut(gene)? = value.clone();
    }
    read(candidate, &whole)
}

/// The genes of a plan as JSON; `None` for a whole kernel.
fn written(candidate: &Candidate) -> Option<Value> {
    match candidate {
        Candidate::Gpu(plan) => Some(json!(plan)),
        Candidate::Cpu(plan) => Some(json!(plan)),
        Candidate::Kernel(_) => None,
    }
}

/// The plan of the same kind as `like` with these genes.
fn read(like: &Candidate, genes: &Value) -> Option<Candidate> {
    match like {
        Candidate::Gpu(plan) => {
            // The tagged enum would parse twice, and random sampling is mostly parsing.
            Family::named(plan.family())?.plan(genes).ok().map(Candidate::Gpu)
        }
        Candidate::Cpu(_) => Deserialize::deserialize(genes).ok().map(Candidate::Cpu),
        Candidate::Kernel(_) => None,
    }
}

/// The changes gene by gene: `{"block_n": [64, 128]}`. For plans of two families, only the family; for whole
/// kernels, nothing.
pub fn changes(from: &Candidate, to: &Candidate) -> Value {
    if family(from) != family(to) {
        return json!({ "family": [family(from), family(to)] });
    }
    let (from, to) = (genome(from), genome(to));
    let differ = to.iter().filter(|(gene, value)| from.get(*gene) != Some(value));
    Value::Object(differ.map(|(gene, value)| (gene.clone(), json!([from.get(gene), value]))).collect())
}

impl Space {
    /// The space of the families for a GPU. If `only` is not empty, the space of the families named there.
    pub fn gpu(problem: &Problem, arch: &Arch, only: &[String]) -> Space {
        let wanted = |family: &Family| only.is_empty() || only.iter().any(|name| name == family.name());
        let families = Family::ALL.into_iter().filter(wanted).filter_map(|family| {
            let plan = family.default_for(problem, arch).ok()?;
            let genes = family.genes(problem).into_iter().map(|gene| {
                let values = gene.searched.into_iter().chain(gene.wider).collect();
                Gene { name: gene.name, values, cures: gene.cures }
            });
            let genes = genes.filter(|gene| !gene.values.is_empty()).collect();
            let moves = search::groups(family, problem).into_iter().flatten().collect();
            Some(FamilySpace::new(family.name(), Candidate::Gpu(plan), genes, moves))
        });
        Space { domain: Domain::Gpu(problem.clone(), *arch), families: families.collect() }
    }

    /// The space of a candidate's family, if it is included.
    pub fn family_of(&self, candidate: &Candidate) -> Option<&FamilySpace> {
        self.families.iter().find(|space| space.name == family(candidate))
    }

    /// Whether the candidate supports the problem.
    pub fn fits(&self, candidate: &Candidate) -> bool {
        self.domain.check(candidate).is_ok()
    }

    /// A random sample: a family, and random values for all genes, repeated until the plan fits.
    pub fn random(&self, rng: &mut impl Rng) -> Option<Candidate> {
        let space = self.families.choose(rng)?;
        // Most samples do not fit, so the buffer is reused.
        let mut genes = written(&space.template)?;
        for _ in 0..DRAWS {
            for gene in &space.genes {
                let Some(value) = gene.values.choose(rng) else { continue };
                genes.get_mut(gene.name)?.clone_from(value);
            }
            let drawn = read(&space.template, &genes).filter(|drawn| self.fits(drawn));
            if drawn.is_some() {
                return drawn;
            }
        }
        Some(self.wander(space, rng))
    }

    /// The family's template with each gene changed if the result fits, in random order.
    fn wander(&self, space: &FamilySpace, rng: &mut impl Rng) -> Candidate {
        let mut plan = space.template.clone();
        let mut order: Vec<&Gene> = space.genes.iter().collect();
        order.shuffle(rng);
        for gene in order {
            let Some(value) = gene.values.choose(rng) else { continue };
            let change = Map::from_iter([(gene.name.to_owned(), value.clone())]);
            if let Some(varied) = with_genes(&plan, &change).filter(|varied| self.fits(varied)) {
                plan = varied;
            }
        }
        plan
    }

    /// The plan with some genes redrawn: each with a probability of one over their number, and at least one.
    /// One time in four, a combination of genes is changed instead.
    pub fn mutate(&self, parent: &Candidate, rng: &mut impl Rng) -> Option<Candidate> {
        let space = self.family_of(parent)?;
        let own = genome(parent);
        (0..TRIES).find_map(|_| {
            let change = if rng.random_bool(0.25) && !space.moves.is_empty() {
                space.moves.choose(rng)?.as_object()?.clone()
            } else {
                space.redraw(&own, rng)
            };
            let child = with_genes(parent, &change)?;
            (child != *parent && self.fits(&child)).then_some(child)
        })
    }

    /// A plan that takes each gene from one of two plans of a family.
    pub fn cross(&self, mother: &Candidate, father: &Candidate, rng: &mut impl Rng) -> Option<Candidate> {
        if family(mother) != family(father) {
            return None;
        }
        let (ours, theirs) = (genome(mother), genome(father));
        let differs = |gene: &str, value: &Value| ours.get(gene) != Some(value);
        let differing = theirs.iter().filter(|(gene, value)| differs(gene, value)).count();
        (0..TRIES).find_map(|_| {
            let taken = theirs.iter().filter(|_| rng.random_bool(0.5));
            let taken = taken.filter(|(gene, value)| differs(gene, value));
            let change: Map<String, Value> =
                taken.map(|(gene, value)| (gene.clone(), value.clone())).collect();
            // A plan with none or all of the genes that differ is one of the two.
            if change.is_empty() || change.len() == differing {
                return None;
            }
            let child = with_genes(mother, &change)?;
            (child != *mother && child != *father && self.fits(&child)).then_some(child)
        })
    }

    /// The plans one step away: the next lower and higher value of numeric genes, and every value of others.
    pub fn neighbours(&self, plan: &Candidate) -> Vec<Candidate> {
        let Some(space) = self.family_of(plan) else { return Vec::new() };
        let own = genome(plan);
        let steps = space.genes.iter().flat_map(|gene| {
            let values = gene.steps_from(own.get(gene.name));
            values.into_iter().map(|value| Map::from_iter([(gene.name.to_owned(), value)]))
        });
        let plans = steps.filter_map(|change| with_genes(plan, &change));
        plans.filter(|varied| varied != plan && self.fits(varied)).collect()
    }

    /// An upper bound on the number of plans: the product of all value counts, whether the plans fit or not.
    pub fn upper_bound(&self) -> f64 {
        let of =
            |space: &FamilySpace| space.genes.iter().map(|gene| gene.values.len() as f64).product::<f64>();
        self.families.iter().map(of).sum()
    }
}

impl FamilySpace {
    /// The space of a family. Duplicate values are removed, and the values of the template are added.
    pub fn new(name: &'static str, template: Candidate, genes: Vec<Gene>, moves: Vec<Value>) -> FamilySpace {
        let own = genome(&template);
        let genes = genes.into_iter().map(|gene| {
            let mut distinct: Vec<Value> = Vec::new();
            for value in gene.values.into_iter().chain(own.get(gene.name).cloned()) {
                if !distinct.contains(&value) {
                    distinct.push(value);
                }
            }
            distinct.sort_by(|a, b| number(a).total_cmp(&number(b)));
            Gene { values: distinct, ..gene }
        });
        FamilySpace { name, template, genes: genes.collect(), moves }
    }

    /// Random new values for some genes.
    fn redraw(&self, own: &Map<String, Value>, rng: &mut impl Rng) -> Map<String, Value> {
        let chance = 1.0 / self.genes.len().max(1) as f64;
        let sure = rng.random_range(0..self.genes.len().max(1));
        let mut change = Map::new();
        for (index, gene) in self.genes.iter().enumerate() {
            let others = gene.values.iter().filter(|value| own.get(gene.name) != Some(value));
            if (index == sure || rng.random_bool(chance))
                && let Some(value) = others.choose(rng)
            {
                change.insert(gene.name.to_owned(), value.clone());
            }
        }
        change
    }
}

impl Gene {
    /// The values one step from the given one.
    fn steps_from(&self, value: Option<&Value>) -> Vec<Value> {
        let numbers = self.values.iter().all(Value::is_number);
        match value.and_then(|value| self.values.iter().position(|known| known == value)) {
            Some(place) if numbers => {
                let beside = [place.checked_sub(1), Some(place + 1)];
                beside.into_iter().flatten().filter_map(|at| self.values.get(at).cloned()).collect()
            }
            _ => self.values.clone(),
        }
    }
}

/// Sort key: numbers by value, words unchanged.
fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use problem::{Band, DType};
    use rand::SeedableRng;
    use rand::rngs::SmallRng;

    use super::*;

    fn spaces() -> Vec<Space> {
        let causal = Problem::new(4, 16, 4096, 128, DType::Bf16).with_band(Band::CAUSAL);
        [(Problem::mission(), Arch::SM_90), (causal.clone(), Arch::SM_90), (causal, Arch::SM_80)]
            .map(|(problem, arch)| Space::gpu(&problem, &arch, &[]))
            .into()
    }

    /// Every operator makes plans that support their problem.
    #[test]
    fn only_plans_that_check_are_drawn() {
        let mut rng = SmallRng::seed_from_u64(3);
        for space in spaces() {
            for _ in 0..60 {
                let [a, b] = [0, 1].map(|_| space.random(&mut rng).unwrap());
                let mutant = space.mutate(&a, &mut rng).unwrap();
                assert_ne!(mutant, a);
                let children = space.cross(&a, &b, &mut rng).into_iter().chain([a, b, mutant]);
                for plan in children.collect::<Vec<_>>() {
                    space.domain.check(&plan).unwrap();
                }
            }
            for family in &space.families {
                let near = space.neighbours(&family.template);
                assert!(near.len() > 4, "{}: {}", family.name, near.len());
                assert!(near.iter().all(|plan| space.fits(plan)));
            }
        }
    }

    /// Samples cover every family and every gene value that fits in some plan.
    #[test]
    fn draws_are_wide() {
        let space = &spaces()[0];
        let mut rng = SmallRng::seed_from_u64(5);
        let plans: Vec<Candidate> = (0..600).filter_map(|_| space.random(&mut rng)).collect();
        let distinct: std::collections::HashSet<&Candidate> = plans.iter().collect();
        assert!(distinct.len() > 550, "{}", distinct.len());
        for name in ["mma", "wgmma", "small_streamed", "small_at_once"] {
            let count = plans.iter().filter(|plan| family(plan) == name).count();
            assert!(count > 130, "{name}: {count}");
        }
        let keys: std::collections::HashSet<String> =
            plans.iter().map(|plan| genome(plan)["block_n"].to_string()).collect();
        assert!(keys.len() >= 8, "{keys:?}");
        assert!(space.upper_bound() > 1e6);
    }

    #[test]
    fn changes_name_the_genes() {
        let space = &spaces()[0];
        let mma = &space.families[0].template;
        let wide = with_genes(mma, &Map::from_iter([("block_n".to_owned(), json!(64))])).unwrap();
        let before = genome(mma)["block_n"].clone();
        assert_eq!(changes(mma, &wide), json!({ "block_n": [before, 64] }));
        assert_eq!(changes(mma, mma), json!({}));
        assert_eq!(changes(mma, &space.families[1].template), json!({ "family": ["mma", "wgmma"] }));
        assert_eq!(with_genes(mma, &Map::from_iter([("block_x".to_owned(), json!(1))])), None);
    }
}
