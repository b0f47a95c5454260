//! The band of keys that each query row sees: full, causal or a sliding window.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ProblemError;

/// The corner of the score matrix to which a band is aligned. The two corners differ when `seq_q != seq_kv`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Corner {
    /// The last query is level with the last key, as in FlashAttention: query `i` is level with key
    /// `i + seq_kv − seq_q`.
    BottomRight,
    /// The first query is level with the first key, as in PyTorch's `is_causal`: query `i` is level with key
    /// `i`.
    TopLeft,
}

/// Which keys a query row sees, by position: a band along a diagonal of the score matrix.
///
/// Query `i` is level with key `d = i` (top left) or `d = i + seq_kv − seq_q` (bottom right). The query sees
/// the keys `d − before ..= d + after`, clipped to `0..seq_kv`. `None` means no bound on that side.
/// FlashAttention's `window_size = (left, right)` is `(before, after)`. A row that sees no key has O = 0 and
/// LSE = −∞.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Band {
    /// The corner to which the diagonal is aligned. [`Corner::BottomRight`] when neither bound exists.
    pub corner: Corner,
    /// Number of visible keys before the level key; `None` means no bound.
    pub before: Option<u32>,
    /// Number of visible keys after the level key; `None` means no bound.
    pub after: Option<u32>,
}

/// The half-open range of keys that one query row sees. Empty when `end ≤ start`.
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

    /// Whether no key is visible. Such a row has O = 0 and LSE = −∞.
    pub const fn is_empty(self) -> bool {
        self.len() == 0
    }
}

/// Every query sees every key.
impl Default for Band {
    fn default() -> Band {
        Band::FULL
    }
}

impl Band {
    /// Every query sees every key.
    pub const FULL: Band = Band { corner: Corner::BottomRight, before: None, after: None };
    /// Causal, aligned to the bottom right. When `seq_q > seq_kv`, the first rows see no key.
    pub const CAUSAL: Band = Band { corner: Corner::BottomRight, before: None, after: Some(0) };
    /// Causal, aligned to the top left. When `seq_kv > seq_q`, no row sees the last keys.
    pub const CAUSAL_TOP_LEFT: Band = Band { corner: Corner::TopLeft, before: None, after: Some(0) };
    /// The bands that have a short name, in the order of error messages.
    pub const NAMED: [Band; 3] = [Band::FULL, Band::CAUSAL, Band::CAUSAL_TOP_LEFT];
    /// The names that [`Band::from_str`] accepts.
    const ACCEPTED: &str = "none, causal, causal-top-left, window:BEFORE:AFTER, window-top-left:BEFORE:AFTER, \
                            where BEFORE and AFTER are 0 to 4294967295 or inf";

    /// A sliding window aligned to the bottom right: the level key, `before` keys before it and `after` keys
    /// after it.
    pub const fn window(before: u32, after: u32) -> Band {
        Band { corner: Corner::BottomRight, before: Some(before), after: Some(after) }
    }

    /// The band aligned to `corner`. A band without bounds has no alignment and is returned unchanged.
    #[must_use]
    pub const fn aligned(self, corner: Corner) -> Band {
        match (self.before, self.after) {
            (None, None) => Band::FULL,
            _ => Band { corner, ..self },
        }
    }

    /// The band of the keys that both bands show, at all lengths. `None` if the bands are aligned to
    /// different corners: no band expresses that.
    #[must_use]
    pub fn intersection(self, other: Band) -> Option<Band> {
        if self.is_full() || other.is_full() {
            return Some(if self.is_full() { other } else { self });
        }
        let least = |a: Option<u32>, b: Option<u32>| a.into_iter().chain(b).min();
        let (before, after) = (least(self.before, other.before), least(self.after, other.after));
        (self.corner == other.corner).then_some(Band { before, after, ..self })
    }

    /// Whether every row sees every key, for all sequence lengths.
    pub const fn is_full(self) -> bool {
        self.before.is_none() && self.after.is_none()
    }

    /// Whether the band is a causal mask: a row sees all keys up to the level key.
    pub const fn is_causal(self) -> bool {
        self.before.is_none() && matches!(self.after, Some(0))
    }

    /// Index of the key that is level with row 0. Negative when a bottom-right band has `seq_q > seq_kv`. The
    /// level key advances by one per row.
    pub const fn shift(self, seq_q: usize, seq_kv: usize) -> i64 {
        match self.corner {
            Corner::BottomRight => seq_kv as i64 - seq_q as i64,
            Corner::TopLeft => 0,
        }
    }

    /// The keys that query row `row` sees.
    pub const fn keys(self, row: usize, seq_q: usize, seq_kv: usize) -> KeyRange {
        let level = row as i64 + self.shift(seq_q, seq_kv);
        let start = match self.before {
            Some(before) => clamp(level - before as i64, seq_kv),
            None => 0,
        };
        let end = match self.after {
            Some(after) => clamp(level + after as i64 + 1, seq_kv),
            None => seq_kv,
        };
        KeyRange { start, end: if end < start { start } else { end } }
    }

