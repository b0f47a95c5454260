use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ProblemError;

/// Which keys a query may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Mask {
    /// Every query sees every key.
    None,
    /// Causal, aligned to the bottom right as in FlashAttention: query `i` sees key `j` iff
    /// `j ≤ i + seq_kv − seq_q`. With `seq_q > seq_kv` the first rows see no key at all.
    Causal,
}

/// The half-open range of keys that one query row sees; empty when `end ≤ start`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyRange {
    /// First visible key.
    pub start: usize,
    /// One past the last visible key.
    pub end: usize,
}

impl KeyRange {
    /// Number of visible keys.
    pub const fn len(self) -> usize {
        self.end.saturating_sub(self.start)
    }

    /// Whether no key is visible (the row's output is 0 and its LSE −∞).
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }
}

impl Mask {
    /// Every mask, in the order in which they are listed to users.
    pub const ALL: [Mask; 2] = [Mask::None, Mask::Causal];

    /// The keys that query row `row` sees.
    pub const fn keys(self, row: usize, seq_q: usize, seq_kv: usize) -> KeyRange {
        match self {
            Mask::None => KeyRange { start: 0, end: seq_kv },
            Mask::Causal => {
                let end = (row + 1 + seq_kv).saturating_sub(seq_q);
                KeyRange { start: 0, end: if end < seq_kv { end } else { seq_kv } }
            }
        }
    }

    /// The name used on the command line, in launch files and in evidence rows.
    pub const fn name(self) -> &'static str {
        match self {
            Mask::None => "none",
            Mask::Causal => "causal",
        }
    }
}

impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Mask {
    type Err = ProblemError;

    fn from_str(s: &str) -> Result<Self, ProblemError> {
        Mask::ALL.into_iter().find(|m| m.name() == s).ok_or_else(|| ProblemError::UnknownName {
            what: "mask",
            value: s.to_owned(),
            accepted: "none, causal",
        })
    }
}
