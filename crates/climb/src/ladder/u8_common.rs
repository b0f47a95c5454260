//! Code that the u8-quantised kernels share: the launch contract and the row loop.
//!
//! The structure follows the authors' published code: 32 query rows by 64 keys and 256 threads. A warp has
//! four rows, and its lanes divide the head dimension. Each score takes two products per lane, five shuffles
//! that add, and one shuffle that broadcasts. The 64 scores of a row are an array in every thread, and all
//! copies are equal; the length of a tile is only known at run time, so the array is in local memory. The
//! output is accumulated in shared memory, which is read and written once per key. The head dimension is an
//! argument too: every loop over columns tests how many there are. The instructions are those of `nvcc
//! --use_fast_math`: `__expf` as `ex2.approx`, division as `div.approx`, and the loops over a row's scores
//! unrolled by four.
//!
//! The published code has one fault that its tests cannot show. The maximum and the sum of a row are read by
//! all lanes of a warp and written by lane 0 with only shuffles in between, which do not order memory: the
//! emulator reports a race. The kernels here have a `bar.warp.sync` at that place, so that each is judged by
//! what the authors changed.

use check::gate::quantised::{OFFSET, RANGE};
use check::launchfile::Bound;
use kernels::Arch;
use problem::{Problem, Tensor};
use ptx::{
    BinaryOp, Builder, CacheOp, CmpOp, CpAsync, Dim3, F32, FloatMods, Global, Half, Launch, Local, Op,
    Operand, Pointer, Pred, R32, Shared, SpecialReg, Src, Type, Value, Violations,
};

use super::common::ALIGN;
use super::contract::Contract;
use super::{RungKernel, common};

/// Query rows of a CTA.
pub(super) const ROWS: u32 = 32;
/// Keys of a tile.
pub(super) const KEYS: u32 = 64;
/// Head dimension.
pub(super) const DIM: u32 = 64;
/// Threads of a CTA.
pub(super) const THREADS: u32 = 256;
const WARPS: u32 = THREADS / 32;

/// How a kernel brings codes to shared memory, and how its inner loops read them.
pub(super) trait Tiles {
    /// Elements from row to row of every array in shared memory.
    const PITCH: u32;
    /// Scores per round of the loop over keys.
    const UNROLL: u32;
    /// The form of a query row in the loop over keys, as the warp holds it.
    type Query;

    /// Called once: loads the CTA's query rows. The caller's barrier follows.
    fn start(&mut self, k: &mut Builder, cta: &Cta);
    /// Called once, after that barrier.
    fn started(&mut self, _: &mut Builder, _: &Cta) {}
    /// Makes the tiles of keys and of values ready for all threads.
    fn arrive(&mut self, k: &mut Builder, cta: &Cta, tile: &Tile);
    /// Called after a tile has been used, before the barrier.
    fn used(&mut self, _: &mut Builder) {}
    /// Prepares a query row; `row` is its first element in shared memory.
    fn query(&self, k: &mut Builder, cta: &Cta, row: R32) -> Self::Query;
    /// The lane's part of a score. `key` is the lane's first element of the key's row; the row is `u` rows
    /// further on.
    fn product(&self, k: &mut Builder, cta: &Cta, query: &Self::Query, key: R32, u: u32) -> F32;
    /// The lane's value in column `lane + 32 · column`; `key` is as in `product`.
    fn value(&self, k: &mut Builder, cta: &Cta, key: R32, column: u32) -> F32;
}

/// Codes in shared memory as they are in global memory, in rows of [`Codes::PITCH`] bytes.
pub(super) struct Codes {
    pub queries: Shared,
    /// Of keys and of values.
    pub tiles: [Shared; 2],
}

impl Codes {
    pub(super) const PITCH: u32 = 72;

    pub(super) fn declare(k: &mut Builder) -> Codes {
        let mut rows = |name, rows| k.shared_array(name, ALIGN, rows * Codes::PITCH);
        Codes { queries: rows("queries", ROWS), tiles: [rows("keys", KEYS), rows("values", KEYS)] }
    }

    /// [`Tiles::value`], decoded.
    pub(super) fn value(&self, k: &mut Builder, cta: &Cta, key: R32, column: u32) -> F32 {
        let at = k.shared_index(self.tiles[1], key, 1);
        load_decoded(k, at.at(i64::from(32 * column)), cta.scales[2])
    }
}

