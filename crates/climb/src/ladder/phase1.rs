//! `phase1`: 16 query rows per CTA; 3652 µs on the authors' L4, slower than the 2870 µs of the kernel that it
//! should improve.
//!
//! What the authors believed: fewer CTAs with shared tiles must be faster, and warp reductions had "caused
//! NaN" for unknown reasons, so one thread reduces. What was really wrong: for each row, 127 threads wait
//! while thread 0 scans 64 scores twice, once for the maximum and once for the sum and its exponentials. The
//! tiling saves nothing: keys and values are read from global memory again for every row, one half at a time,
//! by half of the threads, and with 32 CTAs per head there are fewer warps to hide the latency. Each of the
//! 64 threads that weight values computes the row's exponentials again. What the emulator shows: a serial
//! share that grows with the tile, four barriers per row, and 32 sectors per request in the score loop.
//!
//! The structure follows the kernel that the authors published and timed, compiled without fast math. Q,
//! scores and output are f32 in shared memory. Maxima and sums are arrays of 16 in every thread, which are
//! indexed at run time and therefore in local memory.

use check::launchfile::Bound;
use kernels::Arch;
use problem::Problem;
use ptx::{Builder, CmpOp, F32, Local, Pointer, Pred, R32, Shared, Violations};

use super::RungKernel;
use super::common::{
    self, ALIGN, Array, Cta, DIM, KEYS, Math, ROW_BYTES, Tile, add_in_place, dot_with_global, load_half,
    scale_in_place, serial_max, serial_sum, store_half, weigh,
};

/// Query rows of a CTA (`BLOCK_M`).
pub(super) const ROWS: u32 = 16;
pub(super) const THREADS: u32 = 128;
pub(super) const MATH: Math = Math::Accurate;

pub(super) fn emit(problem: &Problem, arch: &Arch) -> Result<Bound, Violations> {
    common::kernel(problem, arch, RungKernel::Phase1, ROWS, THREADS, |k, cta| {
        let serial = Serial::new(k, cta);
        body(k, cta, |k, row| serial.update(k, row));
    })
}

/// The result of reducing a row, in every thread.
pub(super) struct Reduced {
    pub largest: F32,
    pub sum: F32,
}

/// The present row of the loop over rows.
pub(super) struct Turn<'a> {
    pub cta: &'a Cta,
    pub tile: Tile,
    /// The row's scores and output.
    pub scores: Shared,
    pub output: Shared,
    /// The row's maximum and sum before the tile.
    pub state: [Local; 2],
}

impl Turn<'_> {
    /// The factor that rescales the previous output.
    pub(super) fn rescale(&self, k: &mut Builder, largest: F32) -> F32 {
        let before = k.ld(self.state[0]);
        let rescale = MATH.exp_difference(k, before, largest);
        self.cta.strided(k, DIM, |k, d| {
            let at = self.output.element(k, d, 4);
            scale_in_place(k, at, rescale);
        });
        rescale
    }
}

/// The kernel around `reduce`, which computes a row's maximum, rescales its output and computes its sum.
pub(super) fn body(k: &mut Builder, cta: &Cta, reduce: impl FnOnce(&mut Builder, &Turn) -> Reduced) {
    let rows = Rows::new(k, cta);
    cta.for_each_tile(k, |k, tile| {
        rows.score(k, cta, tile);
        k.bar_sync();
        k.for_range(0, cta.rows, 1, |k, row| {
            let [scores, output] = [rows.scores, rows.output].map(|array| array.element(k, row, 4 * KEYS));
            let state = rows.state.map(|array| array.element(k, row, 4));
            let turn = Turn { cta, tile, scores, output, state };
            let Reduced { largest, sum } = reduce(k, &turn);
            k.bar_sync();
            cta.strided(k, DIM, |k, d| {
                let values = cta.values.element(k, tile.first, ROW_BYTES);
                let column = values.element(k, d, 2);
                let total = weigh(k, MATH, scores, tile.keys, (largest, column));
                let at = output.element(k, d, 4);
                add_in_place(k, at, total);
            });
            k.bar_sync();
            k.st(state[0], largest);
            k.st(state[1], sum);
        });
    });
    rows.store(k, cta);
}

