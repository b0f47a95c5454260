//! Queries of the summaries: counts, rejections, operators' gains, cost, progress curves, niches, and pairs
//! of forecast and measured time.

use kernels::select::Shape;
use serde::Serialize;

use super::read::{parse, rows, unword};
use super::{Arm, CandidateId, Ledger, LedgerError, MadeBy, Reason, RunId, Trial};
use crate::Stage;

/// Counts of candidates in an arm on a problem.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Tally {
    pub problem: Shape,
    pub arm: Arm,
    pub candidates: i64,
    pub screened: i64,
    pub passed: i64,
    pub timed: i64,
    pub raced: i64,
    pub rejected: i64,
    pub promoted: i64,
}

/// Number of candidates rejected for one reason.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RejectionCount {
    pub arm: Arm,
    pub stage: Stage,
    pub reason: Reason,
    pub candidates: i64,
    /// The latest of these candidates.
    pub latest: CandidateId,
    /// The details of the latest rejection.
    pub detail: String,
}

/// How many candidates of an arm went through a stage.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Entered {
    pub arm: Arm,
    pub stage: Stage,
    pub count: i64,
}

/// The results of an operator in a run. Baselines and controls do not count.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Earnings {
    pub operator: MadeBy,
    /// Number of candidates that the operator made.
    pub candidates: i64,
    /// Number of these with a time.
    pub timed: i64,
    /// Number of races that these won.
    pub faster: i64,
    /// Number of these that were promoted.
    pub promoted: i64,
    /// Number of these that were rejected.
    pub rejected: i64,
    /// The product of all factors by which its candidates improved the best time of their arm.
    pub gain: f64,
}

/// The cost of a run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Cost {
    /// The items by stage, and other spending.
    pub items: Vec<CostItem>,
    /// Device time, s.
    pub device_seconds: f64,
    pub price_per_hour: Option<f64>,
    /// Price of the device time.
    pub price: Option<f64>,
}

/// One item of a run's cost.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CostItem {
    /// A stage, or the kind of other spending.
    pub what: String,
    pub tasks: i64,
    /// Evaluators' time, s; 0 for other spending.
    pub seconds: f64,
    /// Device time, s.
    pub device_seconds: f64,
}

/// A point where the best time so far improved.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Corner {
    pub arm: Arm,
    pub trial: Trial,
    /// Number of the arm's candidates timed by then, this one included.
    pub timed: i64,
    /// Number of the arm's candidates made by then.
    pub candidates: i64,
    /// Time of the improvement, ms since 1970.
    pub at: i64,
    /// The new best candidate.
    pub candidate: CandidateId,
    /// The candidate's time, µs.
    pub us: f64,
    /// Lower end of the interval, µs.
    pub low_us: f64,
    /// Upper end of the interval, µs.
    pub high_us: f64,
}

/// A niche and its elite.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Niche {
    /// The predicted bottleneck of the niche's candidates.
    pub bound: String,
    /// The tile size of the niche's candidates.
    pub tile: String,
    /// Number of timed candidates in the niche.
    pub timed: i64,
    /// The fastest candidate.
    pub candidate: CandidateId,
    /// The candidate's time, µs.
    pub us: f64,
}

/// A forecast and its outcome.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Pair {
    pub forecast: i64,
    /// The candidate; `None` for an idea.
    pub candidate: Option<CandidateId>,
    /// Lower end of the forecast interval, µs.
    pub low_us: f64,
    /// The forecast time, µs.
    pub us: f64,
    /// Upper end of the forecast interval, µs.
    pub high_us: f64,
    /// The measured time, µs.
    pub measured_us: f64,
}

