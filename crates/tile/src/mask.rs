//! Which keys a row sees, and which KV blocks are therefore skipped, full or partial.

use problem::Corner;
use ptx::{Builder, CmpOp, F32, R32, Src};

use crate::{AccTile, Threads, divide};

/// Which keys a query row sees, as far as the code depends on this: the alignment and which bounds exist
/// ([`problem::Band`] has the definition). The sizes of the bounds are launch parameters.
#[derive(Clone, Copy, Debug)]
pub struct KeyBand {
    /// The corner of S to which the diagonal is aligned.
    pub corner: Corner,
    /// Number of keys before the diagonal that a row sees; `None` for all.
    pub before: Option<R32>,
    /// Number of keys after the diagonal that a row sees; `None` for all.
    pub after: Option<After>,
}

/// The upper bound of a band.
#[derive(Clone, Copy, Debug)]
pub enum After {
    /// No key after the diagonal: the upper bound of a causal mask. Needs no parameter.
    Diagonal,
    /// This number of keys after the diagonal.
    Keys(R32),
}

impl KeyBand {
    /// Whether every row sees every key.
    pub const fn is_full(&self) -> bool {
        self.before.is_none() && self.after.is_none()
    }

    /// Whether the band is a causal mask.
    pub const fn is_causal(&self) -> bool {
        self.before.is_none() && matches!(self.after, Some(After::Diagonal))
    }
}

/// How much of a KV block the rows see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Coverage {
    /// Every row of the CTA sees every key: no mask needed.
    Full,
    /// Some rows do not see some keys: the mask is applied.
    Partial,
}

/// The rows of a CTA, with the sequence lengths.
#[derive(Clone, Copy, Debug)]
pub struct RowRange {
    /// First row.
    pub first: R32,
    /// Rows of the tile. Rows at or beyond `seq_q` are computed and not stored.
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

    /// The query head of a row, and its position. `head` counts heads, or groups of packed heads.
    pub fn head_and_position(&self, k: &mut Builder, head: R32, row: R32) -> [R32; 2] {
        if self.heads == 1 {
            return [head, row];
        }
        let position = self.position(k, row);
        let before = k.mul(position, self.heads);
        let in_group = k.sub(row, before);
        [k.mad(head, self.heads, in_group), position]
    }

