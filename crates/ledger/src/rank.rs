//! Queries for the best candidates, their ancestry and the changes that made them faster.

use std::collections::HashSet;

use kernels::select::Shape;
use rusqlite::Params;
use serde::Serialize;
use serde_json::Value;

use super::read::{MEASUREMENT, maybe, measurement, parse, rows, unword};
use super::write::{text, word};
use super::{Against, Arm, CandidateId, Ledger, LedgerError, MadeBy, Reason, RunId, TimeKind, Trial};
use crate::Candidate;

/// A candidate with a time in a ranking.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ranked {
    pub candidate: CandidateId,
    pub run: RunId,
    pub problem: Shape,
    pub device: String,
    /// The plan or the kernel.
    pub subject: Candidate,
    pub arm: Arm,
    /// The operator that made the candidate.
    pub operator: MadeBy,
    pub kind: TimeKind,
    /// The trial behind the time. A race outranks a short timing.
    pub trial: Trial,
    /// Whether the time was derived from an earlier run: that run's ratio to the baseline, times this run's
    /// baseline.
    pub taken_over: bool,
    /// The time, µs. For a candidate that raced, the incumbent's time divided by the ratio of the last race,
    /// so that times from different races are comparable.
    pub us: f64,
    /// Lower end of the interval, µs.
    pub low_us: f64,
    /// Upper end of the interval, µs.
    pub high_us: f64,
    /// The time that the model predicted before, µs.
    pub predicted_us: Option<f64>,
    /// The last race on the candidate's own problem, which decides its rank. The ratio is the speed-up over
    /// the incumbent of the candidate's run. Noise and verdict are those of the [run](Against::in_run).
    pub against: Option<Against>,
    /// The incumbent's time, µs, to which the ratio refers.
    pub incumbent_us: Option<f64>,
    /// The reason of the rejection.
    pub rejected: Option<Reason>,
    pub promoted: bool,
}

/// A candidate in another candidate's line of first parents.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ancestor {
    pub candidate: CandidateId,
    /// All parents. The first is the next ancestor.
    pub parents: Vec<CandidateId>,
    /// The operator that made the candidate.
    pub operator: MadeBy,
    /// The changes against the first parent.
    pub changes: Value,
    /// The time of the short timing, µs; without one, the time of the ranking.
    pub us: Option<f64>,
}

/// The changes of a candidate that won its race.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Win {
    pub candidate: CandidateId,
    /// The plan or the kernel.
    pub subject: Candidate,
    /// The changes against the first parent.
    pub changes: Value,
    /// time(first parent) / time(candidate), both from short timings: the gain of the changes.
    pub gain: f64,
}

const RANKED: &str = "SELECT s.candidate, s.run, p.shape, d.name, j.body, s.arm, s.operator, s.kind, s.trial, s.us, s.low_us, s.high_us,
     s.predicted_us, s.rejected, s.promoted,
     s.kind = 'measured' AND s.trial = 'microbench' AND EXISTS (SELECT 1 FROM measurement m
       WHERE (m.candidate, m.problem, m.trial) = (s.candidate, s.problem, s.trial) AND length(m.samples) = 0)
   FROM standing s JOIN problem p ON p.id = s.problem JOIN device d ON d.id = s.device JOIN subject j ON j.id = s.subject";

/// Candidates whose times are valid: not rejected, rejected as slower, or not raced for lack of budget.
pub(super) fn sound() -> String {
    format!("(s.rejected IS NULL OR s.rejected IN ({}))", Reason::listed(&Reason::RANKED))
}

/// Times up to this ratio are equal: the gain of one over the other is printed as 1.000.
pub const EQUAL: f64 = 1.0005;

/// Arms that are ranked. Baselines and controls are not.
const CANDIDATES: [Arm; 2] = [Arm::Evolution, Arm::Random];

impl Ledger {
    /// The best candidates for a problem on all devices with this name. Measured times come before predicted
    /// ones. Within each kind, winners of a second race come first, then other candidates that raced, then
    /// those with a short timing; each group is sorted by time. Before the first one comes its parent if both
    /// have [equal](EQUAL) times. Equal plans are listed once. Failed
    /// candidates, baselines and controls are not listed.
    ///
    /// # Errors
    /// When no device of the ledger has that name, or the ledger cannot be read.
    pub fn topk(&self, problem: &Shape, device: &str, k: usize) -> Result<Vec<Ranked>, LedgerError> {
        let devices = self.devices_named(device)?;
        let Some(problem) = self.find("SELECT id FROM problem WHERE shape = ?", [text(problem)])? else {
            return Ok(Vec::new());
        };
        let sql = format!(
            "SELECT s.grade, s.us, s.candidate, s.subject FROM standing s
             WHERE s.problem = ? AND s.device = ? AND s.kind = ? AND s.us IS NOT NULL AND {} AND s.arm IN {}
             ORDER BY s.grade DESC, s.us, s.candidate",
            sound(),
            among(&CANDIDATES)
        );
        let (mut best, mut seen) = (Vec::new(), HashSet::new());
        for kind in ["measured", "predicted"] {
            let left = k - best.len();
            let mut found = Vec::new();
            for device in &devices {
                found.extend(self.fastest(&sql, (problem, *device, kind), left, &seen)?);
            }
            best.extend(self.first(found, left, &mut seen)?);
        }
        Ok(best)
    }

