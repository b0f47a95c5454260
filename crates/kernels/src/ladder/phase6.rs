//! `phase6_it1` and `phase6_it2`: 1844 and 1776 µs on the seeds' L4, where 500–600 had been forecast.
//!
//! What the seeds believed: register tiling, twice the threads and `uint4` loads would halve Phase 4's time; afterwards
//! they blamed registers, bank conflicts and barriers in general. What was really wrong: rows are still given out by
//! `for (row = tid; row < 32; row += 256)`, so 32 of 256 threads do softmax and output alone and seven warps wait; the
//! output is a serial 64 × 64 loop a thread; the warp reductions that were written are never called; and the mask is
//! causal while Phase 4's was not, with masked tiles computed all the same, so the two were never one comparison.
//! Iteration 1 gives each thread `m[32]`, `l[32]` and `O[32][64]`, 8448 bytes indexed at run time, which is local memory:
//! 256 threads own a 2 MB array of which one row in 256 is used, and its lanes are 32 sectors apart. Iteration 2 moves
//! them to shared memory, where 32 lanes again walk 32 rows of one bank. What the emulator shows: one warp of eight in
//! most issue slots, local traffic at 32 sectors a request (it. 1), conflict degree 32 (it. 2).
//!
//! The seeds give arrays, sizes (sQ 4, sKV 8, sS 8, sO 8 KB), threads and vector widths. Chosen: scores by all threads,
//! `for (i = tid; i < 32 * 64; i += 256)`; keys and values share `sKV`; for each column d a sum over the 64 keys, added to
//! the accumulator once a tile; 256 threads in iteration 1 too.

use problem::Problem;
use ptx::{Builder, CmpOp, F32, Global, Half, Kernel, Local, Pointer, R32, Shared};

use super::RungPlan;
use super::common::{
    self, Cta, DIM, KEYS, ROW_BYTES, TILE_BYTES, dot, exp_difference, for_each_score, weigh_values,
};
use crate::Arch;

const ROWS: u32 = 32;
const THREADS: u32 = 256;

/// Where the accumulators live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Home {
    /// Iteration 1: private arrays for all 32 rows in each thread.
    Local,
    /// Iteration 2: one array of the CTA.
    Shared,
}

pub(super) fn emit(problem: &Problem, arch: &Arch, home: Home) -> Kernel {
    match home {
        Home::Local => common::kernel(problem, arch, RungPlan::Phase6It1, ROWS, THREADS, |k, cta| {
            let arrays = [("maxima", 4 * ROWS), ("sums", 4 * ROWS), ("output", 4 * ROWS * DIM)]
                .map(|(name, bytes)| k.local_array(name, 4, bytes));
            body(k, cta, &Accumulators(arrays));
        }),
        Home::Shared => common::kernel(problem, arch, RungPlan::Phase6It2, ROWS, THREADS, |k, cta| {
            let arrays = [("maxima", 4 * ROWS), ("sums", 4 * ROWS), ("output", 4 * ROWS * DIM)]
                .map(|(name, bytes)| k.shared_array(name, 4, bytes));
            body(k, cta, &Accumulators(arrays));
        }),
    }
}

/// An array indexed at run time.
trait Array: Pointer {
    /// Element `i`, of `size` bytes.
    fn element(self, k: &mut Builder, i: R32, size: u32) -> Self;
}

impl Array for Shared {
    fn element(self, k: &mut Builder, i: R32, size: u32) -> Shared {
        k.shared_index(self, i, size)
    }
}

impl Array for Local {
    fn element(self, k: &mut Builder, i: R32, size: u32) -> Local {
        Local { base: k.mad_wide_u(i, size, self.base), offset: self.offset }
    }
}

fn body<A: Array>(k: &mut Builder, cta: &Cta, accumulators: &Accumulators<A>) {
    let tiles = Tiles::new(k, cta);
    accumulators.clear(k, cta);
    cta.for_each_tile(k, |k, first| {
        tiles.load(k, cta.keys, cta, first);
        tiles.score(k, cta, first);
        k.bar_sync();
        tiles.load(k, cta.values, cta, first);
        accumulators.update(k, cta, &tiles);
        k.bar_sync();
    });
    accumulators.store(k, cta);
}

struct Tiles {
    q: Shared,
    /// Keys, then values.
    kv: Shared,
    scores: Shared,
}

impl Tiles {
    fn new(k: &mut Builder, cta: &Cta) -> Tiles {
        let q = k.shared_array("sQ", 16, ROWS * ROW_BYTES);
        let kv = k.shared_array("sKV", 16, TILE_BYTES);
        let scores = k.shared_array("sS", 4, ROWS * KEYS * 4);
        cta.copy_uint4(k, cta.q, q, ROWS * DIM);
        Tiles { q, kv, scores }
    }

