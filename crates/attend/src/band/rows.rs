//! The query rows of a CTA, and the range of keys that they see.

use problem::Corner;
use ptx::{Builder, R32};
use tile::divide;

use super::{After, KeyBand, further, shifted};

/// The rows of a CTA, with the sequence lengths.
#[derive(Clone, Copy, Debug)]
pub struct RowRange {
    /// First row.
    pub first: R32,
    /// Number of rows of the tile. Rows at or beyond `seq_q` are computed but not stored.
    pub rows: u32,
    /// Sequence length of the queries.
    pub seq_q: R32,
    /// Sequence length of the keys.
    pub seq_kv: R32,
    /// Number of query heads whose rows are packed (pack-GQA): this many consecutive rows have one sequence
    /// position. 1 without packing. `first` and `rows` count rows, `seq_q` counts positions.
    pub heads: u32,
}

impl RowRange {
    /// The sequence position of a row.
    pub fn position(&self, k: &mut Builder, row: R32) -> R32 {
        divide(k, row, self.heads)
    }

    /// The query head and the sequence position of a row. `head` counts heads, or groups of packed heads.
    pub fn head_and_position(&self, k: &mut Builder, head: R32, row: R32) -> [R32; 2] {
        if self.heads == 1 {
            return [head, row];
        }
        let position = self.position(k, row);
        let before = k.mul(position, self.heads);
        let in_group = k.sub(row, before);
        [k.mad(head, self.heads, in_group), position]
    }

    /// Evaluates the upper bound of the band: one past the last key that all rows see, and one past the last
    /// key that any row sees.
    pub fn keys_seen(&self, k: &mut Builder, band: &KeyBand) -> [R32; 2] {
        let Some(after) = band.after else { return [self.seq_kv; 2] };
        let shift = self.shift(k, band.corner);
        // For a band without keys after the diagonal, one of the two limits holds without a comparison. In a
        // bottom-right band, the last row ends at the last key, but the first rows may end before key 0. In a
        // top-left band, the first row starts at key 0, but the last rows may end beyond the last key.
        let within = |k: &mut Builder, end: R32| match (band.corner, after) {
            (Corner::BottomRight, After::Diagonal) if !band.indexes_tables => k.max_s(end, 0),
            (Corner::TopLeft, _) => k.min_u(end, self.seq_kv),
            (Corner::BottomRight, _) => {
                let end = k.max_s(end, 0);
                k.min_s(end, self.seq_kv)
            }
        };
        let past_last = self.past_last(k);
        let by_any = shifted(k, past_last, shift);
        let by_any = further(k, by_any, after);
        let by_any = within(k, by_any);
        let first = self.position(k, self.first);
        let first = shifted(k, first, shift);
        let first = further(k, first, after);
        let first = k.add(first, 1);
        [within(k, first), by_any]
    }

    /// Evaluates the lower bound of the band: the first key that any row sees, and the first key from which
    /// on all rows see. Returns `None` without a lower bound.
    pub(super) fn keys_skipped(&self, k: &mut Builder, band: &KeyBand) -> Option<[R32; 2]> {
        let before = band.before?;
        let shift = self.shift(k, band.corner);
        let first = self.position(k, self.first);
        let past_last = self.past_last(k);
        let last = k.sub(past_last, 1);
        Some([first, last].map(|position| {
            let level = shifted(k, position, shift);
            let key = k.sub(level, before);
            k.max_s(key, 0)
        }))
    }

    /// One past the position of the last existing row.
    fn past_last(&self, k: &mut Builder) -> R32 {
        let past_last = k.add(self.first, self.rows + self.heads - 1);
        let past_last = self.position(k, past_last);
        k.min_u(past_last, self.seq_q)
    }

    /// The offset from a position to its key on the diagonal; `None` where it is zero.
    pub(super) fn shift(&self, k: &mut Builder, corner: Corner) -> Option<R32> {
        match corner {
            Corner::BottomRight => Some(k.sub(self.seq_kv, self.seq_q)),
            Corner::TopLeft => None,
        }
    }
}
