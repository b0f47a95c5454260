//! The epilogue: stores accumulators to global memory.

use ptx::{Builder, CmpOp, F32, Global, Half, Pointer, Pred, R32, Shared};

use crate::TileLayout;
use crate::layout::CHUNK_BYTES;
use crate::{AccTile, CopyMode, Threads, TileCopy};

/// The rows of a tensor in global memory that an epilogue stores.
#[derive(Clone, Copy, Debug)]
pub struct RowsOut {
    /// Row 0 of the head.
    pub tensor: Global,
    /// The first row to store: that of the CTA or that of the warp.
    pub first: R32,
    /// One past the last row to store.
    pub limit: R32,
    /// Bytes from one row to the next.
    pub row_bytes: i64,
}

/// Rounds each warp's accumulator and stores its rows through shared memory, so that every global store is a
/// whole 16-byte chunk. `tile` has space for all rows of the CTA. A warp that does not share its rows stores
/// them alone. Warps that share rows hold a part of the columns each, and all threads of the CTA store the
/// rows after a barrier. `rows` begin at the CTA's first row. The tensor's rows have `width` columns, at most
/// as many as the accumulators.
#[allow(clippy::too_many_arguments, reason = "what, through where, to where")]
pub fn store_rows(
    k: &mut Builder,
    threads: &Threads,
    half: Half,
    o: &AccTile,
    tile: Shared,
    RowsOut { tensor, first, limit, row_bytes }: RowsOut,
    width: u32,
    mode: CopyMode,
) {
    let layout = TileLayout::new(16 * o.m_tiles(), 8 * o.n_tiles() * threads.kv_warps);
    let own = k.shared_index(tile, threads.row_warp, layout.bytes());
    write_fragments(k, threads, half, o, layout, own);
    let (copy, from, first) = if threads.kv_warps == 1 {
        k.warp_sync();
        let first = k.mad(threads.row_warp, layout.rows, first);
        (TileCopy::by_warp(k, threads, layout, row_bytes, mode), own, first)
    } else {
        k.bar_sync();
        let layout = TileLayout { rows: layout.rows * threads.row_warps(), ..layout };
        (TileCopy::new(k, threads, layout, row_bytes, mode), tile, first)
    };
    let copy = copy.of_width(k, 2 * width);
    let to = copy.start(k, tensor, first);
    let left = k.sub(limit, first);
    copy.store(k, from, to, Some(left));
}

/// Writes the lanes' pairs of neighbouring columns to a tile. The eight rows of one store fall into eight
/// groups of banks.
fn write_fragments(
    k: &mut Builder,
    threads: &Threads,
    half: Half,
    o: &AccTile,
    layout: TileLayout,
    tile: Shared,
) {
    if o.is_in_quads() {
        return write_quads(k, threads, half, o, layout, tile);
    }
    let places = chunk_places(k, threads, o.n_tiles(), layout, tile);
    for m in 0..o.m_tiles() {
        for (n, place) in (0..).zip(&places) {
            let [a, b, c, d] = o.tile(m, n);
            for (row, [low, high]) in [(16 * m, [a, b]), (16 * m + 8, [c, d])] {
                let pair = k.pack(half, low, high);
                k.st(place.at(i64::from(row * layout.pitch())), pair);
            }
        }
    }
}

/// Like [`write_fragments`], for lanes that hold four neighbouring columns of each 16.
fn write_quads(
    k: &mut Builder,
    threads: &Threads,
    half: Half,
    o: &AccTile,
    layout: TileLayout,
    tile: Shared,
) {
    let in_chunk = k.and(threads.column, 2);
    let start = k.shared_index(tile, in_chunk, 4);
    let own_chunk = k.shr_u(threads.column, 2);
    let first = match threads.part {
        None => own_chunk,
        Some(part) => k.mad(part, o.n_tiles(), own_chunk),
    };
    for n in (0..o.n_tiles()).step_by(2) {
        let chunk = if n == 0 { first } else { k.add(first, n) };
        let offset = layout.emit_offset(k, threads.quad, chunk);
        let place = k.shared_advance(start, offset);
        for m in 0..o.m_tiles() {
            let (left, right) = (o.tile(m, n), o.tile(m, n + 1));
            for (row, i) in [(16 * m, 0), (16 * m + 8, 2)] {
                let words = [left, right].map(|pair| k.pack(half, pair[i], pair[i + 1]));
                k.st_vec(place.at(i64::from(row * layout.pitch())), words);
            }
        }
    }
}