/// A tile of keys and of values.
pub(super) struct Tile {
    /// Its number.
    pub index: R32,
    /// Tiles in all.
    pub count: R32,
    /// Keys in it.
    pub keys: R32,
}

/// State of a CTA.
pub(super) struct Cta {
    /// `threadIdx.x`.
    pub thread: R32,
    /// `threadIdx.x / 32`.
    pub warp: R32,
    /// `threadIdx.x % 32`.
    pub lane: R32,
    /// Query rows.
    pub rows: R32,
    /// Head dimension.
    pub dim: R32,
    /// Whether column `lane + 32` exists.
    pub second: Pred,
    /// The start of the head in q (advanced to the CTA's rows), in k and in v.
    pub codes: [Global; 3],
    /// The head's scales of q, k and v.
    pub scales: [F32; 3],
    seq: R32,
    softmax_scale: F32,
    out: Global,
    /// Whether column `lane` exists, and the number of the lane's columns that the unrolled loop leaves over.
    first: Pred,
    leftover: R32,
}

/// The kernel of a rung.
pub(super) fn emit<T: Tiles>(
    problem: &Problem,
    arch: &Arch,
    rung: RungKernel,
    declare: impl FnOnce(&mut Builder) -> T,
) -> Result<Bound, Violations> {
    let mut k = Builder::kernel(rung.name());
    k.max_threads(THREADS);
    k.min_ctas_per_sm(2);
    let mut contract = Contract::new(problem, rung);
    let cta = Cta::new(&mut k, &mut contract, problem);
    let tiles = declare(&mut k);
    body(&mut k, &cta, tiles);
    let launch = Launch::new(
        Dim3(problem.seq_q as u32 / ROWS, problem.heads_q as u32, problem.batch as u32),
        Dim3(THREADS, 1, 1),
    );
    contract.bind(k, arch, launch)
}

fn body<T: Tiles>(k: &mut Builder, cta: &Cta, mut tiles: T) {
    let state = State::new::<T>(k);
    tiles.start(k, cta);
    state.clear::<T>(k, cta);
    k.bar_sync();
    tiles.started(k, cta);
    let rounded: R32 = k.add(cta.seq, KEYS - 1);
    let count = k.shr_s(rounded, KEYS.ilog2());
    k.for_range(0, count, 1, |k, index| {
        let first: R32 = k.mul(index, KEYS);
        let left: R32 = k.sub(cta.seq, first);
        let tile = Tile { index, count, keys: k.min_s(left, KEYS) };
        tiles.arrive(k, cta, &tile);
        k.for_range(cta.warp, cta.rows, WARPS, |k, row| state.attend(k, cta, &tiles, row, tile.keys));
        tiles.used(k);
        k.bar_sync();
    });
    state.store::<T>(k, cta);
}

impl Cta {
    fn new(k: &mut Builder, contract: &mut Contract<'_>, problem: &Problem) -> Cta {
        let heads = (problem.batch * problem.heads_q) as u32;
        let inputs = [Tensor::Q, Tensor::K, Tensor::V].map(|tensor| contract.codes(k, tensor));
        let (out, scales) = (contract.tensor(k, Tensor::Out), contract.scales(k));
        let seq = contract.u32(k, "seq", problem.seq_q as u32);
        let dim = contract.u32(k, "dim", problem.head_dim as u32);
        let softmax_scale = contract.f32(k, "scale", problem.softmax_scale());
        let [thread, block, head, batch, heads_q] = [
            SpecialReg::TidX,
            SpecialReg::CtaidX,
            SpecialReg::CtaidY,
            SpecialReg::CtaidZ,
            SpecialReg::NctaidY,
        ]
        .map(|r| k.special(r));
        let (warp, lane): (R32, R32) = (k.shr_u(thread, 5), k.and(thread, 31));
        let head: R32 = k.mad(batch, heads_q, head);
        let first_row: R32 = k.mul(block, ROWS);
        let left: R32 = k.sub(seq, first_row);
        let rows = k.min_s(left, ROWS);
        let head_row: R32 = k.mul(head, seq);
        let query_row: R32 = k.add(head_row, first_row);
        let [head_start, query_start]: [R32; 2] = [head_row, query_row].map(|row| k.mul(row, dim));
        let codes = [(inputs[0], query_start), (inputs[1], head_start), (inputs[2], head_start)]
            .map(|(tensor, start)| k.index(tensor, start, 1));
        let out = k.index(out, query_start, 2);
        let scales = [0, 1, 2].map(|i| {
            let at = k.index(scales, head, 4);
            k.ld(at.at(i * 4 * i64::from(heads)))
        });
        let next: R32 = k.add(lane, 32);
        let (first, second) = (k.setp_s(CmpOp::Lt, lane, dim), k.setp_s(CmpOp::Lt, next, dim));
        let beyond: R32 = k.sub(dim, lane);
        let beyond: R32 = k.add(beyond, 31);
        let columns: R32 = k.shr_u(beyond, 5);
        let leftover = k.and(columns, 3);
        Cta { thread, warp, lane, rows, dim, second, codes, scales, seq, softmax_scale, out, first, leftover }
    }

