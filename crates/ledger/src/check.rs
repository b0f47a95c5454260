//! Checks the integrity of a ledger: its pages, rows, references and checksums, and its summaries against the
//! facts.

use serde::Serialize;

use super::{Altered, Ledger, LedgerError};

/// The findings of a ledger check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Soundness {
    /// Number of rows of each table of facts.
    pub facts: Vec<(&'static str, i64)>,
    /// Number of rows with references to missing rows.
    pub dangling: i64,
    /// Rows that disagree with their checksums, and table definitions that differ from those of a new ledger.
    pub altered: Altered,
    /// Summaries that differ from the facts.
    pub disagreements: Vec<Disagreement>,
}

/// A summary that differs from the facts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Disagreement {
    pub what: &'static str,
    /// The count according to the facts.
    pub facts: i64,
    /// The count according to the summary.
    pub summary: i64,
}

/// The counts to compare: a name, a query on the facts and a query on the summaries.
const COUNTS: [(&str, &str, &str); 12] = [
    ("candidates that stand", "SELECT count(*) FROM candidate", "SELECT count(*) FROM standing"),
    ("candidates", "SELECT count(*) FROM candidate", "SELECT coalesce(sum(candidates), 0) FROM tally"),
    (
        "operators' candidates",
        "SELECT count(*) FROM candidate WHERE arm IN ('evolution', 'random')",
        "SELECT coalesce(sum(candidates), 0) FROM operator_tally",
    ),
    ("answers", "SELECT count(*) FROM outcome", "SELECT coalesce(sum(entered), 0) FROM passage"),
    ("screenings", "SELECT count(*) FROM screening", "SELECT coalesce(sum(screened), 0) FROM tally"),
    ("rejections", "SELECT count(*) FROM rejection", "SELECT coalesce(sum(candidates), 0) FROM death"),
    (
        "candidates with a time",
        "SELECT count(DISTINCT candidate) FROM measurement WHERE trial <> 'held_out'",
        "SELECT count(*) FROM standing WHERE us IS NOT NULL",
    ),
    (
        "candidates that passed",
        "SELECT count(DISTINCT candidate) FROM check_result WHERE verdict = 'passed'",
        "SELECT coalesce(sum(passed), 0) FROM tally",
    ),
    (
        "promotions",
        "SELECT count(*) FROM decision WHERE what = 'promoted' AND candidate IS NOT NULL",
        "SELECT coalesce(sum(promoted), 0) FROM tally",
    ),
    (
        "elites and corners that are out",
        "SELECT 0",
        "SELECT count(*) FROM standing JOIN (SELECT candidate FROM niche UNION SELECT candidate FROM progress) USING (candidate)
           WHERE rejected NOT IN ('slower', 'budget')",
    ),
    (
        "tasks paid for",
        "SELECT (SELECT count(*) FROM outcome) + (SELECT count(*) FROM spending)",
        "SELECT coalesce(sum(tasks), 0) FROM cost",
    ),
    (
        "answers without their facts",
        "SELECT 0",
        "SELECT count(*) FROM outcome o WHERE NOT EXISTS (SELECT 1 FROM screening x WHERE x.candidate = o.candidate AND x.outcome = o.id)
           AND NOT EXISTS (SELECT 1 FROM check_result x WHERE x.candidate = o.candidate AND x.outcome = o.id)
           AND NOT EXISTS (SELECT 1 FROM measurement x WHERE x.candidate = o.candidate AND x.outcome = o.id)
           AND NOT EXISTS (SELECT 1 FROM rejection x WHERE x.candidate = o.candidate AND x.outcome = o.id)",
    ),
];

impl Soundness {
    pub fn is_sound(&self) -> bool {
        self.dangling == 0 && self.altered.rows == 0 && self.disagreements.is_empty()
    }
}

/// What is damaged, in words.
impl std::fmt::Display for Soundness {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut found = Vec::new();
        if self.altered.rows > 0 {
            found.push(format!("altered since it was written: {}", self.altered));
        }
        if self.dangling > 0 {
            found.push(format!("{} rows name what is not there", self.dangling));
        }
        found.extend(
            self.disagreements
                .iter()
                .map(|d| format!("{}: {} by the facts, {} by the summary", d.what, d.facts, d.summary)),
        );
        f.write_str(&found.join("; "))
    }
}

impl Ledger {
    /// Refuses a ledger that [`Ledger::check`] finds damaged. A run would build on its rows, and its report
    /// would repeat them.
    ///
    /// # Errors
    /// [`LedgerError::Damaged`] with everything that was found, and as for [`Ledger::check`].
    pub fn require_sound(&self) -> Result<(), LedgerError> {
        let found = self.check()?;
        if found.is_sound() {
            return Ok(());
        }
        Err(LedgerError::Damaged { path: self.path.clone(), what: found.to_string() })
    }

    /// Checks every page, row, reference and summary. The check takes seconds for a large ledger.
    ///
    /// # Errors
    /// When pages are damaged, or the ledger cannot be read. The error names the altered rows found so far.
    pub fn check(&self) -> Result<Soundness, LedgerError> {
        // Inside a transaction all counts refer to the same state, however many processes write.
        let moment = self.connection.unchecked_transaction().map_err(|e| self.error(e))?;
        let altered = self.altered()?;
        self.sound("integrity_check(5)").map_err(|error| match error {
            LedgerError::Damaged { path, what } if altered.rows > 0 => {
                LedgerError::Damaged { path, what: format!("{what}; altered: {altered}") }
            }
            other => other,
        })?;
        let count = |table: &'static str| Ok((table, self.count(&format!("SELECT count(*) FROM {table}"))?));
        let facts = super::schema::FACTS.into_iter().map(count).collect::<Result<_, LedgerError>>()?;
        let dangling = self.count("SELECT count(*) FROM pragma_foreign_key_check")?;
        let mut disagreements = Vec::new();
        for (what, facts, summary) in COUNTS {
            let (facts, summary) = (self.count(facts)?, self.count(summary)?);
            if facts != summary {
                disagreements.push(Disagreement { what, facts, summary });
            }
        }
        moment.finish().map_err(|e| self.error(e))?;
        Ok(Soundness { facts, dangling, altered, disagreements })
    }
}
