//! One tile of the backward pass: some query rows of one head against a block of keys.
//!
//! S = Q Kᵀ, dP = dO Vᵀ, P = exp2(λ S − L·log2 e), dS = P ∘ (dP − D); then dV += Pᵀ dO, dK += dSᵀ Q,
//! dQ += dS K. All in f32.

use crate::simd::{Added, Columns, Fresh, Part, Rows, Simd, gemm_part};
use crate::softcap::tanh;

/// Query rows of a tile.
pub(crate) const BLOCK_Q: usize = 64;
/// Keys of a tile, a multiple of the lanes of every instruction set.
pub(crate) const BLOCK_KV: usize = 64;

/// A matrix of f32, `ld` numbers from row to row.
pub(crate) struct Matrix<'a> {
    pub data: &'a [f32],
    pub ld: usize,
}

/// Query rows of one head, dense. The leading dimensions are multiples of [`BLOCK_KV`]'s divisor, the lanes;
/// what lies beyond a row is 0.
pub(crate) struct QueryRows<'a> {
    /// Number of rows, at most [`BLOCK_Q`].
    pub rows: usize,
    pub query: Matrix<'a>,
    pub d_out: Matrix<'a>,
    /// The LSE times log2 e. Of a row without mass +∞, so that its weights are 0.
    pub lse: &'a [f32],
    /// D.
    pub delta: &'a [f32],
}

/// Keys of one KV head. Beyond the last key, rows and columns are 0.
pub(crate) struct KeyRows<'a> {
    /// Number of keys, at most [`BLOCK_KV`].
    pub keys: usize,
    /// K, a key a row.
    pub rows: Matrix<'a>,
    /// K and V, a key a column.
    pub key_columns: Matrix<'a>,
    pub value_columns: Matrix<'a>,
}

/// The scores of a tile, [`BLOCK_Q`] rows of [`BLOCK_KV`] numbers each: S, then P; and dP, then dS.
pub(crate) struct ScoreTile {
    pub weights: Vec<f32>,
    pub slopes: Vec<f32>,
}

impl ScoreTile {
    pub(crate) fn new() -> ScoreTile {
        let zeros = || vec![0.0; BLOCK_Q * BLOCK_KV];
        ScoreTile { weights: zeros(), slopes: zeros() }
    }
}

/// How a product of a query and a key becomes an exponent.
#[derive(Clone, Copy)]
pub(crate) struct Logits {
    /// The factor that turns a product into a logit, or into the argument of the cap's tanh.
    pub scale: f32,
    pub cap: Option<f32>,
}

/// What a call of [`Simd::backward`] computes.
pub(crate) enum TileStep<'a> {
    /// S and dP.
    Products {
        queries: &'a QueryRows<'a>,
        keys: &'a KeyRows<'a>,
        dims: [usize; 2],
        scores: &'a mut ScoreTile,
    },
    /// P and dS of each row's range of keys, which is half open; 0 outside.
    Weights { queries: &'a QueryRows<'a>, logits: Logits, seen: &'a [[usize; 2]], scores: &'a mut ScoreTile },
    /// Adds to dQ, dK and dV, whose rows are as long as those of Q, K and V.
    Gradients {
        queries: &'a QueryRows<'a>,
        keys: &'a KeyRows<'a>,
        scores: &'a ScoreTile,
        dq: &'a mut [f32],
        dk: &'a mut [f32],
        dv: &'a mut [f32],
    },
}

