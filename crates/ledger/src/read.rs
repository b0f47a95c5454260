//! Reads facts: runs, the state from which a run is resumed, and everything about a candidate.

use kernels::select::Shape;
use rusqlite::types::{Type, ValueRef};
use rusqlite::{OptionalExtension, Params, Row};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{
    Against, CandidateId, CheckFact, Decision, Environment, Forecast, Ledger, LedgerError, MeasurementFact,
    NewCandidate, Rejection, Run, RunEvent, RunId, Screening,
};
use crate::{Candidate, Finding, Outcome};

/// A run in a list.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RunLine {
    pub id: RunId,
    /// Start time, ms since 1970.
    pub at: i64,
    /// The device whose times are optimised.
    pub device: String,
    /// The last event and its time, ms since 1970.
    pub last: Option<(i64, RunEvent)>,
    /// Number of candidates. Baselines and controls are not counted, here and in the fields below.
    pub candidates: i64,
    /// Number of candidates with a time.
    pub timed: i64,
    /// Number of rejected candidates.
    pub rejected: i64,
    /// Number of promoted candidates.
    pub promoted: i64,
    /// Device time so far, s.
    pub device_seconds: f64,
    /// Cost of the device time; `None` without a price.
    pub cost: Option<f64>,
}

/// A candidate as it was added.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Known {
    pub id: CandidateId,
    /// Time of adding, ms since 1970.
    pub at: i64,
    pub new: NewCandidate,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Decided {
    /// Time of the decision, ms since 1970.
    pub at: i64,
    pub decision: Decision,
}

/// The facts from which a run is resumed.
#[derive(Clone, Debug)]
pub struct Resumed {
    /// The run with its configuration.
    pub run: Run,
    /// The candidates in the order of adding.
    pub candidates: Vec<Known>,
    /// The outcomes in the order of arrival.
    pub outcomes: Vec<Outcome>,
    /// The decisions in order.
    pub decisions: Vec<Decided>,
}

/// All facts about a candidate.
#[derive(Clone, Debug, Serialize)]
pub struct Dossier {
    pub known: Known,
    /// The hash of the plan or the kernel.
    pub hash: String,
    /// Properties of the kernel, with the findings of the diagnosis.
    pub screening: Option<(Screening, Value)>,
    pub forecasts: Vec<Forecast>,
    pub checks: Vec<CheckFact>,
    pub measurements: Vec<MeasurementFact>,
    pub rejections: Vec<Rejection>,
    /// The candidates that have this candidate as a parent.
    pub children: Vec<CandidateId>,
}

