//! The engine of the search: it hands out tasks and receives outcomes. It has no threads, device or clock, so
//! a run is determined by its configuration and the order of the outcomes. Each outcome is written to the
//! ledger completely before the engine continues, so an interrupted run can be resumed from the ledger.

use std::collections::HashSet;

use kernels::select::Shape;
use serde_json::{Value, json};

use super::config::{Config, Limits};
use super::earlier::{Earlier, TakenOver};
use super::error::EvolveError;
use super::faults::{Faults, Word, is_fault};
use super::finals::Promotion;
use super::guidance::Guidance;
use super::holding::{Holding, WAITED};
use super::member::CandidateState;
use super::population::Population;
use super::report::{RandomArm, random_arm};
use super::space::Space;
use super::task::{Finding, Outcome, Stage, Target, Task};
use super::{advice, finals, rank};
use ledger::{CandidateId, Decision, Environment, Ledger, Rejection, Run, RunEvent, RunId};

/// The next step of the caller.
#[derive(Clone, Debug, PartialEq)]
pub enum Ask {
    /// Evaluate this task and [report the outcome](Evolution::tell).
    Task(Box<Task>),
    /// Ask a proposer and pass on its [answer](Evolution::answer).
    Propose(Box<Question>),
    /// Wait until an open task has an outcome.
    Wait,
    /// The run is finished.
    Done,
}

/// A question to a proposer.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    pub case: usize,
    /// The number of the question within its case.
    pub number: usize,
    /// The proposer's standard input: problem, device, incumbent with its source, findings, values that
    /// helped and history.
    pub brief: Value,
    /// Time of the question, in seconds after the start or resumption of the run.
    pub asked: f64,
    /// Time limit of the proposer's program, s; set if a longer run of the program would disturb the races.
    pub seconds: Option<f64>,
}

/// The search on one problem.
pub(super) struct Search {
    pub(super) population: Population,
    pub(super) space: Space,
    /// Results of earlier runs. `taken_over` counts those that were used.
    pub(super) earlier: Earlier,
    pub(super) taken_over: TakenOver,
    /// Number of questions asked, and number of answers.
    pub(super) questions: [usize; 2],
    /// Whether the operators find no new candidates any more.
    pub(super) exhausted: bool,
    /// Whether the search ended before its budget because no gain was expected.
    pub(super) flat: bool,
    /// Duration of the longest evaluation on the device that gave a time, s.
    pub(super) longest: f64,
}

impl Search {
    /// Number of open questions.
    pub(super) const fn asked(&self) -> usize {
        self.questions[0] - self.questions[1]
    }
}

/// A run.
pub struct Evolution {
    pub(super) ledger: Ledger,
    pub(super) run: RunId,
    pub(super) config: Config,
    pub(super) limits: Limits,
    pub(super) searches: Vec<Search>,
    pub(super) guidance: Guidance,
    under_way: HashSet<(CandidateId, Stage, Shape)>,
    reported: HashSet<(CandidateId, Stage, Shape)>,
    /// Seconds spent by evaluators, and the part of these during which they held the device.
    pub(super) spent: [f64; 2],
    /// Seconds since the start or resumption of the run.
    pub(super) elapsed: f64,
    finished: bool,
    faults: Faults,
    holding: Holding,
}

impl Evolution {
    /// # Errors
    /// When there is nothing to search, or the ledger cannot be written.
    pub fn begin(
        ledger: Ledger,
        mut config: Config,
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
        if config.random_share.is_nan() || config.random_share <= 0.0 {
            let (what, accepted) = ("no random samples", "a share above 0: they show what the search gains");
            return Err(EvolveError::Nothing { what, accepted });
        }
        // Problems that the run itself searches are not used as held-out problems.
        let searched: Vec<Shape> = config.cases.iter().map(|case| case.problem).collect();
        for case in &mut config.cases {
            case.held_out.retain(|(shape, _)| !searched.contains(shape));
        }
        let run = Run { device: config.device.clone(), config: json!(config), environment, price_per_hour };
        let run = ledger.begin_run(&run)?;
        ledger.claim(run)?;
        let mut evolution = Evolution::new(ledger, run, config, limits);
        evolution.look_back()?;
        Ok(evolution)
    }

