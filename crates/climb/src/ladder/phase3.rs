//! `phase3`: 32 query rows per CTA and four warps; 1634 µs on the authors' L4.
//!
//! What the authors believed: "better warp utilisation, 4 warps a block". What was really wrong: the score
//! loop assigns rows by `for (row = tid; row < 32; row += 128)`, so warp 0 computes all scores while three
//! warps wait at the barrier. Its 32 lanes read 32 unpadded rows, so each read of Q and each write of S is a
//! 32-way bank conflict. In the softmax each warp does have its own row, but its lane 0 reduces alone while
//! 31 lanes wait, and then all 32 lanes compute the same exponentials. Three barriers per row make the four
//! warps wait for each other, although their rows are independent. The kernel was faster because keys and
//! values now come from shared memory, loaded once per tile. What the emulator shows: one of four warps
//! active in the score loop with conflict degree 32, and one of 32 lanes active in the reductions.
//!
//! The structure follows the kernel that the authors published and timed, compiled without fast math: five
//! static arrays, tiles copied one half at a time, and maxima and sums of a warp's eight rows in arrays of
//! nine elements that are indexed at run time.

use check::launchfile::Bound;
use kernels::Arch;
use problem::Problem;
use ptx::{Builder, CmpOp, F32, Global, Local, Pointer, Pred, R16, R32, Shared, Violations};

use super::RungKernel;
use super::common::{
    self, ALIGN, Array, Cta, DIM, KEYS, Math, ROW_BYTES, TILE_BYTES, Tile, add_in_place, load_half,
    scale_in_place, serial_max, serial_sum, store_half, weigh,
};

/// Query rows of a CTA (`BLOCK_M`).
pub(super) const ROWS: u32 = 32;
pub(super) const THREADS: u32 = 128;
const WARPS: u32 = THREADS / 32;

pub(super) fn emit(problem: &Problem, arch: &Arch) -> Result<Bound, Violations> {
    common::kernel(problem, arch, RungKernel::Phase3, ROWS, THREADS, |k, cta| {
        let rows = WarpRows::new(k, cta, Math::Accurate);
        let lane_0 = k.setp_u(CmpOp::Eq, rows.lane, 0);
        cta.for_each_tile(k, |k, tile| {
            rows.load(k, cta, tile, copy_halves);
            k.bar_sync();
            rows.score(k, cta, tile);
            k.bar_sync();
            rows.for_each(k, cta, |k, row| {
                let reduced = reduce_serially(k, &row, tile, lane_0);
                row.weigh(k, tile, reduced);
                k.bar_sync();
                row.keep(k, reduced);
            });
        });
        rows.store(k, cta);
    })
}

/// `for (d = lane; d < 64; d += 32)`: copies keys and values one half at a time.
fn copy_halves(k: &mut Builder, lane: R32, from: [Global; 2], to: [Shared; 2]) {
    k.for_range(lane, DIM, 32, |k, d| {
        for (from, to) in from.into_iter().zip(to) {
            let (from, to) = (from.element(k, d, 2), to.element(k, d, 2));
            let half: R16 = k.ld(from);
            k.st(to, half);
        }
    });
}

fn reduce_serially(k: &mut Builder, row: &WarpRow, tile: Tile, lane_0: Pred) -> Reduced {
    k.if_(lane_0, |k| {
        let before = k.ld(row.state[0]);
        let largest = serial_max(k, row.scores, tile.keys, before);
        k.st(row.cells[0], largest);
    });
    k.bar_sync();
    let largest = k.ld(row.cells[0]);
    let rescale = row.rescale(k, largest);
    k.if_(lane_0, |k| {
        let before: F32 = k.ld(row.state[1]);
        let before = k.mul(before, rescale);
        let sum = serial_sum(k, row.math, row.scores, tile.keys, [largest, before]);
        k.st(row.cells[1], sum);
    });
    k.bar_sync();
    Reduced { largest, sum: k.ld(row.cells[1]) }
}

/// The tiles and the state of the warps' rows.
pub(super) struct WarpRows {
    math: Math,
    query: Shared,
    keys: Shared,
    values: Shared,
    scores: Shared,
    output: Shared,
    /// Two arrays with one cell per warp: the maximum and the sum of the warp's row.
    cells: [Shared; 2],
    /// Maximum and sum of the warp's rows, in each thread of the warp.
    state: [Local; 2],
    warp: R32,
    pub lane: R32,
}

/// The row that a warp currently processes.
pub(super) struct WarpRow {
    pub math: Math,
    pub lane: R32,
    pub scores: Shared,
    output: Shared,
    values: Shared,
    /// The warp's cells.
    pub cells: [Shared; 2],
    /// The row's maximum and sum before the tile.
    pub state: [Local; 2],
}

/// The result of reducing a row, in every lane.
#[derive(Clone, Copy)]
pub(super) struct Reduced {
    pub largest: F32,
    pub sum: F32,
}

