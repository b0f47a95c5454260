//! Reference implementations: standard attention, row by row, in f64 or in the input precision.
//!
//! [`oracle`] computes the exact result, and [`gradients`] the exact backward pass.
//! [`reference_in_precision`] computes standard attention in the input precision; its distance from the
//! oracle is the basis of tolerances. This crate shares no code with the kernels that it judges.
//!
//! Rows without mass: a query that sees no key, or only keys whose logit is −∞, has O = 0 and LSE = −∞. For a
//! row with a visible logit of NaN or +∞, O and LSE are NaN. A key that a row does not see does not affect
//! the row, even if the key is NaN or infinite. With an attention sink, a row without keys has O = 0 and
//! LSE = the sink.
//!
//! Both share one code, generic over an `Arithmetic`. Sixteen query rows are computed together, one per lane,
//! so that every inner loop multiplies a vector by a number. A block of rows stores its logits (16 · seq_kv
//! numbers).

mod backward;
mod before;
mod exponentials;
mod formats;
mod fp8;
mod products;
mod roundings;
mod rows;

use half::{bf16, f16};
use problem::program::{InRow, Point, Precision};
use problem::{
    DType, DTypes, Dropout, Element, Elements, KeyPlaces, Operand, Operands, PassKind, Problem, ProblemError,
    Program, Sequence, Span, Tensor,
};
use rayon::prelude::*;

pub use backward::{GradientReference, gradients, gradients_in_precision, gradients_rounded};
use before::{Before, Continued};
use exponentials::exponentiate;
use formats::{Format, Tf32};
pub use fp8::{SUM_KEYS, WEIGHT_FACTOR};
use rows::Rows;

/// Dense outputs of a reference implementation. Rows that belong to no sequence are NaN.
#[derive(Clone, Debug, PartialEq)]
pub struct Reference {
    /// `[batch, heads_q, seq_q, head_dim_v]`; `[heads_q, rows, head_dim_v]` for packed queries.
    pub out: Vec<f64>,
    /// `[batch, heads_q, seq_q]`, or `[heads_q, rows]` for packed queries: natural logarithm of the sum of
    /// exponentials of the logits, the sink included.
    pub lse: Vec<f64>,
    /// The standard deviation of each element of `out` by the roundings of logits in f32, from
    /// [`oracle_of_rows`] for f32 inputs; otherwise 0. 16-bit logits of standard attention have larger errors
    /// than f32 logits of a kernel.
    pub deviation: Vec<f64>,
}

/// Attention in f64 on the given inputs, which are already rounded to their types. The problem has no
/// operands other than Q, K and V.
///
/// # Errors
/// A [`ProblemError`] if the problem or a buffer is rejected.
pub fn oracle<Q: Element, K: Element, V: Element>(
    problem: &Problem,
    q: &[Q],
    k: &[K],
    v: &[V],
) -> Result<Reference, ProblemError> {
    oracle_with(problem, &Operands::qkv(Q::elements(q), K::elements(k), V::elements(v)))
}

/// Like [`oracle`], with all inputs of the problem.
///
/// # Errors
/// A [`ProblemError`] if the problem, a buffer or an operand is rejected.
pub fn oracle_with(problem: &Problem, inputs: &Operands<'_>) -> Result<Reference, ProblemError> {
    attend::<Exact<false>>(problem, inputs, None)
}

/// Like [`oracle_with`], with [`Reference::deviation`]. With `wanted`, only for the rows whose element is
/// set, in the order of the LSE; other rows may be NaN.
///
/// # Errors
/// A [`ProblemError`] if the problem, a buffer or an operand is rejected.
pub fn oracle_of_rows(
    problem: &Problem,
    inputs: &Operands<'_>,
    wanted: Option<&[bool]>,
) -> Result<Reference, ProblemError> {
    attend::<Exact<true>>(problem, inputs, wanted)
}

/// Standard attention in the precision of its inputs, like the reference of FlashAttention's tests. Twice its
/// distance from [`oracle`] serves as a tolerance. The problem has no operands other than Q, K and V.
///
/// - With 16- and 32-bit inputs, Q·scale, S, P and O are rounded to their type; sums and the softmax are f32.
/// - With products in tf32, Q, K, V and P are rounded to tf32.
/// - With 8-bit Q and K, S = Q Kᵀ is summed as tensor cores sum 8-bit products, and is f32 from there on.
/// - With 8-bit V, P is multiplied by [`WEIGHT_FACTOR`] and rounded to e4m3, and P V is summed as tensor
///   cores sum 8-bit products, [`SUM_KEYS`] keys at a time; those sums are added in f32. The softmax's
///   denominator is the sum of unrounded weights. With 16-bit V, P is rounded to V's type.
///
/// # Errors
/// A [`ProblemError`] if the problem or a buffer is rejected.
pub fn reference_in_precision<Q: Element, K: Element, V: Element>(
    problem: &Problem,
    q: &[Q],
    k: &[K],
    v: &[V],
) -> Result<Reference, ProblemError> {
    reference_in_precision_with(problem, &Operands::qkv(Q::elements(q), K::elements(k), V::elements(v)))
}

