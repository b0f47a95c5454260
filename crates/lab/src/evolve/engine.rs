//! The engine: asked what to evaluate, told what came of it. It knows no thread, no device and no clock, so a run is decided by its
//! configuration and the order of the answers alone; all that it knows it writes to the ledger first, so a run that was cut off goes
//! on from there.

use std::collections::HashSet;

use kernels::select::Shape;
use rand::SeedableRng;
use rand::rngs::SmallRng;
use serde_json::{Value, json};

use super::bandit::Operator;
use super::candidate::{Candidate, Language, Source};
use super::cascade;
use super::config::{Case, Config, Limits};
use super::insight::Insights;
use super::operators::{Draft, Workshop};
use super::population::{Member, Place, Population};
use super::proposer::Proposal;
use super::space::Space;
use super::task::{Outcome, Stage, Task};
use super::workers::is_of_device;
use super::{advice, finals};
use crate::ledger::{
    Arm, CandidateId, Decision, Environment, Forecast, Ledger, LedgerError, NewCandidate, Rejection, Run,
    RunEvent, RunId,
};

/// Why an evolution cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum EvolveError {
    /// The ledger's trouble.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// What is to be beaten is no good itself.
    #[error(
        "the baseline for {problem} cannot be evaluated ({reason}: {detail}); name another with --seed-plan, or another problem"
    )]
    Baseline {
        /// The problem.
        problem: String,
        /// In a word.
        reason: String,
        /// In words.
        detail: String,
    },
    /// The ledger's configuration of the run is not one.
    #[error(
        "run {run} of the ledger cannot go on: its configuration is not one of this FlashCore's ({error})"
    )]
    Config {
        /// The run.
        run: i64,
        /// What is wrong with it.
        error: serde_json::Error,
    },
    /// There is nothing to do.
    #[error("{what}; accepted: {accepted}")]
    Nothing {
        /// What is missing.
        what: &'static str,
        /// What would be accepted.
        accepted: &'static str,
    },
}

/// What to do next.
#[derive(Clone, Debug, PartialEq)]
pub enum Ask {
    /// Evaluate this and [tell](Evolution::tell).
    Task(Box<Task>),
    /// Ask a proposer, and give its [answer](Evolution::answer).
    Propose(Box<Question>),
    /// Nothing until something that is under way is told.
    Wait,
    /// Nothing any more.
    Done,
}

/// What a proposer is asked.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// Which case of the run.
    pub case: usize,
    /// Which question of it.
    pub number: usize,
    /// Problem, device, incumbent with its source, findings, insights, history: what the proposer gets on its standard input.
    pub brief: Value,
}

/// Questions that wait for a proposer at a time: it may take minutes.
const QUESTIONS: usize = 1;

/// One problem's search.
pub(super) struct Search {
    pub(super) population: Population,
    pub(super) space: Space,
    /// Questions that were asked, and how many of them were answered.
    questions: [usize; 2],
    /// Nothing new is to be found.
    exhausted: bool,
    /// The search ended before its budget.
    flat: bool,
}

/// A run.
pub struct Evolution {
    pub(super) ledger: Ledger,
    pub(super) run: RunId,
    pub(super) config: Config,
    pub(super) limits: Limits,
    pub(super) searches: Vec<Search>,
    pub(super) insights: Insights,
    flying: HashSet<(CandidateId, Stage, Shape)>,
    told: HashSet<(CandidateId, Stage, Shape)>,
    /// Seconds of evaluators, and of these with the device.
    pub(super) spent: [f64; 2],
    /// Seconds since the run began or went on.
    elapsed: f64,
    finished: bool,
    turn: usize,
}

impl Evolution {
    /// Begins a run.
    ///
    /// # Errors
    /// When there is nothing to search, or the ledger cannot be written.
    pub fn begin(
        ledger: Ledger,
        config: Config,
        environment: Environment,
        price_per_hour: Option<f64>,
        limits: Limits,
    ) -> Result<Evolution, EvolveError> {
        if config.cases.is_empty() {
            return Err(EvolveError::Nothing { what: "no problem", accepted: "at least one" });
        }
        if config.candidates.is_none() && config.seconds.is_none() {
            let (what, accepted) = ("no budget", "candidates, minutes, or both");
            return Err(EvolveError::Nothing { what, accepted });
        }
        let run = Run { device: config.device.clone(), config: json!(config), environment, price_per_hour };
        let run = ledger.begin_run(&run)?;
        ledger.claim(run)?;
        Ok(Evolution::new(ledger, run, config, limits))
    }

