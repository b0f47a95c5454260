//! Writes facts to the ledger.

use std::time::{SystemTime, UNIX_EPOCH};

use kernels::select::Shape;
use rusqlite::{OptionalExtension, Params, params};
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    CandidateId, CheckFact, Decision, Forecast, ForecastOutcome, Ledger, LedgerError, MeasurementFact,
    NewCandidate, Rejection, Run, RunEvent, RunId, Screening,
};
use crate::{Candidate, Finding, Outcome};

impl Ledger {
    /// Begins a run.
    ///
    /// # Errors
    /// When the run cannot be written.
    pub fn begin_run(&self, run: &Run) -> Result<RunId, LedgerError> {
        if let Some(price) = run.price_per_hour {
            number("price per hour", price, 0.0)?;
        }
        self.together(|l| {
            let device = l.device(&run.device)?;
            l.insert(
                "INSERT INTO run (at, device, config, environment, price_per_hour) VALUES (?, ?, ?, ?, ?)",
                params![now(), device, text(&run.config), text(&json!(run.environment)), run.price_per_hour],
            )
            .map(RunId)
        })
    }

    /// Adds an event of a run.
    ///
    /// # Errors
    /// When the ledger has no such run, or it cannot be written.
    pub fn event(&self, run: RunId, event: RunEvent) -> Result<(), LedgerError> {
        self.together(|l| {
            l.run_exists(run)?;
            l.insert(
                "INSERT INTO run_event (at, run, event) VALUES (?, ?, ?)",
                params![now(), run.0, word(&event)],
            )
        })?;
        Ok(())
    }

    /// Adds a candidate to a run.
    ///
    /// # Errors
    /// When the ledger has no such run or parents, or cannot be written.
    pub fn add_candidate(&self, new: &NewCandidate) -> Result<CandidateId, LedgerError> {
        self.together(|l| {
            l.run_exists(new.run)?;
            let (problem, subject) = (l.problem(&new.problem)?, l.subject(&new.candidate)?);
            let id = l.insert(
                "INSERT INTO candidate (at, run, problem, subject, arm, operator, changes) VALUES (?, ?, ?, ?, ?, ?, ?)",
                params![now(), new.run.0, problem, subject, word(&new.arm), &new.operator, text(&new.changes)],
            )?;
            for (position, parent) in new.parents.iter().enumerate() {
                l.candidate_run(*parent)?;
                l.insert(
                    "INSERT INTO parent (candidate, position, parent) VALUES (?, ?, ?)",
                    params![id, position as i64, parent.0],
                )?;
            }
            Ok(CandidateId(id))
        })
    }

    /// Stores the outcome of a task, completely and once. Returns `false` if the outcome of this (candidate,
    /// stage, problem) is already stored. A screening with a predicted time also stores the model's forecast
    /// and, after a recalibration, the corrected forecast.
    ///
    /// # Errors
    /// When the ledger has no such candidate, a value is not acceptable, or the ledger cannot be written.
    pub fn tell(&self, outcome: &Outcome) -> Result<bool, LedgerError> {
        self.together(|l| {
            let run = l.candidate_run(outcome.candidate)?;
            let problem = l.problem(&outcome.problem)?;
            number("seconds", outcome.seconds, 0.0)?;
            number("device_seconds", outcome.device_seconds, 0.0)?;
            let new = l.execute(
                "INSERT INTO outcome (at, run, candidate, stage, problem, seconds, device_seconds, finding)
                   VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (candidate, stage, problem) DO NOTHING",
                params![
                    now(),
                    run.0,
                    outcome.candidate.0,
                    word(&outcome.stage),
                    problem,
                    outcome.seconds,
                    outcome.device_seconds,
                    kind(&outcome.finding)
                ],
            )?;
            if new == 0 {
                return Ok(false);
            }
            let outcome_id = Some(l.connection.last_insert_rowid());
            l.found(outcome_id, run, outcome).map(|()| true)
        })
    }

    fn found(&self, outcome_id: Option<i64>, run: RunId, outcome: &Outcome) -> Result<(), LedgerError> {
        let candidate = outcome.candidate;
        match &outcome.finding {
            Finding::Screened { screening, predicted_us, findings } => {
                self.screening(outcome_id, candidate, screening, findings)?;
                match predicted_us {
                    Some(times) => self.predicted(outcome_id, run, candidate, &outcome.problem, *times),
                    None => Ok(()),
                }
            }
            Finding::Judged(check) => self.judged(outcome_id, candidate, check),
            Finding::Timed { check, measurement } => {
                if let Some(check) = check {
                    self.judged(outcome_id, candidate, check)?;
                }
                self.measurement(outcome_id, candidate, measurement)
            }
            Finding::Rejected(rejection) => self.rejection(outcome_id, candidate, rejection),
        }
    }

