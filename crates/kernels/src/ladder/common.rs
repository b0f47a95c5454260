//! What the f16 rungs share: the launch contract and the idioms of plain CUDA C++.

use problem::{DType, Layout, Problem, Tensor};
use ptx::{
    Access, Arg, BufferSpec, Builder, Dim3, F32, Global, Half, Kernel, Launch, Pointer, R32, Shared,
    SpecialReg,
};

use super::RungPlan;
use crate::{Arch, PlanError};

/// Head dimension, a constant of the seeds' kernels.
pub(super) const DIM: u32 = 64;
/// Keys of a tile (`BLOCK_N`).
pub(super) const KEYS: u32 = 64;
/// Bytes of a row of halves.
pub(super) const ROW_BYTES: u32 = 2 * DIM;
/// Bytes of a tile of keys or of values.
pub(super) const TILE_BYTES: u32 = KEYS * ROW_BYTES;
/// How far nvcc unrolls an inner loop of 64 rounds.
pub(super) const UNROLL: u32 = 4;

/// The longest sequence: the minimal rung keeps a row of f32 scores in static shared memory, 48 KiB at most.
const MAX_SEQ: usize = 8192;

/// Dense self-attention in f16 with head dimension 64, whole tiles, and the rung's mask.
pub(super) fn check(problem: &Problem, rung: RungPlan) -> Result<(), PlanError> {
    let family = rung.name();
    let value = |what, value: usize, accepted: &str| {
        Err(PlanError::Value { what, value: value as u64, accepted: accepted.to_owned() })
    };
    if problem.dtype != DType::F16 {
        return Err(PlanError::DType { family, dtype: problem.dtype, accepted: "f16" });
    }
    if problem.mask != rung.mask() {
        return Err(PlanError::Mask { family, mask: problem.mask, accepted: rung.mask() });
    }
    for (what, dim) in [("head_dim", problem.head_dim), ("head_dim_v", problem.head_dim_v)] {
        if dim != DIM as usize {
            return value(what, dim, "64");
        }
    }
    if !problem.seq_q.is_multiple_of(KEYS as usize) || problem.seq_q > MAX_SEQ {
        return value("seq_q", problem.seq_q, "multiples of 64 up to 8192");
    }
    if problem.seq_kv != problem.seq_q {
        return value("seq_kv", problem.seq_kv, &format!("seq_q = {}", problem.seq_q));
    }
    if problem.heads_kv != problem.heads_q {
        return value("heads_kv", problem.heads_kv, &format!("heads_q = {}", problem.heads_q));
    }
    for (what, extent) in [("heads_q", problem.heads_q), ("batch", problem.batch)] {
        if extent > 65_535 {
            return value(what, extent, "up to 65535, a grid's limit");
        }
    }
    let dense = problem.clone().with_layout(Layout::Bhsd);
    match Tensor::ALL.into_iter().find(|&t| problem.strides(t) != dense.strides(t)) {
        Some(tensor) => Err(PlanError::NotDense { family, tensor: tensor.name() }),
        None => Ok(()),
    }
}

/// What a CTA works on.
pub(super) struct Cta {
    /// `threadIdx.x`.
    pub thread: R32,
    /// `blockDim.x`.
    pub threads: u32,
    /// First query row.
    pub first_row: R32,
    /// Rows and keys of a head.
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

/// A kernel of one CTA for each `rows` query rows of each head: `grid = (S / rows, H, B)`.
pub(super) fn kernel(
    problem: &Problem,
    arch: &Arch,
    rung: RungPlan,
    rows: u32,
    threads: u32,
    body: impl FnOnce(&mut Builder, &Cta),
) -> Kernel {
    let mut k = Builder::kernel(rung.name());
    k.max_threads(threads);
    let cta = cta(&mut k, rows, threads);
    body(&mut k, &cta);
    let elements = |tensor| problem.span(tensor).map_or(0, |(elements, _)| elements);
    let buffer = |tensor: Tensor| BufferSpec {
        name: tensor.name().to_owned(),
        bytes: 2 * elements(tensor),
        access: if tensor == Tensor::Out { Access::Write } else { Access::Read },
    };
    let mut args: Vec<Arg> = (0..4).map(|index| Arg::Buffer { index, offset: 0 }).collect();
    args.extend([Arg::U32(problem.seq_q as u32), Arg::F32(problem.softmax_scale())]);
    Kernel {
        module: k.into_module(arch.target()),
        entry: rung.name().to_owned(),
        launch: Launch {
            grid: Dim3(problem.seq_q as u32 / rows, problem.heads_q as u32, problem.batch as u32),
            cluster: Dim3(1, 1, 1),
            block: Dim3(threads, 1, 1),
            dynamic_shared: 0,
        },
        buffers: Tensor::ALL.map(buffer).into(),
        args,
    }
}

fn cta(k: &mut Builder, rows: u32, threads: u32) -> Cta {
    let [q, keys, values, out] = Tensor::ALL.map(|t| k.param_pointer(t.name()));
    let (seq, scale) = (k.param_u32("seq"), k.param_f32("scale"));
    let [thread, block, head, batch] =
        [SpecialReg::TidX, SpecialReg::CtaidX, SpecialReg::CtaidY, SpecialReg::CtaidZ].map(|r| k.special(r));
    let heads = k.special(SpecialReg::NctaidY);
    let head: R32 = k.mad(batch, heads, head);
    let head_row: R32 = k.mul(head, seq);
    let first_row: R32 = k.mul(block, rows);
    let query_row: R32 = k.add(head_row, first_row);
    let [q, out] = [q, out].map(|tensor| k.index(tensor, query_row, ROW_BYTES));
    let [keys, values] = [keys, values].map(|tensor| k.index(tensor, head_row, ROW_BYTES));
    Cta { thread, threads, first_row, seq, scale, q, keys, values, out }
}

impl Cta {
    /// `for (tile = 0; tile < S; tile += 64)`.
    pub(super) fn for_each_tile(&self, k: &mut Builder, body: impl FnOnce(&mut Builder, R32)) {
        k.for_range(0, self.seq, KEYS, body);
    }

