use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ProblemError;

/// Which keys a query may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Mask {
    /// Every query sees every key.
    None,
    /// Causal, aligned to the bottom right as in FlashAttention: query `i` sees key `j` iff
    /// `j ≤ i + seq_kv − seq_q`. With `seq_q > seq_kv` the first rows see no key at all.
    Causal,
    /// Causal, aligned to the top left as PyTorch's `is_causal`: query `i` sees key `j` iff `j ≤ i`. With `seq_kv > seq_q` no row
    /// sees the last keys, with `seq_q > seq_kv` the last rows see all; of a square it is [`Mask::Causal`].
    CausalTopLeft,
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
    pub const ALL: [Mask; 3] = [Mask::None, Mask::Causal, Mask::CausalTopLeft];
    /// Their names, as errors list them.
    const NAMES: &str = "none, causal, causal-top-left";

    /// Whether a row sees no key beyond a diagonal, wherever that begins.
    pub const fn is_causal(self) -> bool {
        matches!(self, Mask::Causal | Mask::CausalTopLeft)
    }

    /// The last key that row 0 sees, and each row after it one more: negative where that lies before the first key. `None` where
    /// there is no diagonal.
    pub const fn diagonal(self, seq_q: usize, seq_kv: usize) -> Option<i64> {
        match self {
            Mask::None => None,
            Mask::Causal => Some(seq_kv as i64 - seq_q as i64),
            Mask::CausalTopLeft => Some(0),
        }
    }

    /// The keys that query row `row` sees.
    pub const fn keys(self, row: usize, seq_q: usize, seq_kv: usize) -> KeyRange {
        let end = match self {
            Mask::None => seq_kv,
            Mask::Causal => (row + 1 + seq_kv).saturating_sub(seq_q),
            Mask::CausalTopLeft => row + 1,
        };
        KeyRange { start: 0, end: if end < seq_kv { end } else { seq_kv } }
    }

    /// The name used on the command line, in launch files and in evidence rows.
    pub const fn name(self) -> &'static str {
        match self {
            Mask::None => "none",
            Mask::Causal => "causal",
            Mask::CausalTopLeft => "causal-top-left",
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
            accepted: Mask::NAMES,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignments_differ_where_lengths_do() {
        let seen = |mask: Mask, seq_q, seq_kv| -> Vec<usize> {
            (0..seq_q).map(|row| mask.keys(row, seq_q, seq_kv).len()).collect()
        };
        for (seq_q, seq_kv, causal, top_left) in [
            (3, 3, vec![1, 2, 3], vec![1, 2, 3]),
            (2, 5, vec![4, 5], vec![1, 2]),
            (5, 2, vec![0, 0, 0, 1, 2], vec![1, 2, 2, 2, 2]),
            (2, 0, vec![0, 0], vec![0, 0]),
        ] {
            assert_eq!(seen(Mask::Causal, seq_q, seq_kv), causal);
            assert_eq!(seen(Mask::CausalTopLeft, seq_q, seq_kv), top_left);
            assert_eq!(seen(Mask::None, seq_q, seq_kv), vec![seq_kv; seq_q]);
        }
    }

    #[test]
    fn the_diagonal_bounds_the_keys() {
        for mask in Mask::ALL {
            assert_eq!(mask.is_causal(), mask.diagonal(4, 4).is_some());
            for (seq_q, seq_kv) in [(1, 1), (7, 4), (4, 7), (3, 0)] {
                for row in 0..seq_q {
                    let past =
                        mask.diagonal(seq_q, seq_kv).map_or(seq_kv as i64, |last| last + row as i64 + 1);
                    assert_eq!(mask.keys(row, seq_q, seq_kv).end as i64, past.clamp(0, seq_kv as i64));
                }
            }
        }
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        for mask in Mask::ALL {
            assert_eq!(mask.name().parse(), Ok(mask));
        }
        assert_eq!(Mask::ALL.map(Mask::name).join(", "), Mask::NAMES);
        let refused = "casual".parse::<Mask>().unwrap_err().to_string();
        assert_eq!(refused, "mask = \"casual\" is unknown; accepted: none, causal, causal-top-left");
    }
}
