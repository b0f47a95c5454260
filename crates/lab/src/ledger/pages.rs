//! What pages ask of the ledger. Every question is answered from summaries and by indexes, so that none depends on how many
//! candidates there are, but for counts.

use std::collections::{HashSet, VecDeque};

use kernels::select::Shape;
use rusqlite::types::FromSql;
use rusqlite::{OptionalExtension, Params, Row, params};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::views::*;
use super::{
    Against, Arm, CandidateId, Forecast, Ledger, LedgerError, MeasurementFact, NewCandidate, ProofFact,
    Rejection, Run, RunId, Screening, TimeKind, Trial,
};
use crate::evolve::{Candidate, Stage};
use crate::provenance::iso8601;

/// Candidates of a run's ranking.
const TOP: usize = 12;
/// Ancestors that are looked up at most.
const ANCESTORS: usize = 60;
/// Forecasts that are drawn, and scored, of more than twice as many.
const POINTS: i64 = 1500;
/// Of so many of the latest rejections one is given as an example of its reason.
const EXAMPLES: i64 = 4000;
/// Children that are named.
const CHILDREN: i64 = 20;

/// The stages in their order.
const STAGES: [Stage; 6] =
    [Stage::Propose, Stage::Screen, Stage::Prove, Stage::Microbench, Stage::Race, Stage::HeldOut];

impl Ledger {
    /// A number that grows with every fact that a page shows.
    ///
    /// # Errors
    /// When the ledger cannot be read, as of each of these functions.
    pub fn stamp(&self) -> Result<i64, LedgerError> {
        let tables = ["run", "run_event", "candidate", "outcome", "measurement", "rejection", "proof"];
        let more = ["forecast", "forecast_outcome", "screening", "decision", "spending"];
        let counts = tables.iter().chain(&more).map(|t| format!("coalesce((SELECT max(id) FROM {t}), 0)"));
        self.one(&format!("SELECT {}", counts.collect::<Vec<_>>().join(" + ")), [], |row| row.get(0))
            .map(Option::unwrap_or_default)
    }

