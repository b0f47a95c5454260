//! Stores of the LSE.

use ptx::{Builder, CmpOp, F32, Global, Pointer, R32};
use tile::Threads;

/// Stores one f32 per row (the LSE). The first lane of each quad stores it; if several warps share the rows,
/// only one of them does. `to` points at the warp's first row.
pub fn store_lse(k: &mut Builder, threads: &Threads, lse: &[F32], to: Global, limit: R32) {
    let to = k.index(to, threads.quad, 4);
    let first_lane = threads.elected_for_row(k);
    for (i, &value) in lse.iter().enumerate() {
        let row = (i / 2 * 16 + i % 2 * 8) as u32;
        let left = k.sub(limit, threads.quad);
        let exists = k.setp_s_and(CmpOp::Gt, left, row, first_lane);
        k.guarded(exists, |k| k.st(to.at(4 * i64::from(row)), value));
    }
}

/// Stores one f32 per row (the LSE) of each warp's 16 rows from `first` on, at the address that `place`
/// gives. The first lane of each quad stores it; if several warps share the rows, only one of them does. Rows
/// at or beyond `limit` are not stored.
pub fn store_lse_at(
    k: &mut Builder,
    threads: &Threads,
    lse: &[F32],
    (first, limit): (R32, R32),
    place: impl Fn(&mut Builder, R32) -> Global,
) {
    let first_lane = threads.elected_for_row(k);
    let row = k.add(first, threads.quad);
    for (below, &value) in [0, 8].into_iter().zip(lse) {
        let row = k.add(row, below);
        let exists = k.setp_u_and(CmpOp::Lt, row, limit, first_lane);
        let to = place(k, row);
        k.guarded(exists, |k| k.st(to, value));
    }
}