    /// `for (d = lane; d < D; d += 32)`; the body gets (d − lane) / 32. Compilers unroll this loop by four.
    /// With 64 columns all rounds belong to the remainder, and each is a test and a branch; the loop of four
    /// never runs and is left out.
    pub(super) fn columns(&self, k: &mut Builder, mut body: impl FnMut(&mut Builder, u32)) {
        k.if_(self.first, |k| self.left_over(k, 0, &mut body));
    }

    fn left_over(&self, k: &mut Builder, column: u32, body: &mut impl FnMut(&mut Builder, u32)) {
        if column < 3 {
            let more = k.setp_s(CmpOp::Ne, self.leftover, column);
            k.if_(more, |k| {
                body(k, column);
                self.left_over(k, column + 1, body);
            });
        }
    }

    /// `for (i = tid; i < rows · D; i += 256)`; the body gets `i` and `i / D · pitch + i % D`, with a true
    /// division.
    pub(super) fn elements(
        &self,
        k: &mut Builder,
        rows: R32,
        pitch: u32,
        body: impl FnOnce(&mut Builder, R32, R32),
    ) {
        self.chunks(k, rows, pitch, 1, body);
    }

    /// Like [`Cta::elements`], but by chunks of `size` elements.
    pub(super) fn chunks(
        &self,
        k: &mut Builder,
        rows: R32,
        pitch: u32,
        size: u32,
        body: impl FnOnce(&mut Builder, R32, R32),
    ) {
        let (start, end): (R32, R32) = (k.mul(self.thread, size), k.mul(rows, self.dim));
        k.for_range(start, end, size * THREADS, |k, i| {
            let row = k.div_s(i, self.dim);
            let before: R32 = k.mul(row, self.dim);
            let column: R32 = k.sub(i, before);
            let place = k.mad(row, pitch, column);
            body(k, i, place);
        });
    }

    /// Where a tile of keys (1) or of values (2) begins in global memory.
    pub(super) fn tile_start(&self, k: &mut Builder, tensor: usize, index: R32) -> Global {
        let first: R32 = k.mul(index, KEYS);
        let first: R32 = k.mul(first, self.dim);
        k.index(self.codes[tensor], first, 1)
    }

    /// Copies the query codes, one byte per load: elements `tid`, `tid + 256`, ….
    pub(super) fn copy_queries(&self, k: &mut Builder, to: Shared, pitch: u32) {
        self.elements(k, self.rows, pitch, |k, i, place| {
            let from = k.index(self.codes[0], i, 1);
            copy_byte(k, from, to, place);
        });
    }

    /// Copies the codes of a tile, one byte per load.
    pub(super) fn copy_tile(&self, k: &mut Builder, tile: &Tile, to: [Shared; 2], pitch: u32) {
        let from = [1, 2].map(|tensor| self.tile_start(k, tensor, tile.index));
        self.elements(k, tile.keys, pitch, |k, i, place| {
            for (from, to) in from.into_iter().zip(to) {
                let from = k.index(from, i, 1);
                copy_byte(k, from, to, place);
            }
        });
    }

    /// Requests the codes of a tile, `size` bytes per copy.
    pub(super) fn request_tile(&self, k: &mut Builder, tile: &Tile, to: [Shared; 2], pitch: u32, size: u32) {
        let from = [1, 2].map(|tensor| self.tile_start(k, tensor, tile.index));
        self.chunks(k, tile.keys, pitch, size, |k, i, place| {
            for (from, to) in from.into_iter().zip(to) {
                let (from, to) = (k.index(from, i, 1), k.shared_index(to, place, 1));
                copy_async(k, to, from, size);
            }
        });
        k.cp_async_commit();
    }

