//! `minimal`: one query row per CTA; 2870 µs on the authors' L4.
//!
//! What the authors believed: the kernel is a correct but naive start, "simple, fully parallel within block",
//! and only its grid is wasteful. What was really wrong: each CTA reads all keys and values of its head for a
//! single row, so no data is reused. 64 of 128 threads read one key each, directly from global memory and one
//! half (2 bytes) at a time, so that 32 lanes access 32 different rows. All 128 threads scan all 64 scores
//! for the same maximum and the same sum. Each of the 64 threads that weight values computes every
//! exponential again, with an accurate `expf`: 192 exponentials for each score in all. What the emulator
//! shows: 32 sectors per request in the score loop, and most issue slots in the two loops over exponentials.
//!
//! The structure follows the kernel that the authors published and timed, compiled without fast math. The
//! query and the sums of the output are f32 in shared memory, to which the sum of a tile is added atomically.

use check::launchfile::Bound;
use kernels::Arch;
use problem::Problem;
use ptx::{Builder, CmpOp, F32, Pred, Shared, Violations};

use super::RungKernel;
use super::common::{
    self, ALIGN, Array, Cta, DIM, KEYS, Math, ROW_BYTES, Tile, dot_with_global, load_half, scale_in_place,
    serial_max, serial_sum, store_half, weigh,
};

const THREADS: u32 = 128;
const MATH: Math = Math::Accurate;

pub(super) fn emit(problem: &Problem, arch: &Arch) -> Result<Bound, Violations> {
    common::kernel(problem, arch, RungKernel::Minimal, 1, THREADS, |k, cta| {
        let row = Row::new(k, cta);
        cta.for_each_tile(k, |k, tile| {
            row.score(k, cta, tile);
            k.bar_sync();
            row.update(k, cta, tile);
            k.bar_sync();
        });
        row.store(k, cta);
    })
}

/// The CTA's row. Every thread keeps the maximum and the sum.
struct Row {
    query: Shared,
    scores: Shared,
    output: Shared,
    has_column: Pred,
    max: F32,
    sum: F32,
}

impl Row {
    fn new(k: &mut Builder, cta: &Cta) -> Row {
        let [query, output, scores] = [("query", DIM), ("output", DIM), ("scores", KEYS)]
            .map(|(name, n)| k.shared_array(name, ALIGN, 4 * n));
        let has_column = k.setp_u(CmpOp::Lt, cta.thread, DIM);
        k.if_(has_column, |k| {
            let (from, to) = (cta.q.element(k, cta.thread, 2), query.element(k, cta.thread, 4));
            let element = load_half(k, from);
            k.st(to, element);
        });
        k.bar_sync();
        k.if_(has_column, |k| {
            let (at, zero) = (output.element(k, cta.thread, 4), k.mov(0.0f32));
            k.st::<F32, _>(at, zero);
        });
        k.bar_sync();
        Row { query, scores, output, has_column, max: k.mov(f32::MIN), sum: k.mov(0.0f32) }
    }

    fn score(&self, k: &mut Builder, cta: &Cta, tile: Tile) {
        cta.strided(k, tile.keys, |k, column| {
            let key = k.add(tile.first, column);
            let key = cta.keys.element(k, key, ROW_BYTES);
            let sum = dot_with_global(k, self.query, key);
            let score: F32 = k.mul(sum, cta.scale);
            let to = self.scores.element(k, column, 4);
            k.st(to, score);
        });
    }

    fn update(&self, k: &mut Builder, cta: &Cta, tile: Tile) {
        let largest = serial_max(k, self.scores, tile.keys, self.max);
        let rescale = MATH.exp_difference(k, self.max, largest);
        let before: F32 = k.mul(self.sum, rescale);
        let sum = serial_sum(k, MATH, self.scores, tile.keys, [largest, before]);
        cta.strided(k, DIM, |k, d| {
            let at = self.output.element(k, d, 4);
            scale_in_place(k, at, rescale);
        });
        k.bar_sync();
        cta.strided(k, DIM, |k, d| {
            let values = cta.values.element(k, tile.first, ROW_BYTES);
            let column = values.element(k, d, 2);
            let total = weigh(k, MATH, self.scores, tile.keys, (largest, column));
            let at = self.output.element(k, d, 4);
            k.red_add(at, total);
        });
        k.mov_to(self.max, largest);
        k.mov_to(self.sum, sum);
    }

    fn store(&self, k: &mut Builder, cta: &Cta) {
        k.if_(self.has_column, |k| {
            let inverse = MATH.inverse_or_zero(k, self.sum);
            let (at, to) = (self.output.element(k, cta.thread, 4), cta.out.element(k, cta.thread, 2));
            let output: F32 = k.ld(at);
            let result: F32 = k.mul(output, inverse);
            store_half(k, to, result);
        });
    }
}
