//! Rows that continue from a result over other keys.

use ptx::{Builder, CmpOp, F32, Global, R32};
use tile::{AccTile, Threads};

use crate::softmax::{NO_MAX, inverse};

/// Loads the LSE of each row of a warp from `first` on, of the result from which the row continues. `place`
/// gives the address of a row's LSE. A row at or beyond `limit` is not read.
pub fn load_lse_before(
    k: &mut Builder,
    threads: &Threads,
    lane_rows: u32,
    (first, limit): (R32, R32),
    place: impl Fn(&mut Builder, R32) -> Global,
) -> Vec<F32> {
    let first = k.add(first, threads.quad);
    let of_row = |i: u32| {
        let row = k.add(first, i / 2 * 16 + i % 2 * 8);
        let exists = k.setp_u(CmpOp::Lt, row, limit);
        let (from, lse) = (place(k, row), k.mov(f32::NEG_INFINITY));
        k.guarded(exists, |k| k.ld_to(lse, from));
        lse
    };
    (0..lane_rows).map(of_row).collect()
}

/// The weights of two results of a row.
#[derive(Clone, Debug)]
pub struct MergedRows {
    /// The LSE over the keys of both results; −∞ for a row that saw no key.
    pub lse: Vec<F32>,
    /// The factor of O of the earlier result, which the caller adds to O.
    pub of_before: Vec<F32>,
}

/// Scales the normalised rows of `o`, whose LSE is `lse`, by their weights beside results of LSE `before`.
pub fn merge_rows(k: &mut Builder, o: &AccTile, lse: &[F32], before: &[F32]) -> MergedRows {
    let mut merged = MergedRows { lse: Vec::new(), of_before: Vec::new() };
    for (i, pair) in (0..).zip(lse.iter().zip(before)) {
        let [own, before] = [*pair.0, *pair.1].map(|lse| k.mul(lse, std::f32::consts::LOG2_E));
        let top = k.max(own, before);
        // Without a key on both sides, −∞ minus a number is −∞, and both weights are 0.
        let top = k.max(top, NO_MAX);
        let [own, before] = [own, before].map(|lse| {
            let distance = k.sub(lse, top);
            k.ex2(distance)
        });
        let sum = k.add(own, before);
        let share = inverse(k, sum);
        let of_own = k.mul(own, share);
        o.scale_row(k, i, of_own);
        merged.of_before.push(k.mul(before, share));
        let log = k.lg2(sum);
        let log = k.add(log, top);
        merged.lse.push(k.mul(log, std::f32::consts::LN_2));
    }
    merged
}