/// Computes a stage. Compiled for an instruction set by [`Simd::backward`].
#[inline(always)]
pub(crate) fn run<S: Simd>(s: S, stage: TileStep<'_>) {
    match stage {
        TileStep::Products { queries, keys, dims: [dim, dim_v], scores } => {
            let columns = keys.keys.next_multiple_of(S::LANES);
            let Matrix { data, ld } = queries.query;
            let (m, a) = (queries.rows, Rows { data, ld });
            multiply(s, Fresh, a, &keys.key_columns, (&mut scores.weights, BLOCK_KV), [m, dim], columns);
            let Matrix { data, ld } = queries.d_out;
            let a = Rows { data, ld };
            multiply(s, Fresh, a, &keys.value_columns, (&mut scores.slopes, BLOCK_KV), [m, dim_v], columns);
        }
        TileStep::Weights { queries, logits, seen, scores } => {
            for (row, &seen) in seen.iter().enumerate() {
                let range = row * BLOCK_KV..(row + 1) * BLOCK_KV;
                let line = (&mut scores.weights[range.clone()], &mut scores.slopes[range]);
                weigh(s, logits, [queries.lse[row], queries.delta[row]], seen, line);
            }
        }
        TileStep::Gradients { queries, keys, scores, dq, dk, dv } => {
            let (m, k) = (queries.rows, keys.keys);
            let of = |data| Columns { data, ld: BLOCK_KV };
            let (ld, ld_v) = (queries.query.ld, queries.d_out.ld);
            multiply(s, Added, of(&scores.weights[..]), &queries.d_out, (dv, ld_v), [k, m], ld_v);
            multiply(s, Added, of(&scores.slopes[..]), &queries.query, (dk, ld), [k, m], ld);
            let a = Rows { data: &scores.slopes, ld: BLOCK_KV };
            multiply(s, Added, a, &keys.rows, (dq, ld), [m, k], ld);
        }
    }
}

/// C (+)= A · B for `columns` columns, a multiple of the lanes.
#[inline(always)]
fn multiply<S: Simd, P: crate::simd::Product<S>, A: crate::simd::Lhs>(
    s: S,
    product: P,
    a: A,
    b: &Matrix<'_>,
    (c, ldc): (&mut [f32], usize),
    [m, k]: [usize; 2],
    columns: usize,
) {
    let mut column = 0;
    while column < columns {
        let part = Part { from: &b.data[column..], ld: b.ld };
        let c = (&mut c[column..], ldc);
        let vectors = (columns - column) / S::LANES;
        if vectors >= 4 && S::MAX_VECTORS >= 4 {
            gemm_part::<S, P, A, 4>(s, product, a, part, c, [m, k], S::TILE_ROWS[3]);
            column += 4 * S::LANES;
        } else if vectors >= 2 {
            gemm_part::<S, P, A, 2>(s, product, a, part, c, [m, k], S::TILE_ROWS[1]);
            column += 2 * S::LANES;
        } else {
            gemm_part::<S, P, A, 1>(s, product, a, part, c, [m, k], S::TILE_ROWS[0]);
            column += S::LANES;
        }
    }
}

/// Turns a row's S and dP into P and dS, and everything outside `from..end` into 0.
#[inline(always)]
fn weigh<S: Simd>(
    s: S,
    logits: Logits,
    [lse, delta]: [f32; 2],
    [from, end]: [usize; 2],
    (weights, slopes): (&mut [f32], &mut [f32]),
) {
    let log2e = std::f32::consts::LOG2_E;
    let (first, last) = (from / S::LANES * S::LANES, end.next_multiple_of(S::LANES));
    let (lse, delta) = (s.splat(-lse), s.splat(delta));
    let lines = weights[first..last].chunks_exact_mut(S::LANES);
    for (weights, slopes) in lines.zip(slopes[first..last].chunks_exact_mut(S::LANES)) {
        let (score, d_weight) = (s.load(weights), s.load(slopes));
        let (exponent, slope) = match logits.cap {
            None => (s.fma(score, s.splat(logits.scale * log2e), lse), None),
            Some(cap) => {
                let capped = tanh(s, s.mul(score, s.splat(logits.scale / cap)));
                let slope = s.sub(s.splat(1.0), s.mul(capped, capped));
                (s.fma(capped, s.splat(cap * log2e), lse), Some(slope))
            }
        };
        let weight = s.exp2(exponent);
        let d_logit = s.mul(weight, s.sub(d_weight, delta));
        s.store(weight, weights);
        s.store(slope.map_or(d_logit, |slope| s.mul(d_logit, slope)), slopes);
    }
    for line in [weights, slopes] {
        line[..from].fill(0.0);
        line[end..].fill(0.0);
    }
}