    /// The lane's two columns of a query row, decoded once for all keys.
    pub(super) fn decode_query(&self, k: &mut Builder, queries: Shared, row: R32) -> [F32; 2] {
        let at = k.shared_index(queries, row, 1);
        let at = k.shared_index(at, self.lane, 1);
        let first = load_decoded(k, at, self.scales[0]);
        let second: F32 = k.mov(0.0f32);
        k.if_(self.second, |k| {
            let value = load_decoded(k, at.at(32), self.scales[0]);
            k.mov_to(second, value);
        });
        [first, second]
    }
}

fn copy_byte(k: &mut Builder, from: Global, to: Shared, place: R32) {
    let code: R32 = k.ld_as(Type::U8, from);
    let to = k.shared_index(to, place, 1);
    k.st_as(Type::U8, to, code);
}

/// `cp.async.ca` of 4, 8 or 16 bytes.
fn copy_async(k: &mut Builder, to: Shared, from: Global, size: u32) {
    let op = Op::CpAsync(CpAsync {
        cache: CacheOp::Ca,
        l2_prefetch: None,
        cache_hint: false,
        ignore_src: false,
        shared_cta: false,
    });
    let size: Src<R32> = size.into();
    k.op(op, [Operand::Address(to.address()), Operand::Address(from.address()), size.into()]);
}

/// A code.
pub(super) fn load_code(k: &mut Builder, at: Shared) -> R32 {
    k.ld_as(Type::U8, at)
}

/// The value of a code: (u / 255 · 896 − 448) · scale.
pub(super) fn decode(k: &mut Builder, code: R32, scale: F32) -> F32 {
    let code = k.u32_to_f32(code);
    let part = divide(k, code, 255.0);
    let steps: F32 = k.mad(part, RANGE, -OFFSET);
    k.mul(steps, scale)
}

/// The value of the code at an address.
pub(super) fn load_decoded(k: &mut Builder, at: Shared, scale: F32) -> F32 {
    let code = load_code(k, at);
    decode(k, code, scale)
}

/// `div.approx.ftz.f32`.
fn divide(k: &mut Builder, a: F32, b: impl Into<Src<F32>>) -> F32 {
    let d: F32 = k.reg();
    let op = Op::Binary(BinaryOp::Div, Type::F32, FloatMods::APPROX_FTZ);
    k.op(op, [Operand::Reg(d.reg()), Operand::Reg(a.reg()), b.into().into()]);
    d
}

/// The CTA's state of its rows between tiles, and each thread's scores of the current row.
struct State {
    maxima: Shared,
    sums: Shared,
    /// Output before the division by the sum.
    numerator: Shared,
    scores: Local,
}

impl State {
    fn new<T: Tiles>(k: &mut Builder) -> State {
        State {
            maxima: k.shared_array("maxima", ALIGN, 4 * ROWS),
            sums: k.shared_array("sums", ALIGN, 4 * ROWS),
            numerator: k.shared_array("numerator", ALIGN, 4 * ROWS * T::PITCH),
            scores: k.local_array("scores", 16, 4 * KEYS),
        }
    }

    fn clear<T: Tiles>(&self, k: &mut Builder, cta: &Cta) {
        let (zero, lowest): (F32, F32) = (k.mov(0.0f32), k.mov(f32::NEG_INFINITY));
        cta.elements(k, cta.rows, T::PITCH, |k, _, place| {
            let to = k.shared_index(self.numerator, place, 4);
            k.st(to, zero);
        });
        k.for_range(cta.thread, cta.rows, THREADS, |k, row| {
            let [maximum, sum] = [self.maxima, self.sums].map(|array| k.shared_index(array, row, 4));
            k.st(maximum, lowest);
            k.st(sum, zero);
        });
    }