    /// The fastest candidates, each plan or kernel once, without those in `known`. Reads the rank index only
    /// as far as necessary.
    fn fastest(
        &self,
        sql: &str,
        params: impl Params,
        k: usize,
        known: &HashSet<i64>,
    ) -> Result<Vec<Fastest>, LedgerError> {
        let mut statement = self.connection.prepare_cached(sql).map_err(|e| self.error(e))?;
        let mut walk = statement.query(params).map_err(|e| self.error(e))?;
        let (mut seen, mut fastest) = (known.clone(), Vec::new());
        while fastest.len() < k
            && let Some(row) = walk.next().map_err(|e| self.error(e))?
        {
            let found = self::fastest(row).map_err(|e| self.error(e))?;
            if seen.insert(found.subject) {
                fastest.push(found);
            }
        }
        Ok(fastest)
    }

    /// Merges the results of several index scans and keeps the first `k`, each plan or kernel once.
    fn first(
        &self,
        mut found: Vec<Fastest>,
        k: usize,
        seen: &mut HashSet<i64>,
    ) -> Result<Vec<Ranked>, LedgerError> {
        found.sort_by(|a, b| {
            b.grade.cmp(&a.grade).then(a.us.total_cmp(&b.us)).then(a.candidate.cmp(&b.candidate))
        });
        found.retain(|fastest| seen.insert(fastest.subject));
        if let Some(best) = found.first() {
            let plainest = self.plainest(*best)?;
            found.retain(|fastest| fastest.subject != plainest.subject);
            seen.insert(plainest.subject);
            found.insert(0, plainest);
        }
        let standing = |fastest: &Fastest| self.standing(fastest.candidate).transpose();
        found.iter().take(k).filter_map(standing).collect()
    }

    /// The nearest first parent with an equal time and grade, or else the candidate: a change that gains
    /// nothing is dropped.
    fn plainest(&self, mut best: Fastest) -> Result<Fastest, LedgerError> {
        let sql = format!(
            "SELECT s.grade, s.us, s.candidate, s.subject FROM parent p JOIN standing s ON s.candidate = p.parent
             JOIN standing c ON c.candidate = p.candidate
             WHERE p.candidate = ?1 AND p.position = 0 AND (s.run, s.problem, s.kind) = (c.run, c.problem, c.kind)
               AND s.grade = c.grade AND s.us <= ?2 AND {} AND s.arm IN {}",
            sound(),
            among(&CANDIDATES)
        );
        while let Some(parent) = self.row(&sql, (best.candidate.0, best.us * EQUAL), fastest)? {
            best = parent;
        }
        Ok(best)
    }

    /// The best candidates of a run on a problem, each plan once, in the order of [`Ledger::topk`].
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn best_of_run(&self, run: RunId, problem: &Shape, k: usize) -> Result<Vec<Ranked>, LedgerError> {
        self.best_among(run, problem, &CANDIDATES, k)
    }

    /// The best candidate of one arm of a run on a problem, in the order of [`Ledger::topk`].
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn best_of_arm(&self, run: RunId, problem: &Shape, arm: Arm) -> Result<Option<Ranked>, LedgerError> {
        Ok(self.best_among(run, problem, &[arm], 1)?.pop())
    }

    fn best_among(
        &self,
        run: RunId,
        problem: &Shape,
        arms: &[Arm],
        k: usize,
    ) -> Result<Vec<Ranked>, LedgerError> {
        // Each arm is queried separately, because the index is sorted by arm: the best candidate of a slow
        // arm would come after thousands of candidates of another arm.
        let sql = format!(
            "SELECT s.grade, s.us, s.candidate, s.subject FROM standing s
             WHERE s.run = ? AND s.problem = (SELECT id FROM problem WHERE shape = ?) AND s.arm = ? AND s.us IS NOT NULL AND {}
             ORDER BY s.grade DESC, s.us, s.candidate",
            sound()
        );
        let (mut found, mut seen) = (Vec::new(), HashSet::new());
        for arm in arms {
            found.extend(self.fastest(&sql, (run.0, text(problem), word(arm)), k, &seen)?);
        }
        self.first(found, k, &mut seen)
    }

