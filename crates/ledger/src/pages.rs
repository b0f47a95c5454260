//! Queries for the report's pages: candidates page by page, and examples.

use kernels::select::Shape;
use rusqlite::params;
use serde::Serialize;

use super::read::{maybe, rows, unword};
use super::write::text;
use super::{Arm, CandidateId, Ledger, LedgerError, MadeBy, Reason, RunId};
use crate::Stage;

/// The baselines of a run are among its first candidates, up to this count.
const EARLY: i64 = 1000;

/// A candidate in a list.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Line {
    pub id: CandidateId,
    pub arm: Arm,
    /// The operator that made the candidate.
    pub operator: MadeBy,
    /// The last stage that the candidate reached.
    pub stage: Option<Stage>,
    /// The reason of its rejection.
    pub rejected: Option<Reason>,
    /// The predicted time, µs.
    pub predicted_us: Option<f64>,
    /// The measured time, µs.
    pub us: Option<f64>,
    pub promoted: bool,
}

impl Ledger {
    /// # Errors
    /// When the ledger cannot be read.
    pub fn latest_run(&self) -> Result<Option<RunId>, LedgerError> {
        self.row("SELECT id FROM run ORDER BY id DESC LIMIT 1", [], |row| row.get(0).map(RunId))
    }

    /// The times of a run's start and of its latest fact, ms since 1970.
    ///
    /// # Errors
    /// When there is no such run, or the ledger cannot be read.
    pub fn span(&self, run: RunId) -> Result<(i64, i64), LedgerError> {
        let last = |table: &str| {
            format!("coalesce((SELECT at FROM {table} WHERE run = r.id ORDER BY id DESC LIMIT 1), r.at)")
        };
        let tables = ["candidate", "outcome", "run_event", "decision"].map(last).join(", ");
        let sql = format!("SELECT r.at, max({tables}) FROM run r WHERE r.id = ?");
        let span = self.row(&sql, [run.0], |row| Ok((row.get(0)?, row.get(1)?)))?;
        span.ok_or_else(|| self.unknown(format!("run {}", run.0)))
    }

    /// Candidates of a run, newest first, beginning before a given candidate or at the end.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn lines(
        &self,
        run: RunId,
        before: Option<CandidateId>,
        most: usize,
    ) -> Result<Vec<Line>, LedgerError> {
        let sql = "SELECT s.candidate, s.arm, s.operator, s.stage, s.rejected, s.predicted_us, s.us, s.promoted
            FROM candidate c JOIN standing s ON s.candidate = c.id WHERE c.run = ? AND c.id < ? ORDER BY c.id DESC LIMIT ?";
        let before = before.map_or(i64::MAX, |id| id.0);
        self.rows(sql, params![run.0, before, rows(most)], |row| {
            Ok(Line {
                id: CandidateId(row.get(0)?),
                arm: unword(row, 1)?,
                operator: row.get(2)?,
                stage: maybe(row, 3)?,
                rejected: maybe(row, 4)?,
                predicted_us: row.get(5)?,
                us: row.get(6)?,
                promoted: row.get(7)?,
            })
        })
    }

    /// The baseline of a run on a problem: the first candidate of the baseline arm. Later candidates of that
    /// arm serve for comparison.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn baseline(&self, run: RunId, problem: &Shape) -> Result<Option<CandidateId>, LedgerError> {
        let sql = "SELECT id FROM (SELECT id, arm, problem FROM candidate WHERE run = ? ORDER BY id LIMIT ?)
            WHERE arm = 'baseline' AND problem = (SELECT id FROM problem WHERE shape = ?) ORDER BY id LIMIT 1";
        self.row(sql, params![run.0, EARLY, text(problem)], |row| row.get(0).map(CandidateId))
    }

    /// All authors whose forecasts have outcomes, with the devices of these forecasts.
    ///
    /// # Errors
    /// When the ledger cannot be read.
    pub fn forecasters(&self) -> Result<Vec<(String, String)>, LedgerError> {
        // Steps from one (author, device) to the next through the index, so that the number of forecasts does
        // not matter.
        let sql = "SELECT author, device, (SELECT name FROM device WHERE id = next.device) FROM (
              SELECT * FROM (SELECT author, device FROM pair WHERE author = ?1 AND device > ?2 ORDER BY device LIMIT 1)
              UNION ALL SELECT * FROM (SELECT author, device FROM pair WHERE author > ?1 ORDER BY author, device LIMIT 1)
            ) next ORDER BY author, device LIMIT 1";
        let (mut found, mut after) = (Vec::new(), (String::new(), i64::MIN));
        while let Some((author, device, name)) = self.row(sql, params![after.0, after.1], |row| {
            Ok((row.get::<_, String>(0)?, row.get::<_, i64>(1)?, row.get::<_, String>(2)?))
        })? {
            found.push((author.clone(), name));
            after = (author, device);
        }
        Ok(found)
    }
}
