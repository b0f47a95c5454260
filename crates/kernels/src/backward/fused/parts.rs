//! Tiles of keys that several CTAs compute in parts: each part is the sum over some of the query rows.
//!
//! A pass with fewer tiles of keys than multiprocessors would leave some idle, and a causal mask makes the
//! first tile of keys of the last head end long after the others. The CTAs of a tile divide the tiles of
//! query rows that see it, of each query head alike, and leave their parts of dK and dV in global memory in
//! f32. A fourth kernel adds the parts in their order, so that the bits of dK and dV do not depend on the
//! order in which CTAs run.

use problem::{Problem, Tensor};
use ptx::{Access, Builder, CmpOp, F32, Global, Launch, Pointer, R32};
use tile::{
    AccTile, Divisor, RowStore, Threads, WARP_VECTOR_BYTES, WarpRows, divide, store_fragments_at,
    warp_vectors,
};

use super::params::{Strided, launch};
use super::plan::{FusedPlan, TileSizes, width};
use crate::contract::Contract;
use crate::draft::Draft;
use crate::forward::contract::half;
use crate::grid::{Axis, Extents};
use crate::{Arch, Baked};

const ENTRY: &str = "flash_backward_merge";
/// Warps of a CTA that adds, and the 8-column tiles of 16 keys that a warp adds.
const WARPS: u32 = 4;
const SUMMED_TILES: u32 = 4;
const TENSORS: [Tensor; 2] = [Tensor::Dk, Tensor::Dv];

/// The parts of dK and dV: `[batch][KV head][tile of keys][part][dK, dV]`, each as the accumulators of the
/// tile's warps: of each 16×8 tile of a fragment, four registers of each lane.
#[derive(Clone, Copy)]
pub(super) struct KeyParts {
    memory: Global,
    /// KV heads of a batch entry, and tiles of keys of a head.
    counts: [R32; 2],
    /// Parts of a tile.
    pub parts: Divisor,
    /// Columns of dK and of dV.
    columns: [u32; 2],
    sizes: TileSizes,
}

/// Where the main kernel leaves dK and dV.
#[derive(Clone, Copy)]
pub(super) enum KeyGradients {
    /// In their tensors.
    Whole([Strided; 2]),
    Parts(KeyParts),
}

impl KeyGradients {
    pub fn declare(
        k: &mut Builder,
        c: &mut Contract<'_>,
        (problem, plan): (&Problem, &FusedPlan),
    ) -> KeyGradients {
        match plan.row_parts {
            1 => KeyGradients::Whole(TENSORS.map(|tensor| Strided::declare(k, c, problem, tensor))),
            _ => KeyGradients::Parts(KeyParts::declare(k, c, (problem, plan), Access::Write)),
        }
    }
}

impl KeyParts {
    fn declare(
        k: &mut Builder,
        c: &mut Contract<'_>,
        (problem, plan): (&Problem, &FusedPlan),
        access: Access,
    ) -> KeyParts {
        let sizes = TileSizes::new(problem);
        let [tiles, _] = plan.key_tiles(problem);
        let [reciprocal, shift] = Divisor::numbers(plan.row_parts);
        let bytes = plan.tile_count(problem) as usize * sizes.part_bytes(problem) as usize;
        KeyParts {
            memory: c.temporary(k, "key_parts", bytes, access),
            counts: [c.u32(k, "key_heads", problem.heads_kv as u32), c.u32(k, "key_tiles", tiles as u32)],
            parts: Divisor {
                number: c.u32(k, "row_parts", plan.row_parts),
                by: [("row_parts_reciprocal", reciprocal), ("row_parts_shift", shift)]
                    .map(|(name, number)| c.u32(k, name, number)),
            },
            columns: TENSORS.map(|tensor| sizes.multiplied(problem, tensor)),
            sizes,
        }
    }

    /// Part 0 of dK of a tile at batch entry, head and tile.
    fn of_tile(&self, k: &mut Builder, [batch, head, tile]: [R32; 3]) -> Global {
        let [heads, tiles] = self.counts;
        let head = k.mad(batch, heads, head);
        let before = k.mul_wide_u(head, tiles);
        let tile = k.zext(tile);
        let index = k.add(before, tile);
        let parts = k.zext(self.parts.number);
        let first = k.mul(index, parts);
        Global { base: k.mad(first, self.part_bytes(), self.memory.base), ..self.memory }
    }

