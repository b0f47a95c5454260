//! Chooses the next candidate: baseline and control, then seeds, then random samples and operators in turn.

use rand::SeedableRng;
use rand::rngs::SmallRng;

use super::config::Limits;
use super::engine::{Ask, Evolution, Question};
use super::error::EvolveError;
use super::joining::Said;
use super::operators::{Draft, Workshop};
use super::population::Population;
use super::task::Stage;
use super::{advice, finals};
use ledger::{Arm, MadeBy, Operator};

/// Maximum number of open questions to a proposer. Each may take minutes.
const QUESTIONS: usize = 1;
/// Maximum number of consecutive drafts that repeat known candidates.
const REPEATS: usize = 64;

impl Evolution {
    /// Whether the limits allow another candidate.
    pub(super) fn has_room(&self) -> bool {
        let [host, device] = self.open_tasks();
        let open: usize = self.searches.iter().map(|s| s.population.open()).sum();
        host < self.limits.host && host + device < self.limits.together && open < self.limits.open
    }

    /// The cases in the order in which they get a candidate: the case with the fewest candidates first.
    pub(super) fn turns(&self) -> Vec<usize> {
        let mut cases: Vec<usize> = (0..self.searches.len()).collect();
        cases.sort_by_key(|&case| members_made(&self.searches[case].population));
        cases
    }

    /// Whether a case's budget allows another candidate.
    fn budget_left(&self, case: usize) -> bool {
        let search = &self.searches[case];
        // Every open question will become a candidate.
        let made = members_made(&search.population) + search.asked();
        let cases = self.searches.len();
        let share = |all: usize| all / cases + usize::from(case < all % cases);
        self.in_time() && self.config.candidates.is_none_or(|all| made < share(all)) && !search.flat
    }

    /// Creates a candidate for a case and the task that screens it; `None` when none can be made now.
    pub(super) fn create(&mut self, case: usize) -> Result<Option<Ask>, EvolveError> {
        // Random samples may repeat known candidates, and still count.
        for _ in 0..REPEATS {
            match self.draft(case) {
                Made::Draft(draft) => {
                    if let Some(id) = self.add(case, draft, Said::default())? {
                        return Ok(self.task(case, id, Stage::Screen).map(|task| self.hand_out(task)));
                    }
                }
                Made::Question => {
                    let search = &mut self.searches[case];
                    search.questions[0] += 1;
                    let (number, asked) = (search.questions[0], self.elapsed);
                    let brief = super::proposal::brief(self, case);
                    let left = self.config.seconds.map(|seconds| seconds - finals::reserve(self) - asked);
                    let seconds = left.filter(|_| self.limits == Limits::ALONE);
                    return Ok(Some(Ask::Propose(Box::new(Question {
                        case,
                        number,
                        brief,
                        asked,
                        seconds,
                    }))));
                }
                Made::Nothing => return Ok(None),
            }
        }
        Ok(None)
    }

    /// The next draft of a case. Each candidate has its own random stream, which does not depend on earlier
    /// draws.
    fn draft(&mut self, case: usize) -> Made {
        let (config, plan) = (&self.config, &self.config.cases[case]);
        let population = &self.searches[case].population;
        if population.baseline.is_none() {
            return Made::Draft(Draft::of(plan.baseline.clone(), Arm::Baseline, Operator::Baseline));
        }
        if population.control.is_none() {
            return Made::Draft(Draft::of(plan.baseline.clone(), Arm::Control, Operator::Control));
        }
        if config.early_stop && advice::is_flat(&population.curve) {
            self.searches[case].flat = true;
        }
        if self.searches[case].exhausted || !self.budget_left(case) {
            return Made::Nothing;
        }
        let search = &self.searches[case];
        let (population, space) = (&search.population, &search.space);
        let mut rng = SmallRng::seed_from_u64(mix(config.seed, case as u64, members_made(population) as u64));
        let seeded = population.members.values().filter(|m| m.operator.operator == Operator::Seed).count();
        if let Some((name, seed)) = plan.seeds.get(seeded) {
            return Made::Draft(Draft::of(seed.clone(), Arm::Evolution, name.clone()));
        }
        if seeded < plan.seeds.len() + plan.draws
            && let Some(drawn) = space.random(&mut rng)
        {
            return Made::Draft(Draft::of(drawn, Arm::Evolution, MadeBy::drawn()));
        }
        let [evolved, random] = [Arm::Evolution, Arm::Random].map(|arm| population.made(arm) as f64);
        if random < config.random_share * (evolved + random + 1.0)
            && let Some(drawn) = space.random(&mut rng)
        {
            return Made::Draft(Draft::of(drawn, Arm::Random, Operator::Random));
        }
        let made = self.evolve(case, &mut rng);
        if matches!(made, Made::Nothing) && self.searches[case].population.open() == 0 {
            self.searches[case].exhausted = true;
        }
        made
    }

    /// The next candidate of the evolution arm.
    fn evolve(&self, case: usize, rng: &mut SmallRng) -> Made {
        let search = &self.searches[case];
        let (population, configuration) = (&search.population, self.config.configuration);
        let workshop = Workshop { population, space: &search.space, guidance: &self.guidance, configuration };
        if workshop.parents().is_empty() && population.open() > 0 {
            // There is no parent yet.
            return Made::Nothing;
        }
        let may_ask = self.config.proposer.is_some() && search.asked() < QUESTIONS;
        let operators = configuration.operators().iter().copied();
        // A proposer named by the user is asked in every configuration.
        let mut among: Vec<Operator> = operators.chain(may_ask.then_some(Operator::Propose)).collect();
        while let Some(operator) = population.bandit.choose(&among) {
            if operator == Operator::Propose {
                return Made::Question;
            }
            match workshop.make(operator, rng) {
                Some(draft) => return Made::Draft(draft),
                None => among.retain(|other| *other != operator),
            }
        }
        workshop.make(Operator::Restart, rng).map_or(Made::Nothing, Made::Draft)
    }
}

enum Made {
    Draft(Draft),
    Question,
    Nothing,
}

fn members_made(population: &Population) -> usize {
    population.made(Arm::Evolution) + population.made(Arm::Random)
}

/// A pseudo-random number from three numbers (SplitMix64; Steele, Lea & Flood, "Fast splittable pseudorandom
/// number generators", 2014).
fn mix(seed: u64, case: u64, ordinal: u64) -> u64 {
    let mut z = seed ^ case.rotate_left(40) ^ ordinal.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