impl Ledger {
    /// All runs, newest first.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn runs(&self) -> Result<Vec<RunLine>, LedgerError> {
        let sql = "SELECT r.id, r.at, d.name, r.price_per_hour,
             (SELECT at FROM run_event e WHERE e.run = r.id ORDER BY id DESC LIMIT 1),
             (SELECT event FROM run_event e WHERE e.run = r.id ORDER BY id DESC LIMIT 1),
             coalesce(sum(t.candidates), 0), coalesce(sum(t.timed), 0), coalesce(sum(t.rejected), 0), coalesce(sum(t.promoted), 0),
             (SELECT coalesce(sum(device_seconds), 0.0) FROM cost c WHERE c.run = r.id)
           FROM run r JOIN device d ON d.id = r.device LEFT JOIN tally t ON t.run = r.id AND t.arm IN ('evolution', 'random') GROUP BY r.id ORDER BY r.id DESC";
        self.rows(sql, [], |row| {
            let (price, device_seconds): (Option<f64>, f64) = (row.get(3)?, row.get(10)?);
            let event: Option<String> = row.get(5)?;
            let last = match event {
                Some(_) => Some((row.get(4)?, unword(row, 5)?)),
                None => None,
            };
            Ok(RunLine {
                id: RunId(row.get(0)?),
                at: row.get(1)?,
                device: row.get(2)?,
                last,
                candidates: row.get(6)?,
                timed: row.get(7)?,
                rejected: row.get(8)?,
                promoted: row.get(9)?,
                device_seconds,
                cost: price.map(|price| price * device_seconds / 3600.0),
            })
        })
    }

    /// # Errors
    /// When there is no such run, or the ledger cannot be read.
    pub fn run(&self, run: RunId) -> Result<Run, LedgerError> {
        let sql = "SELECT d.name, config, environment, price_per_hour FROM run r JOIN device d ON d.id = r.device WHERE r.id = ?";
        let found = self.row(sql, [run.0], |row| {
            let environment: Environment = parse(row, 2)?;
            Ok(Run { device: row.get(0)?, config: parse(row, 1)?, environment, price_per_hour: row.get(3)? })
        })?;
        found.ok_or_else(|| self.unknown(format!("run {}", run.0)))
    }

    /// The events of a run in order, with their times in ms since 1970.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn events(&self, run: RunId) -> Result<Vec<(i64, RunEvent)>, LedgerError> {
        self.rows("SELECT at, event FROM run_event WHERE run = ? ORDER BY id", [run.0], |row| {
            Ok((row.get(0)?, unword(row, 1)?))
        })
    }

    /// The decisions of a run in order.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn decisions(&self, run: RunId) -> Result<Vec<Decided>, LedgerError> {
        self.latest_decisions(run, usize::MAX)
    }

    /// The latest decisions of a run, at most `most`, in order.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn latest_decisions(&self, run: RunId, most: usize) -> Result<Vec<Decided>, LedgerError> {
        let sql = "SELECT at, what, candidate, why FROM decision WHERE run = ? ORDER BY id DESC LIMIT ?";
        let mut decided = self.rows(sql, (run.0, rows(most)), |row| {
            let candidate = row.get::<_, Option<i64>>(2)?.map(CandidateId);
            Ok(Decided {
                at: row.get(0)?,
                decision: Decision { what: row.get(1)?, candidate, why: parse(row, 3)? },
            })
        })?;
        decided.reverse();
        Ok(decided)
    }

    /// The facts from which a run is resumed, read in one transaction.
    ///
    /// # Errors
    /// When there is no such run, or the ledger cannot be read.
    pub fn resume(&self, run: RunId) -> Result<Resumed, LedgerError> {
        let moment = self.connection.unchecked_transaction().map_err(|e| self.error(e))?;
        let outcomes = self.outcomes(run, 0, usize::MAX)?;
        let resumed = Resumed {
            run: self.run(run)?,
            candidates: self.candidates(run, CandidateId(0), usize::MAX)?,
            outcomes: outcomes.into_iter().map(|(_, outcome)| outcome).collect(),
            decisions: self.decisions(run)?,
        };
        moment.finish().map_err(|e| self.error(e))?;
        Ok(resumed)
    }

    /// Candidates of a run after a given one, in the order of adding.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn candidates(
        &self,
        run: RunId,
        after: CandidateId,
        limit: usize,
    ) -> Result<Vec<Known>, LedgerError> {
        let sql = format!("{KNOWN} WHERE c.run = ? AND c.id > ? ORDER BY c.id LIMIT ?");
        let mut known = self.rows(&sql, (run.0, after.0, rows(limit)), known)?;
        known.iter_mut().try_for_each(|known| self.add_parents(known))?;
        Ok(known)
    }

    /// Outcomes of a run after a given number (0 for all), in the order of arrival, each with its number.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn outcomes(&self, run: RunId, after: i64, limit: usize) -> Result<Vec<(i64, Outcome)>, LedgerError> {
        let sql = "SELECT o.id, o.candidate, o.stage, p.shape, o.seconds, o.device_seconds, o.finding
           FROM outcome o JOIN problem p ON p.id = o.problem WHERE o.run = ? AND o.id > ? ORDER BY o.id LIMIT ?";
        let told = self.rows(sql, (run.0, after, rows(limit)), |row| {
            let candidate = CandidateId(row.get(1)?);
            let problem: Shape = parse(row, 3)?;
            let kind: String = row.get(6)?;
            Ok((row.get::<_, i64>(0)?, candidate, unword(row, 2)?, problem, row.get(4)?, row.get(5)?, kind))
        })?;
        told.into_iter()
            .map(|(id, candidate, stage, problem, seconds, device_seconds, kind)| {
                let finding = self.finding(id, candidate, &kind)?;
                Ok((id, Outcome { candidate, stage, problem, seconds, device_seconds, finding }))
            })
            .collect()
    }

    fn finding(&self, outcome: i64, candidate: CandidateId, kind: &str) -> Result<Finding, LedgerError> {
        let key = (candidate.0, outcome);
        let lost = || LedgerError::Damaged {
            path: self.path.clone(),
            what: format!("outcome {outcome} of candidate {} has no {kind} row", candidate.0),
        };
        let only = "WHERE candidate = ? AND outcome = ?";
        Ok(match kind {
            "screened" => {
                let (screening, findings) =
                    self.row(&format!("{SCREENING} {only}"), key, screening)?.ok_or_else(lost)?;
                let sql = "SELECT low_us, us, high_us FROM forecast WHERE candidate = ? AND outcome = ? AND author = 'model'";
                let predicted_us = self.row(sql, key, |row| Ok([row.get(0)?, row.get(1)?, row.get(2)?]))?;
                Finding::Screened { screening, predicted_us, findings }
            }
            "judged" => Finding::Judged(self.row(&format!("{CHECK} {only}"), key, check)?.ok_or_else(lost)?),
            "timed" => {
                let check = self.row(&format!("{CHECK} {only}"), key, check)?;
                let timed = self.row(&format!("{MEASUREMENT} {only}"), key, measurement)?;
                Finding::Timed { check, measurement: timed.ok_or_else(lost)? }
            }
            _ => {
                Finding::Rejected(self.row(&format!("{REJECTION} {only}"), key, rejection)?.ok_or_else(lost)?)
            }
        })
    }

    /// All facts about a candidate.
    ///
    /// # Errors
    /// When there is no such candidate, or the ledger cannot be read.
    pub fn candidate(&self, candidate: CandidateId) -> Result<Dossier, LedgerError> {
        let mut known = self
            .row(&format!("{KNOWN} WHERE c.id = ?"), [candidate.0], known)?
            .ok_or_else(|| self.unknown(format!("candidate {}", candidate.0)))?;
        self.add_parents(&mut known)?;
        let of = |select: &str| format!("{select} WHERE candidate = ? ORDER BY id");
        let forecasts = "SELECT f.hypothesis, f.author, d.name, p.shape, f.low_us, f.us, f.high_us FROM forecast f
           JOIN device d ON d.id = f.device LEFT JOIN problem p ON p.id = f.problem WHERE f.candidate = ? ORDER BY f.id";
        Ok(Dossier {
            hash: known.new.candidate.hash(),
            screening: self.rows(&of(SCREENING), [candidate.0], screening)?.pop(),
            forecasts: self.rows(forecasts, [candidate.0], |row| {
                let shape: Option<String> = row.get(3)?;
                let problem = if shape.is_some() { Some(parse(row, 3)?) } else { None };
                Ok(Forecast {
                    candidate: Some(candidate),
                    hypothesis: row.get(0)?,
                    author: row.get(1)?,
                    device: row.get(2)?,
                    problem,
                    low_us: row.get(4)?,
                    us: row.get(5)?,
                    high_us: row.get(6)?,
                })
            })?,
            checks: self.rows(&of(CHECK), [candidate.0], check)?,
            measurements: self.rows(&of(MEASUREMENT), [candidate.0], measurement)?,
            rejections: self.rows(&of(REJECTION), [candidate.0], rejection)?,
            children: self.rows(
                "SELECT candidate FROM parent WHERE parent = ? ORDER BY candidate LIMIT 1000",
                [candidate.0],
                |row| row.get(0).map(CandidateId),
            )?,
            known,
        })
    }

    fn add_parents(&self, known: &mut Known) -> Result<(), LedgerError> {
        let sql = "SELECT parent FROM parent WHERE candidate = ? ORDER BY position";
        known.new.parents = self.rows(sql, [known.id.0], |row| row.get(0).map(CandidateId))?;
        Ok(())
    }

    /// A number that grows with every write to the ledger. A page polls this number to find out whether to
    /// refresh.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn state(&self) -> Result<i64, LedgerError> {
        self.count(
            "SELECT coalesce((SELECT max(id) FROM outcome), 0) + coalesce((SELECT max(id) FROM candidate), 0)
               + coalesce((SELECT max(id) FROM run), 0) + coalesce((SELECT max(id) FROM run_event), 0)
               + coalesce((SELECT max(id) FROM decision), 0) + coalesce((SELECT max(id) FROM forecast), 0)
               + coalesce((SELECT max(id) FROM forecast_outcome), 0) + coalesce((SELECT max(id) FROM spending), 0)
               + coalesce((SELECT max(id) FROM recalibration), 0)",
        )
    }

    pub(super) fn rows<T>(
        &self,
        sql: &str,
        params: impl Params,
        map: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>, LedgerError> {
        let mut statement = self.connection.prepare_cached(sql).map_err(|e| self.error(e))?;
        let rows = statement.query_map(params, map).and_then(Iterator::collect);
        rows.map_err(|e| self.error(e))
    }

    pub(super) fn row<T>(
        &self,
        sql: &str,
        params: impl Params,
        map: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Option<T>, LedgerError> {
        let mut statement = self.connection.prepare_cached(sql).map_err(|e| self.error(e))?;
        statement.query_row(params, map).optional().map_err(|e| self.error(e))
    }
}

const KNOWN: &str = "SELECT c.id, c.at, c.run, p.shape, s.body, c.arm, c.operator, c.changes
   FROM candidate c JOIN problem p ON p.id = c.problem JOIN subject s ON s.id = c.subject";

/// Reads a row of `KNOWN`; the parents are added later.
fn known(row: &Row<'_>) -> rusqlite::Result<Known> {
    let candidate: Candidate = parse(row, 4)?;
    let new = NewCandidate {
        run: RunId(row.get(2)?),
        problem: parse(row, 3)?,
        candidate,
        arm: unword(row, 5)?,
        operator: row.get(6)?,
        parents: Vec::new(),
        changes: parse(row, 7)?,
    };
    Ok(Known { id: CandidateId(row.get(0)?), at: row.get(1)?, new })
}

const SCREENING: &str =
    "SELECT ptx_hash, sass_hash, registers, spill_bytes, shared_bytes, bound, tile, findings FROM screening";

fn screening(row: &Row<'_>) -> rusqlite::Result<(Screening, Value)> {
    let screening = Screening {
        ptx_hash: row.get(0)?,
        sass_hash: row.get(1)?,
        registers: row.get(2)?,
        spill_bytes: row.get(3)?,
        shared_bytes: row.get(4)?,
        bound: row.get(5)?,
        tile: row.get(6)?,
    };
    Ok((screening, parse(row, 7)?))
}

const CHECK: &str = "SELECT judge, verdict, reasons, hazards, error_rel, seconds FROM check_result";

fn check(row: &Row<'_>) -> rusqlite::Result<CheckFact> {
    Ok(CheckFact {
        judge: unword(row, 0)?,
        verdict: unword(row, 1)?,
        reasons: parse(row, 2)?,
        hazards: parse(row, 3)?,
        error_rel: row.get(4)?,
        seconds: row.get(5)?,
    })
}

pub(super) const MEASUREMENT: &str =
    "SELECT trial, kind, (SELECT shape FROM problem p WHERE p.id = problem), samples, us, low_us,
   high_us, incumbent, ratio, ratio_low, ratio_high, noise, verdict FROM measurement";

pub(super) fn measurement(row: &Row<'_>) -> rusqlite::Result<MeasurementFact> {
    let incumbent: Option<i64> = row.get(7)?;
    let against = match incumbent {
        Some(incumbent) => Some(Against {
            incumbent: CandidateId(incumbent),
            ratio: row.get(8)?,
            low: row.get(9)?,
            high: row.get(10)?,
            noise: row.get(11)?,
            verdict: unword(row, 12)?,
        }),
        None => None,
    };
    Ok(MeasurementFact {
        trial: unword(row, 0)?,
        kind: unword(row, 1)?,
        problem: parse(row, 2)?,
        samples: samples(row.get_ref(3)?.as_blob()?),
        us: row.get(4)?,
        low_us: row.get(5)?,
        high_us: row.get(6)?,
        against,
    })
}

/// Decodes samples from their stored form.
pub(super) fn samples(bytes: &[u8]) -> Vec<f64> {
    bytes.as_chunks::<8>().0.iter().map(|chunk| f64::from_le_bytes(*chunk)).collect()
}

const REJECTION: &str = "SELECT stage, reason, detail FROM rejection";

fn rejection(row: &Row<'_>) -> rusqlite::Result<Rejection> {
    Ok(Rejection { stage: unword(row, 0)?, reason: unword(row, 1)?, detail: row.get(2)? })
}

/// Parses the JSON in a column.
pub(super) fn parse<T: DeserializeOwned>(row: &Row<'_>, column: usize) -> rusqlite::Result<T> {
    let text = row.get_ref(column)?.as_str()?;
    serde_json::from_str(text)
        .map_err(|e| rusqlite::Error::FromSqlConversionFailure(column, Type::Text, Box::new(e)))
}

/// Parses an enumeration value that a column stores as a word.
pub(super) fn unword<T: DeserializeOwned>(row: &Row<'_>, column: usize) -> rusqlite::Result<T> {
    serde_json::from_value(Value::String(row.get(column)?))
        .map_err(|e| rusqlite::Error::FromSqlConversionFailure(column, Type::Text, Box::new(e)))
}

/// Like [`unword`], for a column that may be NULL.
pub(super) fn maybe<T: DeserializeOwned>(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<T>> {
    match row.get_ref(column)? {
        ValueRef::Null => Ok(None),
        _ => unword(row, column).map(Some),
    }
}

/// The value of a LIMIT clause; −1 means no limit in SQLite.
pub(super) fn rows(limit: usize) -> i64 {
    i64::try_from(limit).unwrap_or(-1)
}
