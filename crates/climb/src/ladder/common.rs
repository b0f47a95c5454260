//! Code that the f16 kernels of the ladder share: the launch contract and idioms of plain CUDA C++.

use std::f32::consts::LOG2_E;

use check::launchfile::Bound;
use kernels::Arch;
use problem::{DType, Layout, PassKind, Problem, Score, Tensor};
use ptx::{
    Builder, CmpOp, Dim3, F32, FloatMods, Global, Half, Launch, Local, Op, Operand, Pointer, Precision, R32,
    Rounding, Shared, SpecialReg, Src, TernaryOp, Type, UnaryOp, Value, Violations,
};

use super::contract::Contract;
use super::{RungError, RungKernel};

/// Head dimension, a constant in the original kernels.
pub(super) const DIM: u32 = 64;
/// Keys of a tile (`BLOCK_N`).
pub(super) const KEYS: u32 = 64;
/// Bytes of a row of halves.
pub(super) const ROW_BYTES: u32 = 2 * DIM;
/// Bytes of a tile of keys or values.
pub(super) const TILE_BYTES: u32 = KEYS * ROW_BYTES;
/// Alignment of shared arrays: where ptxas places arrays of 16 bytes and more in a whole program, which is
/// how nvcc built the original kernels. It is declared explicitly, because it is not guaranteed when code is
/// linked, as the driver's linker does: vector accesses may then fault, and loads that ptxas would otherwise
/// merge stay separate.
pub(super) const ALIGN: u32 = 16;

/// The maximum sequence length. The original kernels count elements of a tensor in 32 bits; this limit is far
/// below that, and keeps a check short.
const MAX_SEQ: usize = 8192;

/// Accepts dense self-attention in f16 with head dimension 64, whole tiles, and the kernel's mask.
pub(super) fn check(problem: &Problem, rung: RungKernel) -> Result<(), RungError> {
    let require = |what, value: String, fits: bool, accepted: &str| {
        let (rung, accepted) = (rung.name(), accepted.to_owned());
        if fits { Ok(()) } else { Err(RungError::Problem { rung, what, value, accepted }) }
    };
    let number = |what, value: usize, fits, accepted: &str| require(what, value.to_string(), fits, accepted);
    let pass = problem.pass.kind();
    require("pass", pass.name().to_owned(), pass == PassKind::Forward, "forward")?;
    require("lse", problem.pass.lse().to_string(), !problem.pass.lse(), "false")?;
    let is_f16 = problem.dtypes.one() == Some(DType::F16);
    require("dtype", problem.dtypes.to_string(), is_f16, "f16")?;
    let mask = rung.mask();
    require("mask", problem.band.to_string(), problem.band == mask, &mask.to_string())?;
    number("head_dim", problem.head_dim, problem.head_dim == DIM as usize, "64")?;
    number("head_dim_v", problem.head_dim_v, problem.head_dim_v == DIM as usize, "64")?;
    let (rows, heads) = (problem.seq_q, problem.heads_q);
    let whole = rows.is_multiple_of(KEYS as usize) && rows <= MAX_SEQ;
    number("seq_q", rows, whole, "multiples of 64 up to 8192")?;
    number("seq_kv", problem.seq_kv, problem.seq_kv == rows, &format!("seq_q = {rows}"))?;
    number("heads_kv", problem.heads_kv, problem.heads_kv == heads, &format!("heads_q = {heads}"))?;
    for (what, extent) in [("heads_q", heads), ("batch", problem.batch)] {
        number(what, extent, extent <= 65_535, "up to 65535, a grid's limit")?;
    }
    let dense = problem.clone().with_layout(Layout::Bhsd);
    let strided = Tensor::FORWARD.into_iter().find(|&t| problem.strides(t) != dense.strides(t));
    let name = strided.map_or("", Tensor::name);
    let accepted = "[batch, head, sequence, dim] without gaps";
    require("the strides of", name.to_owned(), strided.is_none(), accepted)?;
    let score = Score { scale: problem.score.scale, ..Score::default() };
    let plain = Problem::new(problem.batch, heads, rows, problem.head_dim, DType::F16).with_band(mask);
    let plain = *problem == Problem { score, ..plain };
    require("features", "some".to_owned(), plain, "none: no softcap, sinks, programs, lengths or pages")
}