    /// The latest run.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn latest_run(&self) -> Result<Option<RunId>, LedgerError> {
        self.one("SELECT id FROM run ORDER BY id DESC LIMIT 1", [], |row| row.get(0).map(RunId))
    }

    /// Runs, the latest first, before one of them or from the end.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn run_lines(&self, before: Option<RunId>, most: usize) -> Result<Vec<RunLine>, LedgerError> {
        let before = before.map_or(i64::MAX, |run| run.0);
        let sql = "SELECT run.id, device.name, run.at FROM run JOIN device ON device.id = run.device WHERE run.id < ? ORDER BY run.id DESC LIMIT ?";
        let rows = self.all(sql, params![before, most as i64], |row| {
            Ok((RunId(row.get(0)?), row.get::<_, String>(1)?, moment(row.get(2)?)))
        })?;
        rows.into_iter().map(|(id, device, begun)| self.run_line(id, device, begun)).collect()
    }

    fn run_line(&self, id: RunId, device: String, begun: String) -> Result<RunLine, LedgerError> {
        let problems = self.problems_of(id)?;
        let first = problems.first().map(|(number, _)| *number).unwrap_or_default();
        let at = |arm| self.leader(id, first, arm);
        let (baseline, best) = (at(Arm::Baseline)?, self.best(id, first)?);
        let sql = "SELECT coalesce(sum(candidates), 0) FROM tally WHERE run = ?";
        Ok(RunLine {
            id,
            device,
            problems: problems.into_iter().map(|(_, shape)| shape).collect(),
            begun,
            state: self.state(id)?,
            candidates: self.one(sql, [id.0], |row| count(row, 0))?.unwrap_or(0),
            baseline_us: baseline.as_ref().map(|timed| timed.us),
            kind: best.as_ref().or(baseline.as_ref()).map(|timed| timed.kind),
            best_us: best.map(|timed| timed.us),
        })
    }

    fn state(&self, run: RunId) -> Result<RunState, LedgerError> {
        let sql = "SELECT event FROM run_event WHERE run = ? ORDER BY id DESC LIMIT 1";
        let event: Option<String> = self.one(sql, [run.0], |row| row.get(0))?;
        Ok(match event.as_deref() {
            Some("finished") => RunState::Finished,
            Some("stopped") => RunState::Stopped,
            _ => RunState::Open,
        })
    }

    fn problems_of(&self, run: RunId) -> Result<Vec<(i64, Shape)>, LedgerError> {
        let sql =
            "SELECT id, shape FROM problem WHERE id IN (SELECT problem FROM tally WHERE run = ?) ORDER BY id";
        self.all(sql, [run.0], |row| Ok((row.get(0)?, json(row, 1)?)))
    }

    /// A run's page; `None` where there is no such run.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn run_view(&self, id: RunId) -> Result<Option<RunView>, LedgerError> {
        let sql = "SELECT device.name, config, environment, price_per_hour, run.at, device.id FROM run JOIN device ON device.id = run.device WHERE run.id = ?";
        let found = self.one(sql, [id.0], |row| {
            let run = Run {
                device: row.get(0)?,
                config: json(row, 1)?,
                environment: json(row, 2)?,
                price_per_hour: row.get(3)?,
            };
            Ok((run, row.get::<_, i64>(4)?, row.get::<_, i64>(5)?))
        })?;
        let Some((run, begun, device)) = found else { return Ok(None) };
        let problems = self.problems_of(id)?;
        let single = problems.len() == 1;
        let problems = problems
            .into_iter()
            .map(|(number, shape)| self.problem_view(id, device, number, shape, single))
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Some(RunView {
            id,
            begun: moment(begun),
            latest: moment(self.latest(id)?.unwrap_or(begun)),
            state: self.state(id)?,
            funnel: self.funnel(id)?,
            problems,
            deaths: self.deaths(id)?,
            operators: self.operators(id)?,
            forecasts: self.foretold_in(id, device)?,
            spent: self.spending(id)?,
            decisions: self.decisions(id)?,
            run,
        }))
    }

    fn latest(&self, run: RunId) -> Result<Option<i64>, LedgerError> {
        let of = |table: &str| {
            format!("coalesce((SELECT at FROM {table} WHERE run = ?1 ORDER BY id DESC LIMIT 1), 0)")
        };
        let tables = ["candidate", "outcome", "run_event", "decision"].map(of).join(", ");
        let at: Option<i64> = self.one(&format!("SELECT max({tables})"), [run.0], |row| row.get(0))?;
        Ok(at.filter(|at| *at > 0))
    }

    fn problem_view(
        &self,
        run: RunId,
        device: i64,
        number: i64,
        problem: Shape,
        single: bool,
    ) -> Result<ProblemView, LedgerError> {
        let best = self.best(run, number)?;
        // One index knows runs and the other problems: either finds the first of them at once.
        let by = if single { "standing_of_run" } else { "standing_by_time" };
        let sql = format!(
            "SELECT {TIMED} FROM standing INDEXED BY {by} JOIN subject ON subject.id = standing.subject
               WHERE run = ? AND problem = ? AND {} us IS NOT NULL AND arm IN ('evolution', 'random') ORDER BY us LIMIT {TOP}",
            if single { "" } else { "device = ? AND kind = ? AND" }
        );
        let top = match &best {
            _ if single => self.all(&sql, params![run.0, number], timed)?,
            Some(best) => self.all(&sql, params![run.0, number, device, word(best.kind)], timed)?,
            None => Vec::new(),
        };
        let top = top.into_iter().map(|timed| self.raced(timed)).collect::<Result<Vec<_>, _>>()?;
        Ok(ProblemView {
            problem,
            baseline: self.leader(run, number, Arm::Baseline)?,
            curves: self.curves(run, number)?,
            lineage: best.as_ref().map_or(Ok(Vec::new()), |best| self.lineage(best.id))?,
            best,
            niches: self.niches(run, number)?,
            top,
            control: self.leader(run, number, Arm::Control)?,
        })
    }

    /// The promoted one, where one was; else the fastest that was tried.
    fn best(&self, run: RunId, problem: i64) -> Result<Option<Timed>, LedgerError> {
        let sql = "SELECT d.candidate FROM decision d JOIN standing s ON s.candidate = d.candidate
            WHERE d.run = ? AND d.what = 'promoted' AND s.problem = ? AND s.us IS NOT NULL ORDER BY s.us LIMIT 1";
        if let Some(promoted) = self.one(sql, [run.0, problem], |row| row.get(0).map(CandidateId))? {
            return self.timed(promoted);
        }
        let mut best: Option<Timed> = None;
        for arm in [Arm::Baseline, Arm::Random, Arm::Evolution] {
            let leader = self.leader(run, problem, arm)?;
            best = match (best, leader) {
                (Some(best), Some(leader)) if leader.us >= best.us => Some(best),
                (best, leader) => leader.or(best),
            };
        }
        Ok(best)
    }

    /// The fastest of an arm, by races where there were some.
    fn leader(&self, run: RunId, problem: i64, arm: Arm) -> Result<Option<Timed>, LedgerError> {
        for trial in [Trial::Race, Trial::Microbench] {
            let sql = "SELECT candidate FROM progress WHERE run = ? AND problem = ? AND trial = ? AND arm = ? ORDER BY timed DESC LIMIT 1";
            let keys = params![run.0, problem, word(trial), word(arm)];
            if let Some(id) = self.one(sql, keys, |row| row.get(0).map(CandidateId))? {
                return self.timed(id);
            }
        }
        Ok(None)
    }

    fn timed(&self, id: CandidateId) -> Result<Option<Timed>, LedgerError> {
        let sql = format!(
            "SELECT {TIMED} FROM standing JOIN subject ON subject.id = standing.subject WHERE candidate = ? AND us IS NOT NULL"
        );
        self.one(&sql, [id.0], timed)?.map(|timed| self.raced(timed)).transpose()
    }

    /// With its latest race.
    fn raced(&self, timed: Timed) -> Result<Timed, LedgerError> {
        if timed.trial != Trial::Race {
            return Ok(timed);
        }
        let sql = "SELECT incumbent, ratio, ratio_low, ratio_high, noise, verdict FROM measurement
            WHERE candidate = ? AND trial = 'race' AND incumbent IS NOT NULL ORDER BY id DESC LIMIT 1";
        let against = self.one(sql, [timed.id.0], |row| against(row, 0))?.flatten();
        Ok(Timed { against, ..timed })
    }

    fn curves(&self, run: RunId, problem: i64) -> Result<Vec<Curve>, LedgerError> {
        let sql = "SELECT arm, candidates FROM tally WHERE run = ? AND problem = ?";
        let tallies: Vec<(Arm, u64)> =
            self.all(sql, [run.0, problem], |row| Ok((named(row, 0)?, count(row, 1)?)))?;
        let curve = |(arm, tried): (Arm, u64)| {
            let steps = |trial: Trial| {
                let sql = "SELECT candidates, candidate, us FROM progress WHERE run = ? AND problem = ? AND trial = ? AND arm = ? ORDER BY timed";
                self.all(sql, params![run.0, problem, word(trial), word(arm)], |row| {
                    Ok(Improvement {
                        tried: count(row, 0)?,
                        candidate: CandidateId(row.get(1)?),
                        us: row.get(2)?,
                    })
                })
            };
            let mut found = steps(Trial::Microbench)?;
            if found.is_empty() {
                found = steps(Trial::Race)?;
            }
            Ok(Curve { arm, tried, steps: found })
        };
        tallies.into_iter().map(curve).collect()
    }

    /// The candidate and its ancestors, the nearest first.
    fn lineage(&self, best: CandidateId) -> Result<Vec<Ancestor>, LedgerError> {
        let (mut found, mut seen) = (Vec::new(), HashSet::from([best]));
        let mut next = VecDeque::from([best]);
        while let Some(id) = next.pop_front() {
            let sql = "SELECT c.operator, c.changes, s.us FROM candidate c JOIN standing s ON s.candidate = c.id WHERE c.id = ?";
            let row = self.one(sql, [id.0], |row| {
                Ok((row.get::<_, String>(0)?, json(row, 1)?, row.get::<_, Option<f64>>(2)?))
            })?;
            let Some((operator, changes, us)) = row else { continue };
            let parents = self.parents(id)?;
            next.extend(parents.iter().copied().filter(|parent| seen.insert(*parent)));
            found.push(Ancestor { id, operator, parents, changes, us });
            if found.len() >= ANCESTORS {
                break;
            }
        }
        Ok(found)
    }

    fn parents(&self, id: CandidateId) -> Result<Vec<CandidateId>, LedgerError> {
        let sql = "SELECT parent FROM parent WHERE candidate = ? ORDER BY position";
        self.all(sql, [id.0], |row| row.get(0).map(CandidateId))
    }

    fn niches(&self, run: RunId, problem: i64) -> Result<Vec<Niche>, LedgerError> {
        let sql = "SELECT bound, tile, timed, candidate, us FROM niche WHERE run = ? AND problem = ? ORDER BY bound, tile";
        self.all(sql, [run.0, problem], |row| {
            Ok(Niche {
                bound: row.get(0)?,
                tile: row.get(1)?,
                count: count(row, 2)?,
                best: CandidateId(row.get(3)?),
                us: row.get(4)?,
            })
        })
    }

    fn funnel(&self, run: RunId) -> Result<Vec<Passage>, LedgerError> {
        let tasks = |sql: &str, stage: Stage| {
            self.one(sql, params![run.0, word(stage)], |row| count(row, 0)).map(Option::unwrap_or_default)
        };
        let passage = |stage| {
            let entered = tasks("SELECT tasks FROM cost WHERE run = ? AND what = ?", stage)?;
            let died =
                tasks("SELECT coalesce(sum(candidates), 0) FROM death WHERE run = ? AND stage = ?", stage)?;
            // A rejection may be written without a task's answer, too.
            Ok(Passage { stage, entered: entered.max(died), died })
        };
        let all = STAGES.into_iter().map(passage).collect::<Result<Vec<_>, LedgerError>>()?;
        // Runs without a proposer do not have its stage.
        Ok(all.into_iter().filter(|p| p.stage != Stage::Propose || p.entered > 0).collect())
    }

    fn deaths(&self, run: RunId) -> Result<Vec<Death>, LedgerError> {
        let sql = "SELECT stage, reason, sum(candidates) FROM death WHERE run = ? GROUP BY stage, reason ORDER BY 3 DESC, 1, 2";
        let mut deaths = self.all(sql, [run.0], |row| {
            Ok(Death { stage: named(row, 0)?, reason: row.get(1)?, count: count(row, 2)?, example: None })
        })?;
        let sql = "SELECT r.stage, r.reason, r.candidate, r.detail FROM (SELECT * FROM rejection ORDER BY id DESC LIMIT ?) r
            JOIN standing s ON s.candidate = r.candidate WHERE s.run = ?";
        let latest = self.all(sql, [EXAMPLES, run.0], |row| {
            Ok((named::<Stage>(row, 0)?, row.get::<_, String>(1)?, CandidateId(row.get(2)?), row.get(3)?))
        })?;
        for (stage, reason, candidate, detail) in latest {
            let death = deaths.iter_mut().find(|d| d.stage == stage && d.reason == reason);
            if let Some(death @ Death { example: None, .. }) = death {
                death.example = Some((candidate, detail));
            }
        }
        Ok(deaths)
    }

    fn operators(&self, run: RunId) -> Result<Vec<Earnings>, LedgerError> {
        let sql = "SELECT operator, candidates, timed, faster, promoted, gain FROM operator_tally WHERE run = ? ORDER BY gain DESC, candidates DESC LIMIT 40";
        self.all(sql, [run.0], |row| {
            Ok(Earnings {
                operator: row.get(0)?,
                tried: count(row, 1)?,
                timed: count(row, 2)?,
                faster: count(row, 3)?,
                promoted: count(row, 4)?,
                gain: row.get(5)?,
            })
        })
    }

    fn spending(&self, run: RunId) -> Result<Vec<(String, f64)>, LedgerError> {
        let sql = "SELECT what, device_seconds FROM cost WHERE run = ? AND device_seconds > 0 ORDER BY device_seconds DESC";
        self.all(sql, [run.0], |row| Ok((row.get(0)?, row.get(1)?)))
    }

    fn decisions(&self, run: RunId) -> Result<Vec<Decided>, LedgerError> {
        let sql = "SELECT what, candidate, why, at FROM (SELECT * FROM decision WHERE run = ? ORDER BY id DESC LIMIT 50) ORDER BY id";
        self.all(sql, [run.0], |row| {
            let candidate = row.get::<_, Option<i64>>(1)?.map(CandidateId);
            Ok(Decided { what: row.get(0)?, candidate, why: json(row, 2)?, when: moment(row.get(3)?) })
        })
    }

    /// The model's forecasts of a run's candidates.
    fn foretold_in(&self, run: RunId, device: i64) -> Result<Forecasts, LedgerError> {
        // Numbers grow with time, so a run's forecasts lie between those of its first and last candidates.
        let sql = "SELECT (SELECT min(id) FROM candidate WHERE run = ?1), (SELECT max(id) FROM candidate WHERE run = ?1)";
        let ends: Option<(Option<i64>, Option<i64>)> =
            self.one(sql, [run.0], |row| Ok((row.get(0)?, row.get(1)?)))?;
        let Some((Some(first), Some(last))) = ends else { return Ok(Forecasts::default()) };
        let nearest = |order: &str, candidate: i64| {
            let (sign, function) = if order == "first" { (">=", "min") } else { ("<=", "max") };
            let sql = format!(
                "SELECT {function}(id) FROM (SELECT id FROM forecast WHERE candidate IS NOT NULL AND candidate {sign} ? ORDER BY candidate {} LIMIT 8)",
                if order == "first" { "ASC" } else { "DESC" }
            );
            self.one(&sql, [candidate], |row| row.get::<_, Option<i64>>(0)).map(Option::flatten)
        };
        let (Some(low), Some(high)) = (nearest("first", first)?, nearest("last", last)?) else {
            return Ok(Forecasts::default());
        };
        self.foretold("model", device, (low, high), Some(run))
    }

    /// Pairs of an author on a device in a range of numbers: all of them, or some evenly over the range.
    fn foretold(
        &self,
        author: &str,
        device: i64,
        (low, high): (i64, i64),
        run: Option<RunId>,
    ) -> Result<Forecasts, LedgerError> {
        let range = "author = ? AND device = ? AND forecast BETWEEN ? AND ?";
        let count: i64 = self
            .one(
                &format!("SELECT count(*) FROM pair WHERE {range}"),
                params![author, device, low, high],
                |r| r.get(0),
            )?
            .unwrap_or(0);
        let columns = "f.candidate, p.low_us, p.us, p.high_us, p.measured_us, s.run
            FROM pair p JOIN forecast f ON f.id = p.forecast LEFT JOIN standing s ON s.candidate = f.candidate";
        let point = |row: &Row| {
            let point = Foretold {
                candidate: row.get::<_, Option<i64>>(0)?.map(CandidateId),
                low_us: row.get(1)?,
                us: row.get(2)?,
                high_us: row.get(3)?,
                outcome_us: row.get(4)?,
            };
            Ok((point, row.get::<_, Option<i64>>(5)?.map(RunId)))
        };
        let sql = format!(
            "SELECT {columns} WHERE p.author = ? AND p.device = ? AND p.forecast BETWEEN ? AND ? ORDER BY p.forecast LIMIT ?"
        );
        let found = if count <= 2 * POINTS {
            self.all(&sql, params![author, device, low, high, count], point)?
        } else {
            let starts = (0..POINTS).map(|i| low + (high - low) * i / POINTS);
            let one = |from: i64| self.all(&sql, params![author, device, from, high, 1], point);
            starts.map(one).collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect()
        };
        let mut points: Vec<Foretold> =
            found.into_iter().filter(|(_, of)| run.is_none() || *of == run).map(|(point, _)| point).collect();
        points.dedup();
        let all = if count <= 2 * POINTS { points.len() as u64 } else { count as u64 };
        let score = ForecastScore::of(&points).map(|score| ForecastScore { count: all, ..score });
        Ok(Forecasts { points, score })
    }

    /// Everyone whose forecasts have outcomes: author, device, forecasts.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn forecasters(&self) -> Result<Vec<(String, String, Forecasts)>, LedgerError> {
        let sql = "SELECT author, device, (SELECT name FROM device WHERE id = pair.device) FROM pair
            WHERE (author, device) > (?, ?) ORDER BY author, device LIMIT 1";
        let (mut found, mut after) = (Vec::new(), (String::new(), i64::MIN));
        loop {
            let next = self.one(sql, params![after.0, after.1], |row| {
                Ok((row.get::<_, String>(0)?, row.get::<_, i64>(1)?, row.get::<_, String>(2)?))
            })?;
            let Some((author, device, name)) = next else { return Ok(found) };
            let ends = "SELECT min(forecast), max(forecast) FROM pair WHERE author = ? AND device = ?";
            let ends = self.one(ends, params![author, device], |row| Ok((row.get(0)?, row.get(1)?)))?;
            let forecasts = self.foretold(&author, device, ends.unwrap_or((0, 0)), None)?;
            found.push((author.clone(), name, forecasts));
            after = (author, device);
        }
    }

    /// Ideas that someone forecast, the latest first.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn ideas(&self, before: Option<i64>, most: usize) -> Result<Vec<Told>, LedgerError> {
        let sql =
            "SELECT f.id, f.hypothesis, f.author, d.name, p.shape, f.low_us, f.us, f.high_us, o.us, o.note
            FROM forecast f JOIN device d ON d.id = f.device LEFT JOIN problem p ON p.id = f.problem
            LEFT JOIN forecast_outcome o ON o.forecast = f.id
            WHERE f.candidate IS NULL AND f.id < ? ORDER BY f.id DESC LIMIT ?";
        // The index of ideas is by author first; there are few authors and few ideas.
        self.all(sql, params![before.unwrap_or(i64::MAX), most as i64], |row| {
            let problem = row.get::<_, Option<String>>(4)?.map(|_| json(row, 4)).transpose()?;
            let forecast = Forecast {
                candidate: None,
                hypothesis: row.get(1)?,
                author: row.get(2)?,
                device: row.get(3)?,
                problem,
                low_us: row.get(5)?,
                us: row.get(6)?,
                high_us: row.get(7)?,
            };
            let outcome = row.get::<_, Option<f64>>(8)?.map(|us| Ok::<_, rusqlite::Error>((us, row.get(9)?)));
            Ok(Told { id: row.get(0)?, forecast, outcome: outcome.transpose()? })
        })
    }

    /// Which problems have times on which devices.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn timed_problems(&self) -> Result<Vec<(Shape, String)>, LedgerError> {
        let sql = "SELECT s.problem, s.device, (SELECT shape FROM problem WHERE id = s.problem), (SELECT name FROM device WHERE id = s.device)
            FROM standing s INDEXED BY standing_by_time WHERE s.us IS NOT NULL AND (s.problem, s.device) > (?, ?) ORDER BY s.problem, s.device LIMIT 1";
        let (mut found, mut after) = (Vec::new(), (i64::MIN, i64::MIN));
        loop {
            let next = self.one(sql, params![after.0, after.1], |row| {
                Ok(((row.get(0)?, row.get(1)?), (json::<Shape>(row, 2)?, row.get::<_, String>(3)?)))
            })?;
            let Some((key, named)) = next else { return Ok(found) };
            found.push(named);
            after = key;
        }
    }

    /// The fastest candidates of a problem on a device over all runs, each plan once; measured ones where there are any.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn fastest(&self, problem: &Shape, device: &str, most: usize) -> Result<Vec<Timed>, LedgerError> {
        let shape = serde_json::to_string(problem).unwrap_or_default();
        for kind in [TimeKind::Measured, TimeKind::Predicted] {
            let sql = format!(
                "SELECT {TIMED}, standing.subject FROM standing INDEXED BY standing_by_time JOIN subject ON subject.id = standing.subject
                   WHERE problem = (SELECT id FROM problem WHERE shape = ?) AND device = (SELECT id FROM device WHERE name = ?)
                   AND kind = ? AND us IS NOT NULL AND arm <> 'control' ORDER BY us LIMIT ?"
            );
            // The same plan comes again in every run.
            let keys = params![shape, device, word(kind), 8 * most as i64];
            let rows = self.all(&sql, keys, |row| Ok((timed(row)?, row.get::<_, i64>(SUBJECT)?)))?;
            let mut seen = HashSet::new();
            let each = rows.into_iter().filter(|(_, subject)| seen.insert(*subject)).map(|(timed, _)| timed);
            let found: Vec<Timed> = each.take(most).collect();
            if !found.is_empty() {
                return Ok(found);
            }
        }
        Ok(Vec::new())
    }

    /// Candidates of a run, the latest first, before one of them or from the end.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn candidate_lines(
        &self,
        run: RunId,
        before: Option<CandidateId>,
        most: usize,
    ) -> Result<Vec<CandidateLine>, LedgerError> {
        let sql = "SELECT s.candidate, s.arm, s.operator, s.stage, s.rejected, s.predicted_us, s.us, s.promoted
            FROM candidate c JOIN standing s ON s.candidate = c.id WHERE c.run = ? AND c.id < ? ORDER BY c.id DESC LIMIT ?";
        let before = before.map_or(i64::MAX, |id| id.0);
        self.all(sql, params![run.0, before, most as i64], |row| {
            let stage = row.get::<_, Option<String>>(3)?.map(|_| named(row, 3)).transpose()?;
            Ok(CandidateLine {
                id: CandidateId(row.get(0)?),
                arm: named(row, 1)?,
                operator: row.get(2)?,
                stage,
                rejected: row.get(4)?,
                predicted_us: row.get(5)?,
                us: row.get(6)?,
                promoted: row.get(7)?,
            })
        })
    }

    /// A candidate's page; `None` where there is no such candidate.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn candidate_view(&self, id: CandidateId) -> Result<Option<CandidateView>, LedgerError> {
        let sql = "SELECT c.run, p.shape, s.body, c.arm, c.operator, c.changes, c.at, d.name FROM candidate c JOIN problem p ON p.id = c.problem
            JOIN subject s ON s.id = c.subject JOIN run r ON r.id = c.run JOIN device d ON d.id = r.device WHERE c.id = ?";
        let found = self.one(sql, [id.0], |row| {
            let new = NewCandidate {
                run: RunId(row.get(0)?),
                problem: json(row, 1)?,
                candidate: json(row, 2)?,
                arm: named(row, 3)?,
                operator: row.get(4)?,
                parents: Vec::new(),
                changes: json(row, 5)?,
            };
            Ok((new, moment(row.get(6)?), row.get::<_, String>(7)?))
        })?;
        let Some((new, when, device)) = found else { return Ok(None) };
        let sql = "SELECT candidate FROM parent WHERE parent = ? ORDER BY candidate LIMIT ?";
        Ok(Some(CandidateView {
            id,
            new: NewCandidate { parents: self.parents(id)?, ..new },
            when,
            device,
            screening: self.screening_of(id)?,
            forecasts: self.forecasts_of(id)?,
            proofs: self.proofs_of(id)?,
            measurements: self.measurements_of(id)?,
            rejections: self.rejections_of(id)?,
            children: self.all(sql, [id.0, CHILDREN], |row| row.get(0).map(CandidateId))?,
        }))
    }

    fn screening_of(&self, id: CandidateId) -> Result<Option<(Screening, Value)>, LedgerError> {
        let sql = "SELECT ptx_hash, sass_hash, registers, spill_bytes, shared_bytes, bound, tile, findings FROM screening WHERE candidate = ? ORDER BY id DESC LIMIT 1";
        self.one(sql, [id.0], |row| {
            let screening = Screening {
                ptx_hash: row.get(0)?,
                sass_hash: row.get(1)?,
                registers: row.get(2)?,
                spill_bytes: row.get(3)?,
                shared_bytes: row.get(4)?,
                bound: row.get(5)?,
                tile: row.get(6)?,
            };
            Ok((screening, json(row, 7)?))
        })
    }

    fn forecasts_of(&self, id: CandidateId) -> Result<Vec<Forecast>, LedgerError> {
        let sql = "SELECT f.hypothesis, f.author, d.name, p.shape, f.low_us, f.us, f.high_us FROM forecast f JOIN device d ON d.id = f.device
            LEFT JOIN problem p ON p.id = f.problem WHERE f.candidate = ? ORDER BY f.id LIMIT 20";
        self.all(sql, [id.0], |row| {
            let problem = row.get::<_, Option<String>>(3)?.map(|_| json(row, 3)).transpose()?;
            Ok(Forecast {
                candidate: Some(id),
                hypothesis: row.get(0)?,
                author: row.get(1)?,
                device: row.get(2)?,
                problem,
                low_us: row.get(4)?,
                us: row.get(5)?,
                high_us: row.get(6)?,
            })
        })
    }

    fn proofs_of(&self, id: CandidateId) -> Result<Vec<ProofFact>, LedgerError> {
        let sql = "SELECT judge, verdict, reasons, hazards, error_rel, seconds FROM proof WHERE candidate = ? ORDER BY id LIMIT 20";
        self.all(sql, [id.0], |row| {
            Ok(ProofFact {
                judge: named(row, 0)?,
                verdict: named(row, 1)?,
                reasons: json(row, 2)?,
                hazards: json(row, 3)?,
                error_rel: row.get(4)?,
                seconds: row.get(5)?,
            })
        })
    }

    fn measurements_of(&self, id: CandidateId) -> Result<Vec<MeasurementFact>, LedgerError> {
        let sql = "SELECT m.trial, m.kind, p.shape, m.samples, m.us, m.low_us, m.high_us, m.incumbent, m.ratio, m.ratio_low, m.ratio_high, m.noise, m.verdict
            FROM measurement m JOIN problem p ON p.id = m.problem WHERE m.candidate = ? ORDER BY m.id LIMIT 60";
        self.all(sql, [id.0], |row| {
            let samples: Vec<u8> = row.get(3)?;
            let samples =
                samples.chunks_exact(8).map(|b| f64::from_le_bytes(b.try_into().unwrap_or_default()));
            Ok(MeasurementFact {
                trial: named(row, 0)?,
                kind: named(row, 1)?,
                problem: json(row, 2)?,
                samples: samples.collect(),
                us: row.get(4)?,
                low_us: row.get(5)?,
                high_us: row.get(6)?,
                against: against(row, 7)?,
            })
        })
    }

    fn rejections_of(&self, id: CandidateId) -> Result<Vec<Rejection>, LedgerError> {
        let sql = "SELECT stage, reason, detail FROM rejection WHERE candidate = ? ORDER BY id LIMIT 20";
        self.all(sql, [id.0], |row| {
            Ok(Rejection { stage: named(row, 0)?, reason: row.get(1)?, detail: row.get(2)? })
        })
    }

    fn one<T>(
        &self,
        sql: &str,
        keys: impl Params,
        map: impl FnOnce(&Row) -> rusqlite::Result<T>,
    ) -> Result<Option<T>, LedgerError> {
        let found = self.connection.prepare_cached(sql).and_then(|mut s| s.query_row(keys, map).optional());
        found.map_err(|e| self.error(e))
    }

    fn all<T>(
        &self,
        sql: &str,
        keys: impl Params,
        map: impl FnMut(&Row) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>, LedgerError> {
        let found = self.connection.prepare_cached(sql).and_then(|mut s| s.query_map(keys, map)?.collect());
        found.map_err(|e| self.error(e))
    }
}