    /// Stores a forecast and returns its number for [`ForecastOutcome::forecast`]. A candidate's forecast is
    /// stored with the candidate's own device and problem, whatever the forecast says.
    ///
    /// # Errors
    /// When the times are not positive and ascending, the ledger has no such candidate, or it cannot be
    /// written.
    pub fn forecast(&self, forecast: &Forecast) -> Result<i64, LedgerError> {
        self.together(|l| l.expected(None, forecast))
    }

    /// Stores the outcome of an idea's forecast.
    ///
    /// # Errors
    /// When there is no such forecast, it belongs to a candidate, its outcome is already stored, or the
    /// ledger cannot be written.
    pub fn forecast_outcome(&self, outcome: &ForecastOutcome) -> Result<(), LedgerError> {
        number("measured time (µs)", outcome.us, f64::MIN_POSITIVE)?;
        self.together(|l| {
            let sql = "SELECT candidate, (SELECT us FROM forecast_outcome WHERE forecast = f.id) FROM forecast f WHERE id = ?";
            let known: Option<(Option<i64>, Option<f64>)> =
                l.row(sql, [outcome.forecast], |row| Ok((row.get(0)?, row.get(1)?)))?;
            let (path, forecast) = (l.path.clone(), outcome.forecast);
            match known {
                None => return Err(l.unknown(format!("forecast {}", outcome.forecast))),
                Some((Some(candidate), _)) => {
                    return Err(LedgerError::OfCandidate { path, forecast, candidate });
                }
                Some((None, Some(us))) => return Err(LedgerError::CameOut { path, forecast, us }),
                Some((None, None)) => {}
            }
            l.insert(
                "INSERT INTO forecast_outcome (at, forecast, us, note) VALUES (?, ?, ?, ?)",
                params![now(), outcome.forecast, outcome.us, outcome.note],
            )
        })?;
        Ok(())
    }

    /// Rejects a candidate.
    ///
    /// # Errors
    /// When the ledger has no such candidate, or cannot be written.
    pub fn rejected(&self, candidate: CandidateId, rejection: &Rejection) -> Result<(), LedgerError> {
        self.together(|l| l.rejection(None, candidate, rejection))
    }

    /// Stores a decision.
    ///
    /// # Errors
    /// When the ledger has no such run or candidate, or cannot be written.
    pub fn decided(&self, run: RunId, decision: &Decision) -> Result<(), LedgerError> {
        self.together(|l| {
            l.run_exists(run)?;
            if let Some(candidate) = decision.candidate {
                l.candidate_run(candidate)?;
            }
            l.insert(
                "INSERT INTO decision (at, run, what, candidate, why) VALUES (?, ?, ?, ?, ?)",
                params![
                    now(),
                    run.0,
                    decision.what,
                    decision.candidate.map(|candidate| candidate.0),
                    text(&decision.why)
                ],
            )
        })?;
        Ok(())
    }

    /// Adds device time that belongs to no task, such as time spent waiting.
    ///
    /// # Errors
    /// When the ledger has no such run, or cannot be written.
    pub fn spent(&self, run: RunId, device_seconds: f64, what: &str) -> Result<(), LedgerError> {
        number("device_seconds", device_seconds, 0.0)?;
        self.together(|l| {
            l.run_exists(run)?;
            l.insert(
                "INSERT INTO spending (at, run, what, device_seconds) VALUES (?, ?, ?, ?)",
                params![now(), run.0, what, device_seconds],
            )
        })?;
        Ok(())
    }
}

impl Forecast {
    /// Checks the times of the forecast.
    ///
    /// # Errors
    /// When the times are not positive and ascending.
    pub fn check(&self) -> Result<(), LedgerError> {
        for (what, value) in [("low_us", self.low_us), ("us", self.us), ("high_us", self.high_us)] {
            number(what, value, f64::MIN_POSITIVE)?;
        }
        if self.low_us > self.us || self.us > self.high_us {
            return Err(LedgerError::Value {
                what: "a forecast's interval",
                value: format!("{} … {} … {} µs", self.low_us, self.us, self.high_us),
                accepted: "low ≤ expected ≤ high",
            });
        }
        Ok(())
    }
}

