//! The report of a run, which is also written as JSON, and its progress.

mod types;

use std::collections::BTreeMap;

use cpu::kept::{KeptPlan, processor};
use kernels::Plan;
use kernels::select::{Kind, TunedRow};
use serde_json::json;

use super::advice;
use super::engine::Evolution;
use super::finals::{self, Promotion};
use super::member::Member;
use super::population::Population;
use super::rank;
use bench::SpeedVerdict;
use ledger::{
    Against, Arm, Candidate, CandidateId, Conclusion, Cost, Environment, Operator, Pair, Reason, Score,
    TimeKind, gain,
};
pub use types::*;

/// The progress of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct RunProgress {
    /// Number of candidates of both arms.
    pub candidates: usize,
    /// Number of rejected candidates.
    pub rejected: usize,
    /// Number of open tasks.
    pub under_way: usize,
    /// The best time so far, µs, and its speed-up over the baseline, for the first problem that has one.
    pub best: Option<(f64, f64)>,
    /// The figures of the best random sample.
    pub random: Option<(f64, f64)>,
    /// Maximum number of candidates, if there is one.
    pub budget: Option<usize>,
}

impl Evolution {
    pub fn progress(&self) -> RunProgress {
        let members =
            || self.searches.iter().flat_map(|s| s.population.members.values()).filter(|m| m.counts());
        let beside = |arm: Arm| {
            self.searches.iter().find_map(|s| {
                let us = rank::us(&s.population, rank::best_of(&s.population, arm)?)?;
                Some((us, s.population.baseline_us()? / us))
            })
        };
        RunProgress {
            candidates: members().count(),
            rejected: members().filter(|m| m.rejection.is_some()).count(),
            under_way: self.under_way(),
            best: beside(Arm::Evolution),
            random: beside(Arm::Random),
            budget: self.config.candidates,
        }
    }

    /// The report on the present state of the run.
    pub fn report(&self) -> Report {
        let mut cases: Vec<CaseReport> =
            (0..self.searches.len()).map(|case| self.case_report(case)).collect();
        let cases = match cases.len() {
            1 => Cases::One(Box::new(cases.remove(0))),
            _ => Cases::Several { device: self.config.device.clone(), problems: cases },
        };
        let bill = |cost: Cost| Bill {
            device_seconds: cost.device_seconds,
            price_per_hour: cost.price_per_hour,
            price: cost.price,
        };
        Report {
            cases,
            run: self.run,
            load: self.config.load,
            ledger: self.ledger.path().to_owned(),
            configuration: self.config.configuration,
            seed: self.config.seed,
            seconds: Seconds { evaluators: self.spent[0], device: self.spent[1] },
            cost: self.ledger.cost(self.run).ok().map(bill),
        }
    }

    fn case_report(&self, case: usize) -> CaseReport {
        let population = &self.searches[case].population;
        let best = rank::best(population);
        let floor = population.noise_floor();
        let race = best.and_then(rank::race).map(|race| race.in_run(floor));
        let (promoted, refused) = match finals::promotion(self, case) {
            Promotion::Granted(id) => (population.members.get(&id), None),
            Promotion::Refused(id, why) => (None, Some(Refused { id, why })),
            Promotion::Nobody => (None, None),
        };
        let baseline = population.baseline.and_then(|id| population.members.get(&id));
        let held = self.config.cases[case].held_out.iter().filter_map(|(shape, _)| {
            best.map(|member| HeldOutEnd::new(*shape, finals::fate(self, member, shape)))
        });
        let shipped = finals::shipped(population);
        let refused = refused.filter(|_| self.is_finished());
        let conclusion = Conclusion {
            kind: best.or(baseline).and_then(|m| m.kind),
            best: best.map(|best| (best.id, race)),
            promoted: promoted.and_then(|winner| Some((winner.id, rank::race(winner)?))),
            refused: refused.as_ref().map(|refused| refused.why.as_str()),
            floor,
        };
        CaseReport {
            conclusion: conclusion.words(),
            problem: population.problem,
            words: population.problem.to_string(),
            device: self.config.device.clone(),
            kind: conclusion.kind,
            baseline: baseline.map(Shown::new),
            best: best.map(|member| Shown::ranked(population, member)),
            speedup: race.map(|race| race.ratio),
            interval: race.map(|race| [race.low, race.high]),
            verdict: race.map(|race| race.verdict),
            noise_floor: floor,
            promoted: promoted.map(|member| self.promoted_as(case, member)),
            refused,
            held_out: held.collect(),
            shipped: shipped.map(|m| Shipped { candidate: m.candidate.clone(), race: m.race }),
            random_arm: random_arm(population),
            control: control(population),
            candidates: counts(population),
            rejected: self.rejected(case),
            taken_over: self.searches[case].taken_over,
            skipped: if self.is_finished() { finals::skipped(self, case) } else { Vec::new() },
            forecasts: forecasts(population),
            operators: population.bandit.accounts(),
            niches: niches(population),
            decision: advice::of(self, case),
        }
    }

