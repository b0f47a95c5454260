//! Reference implementations: standard attention, row by row, in f64 or in the input precision.
//!
//! [`oracle`] computes the exact result. [`reference_in_precision`] computes standard attention in the input
//! precision; its distance from the oracle is the basis of tolerances. This crate shares no code with the
//! kernels that it judges.
//!
//! Rows without mass: a query that sees no key, or only keys whose logit is −∞, has O = 0 and LSE = −∞. For a
//! row with a visible logit of NaN or +∞, O and LSE are NaN. A key that a row does not see does not affect
//! the row, even if the key is NaN or infinite.
//!
//! Both share one code, generic over an `Arithmetic`. Eight query rows are computed together, one per lane,
//! so that every inner loop multiplies a vector by a number. A block of rows stores its logits (8 · seq_kv
//! numbers).

mod rows;

use problem::{DType, Element, KeyRange, Problem, ProblemError, Tensor};
use rayon::prelude::*;

use rows::Rows;

/// Why a reference cannot be computed. Each message names the argument, its value and what is accepted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OracleError {
    /// The problem is not valid.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// The element type of the slices differs from the problem's.
    #[error("the slices hold {slices}, but problem.dtype = {problem}; pass slices of {problem}")]
    DType {
        /// Element type of the slices.
        slices: DType,
        /// Element type of the problem.
        problem: DType,
    },
    /// A slice is shorter than its tensor.
    #[error("{tensor} has {len} elements; its shape and strides reach over {needed}")]
    BufferTooShort {
        /// The tensor: q, k or v.
        tensor: &'static str,
        /// Elements given.
        len: usize,
        /// Elements needed.
        needed: usize,
    },
}

/// Dense outputs of a reference implementation.
#[derive(Clone, Debug, PartialEq)]
pub struct Reference {
    /// `[batch, heads_q, seq_q, head_dim_v]`.
    pub out: Vec<f64>,
    /// `[batch, heads_q, seq_q]`: natural logarithm of the sum of exponentials of the scaled logits.
    pub lse: Vec<f64>,
}

/// Attention in f64 on the given inputs, which are already rounded to their type.
///
/// # Errors
/// An [`OracleError`] if the problem or a buffer is rejected.
pub fn oracle<T: Element>(problem: &Problem, q: &[T], k: &[T], v: &[T]) -> Result<Reference, OracleError> {
    attend::<Exact, T>(problem, q, k, v)
}

/// Standard attention in the precision of its inputs, like the reference of FlashAttention's tests: Q·scale,
/// S, P and O are rounded to `T`; sums and the softmax are f32. Twice its distance from [`oracle`] serves as
/// a tolerance.
///
/// # Errors
/// An [`OracleError`] if the problem or a buffer is rejected.
pub fn reference_in_precision<T: Element>(
    problem: &Problem,
    q: &[T],
    k: &[T],
    v: &[T],
) -> Result<Reference, OracleError> {
    attend::<Rounded<T>, T>(problem, q, k, v)
}

/// Number of query rows computed together.
const LANES: usize = 8;

/// A real number type, and the rounding of stored values.
trait Arithmetic {
    /// The type of sums.
    type Real: Copy
        + Default
        + Into<f64>
        + PartialOrd
        + Send
        + Sync
        + std::ops::Add<Output = Self::Real>
        + std::ops::Sub<Output = Self::Real>
        + std::ops::Mul<Output = Self::Real>
        + std::ops::Div<Output = Self::Real>;
    const NEG_INFINITY: Self::Real;
    fn real(x: f32) -> Self::Real;
    /// Rounding of the values that standard attention stores: Q·scale, S, P and O.
    fn store(x: Self::Real) -> Self::Real;
    /// Rounds a weight of P to the precision of the type, not to its range of exponents.
    fn store_weight(x: Self::Real) -> Self::Real;
    fn exp(x: Self::Real) -> Self::Real;
    fn ln(x: Self::Real) -> Self::Real;
    fn tanh(x: Self::Real) -> Self::Real;
}

struct Exact;