/// Inserts single rows within a transaction. `outcome_id` is the outcome to which the rows belong.
impl Ledger {
    fn screening(
        &self,
        outcome_id: Option<i64>,
        candidate: CandidateId,
        s: &Screening,
        findings: &Value,
    ) -> Result<(), LedgerError> {
        self.candidate_run(candidate)?;
        self.insert(
            "INSERT INTO screening (outcome, candidate, ptx_hash, sass_hash, registers, spill_bytes, shared_bytes, bound, tile, findings)
               VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            params![
                outcome_id,
                candidate.0,
                s.ptx_hash,
                s.sass_hash,
                s.registers,
                s.spill_bytes,
                s.shared_bytes,
                s.bound,
                s.tile,
                text(findings)
            ],
        )?;
        Ok(())
    }

    fn predicted(
        &self,
        outcome_id: Option<i64>,
        run: RunId,
        candidate: CandidateId,
        problem: &Shape,
        [low_us, us, high_us]: [f64; 3],
    ) -> Result<(), LedgerError> {
        let device: String = self
            .connection
            .prepare_cached("SELECT name FROM device JOIN run ON device.id = run.device WHERE run.id = ?")
            .and_then(|mut s| s.query_row([run.0], |row| row.get(0)))
            .map_err(|e| self.error(e))?;
        let forecast = Forecast {
            candidate: Some(candidate),
            hypothesis: String::new(),
            author: "model".to_owned(),
            device,
            problem: Some(*problem),
            low_us,
            us,
            high_us,
        };
        self.expected(outcome_id, &forecast)?;
        if let Some([low_us, us, high_us]) =
            self.recalibrated(&forecast.author, &forecast.device, [low_us, us, high_us])?
        {
            let author = format!("{}:recalibrated", forecast.author);
            self.expected(outcome_id, &Forecast { author, low_us, us, high_us, ..forecast })?;
        }
        Ok(())
    }

    fn expected(&self, outcome_id: Option<i64>, f: &Forecast) -> Result<i64, LedgerError> {
        f.check()?;
        if let Some(candidate) = f.candidate {
            self.candidate_run(candidate)?;
            let measured = "SELECT candidate FROM standing WHERE candidate = ? AND kind = 'measured'";
            if self.find(measured, [candidate.0])?.is_some() {
                return Err(LedgerError::Value {
                    what: "a forecast of candidate",
                    value: candidate.0.to_string(),
                    accepted: "a candidate that was not measured yet",
                });
            }
        }
        let own = match f.candidate {
            Some(CandidateId(candidate)) => {
                let sql = "SELECT device, problem FROM standing WHERE candidate = ?";
                self.row(sql, [candidate], |row| Ok((row.get(0)?, Some(row.get(1)?))))?
            }
            None => None,
        };
        let (device, problem) = match own {
            Some(own) => own,
            None => (self.device(&f.device)?, f.problem.as_ref().map(|p| self.problem(p)).transpose()?),
        };
        self.insert(
            "INSERT INTO forecast (at, outcome, candidate, hypothesis, author, device, problem, low_us, us, high_us)
               VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            params![
                now(),
                outcome_id,
                f.candidate.map(|c| c.0),
                f.hypothesis,
                f.author,
                device,
                problem,
                f.low_us,
                f.us,
                f.high_us
            ],
        )
    }