/// Like [`reference_in_precision`], with all inputs of the problem.
///
/// # Errors
/// A [`ProblemError`] if the problem, a buffer or an operand is rejected.
pub fn reference_in_precision_with(
    problem: &Problem,
    inputs: &Operands<'_>,
) -> Result<Reference, ProblemError> {
    reference_in_precision_of_rows(problem, inputs, None)
}

/// Like [`reference_in_precision_with`]. With `wanted`, only for the rows whose element is set, in the order
/// of the LSE; other rows may be NaN.
///
/// # Errors
/// A [`ProblemError`] if the problem, a buffer or an operand is rejected.
pub fn reference_in_precision_of_rows(
    problem: &Problem,
    inputs: &Operands<'_>,
    wanted: Option<&[bool]>,
) -> Result<Reference, ProblemError> {
    let DTypes { q, v, tf32, .. } = problem.dtypes;
    match (q, v) {
        (DType::F16, _) => attend::<Rounded<f16, f16>>(problem, inputs, wanted),
        (DType::Bf16, _) => attend::<Rounded<bf16, bf16>>(problem, inputs, wanted),
        (_, DType::F16) => attend::<Rounded<f32, f16>>(problem, inputs, wanted),
        (_, DType::Bf16) => attend::<Rounded<f32, bf16>>(problem, inputs, wanted),
        _ if tf32 => attend::<Rounded<f32, Tf32, Tf32>>(problem, inputs, wanted),
        _ => attend::<Rounded<f32, f32>>(problem, inputs, wanted),
    }
}

/// Number of query rows computed together: a vector of f32 in AVX-512, two of f64.
const LANES: usize = 16;

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
    /// Precision of programs.
    const PRECISION: Precision;
    /// Whether values that standard attention stores are rounded.
    const ROUNDS: bool;
    /// Whether [`Reference::deviation`] is computed.
    const DEVIATES: bool = false;
    fn real(x: f32) -> Self::Real;
    /// An element of Q, K or V as an operand of a product.
    fn input(x: f32) -> Self::Real;
    /// Rounding of Q·scale and S.
    fn store(x: Self::Real) -> Self::Real;
    /// Rounds a weight of P to the precision of the type, not to its range of exponents.
    fn store_weight(x: Self::Real) -> Self::Real;
    fn exp(x: Self::Real) -> Self::Real;
    fn ln(x: Self::Real) -> Self::Real;
    fn tanh(x: Self::Real) -> Self::Real;
    /// Converts a number that was computed in f64: a program's result, or a sum of 8-bit products.
    fn narrow(x: f64) -> Self::Real;
    /// Rounding of O.
    fn output(x: Self::Real, dtype: DType) -> f64;
}

/// f64; with `DEVIATES`, also the deviation.
struct Exact<const DEVIATES: bool>;

