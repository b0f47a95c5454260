//! Uneven sequence lengths and pages: their arrays in the launch contract, and the tiles of query rows that
//! lengths need.

use attend::{Lengths, SideLengths};
use problem::{LengthArray, Operand, Problem, Tensor};
use ptx::{Builder, Global, R32};
use tile::{RowPages, SwizzledTile};

use super::contract::{most_rows, stepped};
use crate::PlanError;
use crate::contract::Contract;
use crate::error::accept;

/// Declares the arrays of lengths; `None` if all batch entries have all rows. `longest` holds the upper
/// bounds of the lengths of queries and keys.
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
        let [cumulative, used] = arrays.map(|array| c.operand(k, Operand::Lengths(array)));
        let rows = packed.map(|packed| c.u32(k, rows, packed as u32));
        SideLengths { packed: cumulative.zip(rows), used, longest }
    };
    let [of_q, of_kv] = longest;
    let q = side(lengths.q.packed, [LengthArray::CumulativeQ, LengthArray::UsedQ], "rows_q", of_q);
    let kv = side(lengths.kv.packed, [LengthArray::CumulativeKv, LengthArray::UsedKv], "rows_kv", of_kv);
    let left_pad = c.operand(k, Operand::Lengths(LengthArray::LeftPad));
    Some(Lengths { q, kv, left_pad, batch: c.u32(k, "batch", problem.batch as u32) })
}

/// The page table, and the number of its entries for each batch entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageTable {
    table: Global,
    per_sequence: R32,
    last: R32,
    rows: u32,
}

impl PageTable {
    /// Declares the page table; `None` if K and V have strided rows.
    pub fn declare(k: &mut Builder, c: &mut Contract<'_>, problem: &Problem) -> Option<PageTable> {
        let pages = problem.storage.pages()?;
        Some(PageTable {
            table: c.operand(k, Operand::PageTable)?,
            per_sequence: c.u32(k, "pages_per_sequence", pages.per_sequence as u32),
            last: c.u32(k, "last_page", pages.count.saturating_sub(1) as u32),
            rows: pages.rows as u32,
        })
    }

    /// Rows of a page.
    pub const fn rows(&self) -> u32 {
        self.rows
    }

    /// The pages of a batch entry whose keys begin at row `start` of its pages.
    pub fn of_sequence(&self, k: &mut Builder, batch: R32, start: Option<R32>) -> RowPages {
        let entries = k.mul_wide_u(batch, self.per_sequence);
        let table = Global { base: k.mad(entries, 4, self.table.base), ..self.table };
        RowPages { table, rows: self.rows, last: self.last, start }
    }
}

/// Whether the number of keys, or the row where they start, differs between batch entries.
pub(crate) const fn keys_are_uneven(problem: &Problem) -> bool {
    !problem.lengths.kv.is_even() || problem.lengths.left_padded
}

/// Whether `block_n` divides the keys of every batch entry.
pub(crate) const fn blocks_divide(problem: &Problem, block_n: u32) -> bool {
    !keys_are_uneven(problem) && problem.seq_kv.is_multiple_of(block_n as usize)
}

/// Whether the sequences of a tensor follow each other without a batch dimension.
pub(crate) const fn is_packed(problem: &Problem, tensor: Tensor) -> bool {
    let lengths = &problem.lengths;
    if tensor.is_of_keys() { lengths.kv.packed.is_some() } else { lengths.q.packed.is_some() }
}

/// The number of tiles of `rows` query rows in a head, and the number of batch entries with that many tiles
/// each. For packed queries the second number is 1, and the tiles are those of all sequences. With pack-GQA a
/// position has `heads` rows.
pub(crate) const fn row_blocks(problem: &Problem, rows: u32, heads: u32) -> [u64; 2] {
    let (batch, rows, heads) = (problem.batch as u64, rows as u64, heads as u64);
    match problem.lengths.q.packed {
        None => [(problem.seq_q as u64).saturating_mul(heads).div_ceil(rows), batch],
        Some(_) if batch == 0 => [0, 1],
        Some(packed) => [Lengths::tile_count((packed as u64).saturating_mul(heads), batch, rows), 1],
    }
}