    /// The promoted candidate with its races and its row of the tuned table, or the reason why there is no
    /// row.
    fn promoted_as(&self, case: usize, member: &Member) -> Winner {
        let row = self.row(case, member, &Environment::default(), "", "");
        Winner {
            evidence: finals::evidence(self, case, member),
            id: member.id,
            candidate: member.candidate.clone(),
            kept: self.kept(case, member, "", "").is_some(),
            no_row: row.as_ref().err().copied(),
            row: row.ok().map(|row| {
                let mut row = json!(row);
                // The origin is stated with the run.
                for key in ["driver", "commit", "run", "when"] {
                    row.as_object_mut().map(|row| row.remove(key));
                }
                row
            }),
        }
    }

    /// A winner's row of the tuned table, or the reason why it has none.
    fn row(
        &self,
        case: usize,
        winner: &Member,
        environment: &Environment,
        run: &str,
        when: &str,
    ) -> Result<TunedRow, &'static str> {
        let plan = tabled(&winner.candidate)?.clone();
        let arch = self.config.arch.ok_or("the table is of GPU kernels' plans")?;
        Ok(TunedRow {
            device: self.config.device.clone(),
            sm: arch.sm,
            multiprocessors: arch.multiprocessors,
            problem: self.searches[case].population.problem,
            plan,
            us: winner.race_us.ok_or("it has no race")?,
            kind: match winner.kind {
                Some(TimeKind::Measured) => Kind::Measured,
                Some(TimeKind::Predicted) | None => Kind::Predicted,
            },
            driver: environment.driver.clone(),
            commit: environment.commit.clone().unwrap_or_default(),
            run: run.to_owned(),
            when: when.to_owned(),
        })
    }

    /// A winner of a CPU search as a plan for the user's file of saved plans.
    fn kept(&self, case: usize, winner: &Member, run: &str, when: &str) -> Option<KeptPlan> {
        let Candidate::Cpu(plan) = winner.candidate else { return None };
        Some(KeptPlan {
            processor: processor().to_owned(),
            threads: cpu::threads(),
            problem: self.searches[case].population.problem,
            plan,
            speedup: self.gain_over_use(case, winner),
            source: run.to_owned(),
            when: when.to_owned(),
        })
    }

    /// A winner's speed divided by that of the plan that calls used when the run began: the shipped plan if
    /// the run has another baseline, else the baseline.
    fn gain_over_use(&self, case: usize, winner: &Member) -> Option<f64> {
        match self.config.cases[case].shipped {
            Some(_) => {
                let race = finals::shipped_against(&self.searches[case].population, winner.id);
                race.map(|race| 1.0 / race.ratio)
            }
            None => rank::race(winner).map(|race| race.ratio),
        }
    }

    /// The winners, as rows of the tuned table or as plans to keep where possible.
    pub fn promoted(&self, environment: &Environment, run: &str, when: &str) -> Vec<Promoted> {
        let winner = |case: usize| match finals::promotion(self, case) {
            Promotion::Granted(id) => self.searches[case].population.members.get(&id),
            Promotion::Refused(..) | Promotion::Nobody => None,
        };
        let winners = (0..self.searches.len()).filter_map(|case| Some((case, winner(case)?)));
        let rows = winners.map(|(case, winner)| match self.kept(case, winner, run, when) {
            Some(kept) => Promoted::Kept(winner.id, Box::new(kept)),
            None => match self.row(case, winner, environment, run, when) {
                Ok(row) => Promoted::Row(Box::new(row)),
                Err(why) => Promoted::NoRow { candidate: winner.id, why },
            },
        });
        rows.collect()
    }

    /// Rejections by reason, each candidate once, as the ledger counts them.
    fn rejected(&self, case: usize) -> BTreeMap<Reason, usize> {
        let members = self.searches[case].population.members.values().filter(|m| m.counts());
        let rejected = members.filter_map(|m| m.rejection.clone());
        // The remaining candidates get their rejections when the run is finished.
        let ends = if self.is_finished() { finals::ends(self, case) } else { Vec::new() };
        let mut reasons = BTreeMap::new();
        for rejection in rejected.chain(ends.into_iter().map(|(_, rejection)| rejection)) {
            *reasons.entry(rejection.reason).or_insert(0) += 1;
        }
        reasons
    }
}

/// The form in which a winner can be kept.
#[derive(Clone, Debug, PartialEq)]
pub enum Promoted {
    /// A row of the tuned table of GPU kernels.
    Row(Box<TunedRow>),
    /// A plan for the user's file of saved plans.
    Kept(CandidateId, Box<KeptPlan>),
    /// The winner cannot be a row.
    NoRow { candidate: CandidateId, why: &'static str },
}

/// The plan for a winner's row, or the reason why there is none.
fn tabled(winner: &Candidate) -> Result<&Plan, &'static str> {
    match winner {
        Candidate::Gpu(plan) => Ok(plan),
        Candidate::Cpu(_) => Err("the table is of GPU kernels' plans"),
        Candidate::Kernel(_) => Err("it is a whole kernel, and no plan gives it"),
    }
}