    /// Resumes a run from its facts in the ledger: its candidates and the outcomes of its tasks, in their
    /// order.
    ///
    /// # Errors
    /// When the ledger has no such run, another process drives it, or its configuration cannot be read.
    pub fn resume(ledger: Ledger, run: RunId, limits: Limits) -> Result<Evolution, EvolveError> {
        // The run is claimed first, so that no other process adds facts after they are read.
        ledger.claim(run)?;
        let known = ledger.resume(run)?;
        let finished = ledger.events(run)?.last().is_some_and(|(_, event)| *event == RunEvent::Finished);
        if finished {
            ledger.release(run);
        } else {
            ledger.event(run, RunEvent::Resumed)?;
        }
        let config = serde_json::from_value(known.run.config)
            .map_err(|error| EvolveError::Config { run: run.0, error })?;
        let mut evolution = Evolution::new(ledger, run, config, limits);
        evolution.look_back()?;
        let failed = known.outcomes.iter().filter(|o| o.stage == Stage::Propose).map(|o| o.candidate);
        let failed: HashSet<CandidateId> = failed.collect();
        for known in &known.candidates {
            evolution.admit(known.id, &known.new, failed.contains(&known.id));
        }
        // The engine derives its own conclusions from each outcome again.
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
            earlier: Earlier::default(),
            taken_over: TakenOver::default(),
            questions: [0, 0],
            exhausted: false,
            flat: false,
            longest: 0.0,
        });
        let searches = searches.collect();
        let mut guidance = Guidance::default();
        for win in &config.wins {
            guidance.learn(&win.family, &win.changes, win.gain, 1.0);
        }
        Evolution {
            ledger,
            run,
            config,
            limits,
            searches,
            guidance,
            under_way: HashSet::new(),
            reported: HashSet::new(),
            spent: [0.0; 2],
            elapsed: 0.0,
            finished: false,
            faults: Faults::default(),
            holding: Holding::default(),
        }
    }

    /// Loads the results of earlier runs for the run's problems.
    fn look_back(&mut self) -> Result<(), EvolveError> {
        for search in &mut self.searches {
            search.earlier = Earlier::new(self.ledger.earlier(self.run, &search.population.problem)?);
        }
        Ok(())
    }

    pub const fn run(&self) -> RunId {
        self.run
    }

    pub const fn config(&self) -> &Config {
        &self.config
    }

    pub const fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Number of open tasks.
    pub fn under_way(&self) -> usize {
        self.under_way.len()
    }

    /// The next step, `elapsed` seconds after the start or resumption of the run.
    ///
    /// # Errors
    /// When the ledger cannot be written, or a baseline was rejected.
    pub fn ask(&mut self, elapsed: f64) -> Result<Ask, EvolveError> {
        self.at(elapsed);
        if let Some(error) = self.bad_baseline() {
            self.fail(&error)?;
            return Err(error);
        }
        if self.finished {
            return Ok(Ask::Done);
        }
        if let Some(error) = self.faults.too_many() {
            self.stop()?;
            return Err(error);
        }
        while let Some(task) = self.ready() {
            match self.known_earlier(&task)? {
                Some(outcome) => self.take_in(&outcome)?,
                None => return Ok(self.hand_out(task)),
            }
        }
        if self.has_room() && !self.is_over() {
            for case in self.turns() {
                if let Some(ask) = self.create(case)? {
                    return Ok(ask);
                }
            }
        }
        // After the time limit, open questions are dropped. If races need all cores of this machine, the
        // engine waits for the questions instead, because a running program would disturb the races.
        let waits = self.in_time() || self.limits == Limits::ALONE && !self.is_over();
        if !self.under_way.is_empty() || self.questions() > 0 && waits {
            return Ok(Ask::Wait);
        }
        if let Some(task) = finals::next(self)? {
            return Ok(self.hand_out(task));
        }
        // No later evaluation can show whether the candidate was at fault.
        if let Some(error) = self.is_unclear() {
            self.stop()?;
            return Err(error);
        }
        let held = self.faults.all();
        if !held.is_empty() {
            held.iter().try_for_each(|outcome| self.take_in(outcome))?;
            return self.ask(elapsed);
        }
        self.finish()?;
        Ok(Ask::Done)
    }

    /// Sets the time in seconds after the start or resumption of the run.
    pub fn at(&mut self, elapsed: f64) {
        self.elapsed = elapsed;
    }

    /// Receives the outcome of a task. A repeated outcome counts once.
    ///
    /// # Errors
    /// When the ledger cannot be written. The ledger then contains nothing of the outcome, and the run can
    /// only be [resumed](Evolution::resume).
    pub fn tell(&mut self, outcome: &Outcome) -> Result<(), EvolveError> {
        let task = (outcome.candidate, outcome.stage, outcome.problem);
        let was_asked = self.under_way.remove(&task);
        if self.reported.contains(&task) || is_fault(outcome) && !was_asked {
            return Ok(());
        }
        let word = self.faults.saw(outcome);
        self.used(outcome, if word == Word::TryAgain { 0.0 } else { outcome.device_seconds });
        match word {
            Word::TryAgain => return Ok(()),
            Word::HeldBack => {
                self.reported.insert(task);
                return Ok(());
            }
            Word::Answer => {}
        }
        for held in self.faults.shown_by(outcome) {
            self.take_in(&held)?;
        }
        self.take_in(outcome)
    }

    /// Applies an outcome and writes it to the ledger.
    fn take_in(&mut self, outcome: &Outcome) -> Result<(), EvolveError> {
        let outcome = match self.owner(outcome.candidate) {
            Some(search) => search.population.normalised(outcome),
            None => outcome.clone(),
        };
        let rejected = self.learn(&outcome);
        let waited = self.holding.waited(false);
        self.ledger.together(|ledger| {
            waited.map_or(Ok(()), |seconds| ledger.spent(self.run, seconds, WAITED))?;
            write(ledger, &outcome, &rejected)
        })
    }

    /// Whether a task of this stage holds a device.
    fn holds(&self, stage: Stage) -> bool {
        stage.is_of_device() && !matches!(self.config.target, Target::Model { .. })
    }

    /// Ends the use of the device by a task whose outcome has arrived.
    fn used(&mut self, outcome: &Outcome, device_seconds: f64) {
        if self.holds(outcome.stage) {
            self.holding.end(self.elapsed, device_seconds);
        }
    }

    /// Writes the device's idle time that is not yet in the ledger.
    fn let_go(&mut self) -> Result<(), EvolveError> {
        if let Some(seconds) = self.holding.waited(true) {
            self.ledger.spent(self.run, seconds, WAITED)?;
        }
        Ok(())
    }

    /// Stops the run: no new task is started, and the run can be resumed.
    ///
    /// # Errors
    /// When the ledger cannot be written.
    pub fn stop(&mut self) -> Result<(), EvolveError> {
        self.let_go()?;
        // Failed tasks are repeated after a resumption, but their device time is spent.
        let lost: f64 = self.faults.all().iter().map(|outcome| outcome.device_seconds).sum();
        if lost > 0.0 {
            self.ledger.spent(self.run, lost, WAITED)?;
        }
        self.ledger.event(self.run, RunEvent::Stopped)?;
        self.ledger.release(self.run);
        Ok(())
    }

    pub(super) fn was_reported(&self, candidate: CandidateId, stage: Stage, problem: &Shape) -> bool {
        self.reported.contains(&(candidate, stage, *problem))
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

    pub(super) fn hand_out(&mut self, task: Task) -> Ask {
        if self.holds(task.stage) {
            self.holding.begin(self.elapsed);
        }
        self.under_way.insert((task.candidate, task.stage, task.problem));
        Ask::Task(Box::new(task))
    }

    /// Applies an outcome without writing it. Returns the candidates that it rejects.
    fn learn(&mut self, outcome: &Outcome) -> Vec<(CandidateId, Rejection)> {
        self.account(outcome);
        let mut searches = self.searches.iter_mut();
        let Some(search) = searches.find(|s| s.population.members.contains_key(&outcome.candidate)) else {
            return Vec::new();
        };
        if outcome.stage.is_of_device() && matches!(outcome.finding, Finding::Timed { .. }) {
            search.longest = search.longest.max(outcome.seconds);
        }
        search.taken_over.learn(outcome);
        search.population.learn(outcome, &mut self.guidance)
    }

    /// Marks an outcome as received and adds its cost.
    pub(super) fn account(&mut self, outcome: &Outcome) {
        self.reported.insert((outcome.candidate, outcome.stage, outcome.problem));
        self.spent[0] += outcome.seconds;
        self.spent[1] += outcome.device_seconds;
    }

    pub(super) fn owner(&self, candidate: CandidateId) -> Option<&Search> {
        self.searches.iter().find(|search| search.population.members.contains_key(&candidate))
    }

    /// Number of open tasks without and with the device.
    pub(super) fn open_tasks(&self) -> [usize; 2] {
        let device = self.under_way.iter().filter(|(_, stage, _)| stage.is_of_device()).count();
        // A running proposer would disturb timings on this machine's processor.
        let asked = if self.limits == Limits::ALONE { self.questions() } else { 0 };
        [self.under_way.len() - device + asked, device]
    }

    /// Number of open questions.
    fn questions(&self) -> usize {
        self.searches.iter().map(Search::asked).sum()
    }

    /// Whether there is time for more than the races at the end.
    pub(super) fn in_time(&self) -> bool {
        self.config.seconds.is_none_or(|seconds| self.elapsed < seconds - finals::reserve(self))
    }

    /// Whether no time is left even for races.
    fn is_over(&self) -> bool {
        self.config.seconds.is_some_and(|seconds| self.elapsed >= seconds)
    }

    /// The next stage of an open candidate. The most expensive stage comes first, so that the device has
    /// work.
    fn ready(&self) -> Option<Task> {
        let [host, device] = self.open_tasks();
        if host + device >= self.limits.together {
            return None;
        }
        let room = |stage: Stage| match stage.is_of_device() {
            true => device < self.limits.device,
            false => host < self.limits.host,
        };
        if self.is_over() {
            return None;
        }
        // With only the races' time left, stop screening, checking and timing, unless no finalist exists yet.
        let in_time = self.in_time();
        let mut ready: Vec<(Stage, bool, f64, CandidateId, usize)> = Vec::new();
        for (case, search) in self.searches.iter().enumerate() {
            let has_time = search.population.members.values().any(|m| m.counts() && m.is_timed());
            let is_measure_known = search.population.baseline_us().is_some();
            for member in search.population.members.values() {
                let CandidateState::Ready(stage) = member.place else { continue };
                let task = (member.id, stage, search.population.problem);
                let is_taken = self.under_way.contains(&task) || self.reported.contains(&task);
                let is_late = !in_time && member.counts() && (has_time || !stage.is_of_device());
                // A time from an earlier run is relative to the baseline's, which is not measured yet.
                let waits = stage == Stage::Microbench
                    && member.counts()
                    && !is_measure_known
                    && search.earlier.has_time(member);
                if !is_taken && !is_late && !waits && room(stage) {
                    ready.push((stage, member.counts(), member.expected_us(), member.id, case));
                }
            }
        }
        // Baseline and control first, then the candidate with the shortest expected time.
        ready.sort_by(|a, b| b.0.cmp(&a.0).then(a.1.cmp(&b.1)).then(a.2.total_cmp(&b.2)).then(a.3.cmp(&b.3)));
        ready.first().and_then(|&(stage, _, _, id, case)| self.task(case, id, stage))
    }

    /// At the end of a run: whether the baseline or the control failed and nothing has succeeded since.
    /// Without them, races have no meaning.
    fn is_unclear(&self) -> Option<EvolveError> {
        let is_measure = |outcome: &&Outcome| {
            let population = self.owner(outcome.candidate).map(|search| &search.population);
            population.is_some_and(|p| [p.baseline, p.control].contains(&Some(outcome.candidate)))
        };
        self.faults.held().iter().find(is_measure).and_then(|outcome| self.faults.row_of(outcome))
    }

    /// The error if the baseline was rejected: there is nothing to compare with.
    fn bad_baseline(&self) -> Option<EvolveError> {
        self.searches.iter().find_map(|search| {
            let population = &search.population;
            let baseline = population.members.get(&population.baseline?)?;
            let Rejection { reason, detail, .. } = baseline.rejection.clone()?;
            Some(EvolveError::Baseline { problem: population.problem.to_string(), reason, detail })
        })
    }

    /// Finishes a run that cannot succeed, so that a command that resumes the latest run does not select it.
    fn fail(&mut self, error: &EvolveError) -> Result<(), EvolveError> {
        if self.finished {
            return Ok(());
        }
        let why = json!({ "why": error.to_string() });
        self.end(&[], &[Decision { what: "failed".to_owned(), candidate: None, why }])
    }

    /// Finishes the run: writes the decisions, and the rejections of candidates that never raced.
    fn finish(&mut self) -> Result<(), EvolveError> {
        let (mut decisions, mut rejections) = (Vec::new(), Vec::new());
        for case in 0..self.searches.len() {
            decisions.extend(self.decision(case));
            let advice = advice::of(self, case);
            let candidate = rank::best(&self.searches[case].population).map(|best| best.id);
            let mut why = json!(advice);
            let RandomArm { gain, says, .. } = random_arm(&self.searches[case].population);
            why[ledger::CHANCE] = json!({ "gain": gain, "says": says });
            decisions.push(Decision { what: advice.what.name().to_owned(), candidate, why });
            rejections.extend(finals::ends(self, case));
        }
        self.end(&rejections, &decisions)
    }

    /// The decision on a promotion, with the figures behind it.
    fn decision(&self, case: usize) -> Option<Decision> {
        let (what, id, refusal) = match finals::promotion(self, case) {
            Promotion::Nobody => return None,
            Promotion::Granted(id) => ("promoted", id, None),
            Promotion::Refused(id, why) => ("refused", id, Some(why)),
        };
        let member = self.searches[case].population.members.get(&id)?;
        let mut why = json!(finals::evidence(self, case, member));
        if let Some(refusal) = refusal {
            why["why"] = json!(refusal);
        }
        Some(Decision { what: what.to_owned(), candidate: Some(id), why })
    }

    fn end(
        &mut self,
        rejections: &[(CandidateId, Rejection)],
        decisions: &[Decision],
    ) -> Result<(), EvolveError> {
        self.let_go()?;
        self.ledger.together(|ledger| {
            rejections.iter().try_for_each(|(id, rejection)| ledger.rejected(*id, rejection))?;
            decisions.iter().try_for_each(|decision| ledger.decided(self.run, decision))?;
            ledger.event(self.run, RunEvent::Finished)
        })?;
        self.ledger.release(self.run);
        self.finished = true;
        Ok(())
    }

    /// Whether the run is complete. A complete run can only be reported.
    pub const fn is_finished(&self) -> bool {
        self.finished
    }
}

/// Writes an outcome and the rejections that follow from it.
pub(super) fn write(
    ledger: &Ledger,
    outcome: &Outcome,
    rejected: &[(CandidateId, Rejection)],
) -> Result<(), EvolveError> {
    if ledger.tell(outcome)? {
        rejected.iter().try_for_each(|(id, rejection)| ledger.rejected(*id, rejection))?;
    }
    Ok(())
}