    fn load(&self, k: &mut Builder, from: Global, cta: &Cta, first: R32) {
        let from = k.index(from, first, ROW_BYTES);
        cta.copy_uint4(k, from, self.kv, KEYS * DIM);
        k.bar_sync();
    }

    /// Scores, with −∞ where the key comes after the query.
    fn score(&self, k: &mut Builder, cta: &Cta, first_key: R32) {
        k.for_range(cta.thread, ROWS * KEYS, THREADS, |k, i| {
            let (row, column): (R32, R32) = (k.shr_u(i, 6), k.and(i, 63));
            let (q, key) =
                (k.shared_index(self.q, row, ROW_BYTES), k.shared_index(self.kv, column, ROW_BYTES));
            let sum = dot(k, q, key);
            let score: F32 = k.mul(sum, cta.scale);
            let (row, key): (R32, R32) = (k.add(row, cta.first_row), k.add(column, first_key));
            let hidden = k.setp_u(CmpOp::Gt, key, row);
            let score: F32 = k.selp(f32::NEG_INFINITY, score, hidden);
            let to = k.shared_index(self.scores, i, 4);
            k.st(to, score);
        });
    }
}

/// `m[32]`, `l[32]`, `O[32][64]`.
struct Accumulators<A>([A; 3]);

impl<A: Array> Accumulators<A> {
    /// A thread clears the rows it will use.
    fn clear(&self, k: &mut Builder, cta: &Cta) {
        let [maxima, sums, output] = self.0;
        k.for_range(cta.thread, ROWS, THREADS, |k, row| {
            for (array, value) in [(maxima, f32::NEG_INFINITY), (sums, 0.0)] {
                let (at, value) = (array.element(k, row, 4), k.mov(value));
                k.st::<F32, _>(at, value);
            }
            let output = output.element(k, row, 4 * DIM);
            let zero: F32 = k.mov(0.0f32);
            k.for_range(0, DIM, 4, |k, d| {
                let at = output.element(k, d, 4);
                (0..4).for_each(|u| k.st(at.at(4 * u), zero));
            });
        });
    }

    /// Online softmax and output of a tile, all by the row's one thread.
    fn update(&self, k: &mut Builder, cta: &Cta, tiles: &Tiles) {
        let [maxima, sums, output] = self.0;
        k.for_range(cta.thread, ROWS, THREADS, |k, row| {
            let scores = k.shared_index(tiles.scores, row, KEYS * 4);
            let (max_at, sum_at) = (maxima.element(k, row, 4), sums.element(k, row, 4));
            let max: F32 = k.ld(max_at);
            let largest: F32 = k.mov(max);
            for_each_score(k, scores, |k, at| {
                let score: F32 = k.ld(at);
                k.max_to(largest, largest, score);
            });
            let rescale = exp_difference(k, max, largest);
            let before: F32 = k.ld(sum_at);
            let sum: F32 = k.mul(before, rescale);
            for_each_score(k, scores, |k, at| {
                let score: F32 = k.ld(at);
                let p = exp_difference(k, score, largest);
                k.st(at, p);
                k.add_to(sum, sum, p);
            });
            k.st(max_at, largest);
            k.st(sum_at, sum);
            let output = output.element(k, row, 4 * DIM);
            k.for_range(0, DIM, 1, |k, d| {
                let (at, column) = (output.element(k, d, 4), k.shared_index(tiles.kv, d, 2));
                let before: F32 = k.ld(at);
                let total: F32 = k.mul(before, rescale);
                weigh_values(k, total, scores, column, |_, p| p);
                k.st(at, total);
            });
        });
    }

    /// `O / l`, eight halves a store.
    fn store(&self, k: &mut Builder, cta: &Cta) {
        let [_, sums, output] = self.0;
        k.for_range(cta.thread, ROWS, THREADS, |k, row| {
            let at = sums.element(k, row, 4);
            let sum: F32 = k.ld(at);
            let output = output.element(k, row, 4 * DIM);
            let to = k.index(cta.out, row, ROW_BYTES);
            k.for_range(0, DIM, 8, |k, d| {
                let (from, to) = (output.element(k, d, 4), k.index(to, d, 2));
                let pairs: [R32; 4] = std::array::from_fn(|pair| {
                    let halves: [F32; 2] = [0, 1].map(|half| {
                        let element: F32 = k.ld(from.at(4 * (2 * pair as i64 + half)));
                        k.div(element, sum)
                    });
                    k.pack(Half::F16, halves[0], halves[1])
                });
                k.st_vec(to, pairs);
            });
        });
    }
}