impl Arithmetic for Exact {
    type Real = f64;
    const NEG_INFINITY: f64 = f64::NEG_INFINITY;
    fn real(x: f32) -> f64 {
        f64::from(x)
    }
    fn store(x: f64) -> f64 {
        x
    }
    fn store_weight(x: f64) -> f64 {
        x
    }
    fn exp(x: f64) -> f64 {
        x.exp()
    }
    fn ln(x: f64) -> f64 {
        x.ln()
    }
    fn tanh(x: f64) -> f64 {
        x.tanh()
    }
}

struct Rounded<T>(std::marker::PhantomData<T>);

impl<T: Element> Arithmetic for Rounded<T> {
    type Real = f32;
    const NEG_INFINITY: f32 = f32::NEG_INFINITY;
    fn real(x: f32) -> f32 {
        x
    }
    fn store(x: f32) -> f32 {
        T::from_f32(x).to_f32()
    }
    fn store_weight(x: f32) -> f32 {
        // Rounded in [1, 2), where every type has its full precision; a NaN stays one.
        let power = f32::from_bits(x.to_bits() & f32::INFINITY.to_bits());
        if power == 0.0 { x } else { Self::store(x / power) * power }
    }
    fn exp(x: f32) -> f32 {
        x.exp()
    }
    fn ln(x: f32) -> f32 {
        x.ln()
    }
    fn tanh(x: f32) -> f32 {
        x.tanh()
    }
}

/// `count` rows of one head of K or V, converted and dense.
fn widen_head<A: Arithmetic, T: Element>(
    view: Rows<'_, T>,
    batch: usize,
    head: usize,
    count: usize,
) -> Vec<A::Real> {
    let rows = (0..count).flat_map(|row| view.row(batch, head, row));
    rows.map(|x| A::real(x.to_f32())).collect()
}

fn attend<A: Arithmetic, T: Element>(
    problem: &Problem,
    q: &[T],
    k: &[T],
    v: &[T],
) -> Result<Reference, OracleError> {
    problem.check()?;
    if T::DTYPE != problem.dtype {
        return Err(OracleError::DType { slices: T::DTYPE, problem: problem.dtype });
    }
    let [queries, k, v] = [
        Rows::new(problem, Tensor::Q, q)?,
        Rows::new(problem, Tensor::K, k)?,
        Rows::new(problem, Tensor::V, v)?,
    ];
    let (heads, rows, dim_v) = (problem.heads_q, problem.seq_q, problem.head_dim_v);
    let mut out = vec![0.0; problem.batch * heads * rows * dim_v];
    let mut lse = vec![0.0; problem.batch * heads * rows];
    let group = problem.group_size();
    // Heads are processed one after the other, so that only one head of K and V is converted at a time.
    let per_head = out.chunks_mut(rows * dim_v).zip(lse.chunks_mut(rows)).enumerate();
    let mut widened = (Vec::new(), Vec::new());
    for (index, (out, lse)) in per_head {
        let (batch, head) = (index / heads, index % heads);
        if head % group == 0 {
            widened.0 = widen_head::<A, T>(k, batch, head / group, problem.seq_kv);
            widened.1 = widen_head::<A, T>(v, batch, head / group, problem.seq_kv);
        }
        let (keys, values) = (&widened.0, &widened.1);
        out.par_chunks_mut(LANES * dim_v).zip(lse.par_chunks_mut(LANES)).enumerate().for_each(
            |(block, (out, lse))| {
                let row = |lane| queries.row(batch, head, block * LANES + lane);
                let rows: Vec<&[T]> = (0..lse.len()).map(row).collect();
                let seen = |lane| problem.band.keys(block * LANES + lane, problem.seq_q, problem.seq_kv);
                row_block::<A, T>(problem, &rows, seen, keys, values, out, lse);
            },
        );
    }
    Ok(Reference { out, lse })
}

