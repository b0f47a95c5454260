//! Copies between global and shared memory by the threads of a CTA, with `cp.async` where rows are aligned.

use ptx::{Builder, CmpOp, Global, Pointer, Pred, R16, R32, Shared, Src};

use crate::Threads;
use crate::TileLayout;
use crate::layout::CHUNK_BYTES;

/// How tiles are copied from global to shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CopyMode {
    /// `cp.async` of 16 bytes: needs every row to begin at a multiple of 16 bytes.
    Async16,
    /// `cp.async` of 8 bytes: needs every row to begin at a multiple of 8 bytes.
    Async8,
    /// `cp.async` of 4 bytes: needs every row to begin at a multiple of 4 bytes.
    Async4,
    /// Loads of single 16-bit elements and stores to shared memory: any alignment, much slower.
    Elements,
}

impl CopyMode {
    /// All modes, widest first.
    pub const ALL: [CopyMode; 4] =
        [CopyMode::Async16, CopyMode::Async8, CopyMode::Async4, CopyMode::Elements];

    /// Bytes of one access to global memory. Every row must be aligned to this size.
    pub const fn bytes(self) -> u32 {
        match self {
            CopyMode::Async16 => 16,
            CopyMode::Async8 => 8,
            CopyMode::Async4 => 4,
            CopyMode::Elements => 2,
        }
    }
}

/// Copies tiles of one layout from global to shared memory with all threads of the CTA, or back with the
/// lanes of one warp.
///
/// A thread keeps one chunk column and steps down the rows, so that all its addresses are constant offsets
/// from one pointer. The number of lanes per row is a power of two: with rows of 10 chunks, for example, 6 of
/// 16 lanes are idle. Rows with more chunks than there are threads are copied in several columns.
#[derive(Clone, Debug)]
pub struct TileCopy {
    layout: TileLayout,
    mode: CopyMode,
    /// Bytes from one row to the next in global memory.
    row_bytes: i64,
    /// The first row that the thread copies.
    row: R32,
    /// Lanes of a row: chunks between a thread's columns.
    lanes: u32,
    /// Rows between two successive copies of a thread.
    step: u32,
    /// The thread's chunk columns, at least one.
    columns: Vec<Column>,
}

/// A chunk column of a thread.
#[derive(Clone, Debug)]
struct Column {
    chunk: R32,
    /// Byte offsets in the tile of the thread's first rows, for one period of the swizzle.
    offsets: Vec<R32>,
    /// Whether the thread has a chunk to copy; `None` where every thread has one.
    active: Option<Pred>,
    /// The part of the thread's chunk that exists in global memory; `None` if rows fill the tile.
    width: Option<Width>,
}

/// The chunks of rows that are narrower than the tile.
#[derive(Clone, Debug)]
struct Width {
    /// Bytes of a row in global memory.
    row: u32,
    /// Whether the thread's whole chunk exists.
    whole: Pred,
    /// Whether the thread has the chunk that exists only in its first `row % 16` bytes.
    cut: Pred,
    /// Number of existing bytes in each access to the thread's chunk.
    pieces: Vec<R32>,
}

impl TileCopy {
    /// Copies by all threads of the CTA. `row_bytes` is the row pitch in global memory.
    pub fn new(
        k: &mut Builder,
        threads: &Threads,
        layout: TileLayout,
        row_bytes: i64,
        mode: CopyMode,
    ) -> TileCopy {
        TileCopy::by(k, threads.index, threads.count, layout, row_bytes, mode)
    }

    /// Copies by the 32 lanes of a warp. Each warp copies its own tile.
    pub fn by_warp(
        k: &mut Builder,
        threads: &Threads,
        layout: TileLayout,
        row_bytes: i64,
        mode: CopyMode,
    ) -> TileCopy {
        TileCopy::by(k, threads.lane, 32, layout, row_bytes, mode)
    }

    fn by(
        k: &mut Builder,
        index: R32,
        count: u32,
        layout: TileLayout,
        row_bytes: i64,
        mode: CopyMode,
    ) -> TileCopy {
        // The number of lanes divides the number of threads, also if rows have more chunks than there are
        // threads.
        let lanes = layout.chunks.next_power_of_two().min(1 << count.trailing_zeros());
        let step = (count / lanes).max(1);
        let row = k.shr_u(index, lanes.trailing_zeros());
        let first = k.and(index, lanes - 1);
        let period = layout.period();
        let phases = (1..=period).find(|n| (n * step).is_multiple_of(period)).unwrap_or(period);
        let columns = (0..layout.chunks)
            .step_by(lanes as usize)
            .map(|before| {
                let left = layout.chunks - before;
                let active = (left < lanes).then(|| k.setp_u(CmpOp::Lt, first, left));
                let chunk = if before == 0 { first } else { k.add(first, before) };
                let offsets = (0..phases)
                    .map(|phase| {
                        let row = if phase == 0 { row } else { k.add(row, phase * step) };
                        layout.emit_offset(k, row, chunk)
                    })
                    .collect();
                Column { chunk, offsets, active, width: None }
            })
            .collect();
        TileCopy { layout, mode, row_bytes, row, lanes, step, columns }
    }