    /// Processes one row against one tile: scores, online softmax, output.
    fn attend<T: Tiles>(&self, k: &mut Builder, cta: &Cta, tiles: &T, row: R32, keys: R32) {
        let row_start: R32 = k.mul(row, T::PITCH);
        let query = tiles.query(k, cta, row_start);
        self.score(k, cta, tiles, &query, keys);
        let [maximum, sum] = [self.maxima, self.sums].map(|array| k.shared_index(array, row, 4));
        let (m_old, l_old): (F32, F32) = (k.ld(maximum), k.ld(sum));
        let (m, added) = self.softmax(k, m_old, keys);
        let rescale = common::Math::Fast.exp_difference(k, m_old, m);
        let l = k.mad(l_old, rescale, added);
        let numerator = k.shared_index(self.numerator, row_start, 4);
        let numerator = k.shared_index(numerator, cta.lane, 4);
        cta.columns(k, |k, column| {
            let at = numerator.at(i64::from(128 * column));
            let x: F32 = k.ld(at);
            let x: F32 = k.mul(x, rescale);
            k.st(at, x);
        });
        self.weigh_values(k, cta, tiles, numerator, keys);
        // Missing in the published code: the other lanes must have read the values that lane 0 overwrites
        // next.
        k.warp_sync();
        let leader = k.setp_s(CmpOp::Eq, cta.lane, 0);
        k.if_(leader, |k| {
            k.st(maximum, m);
            k.st(sum, l);
        });
    }

    /// Computes the scores of a row and writes them to every lane's own array.
    fn score<T: Tiles>(&self, k: &mut Builder, cta: &Cta, tiles: &T, query: &T::Query, keys: R32) {
        k.for_range(0, keys, T::UNROLL, |k, n| {
            let key = k.mad(n, T::PITCH, cta.lane);
            let to = local_index(k, self.scores, n);
            for u in 0..T::UNROLL {
                let mut sum = tiles.product(k, cta, query, key, u);
                for lanes in [16, 8, 4, 2, 1] {
                    let other = k.shfl_down(sum, lanes);
                    sum = k.add(sum, other);
                }
                let scaled: F32 = k.mul(sum, cta.softmax_scale);
                let leader = k.setp_s(CmpOp::Eq, cta.lane, 0);
                let score: F32 = k.selp(scaled, sum, leader);
                let score = k.shfl_idx(score, 0);
                k.st(to.at(4 * i64::from(u)), score);
            }
        });
    }

    /// Turns scores into exponentials in place; returns the new maximum and the sum that the tile adds.
    fn softmax(&self, k: &mut Builder, m_old: F32, keys: R32) -> (F32, F32) {
        let (m, sum): (F32, F32) = (k.mov(m_old), k.mov(0.0f32));
        k.for_range(0, keys, 4, |k, n| {
            let at = local_index(k, self.scores, n);
            let scores: [F32; 4] = k.ld_vec(at);
            scores.into_iter().for_each(|score| k.max_to(m, m, score));
        });
        k.for_range(0, keys, 4, |k, n| {
            let at = local_index(k, self.scores, n);
            let scores: [F32; 4] = k.ld_vec(at);
            let powers = scores.map(|score| common::Math::Fast.exp_difference(k, score, m));
            k.st_vec(at, powers);
            powers.into_iter().for_each(|power| k.add_to(sum, sum, power));
        });
        (m, sum)
    }

    /// `numerator += P V`, through shared memory for each key.
    fn weigh_values<T: Tiles>(&self, k: &mut Builder, cta: &Cta, tiles: &T, numerator: Shared, keys: R32) {
        k.for_range(0, keys, 1, |k, n| {
            let from = local_index(k, self.scores, n);
            let p: F32 = k.ld(from);
            let key = k.mad(n, T::PITCH, cta.lane);
            cta.columns(k, |k, column| {
                let value = tiles.value(k, cta, key, column);
                let at = numerator.at(i64::from(128 * column));
                let x: F32 = k.ld(at);
                let x: F32 = k.mad(p, value, x);
                k.st(at, x);
            });
        });
    }

    fn store<T: Tiles>(&self, k: &mut Builder, cta: &Cta) {
        k.for_range(cta.warp, cta.rows, WARPS, |k, row| {
            let sum = k.shared_index(self.sums, row, 4);
            let sum: F32 = k.ld(sum);
            let from = k.mad(row, T::PITCH, cta.lane);
            let from = k.shared_index(self.numerator, from, 4);
            let to = k.mad(row, cta.dim, cta.lane);
            let to = k.index(cta.out, to, 2);
            cta.columns(k, |k, column| {
                let x: F32 = k.ld(from.at(i64::from(128 * column)));
                let x = divide(k, x, sum);
                let x = k.from_f32(Half::F16, x);
                k.st(to.at(i64::from(64 * column)), x);
            });
        });
    }
}

/// Element `i` of an array of floats.
fn local_index(k: &mut Builder, array: Local, i: R32) -> Local {
    Local { base: k.mad_wide_u(i, 4, array.base), offset: array.offset }
}
