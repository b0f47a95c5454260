//! `phase6_it1` and `phase6_it2`: 1844 and 1776 µs on the authors' L4, where they had forecast 500–600.
//!
//! What the authors believed: register tiling, twice the threads and `uint4` loads would halve Phase 4's
//! time; afterwards they blamed registers, bank conflicts and barriers in general. What was really wrong:
//! every loop assigns rows by `for (row = tid; row < 32; row += 256)`, so one warp computes scores, softmax
//! and output, with one row per thread, while seven warps wait. Its lanes read 32 unpadded rows, in shared
//! and in global memory. The warp reductions that were written are never called. The mask is causal while
//! Phase 4's was not, and masked tiles are computed anyway, so the two kernels were never comparable.
//! Iteration 1 gives each thread `m[32]`, `l[32]` and `O[32][64]`: 8448 bytes that are indexed at run time
//! and therefore in local memory. Only one of the 32 rows is used, and the lanes of a request are 8 KB apart.
//! Iteration 2 moves the arrays to shared memory, where 32 lanes again access 32 rows of one bank. What the
//! emulator shows: one of eight warps active in most issue slots, local traffic at 32 sectors per request
//! (iteration 1), conflict degree 32 (both).
//!
//! The structure follows the kernels that the authors published and timed, compiled with fast math: keys,
//! then values in one tile; scores of four keys at a time, so that a query's row is read once for four keys;
//! eight output columns at a time, each a loop over the keys; and, to avoid stores of single halves, an array
//! of 64 halves in local memory before the vector stores.

use check::launchfile::Bound;
use kernels::Arch;
use problem::Problem;
use ptx::{Builder, CmpOp, F32, Global, Half, Pointer, R16, R32, Shared, Violations};

use super::RungKernel;
use super::common::{
    self, ALIGN, Array, Cta, DIM, KEYS, Math, ROW_BYTES, TILE_BYTES, Tile, add_in_place, load_half,
    scale_in_place, store_half,
};

const ROWS: u32 = 32;
const THREADS: u32 = 256;
const MATH: Math = Math::Fast;

/// Where the accumulators are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    /// Iteration 1: private arrays for all 32 rows in each thread.
    Local,
    /// Iteration 2: one array of the CTA.
    Shared,
}

pub(super) fn emit(problem: &Problem, arch: &Arch, home: Home) -> Result<Bound, Violations> {
    const ARRAYS: [(&str, u32); 3] = [("maxima", 4 * ROWS), ("sums", 4 * ROWS), ("output", 4 * ROWS * DIM)];
    match home {
        Home::Local => common::kernel(problem, arch, RungKernel::Phase6It1, ROWS, THREADS, |k, cta| {
            let tiles = Tiles::new(k);
            let arrays = ARRAYS.map(|(name, bytes)| k.local_array(name, 16, bytes));
            body(k, cta, &tiles, &Accumulators(arrays));
        }),
        Home::Shared => common::kernel(problem, arch, RungKernel::Phase6It2, ROWS, THREADS, |k, cta| {
            let tiles = Tiles::new(k);
            let arrays = ARRAYS.map(|(name, bytes)| k.shared_array(name, ALIGN, bytes));
            body(k, cta, &tiles, &Accumulators(arrays));
        }),
    }
}

fn body<A: Array>(k: &mut Builder, cta: &Cta, tiles: &Tiles, accumulators: &Accumulators<A>) {
    k.max_threads(THREADS);
    k.min_ctas_per_sm(2);
    copy_rows(k, cta, cta.rows, cta.q, tiles.query);
    k.bar_sync();
    accumulators.clear(k, cta);
    k.bar_sync();
    cta.for_each_tile(k, |k, tile| {
        let [keys, values] = [cta.keys, cta.values].map(|tensor| tensor.element(k, tile.first, ROW_BYTES));
        copy_rows(k, cta, tile.keys, keys, tiles.keys_then_values);
        k.bar_sync();
        tiles.score(k, cta, tile);
        k.bar_sync();
        accumulators.update(k, cta, tiles, tile);
        k.bar_sync();
        copy_rows(k, cta, tile.keys, values, tiles.keys_then_values);
        k.bar_sync();
        accumulators.weigh(k, cta, tiles, tile);
        k.bar_sync();
    });
    accumulators.store(k, cta);
}