impl<const DEVIATES: bool> Arithmetic for Exact<DEVIATES> {
    type Real = f64;
    const PRECISION: Precision = Precision::Exact;
    const ROUNDS: bool = false;
    const DEVIATES: bool = DEVIATES;
    const NEG_INFINITY: f64 = f64::NEG_INFINITY;
    fn real(x: f32) -> f64 {
        f64::from(x)
    }
    fn input(x: f32) -> f64 {
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
    fn narrow(x: f64) -> f64 {
        x
    }
    fn output(x: f64, _: DType) -> f64 {
        x
    }
}

/// Q·scale and S are rounded to `S`, weights to `W`, and inputs, which have their type already, to `I`.
struct Rounded<S, W, I = f32>(std::marker::PhantomData<(S, W, I)>);

impl<S: Format, W: Format, I: Format> Arithmetic for Rounded<S, W, I> {
    type Real = f32;
    const PRECISION: Precision = Precision::Single;
    const ROUNDS: bool = true;
    const NEG_INFINITY: f32 = f32::NEG_INFINITY;
    fn real(x: f32) -> f32 {
        x
    }
    fn input(x: f32) -> f32 {
        I::round(x)
    }
    #[inline(always)]
    fn store(x: f32) -> f32 {
        S::round(x)
    }
    #[inline(always)]
    fn store_weight(x: f32) -> f32 {
        // Rounded in [1, 2), where every type has its full precision; a NaN stays one.
        let power = f32::from_bits(x.to_bits() & f32::INFINITY.to_bits());
        if power == 0.0 { x } else { W::round(x / power) * power }
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
    fn narrow(x: f64) -> f32 {
        x as f32
    }
    fn output(x: f32, dtype: DType) -> f64 {
        f64::from(match dtype {
            DType::F16 => Element::to_f32(f16::from_f32(x)),
            DType::Bf16 => Element::to_f32(bf16::from_f32(x)),
            _ => x,
        })
    }
}

/// The rows of a sequence in one head of K or V, converted and dense.
fn widen_head<A: Arithmetic>(view: Rows<'_>, places: KeyPlaces<'_>, span: Span, head: usize) -> Vec<A::Real> {
    let mut row = Vec::new();
    let mut all = Vec::new();
    for index in 0..span.len {
        let (batch, at) = places.place(span.batch, span.start + index);
        let elements = view.row(batch, head, at);
        row.resize(elements.len(), 0.0);
        elements.widen(&mut row);
        all.extend(row.iter().map(|&x| A::input(x)));
    }
    all
}

fn attend<A: Arithmetic>(
    problem: &Problem,
    inputs: &Operands<'_>,
    wanted: Option<&[bool]>,
) -> Result<Reference, ProblemError> {
    problem.check()?;
    problem.expect_pass(PassKind::Forward)?;
    problem.check_inputs(inputs, |elements| (elements.dtype(), elements.len()))?;
    let [queries, k, v] = [Tensor::Q, Tensor::K, Tensor::V].map(|tensor| Rows::new(problem, tensor, inputs));
    let (values, places) = (&OtherValues::new(problem, inputs), KeyPlaces::of(problem, inputs));
    let [_, heads, all_rows, dim_v] = problem.extents(Tensor::Out);
    let mut out = vec![f64::NAN; problem.lse_len() * dim_v];
    let mut lse = vec![f64::NAN; problem.lse_len()];
    let mut deviation = vec![0.0; out.len()];
    let group = problem.group_size();
    // Heads are processed one after the other, so that only one head of K and V is converted at a time.
    for (batch, sequence) in problem.sequences(inputs)?.into_iter().enumerate() {
        let mut widened = (Vec::new(), Vec::new());
        for head in 0..heads {
            if head % group == 0 {
                widened.0 = widen_head::<A>(k, places, sequence.kv, head / group);
                widened.1 = widen_head::<A>(v, places, sequence.kv, head / group);
            }
            let Span { batch: outer, start, len } = sequence.q;
            let first = (outer * heads + head) * all_rows + start;
            let wanted = wanted.and_then(|wanted| wanted.get(first..first + len));
            let elements = first * dim_v..(first + len) * dim_v;
            let (out, deviation) = (&mut out[elements.clone()], &mut deviation[elements]);
            let lse = &mut lse[first..first + len];
            let blocks = out.par_chunks_mut(LANES * dim_v).zip(deviation.par_chunks_mut(LANES * dim_v));
            blocks.zip(lse.par_chunks_mut(LANES)).enumerate().for_each(|(block, ((out, deviation), lse))| {
                let unwanted = |rows: &[bool]| !rows.iter().skip(block * LANES).take(LANES).any(|&row| row);
                if wanted.is_some_and(unwanted) {
                    return;
                }
                let row = |lane| queries.row(outer, head, start + block * LANES + lane);
                let rows: Vec<Elements<'_>> = (0..lse.len()).map(row).collect();
                let place = Place { problem, values, sequence, batch, head, first: block * LANES };
                row_block::<A>(&place, &rows, (&widened.0, &widened.1), (out, deviation), lse);
            });
        }
    }
    Ok(Reference { out, lse, deviation })
}

/// The values of the inputs beside Q, K, V and lengths.
struct OtherValues<'a> {
    before: Option<Before<'a>>,
    sinks: &'a [f32],
    temperature: &'a [f32],
    dropout: Option<Dropout>,
    tables: Vec<Elements<'a>>,
    descale_q: &'a [f32],
    descale_k: &'a [f32],
    descale_v: &'a [f32],
}

impl<'a> OtherValues<'a> {
    fn new(problem: &Problem, inputs: &Operands<'a>) -> OtherValues<'a> {
        let factors = |tensor| inputs.floats(Operand::Descale(tensor));
        OtherValues {
            before: Before::new(problem, inputs),
            sinks: inputs.floats(Operand::Sinks),
            temperature: inputs.floats(Operand::Temperature),
            dropout: Dropout::of(problem, inputs),
            tables: inputs.tables(),
            descale_q: factors(Tensor::Q),
            descale_k: factors(Tensor::K),
            descale_v: factors(Tensor::V),
        }
    }
}

/// The location of a block of rows.
struct Place<'a> {
    problem: &'a Problem,
    values: &'a OtherValues<'a>,
    sequence: Sequence,
    batch: usize,
    head: usize,
    /// The first row's position in its sequence.
    first: usize,
}

impl Place<'_> {
    /// How a row whose LSE over the call's keys is `own` continues, if the call does.
    fn continued(&self, lane: usize, own: f64) -> Option<Continued> {
        let before = self.values.before.as_ref()?;
        let [_, heads, rows, _] = self.problem.extents(Tensor::Out);
        let Span { batch, start, .. } = self.sequence.q;
        let row = start + self.first + lane;
        let index = (batch * heads + self.head) * rows + row;
        Some(before.row([batch, self.head, row], index, own))
    }

