//! Pack-GQA: when the rows of the query heads of a KV head can be packed into one tile, and when packing
//! pays.

use attend::Packing;
use problem::Problem;

use crate::error::accept;
use crate::{Dims, PlanError};

/// Number of query heads whose rows are packed.
pub(crate) fn packed_heads(packing: Packing, dims: impl Into<Dims>) -> u32 {
    match packing {
        Packing::Apart => 1,
        Packing::Packed => dims.into().group_size as u32,
    }
}

/// The number of rows, at most `rows`, that hold whole positions of `heads` packed heads: 125 of 128 rows for
/// 5 heads. Returns `rows` if not even one position fits; the plan's check rejects that case.
pub(crate) const fn whole_positions(rows: u32, heads: u32) -> u32 {
    if rows < heads { rows } else { rows / heads * heads }
}

/// Checks that the rows of `heads` query heads can be packed. `fits` states whether they fit a tile,
/// `accepted` which group sizes do.
pub(crate) fn check_packing(
    problem: &Problem,
    heads: u32,
    fits: bool,
    accepted: &str,
) -> Result<(), PlanError> {
    accept("query heads a key head", heads.into(), fits, accepted)?;
    let apart = heads == 1 || problem.q.head != 0;
    accept("q head stride", problem.q.head.unsigned_abs(), apart, "other than 0 with packing = packed")?;
    let rows = (problem.seq_q as u64).saturating_mul(heads.into());
    accept("rows of packed heads", rows, rows < 1 << 31, "fewer than 2^31")
}

/// Whether packing fills tiles of `block_m` rows so much better that it is faster (FlashAttention-3's rule).
pub(crate) fn packs_well(problem: &Problem, block_m: u32) -> bool {
    let group = problem.group_size();
    let possible = group > 1 && group <= block_m as usize && problem.q.head != 0;
    // In a tile of packed heads, only the rows of whole positions are used.
    let tile = whole_positions(block_m, group.min(block_m as usize) as u32);
    let packed = filled(problem.seq_q.saturating_mul(group), tile) * f64::from(tile) / f64::from(block_m);
    possible && filled(problem.seq_q, block_m) < 0.9 * packed
}

/// The fraction of tiles of `block_m` rows that `rows` rows fill.
pub(crate) fn filled(rows: usize, block_m: u32) -> f64 {
    let (rows, tile) = (rows as f64, f64::from(block_m));
    rows / ((rows / tile).ceil() * tile)
}