/// Each thread copies one row of 128 bytes, 16 bytes at a time: the accesses are wide, but 32 lanes access 32
/// rows.
fn copy_rows(k: &mut Builder, cta: &Cta, rows: R32, from: Global, to: Shared) {
    cta.strided(k, rows, |k, row| {
        let (from, to) = (from.element(k, row, ROW_BYTES), to.element(k, row, ROW_BYTES));
        for bytes in (0..i64::from(ROW_BYTES)).step_by(16) {
            let words: [R32; 4] = k.ld_vec(from.at(bytes));
            k.st_vec(to.at(bytes), words);
        }
    });
}

struct Tiles {
    query: Shared,
    keys_then_values: Shared,
    scores: Shared,
}

impl Tiles {
    fn new(k: &mut Builder) -> Tiles {
        let query = k.shared_array("query", ALIGN, ROWS * ROW_BYTES);
        let keys_then_values = k.shared_array("keys_then_values", ALIGN, TILE_BYTES);
        let scores = k.shared_array("scores", ALIGN, ROWS * KEYS * 4);
        Tiles { query, keys_then_values, scores }
    }

    /// A thread computes the scores of its row; −3.4 · 10³⁸ if the key comes after the query.
    fn score(&self, k: &mut Builder, cta: &Cta, tile: Tile) {
        cta.strided(k, cta.rows, |k, row| {
            let scores = self.scores.element(k, row, 4 * KEYS);
            let query = self.query.element(k, row, ROW_BYTES);
            let position: R32 = k.add(cta.first_row, row);
            by_fours(k, tile, |k, column| {
                let keys = self.keys_then_values.element(k, column, ROW_BYTES);
                let to = scores.element(k, column, 4);
                let mut query = RowOfHalves { at: query, loaded: Vec::new() };
                for u in 0..4 {
                    let sum = query.dot(k, keys.at(i64::from(ROW_BYTES) * u));
                    let score: F32 = k.mul(sum, cta.scale);
                    let column: R32 = k.add(column, u as u32);
                    let key: R32 = k.add(tile.first, column);
                    let hidden = k.setp_s(CmpOp::Gt, key, position);
                    let score: F32 = k.selp(f32::MIN, score, hidden);
                    k.st(to.at(4 * u), score);
                }
            });
        });
    }
}

/// A row of shared memory that is kept in registers after the first read.
struct RowOfHalves {
    at: Shared,
    loaded: Vec<R16>,
}

impl RowOfHalves {
    fn dot(&mut self, k: &mut Builder, other: Shared) -> F32 {
        let sum: F32 = k.mov(0.0f32);
        for d in 0..DIM as usize {
            let bytes = 2 * d as i64;
            if self.loaded.len() == d {
                self.loaded.push(k.ld(self.at.at(bytes)));
            }
            let (a, b) = (k.to_f32(Half::F16, self.loaded[d]), load_half(k, other.at(bytes)));
            k.mad_to(sum, a, b, sum);
        }
        sum
    }
}

/// `m[32]`, `l[32]`, `O[32][64]`.
struct Accumulators<A>([A; 3]);

impl<A: Array> Accumulators<A> {
    /// For each of the thread's rows, with the addresses of its maximum, its sum and its output.
    fn for_each_row(&self, k: &mut Builder, cta: &Cta, body: impl FnOnce(&mut Builder, R32, [A; 3])) {
        let [maxima, sums, output] = self.0;
        cta.strided(k, cta.rows, |k, row| {
            let places =
                [(maxima, 4), (sums, 4), (output, 4 * DIM)].map(|(array, size)| array.element(k, row, size));
            body(k, row, places);
        });
    }

    /// Each thread clears the rows that it will use.
    fn clear(&self, k: &mut Builder, cta: &Cta) {
        let (lowest, zero): (F32, F32) = (k.mov(f32::MIN), k.mov(0.0f32));
        self.for_each_row(k, cta, |k, _, [max, sum, output]| {
            k.st(max, lowest);
            k.st(sum, zero);
            by_eights(k, output, |k, _, at| (0..8).for_each(|u| k.st(at.at(4 * u), zero)));
        });
    }