    /// The union of the keys of all rows: from the first key of row 0 to the last key of the last row.
    pub const fn keys_of_all_rows(self, seq_q: usize, seq_kv: usize) -> KeyRange {
        let start = self.keys(0, seq_q, seq_kv).start;
        let end = self.keys(seq_q.saturating_sub(1), seq_q, seq_kv).end;
        KeyRange { start, end: if end < start { start } else { end } }
    }

    /// The band without those bounds that exclude no key at the given lengths. `after = 0` always stays.
    #[must_use]
    pub const fn simplified(self, seq_q: usize, seq_kv: usize) -> Band {
        let (first, last) = (self.shift(seq_q, seq_kv), self.shift(seq_q, seq_kv) + seq_q as i64 - 1);
        let before = match self.before {
            Some(before) if last - before as i64 > 0 => Some(before),
            _ => None,
        };
        let after = match self.after {
            // A causal bound stays even where it hides nothing (one query): a decoding problem stays causal.
            Some(0) => Some(0),
            Some(after) if first + (after as i64) < seq_kv as i64 - 1 => Some(after),
            _ => None,
        };
        Band { before, after, ..self }.aligned(self.corner)
    }
}

impl Band {
    /// The band without those bounds that exclude no key at any lengths up to the given ones. `after = 0`
    /// always stays.
    #[must_use]
    pub const fn simplified_up_to(self, seq_q: usize, seq_kv: usize) -> Band {
        // The key level with a query lies between `keys − queries` and `keys − 1` for bottom-right bands, and
        // between 0 and `queries − 1` for top-left bands.
        let (keys_before, keys_after) = match self.corner {
            Corner::BottomRight => (seq_kv, seq_q),
            Corner::TopLeft => (seq_q, seq_kv),
        };
        let before = match self.before {
            Some(before) if (before as usize) + 1 < keys_before => Some(before),
            _ => None,
        };
        let after = match self.after {
            Some(0) => Some(0),
            Some(after) if (after as usize) + 1 < keys_after => Some(after),
            _ => None,
        };
        Band { before, after, ..self }.aligned(self.corner)
    }
}

/// Clamps `n` to `0..=limit`.
const fn clamp(n: i64, limit: usize) -> usize {
    if n < 0 {
        0
    } else if n > limit as i64 {
        limit
    } else {
        n as usize
    }
}

/// The name used on the command line, in launch files and in evidence rows.
impl fmt::Display for Band {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Band::FULL => f.pad("none"),
            Band::CAUSAL => f.pad("causal"),
            Band::CAUSAL_TOP_LEFT => f.pad("causal-top-left"),
            Band { corner, before, after } => {
                let name = match corner {
                    Corner::BottomRight => "window",
                    Corner::TopLeft => "window-top-left",
                };
                let bound = |keys: Option<u32>| keys.map_or("inf".to_owned(), |keys| keys.to_string());
                f.pad(&format!("{name}:{}:{}", bound(before), bound(after)))
            }
        }
    }
}

impl FromStr for Band {
    type Err = ProblemError;

    fn from_str(s: &str) -> Result<Self, ProblemError> {
        let named = Band::NAMED.into_iter().find(|band| band.to_string() == s);
        named.or_else(|| window(s)).ok_or_else(|| ProblemError::UnknownName {
            what: "mask",
            value: s.to_owned(),
            accepted: Band::ACCEPTED,
        })
    }
}

/// Reads `window:BEFORE:AFTER` and `window-top-left:BEFORE:AFTER`.
fn window(s: &str) -> Option<Band> {
    let (name, bounds) = s.split_once(':')?;
    let corner = match name {
        "window" => Corner::BottomRight,
        "window-top-left" => Corner::TopLeft,
        _ => return None,
    };
    let (before, after) = bounds.split_once(':')?;
    let bound = |keys: &str| match keys {
        "inf" => Some(None),
        keys => keys.parse().ok().map(Some),
    };
    Some(Band { corner, before: bound(before)?, after: bound(after)? }.aligned(corner))
}

impl From<Band> for String {
    fn from(band: Band) -> String {
        band.to_string()
    }
}

impl TryFrom<String> for Band {
    type Error = ProblemError;