    /// The copy for rows of another pitch in global memory.
    #[must_use]
    pub fn with_row_bytes(self, row_bytes: i64) -> TileCopy {
        TileCopy { row_bytes, ..self }
    }

    /// Restricts the copy to rows of `bytes` bytes in global memory, at most the width of the tile. Loads
    /// fill the rest of the tile's rows with zeros; stores omit it.
    #[must_use]
    pub fn of_width(self, k: &mut Builder, bytes: u32) -> TileCopy {
        if bytes == self.layout.pitch() {
            return self;
        }
        let (piece, rest) = (self.mode.bytes(), bytes % CHUNK_BYTES);
        let pieces = match self.mode {
            CopyMode::Elements => 0,
            _ => CHUNK_BYTES / piece,
        };
        let columns = self.columns.into_iter().map(|column| {
            let whole = k.setp_u(CmpOp::Lt, column.chunk, bytes / CHUNK_BYTES);
            let cut = k.setp_u(CmpOp::Eq, column.chunk, bytes / CHUNK_BYTES);
            let pieces = (0..pieces)
                .map(|i| {
                    let of_cut: R32 = k.selp(rest.saturating_sub(i * piece).min(piece), 0, cut);
                    k.selp(piece, of_cut, whole)
                })
                .collect();
            Column { width: Some(Width { row: bytes, whole, cut, pieces }), ..column }
        });
        TileCopy { columns: columns.collect(), ..self }
    }

    /// The thread's pointer to its first chunk of the tile that begins at row `first` of `tensor`.
    pub fn start(&self, k: &mut Builder, tensor: Global, first: R32) -> Global {
        let row = k.add(first, self.row);
        let wide = k.zext(row);
        let rows = k.mad(wide, self.row_bytes, tensor.base);
        Global { base: k.mad_wide_u(self.columns[0].chunk, CHUNK_BYTES, rows), offset: tensor.offset }
    }

    /// Copies the tile at the thread's pointer `from` to `to`. Rows at or beyond `limit` (signed, counted
    /// from the tile's first row) are not read; they are filled with zeros. `None` means that all rows exist.
    pub fn load(&self, k: &mut Builder, to: Shared, from: Global, limit: Option<R32>) {
        let sides = self.sides(k, to, from);
        let left: Option<R32> = limit.map(|limit| k.sub(limit, self.row));
        for (column, to, from) in sides {
            for (pass, first) in self.passes() {
                let (to, from) = (self.place(&to, pass), self.source(k, from, first));
                let copies = self.copies(k, column, first);
                let exists = left.map(|left| k.setp_s(CmpOp::Gt, left, first));
                self.request(k, column, (to, from), (copies, exists));
            }
        }
    }

    /// Like [`TileCopy::load`], from rows that may lie anywhere: `place` gives the address of a row by its
    /// index in the tile. It gets indices of the tile alone, and only those below `limit` if `limit` is
    /// positive.
    pub fn load_rows(
        &self,
        k: &mut Builder,
        to: Shared,
        limit: Option<R32>,
        mut place: impl FnMut(&mut Builder, R32) -> Global,
    ) {
        let left: Option<R32> = limit.map(|limit| k.sub(limit, self.row));
        let last = limit.map(|limit| {
            let last = k.sub(limit, 1);
            k.max_s(last, 0)
        });
        for (pass, first) in self.passes() {
            let row = if first == 0 { self.row } else { k.add(self.row, first) };
            let row = last.map_or(row, |last| k.min_s(row, last));
            let inside = self.layout.rows - first >= self.step;
            let row = if inside { row } else { k.min_u(row, self.layout.rows - 1) };
            let from = place(k, row);
            let from = k.index(from, self.columns[0].chunk, CHUNK_BYTES);
            let exists = left.map(|left| k.setp_s(CmpOp::Gt, left, first));
            for (column, places, from) in self.sides(k, to, from) {
                let (to, copies) = (self.place(&places, pass), self.copies(k, column, first));
                self.request(k, column, (to, from), (copies, exists));
            }
        }
    }