/// Up to [`LANES`] query rows against one head of keys and values.
fn row_block<A: Arithmetic, T: Element>(
    problem: &Problem,
    rows: &[&[T]],
    seen: impl Fn(usize) -> KeyRange,
    keys: &[A::Real],
    values: &[A::Real],
    out: &mut [f64],
    lse: &mut [f64],
) {
    let (dim, dim_v) = (problem.head_dim, problem.head_dim_v);
    // Padding lanes see no key.
    let nothing = KeyRange { start: 0, end: 0 };
    let seen: [KeyRange; LANES] = std::array::from_fn(|i| if i < rows.len() { seen(i) } else { nothing });
    let first = seen[..rows.len()].iter().map(|r| r.start).min().unwrap_or(0);
    let last = seen[..rows.len()].iter().map(|r| r.end).max().unwrap_or(0).max(first);
    let sees = |lane: usize, key: usize| (seen[lane].start..seen[lane].end).contains(&key);

    let (scale, cap) = (A::real(problem.softmax_scale()), problem.score.softcap.map(A::real));
    let mut query = vec![[A::Real::default(); LANES]; dim];
    for (lane, row) in rows.iter().enumerate() {
        for (q, x) in query.iter_mut().zip(*row) {
            q[lane] = A::store(A::real(x.to_f32()) * scale);
        }
    }
    let mut weights = Vec::with_capacity(last - first);
    let mut max = [A::NEG_INFINITY; LANES];
    for (key, row) in (first..last).zip(keys[first * dim..].chunks_exact(dim)) {
        let mut logits = [A::Real::default(); LANES];
        for (&x, q) in row.iter().zip(&query) {
            for (sum, &q) in logits.iter_mut().zip(q) {
                *sum = *sum + q * x;
            }
        }
        for lane in 0..LANES {
            let logit = match cap {
                _ if !sees(lane, key) => A::NEG_INFINITY,
                None => A::store(logits[lane]),
                Some(cap) => A::store(cap * A::tanh(A::store(logits[lane]) / cap)),
            };
            // A NaN logit does not change the maximum. As a weight, it makes the row NaN.
            max[lane] = if logit > max[lane] { logit } else { max[lane] };
            logits[lane] = logit;
        }
        weights.push(logits);
    }
    let sum = exponentiate::<A>(&mut weights, &max, |lane, i| sees(lane, first + i));
    let mut acc = vec![[A::Real::default(); LANES]; dim_v];
    for (key, weights) in (first..last).zip(&weights) {
        let row = &values[key * dim_v..(key + 1) * dim_v];
        if (0..rows.len()).all(|lane| sees(lane, key)) {
            for (acc, &x) in acc.iter_mut().zip(row) {
                for (acc, &weight) in acc.iter_mut().zip(weights) {
                    *acc = *acc + weight * x;
                }
            }
        } else {
            // A weight of 0 must not be multiplied by a NaN that the row does not see.
            for lane in (0..rows.len()).filter(|&lane| sees(lane, key)) {
                for (acc, &x) in acc.iter_mut().zip(row) {
                    acc[lane] = acc[lane] + weights[lane] * x;
                }
            }
        }
    }
    for (lane, out) in out.chunks_mut(dim_v).enumerate() {
        let empty = sum[lane].into() == 0.0;
        for (out, acc) in out.iter_mut().zip(&acc) {
            *out = if empty { 0.0 } else { A::store(acc[lane]).into() };
        }
        lse[lane] = if empty { f64::NEG_INFINITY } else { (max[lane] + A::ln(sum[lane])).into() };
    }
}

/// Turns logits into normalised weights, in place. Returns the sums of the exponentials. A lane without
/// mass gets weights and sum 0.
fn exponentiate<A: Arithmetic>(
    weights: &mut [[A::Real; LANES]],
    max: &[A::Real; LANES],
    sees: impl Fn(usize, usize) -> bool,
) -> [A::Real; LANES] {
    let mut sum = [A::Real::default(); LANES];
    for (i, weights) in weights.iter_mut().enumerate() {
        for lane in 0..LANES {
            let logit = weights[lane];
            // A logit of −∞ has weight 0, even if the maximum is −∞ too.
            let nothing = !sees(lane, i) || logit == A::NEG_INFINITY;
            weights[lane] = if nothing { A::Real::default() } else { A::exp(logit - max[lane]) };
            sum[lane] = sum[lane] + weights[lane];
        }
    }
    for weights in weights {
        for lane in 0..LANES {
            let massless = sum[lane].into() == 0.0;
            weights[lane] = if massless { weights[lane] } else { A::store_weight(weights[lane] / sum[lane]) };
        }
    }
    sum
}
