//! Transposes bytes through shared memory: 16-byte loads along the rows, 16-byte stores along the columns.

use ptx::{Builder, CmpOp, Global, Pointer, R32, Shared};

use crate::{column_of_byte, divide};

/// A tile of [`ByteTranspose::ROWS`] rows × `columns` bytes, which a CTA of [`ByteTranspose::THREADS`]
/// threads transposes.
///
/// In each group of 16, the rows are ordered as the columns of a rounded accumulator ([`column_of_byte`]).
/// The transposed tile is then the B operand of a product with that accumulator as A.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteTranspose {
    /// Columns, a multiple of 16.
    pub columns: u32,
}

/// Bytes of a load and of a store.
const CHUNK: u32 = 16;
/// Groups of 16 rows in a tile.
const GROUPS: u32 = ByteTranspose::ROWS / CHUNK;
/// Padding in bytes between groups of 16 rows in shared memory. With 16, the words that the lanes of a warp
/// read (4 from each of 8 groups) lie in 32 different banks.
const GAP: u32 = 16;

impl ByteTranspose {
    /// Rows of a tile.
    pub const ROWS: u32 = 128;
    /// Threads of the CTA.
    pub const THREADS: u32 = 128;

    /// Bytes of shared memory.
    pub const fn shared_bytes(self) -> u32 {
        ByteTranspose::ROWS * self.columns + GROUPS * GAP
    }

    /// Copies the tile to shared memory. `place` gives the address of a row, counted from the tile's first
    /// row; rows from `rows` on are filled with zeros. The caller must synchronise the CTA before the tile is
    /// read.
    pub fn load(
        self,
        k: &mut Builder,
        (shared, thread): (Shared, R32),
        rows: R32,
        place: impl Fn(&mut Builder, R32) -> Global,
    ) {
        let chunks = self.columns / CHUNK;
        let load = |k: &mut Builder, i: u32| {
            let index = k.add(thread, i * ByteTranspose::THREADS);
            let row = divide(k, index, chunks);
            let before = k.mul(row, chunks);
            let chunk = k.sub(index, before);
            let from = place(k, row);
            let from = k.index(from, chunk, CHUNK);
            let words: [R32; 4] = std::array::from_fn(|_| k.mov(0));
            let exists = k.setp_u(CmpOp::Lt, row, rows);
            k.guarded(exists, |k| k.ld_vec_to(words, from));
            let group = k.shr_u(row, 4);
            let to = k.shared_index(shared, index, CHUNK);
            (k.shared_index(to, group, GAP), words)
        };
        // All loads are issued before the first store waits for one.
        let loaded: Vec<(Shared, [R32; 4])> = (0..chunks).map(|i| load(k, i)).collect();
        for (to, words) in loaded {
            k.st_vec(to, words);
        }
    }

    /// Stores the tile transposed. `place` gives the address of a column of the tile, in which the tile's
    /// rows are contiguous. Groups of 16 rows that begin at `rows` or later are not stored.
    pub fn store(
        self,
        k: &mut Builder,
        (shared, thread): (Shared, R32),
        rows: R32,
        place: impl Fn(&mut Builder, R32) -> Global,
    ) {
        let group = k.and(thread, GROUPS - 1);
        let first_row = k.mul(group, CHUNK);
        let exists = k.setp_u(CmpOp::Lt, first_row, rows);
        // A word holds four columns of a row.
        let word = k.shr_u(thread, GROUPS.trailing_zeros());
        let words = self.columns / 4;
        let per_step = ByteTranspose::THREADS / GROUPS;
        for step in 0..words.div_ceil(per_step) {
            let word = k.add(word, step * per_step);
            let stores = if (step + 1) * per_step > words {
                k.setp_u_and(CmpOp::Lt, word, words, exists)
            } else {
                exists
            };
            k.if_(stores, |k| self.store_columns(k, shared, [group, word], &place));
        }
    }

    /// Stores four columns of 16 rows.
    fn store_columns(
        self,
        k: &mut Builder,
        shared: Shared,
        [group, word]: [R32; 2],
        place: &impl Fn(&mut Builder, R32) -> Global,
    ) {
        let from = k.shared_index(shared, group, CHUNK * self.columns + GAP);
        let from = k.shared_index(from, word, 4);
        let rows: Vec<R32> = (0..CHUNK).map(|row| k.ld(from.at(i64::from(row * self.columns)))).collect();
        let quads: [[R32; 4]; 4] = std::array::from_fn(|quad| {
            let row = |i: usize| rows[column_of_byte((4 * quad + i) as u32) as usize];
            transpose_quad(k, [row(0), row(1), row(2), row(3)])
        });
        let first = k.mul(word, 4);
        for column in 0..4 {
            let index = k.add(first, column as u32);
            let to = place(k, index);
            let to = k.index(to, group, CHUNK);
            k.st_vec(to, quads.map(|quad| quad[column]));
        }
    }
}

/// Transposes 4×4 bytes.
fn transpose_quad(k: &mut Builder, [a, b, c, d]: [R32; 4]) -> [R32; 4] {
    let [ab, cd] = [(a, b), (c, d)].map(|(x, y)| [k.prmt(x, y, 0x5140), k.prmt(x, y, 0x7362)]);
    let [even, odd] = [0x5410, 0x7632];
    [
        k.prmt(ab[0], cd[0], even),
        k.prmt(ab[0], cd[0], odd),
        k.prmt(ab[1], cd[1], even),
        k.prmt(ab[1], cd[1], odd),
    ]
}
