//! Sequence lengths that differ between batch entries, read from arrays in device memory. The values are
//! clamped as in [`problem::Problem::sequences`], so that no value leads outside a tensor.

use problem::Tensor;
use ptx::{Builder, CmpOp, Global, R32};
use tile::{Locate, Spans, WorkTile, divide};

/// The sources of the lengths of one side (queries, or keys and values).
#[derive(Clone, Copy, Debug)]
pub struct SideLengths {
    /// The array of cumulative lengths (`batch + 1` elements) and the number of rows of the packed tensor;
    /// `None` if the tensor is not packed.
    pub packed: Option<(Global, R32)>,
    /// The array of used lengths (`batch` elements); `None` if all rows are used.
    pub used: Option<Global>,
    /// The upper bound of the lengths.
    pub longest: R32,
}

/// The sources of the lengths of a problem.
#[derive(Clone, Copy, Debug)]
pub struct Lengths {
    /// Lengths of the queries.
    pub q: SideLengths,
    /// Lengths of the keys and values.
    pub kv: SideLengths,
    /// The array of numbers of padding rows before the first key (`batch` elements), if there is one.
    pub left_pad: Option<Global>,
    /// Number of batch entries.
    pub batch: R32,
}

/// The rows of a batch entry on one side.
#[derive(Clone, Copy, Debug)]
pub struct SequenceRows {
    /// The first row within the tensor's batch entry; `None` for row 0.
    pub start: Option<R32>,
    /// Number of rows.
    pub len: R32,
}

/// The rows of a batch entry.
#[derive(Clone, Copy, Debug)]
pub struct Sequence {
    pub batch: R32,
    pub q: SequenceRows,
    pub kv: SequenceRows,
}

impl SideLengths {
    /// The rows of a batch entry.
    fn rows(&self, k: &mut Builder, batch: R32) -> SequenceRows {
        let (start, len) = match self.packed {
            None => (None, self.longest),
            Some((cumulative, rows)) => {
                let at = k.index(cumulative, batch, 4);
                let [start, end] = [0, 4].map(|offset| {
                    let at = Global { offset: at.offset + offset, ..at };
                    cut_element(k, at, rows)
                });
                let len = k.sub(end, start);
                (Some(start), cut(k, len, self.longest))
            }
        };
        let len = match self.used {
            None => len,
            Some(used) => {
                let at = k.index(used, batch, 4);
                cut_element(k, at, len)
            }
        };
        SequenceRows { start, len }
    }

    /// Number of rows in each batch entry of the tensor.
    pub fn tensor_rows(&self) -> R32 {
        self.packed.map_or(self.longest, |(_, rows)| rows)
    }
}

impl SequenceRows {
    /// The row of the tensor's batch entry that holds row `row` of the sequence.
    pub fn row(&self, k: &mut Builder, row: R32) -> R32 {
        self.start.map_or(row, |start| k.add(row, start))
    }
}

impl Sequence {
    /// The rows of a tensor.
    pub const fn side(&self, tensor: Tensor) -> SequenceRows {
        if tensor.is_of_keys() { self.kv } else { self.q }
    }
}

impl Lengths {
    /// The rows of a batch entry.
    pub fn sequence(&self, k: &mut Builder, batch: R32) -> Sequence {
        let q = self.q.rows(k, batch);
        let mut kv = self.kv.rows(k, batch);
        if let Some(left_pad) = self.left_pad {
            let at = k.index(left_pad, batch, 4);
            let padding = cut_element(k, at, kv.len);
            kv = SequenceRows { start: Some(kv.row(k, padding)), len: k.sub(kv.len, padding) };
        }
        Sequence { batch, q, kv }
    }

    /// Whether the queries, and the keys, of a batch entry may begin after row 0 of the tensor's.
    pub const fn have_starts(&self) -> [bool; 2] {
        [self.q.packed.is_some(), self.kv.packed.is_some() || self.left_pad.is_some()]
    }

    /// The sequence of a tile of `rows` query rows, and the tile's index in the sequence. `tile` is the index
    /// among the tiles of batch entry `batch`, or among all tiles if the queries are packed. With pack-GQA, a
    /// position has `heads` rows. For a tile without rows, both lengths and the index are 0.
    ///
    /// Packed sequence `b` owns the tiles from `⌊start_b / rows⌋ + b` on (with starts counted in rows of
    /// packed heads). It needs `⌈length / rows⌉` tiles, at most `⌊end_b / rows⌋ + 1 − ⌊start_b / rows⌋`.
    /// Therefore the tiles of two sequences do not meet, and [`Lengths::tile_count`] tiles suffice without a
    /// sum over the batch. Some tiles are left over.
    pub fn tile(&self, k: &mut Builder, batch: R32, tile: R32, rows: u32, heads: u32) -> (Sequence, R32) {
        self.tile_of(k, self.q.packed, [batch, tile], (rows, heads), |sequence| sequence.q.len)
    }

    /// Like [`Lengths::tile`], for a tile of `rows` keys.
    pub fn key_tile(&self, k: &mut Builder, batch: R32, tile: R32, rows: u32) -> (Sequence, R32) {
        self.tile_of(k, self.kv.packed, [batch, tile], (rows, 1), |sequence| sequence.kv.len)
    }

