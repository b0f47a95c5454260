//! The kernel of a table's gradient: dS of tiles of scores, without dQ, dK and dV.
//!
//! A CTA computes a tile of queries and keys at a time. If queries and keys index the table, the CTA owns a
//! tile of the gradient and visits the heads and batch entries that share it. Otherwise the CTA visits the
//! tiles along the positions that do not index the table, for one head of one batch entry, and leaves its
//! part to the kernel of `../sums.rs`. If the indices are expressions, the CTA adds dS to elements by
//! atomics, between the kernels of `cells.rs`.

use attend::{Bound, DropoutMask, GradientPrograms, Masker, ProgramCode, QueryNumbers, RowRange, Sequence};
use problem::{Operand, Problem, Tensor};
use ptx::{Access, Builder, CmpOp, Dim3, F32, Global, Launch, Pointer, R32, R64, Shared, Target};
use tile::{
    AccTile, CopyMode, MatrixReader, MmaType, OperandA, OperandB, Sign, Threads, TileCopy, TileLayout,
    divide, mma_abt,
};

use super::cells::Cells;
use super::cta::SplitParams;
use super::plan::SplitPlan;
use crate::backward::sums::{Sums, sum_of_lanes};
use crate::contract::Contract;
use crate::derivatives::{TableAxis, TableGradient};
use crate::draft::Draft;
use crate::forward::contract::half;
use crate::grid::{Axis, Extents};
use crate::{Baked, Dims};

/// The temporaries of the parts of each table's gradient.
const PARTS: [&str; 8] = [
    "table_parts_0",
    "table_parts_1",
    "table_parts_2",
    "table_parts_3",
    "table_parts_4",
    "table_parts_5",
    "table_parts_6",
    "table_parts_7",
];
const TENSORS: [Tensor; 4] = [Tensor::Q, Tensor::K, Tensor::V, Tensor::DOut];
/// Rows of a warp.
const WARP_ROWS: u32 = 16;

/// The part of the gradient that a CTA owns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// A tile of the gradient's queries and keys.
    Tile,
    /// The queries of a tile, or all scores of these queries, in a head of a batch entry.
    Queries,
    /// The keys of a tile.
    Keys,
}

impl TableGradient {
    fn owner(&self) -> Owner {
        match [TableAxis::Query, TableAxis::Key].map(|axis| self.dimension(axis).is_some()) {
            [true, true] => Owner::Tile,
            [false, true] => Owner::Keys,
            _ => Owner::Queries,
        }
    }

    /// The extent of an axis of the gradient.
    fn extent(&self, problem: &Problem, axis: TableAxis) -> Option<usize> {
        let table = problem.programs.tables[usize::from(self.table)].gradient();
        Some(table.extents[self.dimension(axis)?])
    }

    /// The grid of the kernel; `None` if no program reads the table.
    pub(super) fn grid(&self, problem: &Problem) -> Option<Extents> {
        if self.code.is_none() && self.added.is_empty() {
            return None;
        }
        let rows = u64::from(TableTiles::of(problem).rows);
        let tiles = |count: usize| (count as u64).div_ceil(rows);
        let of_axis = |axis| self.extent(problem, axis);
        let (heads, batch) = (problem.heads_q as u64, problem.batch as u64);
        Some(Extents(match self.owner() {
            Owner::Tile => {
                let [keys, queries] = [TableAxis::Key, TableAxis::Query].map(of_axis);
                let owned = [TableAxis::Batch, TableAxis::Head].map(|axis| of_axis(axis).unwrap_or(1) as u64);
                [tiles(keys.unwrap_or(1)), tiles(queries.unwrap_or(1)), owned[0].saturating_mul(owned[1])]
            }
            Owner::Queries => [tiles(problem.seq_q), heads, batch],
            Owner::Keys => [tiles(problem.seq_kv), heads, batch],
        }))
    }

