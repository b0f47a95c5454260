//! The table of tuned plans: one JSON object per line, each with its origin.

use std::sync::OnceLock;

use problem::Shape;
use serde::{Deserialize, Serialize};

use super::shipped;
use super::sweep::Sweep;
use crate::{Arch, Family, KernelError, Plan};

/// How a row's time was obtained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Measured on the device by the crate `bench`.
    Measured,
    /// Predicted by the time model, for a device that was not available.
    Predicted,
}

/// The best plan known for one shape on one device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TunedRow {
    /// The device's name, from its driver or from the time model's table of machines.
    pub device: String,
    /// Its compute capability times ten.
    pub sm: u32,
    /// Number of streaming multiprocessors (SMs).
    pub multiprocessors: u32,
    /// What was computed.
    pub problem: Shape,
    /// The fastest plan.
    pub plan: Plan,
    /// Its time with a warm L2, µs.
    pub us: f64,
    /// Measured or predicted.
    pub kind: Kind,
    /// The driver version; for a predicted row, the model.
    pub driver: String,
    /// Commit from which the program was built.
    pub commit: String,
    /// Identifier of the run.
    pub run: String,
    /// Start of the run, UTC, ISO 8601.
    pub when: String,
}

impl TunedRow {
    /// Checks that a row has a valid time, a valid problem, and a plan that computes the problem.
    fn check(&self) -> Result<(), Fault> {
        if !(self.us.is_finite() && self.us > 0.0) {
            return Err(Fault::Time(self.us));
        }
        if self.multiprocessors == 0 {
            return Err(Fault::NoMultiprocessors);
        }
        let arch = Arch::of(self.sm).ok_or(Fault::Sm(self.sm))?;
        let problem = self.problem.problem();
        problem.check().map_err(KernelError::from)?;
        self.plan.check(&problem, &arch).map_err(KernelError::from)?;
        Ok(())
    }
}

/// Why a line is rejected.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// Not a row.
    #[error("{0}")]
    Json(#[from] serde_json::Error),
    /// The time is not a positive number.
    #[error("invalid value '{0}' for us: expected a finite number above 0")]
    Time(f64),
    /// The SM count is zero.
    #[error("invalid value '0' for multiprocessors: expected 1 or more")]
    NoMultiprocessors,
    /// No kernels are emitted for this architecture.
    #[error("invalid value '{0}' for sm: expected {list}", list = Arch::ALL.map(|arch| arch.sm.to_string()).join(", "))]
    Sm(u32),
    /// The plan does not fit the problem, or the problem is invalid.
    #[error(transparent)]
    Kernel(#[from] KernelError),
}

/// An invalid line of a table.
#[derive(Debug, thiserror::Error)]
#[error("line {line}: {fault}")]
pub struct TableError {
    /// Line number, from 1.
    pub line: usize,
    /// What is wrong.
    #[source]
    pub fault: Fault,
}

/// The rows of a table.
#[derive(Clone, Debug, Default)]
pub struct TunedTable {
    rows: Vec<TunedRow>,
    sweep: Option<&'static Sweep>,
}

impl TunedTable {
    /// The shipped rows. Invalid lines are skipped here, but fail this crate's tests.
    pub fn builtin() -> &'static TunedTable {
        static TABLE: OnceLock<TunedTable> = OnceLock::new();
        TABLE.get_or_init(|| {
            let valid = |text: String| lines(&text).filter_map(|(_, row)| row.ok()).collect::<Vec<_>>();
            let rows = shipped::TUNED.into_iter().flat_map(|table| valid(table.text()));
            TunedTable { rows: rows.collect(), sweep: Some(Sweep::builtin()) }
        })
    }

    /// Reads a table. Empty lines are ignored.
    ///
    /// # Errors
    /// The first line that is not a row, or whose plan does not fit its problem.
    pub fn parse(text: &str) -> Result<TunedTable, TableError> {
        let rows = lines(text).map(|(line, row)| row.map_err(|fault| TableError { line, fault }));
        Ok(TunedTable { rows: rows.collect::<Result<_, _>>()?, sweep: None })
    }

    /// The rows whose plans are of a family, without a sweep.
    pub fn of(&self, family: Family) -> TunedTable {
        let rows = self.rows.iter().filter(|row| row.plan.family() == family.name());
        TunedTable { rows: rows.cloned().collect(), sweep: None }
    }

    /// The rows with another sweep, or with none: then the nearest row stands for problems without a row.
    pub fn with_sweep(&self, sweep: Option<&'static Sweep>) -> TunedTable {
        TunedTable { rows: self.rows.clone(), sweep }
    }

    /// The sweep that stands for problems without a row.
    pub fn sweep(&self) -> Option<&'static Sweep> {
        self.sweep
    }

    /// The rows, in the order of the file.
    pub fn rows(&self) -> &[TunedRow] {
        &self.rows
    }
}

/// Each non-empty line, with its number from 1.
fn lines(text: &str) -> impl Iterator<Item = (usize, Result<TunedRow, Fault>)> {
    let read = |line: &str| {
        let row: TunedRow = serde_json::from_str(line)?;
        row.check().map(|()| row)
    };
    let full = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    full.map(move |(index, line)| (index + 1, read(line)))
}

#[cfg(test)]
mod tests {
    use problem::{DType, Problem};

    use super::*;
    use crate::select::tests::row;

    #[test]
    fn every_shipped_line_is_a_row() {
        let mut count = 0;
        for table in shipped::TUNED {
            count += TunedTable::parse(&table.text()).unwrap().rows().len();
        }
        assert_eq!(TunedTable::builtin().rows().len(), count);
    }

    #[test]
    fn rows_survive_their_file() {
        let rows = vec![row(Problem::mission()), row(Problem::new(2, 4, 100, 128, DType::Bf16))];
        let text: Vec<String> = rows.iter().map(|r| serde_json::to_string(r).unwrap()).collect();
        assert_eq!(TunedTable::parse(&text.join("\n\n")).unwrap().rows(), rows);
    }

    #[test]
    fn a_bad_line_is_named() {
        let good = serde_json::to_string(&row(Problem::mission())).unwrap();
        for (change, with, message) in [
            ("\"us\":10.0", "\"us\":-1.0", "invalid value '-1' for us"),
            ("\"sm\":90", "\"sm\":75", "invalid value '75' for sm"),
            ("\"kind\":\"measured\"", "\"kind\":\"guessed\"", "guessed"),
            ("\"beyond\":8", "\"beyond\":9", "invalid value '9' for rescale.beyond"),
            ("\"heads_kv\":8", "\"heads_kv\":3", "heads_kv = 3"),
            ("\"run\":", "\"ran\":", "ran"),
            ("\"multiprocessors\":132", "\"multiprocessors\":0", "invalid value '0' for multiprocessors"),
            ("{", "", "line 2"),
        ] {
            let bad = good.replacen(change, with, 1);
            assert_ne!(good, bad, "{change}");
            let error = TunedTable::parse(&format!("{good}\n{bad}")).unwrap_err();
            assert_eq!(error.line, 2);
            assert!(error.to_string().contains(message), "{error}");
        }
    }
}
