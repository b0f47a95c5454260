//! The operators that make candidates, as the ledger names them.

use std::convert::Infallible;
use std::fmt;
use std::str::FromStr;

use rusqlite::ToSql;
use rusqlite::types::{FromSql, FromSqlResult, ToSqlOutput, ValueRef};
use serde::{Deserialize, Serialize};
use strum::{EnumString, IntoStaticStr};

/// How a candidate came into a run. Its JSON is its [name](Operator::name); `cross`, `propose` and
/// `insight` were names of earlier versions.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    EnumString,
    IntoStaticStr,
)]
#[cfg_attr(test, derive(strum::VariantArray))]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum Operator {
    /// The candidate that the run tries to beat.
    Baseline,
    /// The baseline again, as an A/A control.
    Control,
    /// The shipped plan, in a run that started elsewhere.
    Shipped,
    /// The plan of a held-out problem, for comparison.
    HeldOut,
    /// An initial candidate. The detail names its source: `tuned`, `ledger`, `default` or `model`.
    Seed,
    /// A random sample of the control group.
    Random,
    /// Redraws genes of an elite.
    Mutate,
    /// Combines genes of two elites.
    #[serde(rename = "crossover", alias = "cross")]
    #[strum(serialize = "crossover")]
    Cross,
    /// Changes one gene of the best candidate by one step.
    Neighbour,
    /// Applies a gene value that helped another candidate, or the cure of a finding.
    #[serde(alias = "insight")]
    #[strum(to_string = "guided", serialize = "insight")]
    Guided,
    /// Draws a candidate at random.
    Restart,
    /// Asks the external proposer.
    #[serde(rename = "proposer", alias = "propose")]
    #[strum(serialize = "proposer")]
    Propose,
    /// An operator that this version does not know. The detail is its full name.
    #[strum(serialize = "")]
    Other,
}

impl Operator {
    /// The operators from which the bandit of a search chooses.
    pub const CHOSEN: [Operator; 6] = [
        Operator::Mutate,
        Operator::Cross,
        Operator::Neighbour,
        Operator::Guided,
        Operator::Restart,
        Operator::Propose,
    ];

    /// The operator's name in the ledger; empty for an unknown operator.
    pub const fn name(self) -> &'static str {
        self.into_str()
    }

    /// The operator with a detail: the changed genes, the finding, or the source of a seed.
    pub fn with(self, detail: impl Into<String>) -> MadeBy {
        MadeBy { operator: self, detail: detail.into() }
    }
}

/// The operator that made a candidate, with its detail. The text form, used in the ledger and in JSON, joins
/// both with a colon: `mutate:block_n+stages`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", from = "String")]
pub struct MadeBy {
    pub operator: Operator,
    /// Empty if the operator has no detail.
    pub detail: String,
}

impl MadeBy {
    /// Whether the candidate is one of the random samples from which the time model picks the fastest.
    pub fn is_drawn(&self) -> bool {
        *self == MadeBy::drawn()
    }

    /// The operator of the random samples from which the time model picks the fastest.
    pub fn drawn() -> MadeBy {
        Operator::Seed.with("model")
    }
}

impl From<Operator> for MadeBy {
    fn from(operator: Operator) -> MadeBy {
        operator.with("")
    }
}

impl From<&str> for MadeBy {
    fn from(text: &str) -> MadeBy {
        let (word, detail) = text.split_once(':').unwrap_or((text, ""));
        match word.parse().unwrap_or(Operator::Other) {
            Operator::Other => Operator::Other.with(text),
            operator => operator.with(detail),
        }
    }
}

impl From<String> for MadeBy {
    fn from(text: String) -> MadeBy {
        MadeBy::from(text.as_str())
    }
}

impl From<MadeBy> for String {
    fn from(made: MadeBy) -> String {
        made.to_string()
    }
}

impl FromStr for MadeBy {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<MadeBy, Infallible> {
        Ok(MadeBy::from(text))
    }
}

impl fmt::Display for MadeBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.operator, self.detail.as_str()) {
            (Operator::Other, detail) => f.write_str(detail),
            (operator, "") => f.write_str(operator.name()),
            (operator, detail) => write!(f, "{}:{detail}", operator.name()),
        }
    }
}

impl ToSql for MadeBy {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(self.to_string().into())
    }
}

impl FromSql for MadeBy {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<MadeBy> {
        Ok(MadeBy::from(value.as_str()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every form of the text is read back unchanged, also the names of unknown operators.
    #[test]
    fn what_made_a_candidate_survives_as_text() {
        for (text, operator, detail) in [
            ("baseline", Operator::Baseline, ""),
            ("seed:model", Operator::Seed, "model"),
            ("mutate:block_n+stages", Operator::Mutate, "block_n+stages"),
            ("crossover", Operator::Cross, ""),
            ("guided:serial_reduction", Operator::Guided, "serial_reduction"),
            ("anneal:block_n", Operator::Other, "anneal:block_n"),
            ("", Operator::Other, ""),
        ] {
            let made = MadeBy::from(text);
            assert_eq!(
                (made.operator, made.detail.as_str(), made.to_string()),
                (operator, detail, text.to_owned())
            );
            let json = serde_json::to_string(&made).unwrap();
            assert_eq!((serde_json::from_str::<MadeBy>(&json).unwrap(), json), (made, format!("{text:?}")));
        }
        assert!(MadeBy::from("seed:model").is_drawn() && !MadeBy::from("seed:tuned").is_drawn());
        for &operator in <Operator as strum::VariantArray>::VARIANTS {
            if operator == Operator::Other {
                continue;
            }
            assert_eq!(MadeBy::from(operator.name()), operator.into());
            let json = serde_json::to_string(&operator).unwrap();
            assert_eq!(json, format!("{:?}", operator.name()));
            assert_eq!(serde_json::from_str::<Operator>(&json).unwrap(), operator);
        }
        assert_eq!(MadeBy::from("insight:stages"), Operator::Guided.with("stages"));
        let former =
            [("cross", Operator::Cross), ("propose", Operator::Propose), ("insight", Operator::Guided)];
        for (former, operator) in former {
            assert_eq!(serde_json::from_value::<Operator>(former.into()).unwrap(), operator);
        }
    }
}