    /// The kernel that adds the parts; `None` if CTAs write the gradient or add to it.
    pub(super) fn sums(&self, problem: &Problem) -> Option<Sums> {
        if self.code.is_some() && self.owner() == Owner::Tile || !self.added.is_empty() {
            return None;
        }
        let positions = match self.dimension(TableAxis::Query) {
            Some(_) => problem.seq_q,
            None => {
                let tiles = TableTiles::of(problem);
                problem.seq_q.div_ceil(tiles.rows as usize) * tiles.warps() as usize
            }
        };
        Some(Sums {
            entry: format!("flash_backward_dtable_{}_sums", self.table),
            parts: PARTS[usize::from(self.table)],
            out: Operand::DTable(self.table),
            axes: self.axes.clone(),
            extents: problem.programs.tables[usize::from(self.table)].gradient().extents,
            heads: problem.heads_q,
            batch: problem.batch,
            length: if self.owner() == Owner::Keys { problem.seq_kv } else { positions },
        })
    }
}

/// The tiles of the kernel: as many queries as keys.
#[derive(Clone, Copy, Debug)]
struct TableTiles {
    rows: u32,
    /// Columns of Q and K, and of V and dO.
    columns: [u32; 2],
}

impl TableTiles {
    fn of(dims: impl Into<Dims>) -> TableTiles {
        let Dims { head_dim, head_dim_v, .. } = dims.into();
        let columns = [head_dim, head_dim_v].map(|dim| (dim as u32).next_multiple_of(16));
        TableTiles { rows: if columns[0].max(columns[1]) <= 128 { 64 } else { 32 }, columns }
    }

    const fn warps(self) -> u32 {
        self.rows / WARP_ROWS
    }

    /// The layouts of [`TENSORS`].
    fn layouts(self) -> [TileLayout; 4] {
        let [of_q, of_v] = self.columns;
        [of_q, of_q, of_v, of_v].map(|columns| TileLayout::new(self.rows, columns))
    }

    /// Bytes of the tiles, and of the warps' sums of columns after them.
    fn shared_bytes(self) -> u32 {
        let tiles: u32 = self.layouts().into_iter().map(TileLayout::bytes).sum();
        tiles + 4 * self.warps() * self.rows
    }
}

impl SplitPlan {
    /// The kernels of a table's gradient.
    pub(super) fn draft_table<'a>(
        &'a self,
        problem: &Problem,
        baked: &'a Baked,
        target: Target,
        table: &'a TableGradient,
    ) -> Vec<Draft<'a>> {
        let Some(grid) = table.grid(problem) else {
            return table.sums(problem).map(|sums| sums.draft(problem, target)).into_iter().collect();
        };
        let entry = format!("flash_backward_dtable_{}", table.table);
        if let Some(code) = &table.code {
            let sums = table.sums(problem);
            let mut drafts = vec![self.draft_scores(problem, baked, target, (table, code, grid), &entry)];
            drafts.extend(sums.map(|sums| sums.draft(problem, target)));
            return drafts;
        }
        let cells = Cells::of(problem, table.table, PARTS[usize::from(table.table)]);
        let mut drafts = vec![cells.draft_clear(problem, target)];
        for (i, code) in table.added.iter().enumerate() {
            let entry = format!("{entry}_add_{i}");
            drafts.push(self.draft_scores(problem, baked, target, (table, code, grid), &entry));
        }
        drafts.push(cells.draft_store(problem, target));
        drafts
    }

    /// The kernel that computes dS.
    fn draft_scores<'a>(
        &'a self,
        problem: &Problem,
        baked: &'a Baked,
        target: Target,
        (table, code, grid): (&'a TableGradient, &ProgramCode, Extents),
        entry: &str,
    ) -> Draft<'a> {
        let sums = table.sums(problem);
        let mut k = Builder::kernel(entry);
        let tiles = TableTiles::of(baked);
        k.max_threads(32 * tiles.warps());
        let mut c = Contract::new(problem);
        let declared = (&TENSORS[..], false, grid, self.tanh);
        let params = SplitParams::declare(&mut k, &mut c, (problem, baked), declared, Some(code));
        let out = TableOut::declare(&mut k, &mut c, (problem, table), sums.as_ref());
        let launch = Launch {
            dynamic_shared: tiles.shared_bytes(),
            ..Launch::new(grid.launch(baked.flat), Dim3(32 * tiles.warps(), 1, 1))
        };
        let copy = self.copy;
        let body = move |k: &mut Builder| {
            TableCta::new(k, (baked, table, copy), (params, out), tiles).compute(k);
        };
        Draft::new(k, c, (entry, launch), target, body)
    }
}

