//! Adds rows in global memory to an accumulator.

use ptx::{Builder, CmpOp, F32, Global, Half, Pointer, R16, R32};

use crate::{AccTile, Threads};

/// Rows in global memory that a warp adds to the rows of its accumulator.
#[derive(Clone, Copy, Debug)]
pub struct AddedRows {
    /// The 16-bit type of the elements; `None` for f32.
    pub half: Option<Half>,
    /// The first row of the warp, and one past the last row that exists.
    pub first: R32,
    pub limit: R32,
    /// Columns of a row.
    pub width: u32,
    /// Whether neighbouring columns lie in one aligned word (16-bit elements) or pair of words (f32).
    pub pairs: bool,
}

/// Adds `shares[i]` times a row to each row `i` of the lane. `place` gives the address of the first column of
/// a row. A row at or beyond the limit is not read. All reads of a row come before its first product, so that
/// they are under way together.
pub fn add_rows(
    k: &mut Builder,
    threads: &Threads,
    o: &AccTile,
    shares: &[F32],
    rows: AddedRows,
    place: impl Fn(&mut Builder, R32) -> Global,
) {
    let AddedRows { half, first, limit, width, pairs } = rows;
    let bytes = if half.is_some() { 2 } else { 4 };
    let own = o.lane_column(k, threads);
    let column = match threads.part {
        None => own,
        Some(part) => k.mad(part, 8 * o.n_tiles(), own),
    };
    let cut = width < 8 * o.n_tiles() * threads.kv_warps;
    let first = k.add(first, threads.quad);
    for (i, &share) in (0..).zip(shares) {
        let below = i / 2 * 16 + i % 2 * 8;
        let row = if below == 0 { first } else { k.add(first, below) };
        let exists = k.setp_u(CmpOp::Lt, row, limit);
        let from = place(k, row);
        let from = k.index(from, column, bytes);
        let mut read = Vec::with_capacity(o.n_tiles() as usize);
        for n in 0..o.n_tiles() {
            let before = o.pair_column(n);
            let guard = |k: &mut Builder, place: u32| match cut {
                false => exists,
                true => k.setp_s_and(CmpOp::Lt, column, width as i32 - (before + place) as i32, exists),
            };
            let at = from.at(i64::from(bytes * before));
            read.push(match (half, pairs) {
                (None, true) => {
                    let (both, pair) = (guard(k, 1), [k.mov(0.0f32), k.mov(0.0f32)]);
                    k.guarded(both, |k| k.ld_vec_to(pair, at));
                    pair
                }
                (Some(half), true) => {
                    let (both, word): (_, R32) = (guard(k, 1), k.mov(0));
                    k.guarded(both, |k| k.ld_to(word, at));
                    k.unpack(half, word)
                }
                (_, false) => [0, 1].map(|place| {
                    let exists = guard(k, place);
                    let at = at.at(i64::from(bytes * place));
                    let Some(half) = half else {
                        let number = k.mov(0.0f32);
                        k.guarded(exists, |k| k.ld_to(number, at));
                        return number;
                    };
                    let bits: R16 = k.mov(0);
                    k.guarded(exists, |k| k.ld_to(bits, at));
                    k.to_f32(half, bits)
                }),
            });
        }
        for (sum, number) in o.row(i).zip(read.into_iter().flatten()) {
            k.mad_to(sum, number, share, sum);
        }
    }
}
