//! Who is best, where it comes from, and what helped.

use std::collections::HashSet;

use kernels::select::Shape;
use serde::Serialize;
use serde_json::Value;

use super::read::{MEASUREMENT, measurement, parse, rows, unword};
use super::write::text;
use super::{Against, Arm, CandidateId, Ledger, LedgerError, RunId, TimeKind, Trial};
use crate::evolve::Candidate;

/// A candidate with a time, among others.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ranked {
    /// Its number.
    pub candidate: CandidateId,
    /// Its run.
    pub run: RunId,
    /// On which problem.
    pub problem: Shape,
    /// On which device.
    pub device: String,
    /// What it is.
    pub subject: Candidate,
    /// Its arm.
    pub arm: Arm,
    /// How it was made.
    pub operator: String,
    /// Measured or predicted.
    pub kind: TimeKind,
    /// By which trial: a race counts for more than a microbench.
    pub trial: Trial,
    /// Its time, µs.
    pub us: f64,
    /// Lower end of its interval.
    pub low_us: f64,
    /// Upper end.
    pub high_us: f64,
    /// What the time model said before, µs.
    pub predicted_us: Option<f64>,
    /// Its last race.
    pub against: Option<Against>,
    /// Why it went no further, in a word.
    pub rejected: Option<String>,
    /// Whether it was promoted.
    pub promoted: bool,
}

/// A candidate in the line of another one's first parents.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Ancestor {
    /// Its number.
    pub candidate: CandidateId,
    /// All of its parents; the first is the next ancestor.
    pub parents: Vec<CandidateId>,
    /// How it was made.
    pub operator: String,
    /// What differs from the first parent.
    pub changes: Value,
    /// Its time, µs, where it has one.
    pub us: Option<f64>,
}

/// A race that was won.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Win {
    /// Who won.
    pub candidate: CandidateId,
    /// On which problem.
    pub problem: Shape,
    /// How it was made.
    pub operator: String,
    /// What differs from its first parent.
    pub changes: Value,
    /// time(incumbent) / time(candidate).
    pub ratio: f64,
}

const RANKED: &str = "SELECT s.candidate, s.run, p.shape, d.name, j.body, s.arm, s.operator, s.kind, s.trial, s.us, s.low_us, s.high_us,
     s.predicted_us, s.rejected, s.promoted
   FROM standing s JOIN problem p ON p.id = s.problem JOIN device d ON d.id = s.device JOIN subject j ON j.id = s.subject";

/// Whose time says nothing: the answer was wrong, or did not come.
const UNSOUND: &str =
    "s.rejected IN ('wrong', 'refuted', 'incomplete', 'hangs', 'crashed', 'poisoned', 'below_roofline')";

impl Ledger {
    /// The best candidates for a problem on the devices of that name: measured ones first, then predicted ones, each by its time, a plan
    /// once however often it was tried. Those found wrong, and the controls, are left out.
    ///
    /// # Errors
    /// When no device of the ledger has that name, or the ledger cannot be read.
    pub fn topk(&self, problem: &Shape, device: &str, k: usize) -> Result<Vec<Ranked>, LedgerError> {
        let devices = self.devices_named(device)?;
        let Some(problem) = self.find("SELECT id FROM problem WHERE shape = ?", [text(problem)])? else {
            return Ok(Vec::new());
        };
        let mut best: Vec<Ranked> = Vec::new();
        for kind in ["measured", "predicted"] {
            let mut of_kind: Vec<(f64, i64, i64)> = Vec::new();
            for device in &devices {
                of_kind.extend(self.fastest(problem, *device, kind, k)?);
            }
            of_kind.sort_by(|a, b| a.0.total_cmp(&b.0));
            for (_, candidate, _) in of_kind.into_iter().take(k.saturating_sub(best.len())) {
                best.extend(self.standing(CandidateId(candidate))?);
            }
        }
        Ok(best)
    }

    /// Time, number and subject of the fastest, each subject once: walks an index by time, as far as need be.
    fn fastest(
        &self,
        problem: i64,
        device: i64,
        kind: &str,
        k: usize,
    ) -> Result<Vec<(f64, i64, i64)>, LedgerError> {
        let sql = format!(
            "SELECT s.us, s.candidate, s.subject FROM standing s WHERE s.problem = ? AND s.device = ? AND s.kind = ? AND s.us IS NOT NULL
               AND s.arm <> 'control' AND coalesce(NOT {UNSOUND}, 1) ORDER BY s.us"
        );
        let mut statement = self.connection.prepare_cached(&sql).map_err(|e| self.error(e))?;
        let mut walk = statement.query((problem, device, kind)).map_err(|e| self.error(e))?;
        let (mut seen, mut fastest) = (HashSet::new(), Vec::new());
        while fastest.len() < k
            && let Some(row) = walk.next().map_err(|e| self.error(e))?
        {
            let read = || Ok((row.get(0)?, row.get(1)?, row.get(2)?));
            let (us, candidate, subject) = read().map_err(|e| self.error(e))?;
            if seen.insert(subject) {
                fastest.push((us, candidate, subject));
            }
        }
        Ok(fastest)
    }