/// The parameters of the results.
struct TableOut {
    /// The gradient, or the parts.
    to: Global,
    heads: R32,
    batch: R32,
    /// Of a tile of the gradient: the extents of queries and keys, the number of heads of the gradient, and
    /// the distances of batch entries, heads, queries and keys in elements.
    tile: Option<([R32; 3], [R64; 4])>,
    /// Of a gradient that CTAs add to: the last index, and the distance of elements, in each dimension.
    cells: Vec<(R32, R64)>,
    /// Tiles of queries in a head.
    row_tiles: R32,
}

impl TableOut {
    fn declare(
        k: &mut Builder,
        c: &mut Contract<'_>,
        (problem, table): (&Problem, &TableGradient),
        sums: Option<&Sums>,
    ) -> TableOut {
        let gradient = problem.programs.tables[usize::from(table.table)].gradient();
        let mut cells = Vec::new();
        let (to, tile) = match sums {
            None if !table.added.is_empty() => {
                let of = Cells::of(problem, table.table, PARTS[usize::from(table.table)]);
                let to = c.temporary(k, of.name, of.bytes(), Access::ReadWrite);
                for (i, (extent, stride)) in of.extents.iter().zip(of.strides()).enumerate() {
                    let last = c.u32(k, &format!("last_{i}"), extent.saturating_sub(1) as u32);
                    cells.push((last, c.i64(k, &format!("cells_{i}"), stride)));
                }
                (to, None)
            }
            Some(sums) => (c.temporary(k, sums.parts, sums.bytes().max(4), Access::Write), None),
            None => {
                let to = c.operand(k, Operand::DTable(table.table)).expect("the pass wants the gradient");
                let extent = |axis| table.extent(problem, axis).unwrap_or(1) as u32;
                let stride = |axis| table.dimension(axis).map_or(0, |at| gradient.strides[at]);
                let extents = [
                    c.u32(k, "queries", extent(TableAxis::Query)),
                    c.u32(k, "keys", extent(TableAxis::Key)),
                    c.u32(k, "table_heads", extent(TableAxis::Head)),
                ];
                let strides = [
                    c.i64(k, "batch_stride", stride(TableAxis::Batch)),
                    c.i64(k, "head_stride", stride(TableAxis::Head)),
                    c.i64(k, "query_stride", stride(TableAxis::Query)),
                    c.i64(k, "key_stride", stride(TableAxis::Key)),
                ];
                (to, Some((extents, strides)))
            }
        };
        let rows = TableTiles::of(problem).rows;
        TableOut {
            to,
            heads: c.u32(k, "heads", problem.heads_q as u32),
            batch: c.u32(k, "entries", problem.batch as u32),
            tile,
            cells,
            row_tiles: c.u32(k, "row_tiles", problem.seq_q.div_ceil(rows as usize) as u32),
        }
    }
}

/// The kernel being emitted.
struct TableCta<'a> {
    baked: &'a Baked,
    table: &'a TableGradient,
    params: SplitParams,
    out: TableOut,
    tiles: TableTiles,
    threads: Threads,
    shared: Shared,
    copies: [TileCopy; 4],
}

/// A head of a batch entry.
#[derive(Clone, Copy)]
struct HeadPlace {
    sequence: Option<Sequence>,
    batch: R32,
    head: R32,
    seq_q: R32,
    seq_kv: R32,
}

