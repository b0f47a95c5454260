//! Pack-GQA: when the rows of the query heads that share a KV head can be packed into one tile, and when they
//! should be.

use attend::Packing;
use problem::Problem;

use crate::PlanError;
use crate::error::accept;

/// Number of query heads whose rows are packed.
pub(crate) const fn packed_heads(packing: Packing, problem: &Problem) -> u32 {
    match packing {
        Packing::Apart => 1,
        Packing::Packed => problem.group_size() as u32,
    }
}

/// Whether the rows of `heads` query heads can be packed in TMA copies of `rows` rows. `accepted` says which
/// group sizes can.
pub(crate) fn check_packing(
    problem: &Problem,
    heads: u32,
    copy_rows: u32,
    accepted: &str,
) -> Result<(), PlanError> {
    accept("query heads a key head", heads.into(), copy_rows.is_multiple_of(heads), accepted)?;
    let apart = heads == 1 || problem.q.head != 0;
    accept("q head stride", problem.q.head.unsigned_abs(), apart, "other than 0 with packing = packed")?;
    let rows = (problem.seq_q as u64).saturating_mul(heads.into());
    accept("rows of packed heads", rows, rows < 1 << 31, "fewer than 2^31")
}

/// Whether packing fills tiles of `block_m` rows so much better that it pays (FlashAttention-3's rule).
pub(crate) fn packs_well(problem: &Problem, block_m: u32) -> bool {
    let group = problem.group_size();
    let possible = group > 1 && (block_m as usize).is_multiple_of(group) && problem.q.head != 0;
    possible && filled(problem.seq_q, block_m) < 0.9 * filled(problem.seq_q.saturating_mul(group), block_m)
}

/// The fraction of tiles of `block_m` rows that `rows` rows fill.
pub(crate) fn filled(rows: usize, block_m: u32) -> f64 {
    let (rows, tile) = (rows as f64, f64::from(block_m));
    rows / ((rows / tile).ceil() * tile)
}
