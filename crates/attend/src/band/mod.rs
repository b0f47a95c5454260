//! The band of keys that query rows see, and the classification of KV blocks as skipped, full or partial.

mod bound;
mod list;
mod mask;
mod rows;

use problem::Corner;
use ptx::{Builder, R32};

pub use bound::{Bound, Coverage, Lower};
pub use list::{BlockList, BlockLists, Hides, ListWriter};
pub use mask::Masker;
pub use rows::RowRange;

/// The properties of a band on which the code depends: the alignment and which bounds exist
/// ([`problem::Band`] has the definition). The sizes of the bounds are launch parameters.
#[derive(Clone, Copy, Debug)]
pub struct KeyBand {
    /// The corner of S to which the diagonal is aligned.
    pub corner: Corner,
    /// Number of keys before the diagonal that a row sees; `None` for all.
    pub before: Option<R32>,
    /// Number of keys after the diagonal that a row sees; `None` for all.
    pub after: Option<After>,
    /// Whether programs read tables at key positions. Then a full block must contain existing keys only, also
    /// for rows beyond the queries, whose diagonal lies beyond the keys.
    pub indexes_tables: bool,
}

/// The upper bound of a band.
#[derive(Clone, Copy, Debug)]
pub enum After {
    /// No key after the diagonal: the upper bound of a causal mask. Needs no parameter.
    Diagonal,
    /// This number of keys after the diagonal is visible.
    Keys(R32),
}

impl KeyBand {
    /// Whether every row sees every key.
    pub const fn is_full(&self) -> bool {
        self.before.is_none() && self.after.is_none()
    }

    /// The band of queries that a key row sees, in a [`RowRange`] whose queries and keys have changed places:
    /// row `i` sees key `j` for `i + shift − before ≤ j ≤ i + shift + after`, hence `j − shift − after ≤ i ≤
    /// j − shift + before`.
    #[must_use]
    pub fn transposed(&self, k: &mut Builder) -> KeyBand {
        let before = self.after.map(|after| match after {
            After::Diagonal => k.mov(0),
            After::Keys(keys) => keys,
        });
        KeyBand { before, after: self.before.map(After::Keys), ..*self }
    }

    /// One past the last key that the rows before `position` see, which may lie beyond the keys or before
    /// key 0. `None` without an upper bound.
    pub fn end_before(&self, k: &mut Builder, position: R32, [seq_q, seq_kv]: [R32; 2]) -> Option<R32> {
        let after = self.after?;
        let shift = (self.corner == Corner::BottomRight).then(|| k.sub(seq_kv, seq_q));
        let level = shifted(k, position, shift);
        Some(further(k, level, after))
    }

    /// Whether the band is a causal mask.
    pub const fn is_causal(&self) -> bool {
        self.before.is_none() && matches!(self.after, Some(After::Diagonal))
    }
}

fn shifted(k: &mut Builder, position: R32, shift: Option<R32>) -> R32 {
    shift.map_or(position, |shift| k.add(position, shift))
}

/// One past the last visible key of a row whose diagonal is at `key`.
fn further(k: &mut Builder, key: R32, after: After) -> R32 {
    match after {
        After::Diagonal => key,
        After::Keys(keys) => k.add(key, keys),
    }
}
