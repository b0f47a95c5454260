//! Uneven lengths in the launch contract, and the tiles of query rows that they need.

use attend::{Lengths, SideLengths};
use problem::Problem;
use ptx::{Builder, R32};

use super::contract::most_rows;
use crate::PlanError;
use crate::contract::{Contract, LengthArray};
use crate::error::accept;

/// The arrays of lengths in a kernel; `None` if all batch entries have all rows. `longest` are the upper bounds
/// of the lengths of queries and keys.
pub(crate) fn declare_lengths(
    k: &mut Builder,
    c: &mut Contract<'_>,
    problem: &Problem,
    longest: [R32; 2],
) -> Option<Lengths> {
    let lengths = &problem.lengths;
    if lengths.is_even() {
        return None;
    }
    let mut side = |packed: Option<usize>, arrays: [LengthArray; 2], rows: &str, longest| {
        let [cumulative, used] = arrays.map(|array| c.lengths(k, array));
        let rows = packed.map(|packed| c.u32(k, rows, packed as u32));
        SideLengths { packed: cumulative.zip(rows), used, longest }
    };
    let q = side(lengths.q.packed, [LengthArray::CumulativeQ, LengthArray::UsedQ], "rows_q", longest[0]);
    let kv = side(lengths.kv.packed, [LengthArray::CumulativeKv, LengthArray::UsedKv], "rows_kv", longest[1]);
    let left_pad = c.lengths(k, LengthArray::LeftPad);
    Some(Lengths { q, kv, left_pad, batch: c.u32(k, "batch", problem.batch as u32) })
}

/// Whether every KV block ends inside the keys of its sequence.
pub(crate) const fn blocks_divide(problem: &Problem, block_n: u32) -> bool {
    problem.lengths.kv.is_even()
        && !problem.lengths.left_padded
        && problem.seq_kv.is_multiple_of(block_n as usize)
}

/// Tiles of `rows` query rows of a head, and the batch entries that have so many each: one for packed queries,
/// whose tiles are those of all sequences.
pub(crate) const fn row_blocks(problem: &Problem, rows: u32) -> [u64; 2] {
    let (batch, rows) = (problem.batch as u64, rows as u64);
    match problem.lengths.q.packed {
        None => [(problem.seq_q as u64).div_ceil(rows), batch],
        Some(_) if batch == 0 => [0, 1],
        Some(packed) => [Lengths::tile_count(packed as u64, batch, rows), 1],
    }
}

/// Checks lengths and rows of packed tensors against the limit that a family has.
pub(crate) fn check_lengths(problem: &Problem, block_m: u32) -> Result<(), PlanError> {
    let (most, accepted) = most_rows(problem);
    for (what, length) in [("seq_q", problem.seq_q), ("seq_kv", problem.seq_kv)] {
        accept(what, length as u64, length <= most, accepted)?;
    }
    let (q, kv) = (problem.lengths.q.packed, problem.lengths.kv.packed);
    for (what, rows) in [("rows of packed queries", q), ("rows of packed keys", kv)] {
        let rows = rows.unwrap_or(0);
        accept(what, rows as u64, rows <= most, accepted)?;
    }
    // First rows of tiles stay below 2^31.
    let [tiles, _] = row_blocks(problem, block_m.max(1));
    let rows = tiles.saturating_mul(block_m.into());
    accept("rows of all tiles", rows, q.is_none() || rows < 1 << 31, "fewer than 2^31 with packed queries")
}