impl Ledger {
    /// Counts of a run by problem and arm.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn tallies(&self, run: RunId) -> Result<Vec<Tally>, LedgerError> {
        let sql =
            "SELECT p.shape, arm, candidates, screened, passed, timed, raced, rejected, promoted FROM tally t
           JOIN problem p ON p.id = t.problem WHERE run = ? ORDER BY t.problem, arm";
        self.rows(sql, [run.0], |row| {
            Ok(Tally {
                problem: parse(row, 0)?,
                arm: unword(row, 1)?,
                candidates: row.get(2)?,
                screened: row.get(3)?,
                passed: row.get(4)?,
                timed: row.get(5)?,
                raced: row.get(6)?,
                rejected: row.get(7)?,
                promoted: row.get(8)?,
            })
        })
    }

    /// Why a run's candidates were rejected, the most frequent reason first.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn rejections_by_reason(&self, run: RunId) -> Result<Vec<RejectionCount>, LedgerError> {
        let sql =
            "SELECT d.arm, d.stage, d.reason, d.candidates, r.candidate, r.detail FROM death d JOIN rejection r ON r.id = d.latest
           WHERE d.run = ? ORDER BY d.candidates DESC, d.reason";
        self.rows(sql, [run.0], |row| {
            Ok(RejectionCount {
                arm: unword(row, 0)?,
                stage: unword(row, 1)?,
                reason: unword(row, 2)?,
                candidates: row.get(3)?,
                latest: CandidateId(row.get(4)?),
                detail: row.get(5)?,
            })
        })
    }

    /// How often each stage of a run was carried out, by arm, held-out problems included.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn entered(&self, run: RunId) -> Result<Vec<Entered>, LedgerError> {
        let sql = "SELECT arm, stage, entered FROM passage WHERE run = ? ORDER BY arm, stage";
        self.rows(sql, [run.0], |row| {
            Ok(Entered { arm: unword(row, 0)?, stage: unword(row, 1)?, count: row.get(2)? })
        })
    }

    /// The results of each operator of a run, the largest gain first.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn operators(&self, run: RunId) -> Result<Vec<Earnings>, LedgerError> {
        let sql = "SELECT operator, candidates, timed, faster, promoted, rejected, gain FROM operator_tally WHERE run = ?
           ORDER BY gain DESC, faster DESC, candidates DESC, operator";
        self.rows(sql, [run.0], |row| {
            Ok(Earnings {
                operator: row.get(0)?,
                candidates: row.get(1)?,
                timed: row.get(2)?,
                faster: row.get(3)?,
                promoted: row.get(4)?,
                rejected: row.get(5)?,
                gain: row.get(6)?,
            })
        })
    }

    /// The cost of a run so far.
    ///
    /// # Errors
    /// When there is no such run, or the ledger cannot be read.
    pub fn cost(&self, run: RunId) -> Result<Cost, LedgerError> {
        let price_per_hour = self.run(run)?.price_per_hour;
        let sql = "SELECT what, tasks, seconds, device_seconds FROM cost WHERE run = ? ORDER BY device_seconds DESC, what";
        let items = self.rows(sql, [run.0], |row| {
            let (what, seconds): (String, f64) = (row.get(0)?, row.get(2)?);
            // The summary also has the device time of other spending as seconds, but no evaluator worked
            // then.
            let is_stage = unword::<Stage>(row, 0).is_ok();
            Ok(CostItem {
                what,
                tasks: row.get(1)?,
                seconds: if is_stage { seconds } else { 0.0 },
                device_seconds: row.get(3)?,
            })
        })?;
        let device_seconds: f64 = items.iter().map(|item| item.device_seconds).sum();
        let price = price_per_hour.map(|hour| hour * device_seconds / 3600.0);
        Ok(Cost { items, device_seconds, price_per_hour, price })
    }

    /// The best time so far as a function of the number of candidates, by arm and trial. Only improvements
    /// are listed, so that a curve has few points however many candidates there were. The curve ends at the
    /// arm's count in [`Ledger::tallies`].
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn progress(&self, run: RunId, problem: &Shape) -> Result<Vec<Corner>, LedgerError> {
        let sql = "SELECT arm, trial, timed, candidates, at, candidate, us, low_us, high_us FROM progress
           WHERE run = ? AND problem = (SELECT id FROM problem WHERE shape = ?) ORDER BY trial, arm, timed";
        self.rows(sql, (run.0, super::write::text(problem)), |row| {
            Ok(Corner {
                arm: unword(row, 0)?,
                trial: unword(row, 1)?,
                timed: row.get(2)?,
                candidates: row.get(3)?,
                at: row.get(4)?,
                candidate: CandidateId(row.get(5)?),
                us: row.get(6)?,
                low_us: row.get(7)?,
                high_us: row.get(8)?,
            })
        })
    }

    /// The niches of a run on a problem, each with its elite.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn niches(&self, run: RunId, problem: &Shape) -> Result<Vec<Niche>, LedgerError> {
        let sql = "SELECT bound, tile, timed, candidate, us FROM niche
           WHERE run = ? AND problem = (SELECT id FROM problem WHERE shape = ?) ORDER BY bound, tile";
        self.rows(sql, (run.0, super::write::text(problem)), |row| {
            Ok(Niche {
                bound: row.get(0)?,
                tile: row.get(1)?,
                timed: row.get(2)?,
                candidate: CandidateId(row.get(3)?),
                us: row.get(4)?,
            })
        })
    }

    /// The newest measured forecasts of an author in a run, at most `limit`.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn pairs_of_run(&self, run: RunId, author: &str, limit: usize) -> Result<Vec<Pair>, LedgerError> {
        let sql = "SELECT forecast, candidate, low_us, us, high_us, measured_us FROM pair WHERE run = ? AND author = ?
           ORDER BY forecast DESC LIMIT ?";
        self.rows(sql, (run.0, author, rows(limit)), pair)
    }

    /// The newest forecasts of an author for a device that have outcomes, at most `limit`.
    ///
    /// # Errors
    /// When the ledger has no such device, or cannot be read.
    pub fn pairs(&self, author: &str, device: &str, limit: usize) -> Result<Vec<Pair>, LedgerError> {
        let Some(device) = self.find("SELECT id FROM device WHERE name = ?", [device])? else {
            return Err(self.unknown(format!("device {device:?}")));
        };
        let sql = "SELECT forecast, candidate, low_us, us, high_us, measured_us FROM pair WHERE author = ? AND device = ?
           ORDER BY forecast DESC LIMIT ?";
        self.rows(sql, (author, device, rows(limit)), pair)
    }
}

fn pair(row: &rusqlite::Row<'_>) -> rusqlite::Result<Pair> {
    Ok(Pair {
        forecast: row.get(0)?,
        candidate: row.get::<_, Option<i64>>(1)?.map(CandidateId),
        low_us: row.get(2)?,
        us: row.get(3)?,
        high_us: row.get(4)?,
        measured_us: row.get(5)?,
    })
}