    /// Bytes of a part: of dK and dV.
    fn part_bytes(&self) -> i64 {
        self.columns.into_iter().map(|columns| i64::from(self.sizes.gradient_bytes(columns))).sum()
    }

    /// Bytes of the accumulators of a warp.
    fn warp_bytes(&self, gradient: Tensor) -> u32 {
        self.columns(gradient) / 8 * WARP_VECTOR_BYTES
    }

    fn columns(&self, gradient: Tensor) -> u32 {
        let [of_dk, of_dv] = self.columns;
        if gradient == Tensor::Dk { of_dk } else { of_dv }
    }

    /// Stores a warp's accumulators of dK or dV as a part of a tile.
    pub fn leave(
        &self,
        k: &mut Builder,
        (tile, part): ([R32; 3], R32),
        threads: &Threads,
        (sums, gradient): (&AccTile, Tensor),
    ) {
        let first = self.of_tile(k, tile);
        let part = Global::from(k.mad_wide_u(part, self.part_bytes() as u32, first.base));
        let of_warp = k.index(part, threads.row_warp, self.warp_bytes(gradient));
        let to = k.index(of_warp, threads.lane, 16).at(first.offset + self.offset(gradient));
        for (n, &tile) in (0..).zip(sums.tiles()) {
            k.st_vec(to.at(warp_vectors(n)), tile);
        }
    }

    /// Offset of a gradient in a part.
    fn offset(&self, gradient: Tensor) -> i64 {
        let [of_dk, _] = self.columns;
        if gradient == Tensor::Dk { 0 } else { self.sizes.gradient_bytes(of_dk).into() }
    }

    /// The sum of the parts of some columns of a warp's rows of a gradient.
    fn sum(
        &self,
        k: &mut Builder,
        tile: [R32; 3],
        (row_warp, columns, lane): (R32, R32, R32),
        gradient: Tensor,
    ) -> AccTile {
        let first = self.of_tile(k, tile);
        let of_warp = k.index(first, row_warp, self.warp_bytes(gradient));
        let of_columns = k.index(of_warp, columns, SUMMED_TILES * WARP_VECTOR_BYTES);
        let from = k.index(of_columns, lane, 16);
        let [sum, part] = [0; 2].map(|_| AccTile::zero(k, 16, 8 * SUMMED_TILES));
        // The last columns may lack tiles.
        let tiles = self.columns(gradient) / 8;
        let left = (8 * tiles < self.sizes.columns).then(|| {
            let before = k.mul(columns, SUMMED_TILES);
            let all = k.mov(tiles);
            k.sub(all, before)
        });
        let load = |k: &mut Builder, to: &AccTile| {
            for (n, &tile) in (0..).zip(to.tiles()) {
                let from = from.at(self.offset(gradient) + warp_vectors(n));
                match left {
                    None => k.ld_vec_to(tile, from),
                    Some(left) => {
                        let exists = k.setp_s(CmpOp::Gt, left, n as i32);
                        k.guarded(exists, |k| k.ld_vec_to(tile, from));
                    }
                }
            }
        };
        load(k, &sum);
        k.for_range(1, self.parts.number, 1, |k, _| {
            k.add_to(from.base, from.base, self.part_bytes());
            load(k, &part);
            for (sum, part) in sum.registers().into_iter().zip(part.registers()) {
                k.add_to(sum, sum, part);
            }
        });
        sum
    }
}

impl TileSizes {
    /// Bytes of f32 sums of some columns of a tile of keys.
    const fn gradient_bytes(self, columns: u32) -> u32 {
        4 * self.keys() * columns
    }

    /// Bytes of a part of dK and dV.
    pub fn part_bytes(self, problem: &Problem) -> u32 {
        TENSORS.map(|tensor| self.gradient_bytes(self.multiplied(problem, tensor))).into_iter().sum()
    }