/// Columns that [`timed`] reads.
const TIMED: &str = "candidate, arm, operator, subject.body, us, low_us, high_us, kind, trial, promoted";
/// The column after them.
const SUBJECT: usize = 10;

fn timed(row: &Row) -> rusqlite::Result<Timed> {
    Ok(Timed {
        id: CandidateId(row.get(0)?),
        arm: named(row, 1)?,
        operator: row.get(2)?,
        name: in_words(&json::<Candidate>(row, 3)?),
        us: row.get(4)?,
        low_us: row.get(5)?,
        high_us: row.get(6)?,
        kind: named(row, 7)?,
        trial: named(row, 8)?,
        against: None,
        promoted: row.get(9)?,
    })
}

/// The end of a race, from six columns.
fn against(row: &Row, first: usize) -> rusqlite::Result<Option<Against>> {
    let Some(incumbent) = row.get::<_, Option<i64>>(first)? else { return Ok(None) };
    Ok(Some(Against {
        incumbent: CandidateId(incumbent),
        ratio: row.get(first + 1)?,
        low: row.get(first + 2)?,
        high: row.get(first + 3)?,
        noise: row.get(first + 4)?,
        verdict: named(row, first + 5)?,
    }))
}

/// A column of JSON.
fn json<T: DeserializeOwned>(row: &Row, column: usize) -> rusqlite::Result<T> {
    let text = row.get_ref(column)?.as_str().map_err(rusqlite::Error::from)?;
    serde_json::from_str(text).map_err(|error| unreadable(column, error))
}

/// A column with one of the words of a record.
fn named<T: DeserializeOwned>(row: &Row, column: usize) -> rusqlite::Result<T> {
    let text = String::column_result(row.get_ref(column)?).map_err(rusqlite::Error::from)?;
    serde_json::from_value(Value::String(text)).map_err(|error| unreadable(column, error))
}

fn unreadable(column: usize, error: serde_json::Error) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, Box::new(error))
}

/// A column that counts.
fn count(row: &Row, column: usize) -> rusqlite::Result<u64> {
    row.get::<_, i64>(column).map(|n| u64::try_from(n).unwrap_or(0))
}

/// The word of a record.
fn word(value: impl serde::Serialize) -> String {
    serde_json::to_value(value).ok().and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default()
}

/// Milliseconds since 1970 as UTC, ISO 8601.
fn moment(at: i64) -> String {
    iso8601(u64::try_from(at).unwrap_or(0) / 1000)
}