    /// Goes on with a run from what the ledger has of it: its candidates and the answers to its tasks, in their order.
    ///
    /// # Errors
    /// When the ledger has no such run, another process drives it, or its configuration cannot be read.
    pub fn resume(ledger: Ledger, run: RunId, limits: Limits) -> Result<Evolution, EvolveError> {
        // First of all: what is read then is all that there is.
        ledger.claim(run)?;
        let known = ledger.resume(run)?;
        let finished = ledger.events(run)?.last().is_some_and(|(_, event)| *event == RunEvent::Finished);
        if finished {
            ledger.release(run)?;
        } else {
            ledger.event(run, RunEvent::Resumed)?;
        }
        let config = serde_json::from_value(known.run.config)
            .map_err(|error| EvolveError::Config { run: run.0, error })?;
        let mut evolution = Evolution::new(ledger, run, config, limits);
        for known in &known.candidates {
            evolution.admit(known.id, &known.new);
        }
        // What the engine itself made of an answer follows from it again.
        for outcome in &known.outcomes {
            evolution.learn(outcome);
        }
        evolution.finished = finished;
        Ok(evolution)
    }

    fn new(ledger: Ledger, run: RunId, config: Config, limits: Limits) -> Evolution {
        let searches = config.cases.iter().map(|case| Search {
            population: Population::new(case.problem, case.draws),
            space: config.space(case),
            questions: [0, 0],
            exhausted: false,
            flat: false,
        });
        let searches = searches.collect();
        let mut insights = Insights::default();
        for (family, changes, ratio) in &config.wins {
            insights.learn(family, changes, *ratio, 1.0);
        }
        Evolution {
            ledger,
            run,
            config,
            limits,
            searches,
            insights,
            flying: HashSet::new(),
            told: HashSet::new(),
            spent: [0.0; 2],
            elapsed: 0.0,
            finished: false,
            turn: 0,
        }
    }

    /// The run's number.
    pub const fn run(&self) -> RunId {
        self.run
    }

    /// What the run is.
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// The ledger.
    pub const fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Tasks under way.
    pub fn flying(&self) -> usize {
        self.flying.len()
    }

    /// The next thing to do, `elapsed` seconds after the run began or went on.
    ///
    /// # Errors
    /// When the ledger cannot be written, or a baseline is no good.
    pub fn ask(&mut self, elapsed: f64) -> Result<Ask, EvolveError> {
        self.elapsed = elapsed;
        self.check_baselines()?;
        if self.finished {
            return Ok(Ask::Done);
        }
        if let Some(task) = self.ready() {
            return Ok(self.fly(task));
        }
        if self.has_room() {
            for _ in 0..self.searches.len() {
                let case = self.turn % self.searches.len();
                self.turn += 1;
                if let Some(ask) = self.create(case)? {
                    return Ok(ask);
                }
            }
        }
        let questions = self.searches.iter().any(|s| s.questions[0] > s.questions[1]);
        if !self.flying.is_empty() || questions {
            return Ok(Ask::Wait);
        }
        if let Some(task) = finals::next(self)? {
            return Ok(self.fly(task));
        }
        self.finish()?;
        Ok(Ask::Done)
    }

    /// Takes in the answer to a task, whole. One that came before counts once.
    ///
    /// # Errors
    /// When the ledger cannot be written: then it has nothing of it, and the run can only be [resumed](Evolution::resume).
    pub fn tell(&mut self, outcome: &Outcome) -> Result<(), EvolveError> {
        let task = (outcome.candidate, outcome.stage, outcome.problem);
        self.flying.remove(&task);
        if self.told.contains(&task) {
            return Ok(());
        }
        let died = self.learn(outcome);
        self.ledger.together(|ledger| {
            if ledger.tell(outcome)? {
                died.iter().try_for_each(|(id, rejection)| ledger.rejected(*id, rejection))?;
            }
            Ok::<_, EvolveError>(())
        })
    }