    /// Like [`TileCopy::load`], from rows that may lie anywhere: `place` gives the address of the thread's
    /// row in the copies that begin at a row of the tile, from that row and the thread's own first row.
    /// Addresses of rows from `limit` on are not read.
    pub fn load_from(
        &self,
        k: &mut Builder,
        to: Shared,
        limit: Option<R32>,
        mut place: impl FnMut(&mut Builder, u32, R32) -> Global,
    ) {
        let left: Option<R32> = limit.map(|limit| k.sub(limit, self.row));
        for (pass, first) in self.passes() {
            let from = place(k, first, self.row);
            let from = k.index(from, self.columns[0].chunk, CHUNK_BYTES);
            let exists = left.map(|left| k.setp_s(CmpOp::Gt, left, first));
            for (column, places, from) in self.sides(k, to, from) {
                let (to, copies) = (self.place(&places, pass), self.copies(k, column, first));
                self.request(k, column, (to, from), (copies, exists));
            }
        }
    }

    /// Rows that the threads copy at once.
    pub fn rows_at_once(&self) -> u32 {
        self.step
    }

    /// Requests a chunk of a column, as far as `copies` says and if the row `exists`.
    fn request(
        &self,
        k: &mut Builder,
        column: &Column,
        place: (Shared, Global),
        (copies, exists): (Option<Pred>, Option<Pred>),
    ) {
        match self.mode {
            CopyMode::Elements => copy_elements(k, column, place, copies, exists),
            _ => copy_async(k, column, place, self.mode.bytes(), (copies, exists)),
        }
    }

    /// Copies rows from the tile at `from` to the thread's pointer `to`, up to row `limit`.
    pub fn store(&self, k: &mut Builder, from: Shared, to: Global, limit: Option<R32>) {
        let sides = self.sides(k, from, to);
        let left: Option<R32> = limit.map(|limit| k.sub(limit, self.row));
        for (column, from, to) in sides {
            for (pass, first) in self.passes() {
                let (from, to) = (self.place(&from, pass), self.source(k, to, first));
                let copies = self.copies(k, column, first);
                let wanted = match (left, copies) {
                    (Some(left), Some(copies)) => Some(k.setp_s_and(CmpOp::Gt, left, first, copies)),
                    (Some(left), None) => Some(k.setp_s(CmpOp::Gt, left, first)),
                    (None, copies) => copies,
                };
                store_chunk(k, column, (from, to), wanted, self.mode);
            }
        }
    }

    /// The thread's columns, each with its addresses in the tile and in global memory.
    fn sides(&self, k: &mut Builder, tile: Shared, global: Global) -> Vec<(&Column, Vec<Shared>, Global)> {
        let mut sides = Vec::new();
        for (number, column) in (0..).zip(&self.columns) {
            let place = |&o: &R32| Shared { base: k.add(tile.base, o), offset: tile.offset };
            let places = column.offsets.iter().map(place).collect();
            sides.push((column, places, global.at(i64::from(number * self.lanes * CHUNK_BYTES))));
        }
        sides
    }

    /// The thread's copies: index and row, counted from the thread's first row.
    fn passes(&self) -> impl Iterator<Item = (usize, u32)> + use<> {
        (0..self.layout.rows).step_by(self.step as usize).enumerate()
    }

    fn place(&self, places: &[Shared], pass: usize) -> Shared {
        let period = pass / places.len() * places.len();
        places[pass % places.len()].at(i64::from(period as u32 * self.step * self.layout.pitch()))
    }

    fn source(&self, k: &mut Builder, from: Global, first: u32) -> Global {
        let bytes = i64::from(first).wrapping_mul(self.row_bytes);
        if i32::try_from(bytes).is_ok() { from.at(bytes) } else { k.advance(from, bytes) }
    }

    /// Whether the thread copies in the pass that begins at row `first`; `None` if all threads do.
    fn copies(&self, k: &mut Builder, column: &Column, first: u32) -> Option<Pred> {
        let rows_left = self.layout.rows - first;
        match column.active {
            active if rows_left >= self.step => active,
            Some(active) => Some(k.setp_u_and(CmpOp::Lt, self.row, rows_left, active)),
            None => Some(k.setp_u(CmpOp::Lt, self.row, rows_left)),
        }
    }
}

fn copy_async(
    k: &mut Builder,
    column: &Column,
    (to, from): (Shared, Global),
    bytes: u32,
    (copies, exists): (Option<Pred>, Option<Pred>),
) {
    for piece in 0..CHUNK_BYTES / bytes {
        let own = column.width.as_ref().map(|width| width.pieces[piece as usize]);
        let read: Option<R32> = match exists {
            None => own,
            Some(exists) => Some(k.selp(own.map_or(bytes.into(), Src::from), 0, exists)),
        };
        let at = i64::from(piece * bytes);
        guarded_by(k, copies, |k| k.cp_async(to.at(at), from.at(at), bytes, read));
    }
}