    /// A program in the row of a lane.
    fn in_row<'a>(&'a self, program: &'a Program, lane: usize, precision: Precision) -> InRow<'a> {
        let point = Point {
            query: self.first + lane,
            batch: self.batch,
            head: self.head,
            query_length: self.sequence.q.len,
            key_length: self.sequence.kv.len,
            ..Point::default()
        };
        program.in_row(&self.problem.programs, &self.values.tables, point, precision)
    }

    /// The product of the descale factors of a query and a key.
    fn descale_of_logit<A: Arithmetic>(&self, lane: usize, key: usize) -> A::Real {
        let (problem, head) = (self.problem, self.head / self.problem.group_size());
        let factor = |factors, tensor, row| {
            let factor = problem.descale(factors, tensor, [self.batch, head, row]);
            A::real(Problem::accepted_factor(tensor, factor))
        };
        let values = self.values;
        factor(values.descale_q, Tensor::Q, self.first + lane) * factor(values.descale_k, Tensor::K, key)
    }

    /// The descale factor of a value.
    fn descale_of_value<A: Arithmetic>(&self, key: usize) -> A::Real {
        let head = self.head / self.problem.group_size();
        let factor = self.problem.descale(self.values.descale_v, Tensor::V, [self.batch, head, key]);
        A::real(Problem::accepted_factor(Tensor::V, factor))
    }

    /// For each key, the factor of dropout in each of `lanes` rows; `None` without dropout.
    fn dropped(&self, lanes: usize) -> Option<Vec<[f32; LANES]>> {
        let dropout = self.values.dropout?;
        let mut factors = vec![[0.0; LANES]; self.sequence.kv.len];
        let mut of_row = vec![0.0; factors.len()];
        for lane in 0..lanes {
            let head = self.batch * self.problem.heads_q + self.head;
            dropout.factors(head, self.first + lane, 0..of_row.len(), &mut of_row);
            factors.iter_mut().zip(&of_row).for_each(|(factors, &factor)| factors[lane] = factor);
        }
        Some(factors)
    }

    /// For each key, whether each of `lanes` rows sees it.
    fn visible(&self, lanes: usize) -> Vec<[bool; LANES]> {
        let (rows, keys) = (self.sequence.q.len, self.sequence.kv.len);
        let mut visible = vec![[false; LANES]; keys];
        for lane in 0..lanes {
            let mask = self.problem.programs.mask.as_ref();
            let mut mask = mask.map(|mask| self.in_row(mask, lane, Precision::Exact));
            let seen = self.problem.band.keys(self.first + lane, rows, keys);
            for (key, visible) in (seen.start..seen.end).zip(&mut visible[seen.start..]) {
                visible[lane] = mask.as_mut().is_none_or(|mask| mask.evaluate(key, 0.0).is_true());
            }
        }
        visible
    }
}