    /// The sequence of a tile of the side with the cumulative lengths `packed`, whose length is `len`.
    fn tile_of(
        &self,
        k: &mut Builder,
        packed: Option<(Global, R32)>,
        [batch, tile]: [R32; 2],
        (rows, heads): (u32, u32),
        len: impl Fn(&Sequence) -> R32,
    ) -> (Sequence, R32) {
        let (batch, index) = match packed {
            None => (batch, tile),
            Some(cumulative) => self.owner(k, cumulative, tile, (rows, heads)),
        };
        let mut sequence = self.sequence(k, batch);
        let first = k.mul(index, rows);
        let limit = times(k, len(&sequence), heads);
        let exists = k.setp_u(CmpOp::Lt, first, limit);
        for len in [&mut sequence.q.len, &mut sequence.kv.len] {
            *len = k.selp(*len, 0, exists);
        }
        (sequence, k.selp(index, 0, exists))
    }

    /// Finds the batch entry that owns a tile of packed rows, and the tile's index in the sequence, by a
    /// binary search. The search ends at a batch entry for any array contents.
    fn owner(
        &self,
        k: &mut Builder,
        (cumulative, limit): (Global, R32),
        tile: R32,
        (rows, heads): (u32, u32),
    ) -> (R32, R32) {
        let first_tile = |k: &mut Builder, batch: R32| {
            let at = k.index(cumulative, batch, 4);
            let start = cut_element(k, at, limit);
            let start = times(k, start, heads);
            let before = divide(k, start, rows);
            k.add(before, batch)
        };
        // The owner lies in `batch..end`; `first` is the first tile of `batch`.
        let (batch, end) = (k.mov(0), k.mov(self.batch));
        let first = first_tile(k, batch);
        k.while_(
            |k| {
                let left = k.sub(end, batch);
                k.setp_u(CmpOp::Gt, left, 1)
            },
            |k| {
                let sum = k.add(batch, end);
                let middle = k.shr_u(sum, 1);
                let of_middle = first_tile(k, middle);
                let reached = k.setp_u(CmpOp::Le, of_middle, tile);
                k.selp_to(batch, middle, batch, reached);
                k.selp_to(end, end, middle, reached);
                k.selp_to(first, of_middle, first, reached);
            },
        );
        (batch, k.sub(tile, first))
    }

    /// Number of tiles of `rows` rows that suffice for any `batch` sequences with `packed` rows in total.
    pub const fn tile_count(packed: u64, batch: u64, rows: u64) -> u64 {
        packed / rows + batch
    }
}

/// The sequence lengths and tile sizes from which a tile scheduler finds the rows of a tile.
#[derive(Clone, Copy, Debug)]
pub struct SequenceTiles {
    pub lengths: Lengths,
    /// Whether the rows of the output are keys, and the queries those along the reduction, as in the
    /// gradients of K and V.
    pub of_keys: bool,
    /// Rows of a tile.
    pub rows: u32,
    /// Rows of a position: the number of packed heads, or 1.
    pub heads: u32,
}

impl Locate for SequenceTiles {
    fn locate(&self, k: &mut Builder, tile: WorkTile) -> WorkTile {
        let last = k.sub(self.lengths.batch, 1);
        let batch = k.min_u(tile.batch, last);
        let (sequence, row_block) = match self.of_keys {
            true => self.lengths.key_tile(k, batch, tile.row_block, self.rows),
            false => self.lengths.tile(k, batch, tile.row_block, self.rows, self.heads),
        };
        let sides = if self.of_keys { [sequence.kv, sequence.q] } else { [sequence.q, sequence.kv] };
        let [rows, reduced] = sides.map(|SequenceRows { start, len }| {
            let start = start.unwrap_or_else(|| k.mov(0));
            [start, len]
        });
        WorkTile { row_block, batch: sequence.batch, spans: Some(Spans { rows, reduced }), ..tile }
    }
}

fn times(k: &mut Builder, n: R32, by: u32) -> R32 {
    if by == 1 { n } else { k.mul(n, by) }
}

/// The array element at `at`, clamped to `0..=limit`.
fn cut_element(k: &mut Builder, at: Global, limit: R32) -> R32 {
    let value = k.ld(at);
    cut(k, value, limit)
}

/// Clamps the signed number `n` to `0..=limit`.
fn cut(k: &mut Builder, n: R32, limit: R32) -> R32 {
    let n = k.max_s(n, 0);
    k.min_s(n, limit)
}

#[cfg(test)]
mod tests {
    use super::Lengths;

    /// The number of tiles that sequences of these lengths need, and the total number of tiles. Panics if the
    /// tiles of two sequences overlap.
    fn tiles(lengths: &[u64], rows: u64) -> (u64, u64) {
        let total: u64 = lengths.iter().sum();
        let (mut start, mut taken, mut needed) = (0, 0, 0);
        for (b, length) in (0..).zip(lengths) {
            let (first, count) = (start / rows + b, length.div_ceil(rows));
            assert!(taken <= first, "sequence {b} of {lengths:?}");
            (start, taken, needed) = (start + length, first + count, needed + count);
        }
        let all = Lengths::tile_count(total, lengths.len() as u64, rows);
        assert!(taken <= all, "{lengths:?}");
        (needed, all)
    }

    #[test]
    fn sequences_own_tiles_of_their_own() {
        let mut state = 1u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state >> 33
        };
        for rows in [1, 16, 48, 64, 192] {
            for _ in 0..200 {
                let lengths: Vec<u64> = (0..random() % 9).map(|_| random() % (3 * rows)).collect();
                let (needed, all) = tiles(&lengths, rows);
                assert!(all <= needed + lengths.len() as u64);
            }
        }
    }

    #[test]
    fn one_long_sequence_among_short_ones_leaves_few_tiles_over() {
        let lengths: Vec<u64> = std::iter::once(16_384).chain([200; 63]).collect();
        assert_eq!(tiles(&lengths, 128), (128 + 2 * 63, 290));
    }
}