    fn judged(
        &self,
        outcome_id: Option<i64>,
        candidate: CandidateId,
        p: &CheckFact,
    ) -> Result<(), LedgerError> {
        self.candidate_run(candidate)?;
        self.insert(
            "INSERT INTO check_result (outcome, candidate, judge, verdict, reasons, hazards, error_rel, seconds) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            params![
                outcome_id,
                candidate.0,
                word(&p.judge),
                word(&p.verdict),
                text(&json!(p.reasons)),
                text(&p.hazards),
                p.error_rel,
                p.seconds
            ],
        )?;
        Ok(())
    }

    fn measurement(
        &self,
        outcome_id: Option<i64>,
        candidate: CandidateId,
        m: &MeasurementFact,
    ) -> Result<(), LedgerError> {
        for (what, value) in [("low_us", m.low_us), ("us", m.us), ("high_us", m.high_us)] {
            number(what, value, f64::MIN_POSITIVE)?;
        }
        self.candidate_run(candidate)?;
        let problem = self.problem(&m.problem)?;
        let samples: Vec<u8> = m.samples.iter().flat_map(|us| us.to_le_bytes()).collect();
        let a = m.against.as_ref();
        if let Some(against) = a {
            self.candidate_run(against.incumbent)?;
        }
        self.insert(
            "INSERT INTO measurement (at, outcome, candidate, trial, kind, problem, samples, us, low_us, high_us,
               incumbent, ratio, ratio_low, ratio_high, noise, verdict) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            params![
                now(),
                outcome_id,
                candidate.0,
                word(&m.trial),
                word(&m.kind),
                problem,
                samples,
                m.us,
                m.low_us,
                m.high_us,
                a.map(|a| a.incumbent.0),
                a.map(|a| a.ratio),
                a.map(|a| a.low),
                a.map(|a| a.high),
                a.map(|a| a.noise),
                a.map(|a| word(&a.verdict))
            ],
        )?;
        Ok(())
    }

    fn rejection(
        &self,
        outcome_id: Option<i64>,
        candidate: CandidateId,
        r: &Rejection,
    ) -> Result<(), LedgerError> {
        self.candidate_run(candidate)?;
        self.insert(
            "INSERT INTO rejection (at, outcome, candidate, stage, reason, detail) VALUES (?, ?, ?, ?, ?, ?)",
            params![now(), outcome_id, candidate.0, word(&r.stage), r.reason.name(), r.detail],
        )?;
        Ok(())
    }

    /// The row number of a shape. A new shape is added.
    pub(super) fn problem(&self, shape: &Shape) -> Result<i64, LedgerError> {
        self.named(
            "SELECT id FROM problem WHERE shape = ?1",
            "INSERT INTO problem (shape) VALUES (?1)",
            &text(shape),
        )
    }

    /// The row number of a device. A new device is added.
    pub(super) fn device(&self, name: &str) -> Result<i64, LedgerError> {
        self.named("SELECT id FROM device WHERE name = ?1", "INSERT INTO device (name) VALUES (?1)", name)
    }

    fn named(&self, find: &str, add: &str, name: &str) -> Result<i64, LedgerError> {
        match self.find(find, [name])? {
            Some(id) => Ok(id),
            None => self.insert(add, [name]),
        }
    }

    fn subject(&self, candidate: &Candidate) -> Result<i64, LedgerError> {
        let (hash, body) = (candidate.hash(), text(candidate));
        let known = self.find("SELECT id FROM subject WHERE hash = ?1 AND body = ?2", [&hash, &body])?;
        match known {
            Some(id) => Ok(id),
            None => self.insert("INSERT INTO subject (hash, body) VALUES (?1, ?2)", [hash, body]),
        }
    }

    pub(super) fn run_exists(&self, run: RunId) -> Result<(), LedgerError> {
        match self.find("SELECT id FROM run WHERE id = ?", [run.0])? {
            Some(_) => Ok(()),
            None => Err(self.unknown(format!("run {}", run.0))),
        }
    }

    pub(super) fn candidate_run(&self, candidate: CandidateId) -> Result<RunId, LedgerError> {
        match self.find("SELECT run FROM candidate WHERE id = ?", [candidate.0])? {
            Some(run) => Ok(RunId(run)),
            None => Err(self.unknown(format!("candidate {}", candidate.0))),
        }
    }

    pub(super) fn unknown(&self, what: String) -> LedgerError {
        LedgerError::Unknown { path: self.path.clone(), what }
    }

    pub(super) fn find(&self, sql: &str, params: impl Params) -> Result<Option<i64>, LedgerError> {
        let mut statement = self.connection.prepare_cached(sql).map_err(|e| self.error(e))?;
        statement.query_row(params, |row| row.get(0)).optional().map_err(|e| self.error(e))
    }

    fn execute(&self, sql: &str, params: impl Params) -> Result<usize, LedgerError> {
        let mut statement = self.connection.prepare_cached(sql).map_err(|e| self.error(e))?;
        statement.execute(params).map_err(|e| self.error(e))
    }

    pub(super) fn insert(&self, sql: &str, params: impl Params) -> Result<i64, LedgerError> {
        self.execute(sql, params)?;
        Ok(self.connection.last_insert_rowid())
    }
}

/// Rejects a number that is not finite or is less than `least`.
pub(super) fn number(what: &'static str, value: f64, least: f64) -> Result<(), LedgerError> {
    if value.is_finite() && value >= least {
        return Ok(());
    }
    let accepted = if least > 0.0 { "a positive number" } else { "a number of at least 0" };
    Err(LedgerError::Value { what, value: value.to_string(), accepted })
}

const fn kind(finding: &Finding) -> &'static str {
    match finding {
        Finding::Screened { .. } => "screened",
        Finding::Judged(_) => "judged",
        Finding::Timed { .. } => "timed",
        Finding::Rejected(_) => "rejected",
    }
}

/// The word of an enumeration value, as serde writes it.
pub(super) fn word(value: &impl Serialize) -> String {
    json!(value).as_str().unwrap_or_default().to_owned()
}

pub(super) fn text(value: &impl Serialize) -> String {
    json!(value).to_string()
}

pub(super) fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as i64)
}