/// The report on the random arm: its candidates, and the evolution's gain over it. Equal numbers of
/// candidates are compared. The best of each arm is chosen by the short timing, so that its race is free of
/// selection bias.
pub(super) fn random_arm(population: &Population) -> RandomArm {
    let equal = population.equal_budget();
    let [ours, random] = [Arm::Evolution, Arm::Random].map(|arm| population.best_of(arm, equal));
    let floor = population.noise_floor().unwrap_or(1.0);
    let gained = race_of(population, ours).zip(race_of(population, random)).map(|(o, r)| gain(&o, &r, floor));
    let is_given = ours.is_some_and(is_seed);
    let is_tried = |m: &Member| m.counts() && (m.rejection.is_some() || m.is_timed());
    let says = match (ours, random, gained) {
        (None, None, _) if !population.members.values().any(is_tried) => {
            "there was no time to evaluate a candidate"
        }
        _ if equal == 0 => "too few candidates were made for a random sample",
        (None, None, _) => "neither found a kernel that works",
        (Some(_), None, _) => "no random sample has a time",
        (None, Some(_), _) => "only random samples have a time",
        (_, _, None) => "not known, because the best of a group has not raced",
        (_, _, Some(gain)) => match gain.verdict {
            SpeedVerdict::Faster if is_given => {
                "the initial candidates are faster than the random samples; the search found nothing faster"
            }
            _ => gain.says(),
        },
    };
    let us = |member: Option<&Member>| member.and_then(|m| m.time).map(|time| time.us);
    let seeds = population.members.values().filter(|m| m.arm == Arm::Evolution && is_seed(m) && m.is_timed());
    let best_seed = seeds.min_by(|a, b| a.expected_us().total_cmp(&b.expected_us()));
    RandomArm {
        candidates: population.made(Arm::Random),
        best: rank::best_of(population, Arm::Random).map(|m| Shown::ranked(population, m)),
        race: race_of(population, random),
        gain: gained,
        at_equal_budget: EqualBudget { candidates: equal, evolution_us: us(ours), random_us: us(random) },
        best_seed: best_seed.map(Shown::new),
        says,
    }
}

/// Whether the candidate was given as a seed: from the tuned table, the ledger or a family's default. Random
/// samples that the time model picked are not seeds.
fn is_seed(member: &Member) -> bool {
    member.operator.operator == Operator::Seed && !member.is_drawn() || member.arm == Arm::Baseline
}

/// A race against the baseline. For the baseline itself, the control's race.
fn race_of(population: &Population, member: Option<&Member>) -> Option<Against> {
    let member = member?;
    match population.baseline == Some(member.id) {
        true => population.members.get(&population.control?)?.race,
        false => member.race,
    }
}

/// The report on the control: its verdict must be undecided.
fn control(population: &Population) -> Control {
    let control = population.control.and_then(|id| population.members.get(&id));
    let race = control.and_then(|m| m.race);
    Control {
        verdict: race.map(|race| race.verdict),
        race,
        rejection: control.and_then(|m| m.rejection.clone()),
        sound: finals::is_sound(population),
    }
}

fn counts(population: &Population) -> Counts {
    let count =
        |of: &dyn Fn(&Member) -> bool| population.members.values().filter(|m| m.counts() && of(m)).count();
    Counts {
        total: count(&|_| true),
        evolution: population.made(Arm::Evolution),
        random: population.made(Arm::Random),
        screened: count(&|m| m.screening.is_some()),
        timed: count(&|m| m.time.is_some()),
        raced: count(&|m| m.race.is_some()),
    }
}

/// The score of the forecasts of times that this run measured afterwards. If the times themselves are
/// predicted, there is no score.
fn forecasts(population: &Population) -> Forecasts {
    let count = population.members.values().filter(|m| m.predicted.is_some()).count();
    let is_new = |m: &&Member| m.kind == Some(TimeKind::Measured) && !m.is_taken_over && m.counts();
    let pairs: Vec<Pair> = (population.members.values().filter(is_new))
        .filter_map(|m| {
            let ([low_us, us, high_us], measured_us) = (m.predicted?, m.time?.us);
            Some(Pair { forecast: 0, candidate: Some(m.id), low_us, us, high_us, measured_us })
        })
        .collect();
    let score = (!pairs.is_empty()).then(|| Score::of("model", "", &pairs));
    Forecasts {
        count,
        measured: pairs.len(),
        score: score.map(|score| Scored {
            bias: score.bias,
            coverage: score.coverage,
            rank_correlation: score.spearman,
            median_error: score.median_error,
        }),
    }
}

fn niches(population: &Population) -> Vec<NicheBest> {
    let ranked = population.niches.ranked().into_iter();
    ranked
        .map(|((bound, tile), elite)| NicheBest {
            bound: bound.clone(),
            tile: tile.clone(),
            candidate: elite.candidate,
            us: elite.us,
        })
        .collect()
}