    /// The row's only thread computes the maximum, the rescaling, the exponentials (in place of the scores)
    /// and the sum.
    fn update(&self, k: &mut Builder, cta: &Cta, tiles: &Tiles, tile: Tile) {
        self.for_each_row(k, cta, |k, row, [max_at, sum_at, output]| {
            let scores = tiles.scores.element(k, row, 4 * KEYS);
            let largest: F32 = k.ld(scores);
            for_each_score(k, scores, tile, |k, at| {
                let score: F32 = k.ld(at);
                k.max_to(largest, largest, score);
            });
            let before: F32 = k.ld(max_at);
            k.max_to(largest, largest, before);
            let rescale = MATH.exp_difference(k, before, largest);
            scale_in_place(k, sum_at, rescale);
            by_eights(k, output, |k, _, at| (0..8).for_each(|u| scale_in_place(k, at.at(4 * u), rescale)));
            let sum: F32 = k.mov(0.0f32);
            for_each_score(k, scores, tile, |k, at| {
                let score: F32 = k.ld(at);
                let p = MATH.exp_difference(k, score, largest);
                k.st(at, p);
                k.add_to(sum, sum, p);
            });
            add_in_place(k, sum_at, sum);
            k.st(max_at, largest);
        });
    }

    /// `O += P V` by the row's only thread.
    fn weigh(&self, k: &mut Builder, cta: &Cta, tiles: &Tiles, tile: Tile) {
        self.for_each_row(k, cta, |k, row, [_, _, output]| {
            let scores = tiles.scores.element(k, row, 4 * KEYS);
            by_eights(k, output, |k, d, output| {
                let columns = tiles.keys_then_values.element(k, d, 2);
                for u in 0..8 {
                    let total = dot_with_column(k, scores, columns.at(2 * u), tile);
                    add_in_place(k, output.at(4 * u), total);
                }
            });
        });
    }

    /// `O / l` into an array of halves, then stores of eight halves.
    fn store(&self, k: &mut Builder, cta: &Cta) {
        let halves = k.local_array("halves", 16, ROW_BYTES);
        self.for_each_row(k, cta, |k, row, [_, sum, output]| {
            let sum: F32 = k.ld(sum);
            let inverse = MATH.inverse(k, sum);
            by_eights(k, output, |k, d, from| {
                let to = halves.element(k, d, 2);
                for u in 0..8 {
                    let element: F32 = k.ld(from.at(4 * u));
                    let result: F32 = k.mul(element, inverse);
                    store_half(k, to.at(2 * u), result);
                }
            });
            let to = cta.out.element(k, row, ROW_BYTES);
            for bytes in (0..i64::from(ROW_BYTES)).step_by(16) {
                let words: [R32; 4] = k.ld_vec(halves.at(bytes));
                k.st_vec(to.at(bytes), words);
            }
        });
    }
}

/// `for (d = 0; d < 64; d++)` over a row of f32, unrolled only by eight. Passes `d` and the address of eight
/// elements.
fn by_eights<A: Array>(k: &mut Builder, row: A, body: impl FnOnce(&mut Builder, R32, A)) {
    k.for_range(0, DIM, 8, |k, d| {
        k.nounroll();
        let at = row.element(k, d, 4);
        body(k, d, at);
    });
}

/// `for (c = 0; c < keys; c++)`, unrolled only by four, as the authors state.
fn by_fours(k: &mut Builder, tile: Tile, body: impl FnOnce(&mut Builder, R32)) {
    k.for_range(0, tile.keys, 4, |k, c| {
        k.nounroll();
        body(k, c);
    });
}

/// Each score of a row.
fn for_each_score(k: &mut Builder, row: Shared, tile: Tile, mut body: impl FnMut(&mut Builder, Shared)) {
    by_fours(k, tile, |k, c| {
        let at = row.element(k, c, 4);
        (0..4).for_each(|u| body(k, at.at(4 * u)));
    });
}

/// `for (c = 0; c < keys; c++) sum += p[c] * v[c]`, unrolled by four, where `v` is a column of halves with a
/// stride of one row. As in nvcc's code, a pointer moves along the weights, in the middle of each group of
/// four: ptxas then knows an alignment of 8 bytes instead of 16, and reads the weights in pairs.
fn dot_with_column(k: &mut Builder, weights: Shared, column: Shared, tile: Tile) -> F32 {
    let sum: F32 = k.mov(0.0f32);
    let p = k.shared_advance(weights, 8);
    by_fours(k, tile, |k, c| {
        let v = column.element(k, c, ROW_BYTES);
        for u in 0..4 {
            let weight: F32 = k.ld(p.at(4 * u - 8));
            let v = load_half(k, v.at(i64::from(ROW_BYTES) * u));
            k.mad_to(sum, weight, v, sum);
        }
        k.add_to(p.base, p.base, 16);
    });
    sum
}
