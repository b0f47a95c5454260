//! Copies between global and shared memory by the threads of a CTA, with `cp.async` where rows are aligned.

use ptx::{Builder, CmpOp, Global, Pointer, Pred, R16, R32, Shared};

use crate::Threads;
use crate::TileLayout;
use crate::layout::CHUNK_BYTES;

/// How tiles are copied from global to shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CopyMode {
    /// `cp.async` of 16 bytes: needs every row to begin at a multiple of 16 bytes.
    Async16,
    /// Loads of single elements and stores to shared memory: any alignment, much slower.
    Elements,
}

/// Copies tiles of one layout from global to shared memory with all threads of the CTA, or back with the
/// lanes of one warp.
///
/// A thread keeps one chunk column and steps down the rows, so all its addresses are constant offsets from
/// one pointer. The number of lanes per row is a power of two: with rows of 10 chunks, for example, 6 of 16
/// lanes are idle.
#[derive(Clone, Debug)]
pub struct TileCopy {
    layout: TileLayout,
    mode: CopyMode,
    /// Bytes from one row to the next in global memory.
    row_bytes: i64,
    /// The first row and the chunk that the thread copies.
    row: R32,
    chunk: R32,
    /// Rows between two successive copies of a thread.
    step: u32,
    /// Byte offsets in the tile of the thread's first rows, for one period of the swizzle.
    offsets: Vec<R32>,
    /// Whether the thread has a chunk to copy; `None` where every thread has one.
    active: Option<Pred>,
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

    /// Copies by the 32 lanes of a warp. Each warp copies a tile of its own.
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
        let lanes = layout.chunks.next_power_of_two();
        let step = (count / lanes).max(1);
        let row = k.shr_u(index, lanes.trailing_zeros());
        let chunk = k.and(index, lanes - 1);
        let active = (lanes != layout.chunks).then(|| k.setp_u(CmpOp::Lt, chunk, layout.chunks));
        let period = layout.period();
        let phases = (1..=period).find(|n| (n * step).is_multiple_of(period)).unwrap_or(period);
        let offsets = (0..phases)
            .map(|phase| {
                let row = if phase == 0 { row } else { k.add(row, phase * step) };
                layout.emit_offset(k, row, chunk)
            })
            .collect();
        TileCopy { layout, mode, row_bytes, row, chunk, step, offsets, active }
    }

    /// The thread's pointer to its first chunk of the tile that begins at row `first` of `tensor`.
    pub fn start(&self, k: &mut Builder, tensor: Global, first: R32) -> Global {
        let row = k.add(first, self.row);
        let wide = k.zext(row);
        let rows = k.mad(wide, self.row_bytes, tensor.base);
        Global { base: k.mad_wide_u(self.chunk, CHUNK_BYTES, rows), offset: tensor.offset }
    }

    /// Copies the tile at the thread's pointer `from` to `to`. Rows at or beyond `limit` (signed, counted
    /// from the tile's first row) are not read; they are filled with zeros. `None` means that all rows exist.
    pub fn load(&self, k: &mut Builder, to: Shared, from: Global, limit: Option<R32>) {
        let places = self.places(k, to);
        let left: Option<R32> = limit.map(|limit| k.sub(limit, self.row));
        for (pass, first) in self.passes() {
            let (to, from) = (self.place(&places, pass), self.source(k, from, first));
            let copies = self.copies(k, first);
            let exists = left.map(|left| k.setp_s(CmpOp::Gt, left, first));
            match self.mode {
                CopyMode::Async16 => copy_async(k, to, from, copies, exists),
                CopyMode::Elements => copy_elements(k, to, from, copies, exists),
            }
        }
    }

    /// Copies rows from the tile at `from` to the thread's pointer `to`, up to row `limit`.
    pub fn store(&self, k: &mut Builder, from: Shared, to: Global, limit: Option<R32>) {
        let places = self.places(k, from);
        let left: Option<R32> = limit.map(|limit| k.sub(limit, self.row));
        for (pass, first) in self.passes() {
            let (from, to) = (self.place(&places, pass), self.source(k, to, first));
            let copies = self.copies(k, first);
            let wanted = match (left, copies) {
                (Some(left), Some(copies)) => Some(k.setp_s_and(CmpOp::Gt, left, first, copies)),
                (Some(left), None) => Some(k.setp_s(CmpOp::Gt, left, first)),
                (None, copies) => copies,
            };
            let store = |k: &mut Builder| {
                let chunk: [R32; 4] = k.ld_vec(from);
                match self.mode {
                    CopyMode::Async16 => k.st_vec(to, chunk),
                    CopyMode::Elements => store_elements(k, to, chunk),
                }
            };
            match wanted {
                Some(wanted) => k.guarded(wanted, store),
                None => store(k),
            }
        }
    }

    /// The thread's copies: index and row, counted from the thread's first row.
    fn passes(&self) -> impl Iterator<Item = (usize, u32)> + use<> {
        (0..self.layout.rows).step_by(self.step as usize).enumerate()
    }

    fn places(&self, k: &mut Builder, tile: Shared) -> Vec<Shared> {
        self.offsets.iter().map(|&o| Shared { base: k.add(tile.base, o), offset: tile.offset }).collect()
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
    fn copies(&self, k: &mut Builder, first: u32) -> Option<Pred> {
        let rows_left = self.layout.rows - first;
        match self.active {
            active if rows_left >= self.step => active,
            Some(active) => Some(k.setp_u_and(CmpOp::Lt, self.row, rows_left, active)),
            None => Some(k.setp_u(CmpOp::Lt, self.row, rows_left)),
        }
    }
}

fn copy_async(k: &mut Builder, to: Shared, from: Global, copies: Option<Pred>, exists: Option<Pred>) {
    let bytes: Option<R32> = exists.map(|exists| k.selp(CHUNK_BYTES, 0, exists));
    let copy = |k: &mut Builder| match bytes {
        Some(bytes) => k.cp_async16_zfill(to, from, bytes),
        None => k.cp_async16(to, from),
    };
    match copies {
        Some(copies) => k.guarded(copies, copy),
        None => copy(k),
    }
}

fn copy_elements(k: &mut Builder, to: Shared, from: Global, copies: Option<Pred>, exists: Option<Pred>) {
    let elements: [R16; 8] = std::array::from_fn(|_| k.mov(0));
    let load = |k: &mut Builder| {
        for (i, element) in elements.into_iter().enumerate() {
            k.ld_to(element, from.at(2 * i as i64));
        }
    };
    // Idle threads and rows beyond the end keep the zeros. An idle thread does not store them.
    let wanted = match (copies, exists) {
        (Some(copies), Some(exists)) => Some(k.and_pred(copies, exists)),
        (one, other) => one.or(other),
    };
    match wanted {
        Some(wanted) => k.guarded(wanted, load),
        None => load(k),
    }
    let chunk: [R32; 4] = std::array::from_fn(|i| k.join16(elements[2 * i], elements[2 * i + 1]));
    match copies {
        Some(copies) => k.guarded(copies, |k| k.st_vec(to, chunk)),
        None => k.st_vec(to, chunk),
    }
}

fn store_elements(k: &mut Builder, to: Global, chunk: [R32; 4]) {
    for (i, pair) in chunk.into_iter().enumerate() {
        for (j, element) in k.split16(pair).into_iter().enumerate() {
            k.st(to.at(4 * i as i64 + 2 * j as i64), element);
        }
    }
}