/// Up to [`LANES`] query rows against one head of keys and values.
fn row_block<A: Arithmetic>(
    place: &Place<'_>,
    rows: &[Elements<'_>],
    (keys, values): (&[A::Real], &[A::Real]),
    (out, deviation): (&mut [f64], &mut [f64]),
    lse: &mut [f64],
) {
    let problem = place.problem;
    let (dim, dim_v) = (problem.head_dim, problem.head_dim_v);
    // Padding lanes see no key.
    let visible = place.visible(rows.len());
    let temperature =
        place.values.temperature.get(place.head).map_or(A::real(1.0), |&factor| A::real(factor));
    let (scale, cap) = (A::real(problem.softmax_scale()) * temperature, problem.score.softcap.map(A::real));
    // With 8-bit keys, queries are multiplied without change; the scale is applied later.
    let late = problem.dtypes.k.is_fp8();
    let of_query = if late { A::real(1.0) } else { scale };
    let mut query = vec![[A::Real::default(); LANES]; dim];
    let mut wide = vec![0.0; dim];
    for (lane, row) in rows.iter().enumerate() {
        row.widen(&mut wide);
        for (q, &x) in query.iter_mut().zip(&wide) {
            q[lane] = A::store(A::input(x) * of_query);
        }
    }
    let sink = problem.score.sink.then(|| A::real(place.values.sinks[place.head]));
    let mut weights = Vec::with_capacity(visible.len());
    let mut max = [sink.unwrap_or(A::NEG_INFINITY); LANES];
    let score = problem.programs.score.as_ref();
    let score = |lane| score.map(|score| place.in_row(score, lane, A::PRECISION));
    let mut scores: Vec<Option<InRow>> = (0..rows.len()).map(score).collect();
    let mut logit_of = |lane: usize, key: usize, sum: A::Real| {
        let logit = match cap {
            None => A::store(sum),
            Some(cap) => A::store(cap * A::tanh(A::store(sum) / cap)),
        };
        let Some(score) = &mut scores[lane] else { return logit };
        A::store(A::narrow(score.evaluate(key, logit.into()).float()))
    };
    // The products with the keys between the first and the last one that any row sees.
    let sees = |visible: &[bool; LANES]| visible.contains(&true);
    let first = visible.iter().position(sees).unwrap_or(0);
    let end = visible.iter().rposition(sees).map_or(first, |last| last + 1);
    let seen = &keys[first * dim..end * dim];
    let products = match problem.dtypes.q.is_fp8() && A::ROUNDS {
        true => fp8::dot_products::<A>(&query, seen),
        false => products::dot_products(&query, seen),
    };
    let deviates = A::DEVIATES && problem.dtypes.q == DType::F32;
    let squares = match deviates {
        true => roundings::squared_products(&query, seen),
        false => Vec::new(),
    };
    let mut variances = vec![[0.0; LANES]; if deviates { visible.len() } else { 0 }];
    // Most blocks begin with keys that all rows see, whose logits are the products.
    let plain = cap.is_none() && problem.programs.score.is_none() && !late && !deviates;
    let shared = visible.iter().take_while(|&sees| plain && *sees == [true; LANES]).count();
    weights.extend_from_slice(&products[..shared]);
    exponentials::store::<A>(&mut weights, &mut max);
    for (key, visible) in visible.iter().enumerate().skip(shared) {
        let mut logits = [A::NEG_INFINITY; LANES];
        if visible.contains(&true) {
            let mut sums = products[key - first];
            if late {
                for (lane, sum) in sums.iter_mut().enumerate() {
                    *sum = *sum * scale * place.descale_of_logit::<A>(lane, key);
                }
            }
            for lane in (0..LANES).filter(|&lane| visible[lane]) {
                let logit = logit_of(lane, key, sums[lane]);
                if deviates {
                    let (sum, squares) = (sums[lane], squares[key - first][lane].into());
                    let error = A::narrow(roundings::of_product(dim, sum.into(), squares));
                    let change = logit_of(lane, key, sum + error) - logit;
                    variances[key][lane] = roundings::of_logit(logit.into(), change.into());
                }
                // A NaN logit does not change the maximum. As a weight, it makes the row NaN.
                max[lane] = if logit > max[lane] { logit } else { max[lane] };
                logits[lane] = logit;
            }
        }
        weights.push(logits);
    }
    let fp8 = problem.dtypes.weights() == DType::E4m3 && A::ROUNDS;
    let sum = exponentiate::<A>(&mut weights, &max, sink, fp8, &visible);
    let weights_of_logits = deviates.then(|| weights.clone());
    let dropped = place.dropped(rows.len());
    if let Some(dropped) = &dropped {
        for (weights, dropped) in weights.iter_mut().zip(dropped) {
            weights.iter_mut().zip(dropped).for_each(|(weight, &z)| *weight = *weight * A::real(z));
        }
    }
    let mut acc = vec![[A::Real::default(); LANES]; dim_v];
    if fp8 {
        fp8::multiply_values::<A>(place, &mut weights, &visible, &sum, values, &mut acc);
    }
    if problem.scales.v.is_some() && !fp8 {
        for (key, weights) in weights.iter_mut().enumerate() {
            *weights = weights.map(|weight| weight * place.descale_of_value::<A>(key));
        }
    }
    if !fp8 {
        weigh_values(&mut acc, &weights, values, &visible, rows.len());
    }
    if let Some(weights) = weights_of_logits {
        let weights: Vec<[f64; LANES]> = weights.iter().map(|weights| weights.map(Into::into)).collect();
        let shares = roundings::shares(&weights, &variances);
        let values: Vec<f64> = values.iter().map(|&x| x.into()).collect();
        deviations(&acc, (&shares, dropped.as_deref()), &values, &visible, deviation);
    }
    for (lane, out) in out.chunks_mut(dim_v).enumerate() {
        let empty = sum[lane].into() == 0.0;
        let own = if empty { f64::NEG_INFINITY } else { (max[lane] + A::ln(sum[lane])).into() };
        let continued = place.continued(lane, own);
        for (column, (out, acc)) in out.iter_mut().zip(&acc).enumerate() {
            let x = if empty { A::Real::default() } else { acc[lane] };
            let x = match &continued {
                None => x,
                Some(row) => A::narrow(row.own) * x + A::narrow(row.out[column]),
            };
            *out = A::output(x, problem.dtypes.out);
        }
        if let Some(row) = continued.as_ref().filter(|_| deviates) {
            deviation[lane * dim_v..][..dim_v].iter_mut().for_each(|x| *x *= row.own);
        }
        lse[lane] = continued.map_or(own, |row| row.lse);
    }
}

/// Adds each key's values times its weights to `acc`. A weight of 0 is not multiplied by a NaN that the row
/// does not see.
fn weigh_values<R: products::Real>(
    acc: &mut [[R; LANES]],
    weights: &[[R; LANES]],
    values: &[R],
    visible: &[[bool; LANES]],
    rows: usize,
) {
    let dim = acc.len();
    let seen_by_all = |key: &usize| visible[*key][..rows].iter().all(|&sees| sees);
    let mut key = 0;
    while key < weights.len() {
        let run = (key..weights.len()).take_while(seen_by_all).count();
        if run > 0 {
            products::add_weighted(acc, &weights[key..key + run], &values[key * dim..(key + run) * dim]);
            key += run;
            continue;
        }
        let row = &values[key * dim..(key + 1) * dim];
        for lane in (0..rows).filter(|&lane| visible[key][lane]) {
            for (acc, &x) in acc.iter_mut().zip(row) {
                acc[lane] = acc[lane] + weights[key][lane] * x;
            }
        }
        key += 1;
    }
}

/// The deviations of the rows whose outputs are `acc`, from the shares of [`roundings::shares`] and the
/// factors of dropout, which multiply the values.
fn deviations<R: Copy + Into<f64>>(
    acc: &[[R; LANES]],
    (shares, dropped): (&[[f64; LANES]], Option<&[[f32; LANES]]>),
    values: &[f64],
    visible: &[[bool; LANES]],
    deviation: &mut [f64],
) {
    let dim = acc.len();
    let rows = deviation.len() / dim;
    let [mut of_values, mut of_squares] = [(); 2].map(|()| vec![[0.0; LANES]; dim]);
    let times = |power: i32| -> Vec<[f64; LANES]> {
        let factor = |key: usize, lane: usize| dropped.map_or(1.0, |z| f64::from(z[key][lane]).powi(power));
        let of_key = |(key, shares): (usize, &[f64; LANES])| {
            std::array::from_fn(|lane| shares[lane] * factor(key, lane))
        };
        shares.iter().enumerate().map(of_key).collect()
    };
    weigh_values(&mut of_values, &times(1), values, visible, rows);
    weigh_values(&mut of_squares, &times(2), &roundings::squares(values), visible, rows);
    for (lane, deviation) in deviation.chunks_mut(dim).enumerate() {
        let of_keys: f64 = shares.iter().map(|shares| shares[lane]).sum();
        for (d, deviation) in deviation.iter_mut().enumerate() {
            let sums = [of_keys, of_values[d][lane], of_squares[d][lane]];
            *deviation = roundings::of_output(acc[d][lane].into(), sums);
        }
    }
}