    /// Takes in what a proposer answered: a candidate, or what was wrong with the answer.
    ///
    /// # Errors
    /// When the ledger cannot be written.
    pub fn answer(
        &mut self,
        question: &Question,
        answer: Result<Proposal, Rejection>,
    ) -> Result<(), EvolveError> {
        let Some(search) = self.searches.get_mut(question.case) else { return Ok(()) };
        search.questions[1] += 1;
        let expected_us = answer.as_ref().ok().and_then(|proposal| proposal.predicted_us);
        let (candidate, rejection) = match answer.map(|proposal| proposal.candidate) {
            Ok(candidate) => match search.space.domain.check(&candidate) {
                Ok(()) => (candidate, None),
                Err(detail) => {
                    (candidate, Some(Rejection { stage: Stage::Propose, reason: "plan".into(), detail }))
                }
            },
            // There must be a candidate for the answer's failure to be told of: the answer as it came.
            Err(rejection) => {
                let (text, launch) = (rejection.detail.clone(), String::new());
                (Candidate::Kernel(Source { language: Language::Ptx, text, launch }), Some(rejection))
            }
        };
        let parents: Vec<&Member> =
            search.population.best.iter().filter_map(|id| search.population.members.get(id)).collect();
        let problem = search.population.problem;
        let draft = Draft::from_parents(candidate, Operator::Propose.name().to_owned(), &parents);
        if let Some((candidate, us)) = self.add(question.case, draft, rejection)?.zip(expected_us) {
            let (hypothesis, author) = (String::new(), Operator::Propose.name().to_owned());
            let (device, problem) = (self.config.device.clone(), Some(problem));
            let (low_us, high_us) = (us, us);
            let candidate = Some(candidate);
            self.ledger.forecast(&Forecast {
                candidate,
                hypothesis,
                author,
                device,
                problem,
                low_us,
                us,
                high_us,
            })?;
        }
        Ok(())
    }

    /// Someone stops the run: nothing new is begun, and it can be resumed.
    ///
    /// # Errors
    /// When the ledger cannot be written.
    pub fn stop(&mut self) -> Result<(), EvolveError> {
        self.ledger.event(self.run, RunEvent::Stopped)?;
        self.ledger.release(self.run)?;
        Ok(())
    }

    pub(super) fn was_told(&self, candidate: CandidateId, stage: Stage, problem: &Shape) -> bool {
        self.told.contains(&(candidate, stage, *problem))
    }

    /// A candidate that is compared with joins, and is not judged.
    pub(super) fn add_reference(
        &mut self,
        case: usize,
        problem: Shape,
        candidate: Candidate,
        operator: &str,
    ) -> Result<CandidateId, EvolveError> {
        let new = NewCandidate {
            run: self.run,
            problem,
            candidate,
            arm: Arm::Baseline,
            operator: operator.to_owned(),
            parents: Vec::new(),
            changes: json!({}),
        };
        let id = self.ledger.add_candidate(&new)?;
        self.searches[case].population.admit(id, &new);
        Ok(id)
    }

    pub(super) fn task(&self, case: usize, id: CandidateId, stage: Stage) -> Option<Task> {
        let population = &self.searches.get(case)?.population;
        let member = population.members.get(&id)?;
        let baseline = population.baseline.filter(|baseline| *baseline != id && stage >= Stage::Microbench);
        let incumbent = baseline.and_then(|baseline| population.members.get(&baseline));
        let [short, long] = self.config.timing;
        Some(Task {
            candidate: id,
            stage,
            target: self.config.target.clone(),
            problem: population.problem,
            subject: member.candidate.clone(),
            incumbent: incumbent.map(|member| (member.id, member.candidate.clone())),
            seconds: if stage >= Stage::Race { long } else { short },
        })
    }

    fn fly(&mut self, task: Task) -> Ask {
        self.flying.insert((task.candidate, task.stage, task.problem));
        Ask::Task(Box::new(task))
    }

    /// Takes in an answer, without writing: who died of it.
    fn learn(&mut self, outcome: &Outcome) -> Vec<(CandidateId, Rejection)> {
        self.told.insert((outcome.candidate, outcome.stage, outcome.problem));
        self.spent[0] += outcome.seconds;
        self.spent[1] += outcome.device_seconds;
        let owner = self.searches.iter_mut().find(|s| s.population.members.contains_key(&outcome.candidate));
        owner.map(|search| search.population.learn(outcome, &mut self.insights)).unwrap_or_default()
    }

    fn admit(&mut self, id: CandidateId, new: &NewCandidate) {
        // Held-out problems belong to the case that names them.
        let owns = |case: &Case| {
            case.problem == new.problem || case.held_out.iter().any(|(shape, _)| *shape == new.problem)
        };
        let exact = self.config.cases.iter().position(|case| case.problem == new.problem);
        let of_parent =
            |search: &Search| new.parents.iter().any(|id| search.population.members.contains_key(id));
        let case = self.searches.iter().position(of_parent).or(exact);
        let case = case.or_else(|| self.config.cases.iter().position(owns));
        if let Some(case) = case {
            let search = &mut self.searches[case];
            search.population.admit(id, new);
            if Operator::of(&new.operator) == Some(Operator::Propose) {
                search.questions = search.questions.map(|n| n + 1);
            }
        }
    }