    /// `for (i = tid; i < n; i += blockDim.x) to[i] = from[i]`, one half at a time, unrolled by four.
    pub(super) fn copy_halves(&self, k: &mut Builder, from: Global, to: Shared, elements: u32) {
        k.for_range(self.thread, elements, UNROLL * self.threads, |k, i| {
            let (from, to) = (k.index(from, i, 2), k.shared_index(to, i, 2));
            let step = i64::from(2 * self.threads);
            let values: Vec<ptx::R16> = (0..i64::from(UNROLL)).map(|u| k.ld(from.at(u * step))).collect();
            for (u, value) in values.into_iter().enumerate() {
                k.st(to.at(u as i64 * step), value);
            }
        });
    }

    /// The same as `uint4`: eight halves at a time.
    pub(super) fn copy_uint4(&self, k: &mut Builder, from: Global, to: Shared, elements: u32) {
        k.for_range(self.thread, elements / 8, self.threads, |k, i| {
            let (from, to) = (k.index(from, i, 16), k.shared_index(to, i, 16));
            let words: [R32; 4] = k.ld_vec(from);
            k.st_vec(to, words);
        });
    }

    /// `tid / 32` and `tid % 32`.
    pub(super) fn warp_and_lane(&self, k: &mut Builder) -> (R32, R32) {
        (k.shr_u(self.thread, 5), k.and(self.thread, 31))
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

/// `for (d = 0; d < 64; d++) sum += a[d] * b[d]`, two bytes a load; `a` and `b` are rows in shared memory.
pub(super) fn dot(k: &mut Builder, a: Shared, b: Shared) -> F32 {
    let sum: F32 = k.mov(0.0f32);
    k.for_range(0, DIM, UNROLL, |k, d| {
        let (a, b) = (k.shared_index(a, d, 2), k.shared_index(b, d, 2));
        for u in 0..i64::from(UNROLL) {
            let (a, b) = (load_half(k, a.at(2 * u)), load_half(k, b.at(2 * u)));
            k.mad_to(sum, a, b, sum);
        }
    });
    sum
}

/// `__expf(a - b)`.
pub(super) fn exp_difference(k: &mut Builder, a: F32, b: F32) -> F32 {
    let difference: F32 = k.sub(a, b);
    let power: F32 = k.mul(difference, std::f32::consts::LOG2_E);
    k.ex2(power)
}

/// `for (c = 0; c < 64; c++)` over a row of f32 in shared memory, unrolled by four.
pub(super) fn for_each_score(k: &mut Builder, row: Shared, mut body: impl FnMut(&mut Builder, Shared)) {
    k.for_range(0, KEYS, UNROLL, |k, c| {
        let at = k.shared_index(row, c, 4);
        (0..i64::from(UNROLL)).for_each(|u| body(k, at.at(4 * u)));
    });
}

/// `for (c = 0; c < 64; c++) sum += p(row[c]) * v[c]`, `v` a column of values: 64 halves, a row apart. Added to `sum`.
pub(super) fn weigh_values(
    k: &mut Builder,
    sum: F32,
    row: Shared,
    column: Shared,
    mut weight: impl FnMut(&mut Builder, F32) -> F32,
) {
    k.for_range(0, KEYS, UNROLL, |k, c| {
        let (score, value) = (k.shared_index(row, c, 4), k.shared_index(column, c, ROW_BYTES));
        for u in 0..i64::from(UNROLL) {
            let score: F32 = k.ld(score.at(4 * u));
            let p = weight(k, score);
            let v = load_half(k, value.at(i64::from(ROW_BYTES) * u));
            k.mad_to(sum, p, v, sum);
        }
    });
}

/// The largest of the 32 lanes, in all of them: `__shfl_xor_sync` by 16, 8, 4, 2, 1.
pub(super) fn warp_max(k: &mut Builder, value: F32) -> F32 {
    [16, 8, 4, 2, 1].into_iter().fold(value, |value, lanes| {
        let other = k.shfl_xor(value, lanes);
        k.max(value, other)
    })
}

/// The sum of the 32 lanes, in all of them.
pub(super) fn warp_sum(k: &mut Builder, value: F32) -> F32 {
    [16, 8, 4, 2, 1].into_iter().fold(value, |value, lanes| {
        let other = k.shfl_xor(value, lanes);
        k.add(value, other)
    })
}