/// Like [`row_blocks`], for tiles of `keys` keys.
pub(crate) const fn key_blocks(problem: &Problem, keys: u32) -> [u64; 2] {
    let (batch, keys) = (problem.batch as u64, keys as u64);
    match problem.lengths.kv.packed {
        None => [(problem.seq_kv as u64).div_ceil(keys), batch],
        Some(_) if batch == 0 => [0, 1],
        Some(packed) => [Lengths::tile_count(packed as u64, batch, keys), 1],
    }
}

/// Checks that the first keys of tiles stay below 2^31.
pub(crate) fn check_key_blocks(problem: &Problem, keys: u32) -> Result<(), PlanError> {
    let [blocks, _] = key_blocks(problem, keys);
    let keys = blocks.saturating_mul(keys.into());
    let fits = problem.lengths.kv.packed.is_none() || keys < 1 << 31;
    accept("keys of all tiles", keys, fits, "fewer than 2^31 with packed keys")
}

/// Checks lengths and rows of packed tensors against the limit of a family.
pub(crate) fn check_lengths(problem: &Problem, block_m: u32, heads: u32) -> Result<(), PlanError> {
    let (most, accepted) = most_rows(problem);
    for (what, length) in [("seq_q", problem.seq_q), ("seq_kv", problem.seq_kv)] {
        accept(what, length as u64, length <= most, accepted)?;
    }
    let (q, kv) = (problem.lengths.q.packed, problem.lengths.kv.packed);
    for (what, rows) in [("rows of packed queries", q), ("rows of packed keys", kv)] {
        let rows = rows.unwrap_or(0);
        accept(what, rows as u64, rows <= most, accepted)?;
    }
    // The first rows of tiles must stay below 2^31.
    let [tiles, _] = row_blocks(problem, block_m.max(1), heads);
    let rows = tiles.saturating_mul(block_m.into());
    accept("rows of all tiles", rows, q.is_none() || rows < 1 << 31, "fewer than 2^31 with packed queries")
}

/// Checks that ragged tiles of V can be loaded, and those of O stored ([`SwizzledTile::ragged_at`]), if the
/// lengths of that side are uneven.
pub(crate) fn check_ragged(problem: &Problem, tensor: Tensor, family: &'static str) -> Result<(), PlanError> {
    let (uneven, with) = if tensor.is_of_keys() {
        let pages = problem.storage.pages().is_some();
        (keys_are_uneven(problem) || pages, if pages { "with keys in pages" } else { "with uneven keys" })
    } else {
        (!problem.lengths.q.is_even(), "with uneven queries")
    };
    if !uneven {
        return Ok(());
    }
    let refuse = |what: &str, value: i64, accepted: &str| {
        let (what, accepted) = (format!("{} {what}", tensor.name()), format!("{accepted} {with}"));
        Err(PlanError::unsupported(family, what, value, accepted))
    };
    let ([batch, _, rows, _], strides) = (problem.extents(tensor), problem.strides(tensor));
    let row_bytes = stepped(problem, tensor, rows, strides.row) as u64;
    if row_bytes >= SwizzledTile::RAGGED_STRIDE_LIMIT {
        return refuse("row stride", strides.row, "fewer than 2^33 elements");
    }
    if batch > 1 && (rows <= 1 || strides.batch % strides.row != 0) {
        return refuse("batch stride", strides.batch, "multiples of the row stride");
    }
    let end = batch_rows(problem, tensor).saturating_mul(batch as u64).saturating_add(rows as u64);
    if end >= SwizzledTile::RAGGED_END_LIMIT {
        return refuse("batch stride", strides.batch, "fewer than 2^31 rows in all");
    }
    Ok(())
}

/// Rows of a tensor between batch entries: the batch stride in rows.
pub(crate) const fn batch_rows(problem: &Problem, tensor: Tensor) -> u64 {
    let ([batch, ..], strides) = (problem.extents(tensor), problem.strides(tensor));
    if batch > 1 && strides.row != 0 { (strides.batch / strides.row) as u64 } else { 0 }
}
