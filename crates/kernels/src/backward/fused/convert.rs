//! The kernel after the main kernel: the sums of dQ, scaled and rounded.

use problem::{Problem, Tensor};
use ptx::{Access, Builder, F32, Global, Launch, Pointer, R32};
use tile::{AccTile, RowStore, Threads, WARP_VECTOR_BYTES, store_fragments_at, warp_vectors};

use super::params::{OwnTile, RowTiles, Strided, declare_row_lengths, launch};
use super::plan::{FusedPlan, TileSizes};
use crate::contract::Contract;
use crate::draft::Draft;
use crate::forward::contract::half;
use crate::{Arch, Baked};

const ENTRY: &str = "flash_backward_convert";
/// 8-column tiles of a warp's part of dQ.
pub(super) const PART_TILES: u32 = 8;
/// Bytes of the sums of that part.
pub(super) const PART_BYTES: u32 = PART_TILES * WARP_VECTOR_BYTES;

impl FusedPlan {
    /// The kernel that rounds dQ.
    pub(super) fn draft_convert<'a>(&'a self, problem: &Problem, baked: &'a Baked, arch: &Arch) -> Draft<'a> {
        let mut k = Builder::kernel(ENTRY);
        let threads = threads(TileSizes::new(problem));
        k.max_threads(threads);
        let mut c = Contract::new(problem);
        let dq = Strided::declare(&mut k, &mut c, problem, Tensor::Dq);
        let tiles = RowTiles::declare(&mut k, &mut c, (problem, baked), [Access::Read, Access::Read]);
        let seq_q = c.u32(&mut k, "seq_q", problem.seq_q as u32);
        let lengths = declare_row_lengths(&mut k, &mut c, problem, seq_q);
        let scale = c.f32(&mut k, "scale", problem.softmax_scale());
        let grid = self.row_grid(problem);
        let launch = Launch { overlapping: true, ..launch(threads, grid, baked.flat, 0) };
        let grid = grid.declare(&mut k, &mut c, baked.flat);
        let order = self.tile_order;
        let body = move |k: &mut Builder| {
            if self.row_parts > 1 {
                k.griddep_launch_dependents();
            }
            k.griddep_wait();
            let own = OwnTile::new(k, (order, grid), (lengths, seq_q), TileSizes::new(baked));
            convert(k, baked, (dq, scale), tiles, own);
        };
        Draft::new(k, c, (ENTRY, launch), arch.full_target(), body)
    }
}

/// One warp for each part of a tile.
const fn threads(sizes: TileSizes) -> u32 {
    sizes.rows * sizes.columns / (16 * 8 * PART_TILES) * 32
}

/// Each warp converts the part of dQ that one consumer warp of the main kernel adds to.
fn convert(k: &mut Builder, baked: &Baked, (dq, scale): (Strided, F32), tiles: RowTiles, own: OwnTile) {
    let sizes = TileSizes::new(baked);
    let threads = Threads::new(k, threads(sizes), 1);
    let sums = tiles.sums(k, own.place);
    let from = place_of_part(k, sums, threads.warp, threads.lane);
    let part = AccTile::unset(k, 16, 8 * PART_TILES);
    for (n, &tile) in (0..).zip(part.tiles()) {
        k.ld_vec_to(tile, from.at(warp_vectors(n)));
    }
    for row in 0..part.lane_rows() {
        part.scale_row(k, row, scale);
    }
    let [_, _, tile] = own.at;
    let width = baked.dims.head_dim as u32;
    // Warpgroups divide the rows, or the columns.
    let (row_warp, column) = if sizes.columns == 8 * PART_TILES {
        (threads.warp, k.mov(0))
    } else {
        let group = k.shr_u(threads.warp, 2);
        (k.and(threads.warp, 3), k.mul(group, 8 * PART_TILES))
    };
    let left = (width < sizes.columns).then(|| {
        let width = k.mov(width);
        k.sub(width, column)
    });
    let before = k.mul(row_warp, 16);
    let first = k.mad(tile, sizes.rows, before);
    let place = |k: &mut Builder, row: R32| {
        let at = own.row(k, row);
        let row = dq.row(k, baked, at);
        k.index(row, column, 2)
    };
    let (half, store) = (Some(half(baked)), RowStore::Chunks);
    store_fragments_at(k, &threads, half, &part, (first, own.len()), place, store, left);
}

/// The lane's place in the sums of a tile for the part of dQ of consumer warp `warp`.
pub(super) fn place_of_part(k: &mut Builder, sums: Global, warp: R32, lane: R32) -> Global {
    let of_warp = k.index(sums, warp, PART_BYTES);
    k.index(of_warp, lane, 16)
}

/// Adds the lane's registers of a part of dQ to the sums at `to`.
pub(super) fn add_part(k: &mut Builder, to: Global, dq: &AccTile) {
    for (n, &tile) in (0..).zip(dq.tiles()) {
        k.red_add_vec4(to.at(warp_vectors(n)), tile);
    }
}