    fn try_from(name: String) -> Result<Band, ProblemError> {
        name.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BANDS: [Band; 8] = [
        Band::FULL,
        Band::CAUSAL,
        Band::CAUSAL_TOP_LEFT,
        Band::window(2, 0),
        Band::window(0, 3),
        Band { corner: Corner::TopLeft, before: Some(1), after: Some(1) },
        Band { corner: Corner::BottomRight, before: Some(3), after: None },
        Band { corner: Corner::TopLeft, before: None, after: Some(2) },
    ];
    const LENGTHS: [(usize, usize); 7] = [(1, 1), (7, 4), (4, 7), (3, 0), (5, 5), (2, 11), (11, 2)];

    /// Whether a query row sees a key, evaluated directly from the definition.
    fn sees(band: Band, row: usize, key: usize, seq_q: usize, seq_kv: usize) -> bool {
        let level =
            row as i64 + if band.corner == Corner::TopLeft { 0 } else { seq_kv as i64 - seq_q as i64 };
        band.before.is_none_or(|before| key as i64 >= level - i64::from(before))
            && band.after.is_none_or(|after| key as i64 <= level + i64::from(after))
    }

    #[test]
    fn a_row_sees_the_keys_of_the_definition() {
        for band in BANDS {
            for (seq_q, seq_kv) in LENGTHS {
                let shown = band.keys_of_all_rows(seq_q, seq_kv);
                for row in 0..seq_q {
                    let seen: Vec<usize> =
                        (0..seq_kv).filter(|&key| sees(band, row, key, seq_q, seq_kv)).collect();
                    let range = band.keys(row, seq_q, seq_kv);
                    assert_eq!(
                        (range.start..range.end).collect::<Vec<_>>(),
                        seen,
                        "{band} {seq_q} {seq_kv} {row}"
                    );
                    assert!(seen.iter().all(|&key| (shown.start..shown.end).contains(&key)));
                }
            }
        }
    }

    #[test]
    fn an_intersection_shows_what_both_bands_show() {
        for (a, b) in BANDS.into_iter().flat_map(|a| BANDS.map(|b| (a, b))) {
            let Some(both) = a.intersection(b) else {
                assert_ne!(a.corner, b.corner);
                continue;
            };
            for (seq_q, seq_kv) in LENGTHS {
                for (row, key) in (0..seq_q).flat_map(|row| (0..seq_kv).map(move |key| (row, key))) {
                    let shown = |band: Band| sees(band, row, key, seq_q, seq_kv);
                    assert_eq!(shown(both), shown(a) && shown(b), "{a} {b} {seq_q} {seq_kv} {row} {key}");
                }
            }
        }
    }

    #[test]
    fn a_bound_that_excludes_nothing_is_dropped() {
        for band in BANDS {
            for (seq_q, seq_kv) in LENGTHS {
                let simple = band.simplified(seq_q, seq_kv);
                for row in 0..seq_q {
                    let range = |band: Band| {
                        let range = band.keys(row, seq_q, seq_kv);
                        (range.start..range.end).collect::<Vec<_>>()
                    };
                    assert_eq!(range(band), range(simple), "{band} {simple} {seq_q} {seq_kv} {row}");
                }
            }
        }
        assert_eq!(Band::window(4095, 0).simplified(4096, 4096), Band::CAUSAL);
        assert_eq!(Band::window(9, 9).simplified(10, 10), Band::FULL);
        assert_eq!(Band::window(8, 9).simplified(10, 10).after, None);
        assert_eq!(Band::window(8, 0).simplified(10, 10), Band::window(8, 0));
    }

    #[test]
    fn a_bound_that_excludes_nothing_at_smaller_lengths_is_dropped() {
        for band in BANDS {
            let simple = band.simplified_up_to(6, 7);
            for (seq_q, seq_kv) in (1..=6).flat_map(|q| (0..=7).map(move |k| (q, k))) {
                for row in 0..seq_q {
                    let keys = |band: Band| band.keys(row, seq_q, seq_kv);
                    let (ours, theirs) = (keys(simple), keys(band));
                    assert!(
                        ours == theirs || ours.is_empty() && theirs.is_empty(),
                        "{band} {simple} {seq_q} {seq_kv}"
                    );
                }
            }
        }
        assert_eq!(Band::window(6, 5).simplified_up_to(6, 7), Band::FULL);
        assert_eq!(Band::window(5, 4).simplified_up_to(6, 7), Band::window(5, 4));
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        for band in BANDS {
            assert_eq!(band.to_string().parse(), Ok(band), "{band}");
            let json = serde_json::to_string(&band).unwrap();
            assert_eq!(serde_json::from_str::<Band>(&json).unwrap(), band);
        }
        assert_eq!("window:inf:inf".parse(), Ok(Band::FULL));
        assert_eq!("window:127:0".parse(), Ok(Band::window(127, 0)));
        assert_eq!(Band::window(127, 0).to_string(), "window:127:0");
        for wrong in ["casual", "window", "window:1", "window:-1:0", "window:1:2:3", "window:1:4294967296"] {
            let refused = wrong.parse::<Band>().unwrap_err().to_string();
            assert!(
                refused.starts_with(&format!("invalid value '{wrong}' for mask: expected none, causal, "))
            );
        }
    }
}
