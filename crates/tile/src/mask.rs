//! Which keys a row sees, and what that leaves of a block of keys: nothing, everything, or a part.

use ptx::{Builder, CmpOp, F32, R32};

use crate::{AccTile, Threads, divide};

/// Which keys a query row sees. New masks are new variants, with their bound beside their predicate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MaskRule {
    /// Keys below `seq_kv`.
    All,
    /// Keys up to a diagonal, which goes on by one with each row.
    Causal(Corner),
}

/// The corner of the scores that the diagonal runs through: the two differ where lengths do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Corner {
    /// Keys up to `row + seq_kv − seq_q`.
    BottomRight,
    /// Keys up to `row`.
    TopLeft,
}

/// How much of a block its rows see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Coverage {
    /// Every key, for every row of the CTA: no test needed.
    Full,
    /// Some keys.
    Partial,
}

/// The rows of a CTA and the lengths they meet.
#[derive(Clone, Copy, Debug)]
pub struct RowRange {
    /// First row.
    pub first: R32,
    /// Rows of the tile (those at or beyond `seq_q` are computed and not stored).
    pub rows: u32,
    /// Query rows in all.
    pub seq_q: R32,
    /// Keys in all.
    pub seq_kv: R32,
    /// Query heads whose rows are packed: so many rows are of one position in the sequence. 1 where they are not; `first` and
    /// `rows` count rows, `seq_q` positions.
    pub heads: u32,
}

impl RowRange {
    /// The position of a row.
    pub fn position(&self, k: &mut Builder, row: R32) -> R32 {
        divide(k, row, self.heads)
    }

    /// The query head of a row, and its position: `head` counts heads, or groups of packed ones.
    pub fn head_and_position(&self, k: &mut Builder, head: R32, row: R32) -> [R32; 2] {
        if self.heads == 1 {
            return [head, row];
        }
        let position = self.position(k, row);
        let before = k.mul(position, self.heads);
        let in_group = k.sub(row, before);
        [k.mad(head, self.heads, in_group), position]
    }

    /// One past the last key that all of the rows see, and one past the last that any of them sees.
    pub fn keys_seen(&self, k: &mut Builder, rule: MaskRule) -> [R32; 2] {
        match rule {
            MaskRule::All => [self.seq_kv; 2],
            MaskRule::Causal(corner) => {
                let shift = self.shift(k, corner);
                // Rows end where keys do, and may begin before them; or begin where keys do, and may go on after them.
                let within = |k: &mut Builder, end: R32| match corner {
                    Corner::BottomRight => k.max_s(end, 0),
                    Corner::TopLeft => k.min_u(end, self.seq_kv),
                };
                let past_last = k.add(self.first, self.rows + self.heads - 1);
                let past_last = self.position(k, past_last);
                let past_last = k.min_u(past_last, self.seq_q);
                let by_any = shifted(k, past_last, shift);
                let by_any = within(k, by_any);
                let first = self.position(k, self.first);
                let first = shifted(k, first, shift);
                let first = k.add(first, 1);
                [within(k, first), by_any]
            }
        }
    }

    /// From a position to the last key that it sees; `None` where that is the same number.
    fn shift(&self, k: &mut Builder, corner: Corner) -> Option<R32> {
        match corner {
            Corner::BottomRight => Some(k.sub(self.seq_kv, self.seq_q)),
            Corner::TopLeft => None,
        }
    }
}

/// The blocks of keys that a CTA visits: `full` ones, then partial ones up to `end`; those from `end` on are empty.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// Blocks `0..full` are seen by all rows completely; `None` when all blocks are.
    pub full: Option<R32>,
    /// One past the last block that any row sees any of.
    pub end: R32,
}

impl Bound {
    /// The bound of a rule for blocks of `block_n` keys. `divides` says that `block_n` divides `seq_kv`.
    pub fn new(k: &mut Builder, rule: MaskRule, rows: &RowRange, block_n: u32, divides: bool) -> Bound {
        let [by_all, by_any] = rows.keys_seen(k, rule);
        let every_block = rule == MaskRule::All && divides;
        Bound { full: (!every_block).then(|| divide(k, by_all, block_n)), end: blocks_up(k, by_any, block_n) }
    }
}

fn shifted(k: &mut Builder, position: R32, shift: Option<R32>) -> R32 {
    shift.map_or(position, |shift| k.add(position, shift))
}

