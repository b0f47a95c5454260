//! Results of earlier runs that are still valid for a later run.

use kernels::select::Shape;

use super::read::maybe;
use super::{CandidateId, Ledger, LedgerError, Reason, RunId};

/// A candidate of an earlier run with its verdicts and its short timing.
#[derive(Clone, Debug, PartialEq)]
pub struct EarlierKernel {
    pub candidate: CandidateId,
    pub run: RunId,
    /// Hashes of the PTX and, if known, of the machine code.
    pub hashes: Vec<String>,
    /// Whether it passed its check.
    pub passed: bool,
    /// Why the candidate failed, possibly on the device: the reason of the rejection and its detail.
    pub failed: Option<(Reason, String)>,
    /// The short timing, µs: low, expected, high. A time that was itself copied from another run is not
    /// included.
    pub us: Option<[f64; 3]>,
}

impl Ledger {
    /// The kernels for a problem that were known when a run began, from earlier runs on the same device with
    /// the same program, driver, compiler and commit. Empty when neither program nor commit is known.
    ///
    /// # Errors
    /// When there is no such run, or the ledger cannot be read.
    pub fn earlier(&self, run: RunId, problem: &Shape) -> Result<Vec<EarlierKernel>, LedgerError> {
        let own = self.run(run)?;
        if own.environment.commit.is_none() && own.config["program"].is_null() {
            return Ok(Vec::new());
        }
        let sql = format!("SELECT c.id, c.run, s.ptx_hash, s.sass_hash,
             EXISTS (SELECT 1 FROM check_result p JOIN outcome o ON o.id = p.outcome
               WHERE p.candidate = c.id AND o.stage = 'check' AND p.verdict = 'passed' AND o.at <= own.at) AS passed,
             m.us, m.low_us, m.high_us, r.reason, r.detail
           FROM run own JOIN run e ON e.id < own.id AND e.device = own.device AND e.environment = own.environment
               AND json_extract(e.config, '$.program') IS json_extract(own.config, '$.program')
             JOIN candidate c ON c.run = e.id AND c.problem = (SELECT id FROM problem WHERE shape = ?2)
             JOIN screening s ON s.candidate = c.id
             LEFT JOIN measurement m ON m.candidate = c.id AND m.trial = 'microbench' AND m.problem = c.problem
               AND length(m.samples) > 0 AND m.at <= own.at
             LEFT JOIN rejection r ON r.candidate = c.id AND r.reason IN ({}) AND r.stage <> 'held_out'
               AND r.at <= own.at
           WHERE own.id = ?1 AND (m.us IS NOT NULL OR r.reason IS NOT NULL OR passed) ORDER BY c.id", Reason::listed(&Reason::ANYWHERE));
        self.rows(&sql, (run.0, super::write::text(problem)), |row| {
            let hashes: [Option<String>; 2] = [row.get(2)?, row.get(3)?];
            let us: Option<f64> = row.get(5)?;
            Ok(EarlierKernel {
                candidate: CandidateId(row.get(0)?),
                run: RunId(row.get(1)?),
                hashes: hashes.into_iter().flatten().collect(),
                passed: row.get(4)?,
                failed: match maybe(row, 8)? {
                    Some(reason) => Some((reason, row.get(9)?)),
                    None => None,
                },
                us: match us {
                    Some(us) => Some([row.get(6)?, us, row.get(7)?]),
                    None => None,
                },
            })
        })
    }
}
