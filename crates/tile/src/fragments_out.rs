//! Accumulators to global memory straight from registers, without shared memory: lanes of a quad swap among
//! themselves so that each stores whole chunks of 16 bytes.

use ptx::{Builder, CmpOp, F32, Global, Half, Pointer, Pred, R32};

use crate::{AccTile, Threads};

/// Tiles of 8 columns that a quad stores at once, a chunk a lane.
const TILES: u32 = 4;

/// How wide the stores of accumulators are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowStore {
    /// Two columns at a time, as lanes hold them.
    Pairs,
    /// Eight columns at a time where a quad has as many for each lane, after its lanes have exchanged theirs.
    Chunks,
}

impl RowStore {
    /// Elements of a store, which rows must be aligned to.
    pub const fn elements(self) -> u32 {
        match self {
            RowStore::Pairs => 2,
            RowStore::Chunks => 8,
        }
    }
}

/// Rounds the rows of each warp's accumulator of 16 rows and stores them. The warp's rows begin at `first` of
/// the tensor's rows from `tensor` on, `row_bytes` apart; those at or beyond `limit` are not stored.
pub fn store_fragments(
    k: &mut Builder,
    threads: &Threads,
    half: Half,
    o: &AccTile,
    (tensor, first, limit): (Global, R32, R32),
    row_bytes: i64,
    store: RowStore,
) {
    let place = |k: &mut Builder, row: R32| {
        let wide = k.zext(row);
        Global { base: k.mad(wide, row_bytes, tensor.base), offset: tensor.offset }
    };
    store_fragments_at(k, threads, half, o, (first, limit), place, store);
}

/// As [`store_fragments`], with rows that lie where `place` says.
pub fn store_fragments_at(
    k: &mut Builder,
    threads: &Threads,
    half: Half,
    o: &AccTile,
    (first, limit): (R32, R32),
    place: impl Fn(&mut Builder, R32) -> Global,
    store: RowStore,
) {
    let whole_tiles = match store {
        RowStore::Pairs => 0,
        RowStore::Chunks => o.n_tiles() / TILES * TILES,
    };
    let odd = bit(k, threads, 2);
    let upper = bit(k, threads, 4);
    let row = k.add(first, threads.quad);
    for (i, below) in [(0, 0), (1, 8)] {
        let row = if below == 0 { row } else { k.add(row, below) };
        let exists = k.setp_u(CmpOp::Lt, row, limit);
        let to = place(k, row);
        // A lane's column of a tile is twice its place in the quad; its chunk is of 16 bytes.
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
            let words = transpose(k, [words[0], words[1], words[2], words[3]], odd, upper);
            k.guarded(exists, |k| k.st_vec(chunk.at(to.offset + i64::from(64 * group)), words));
        }
        for (n, &word) in (whole_tiles..).zip(rest) {
            k.guarded(exists, |k| k.st(pair.at(to.offset + i64::from(16 * n)), word));
        }
    }
}

/// Stores one f32 a row (the LSE) of each warp's 16 rows from `first` on, where `place` says: the first lane
/// of each quad has it, of one of the warps that share the rows. Rows at or beyond `limit` are not stored.
pub fn store_lse_at(
    k: &mut Builder,
    threads: &Threads,
    lse: &[F32],
    (first, limit): (R32, R32),
    place: impl Fn(&mut Builder, R32) -> Global,
) {
    let first_lane = threads.speaks_for_row(k);
    let row = k.add(first, threads.quad);
    for (below, &value) in [0, 8].into_iter().zip(lse) {
        let row = k.add(row, below);
        let exists = k.setp_u_and(CmpOp::Lt, row, limit, first_lane);
        let to = place(k, row);
        k.guarded(exists, |k| k.st(to, value));
    }
}

/// Whether a bit of the lane's column is set.
fn bit(k: &mut Builder, threads: &Threads, mask: u32) -> Pred {
    let bit = k.and(threads.column, mask);
    k.setp_u(CmpOp::Ne, bit, 0)
}

/// The transpose of the 4×4 words of a quad, of which each lane holds a column: blocks of one word are
/// swapped with the neighbour, then blocks of two with the lane after it.
fn transpose(k: &mut Builder, mut words: [R32; 4], odd: Pred, upper: Pred) -> [R32; 4] {
    for (swaps, lane, pairs) in [(odd, 1, [(0, 1), (2, 3)]), (upper, 2, [(0, 2), (1, 3)])] {
        for (a, b) in pairs {
            let sent = k.selp(words[a], words[b], swaps);
            let got = k.shfl_xor(sent, lane);
            words[a] = k.selp(got, words[a], swaps);
            words[b] = k.selp(words[b], got, swaps);
        }
    }
    words
}