    /// CTAs of the kernel that adds for one gradient of a tile of keys. A warp adds 16 keys of 32 columns.
    const fn pieces(self) -> u32 {
        self.keys() / WarpRows::ROWS * (self.columns / (8 * SUMMED_TILES)) / WARPS
    }
}

impl FusedPlan {
    /// The extents of the grid of the kernel that adds.
    pub(super) fn merge_grid(&self, problem: &Problem) -> Extents {
        let [tiles, batch] = self.key_tiles(problem);
        let pieces = 2 * TileSizes::new(problem).pieces();
        Extents([tiles.saturating_mul(pieces.into()), problem.heads_kv as u64, batch])
    }

    /// The kernel that adds the parts of dK and dV, scales dK, and rounds.
    pub(super) fn draft_merge<'a>(&'a self, problem: &Problem, baked: &'a Baked, arch: &Arch) -> Draft<'a> {
        let mut k = Builder::kernel(ENTRY);
        let threads = 32 * WARPS;
        k.max_threads(threads);
        let mut c = Contract::new(problem);
        let gradients = TENSORS.map(|tensor| (tensor, Strided::declare(&mut k, &mut c, problem, tensor)));
        let parts = KeyParts::declare(&mut k, &mut c, (problem, self), Access::Read);
        let keys = c.u32(&mut k, "seq_kv", problem.seq_kv as u32);
        let scale = c.f32(&mut k, "scale", problem.softmax_scale());
        let grid = self.merge_grid(problem);
        let launch = Launch { overlapping: true, ..launch(threads, grid, baked.flat, 0) };
        let grid = grid.declare(&mut k, &mut c, baked.flat);
        let body = move |k: &mut Builder| {
            k.griddep_wait();
            let pieces = TileSizes::new(baked).pieces();
            let [x, head, batch] = [Axis::X, Axis::Y, Axis::Z].map(|axis| grid.index(k, axis));
            let tile = divide(k, x, 2 * pieces);
            let before = k.mul(tile, 2 * pieces);
            let piece = k.sub(x, before);
            let at = [batch, head, tile];
            let of_dk = k.setp_u(CmpOp::Lt, piece, pieces);
            let [dk, dv] = gradients;
            k.if_else(
                of_dk,
                |k| add_parts(k, baked, (&parts, at, piece), (dk, Some(scale)), keys),
                |k| {
                    let piece = k.sub(piece, pieces);
                    add_parts(k, baked, (&parts, at, piece), (dv, None), keys);
                },
            );
        };
        Draft::new(k, c, (ENTRY, launch), arch.full_target(), body)
    }
}

/// Each warp adds the parts of 16 keys of 32 columns. `piece` counts the CTAs of a gradient of a tile.
fn add_parts(
    k: &mut Builder,
    baked: &Baked,
    (parts, at, piece): (&KeyParts, [R32; 3], R32),
    ((gradient, to), scale): ((Tensor, Strided), Option<F32>),
    keys: R32,
) {
    let sizes = TileSizes::new(baked);
    let threads = Threads::new(k, 32 * WARPS, 1);
    let number = k.mad(piece, WARPS, threads.warp);
    let row_warps = sizes.keys() / WarpRows::ROWS;
    let columns = divide(k, number, row_warps);
    let before = k.mul(columns, row_warps);
    let row_warp = k.sub(number, before);
    let sum = parts.sum(k, at, (row_warp, columns, threads.lane), gradient);
    if let Some(scale) = scale {
        for row in 0..sum.lane_rows() {
            sum.scale_row(k, row, scale);
        }
    }
    let width = width(baked.dims, gradient);
    let column = k.mul(columns, 8 * SUMMED_TILES);
    let left = (width < sizes.columns).then(|| {
        let width = k.mov(width);
        k.sub(width, column)
    });
    let [batch, head, tile] = at;
    let first = k.mul(tile, sizes.keys());
    let first = k.mad(row_warp, WarpRows::ROWS, first);
    let place = |k: &mut Builder, row: R32| {
        let row = to.row(k, baked, [batch, head, row]);
        k.index(row, column, 2)
    };
    let (half, store) = (Some(half(baked)), RowStore::Chunks);
    store_fragments_at(k, &threads, half, &sum, (first, keys), place, store, left);
}