/// State of a CTA.
pub(super) struct Cta {
    /// `threadIdx.x`.
    pub thread: R32,
    /// `blockDim.x`.
    pub threads: u32,
    /// First query row of the CTA.
    pub first_row: R32,
    /// Number of query rows, fewer in a ragged last CTA. The accepted problems have no ragged CTA, but the
    /// original code counts rows at run time. Doing the same here keeps the compiler from unrolling more than
    /// it did there.
    pub rows: R32,
    /// Query rows and keys of a head.
    pub seq: R32,
    /// Factor on the scores.
    pub scale: F32,
    /// The CTA's first query row.
    pub q: Global,
    /// The head's keys.
    pub keys: Global,
    /// The head's values.
    pub values: Global,
    /// The CTA's first output row.
    pub out: Global,
}

/// A tile of 64 keys.
#[derive(Clone, Copy)]
pub(super) struct Tile {
    /// Its first key.
    pub first: R32,
    /// Number of keys, fewer in a ragged last tile. Known only at run time, like [`Cta::rows`].
    pub keys: R32,
}

/// A kernel with one CTA per `rows` query rows of each head: `grid = (S / rows, H, B)`.
pub(super) fn kernel(
    problem: &Problem,
    arch: &Arch,
    rung: RungKernel,
    rows: u32,
    threads: u32,
    body: impl FnOnce(&mut Builder, &Cta),
) -> Result<Bound, Violations> {
    let mut k = Builder::kernel(rung.name());
    let mut contract = Contract::new(problem, rung);
    let cta = cta(&mut k, &mut contract, problem, rows, threads);
    body(&mut k, &cta);
    let launch = Launch::new(
        Dim3(problem.seq_q as u32 / rows, problem.heads_q as u32, problem.batch as u32),
        Dim3(threads, 1, 1),
    );
    contract.bind(k, arch, launch)
}

fn cta(k: &mut Builder, contract: &mut Contract<'_>, problem: &Problem, rows: u32, threads: u32) -> Cta {
    let [q, keys, values, out] = Tensor::FORWARD.map(|tensor| contract.tensor(k, tensor));
    let seq = contract.u32(k, "seq", problem.seq_q as u32);
    let scale = contract.f32(k, "scale", problem.softmax_scale());
    let [thread, block, head, batch] =
        [SpecialReg::TidX, SpecialReg::CtaidX, SpecialReg::CtaidY, SpecialReg::CtaidZ].map(|r| k.special(r));
    let heads = k.special(SpecialReg::NctaidY);
    let head: R32 = k.mad(batch, heads, head);
    let head_row: R32 = k.mul(head, seq);
    let first_row: R32 = k.mul(block, rows);
    let query_row: R32 = k.add(head_row, first_row);
    let [q, out] = [q, out].map(|tensor| k.index(tensor, query_row, ROW_BYTES));
    let [keys, values] = [keys, values].map(|tensor| k.index(tensor, head_row, ROW_BYTES));
    let left: R32 = k.sub(seq, first_row);
    let rows = k.min_s(left, rows);
    Cta { thread, threads, first_row, rows, seq, scale, q, keys, values, out }
}

impl Cta {
    /// `for (tile = 0; tile < S; tile += 64)`.
    pub(super) fn for_each_tile(&self, k: &mut Builder, body: impl FnOnce(&mut Builder, Tile)) {
        k.for_range(0, self.seq, KEYS, |k, first| {
            let left: R32 = k.sub(self.seq, first);
            let keys = k.min_s(left, KEYS);
            body(k, Tile { first, keys });
        });
    }

    /// `for (i = tid; i < end; i += blockDim.x)`.
    pub(super) fn strided(
        &self,
        k: &mut Builder,
        end: impl Into<Src<R32>>,
        body: impl FnOnce(&mut Builder, R32),
    ) {
        k.for_range(self.thread, end, self.threads, body);
    }

    /// `tid / 32` and `tid % 32`.
    pub(super) fn warp_and_lane(&self, k: &mut Builder) -> (R32, R32) {
        (k.shr_u(self.thread, 5), k.and(self.thread, 31))
    }
}

