//! The parameters that the kernels share: the numbers of query rows, the sums of dQ, and their grid.

use attend::{Lengths, Sequence};
use problem::{Problem, Tensor};
use ptx::{Access, Builder, Dim3, Global, Launch, R32, R64};

use super::plan::TileSizes;
use crate::Baked;
use crate::contract::Contract;
use crate::forward::contract::{declare_head_strides, lse_of_row, row_of_tensor};
use crate::forward::lengths::declare_lengths;
use crate::forward::mma::{CtaOrder, axis_of_rows, head_and_batch};
use crate::grid::{Extents, Grid};

/// A tensor whose rows' addresses are computed: its start, and the bytes between batch entries and heads.
#[derive(Clone, Copy)]
pub(super) struct Strided {
    tensor: Tensor,
    start: (Global, [R64; 2]),
}

impl Strided {
    pub fn declare(k: &mut Builder, c: &mut Contract<'_>, problem: &Problem, tensor: Tensor) -> Strided {
        let start = c.tensor(k, tensor);
        Strided { tensor, start: (start, declare_head_strides(k, c, problem, tensor)) }
    }

    /// The address of a row: its batch entry, head and position.
    pub fn row(&self, k: &mut Builder, baked: &Baked, at: [R32; 3]) -> Global {
        row_of_tensor(k, (self.start, baked.row_bytes(self.tensor)), at)
    }
}

/// The values that one kernel leaves for the next, tile by tile of query rows. The first index of a tile is
/// that of its batch entry and head.
#[derive(Clone, Copy)]
pub(super) struct RowTiles {
    /// −L·log2 e of each row of the tile, then −D of each row.
    numbers: Global,
    /// The sums of dQ: of each 16×8 tile of a fragment, four registers of each lane.
    sums: Global,
    /// Tiles of a head.
    count: R32,
    heads: u32,
    sizes: TileSizes,
}

impl RowTiles {
    pub fn declare(
        k: &mut Builder,
        c: &mut Contract<'_>,
        (problem, baked): (&Problem, &Baked),
        [numbers, sums]: [Access; 2],
    ) -> RowTiles {
        let sizes = TileSizes::new(problem);
        let [count, batch] = sizes.row_tiles(problem);
        let tiles = (count * batch) as usize * problem.heads_q;
        RowTiles {
            numbers: c.temporary(k, "row_numbers", tiles * sizes.number_bytes() as usize, numbers),
            sums: c.temporary(k, "dq_sums", tiles * sizes.sum_bytes() as usize, sums),
            count: c.u32(k, "row_tiles", count as u32),
            heads: baked.heads_q as u32,
            sizes,
        }
    }

    /// The index of a tile, from its batch entry, query head and number in the head.
    pub fn index(&self, k: &mut Builder, [batch, head, tile]: [R32; 3]) -> R64 {
        let before = k.mad(batch, self.heads, head);
        let index = k.mul_wide_u(before, self.count);
        let tile = k.zext(tile);
        k.add(index, tile)
    }

    /// The numbers of a tile's rows.
    pub fn numbers(&self, k: &mut Builder, at: [R32; 3]) -> Global {
        let index = self.index(k, at);
        Global { base: k.mad(index, i64::from(self.sizes.number_bytes()), self.numbers.base), ..self.numbers }
    }

    /// The sums of a tile.
    pub fn sums(&self, k: &mut Builder, at: [R32; 3]) -> Global {
        let index = self.index(k, at);
        Global { base: k.mad(index, i64::from(self.sizes.sum_bytes()), self.sums.base), ..self.sums }
    }
}

/// A tile of query rows that a CTA owns.
#[derive(Clone, Copy)]
pub(super) struct OwnTile {
    /// Batch entry, head and tile in [`RowTiles`]: packed queries have one batch entry.
    pub place: [R32; 3],
    /// Batch entry, head and tile in the batch entry.
    pub at: [R32; 3],
    /// The rows of the batch entry; `None` if it has all rows of the tensors.
    sequence: Option<Sequence>,
    /// Rows of a head in the tensors.
    longest: R32,
}

impl OwnTile {
    /// The tile of the CTA. `seq_q` is the number of rows of a batch entry, or its upper bound.
    pub fn new(
        k: &mut Builder,
        (order, grid): (CtaOrder, Grid),
        (lengths, seq_q): (Option<Lengths>, R32),
        sizes: TileSizes,
    ) -> OwnTile {
        let place = tile_of_cta(k, order, grid);
        let Some(lengths) = lengths else {
            return OwnTile { place, at: place, sequence: None, longest: seq_q };
        };
        let [batch, head, tile] = place;
        let (sequence, tile) = lengths.tile(k, batch, tile, sizes.rows, 1);
        let longest = lengths.q.tensor_rows();
        OwnTile { place, at: [sequence.batch, head, tile], sequence: Some(sequence), longest }
    }

    /// The number of rows of the batch entry.
    pub fn len(&self) -> R32 {
        self.sequence.map_or(self.longest, |sequence| sequence.q.len)
    }

    /// The number of keys of the batch entry, of which the tensors have `longest`.
    pub fn keys(&self, longest: R32) -> R32 {
        self.sequence.map_or(longest, |sequence| sequence.kv.len)
    }

    /// Batch entry, head and row in tensors of the row at a position in the batch entry.
    pub fn row(&self, k: &mut Builder, position: R32) -> [R32; 3] {
        let [batch, head, _] = self.at;
        [batch, head, self.sequence.map_or(position, |sequence| sequence.q.row(k, position))]
    }

    /// The address of a row's number in an array `[batch][head][row]`, from its place in tensors.
    pub fn number(&self, k: &mut Builder, baked: &Baked, array: Global, [_, head, row]: [R32; 3]) -> Global {
        lse_of_row(k, baked, (array, self.longest), [self.place[0], head, row])
    }
}

/// Declares the lengths of a kernel that otherwise needs no number of keys.
pub(super) fn declare_row_lengths(
    k: &mut Builder,
    c: &mut Contract<'_>,
    problem: &Problem,
    seq_q: R32,
) -> Option<Lengths> {
    if problem.lengths.is_even() {
        return None;
    }
    let seq_kv = c.u32(k, "seq_kv", problem.seq_kv as u32);
    declare_lengths(k, c, problem, [seq_q, seq_kv])
}

/// The CTA's batch entry, head and tile in a grid.
pub(super) fn tile_of_cta(k: &mut Builder, order: CtaOrder, grid: Grid) -> [R32; 3] {
    let [head, batch] = head_and_batch(k, order, grid);
    [batch, head, grid.index(k, axis_of_rows(order))]
}

/// A kernel of CTAs of `threads` threads in a grid.
pub(super) fn launch(threads: u32, grid: Extents, flat: bool, shared: u32) -> Launch {
    Launch { dynamic_shared: shared, ..Launch::new(grid.launch(flat), Dim3(threads, 1, 1)) }
}