    /// By the band's upper bound: one past the last key that all of the rows see, and one past the last key
    /// that any of them sees.
    pub fn keys_seen(&self, k: &mut Builder, band: &KeyBand) -> [R32; 2] {
        let Some(after) = band.after else { return [self.seq_kv; 2] };
        let shift = self.shift(k, band.corner);
        // Without keys after the diagonal, one of the two limits holds without a comparison. Aligned
        // to the bottom right, the last row ends at the last key, but first rows may end before key 0.
        // Aligned to the top left, the first row starts at key 0, but last rows may end beyond the last key.
        let within = |k: &mut Builder, end: R32| match (band.corner, after) {
            (Corner::BottomRight, After::Diagonal) => k.max_s(end, 0),
            (Corner::TopLeft, _) => k.min_u(end, self.seq_kv),
            (Corner::BottomRight, After::Keys(_)) => {
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

    /// By the band's lower bound: the first key that any of the rows sees, and the first key from which on
    /// all of them see. `None` without a lower bound.
    fn keys_skipped(&self, k: &mut Builder, band: &KeyBand) -> Option<[R32; 2]> {
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

    /// One past the position of the last row that exists.
    fn past_last(&self, k: &mut Builder) -> R32 {
        let past_last = k.add(self.first, self.rows + self.heads - 1);
        let past_last = self.position(k, past_last);
        k.min_u(past_last, self.seq_q)
    }

    /// The offset from a position to its key on the diagonal; `None` where it is zero.
    fn shift(&self, k: &mut Builder, corner: Corner) -> Option<R32> {
        match corner {
            Corner::BottomRight => Some(k.sub(self.seq_kv, self.seq_q)),
            Corner::TopLeft => None,
        }
    }
}

/// The KV blocks that a CTA visits, from the last to the first: partial blocks down to `full_to`, full blocks
/// down to `full_from`, partial blocks down to `from`. Each of the three ranges may be empty. If the band is
/// narrower than a block, no block is full and `full_from` may exceed `full_to`.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// The first block of which any row sees a key, and the first block of which all rows see the first key;
    /// `None` where both are 0.
    pub lower: Option<Lower>,
    /// All rows see the last key of the blocks below this one; `None` if that holds for all blocks.
    pub full: Option<R32>,
    /// One past the last block of which any row sees a key.
    pub end: R32,
}

/// The lower end of the KV blocks, for a band with a lower bound.
#[derive(Clone, Copy, Debug)]
pub struct Lower {
    /// The first block of which any row sees a key.
    pub from: R32,
    /// The first block of which every row sees the first key.
    pub full_from: R32,
}

impl Bound {
    /// The KV blocks of a band. `divides` means that `block_n` divides `seq_kv`.
    pub fn new(k: &mut Builder, band: &KeyBand, rows: &RowRange, block_n: u32, divides: bool) -> Bound {
        let [by_all, by_any] = rows.keys_seen(k, band);
        let every_block = band.after.is_none() && divides;
        let full = (!every_block).then(|| divide(k, by_all, block_n));
        let end = blocks_up(k, by_any, block_n);
        let lower = rows.keys_skipped(k, band).map(|[by_any, by_all]| Lower {
            from: divide(k, by_any, block_n),
            full_from: blocks_up(k, by_all, block_n),
        });
        Bound { lower, full, end }
    }

    /// The bound for a loop that visits at least one block. If no row sees any key, that block is fully
    /// masked.
    #[must_use]
    pub fn at_least_one(self, k: &mut Builder) -> Bound {
        let end = k.max_s(self.end, 1);
        let last = self.lower.map(|_| k.sub(end, 1));
        let lower =
            self.lower.zip(last).map(|(lower, last)| Lower { from: k.min_s(lower.from, last), ..lower });
        Bound { lower, end, ..self }
    }

    /// The first block to visit.
    pub fn from(&self) -> Src<R32> {
        self.lower.map_or(0.into(), |lower| lower.from.into())
    }
}

fn shifted(k: &mut Builder, position: R32, shift: Option<R32>) -> R32 {
    shift.map_or(position, |shift| k.add(position, shift))
}

/// One past the band's last key for a row whose diagonal is at `key`.
fn further(k: &mut Builder, key: R32, after: After) -> R32 {
    match after {
        After::Diagonal => key,
        After::Keys(keys) => k.add(key, keys),
    }
}

fn blocks_up(k: &mut Builder, keys: R32, block_n: u32) -> R32 {
    let up = k.add(keys, block_n - 1);
    divide(k, up, block_n)
}

/// How the mask tests the lane's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Test {
    /// One comparison per column.
    Columns,
    /// One bit per column, from a word computed per row.
    Bits,
}

/// Sets scores to −∞ where a row does not see a key.
#[derive(Clone, Copy, Debug)]
pub struct Masker {
    band: KeyBand,
    test: Test,
    rows: RowRange,
    /// The lane's first row, and its first column in a block.
    row: R32,
    column: R32,
}

impl Masker {
    /// For warps that hold `warp_rows` rows of the range each, and `warp_keys` keys of each block.
    pub fn new(
        k: &mut Builder,
        band: &KeyBand,
        threads: &Threads,
        rows: &RowRange,
        warp_rows: u32,
        warp_keys: u32,
    ) -> Masker {
        let first = k.mad(threads.row_warp, warp_rows, rows.first);
        let column = match threads.part {
            None => threads.column,
            Some(part) => k.mad(part, warp_keys, threads.column),
        };
        Masker { band: *band, test: Test::Columns, rows: *rows, row: k.add(first, threads.quad), column }
    }

    /// Masks with bits: fewer instructions, some more registers. ptxas turns seven bits into predicates with
    /// one R2P.
    #[must_use]
    pub const fn by_bits(self) -> Masker {
        Masker { test: Test::Bits, ..self }
    }

    /// Masks the scores of the keys from `origin` on, if the coverage is partial.
    pub fn apply(&self, k: &mut Builder, s: &AccTile, origin: R32, coverage: Coverage) {
        if coverage == Coverage::Full {
            return;
        }
        let first = k.add(origin, self.column);
        for i in 0..s.lane_rows() {
            let end = self.keys_end(k, i);
            let left = k.sub(end, first);
            let hidden = self.keys_start(k, i).map(|start| k.sub(start, first));
            let scores: Vec<F32> = s.row(i).collect();
            match self.test {
                Test::Columns => hide_by_columns(k, &scores, hidden, left),
                Test::Bits => hide_by_bits(k, &scores, hidden, left),
            }
        }
    }

    /// One past the last key that the lane's row `i` sees; may be negative.
    fn keys_end(&self, k: &mut Builder, i: u32) -> R32 {
        let Some(after) = self.band.after else { return self.rows.seq_kv };
        let level = self.level_key(k, i, 1);
        let end = further(k, level, after);
        k.min_s(end, self.rows.seq_kv)
    }

    /// The first key that the lane's row `i` sees, which may be negative; `None` without a lower bound.
    fn keys_start(&self, k: &mut Builder, i: u32) -> Option<R32> {
        let before = self.band.before?;
        let level = self.level_key(k, i, 0);
        Some(k.sub(level, before))
    }

    /// The key on the diagonal of the lane's row `i`, plus `plus`.
    fn level_key(&self, k: &mut Builder, i: u32, plus: u32) -> R32 {
        let shift = self.rows.shift(k, self.band.corner);
        let below = i / 2 * 16 + i % 2 * 8;
        if self.rows.heads == 1 {
            let diagonal = shifted(k, self.row, shift);
            k.add(diagonal, below + plus)
        } else {
            let row = k.add(self.row, below);
            let position = self.rows.position(k, row);
            let diagonal = shifted(k, position, shift);
            if plus == 0 { diagonal } else { k.add(diagonal, plus) }
        }
    }
}

/// Hides the elements of a row before column `hidden`, if given, and from column `left` on. A lane holds two
/// of every eight columns.
fn hide_by_columns(k: &mut Builder, scores: &[F32], hidden: Option<R32>, left: R32) {
    for (i, &score) in (0..).zip(scores) {
        let column = i / 2 * 8 + i % 2;
        let seen = k.setp_s(CmpOp::Gt, left, column);
        let seen = match hidden {
            None => seen,
            Some(hidden) => k.setp_s_and(CmpOp::Le, hidden, column, seen),
        };
        k.selp_to(score, score, f32::NEG_INFINITY, seen);
    }
}

/// Like [`hide_by_columns`], but with one bit per element.
fn hide_by_bits(k: &mut Builder, scores: &[F32], hidden: Option<R32>, left: R32) {
    let seen = elements_before(k, left);
    let hidden = hidden.map(|hidden| elements_before(k, hidden));
    for (word, scores) in (0..).zip(scores.chunks(32)) {
        let mut bits = low_bits(k, seen, 32 * word);
        if let Some(hidden) = hidden {
            let before = low_bits(k, hidden, 32 * word);
            let both = k.and(bits, before);
            bits = k.xor(bits, both);
        }
        for (bit, &score) in scores.iter().enumerate() {
            let of_score = k.and(bits, 1u32 << bit);
            let seen = k.setp_u(CmpOp::Ne, of_score, 0);
            k.selp_to(score, score, f32::NEG_INFINITY, seen);
        }
    }
}

/// Number of the lane's elements in a row that lie before `column`, counted from the lane's first column. May
/// be negative, or larger than the number of elements.
fn elements_before(k: &mut Builder, column: R32) -> R32 {
    let eights = k.shr_s(column, 3);
    let rest = k.and(column, 7);
    let of_rest = k.min_u(rest, 2);
    k.mad(eights, 2, of_rest)
}

/// A word with the lowest `count − before` bits set.
fn low_bits(k: &mut Builder, count: R32, before: u32) -> R32 {
    let count = k.sub(count, before);
    let count = k.max_s(count, 0);
    // A shift by 32 or more gives 0 (PTX ISA, "shl").
    let one: R32 = k.mov(1);
    let above = k.shl(one, count);
    k.sub(above, 1)
}