fn copy_elements(
    k: &mut Builder,
    column: &Column,
    (to, from): (Shared, Global),
    copies: Option<Pred>,
    exists: Option<Pred>,
) {
    let elements: [R16; 8] = std::array::from_fn(|_| k.mov(0));
    let load = |k: &mut Builder, count: u32| {
        for (i, &element) in elements.iter().enumerate().take(count as usize) {
            k.ld_to(element, from.at(2 * i as i64));
        }
    };
    // Idle threads and elements beyond the end keep zeros. An idle thread does not store them.
    let wanted = match (copies, exists) {
        (Some(copies), Some(exists)) => Some(k.and_pred(copies, exists)),
        (one, other) => one.or(other),
    };
    match &column.width {
        None => guarded_by(k, wanted, |k| load(k, CHUNK_BYTES / 2)),
        Some(width) => {
            for (of_width, bytes) in [(width.whole, CHUNK_BYTES), (width.cut, width.row % CHUNK_BYTES)] {
                let wanted = wanted.map_or(of_width, |wanted| k.and_pred(wanted, of_width));
                k.guarded(wanted, |k| load(k, bytes / 2));
            }
        }
    }
    let chunk: [R32; 4] = std::array::from_fn(|i| k.join16(elements[2 * i], elements[2 * i + 1]));
    guarded_by(k, copies, |k| k.st_vec(to, chunk));
}

/// Stores the existing part of a chunk.
fn store_chunk(
    k: &mut Builder,
    column: &Column,
    (from, to): (Shared, Global),
    wanted: Option<Pred>,
    mode: CopyMode,
) {
    let all = |k: &mut Builder| {
        let chunk: [R32; 4] = k.ld_vec(from);
        store_whole(k, to, chunk, mode);
    };
    let Some(width) = &column.width else { return guarded_by(k, wanted, all) };
    let [whole, cut] = [width.whole, width.cut].map(|pred| match wanted {
        Some(wanted) => k.and_pred(wanted, pred),
        None => pred,
    });
    let cut_bytes = width.row % CHUNK_BYTES;
    if mode == CopyMode::Elements && cut_bytes != 0 {
        return store_elements(k, (from, to), [whole, cut], cut_bytes);
    }
    k.guarded(whole, all);
    if cut_bytes != 0 {
        k.guarded(cut, |k| {
            let chunk: [R32; 4] = k.ld_vec(from);
            store_first(k, to, chunk, cut_bytes, mode);
        });
    }
}

/// Stores the 16-bit elements of a whole chunk, or those in the first `cut_bytes` bytes of a cut chunk. Both
/// kinds share one load: with a load for each, ptxas 13.0 and 13.5 take the odd elements of the cut chunk
/// from the registers of the whole chunk.
fn store_elements(k: &mut Builder, (from, to): (Shared, Global), [whole, cut]: [Pred; 2], cut_bytes: u32) {
    let some = k.or_pred(whole, cut);
    let elements = k.guarded(some, |k| {
        let chunk: [R32; 4] = k.ld_vec(from);
        chunk.map(|word| k.split16(word))
    });
    for (at, &element) in (0..).step_by(2).zip(elements.as_flattened()) {
        let exists = if at < i64::from(cut_bytes) { some } else { whole };
        k.guarded(exists, |k| k.st(to.at(at), element));
    }
}

/// Emits `body` under a condition; `None` means no condition.
fn guarded_by(k: &mut Builder, guard: Option<Pred>, body: impl FnOnce(&mut Builder)) {
    match guard {
        Some(guard) => k.guarded(guard, body),
        None => body(k),
    }
}

/// Stores a whole chunk with accesses of the mode's width.
fn store_whole(k: &mut Builder, to: Global, chunk: [R32; 4], mode: CopyMode) {
    let [a, b, c, d] = chunk;
    match mode {
        CopyMode::Async16 => k.st_vec(to, chunk),
        CopyMode::Async8 => {
            k.st_vec(to, [a, b]);
            k.st_vec(to.at(8), [c, d]);
        }
        CopyMode::Async4 | CopyMode::Elements => store_first(k, to, chunk, CHUNK_BYTES, mode),
    }
}

/// Stores the first `bytes` bytes of a chunk in words, or in 16-bit elements if rows may begin in the middle
/// of a word.
fn store_first(k: &mut Builder, to: Global, chunk: [R32; 4], bytes: u32, mode: CopyMode) {
    for (i, word) in (0..bytes.div_ceil(4)).zip(chunk) {
        let at = to.at(4 * i64::from(i));
        let left = bytes - 4 * i;
        if left >= 4 && mode != CopyMode::Elements {
            k.st(at, word);
            continue;
        }
        for (j, element) in (0..left.min(4) / 2).zip(k.split16(word)) {
            k.st(at.at(2 * i64::from(j)), element);
        }
    }
}
