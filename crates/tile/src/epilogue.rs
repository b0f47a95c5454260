//! From accumulators to global memory.

use ptx::{Builder, CmpOp, F32, Global, Half, R32, Shared};

use crate::layout::{CHUNK_BYTES, TileLayout};
use crate::{AccTile, Threads, TileCopy};

/// Rounds the accumulators of each warp and stores them as rows, through shared memory so that every store is a whole
/// chunk: `tile` has room for the CTA's rows, of which the warp uses only its own. `copy` works by warp; `to` is
/// its pointer to the warp's first row; rows at or beyond `limit` are not stored.
#[allow(clippy::too_many_arguments, reason = "what, through where, to where")]
pub fn store_rows(
    k: &mut Builder,
    threads: &Threads,
    half: Half,
    o: &AccTile,
    layout: TileLayout,
    tile: Shared,
    copy: &TileCopy,
    to: Global,
    limit: Option<R32>,
) {
    let start = k.mad(threads.warp, layout.bytes(), tile.base);
    let tile = Shared { base: start, offset: tile.offset };
    write_fragments(k, threads, half, o, layout, tile);
    k.warp_sync();
    copy.store(k, tile, to, limit);
}

/// Writes the lanes' pairs of neighbouring columns to a tile. The eight rows of a store lie in eight groups of banks.
fn write_fragments(
    k: &mut Builder,
    threads: &Threads,
    half: Half,
    o: &AccTile,
    layout: TileLayout,
    tile: Shared,
) {
    let zero = k.mov(0);
    let row = layout.emit_offset(k, threads.quad, zero);
    let in_row = k.mad(threads.column, 2, row);
    let base = k.add(tile.base, in_row);
    let group = layout.group();
    let places: Vec<R32> =
        (0..group).map(|c| if c == 0 { base } else { k.xor(base, c * CHUNK_BYTES) }).collect();
    for m in 0..o.m_tiles() {
        for n in 0..o.n_tiles() {
            let [a, b, c, d] = o.tile(m, n);
            let place = Shared { base: places[(n % group) as usize], offset: tile.offset };
            for (row, [low, high]) in [(16 * m, [a, b]), (16 * m + 8, [c, d])] {
                let pair = k.pack(half, low, high);
                let offset = row * layout.pitch() + n / group * group * CHUNK_BYTES;
                k.st(ptx::Pointer::at(place, i64::from(offset)), pair);
            }
        }
    }
}

/// Stores one f32 a row (the LSE): the first lane of each quad has it. `to` points at the warp's first row.
pub fn store_lse(k: &mut Builder, threads: &Threads, lse: &[F32], to: Global, limit: R32) {
    let to = k.index(to, threads.quad, 4);
    let first_lane = k.setp_u(CmpOp::Eq, threads.column, 0);
    for (i, &value) in lse.iter().enumerate() {
        let row = (i / 2 * 16 + i % 2 * 8) as u32;
        let left = k.sub(limit, threads.quad);
        let exists = k.setp_s_and(CmpOp::Gt, left, row, first_lane);
        k.guarded(exists, |k| k.st(ptx::Pointer::at(to, 4 * i64::from(row)), value));
    }
}