/// The address of the lane's first row in each 8-column tile that the warp holds.
fn chunk_places(
    k: &mut Builder,
    threads: &Threads,
    n_tiles: u32,
    layout: TileLayout,
    tile: Shared,
) -> Vec<Shared> {
    let start = k.shared_index(tile, threads.column, 2);
    let Some(part) = threads.part else {
        let zero = k.mov(0);
        let row = layout.emit_offset(k, threads.quad, zero);
        let first = k.shared_advance(start, row);
        let group = layout.group();
        let of_group: Vec<R32> = (0..group)
            .map(|c| if c == 0 { first.base } else { k.xor(first.base, c * CHUNK_BYTES) })
            .collect();
        let place = |n: u32| {
            let offset = i64::from(n / group * group * CHUNK_BYTES);
            Shared { base: of_group[(n % group) as usize], offset: first.offset }.at(offset)
        };
        return (0..n_tiles).map(place).collect();
    };
    let first = k.mul(part, n_tiles);
    (0..n_tiles)
        .map(|n| {
            let chunk = k.add(first, n);
            let offset = layout.emit_offset(k, threads.quad, chunk);
            k.shared_advance(start, offset)
        })
        .collect()
}

/// Stores the rows of each warp's accumulator in f32, directly from registers: the lanes of a quad write 32
/// or 64 contiguous bytes. The arguments are those of [`store_rows`].
pub fn store_rows_in_f32(
    k: &mut Builder,
    threads: &Threads,
    o: &AccTile,
    RowsOut { tensor, first, limit, row_bytes }: RowsOut,
    width: u32,
    mode: CopyMode,
) {
    let own = o.lane_column(k, threads);
    let column = match threads.part {
        None => own,
        Some(part) => k.mad(part, 8 * o.n_tiles(), own),
    };
    let together = mode.bytes() >= 8 && width.is_multiple_of(2);
    let first = k.mad(threads.row_warp, 16 * o.m_tiles(), first);
    let row = k.add(first, threads.quad);
    let wide = k.zext(row);
    let start = Global { base: k.mad(wide, row_bytes, tensor.base), offset: tensor.offset };
    let start = k.index(start, column, 4);
    let left = k.sub(limit, row);
    let columns = 8 * o.n_tiles() * threads.kv_warps;
    let cut = width < columns;
    for i in 0..o.lane_rows() {
        let below = i / 2 * 16 + i % 2 * 8;
        let exists = k.setp_s(CmpOp::Gt, left, below);
        let to = k.advance(start, i64::from(below).wrapping_mul(row_bytes));
        let row: Vec<F32> = o.row(i).collect();
        for (n, pair) in (0..).zip(row.chunks_exact(2)) {
            let before = o.pair_column(n);
            store_pair(k, to.at(4 * i64::from(before)), [pair[0], pair[1]], together, |k, place| {
                if !cut {
                    return exists;
                }
                k.setp_s_and(CmpOp::Lt, column, width as i32 - (before + place) as i32, exists)
            });
        }
    }
}

/// Stores two neighbouring columns. `exists` says whether the first (0) and the second (1) exist. `together`
/// allows one store of both: it requires that both columns always exist together and that rows are aligned.
fn store_pair(
    k: &mut Builder,
    to: Global,
    pair: [F32; 2],
    together: bool,
    exists: impl Fn(&mut Builder, u32) -> Pred,
) {
    if together {
        let both = exists(k, 1);
        k.guarded(both, |k| k.st_vec(to, pair));
        return;
    }
    for (place, value) in (0..).zip(pair) {
        let exists = exists(k, place);
        k.guarded(exists, |k| k.st(to.at(4 * i64::from(place)), value));
    }
}