    /// The ranking entry of a candidate; `None` while it has no time.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn standing(&self, candidate: CandidateId) -> Result<Option<Ranked>, LedgerError> {
        let sql = format!("{RANKED} WHERE s.candidate = ? AND s.us IS NOT NULL");
        let Some(ranked) = self.row(&sql, [candidate.0], ranked)? else { return Ok(None) };
        let sql = format!("{MEASUREMENT} WHERE id = (SELECT max(id) FROM race WHERE candidate = ?)");
        let race = self.row(&sql, [candidate.0], measurement)?;
        let floor = self.noise_floor(ranked.run, &ranked.problem)?;
        let against = race.and_then(|race| race.against).map(|race| race.in_run(floor));
        let raced = against.filter(|_| ranked.trial == Trial::Race);
        Ok(Some(Ranked { against, incumbent_us: raced.map(|race| race.ratio * ranked.us), ..ranked }))
    }

    /// The noise floor of a run's races on a problem, as a ratio: the largest
    /// [floor](crate::MeasurementFact::noise_floor) of all races, second races included.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn noise_floor(&self, run: RunId, problem: &Shape) -> Result<Option<f64>, LedgerError> {
        let sql = format!(
            "{MEASUREMENT} WHERE trial <> 'microbench' AND problem = (SELECT id FROM problem WHERE shape = ?2)
               AND candidate IN (SELECT s.candidate FROM standing s WHERE s.run = ?1
                 AND s.problem = (SELECT id FROM problem WHERE shape = ?2) AND s.arm = ?3
                 AND s.grade > 0 AND s.us IS NOT NULL AND {})",
            sound()
        );
        let mut floors = Vec::new();
        for arm in [Arm::Baseline, Arm::Evolution, Arm::Random, Arm::Control] {
            let races = self.rows(&sql, (run.0, text(problem), word(&arm)), measurement)?;
            floors.extend(races.iter().filter_map(|race| race.noise_floor(arm)));
        }
        Ok(floors.into_iter().max_by(f64::total_cmp))
    }

    /// The best candidate of each problem that has times on a device.
    ///
    /// # Errors
    /// As for [`Ledger::topk`].
    pub fn best_of_problems(&self, device: &str) -> Result<Vec<Ranked>, LedgerError> {
        let problems: Vec<Shape> =
            self.rows("SELECT shape FROM problem ORDER BY id", [], |row| parse(row, 0))?;
        let mut best = Vec::new();
        for problem in problems {
            best.extend(self.topk(&problem, device, 1)?);
        }
        Ok(best)
    }

    /// The race winners on a device, one per problem: the fastest promoted candidate, or without a promoted
    /// one the fastest.
    ///
    /// # Errors
    /// When the ledger cannot be read. An unknown device has no winners.
    pub fn winners(&self, device: &str) -> Result<Vec<(Shape, Candidate)>, LedgerError> {
        let sql = format!(
            "SELECT p.shape, j.body FROM problem p JOIN subject j ON j.id = (
               SELECT s.subject FROM standing s WHERE s.device = (SELECT id FROM device WHERE name = ?) AND s.problem = p.id AND s.won = 1
                 AND {} AND s.arm IN {} ORDER BY s.promoted DESC, s.grade DESC, s.us LIMIT 1) ORDER BY p.id",
            sound(),
            among(&CANDIDATES)
        );
        self.rows(&sql, [device], |row| Ok((parse(row, 0)?, parse(row, 1)?)))
    }

    /// # Errors
    /// When the ledger cannot be read.
    pub fn devices(&self) -> Result<Vec<String>, LedgerError> {
        self.rows("SELECT name FROM device ORDER BY name", [], |row| row.get(0))
    }

    /// Row numbers of the devices whose name contains the words of `name`: `h200` matches `H200` and
    /// `NVIDIA H200`.
    pub(super) fn devices_named(&self, name: &str) -> Result<Vec<i64>, LedgerError> {
        let words = |name: &str| -> Vec<String> {
            let lower = name.to_lowercase();
            lower.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty()).map(str::to_owned).collect()
        };
        let sought = words(name);
        let all: Vec<(i64, String)> =
            self.rows("SELECT id, name FROM device ORDER BY id", [], |row| Ok((row.get(0)?, row.get(1)?)))?;
        let named: Vec<i64> = all
            .iter()
            .filter(|(_, device)| {
                !sought.is_empty() && words(device).windows(sought.len()).any(|part| part == sought)
            })
            .map(|(id, _)| *id)
            .collect();
        if !named.is_empty() {
            return Ok(named);
        }
        let known: Vec<&str> = all.iter().map(|(_, name)| name.as_str()).collect();
        let known = if known.is_empty() { "none yet".to_owned() } else { known.join("; ") };
        Err(self.unknown(format!("device {name:?}; its devices: {known}")))
    }

    /// The candidate and its line of first parents, at most `most` entries in all.
    ///
    /// # Errors
    /// When there is no such candidate, or the ledger cannot be read.
    pub fn lineage(&self, candidate: CandidateId, most: usize) -> Result<Vec<Ancestor>, LedgerError> {
        let sql = "WITH RECURSIVE line (id, depth) AS (
             SELECT ?1, 0 UNION ALL SELECT p.parent, depth + 1 FROM line JOIN parent p ON p.candidate = line.id AND p.position = 0 LIMIT ?2
           ) SELECT c.id, c.operator, c.changes,
             coalesce((SELECT us FROM measurement WHERE (candidate, problem, trial) = (c.id, c.problem, 'microbench')),
               (SELECT us FROM standing WHERE candidate = c.id)),
             (SELECT json_group_array(parent) FROM (SELECT parent FROM parent WHERE candidate = c.id ORDER BY position))
           FROM line JOIN candidate c ON c.id = line.id ORDER BY depth";
        let line = self.rows(sql, (candidate.0, rows(most)), |row| {
            Ok(Ancestor {
                candidate: CandidateId(row.get(0)?),
                operator: row.get(1)?,
                changes: parse(row, 2)?,
                us: row.get(3)?,
                parents: parse(row, 4)?,
            })
        })?;
        if line.is_empty() {
            return Err(self.unknown(format!("candidate {}", candidate.0)));
        }
        Ok(line)
    }

    /// The newest races on a device that a candidate won, for any problem, with the gain of the candidate's
    /// changes. A search tries these changes on other candidates.
    ///
    /// # Errors
    /// When the ledger cannot be read. An unknown device has no wins.
    pub fn wins(&self, device: &str, limit: usize) -> Result<Vec<Win>, LedgerError> {
        let sql = "SELECT c.id, j.body, c.changes, theirs.us / ours.us FROM measurement m
             JOIN standing s ON s.candidate = m.candidate JOIN candidate c ON c.id = m.candidate JOIN subject j ON j.id = c.subject
             JOIN parent q ON q.candidate = c.id AND q.position = 0
             JOIN measurement ours ON ours.candidate = c.id AND ours.trial = 'microbench'
             JOIN measurement theirs ON theirs.candidate = q.parent AND theirs.trial = 'microbench'
               AND (theirs.kind, theirs.problem) = (ours.kind, ours.problem)
           WHERE m.verdict = 'FASTER' AND m.trial = 'race' AND s.device = (SELECT id FROM device WHERE name = ?)
           ORDER BY m.id DESC LIMIT ?";
        self.rows(sql, (device, rows(limit)), |row| {
            Ok(Win {
                candidate: CandidateId(row.get(0)?),
                subject: parse(row, 1)?,
                changes: parse(row, 2)?,
                gain: row.get(3)?,
            })
        })
    }
}

