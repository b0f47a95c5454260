//! The mask of a block: sets scores that a row does not see to −∞, or probabilities to 0.

use ptx::{Builder, CmpOp, F32, Pred, R32};
use tile::{AccTile, Threads};

use super::{Coverage, KeyBand, RowRange, further, shifted};

/// How the mask tests the lane's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Test {
    /// One comparison per column.
    Columns,
    /// One bit per column, from a word computed per row.
    Bits,
}

/// Sets scores to −∞, or probabilities to 0, where a row does not see a key.
#[derive(Clone, Copy, Debug)]
pub struct Masker {
    band: KeyBand,
    test: Test,
    /// The value of hidden elements.
    hidden: f32,
    rows: RowRange,
    /// The lane's first row, and its first column in a block.
    row: R32,
    column: R32,
}

impl Masker {
    /// Creates the masker for warps that hold `warp_rows` rows of the range and `warp_keys` keys of each
    /// block.
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
        let row = k.add(first, threads.quad);
        Masker { band: *band, test: Test::Columns, hidden: f32::NEG_INFINITY, rows: *rows, row, column }
    }

    /// Masks with one bit per column: fewer instructions, but some more registers. ptxas turns seven bits
    /// into predicates with one R2P.
    #[must_use]
    pub const fn by_bits(self) -> Masker {
        Masker { test: Test::Bits, ..self }
    }

    /// Sets hidden elements to 0: for probabilities.
    #[must_use]
    pub const fn of_probabilities(self) -> Masker {
        Masker { hidden: 0.0, ..self }
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
                Test::Columns => hide_by_columns(k, &scores, hidden, left, self.hidden),
                Test::Bits => hide_by_bits(k, &scores, hidden, left, self.hidden),
            }
        }
    }

    /// Whether row `i` of the lane sees any of the `count` keys from `origin` on.
    pub fn sees_any(&self, k: &mut Builder, i: u32, origin: R32, count: u32) -> Pred {
        let past_last = k.add(origin, count);
        let end = self.keys_end(k, i);
        let end = k.min_s(end, past_last);
        let start = match self.keys_start(k, i) {
            None => origin,
            Some(start) => k.max_s(start, origin),
        };
        k.setp_s(CmpOp::Lt, start, end)
    }

    /// One past the last key that row `i` of the lane sees. The value may be negative.
    fn keys_end(&self, k: &mut Builder, i: u32) -> R32 {
        let Some(after) = self.band.after else { return self.rows.seq_kv };
        let level = self.level_key(k, i, 1);
        let end = further(k, level, after);
        k.min_s(end, self.rows.seq_kv)
    }

    /// The first key that row `i` of the lane sees; `None` without a lower bound. The value may be negative.
    fn keys_start(&self, k: &mut Builder, i: u32) -> Option<R32> {
        let before = self.band.before?;
        let level = self.level_key(k, i, 0);
        Some(k.sub(level, before))
    }

    /// The key on the diagonal of row `i` of the lane, plus `plus`.
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

/// Sets to `to` the elements of a row before column `hidden`, if given, and the elements from column `left` on. A
/// lane holds two of every eight columns.
fn hide_by_columns(k: &mut Builder, scores: &[F32], hidden: Option<R32>, left: R32, to: f32) {
    for (i, &score) in (0..).zip(scores) {
        let column = i / 2 * 8 + i % 2;
        let seen = k.setp_s(CmpOp::Gt, left, column);
        let seen = match hidden {
            None => seen,
            Some(hidden) => k.setp_s_and(CmpOp::Le, hidden, column, seen),
        };
        k.selp_to(score, score, to, seen);
    }
}

/// Like [`hide_by_columns`], but with one bit per element.
fn hide_by_bits(k: &mut Builder, scores: &[F32], hidden: Option<R32>, left: R32, to: f32) {
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
            k.selp_to(score, score, to, seen);
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