/// An array indexed at run time, in any state space.
pub(super) trait Array: Pointer {
    /// Element `i`, of `size` bytes.
    fn element(self, k: &mut Builder, i: R32, size: u32) -> Self;
}

impl Array for Global {
    fn element(self, k: &mut Builder, i: R32, size: u32) -> Global {
        k.index(self, i, size)
    }
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

/// `__half2float(*from)`.
pub(super) fn load_half<P: Pointer>(k: &mut Builder, from: P) -> F32 {
    let bits = k.ld(from);
    k.to_f32(Half::F16, bits)
}

/// `*to = __float2half(value)`.
pub(super) fn store_half<P: Pointer>(k: &mut Builder, to: P, value: F32) {
    let bits = k.from_f32(Half::F16, value);
    k.st(to, bits);
}

/// The instructions that nvcc generates for `expf` and division.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Math {
    /// Accurate to the last bits (no fast math).
    Accurate,
    /// `-use_fast_math`.
    Fast,
}

impl Math {
    /// `expf(a - b)`.
    pub(super) fn exp_difference(self, k: &mut Builder, a: F32, b: F32) -> F32 {
        let difference: F32 = k.sub(a, b);
        match self {
            Math::Accurate => accurate_exp(k, difference),
            Math::Fast => {
                let power: F32 = k.mul(difference, LOG2_E);
                k.ex2(power)
            }
        }
    }

    /// `sum > 0 ? 1 / sum : 0`.
    pub(super) fn inverse_or_zero(self, k: &mut Builder, sum: F32) -> F32 {
        let positive = k.setp_f(CmpOp::Gt, sum, 0.0f32);
        let inverse = self.inverse(k, sum);
        k.selp(inverse, 0.0f32, positive)
    }

    /// `1 / a`.
    pub(super) fn inverse(self, k: &mut Builder, a: F32) -> F32 {
        match self {
            Math::Accurate => {
                let d: F32 = k.reg();
                let nearest = FloatMods { precision: Precision::Rounded(Rounding::Rn), ..FloatMods::NONE };
                k.op(Op::Unary(UnaryOp::Rcp, Type::F32, nearest), [d, a].map(|v| Operand::Reg(v.reg())));
                d
            }
            Math::Fast => k.rcp(a),
        }
    }
}

/// e^x = 2^n · 2^f with n = ⌊x · log₂e⌋, −126 ≤ n ≤ 126. The sum 1.5 · 2²³ + 1 + (n + 126), rounded down,
/// holds n + 127 in its low bits; a shift by 23 makes this the exponent of 2^n. f is summed in two parts.
/// Only 2^f is approximate.
fn accurate_exp(k: &mut Builder, x: F32) -> F32 {
    /// The rounding error of log₂e in f32.
    const LOG2_E_LOW: f32 = (std::f64::consts::LOG2_E - LOG2_E as f64) as f32;
    const MAGIC: f32 = 12_582_913.0;
    let rounded =
        |rounding, sat| FloatMods { precision: Precision::Rounded(rounding), sat, ..FloatMods::NONE };
    let [share, shifted]: [F32; 2] = k.regs();
    let fma = |k: &mut Builder, d: F32, mods, [a, b, c]: [Operand; 3]| {
        k.op(Op::Ternary(TernaryOp::Fma, Type::F32, mods), [Operand::Reg(d.reg()), a, b, c]);
    };
    let [x_, share_] = [x, share].map(|v| Operand::Reg(v.reg()));
    let number = |value: f32| Operand::from(Src::<F32>::from(value));
    fma(k, share, rounded(Rounding::Rn, true), [x_, number(LOG2_E / 252.0), number(0.5)]);
    fma(k, shifted, rounded(Rounding::Rm, false), [share_, number(252.0), number(MAGIC)]);
    let n: F32 = k.add(shifted, -(MAGIC + 126.0));
    let minus_n = k.neg(n);
    let high: F32 = k.mad(x, LOG2_E, minus_n);
    let fraction: F32 = k.mad(x, LOG2_E_LOW, high);
    let bits = k.to_bits(shifted);
    let bits: R32 = k.shl(bits, 23);
    let whole = k.from_bits(bits);
    let fraction = k.ex2(fraction);
    k.mul(fraction, whole)
}