/// The arms as an SQL list.
fn among(arms: &[Arm]) -> String {
    let words: Vec<String> = arms.iter().map(|arm| format!("'{}'", word(arm))).collect();
    format!("({})", words.join(", "))
}

/// A row of a rank index.
#[derive(Clone, Copy)]
struct Fastest {
    grade: i64,
    us: f64,
    candidate: CandidateId,
    subject: i64,
}

fn fastest(row: &rusqlite::Row<'_>) -> rusqlite::Result<Fastest> {
    Ok(Fastest {
        grade: row.get(0)?,
        us: row.get(1)?,
        candidate: CandidateId(row.get(2)?),
        subject: row.get(3)?,
    })
}

/// Reads a row of `RANKED`; the race is added later.
fn ranked(row: &rusqlite::Row<'_>) -> rusqlite::Result<Ranked> {
    Ok(Ranked {
        candidate: CandidateId(row.get(0)?),
        run: RunId(row.get(1)?),
        problem: parse(row, 2)?,
        device: row.get(3)?,
        subject: parse(row, 4)?,
        arm: unword(row, 5)?,
        operator: row.get(6)?,
        kind: unword(row, 7)?,
        trial: unword(row, 8)?,
        us: row.get(9)?,
        low_us: row.get(10)?,
        high_us: row.get(11)?,
        predicted_us: row.get(12)?,
        against: None,
        incumbent_us: None,
        rejected: maybe(row, 13)?,
        promoted: row.get(14)?,
        taken_over: row.get(15)?,
    })
}
