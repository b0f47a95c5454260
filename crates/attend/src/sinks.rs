//! Attention sinks: a logit per query head that is part of the softmax's denominator and has no value row.

use ptx::{Builder, F32, Global, R32, Type};
use tile::Threads;

use crate::RowRange;

/// The sinks of a lane's rows, multiplied by log2 e.
#[derive(Clone, Debug)]
pub struct Sinks {
    pub(crate) of_rows: Vec<F32>,
}

impl Sinks {
    /// The sink of a query head. `start` points at the sink of head 0.
    pub fn of_head(k: &mut Builder, start: Global, head: R32) -> F32 {
        let at = k.index(start, head, 4);
        let logit: F32 = k.ld_read_only(Type::F32, at);
        k.mul(logit, std::f32::consts::LOG2_E)
    }

    /// Loads the sinks for warps that hold `warp_rows` rows of the range each. `start` points at the sink of
    /// head 0; `head` is the query head, or the group of packed heads. The sinks are loaded at the end of a
    /// tile, where they are needed, so that they occupy no registers in the main loop.
    pub fn load(
        k: &mut Builder,
        start: Global,
        head: R32,
        threads: &Threads,
        rows: &RowRange,
        warp_rows: u32,
    ) -> Sinks {
        let count = warp_rows / 8;
        if rows.heads == 1 {
            let of_all = Sinks::of_head(k, start, head);
            return Sinks { of_rows: vec![of_all; count as usize] };
        }
        let first = k.mad(threads.row_warp, warp_rows, rows.first);
        let first = k.add(first, threads.quad);
        let of_row = |i: u32| {
            let row = k.add(first, i / 2 * 16 + i % 2 * 8);
            let [head, _] = rows.head_and_position(k, head, row);
            Sinks::of_head(k, start, head)
        };
        Sinks { of_rows: (0..count).map(of_row).collect() }
    }
}