    /// A candidate joins; `None` where it died at once.
    fn add(
        &mut self,
        case: usize,
        draft: Draft,
        rejection: Option<Rejection>,
    ) -> Result<Option<CandidateId>, EvolveError> {
        let (run, problem) = (self.run, self.searches[case].population.problem);
        let Draft { candidate, arm, operator, parents, changes } = draft;
        let new = NewCandidate { run, problem, candidate, arm, operator, parents, changes };
        let population = &mut self.searches[case].population;
        self.ledger.together(|ledger| {
            let id = ledger.add_candidate(&new)?;
            let rejection = population.admit(id, &new).or(rejection);
            let Some(rejection) = rejection else { return Ok(Some(id)) };
            ledger.rejected(id, &rejection)?;
            population.kill(id, rejection);
            Ok(None)
        })
    }

    /// What is under way: without and with the device.
    fn under_way(&self) -> [usize; 2] {
        let device = self.flying.iter().filter(|(_, stage, _)| is_of_device(*stage)).count();
        [self.flying.len() - device, device]
    }

    /// The next stage of a candidate that is on its way: the dearest stage first, so that the device has work.
    fn ready(&self) -> Option<Task> {
        let [host, device] = self.under_way();
        if host + device >= self.limits.together {
            return None;
        }
        let room = |stage: Stage| match is_of_device(stage) {
            true => device < self.limits.device,
            false => host < self.limits.host,
        };
        let mut ready: Vec<(Stage, bool, f64, CandidateId, usize)> = Vec::new();
        for (case, search) in self.searches.iter().enumerate() {
            for member in search.population.members.values() {
                let Place::Ready(stage) = member.place else { continue };
                let flies = self.flying.contains(&(member.id, stage, search.population.problem));
                if !flies && room(stage) {
                    ready.push((stage, member.counts(), member.expected_us(), member.id, case));
                }
            }
        }
        // What others are compared with first, then what promises most.
        ready.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)).then(a.2.total_cmp(&b.2)).then(a.3.cmp(&b.3)));
        ready.first().and_then(|&(stage, _, _, id, case)| self.task(case, id, stage))
    }

    fn has_room(&self) -> bool {
        let [host, device] = self.under_way();
        let open: usize = self.searches.iter().map(|s| s.population.open()).sum();
        host < self.limits.host && host + device < self.limits.together && open < self.limits.open
    }

    /// Whether a case may have another candidate.
    fn budget_left(&self, case: usize) -> bool {
        let search = &self.searches[case];
        let made = search.population.made(Arm::Evolution) + search.population.made(Arm::Random);
        let cases = self.searches.len();
        let share = |all: usize| all / cases + usize::from(case < all % cases);
        let in_time =
            self.config.seconds.is_none_or(|seconds| self.elapsed < seconds - finals::reserve(&self.config));
        in_time && self.config.candidates.is_none_or(|all| made < share(all)) && !search.flat
    }

    /// A new candidate of a case, and the task to screen it; `None` where there is none now.
    fn create(&mut self, case: usize) -> Result<Option<Ask>, EvolveError> {
        // Blind draws may repeat what is known, and are counted all the same.
        for _ in 0..REPEATS {
            match self.draft(case) {
                Made::Draft(draft) => {
                    if let Some(id) = self.add(case, draft, None)? {
                        return Ok(self.task(case, id, Stage::Screen).map(|task| self.fly(task)));
                    }
                }
                Made::Question => {
                    let search = &mut self.searches[case];
                    search.questions[0] += 1;
                    let number = search.questions[0];
                    let brief = super::proposal::brief(self, case);
                    return Ok(Some(Ask::Propose(Box::new(Question { case, number, brief }))));
                }
                Made::Nothing => return Ok(None),
            }
        }
        Ok(None)
    }

    /// What comes next in a case. Chance begins anew with each candidate, so that it does not matter what was drawn before it.
    fn draft(&mut self, case: usize) -> Made {
        let (config, plan) = (&self.config, &self.config.cases[case]);
        let population = &self.searches[case].population;
        if population.baseline.is_none() {
            return Made::Draft(Draft::of(plan.baseline.clone(), Arm::Baseline, "baseline"));
        }
        if population.control.is_none() {
            return Made::Draft(Draft::of(plan.baseline.clone(), Arm::Control, "control"));
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
        let seeded = population.members.values().filter(|m| m.operator.starts_with("seed:")).count();
        if let Some((name, seed)) = plan.seeds.get(seeded) {
            return Made::Draft(Draft::of(seed.clone(), Arm::Evolution, name));
        }
        if seeded < plan.seeds.len() + plan.draws
            && let Some(drawn) = space.random(&mut rng)
        {
            return Made::Draft(Draft::of(drawn, Arm::Evolution, cascade::DRAWN));
        }
        let [evolved, random] = [Arm::Evolution, Arm::Random].map(|arm| population.made(arm) as f64);
        if random < config.random_share * (evolved + random + 1.0)
            && let Some(drawn) = space.random(&mut rng)
        {
            return Made::Draft(Draft::of(drawn, Arm::Random, "random"));
        }
        let made = self.evolve(case, &mut rng);
        if matches!(made, Made::Nothing) && self.searches[case].population.open() == 0 {
            self.searches[case].exhausted = true;
        }
        made
    }

    /// The evolution's own next candidate.
    fn evolve(&self, case: usize, rng: &mut SmallRng) -> Made {
        let search = &self.searches[case];
        let (population, configuration) = (&search.population, self.config.configuration);
        let workshop = Workshop { population, space: &search.space, insights: &self.insights, configuration };
        if workshop.parents().is_empty() && population.open() > 0 {
            // Nobody to begin with yet.
            return Made::Nothing;
        }
        let may_ask = self.config.proposer.is_some() && search.questions[0] - search.questions[1] < QUESTIONS;
        let operators = configuration.operators().iter().copied();
        let mut among: Vec<Operator> = operators.filter(|o| may_ask || *o != Operator::Propose).collect();
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

    /// A baseline that died leaves nothing to compare with.
    fn check_baselines(&self) -> Result<(), EvolveError> {
        for search in &self.searches {
            let population = &search.population;
            let baseline = population.baseline.and_then(|id| population.members.get(&id));
            if let Some(rejection) = baseline.and_then(|member| member.rejection.as_ref()) {
                let (reason, detail) = (rejection.reason.clone(), rejection.detail.clone());
                return Err(EvolveError::Baseline { problem: words(&population.problem), reason, detail });
            }
        }
        Ok(())
    }

    /// The end: what was decided, and why those died that nobody raced.
    fn finish(&mut self) -> Result<(), EvolveError> {
        let mut decisions = Vec::new();
        let mut rejections = Vec::new();
        for case in 0..self.searches.len() {
            if let Some(winner) = finals::winner(self, case) {
                let why = finals::evidence(self, case, winner);
                decisions.push(Decision { what: "promoted".to_owned(), candidate: Some(winner), why });
            }
            let advice = advice::of(self, case);
            let candidate = self.searches[case].population.best;
            decisions.push(Decision { what: advice.what.name().to_owned(), candidate, why: json!(advice) });
            rejections.extend(finals::unraced(&self.searches[case].population));
        }
        self.ledger.together(|ledger| {
            rejections.iter().try_for_each(|(id, rejection)| ledger.rejected(*id, rejection))?;
            decisions.iter().try_for_each(|decision| ledger.decided(self.run, decision))?;
            ledger.event(self.run, RunEvent::Finished)
        })?;
        self.ledger.release(self.run)?;
        self.finished = true;
        Ok(())
    }
}

/// What comes next.
enum Made {
    Draft(Draft),
    Question,
    Nothing,
}

/// Draws in a row that may repeat what is known.
const REPEATS: usize = 64;

fn members_made(population: &Population) -> usize {
    population.members.values().filter(|m| m.counts()).count()
}

/// A number that looks like chance, of three (SplitMix64; Steele, Lea & Flood, "Fast splittable pseudorandom number generators", 2014).
fn mix(seed: u64, case: u64, ordinal: u64) -> u64 {
    let mut z = seed ^ case.rotate_left(40) ^ ordinal.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A problem as the command line takes it.
pub fn words(shape: &Shape) -> String {
    let pair =
        |a: usize, b: usize, between: char| if a == b { a.to_string() } else { format!("{a}{between}{b}") };
    let heads = pair(shape.heads_q, shape.heads_kv, '/');
    let seq = pair(shape.seq_q, shape.seq_kv, 'x');
    let dim = pair(shape.head_dim, shape.head_dim_v, '/');
    let mask = if shape.mask == problem::Mask::None { String::new() } else { format!(",{}", shape.mask) };
    format!("{},{heads},{seq},{dim},{}{mask}", shape.batch, shape.dtype)
}