fn blocks_up(k: &mut Builder, keys: R32, block_n: u32) -> R32 {
    let up = k.add(keys, block_n - 1);
    divide(k, up, block_n)
}

/// How it is found out which of a lane's elements are seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Test {
    /// Each column is compared.
    Columns,
    /// Each is a bit of a word.
    Bits,
}

/// Puts −∞ where a row does not see a key.
#[derive(Clone, Copy, Debug)]
pub struct Masker {
    rule: MaskRule,
    test: Test,
    rows: RowRange,
    /// The lane's first row, and its first column in a block.
    row: R32,
    column: R32,
}

impl Masker {
    /// For warps that hold `warp_rows` rows each of the range, and `warp_keys` keys of each block.
    pub fn new(
        k: &mut Builder,
        rule: MaskRule,
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
        Masker { rule, test: Test::Columns, rows: *rows, row: k.add(first, threads.quad), column }
    }

    /// The same with fewer instructions and some more registers: of seven bits, ptxas makes predicates at once (R2P).
    #[must_use]
    pub const fn by_bits(self) -> Masker {
        Masker { test: Test::Bits, ..self }
    }

    /// Masks the scores of keys from `origin` on; nothing where all is seen.
    pub fn apply(&self, k: &mut Builder, s: &AccTile, origin: R32, coverage: Coverage) {
        if coverage == Coverage::Full {
            return;
        }
        let first = k.add(origin, self.column);
        for i in 0..s.lane_rows() {
            let end = self.keys_seen(k, i);
            let left = k.sub(end, first);
            let scores: Vec<F32> = s.row(i).collect();
            match self.test {
                Test::Columns => hide_by_columns(k, &scores, left),
                Test::Bits => hide_by_bits(k, &scores, left),
            }
        }
    }

    /// One past the last key that the lane's row `i` sees; may be negative.
    fn keys_seen(&self, k: &mut Builder, i: u32) -> R32 {
        match self.rule {
            MaskRule::All => self.rows.seq_kv,
            MaskRule::Causal(corner) => {
                let shift = self.rows.shift(k, corner);
                let below = i / 2 * 16 + i % 2 * 8;
                let end = if self.rows.heads == 1 {
                    let diagonal = shifted(k, self.row, shift);
                    k.add(diagonal, below + 1)
                } else {
                    let row = k.add(self.row, below);
                    let position = self.rows.position(k, row);
                    let diagonal = shifted(k, position, shift);
                    k.add(diagonal, 1)
                };
                k.min_s(end, self.rows.seq_kv)
            }
        }
    }
}

/// Hides a row's elements from column `left` on: a lane has two of every eight columns.
fn hide_by_columns(k: &mut Builder, scores: &[F32], left: R32) {
    for (column, &score) in (0..).zip(scores) {
        let seen = k.setp_s(CmpOp::Gt, left, column / 2 * 8 + column % 2);
        k.selp_to(score, score, f32::NEG_INFINITY, seen);
    }
}

/// The same, with a bit for each element.
fn hide_by_bits(k: &mut Builder, scores: &[F32], left: R32) {
    let seen = elements_before(k, left);
    for (word, scores) in (0..).zip(scores.chunks(32)) {
        let bits = low_bits(k, seen, 32 * word);
        for (bit, &score) in scores.iter().enumerate() {
            let of_score = k.and(bits, 1u32 << bit);
            let seen = k.setp_u(CmpOp::Ne, of_score, 0);
            k.selp_to(score, score, f32::NEG_INFINITY, seen);
        }
    }
}

/// How many of a lane's elements of a row lie before a column, counted from its first. Perhaps negative, perhaps more than there are.
fn elements_before(k: &mut Builder, column: R32) -> R32 {
    let eights = k.shr_s(column, 3);
    let rest = k.and(column, 7);
    let of_rest = k.min_u(rest, 2);
    k.mad(eights, 2, of_rest)
}

/// A word whose lowest `count − before` bits are set.
fn low_bits(k: &mut Builder, count: R32, before: u32) -> R32 {
    let count = k.sub(count, before);
    let count = k.max_s(count, 0);
    // A shift by 32 and more leaves nothing (PTX ISA, "shl").
    let one: R32 = k.mov(1);
    let above = k.shl(one, count);
    k.sub(above, 1)
}