impl WarpRows {
    /// Loads the queries to shared memory, clears the output, and ends with a barrier.
    pub(super) fn new(k: &mut Builder, cta: &Cta, math: Math) -> WarpRows {
        let query = k.shared_array("query", ALIGN, ROWS * ROW_BYTES);
        let [keys, values] = ["keys", "values"].map(|name| k.shared_array(name, ALIGN, TILE_BYTES));
        let [scores, output] = ["scores", "output"].map(|name| k.shared_array(name, ALIGN, 4 * ROWS * KEYS));
        let cells = ["largest", "sum"].map(|name| k.shared_array(name, ALIGN, 4 * WARPS));
        let (warp, lane) = cta.warp_and_lane(k);
        k.for_range(warp, cta.rows, WARPS, |k, row| {
            let (from, to) = (cta.q.element(k, row, ROW_BYTES), query.element(k, row, ROW_BYTES));
            k.for_range(lane, DIM, 32, |k, d| {
                let (from, to) = (from.element(k, d, 2), to.element(k, d, 2));
                let half: R16 = k.ld(from);
                k.st(to, half);
            });
        });
        let zero: F32 = k.mov(0.0f32);
        k.for_range(warp, ROWS, WARPS, |k, row| {
            let row = output.element(k, row, 4 * DIM);
            k.for_range(lane, DIM, 32, |k, d| {
                let at = row.element(k, d, 4);
                k.st(at, zero);
            });
        });
        k.bar_sync();
        let state = [("maxima", f32::MIN), ("sums", 0.0)].map(|(name, value)| {
            // One element more than the warp has rows, as in the original code.
            let array = k.local_array(name, 4, 4 * (ROWS / WARPS + 1));
            let value: F32 = k.mov(value);
            (0..=i64::from(ROWS / WARPS)).for_each(|i| k.st(array.at(4 * i), value));
            array
        });
        WarpRows { math, query, keys, values, scores, output, cells, state, warp, lane }
    }

    /// Loads the tile's keys and values, one row per warp; `copy` takes the lane and the two rows.
    pub(super) fn load(
        &self,
        k: &mut Builder,
        cta: &Cta,
        tile: Tile,
        copy: impl FnOnce(&mut Builder, R32, [Global; 2], [Shared; 2]),
    ) {
        k.for_range(self.warp, tile.keys, WARPS, |k, row| {
            let key = k.add(tile.first, row);
            let from = [cta.keys, cta.values].map(|tensor| tensor.element(k, key, ROW_BYTES));
            let to = [self.keys, self.values].map(|tile| tile.element(k, row, ROW_BYTES));
            copy(k, self.lane, from, to);
        });
    }

    /// `for (row = tid; row < rows; row += blockDim.x) for (c …) S[row][c] = scale * dot(Q[row], K[c])`: only
    /// warp 0 has rows.
    pub(super) fn score(&self, k: &mut Builder, cta: &Cta, tile: Tile) {
        cta.strided(k, cta.rows, |k, row| {
            let query = self.query.element(k, row, ROW_BYTES);
            let scores = self.scores.element(k, row, 4 * KEYS);
            k.for_range(0, tile.keys, 1, |k, column| {
                let key = self.keys.element(k, column, ROW_BYTES);
                let sum: F32 = k.mov(0.0f32);
                for d in 0..i64::from(DIM) {
                    let at = [query, key].map(|row| row.at(2 * d));
                    let [a, b] = at.map(|at| load_half(k, at));
                    k.mad_to(sum, a, b, sum);
                }
                let score: F32 = k.mul(sum, cta.scale);
                let to = scores.element(k, column, 4);
                k.st(to, score);
            });
        });
    }

    /// `for (row = warp; row < rows; row += 4)`.
    pub(super) fn for_each(&self, k: &mut Builder, cta: &Cta, body: impl FnOnce(&mut Builder, WarpRow)) {
        let cells = self.cells.map(|array| array.element(k, self.warp, 4));
        k.for_range(self.warp, cta.rows, WARPS, |k, row| {
            let [scores, output] = [self.scores, self.output].map(|array| array.element(k, row, 4 * KEYS));
            let state = self.state_of(k, row);
            let WarpRows { math, lane, values, .. } = *self;
            body(k, WarpRow { math, lane, scores, output, values, cells, state });
        });
    }

    fn state_of(&self, k: &mut Builder, row: R32) -> [Local; 2] {
        let of_warp = k.shr_u(row, WARPS.ilog2());
        self.state.map(|array| array.element(k, of_warp, 4))
    }

    /// `O / l`, one half per store.
    pub(super) fn store(&self, k: &mut Builder, cta: &Cta) {
        k.for_range(self.warp, cta.rows, WARPS, |k, row| {
            let [_, sum] = self.state_of(k, row);
            let sum = k.ld(sum);
            let inverse = self.math.inverse_or_zero(k, sum);
            let (from, to) = (self.output.element(k, row, 4 * DIM), cta.out.element(k, row, ROW_BYTES));
            k.for_range(self.lane, DIM, 32, |k, d| {
                let (from, to) = (from.element(k, d, 4), to.element(k, d, 2));
                let output: F32 = k.ld(from);
                let result: F32 = k.mul(output, inverse);
                store_half(k, to, result);
            });
        });
    }
}

impl WarpRow {
    /// The factor that rescales the previous output.
    pub(super) fn rescale(&self, k: &mut Builder, largest: F32) -> F32 {
        let before = k.ld(self.state[0]);
        let rescale = self.math.exp_difference(k, before, largest);
        k.for_range(self.lane, DIM, 32, |k, d| {
            let at = self.output.element(k, d, 4);
            scale_in_place(k, at, rescale);
        });
        rescale
    }

    /// `O += P V`, two columns per lane, each with all its exponentials.
    pub(super) fn weigh(&self, k: &mut Builder, tile: Tile, reduced: Reduced) {
        k.for_range(self.lane, DIM, 32, |k, d| {
            let column = self.values.element(k, d, 2);
            let total = weigh(k, self.math, self.scores, tile.keys, (reduced.largest, column));
            let at = self.output.element(k, d, 4);
            add_in_place(k, at, total);
        });
    }

    pub(super) fn keep(&self, k: &mut Builder, reduced: Reduced) {
        k.st(self.state[0], reduced.largest);
        k.st(self.state[1], reduced.sum);
    }
}