/// `for (d = 0; d < 64; d++) sum += q[d] * k[d]`, unrolled by 16. `q` is f32 in shared memory; the key's
/// halves are loaded from global memory one at a time.
pub(super) fn dot_with_global(k: &mut Builder, q: Shared, key: Global) -> F32 {
    let sum: F32 = k.mov(0.0f32);
    k.for_range(0, DIM, 16, |k, d| {
        let (q, key) = (q.element(k, d, 4), key.element(k, d, 2));
        for u in 0..16 {
            let (a, b): (F32, F32) = (k.ld(q.at(4 * u)), load_half(k, key.at(2 * u)));
            k.mad_to(sum, a, b, sum);
        }
    });
    sum
}

/// `for (c = 0; c < keys; c++)` over a row of f32 scores, unrolled by four.
pub(super) fn for_each_score(
    k: &mut Builder,
    row: Shared,
    keys: impl Into<Src<R32>>,
    mut body: impl FnMut(&mut Builder, Shared),
) {
    k.for_range(0, keys, 4, |k, c| {
        let at = row.element(k, c, 4);
        (0..4).for_each(|u| body(k, at.at(4 * u)));
    });
}

/// The maximum of `before` and all scores of the row, computed serially.
pub(super) fn serial_max(k: &mut Builder, row: Shared, keys: impl Into<Src<R32>>, before: F32) -> F32 {
    let largest: F32 = k.mov(before);
    for_each_score(k, row, keys, |k, at| {
        let score: F32 = k.ld(at);
        k.max_to(largest, largest, score);
    });
    largest
}

/// `for (c = 0; c < keys; c++) sum += expf(row[c] - largest)`.
pub(super) fn serial_sum(
    k: &mut Builder,
    math: Math,
    row: Shared,
    keys: impl Into<Src<R32>>,
    [largest, before]: [F32; 2],
) -> F32 {
    let sum: F32 = k.mov(before);
    for_each_score(k, row, keys, |k, at| {
        let score: F32 = k.ld(at);
        let p = math.exp_difference(k, score, largest);
        k.add_to(sum, sum, p);
    });
    sum
}

/// `for (c = 0; c < keys; c++) sum += expf(row[c] - largest) * v[c]`, where `v` is a column of halves with a
/// stride of one row. Each calling thread computes all the exponentials.
pub(super) fn weigh<A: Array>(
    k: &mut Builder,
    math: Math,
    row: Shared,
    keys: impl Into<Src<R32>>,
    (largest, column): (F32, A),
) -> F32 {
    let sum: F32 = k.mov(0.0f32);
    k.for_range(0, keys, 4, |k, c| {
        let (score, value) = (row.element(k, c, 4), column.element(k, c, ROW_BYTES));
        for u in 0..4 {
            let score: F32 = k.ld(score.at(4 * u));
            let p = math.exp_difference(k, score, largest);
            let v = load_half(k, value.at(i64::from(ROW_BYTES) * u));
            k.mad_to(sum, p, v, sum);
        }
    });
    sum
}

/// `*at *= factor`.
pub(super) fn scale_in_place<P: Pointer>(k: &mut Builder, at: P, factor: F32) {
    let before: F32 = k.ld(at);
    let scaled: F32 = k.mul(before, factor);
    k.st(at, scaled);
}

/// `*at += term`.
pub(super) fn add_in_place<P: Pointer>(k: &mut Builder, at: P, term: F32) {
    let before: F32 = k.ld(at);
    let sum: F32 = k.add(before, term);
    k.st(at, sum);
}

/// Reduction over the 32 lanes by `__shfl_down_sync` with 16, 8, 4, 2, 1; only lane 0 has the result.
pub(super) fn shuffle_down(
    k: &mut Builder,
    value: F32,
    combine: impl Fn(&mut Builder, F32, F32) -> F32,
) -> F32 {
    [16, 8, 4, 2, 1].into_iter().fold(value, |value, lanes| {
        let other = k.shfl_down(value, lanes);
        combine(k, value, other)
    })
}
