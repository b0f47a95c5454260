//! Epilogue directly from registers, without shared memory: the lanes of a quad exchange columns so that each
//! lane stores whole 16-byte chunks.

use ptx::{Builder, CmpOp, F32, Global, Half, Pointer, R32};

use super::{QuadTransposition, RowsOut};
use crate::{AccTile, Threads};

/// 8-column tiles that a quad stores at once, one chunk per lane.
const TILES: u32 = 4;

/// Width of the stores of O.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowStore {
    /// Two columns per store, as the fragment layout holds them.
    Pairs,
    /// Eight columns per store after an exchange within the quad. Columns that do not fill four chunks are
    /// stored in pairs.
    Chunks,
}

impl RowStore {
    /// Elements per store. Rows must be aligned to a multiple of this.
    pub const fn elements(self) -> u32 {
        match self {
            RowStore::Pairs => 2,
            RowStore::Chunks => 8,
        }
    }
}

/// Rounds each warp's accumulator of 16 rows and stores the rows. `rows` begin at the warp's first row; rows
/// at or beyond `limit` are not stored.
pub fn store_fragments(
    k: &mut Builder,
    threads: &Threads,
    half: Half,
    o: &AccTile,
    RowsOut { tensor, first, limit, row_bytes }: RowsOut,
    store: RowStore,
) {
    let place = |k: &mut Builder, row: R32| {
        let wide = k.zext(row);
        Global { base: k.mad(wide, row_bytes, tensor.base), offset: tensor.offset }
    };
    store_fragments_at(k, threads, Some(half), o, (first, limit), place, store, None);
}

/// Like [`store_fragments`], but `place` gives the address of each row's first column. If `width` is given,
/// only the first `width` columns of the warp are stored, and each chunk is stored completely or not at all.
/// Without `half`, O is stored in f32, in pairs: a quad stores 32 contiguous bytes at a time.
#[allow(clippy::too_many_arguments, reason = "what, which part of it, to where")]
pub fn store_fragments_at(
    k: &mut Builder,
    threads: &Threads,
    half: Option<Half>,
    o: &AccTile,
    (first, limit): (R32, R32),
    place: impl Fn(&mut Builder, R32) -> Global,
    store: RowStore,
    width: Option<R32>,
) {
    let Some(half) = half else {
        return store_floats(k, threads, o, (first, limit), place, width);
    };
    let whole_tiles = match store {
        RowStore::Pairs => 0,
        RowStore::Chunks => o.n_tiles() / TILES * TILES,
    };
    let transposition = QuadTransposition::new(k, threads.column);
    // The remaining columns, counted from the lane's first chunk and from its first pair.
    let left = width.map(|width| {
        let before = k.mul(threads.column, 4);
        [k.sub(width, before), k.sub(width, threads.column)]
    });
    let row = k.add(first, threads.quad);
    for (i, below) in [(0, 0), (1, 8)] {
        let row = if below == 0 { row } else { k.add(row, below) };
        let exists = k.setp_u(CmpOp::Lt, row, limit);
        let to = place(k, row);
        // `threads.column` is twice the lane's index in the quad, and a chunk has 16 bytes: hence the factor
        // 8.
        let chunk = Global::from(k.mad_wide_u(threads.column, 8, to.base));
        let pair = Global::from(k.mad_wide_u(threads.column, 2, to.base));
        let words: Vec<R32> = (0..o.n_tiles())
            .map(|n| {
                let tile = o.tile(0, n);
                k.pack(half, tile[2 * i], tile[2 * i + 1])
            })
            .collect();
        let (whole, rest) = words.split_at(whole_tiles as usize);
        for (group, words) in (0..).zip(whole.chunks_exact(TILES as usize)) {
            let words = transposition.apply(k, [words[0], words[1], words[2], words[3]]);
            let wanted = match left {
                None => exists,
                Some([left, _]) => k.setp_s_and(CmpOp::Ge, left, 32 * group + 8, exists),
            };
            k.guarded(wanted, |k| k.st_vec(chunk.at(to.offset + i64::from(64 * group)), words));
        }
        for (n, &word) in (whole_tiles..).zip(rest) {
            let at = pair.at(to.offset + i64::from(16 * n));
            let Some([_, left]) = left else {
                k.guarded(exists, |k| k.st(at, word));
                continue;
            };
            let both = k.setp_s_and(CmpOp::Ge, left, 8 * n + 2, exists);
            k.guarded(both, |k| k.st(at, word));
            let one = k.setp_s_and(CmpOp::Eq, left, 8 * n + 1, exists);
            let [low, _] = k.split16(word);
            k.guarded(one, |k| k.st(at, low));
        }
    }
}

/// Stores the rows of [`store_fragments_at`] in f32.
fn store_floats(
    k: &mut Builder,
    threads: &Threads,
    o: &AccTile,
    (first, limit): (R32, R32),
    place: impl Fn(&mut Builder, R32) -> Global,
    width: Option<R32>,
) {
    let left = width.map(|width| k.sub(width, threads.column));
    let row = k.add(first, threads.quad);
    for (i, below) in [(0, 0), (1, 8)] {
        let row = if below == 0 { row } else { k.add(row, below) };
        let exists = k.setp_u(CmpOp::Lt, row, limit);
        let to = place(k, row);
        let start = Global::from(k.mad_wide_u(threads.column, 4, to.base));
        for n in 0..o.n_tiles() {
            let tile = o.tile(0, n);
            let pair: [F32; 2] = [tile[2 * i], tile[2 * i + 1]];
            let at = start.at(to.offset + i64::from(32 * n));
            let Some(left) = left else {
                k.guarded(exists, |k| k.st_vec(at, pair));
                continue;
            };
            let both = k.setp_s_and(CmpOp::Ge, left, 8 * n + 2, exists);
            k.guarded(both, |k| k.st_vec(at, pair));
            let one = k.setp_s_and(CmpOp::Eq, left, 8 * n + 1, exists);
            k.guarded(one, |k| k.st(at, pair[0]));
        }
    }
}