    /// The best candidates of a run, of all its problems, by time.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn best_of_run(&self, run: RunId, problem: &Shape, k: usize) -> Result<Vec<Ranked>, LedgerError> {
        let sql = format!(
            "{RANKED} WHERE s.run = ? AND p.shape = ? AND s.us IS NOT NULL AND coalesce(NOT {UNSOUND}, 1) ORDER BY s.us LIMIT ?"
        );
        let best = self.rows(&sql, (run.0, text(problem), rows(k)), ranked)?;
        best.into_iter().map(|r| self.with_race(r)).collect()
    }

    /// How a candidate stands; `None` while it has no time.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn standing(&self, candidate: CandidateId) -> Result<Option<Ranked>, LedgerError> {
        let sql = format!("{RANKED} WHERE s.candidate = ? AND s.us IS NOT NULL");
        self.row(&sql, [candidate.0], ranked)?.map(|r| self.with_race(r)).transpose()
    }

    fn with_race(&self, ranked: Ranked) -> Result<Ranked, LedgerError> {
        let sql = format!("{MEASUREMENT} WHERE candidate = ? AND trial = 'race' ORDER BY id DESC LIMIT 1");
        let race = self.row(&sql, [ranked.candidate.0], measurement)?;
        Ok(Ranked { against: race.and_then(|race| race.against), ..ranked })
    }

    /// The problems of a device with times, each with its best candidate.
    ///
    /// # Errors
    /// As of [`Ledger::topk`].
    pub fn best_of_problems(&self, device: &str) -> Result<Vec<Ranked>, LedgerError> {
        let problems: Vec<Shape> =
            self.rows("SELECT shape FROM problem ORDER BY id", [], |row| parse(row, 0))?;
        let mut best = Vec::new();
        for problem in problems {
            best.extend(self.topk(&problem, device, 1)?);
        }
        Ok(best)
    }

    /// Names of all devices.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn devices(&self) -> Result<Vec<String>, LedgerError> {
        self.rows("SELECT name FROM device ORDER BY name", [], |row| row.get(0))
    }

    /// Numbers of the devices whose name, or part of it in words, is this: `h200` is `H200` and `NVIDIA H200`.
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

    /// A candidate of a run on this problem that became the same code: its PTX or SASS need not be measured again.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn same_code(
        &self,
        run: RunId,
        problem: &Shape,
        ptx_hash: &str,
        sass_hash: Option<&str>,
    ) -> Result<Option<CandidateId>, LedgerError> {
        let sql = "SELECT min(c.id) FROM candidate c JOIN problem p ON p.id = c.problem WHERE c.run = ?1 AND p.shape = ?2 AND c.id IN (
             SELECT candidate FROM screening WHERE ptx_hash = ?3 UNION ALL SELECT candidate FROM screening WHERE sass_hash = ?4)";
        let found =
            self.row(sql, (run.0, text(problem), ptx_hash, sass_hash), |row| row.get::<_, Option<i64>>(0))?;
        Ok(found.flatten().map(CandidateId))
    }

    /// A candidate and its line of first parents, itself first.
    ///
    /// # Errors
    /// When there is no such candidate, or the ledger cannot be read.
    pub fn lineage(&self, candidate: CandidateId) -> Result<Vec<Ancestor>, LedgerError> {
        let sql = "WITH RECURSIVE line (id, depth) AS (
             SELECT ?1, 0 UNION ALL SELECT p.parent, depth + 1 FROM line JOIN parent p ON p.candidate = line.id AND p.position = 0
           ) SELECT c.id, c.operator, c.changes, s.us,
             (SELECT json_group_array(parent) FROM (SELECT parent FROM parent WHERE candidate = c.id ORDER BY position))
           FROM line JOIN candidate c ON c.id = line.id JOIN standing s ON s.candidate = c.id ORDER BY depth";
        let line = self.rows(sql, [candidate.0], |row| {
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

    /// The newest races that a candidate won, on any problem: what changed there is worth trying here.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn wins(&self, limit: usize) -> Result<Vec<Win>, LedgerError> {
        let sql = "SELECT c.id, p.shape, c.operator, c.changes, m.ratio FROM measurement m JOIN candidate c ON c.id = m.candidate
           JOIN problem p ON p.id = m.problem WHERE m.verdict = 'FASTER' ORDER BY m.id DESC LIMIT ?";
        self.rows(sql, [rows(limit)], |row| {
            Ok(Win {
                candidate: CandidateId(row.get(0)?),
                problem: parse(row, 1)?,
                operator: row.get(2)?,
                changes: parse(row, 3)?,
                ratio: row.get(4)?,
            })
        })
    }
}

/// Without its race.
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
        rejected: row.get(13)?,
        promoted: row.get(14)?,
    })
}