struct Rows {
    query: Shared,
    scores: Shared,
    output: Shared,
    /// `m[16]` and `l[16]` of this thread.
    state: [Local; 2],
}

impl Rows {
    fn new(k: &mut Builder, cta: &Cta) -> Rows {
        let [query, scores, output] =
            ["query", "scores", "output"].map(|name| k.shared_array(name, ALIGN, 4 * ROWS * DIM));
        k.for_range(0, cta.rows, 1, |k, row| {
            let (from, to) = (cta.q.element(k, row, ROW_BYTES), query.element(k, row, 4 * DIM));
            cta.strided(k, DIM, |k, d| {
                let (from, to) = (from.element(k, d, 2), to.element(k, d, 4));
                let element = load_half(k, from);
                k.st(to, element);
            });
        });
        let zero: F32 = k.mov(0.0f32);
        k.for_range(0, cta.rows, 1, |k, row| {
            let to = output.element(k, row, 4 * DIM);
            cta.strided(k, DIM, |k, d| {
                let to = to.element(k, d, 4);
                k.st(to, zero);
            });
        });
        k.bar_sync();
        let state = [("maxima", f32::MIN), ("sums", 0.0)].map(|(name, value)| {
            let array = k.local_array(name, 16, 4 * ROWS);
            let value: F32 = k.mov(value);
            (0..i64::from(ROWS / 4)).for_each(|four| k.st_vec(array.at(16 * four), [value; 4]));
            array
        });
        Rows { query, scores, output, state }
    }

    /// Each key's row is read once for each of the 16 queries.
    fn score(&self, k: &mut Builder, cta: &Cta, tile: Tile) {
        k.for_range(0, cta.rows, 1, |k, row| {
            let (query, scores) =
                (self.query.element(k, row, 4 * DIM), self.scores.element(k, row, 4 * KEYS));
            cta.strided(k, tile.keys, |k, column| {
                let key = k.add(tile.first, column);
                let key = cta.keys.element(k, key, ROW_BYTES);
                let sum = dot_with_global(k, query, key);
                let score: F32 = k.mul(sum, cta.scale);
                let to = scores.element(k, column, 4);
                k.st(to, score);
            });
        });
    }

    fn store(&self, k: &mut Builder, cta: &Cta) {
        k.for_range(0, cta.rows, 1, |k, row| {
            let (from, to) = (self.output.element(k, row, 4 * DIM), cta.out.element(k, row, ROW_BYTES));
            let sum = self.state[1].element(k, row, 4);
            cta.strided(k, DIM, |k, d| {
                let sum = k.ld(sum);
                let inverse = MATH.inverse_or_zero(k, sum);
                let (from, to) = (from.element(k, d, 4), to.element(k, d, 2));
                let output: F32 = k.ld(from);
                let result: F32 = k.mul(output, inverse);
                store_half(k, to, result);
            });
        });
    }
}

/// Thread 0 reduces and broadcasts the result through shared memory and barriers.
struct Serial {
    first: Pred,
    largest: Shared,
    sum: Shared,
}

impl Serial {
    fn new(k: &mut Builder, cta: &Cta) -> Serial {
        let [largest, sum] = ["largest", "sum"].map(|name| k.shared_array(name, 4, 4));
        Serial { first: k.setp_u(CmpOp::Eq, cta.thread, 0), largest, sum }
    }

    fn update(&self, k: &mut Builder, row: &Turn) -> Reduced {
        let keys: R32 = row.tile.keys;
        k.if_(self.first, |k| {
            let before = k.ld(row.state[0]);
            let largest = serial_max(k, row.scores, keys, before);
            k.st(self.largest, largest);
        });
        k.bar_sync();
        let largest = k.ld(self.largest);
        let rescale = row.rescale(k, largest);
        k.if_(self.first, |k| {
            let before: F32 = k.ld(row.state[1]);
            let before = k.mul(before, rescale);
            let sum = serial_sum(k, MATH, row.scores, keys, [largest, before]);
            k.st(self.sum, sum);
        });
        k.bar_sync();
        Reduced { largest, sum: k.ld(self.sum) }
    }
}