impl<'a> TableCta<'a> {
    fn new(
        k: &mut Builder,
        (baked, table, copy): (&'a Baked, &'a TableGradient, CopyMode),
        (params, out): (SplitParams, TableOut),
        tiles: TableTiles,
    ) -> TableCta<'a> {
        let threads = Threads::new(k, 32 * tiles.warps(), 1);
        let shared = k.dynamic_shared(128);
        let layouts = tiles.layouts();
        let copies = [0, 1, 2, 3].map(|i| {
            let (tensor, layout) = (TENSORS[i], layouts[i]);
            let width = if i < 2 { baked.dims.head_dim as u32 } else { baked.head_dim_v() };
            TileCopy::new(k, &threads, layout, baked.row_bytes(tensor), copy).of_width(k, 2 * width)
        });
        TableCta { baked, table, params, out, tiles, threads, shared, copies }
    }

    fn compute(&self, k: &mut Builder) {
        if !self.table.added.is_empty() {
            return self.compute_added(k);
        }
        match self.table.owner() {
            Owner::Tile => self.compute_tile(k),
            Owner::Queries => self.compute_queries(k),
            Owner::Keys => self.compute_keys(k),
        }
    }

    /// The sum of dS over the heads and batch entries that share a tile of the gradient.
    fn compute_tile(&self, k: &mut Builder) {
        let tile = [Axis::Y, Axis::X].map(|axis| self.params.grid.index(k, axis));
        let (extents, strides) = self.out.tile.expect("declared for tiles");
        let owned = self.params.grid.index(k, Axis::Z);
        let (entry, head) = (k.div_u(owned, extents[2]), k.rem_u(owned, extents[2]));
        let range = |k: &mut Builder, axis, index: R32, count: R32| {
            if self.table.dimension(axis).is_none() {
                return [k.mov(0), count];
            }
            let next = k.add(index, 1);
            [index, k.min_u(next, count)] // none beyond the count
        };
        let [first_entry, entries] = range(k, TableAxis::Batch, entry, self.out.batch);
        let [first_head, heads] = range(k, TableAxis::Head, head, self.out.heads);
        let sum = AccTile::zero(k, WARP_ROWS, self.tiles.rows);
        k.for_range(first_entry, entries, 1, |k, batch| {
            k.for_range(first_head, heads, 1, |k, head| {
                let at = self.place(k, batch, head);
                let rows = self.rows(k, &at, tile[0]);
                let bound = self.bound(k, &rows);
                let from = k.mov(bound.from());
                let some = k.setp_s(CmpOp::Lt, rows.first, rows.seq_q);
                let some = k.setp_s_and(CmpOp::Lt, tile[1], bound.end, some);
                let some = k.setp_s_and(CmpOp::Ge, tile[1], from, some);
                k.if_(some, |k| self.visit(k, &at, tile, |k, ds| add(k, &sum, ds)));
            });
        });
        let entry = k.zext(entry);
        let head = k.zext(head);
        let base = k.mul(entry, strides[0]);
        let base = k.mad(head, strides[1], base);
        self.store_tile(k, &sum, (base, tile), (extents, strides));
    }

    /// Adds dS of a tile's queries to the elements that the indices name.
    fn compute_added(&self, k: &mut Builder) {
        let [tile, head, batch] = [Axis::X, Axis::Y, Axis::Z].map(|axis| self.params.grid.index(k, axis));
        let at = self.place(k, batch, head);
        let rows = self.rows(k, &at, tile);
        let bound = self.bound(k, &rows);
        let end = self.end_of_rows(k, &rows, bound.end);
        k.for_range(bound.from(), end, 1, |k, keys| {
            self.visit_with(k, &at, [tile, keys], |k, ds, programs, block| {
                let values: Vec<Vec<F32>> = (0..ds.lane_rows()).map(|i| ds.row(i).collect()).collect();
                let Some(programs) = programs else { return };
                programs.each_target(k, ds, block, |k, [row, column], indices| {
                    let value = values[row][column];
                    let mut to = self.out.to;
                    for (&index, &(last, stride)) in indices.iter().zip(&self.out.cells) {
                        let index = k.max_s(index, 0);
                        let index = k.min_s(index, last);
                        let index = k.zext(index);
                        let index = k.mul(index, stride);
                        to = Global { base: k.mad(index, 4, to.base), ..to };
                    }
                    let none = k.setp_f(CmpOp::Eq, value, 0.0f32); // of hidden scores, most of all
                    let some = k.not_pred(none);
                    k.guarded(some, |k| k.red_add(to, value));
                });
            });
        });
    }

    /// The sums over the keys of each query, or of all scores of the tile's queries.
    fn compute_queries(&self, k: &mut Builder) {
        let [tile, head, batch] = [Axis::X, Axis::Y, Axis::Z].map(|axis| self.params.grid.index(k, axis));
        let at = self.place(k, batch, head);
        let rows = self.rows(k, &at, tile);
        let bound = self.bound(k, &rows);
        let sums: [F32; 2] = [0; 2].map(|_| k.mov(0.0));
        let end = self.end_of_rows(k, &rows, bound.end);
        k.for_range(bound.from(), end, 1, |k, keys| {
            self.visit(k, &at, [tile, keys], |k, ds| {
                for (row, &sum) in (0..).zip(&sums) {
                    ds.row(row).for_each(|ds| k.add_to(sum, sum, ds));
                }
            });
        });
        let before = k.mad(head, self.out.batch, batch);
        if self.table.dimension(TableAxis::Query).is_some() {
            let sums = sums.map(|sum| sum_of_lanes(k, sum, &[1, 2]));
            let of_warp = k.mul(self.threads.warp, WARP_ROWS);
            let first = k.mad(tile, self.tiles.rows, of_warp);
            let first = k.add(first, self.threads.quad);
            let elected = self.threads.elected_for_row(k);
            for (below, sum) in [0, 8].into_iter().zip(sums) {
                let row = k.add(first, below);
                let exists = k.setp_u_and(CmpOp::Lt, row, self.params.seq_q, elected);
                let to = self.part(k, before, self.params.seq_q, row);
                k.guarded(exists, |k| k.st(to, sum));
            }
            return;
        }
        let sum = k.add(sums[0], sums[1]);
        let sum = sum_of_lanes(k, sum, &[1, 2, 4, 8, 16]);
        let warps = self.tiles.warps();
        let count = k.mul(self.out.row_tiles, warps);
        let index = k.mad(tile, warps, self.threads.warp);
        let to = self.part(k, before, count, index);
        let first = k.setp_u(CmpOp::Eq, self.threads.lane, 0);
        k.guarded(first, |k| k.st(to, sum));
    }

    /// The sums over the queries of each key.
    fn compute_keys(&self, k: &mut Builder) {
        let [tile, head, batch] = [Axis::X, Axis::Y, Axis::Z].map(|axis| self.params.grid.index(k, axis));
        let at = self.place(k, batch, head);
        let rows = self.tiles.rows;
        let keys = RowRange { first: k.mul(tile, rows), rows, seq_q: at.seq_kv, seq_kv: at.seq_q, heads: 1 };
        let band = self.params.band.transposed(k);
        let bound = Bound::new(k, &band, &keys, rows, true);
        let sums: Vec<F32> = (0..rows / 4).map(|_| k.mov(0.0)).collect();
        let end = self.end_of_rows(k, &keys, bound.end);
        k.for_range(bound.from(), end, 1, |k, queries| {
            self.visit(k, &at, [queries, tile], |k, ds| {
                for row in 0..ds.lane_rows() {
                    ds.row(row).zip(&sums).for_each(|(ds, &sum)| k.add_to(sum, sum, ds));
                }
            });
        });
        let sums: Vec<F32> = sums.into_iter().map(|sum| sum_of_lanes(k, sum, &[4, 8, 16])).collect();
        let of_columns = self.after_tiles();
        let own = k.shared_index(of_columns, self.threads.warp, 4 * rows);
        let own = k.shared_index(own, self.threads.column, 4);
        let first = k.setp_u(CmpOp::Eq, self.threads.quad, 0);
        for (n, pair) in (0..).zip(sums.chunks_exact(2)) {
            k.guarded(first, |k| k.st_vec(own.at(8 * 4 * n), [pair[0], pair[1]]));
        }
        k.bar_sync();
        let thread = self.threads.index;
        let own = k.shared_index(of_columns, thread, 4);
        let in_tile = k.setp_u(CmpOp::Lt, thread, rows);
        let key = k.add(keys.first, thread);
        let exists = k.setp_u_and(CmpOp::Lt, key, self.params.seq_kv, in_tile);
        let before = k.mad(head, self.out.batch, batch);
        let to = self.part(k, before, self.params.seq_kv, key);
        k.if_(exists, |k| {
            let sum: F32 = k.mov(0.0);
            for warp in 0..self.tiles.warps() {
                let part: F32 = k.ld(own.at(i64::from(warp * 4 * rows)));
                k.add_to(sum, sum, part);
            }
            k.st(to, sum);
        });
    }

    /// The address of number `index` of `count` of a head of a batch entry.
    fn part(&self, k: &mut Builder, before: R32, count: R32, index: R32) -> Global {
        let before = k.mul_wide_u(before, count);
        let index = k.zext(index);
        let index = k.add(before, index);
        Global { base: k.mad(index, 4, self.out.to.base), ..self.out.to }
    }

    fn after_tiles(&self) -> Shared {
        let tiles: u32 = self.tiles.layouts().into_iter().map(TileLayout::bytes).sum();
        self.shared.at(tiles.into())
    }

    fn place(&self, k: &mut Builder, batch: R32, head: R32) -> HeadPlace {
        let sequence = self.params.lengths.map(|lengths| lengths.sequence(k, batch));
        let [seq_q, seq_kv] = match sequence {
            None => [self.params.seq_q, self.params.seq_kv],
            Some(sequence) => [sequence.q.len, sequence.kv.len],
        };
        HeadPlace { sequence, batch, head, seq_q, seq_kv }
    }

    /// The rows of a tile of queries.
    fn rows(&self, k: &mut Builder, at: &HeadPlace, tile: R32) -> RowRange {
        let rows = self.tiles.rows;
        RowRange { first: k.mul(tile, rows), rows, seq_q: at.seq_q, seq_kv: at.seq_kv, heads: 1 }
    }

    /// The tiles of keys that rows see.
    fn bound(&self, k: &mut Builder, rows: &RowRange) -> Bound {
        Bound::new(k, &self.params.band, rows, self.tiles.rows, false)
    }

    /// The end of a loop over tiles, or 0 if the CTA's rows do not exist.
    fn end_of_rows(&self, k: &mut Builder, rows: &RowRange, end: R32) -> R32 {
        let some = k.setp_s(CmpOp::Lt, rows.first, rows.seq_q);
        k.selp(end, 0, some)
    }

    /// Computes dS of a tile of queries and keys.
    fn visit(
        &self,
        k: &mut Builder,
        at: &HeadPlace,
        [queries, keys]: [R32; 2],
        take: impl FnOnce(&mut Builder, &AccTile),
    ) {
        self.visit_with(k, at, [queries, keys], |k, ds, _, _| take(k, ds));
    }

    /// As [`TableCta::visit`], with the programs, the first key and the head.
    fn visit_with(
        &self,
        k: &mut Builder,
        at: &HeadPlace,
        [queries, keys]: [R32; 2],
        take: impl FnOnce(&mut Builder, &AccTile, Option<&GradientPrograms<'_>>, (R32, Option<R32>)),
    ) {
        let rows = self.rows(k, at, queries);
        let first_key = k.mul(keys, self.tiles.rows);
        let places = self.load(k, at, rows.first, first_key);
        let numbers = self.numbers(k, at, &rows).map(QueryNumbers::Rows);
        k.cp_async_commit();
        k.cp_async_wait(0);
        k.bar_sync();
        let ty = MmaType::Half(half(self.baked));
        let layouts = self.tiles.layouts();
        let own = |k: &mut Builder, i: usize, sign: Sign| {
            OperandA::shared(k, &self.threads, ty, sign, layouts[i], places[i], WARP_ROWS)
        };
        let streamed = |k: &mut Builder, i: usize| {
            let reader = MatrixReader::chunks_first(k, &self.threads, layouts[i]);
            OperandB { tile: reader.open(k, places[i]), tail: None }
        };
        let bound = self.bound(k, &rows);
        let partial = bound.is_partial(k, keys);
        let mask = Masker::new(k, &self.params.band, &self.threads, &rows, WARP_ROWS, self.tiles.rows);
        let mask = mask.of_probabilities();
        let programs = self.params.programs(k, &self.threads, &rows, WARP_ROWS, (None, at.batch));
        let gradient = self.params.score_gradient(&mask, programs.as_ref(), true);
        let (q, key) = (own(k, 0, self.baked.sign), streamed(k, 1));
        let s = mma_abt(k, &q, &key);
        let p = gradient.probabilities(k, &s, &numbers[0], (first_key, partial, Some(at.head)));
        let (d_out, value) = (own(k, 3, Sign::Keep), streamed(k, 2));
        let dp = mma_abt(k, &d_out, &value);
        if let Some(params) = self.params.dropout {
            let size = (WARP_ROWS, self.tiles.rows);
            let dropout = DropoutMask::new(k, params, &self.threads, &rows, size, false);
            let head = k.mad(at.batch, self.baked.heads_q as u32, at.head);
            dropout.drop_gradient(k, &dp, (first_key, head));
        }
        gradient.scores(k, &s, &p, &dp, &numbers);
        take(k, &dp, programs.as_ref(), (first_key, Some(at.head)));
        k.bar_sync(); // before the next tiles
    }

    /// Requests the tiles of [`TENSORS`]; returns their places.
    fn load(&self, k: &mut Builder, at: &HeadPlace, first_query: R32, first_key: R32) -> [Shared; 4] {
        let layouts = self.tiles.layouts();
        let mut before = 0;
        [0, 1, 2, 3].map(|i| {
            let (tensor, copy) = (TENSORS[i], &self.copies[i]);
            let to = self.shared.at(i64::from(before));
            before += layouts[i].bytes();
            let (first, length, head) = match tensor.is_of_keys() {
                true => (first_key, at.seq_kv, divide(k, at.head, self.baked.group_size())),
                false => (first_query, at.seq_q, at.head),
            };
            let start = self.params.start(k, self.baked, tensor, (at.sequence, at.batch, head));
            let from = copy.start(k, start, first);
            let limit = k.sub(length, first);
            copy.load(k, to, from, Some(limit));
            to
        })
    }

    /// −L·log2 e and −D of the lane's rows.
    fn numbers(&self, k: &mut Builder, at: &HeadPlace, rows: &RowRange) -> [Vec<F32>; 2] {
        let first = k.mad(self.threads.warp, WARP_ROWS, rows.first);
        let first = k.add(first, self.threads.quad);
        let left = k.sub(at.seq_q, first);
        let place = ((at.sequence, at.batch, at.head), first);
        let arrays = [(self.params.minus_log_sums, f32::NEG_INFINITY), (self.params.minus_deltas, 0.0)];
        arrays.map(|(array, missing)| {
            let start = self.params.number_of_row(k, self.baked, array, place);
            let number = |row: u32| {
                let number: F32 = k.mov(missing);
                let exists = k.setp_s(CmpOp::Gt, left, row);
                k.guarded(exists, |k| k.ld_to(number, start.at(4 * i64::from(row))));
                number
            };
            [0, 8].map(number).into()
        })
    }

    /// Stores a tile of the gradient. `base` is the index of its head's first element.
    fn store_tile(
        &self,
        k: &mut Builder,
        sum: &AccTile,
        (base, [queries, keys]): (R64, [R32; 2]),
        ([query_count, key_count, _], [_, _, query_stride, key_stride]): ([R32; 3], [R64; 4]),
    ) {
        let of_warp = k.mad(self.threads.warp, WARP_ROWS, self.threads.quad);
        let first = k.mad(queries, self.tiles.rows, of_warp);
        let column = k.mad(keys, self.tiles.rows, self.threads.column);
        for (row, below) in (0..).zip([0, 8]) {
            let query = k.add(first, below);
            let in_rows = k.setp_u(CmpOp::Lt, query, query_count);
            let query = k.zext(query);
            let of_row = k.mad(query, query_stride, base);
            for (i, ds) in (0..).zip(sum.row(row)) {
                let key = k.add(column, i / 2 * 8 + i % 2);
                let exists = k.setp_u_and(CmpOp::Lt, key, key_count, in_rows);
                let key = k.zext(key);
                let index = k.mad(key, key_stride, of_row);
                let to = Global { base: k.mad(index, 4, self.out.to.base), ..self.out.to };
                k.guarded(exists, |k| k.st(to, ds));
            }
        }
    }
}

fn add(k: &mut Builder, sum: &AccTile, part: &AccTile) {
    for (sum, part) in sum.registers().into_iter().zip(part.registers()) {
        k.add_to(sum, sum, part);
    }
}
