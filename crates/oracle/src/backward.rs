//! The gradients of attention, in f64 and with the roundings of the input precision.
//!
//! For a row i with LSE L_i and a key j that it sees, with the logit t and P = exp(t − L):
//!
//!   D_i = Σ_d dO_id O_id − dLSE_i, dV_j = Σ_i P dO_i, dT = P (dO_i·V_j − D_i), dS = dT · ∂t/∂s, dQ_i = scale
//!   Σ_j dS K_j, dK_j = scale Σ_i dS Q_i, dsink = −Σ_i exp(sink − L_i) D_i,
//!
//! and a table's element gains dT times the derivative of the program by that element. O and the LSE are
//! inputs. A row with an LSE of −∞ has no mass: its P and its share of every gradient are 0.
//!
//! With dropout, dV has Z P in place of P, and dT has Z (dO_i·V_j) in place of dO_i·V_j ([`Dropout`]).

use half::{bf16, f16};
use problem::program::{Derivative, InRow, Point, Precision};
use problem::{
    DType, Dropout, Operand, OperandMap, Operands, PassKind, Problem, ProblemError, Program, Sequence, Span,
    Table, Tensor,
};
use rayon::prelude::*;

use crate::formats::{Format, Tf32};
use crate::products::{add_row, dot};
use crate::roundings::{ROUNDING, of_logit, of_product};
use crate::rows::Rows;

/// The gradients of a reference implementation.
#[derive(Clone, Debug, PartialEq)]
pub struct GradientReference {
    /// Each output: tensors dense as `[batch, heads, rows, dim]`, the others as the problem has them. Rows of
    /// tensors that belong to no sequence are NaN.
    pub values: OperandMap<Vec<f64>>,
    /// The standard deviation of each element by the roundings of sums, logits and exponentials in f32, from
    /// [`gradients`]; from [`gradients_in_precision`] 0.
    pub deviation: OperandMap<Vec<f64>>,
}

/// The gradients in f64 on the given inputs, which are already rounded to their types.
///
/// # Errors
/// A [`ProblemError`] if the problem is no backward pass, or the problem or an operand is rejected.
pub fn gradients(problem: &Problem, inputs: &Operands<'_>) -> Result<GradientReference, ProblemError> {
    derive(problem, inputs, Rounding::None)
}

/// The gradients with the roundings that kernels make: P and dS are rounded to the type of the inputs before
/// they are multiplied, and the gradients to their types. With products in tf32, Q, K, V and dO are rounded
/// to tf32 too. All sums are in f64.
///
/// # Errors
/// A [`ProblemError`] if the problem is no backward pass, or the problem or an operand is rejected.
pub fn gradients_in_precision(
    problem: &Problem,
    inputs: &Operands<'_>,
) -> Result<GradientReference, ProblemError> {
    let rounding = if problem.dtypes.tf32 { Rounding::Tf32 } else { Rounding::To(problem.dtypes.q) };
    derive(problem, inputs, rounding)
}

/// Like [`gradients_in_precision`], with P and dS rounded to `factors`.
///
/// # Errors
/// A [`ProblemError`] if the problem is no backward pass, or the problem or an operand is rejected.
pub fn gradients_rounded(
    problem: &Problem,
    inputs: &Operands<'_>,
    factors: DType,
) -> Result<GradientReference, ProblemError> {
    derive(problem, inputs, Rounding::To(factors))
}

/// The roundings of factors of products.
#[derive(Clone, Copy, PartialEq)]
enum Rounding {
    None,
    To(DType),
    Tf32,
}

impl Rounding {
    /// P and dS as factors of products.
    fn factor(self, x: f64) -> f64 {
        match self {
            Rounding::None => x,
            Rounding::To(dtype) => round_to(dtype, x),
            Rounding::Tf32 => f64::from(Tf32::round(x as f32)),
        }
    }

    /// An element of an input as a factor of a product.
    fn input(self, x: f32) -> f64 {
        f64::from(if self == Rounding::Tf32 { Tf32::round(x) } else { x })
    }

    /// An element of a gradient.
    fn output(self, dtype: DType, x: f64) -> f64 {
        if self == Rounding::None { x } else { round_to(dtype, x) }
    }
}

fn round_to(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F16 => f16::from_f64(x).to_f64(),
        DType::Bf16 => bf16::from_f64(x).to_f64(),
        _ => f64::from(x as f32),
    }
}

/// Sums of one gradient, and what their error depends on.
#[derive(Clone, Default)]
struct Sums {
    value: Vec<f64>,
    /// Variance by the errors of the terms.
    variance: Vec<f64>,
    /// Sum of the squares of the terms.
    squares: Vec<f64>,
    /// Number of terms of each sum.
    terms: Vec<f64>,
}

impl Sums {
    fn new(len: usize) -> Sums {
        let zeros = || vec![0.0; len];
        Sums { value: zeros(), variance: zeros(), squares: zeros(), terms: zeros() }
    }

    fn add(&mut self, at: usize, term: f64, variance: f64) {
        self.value[at] += term;
        self.variance[at] += variance;
        self.squares[at] += term * term;
        self.terms[at] += 1.0;
    }

    /// Adds `factor` times a row, at the row's place. `variance` is that of the factor.
    fn add_row(&mut self, first: usize, factor: f64, variance: f64, row: &[f64]) {
        let range = first..first + row.len();
        add_row(
            [
                &mut self.value[range.clone()],
                &mut self.variance[range.clone()],
                &mut self.squares[range.clone()],
                &mut self.terms[range],
            ],
            [factor, variance],
            row,
        );
    }

    fn merge(&mut self, other: &Sums) {
        let all = [
            (&mut self.value, &other.value),
            (&mut self.variance, &other.variance),
            (&mut self.squares, &other.squares),
            (&mut self.terms, &other.terms),
        ];
        for (to, from) in all {
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        }
    }

    /// The sums times `scale`, and their standard deviations.
    fn finish(&self, scale: f64) -> (Vec<f64>, Vec<f64>) {
        let deviation = |at: usize| {
            let order = ROUNDING * (self.terms[at] / 2.0 + 1.0) * (self.value[at].powi(2) + self.squares[at]);
            let deviation = scale.abs() * (self.variance[at] + order).sqrt();
            if deviation.is_finite() { deviation } else { 0.0 }
        };
        (self.value.iter().map(|x| x * scale).collect(), (0..self.value.len()).map(deviation).collect())
    }
}

/// The rows of a sequence in one head, dense.
fn head_of(rows: Rows<'_>, span: Span, head: usize, of: impl Fn(f32) -> f64) -> Vec<f64> {
    let mut all = Vec::new();
    let mut wide = Vec::new();
    for index in 0..span.len {
        let elements = rows.row(span.batch, head, span.start + index);
        wide.resize(elements.len(), 0.0);
        elements.widen(&mut wide);
        all.extend(wide.iter().map(|&x| of(x)));
    }
    all
}

/// A call.
struct Call<'a> {
    problem: &'a Problem,
    inputs: &'a Operands<'a>,
    tables: Vec<problem::Elements<'a>>,
    derivative: Option<Derivative>,
    dropout: Option<Dropout>,
    rounding: Rounding,
}

/// One KV head of a batch entry, and its query heads.
#[derive(Clone, Copy)]
struct KvHead {
    sequence: Sequence,
    batch: usize,
    head: usize,
}

/// What one KV head adds to the gradients.
struct Share {
    dq: Vec<Sums>,
    dk: Sums,
    dv: Sums,
    sinks: Sums,
    tables: Vec<Sums>,
}

fn derive(
    problem: &Problem,
    inputs: &Operands<'_>,
    rounding: Rounding,
) -> Result<GradientReference, ProblemError> {
    problem.check()?;
    problem.expect_pass(PassKind::Backward)?;
    problem.check_inputs(inputs, |elements| (elements.dtype(), elements.len()))?;
    let no_derivative =
        |error: problem::ProgramError| ProblemError::Program { what: "score", reason: error.to_string() };
    let derivative = problem.programs.score.as_ref().map(Program::derivative).transpose();
    let derivative = derivative.map_err(no_derivative)?;
    let dropout = Dropout::of(problem, inputs);
    let call = Call { problem, inputs, tables: inputs.tables(), derivative, dropout, rounding };
    let mut values = OperandMap::default();
    let mut deviation = OperandMap::default();
    for tensor in Tensor::GRADIENTS {
        let elements = problem.extents(tensor).iter().product();
        values.insert(tensor.into(), vec![f64::NAN; elements]);
        deviation.insert(tensor.into(), vec![0.0; elements]);
    }
    let mut sinks = Sums::new(problem.heads_q);
    let mut tables = call.table_sums();
    let heads: Vec<KvHead> = (0..)
        .zip(problem.sequences(inputs)?)
        .flat_map(|(batch, sequence)| (0..problem.heads_kv).map(move |head| KvHead { sequence, batch, head }))
        .collect();
    // Each share has sums for whole tables, so shares with tables are computed one after the other.
    let at_once = if tables.is_empty() { heads.len().max(1) } else { 1 };
    for heads in heads.chunks(at_once) {
        let shares: Vec<Share> = heads.par_iter().map(|head| call.share(*head)).collect();
        for (head, share) in heads.iter().zip(&shares) {
            call.place(*head, share, &mut values, &mut deviation);
            sinks.merge(&share.sinks);
            tables.iter_mut().zip(&share.tables).for_each(|(sums, share)| sums.merge(share));
        }
    }
    let of_sinks = problem.pass.wants().sinks.then_some((Operand::DSinks, &sinks));
    let wanted = (0..8).filter(|&table| problem.pass.wants().table(table));
    let of_tables = wanted.map(|table| (Operand::DTable(table), &tables[usize::from(table)]));
    for (operand, sums) in of_sinks.into_iter().chain(of_tables) {
        let (value, errors) = sums.finish(1.0);
        values.insert(operand, value.iter().map(|&x| rounding.output(DType::F32, x)).collect());
        deviation.insert(operand, errors);
    }
    if rounding != Rounding::None {
        deviation = deviation.map(|_, errors| vec![0.0; errors.len()]);
    }
    Ok(GradientReference { values, deviation })
}

impl Call<'_> {
    /// Empty sums for each table up to the last one whose gradient is wanted.
    fn table_sums(&self) -> Vec<Sums> {
        let wants = self.problem.pass.wants();
        let last = (0..8u8).rev().find(|&table| wants.table(table));
        let tables = &self.problem.programs.tables[..last.map_or(0, |last| usize::from(last) + 1)];
        tables.iter().map(|table| Sums::new(table.gradient().span())).collect()
    }

    /// Adds a share to dQ, dK and dV.
    fn place(
        &self,
        head: KvHead,
        share: &Share,
        values: &mut OperandMap<Vec<f64>>,
        deviation: &mut OperandMap<Vec<f64>>,
    ) {
        let scale = f64::from(self.problem.softmax_scale());
        let first_head = head.head * self.problem.group_size();
        let of_queries = share.dq.iter().enumerate().map(|(i, dq)| (Tensor::Dq, first_head + i, dq, scale));
        let of_keys = [(Tensor::Dk, head.head, &share.dk, scale), (Tensor::Dv, head.head, &share.dv, 1.0)];
        for (tensor, head_of_tensor, sums, scale) in of_queries.chain(of_keys) {
            let [_, heads, rows, dim] = self.problem.extents(tensor);
            let span = if tensor.is_of_keys() { head.sequence.kv } else { head.sequence.q };
            let first = ((span.batch * heads + head_of_tensor) * rows + span.start) * dim;
            let (value, errors) = sums.finish(scale);
            let dtype = self.problem.dtypes.of(tensor);
            for (i, (x, error)) in value.into_iter().zip(errors).enumerate() {
                values[tensor.into()][first + i] = self.rounding.output(dtype, x);
                deviation[tensor.into()][first + i] = error;
            }
        }
    }

    fn share(&self, at: KvHead) -> Share {
        let problem = self.problem;
        let Sequence { q, kv } = at.sequence;
        let (dim, dim_v) = (problem.head_dim, problem.head_dim_v);
        let rows = |tensor| Rows::new(problem, tensor, self.inputs);
        let factor = |x| self.rounding.input(x);
        let keys = head_of(rows(Tensor::K), kv, at.head, factor);
        let values = head_of(rows(Tensor::V), kv, at.head, factor);
        let mut share = Share {
            dq: Vec::new(),
            dk: Sums::new(kv.len * dim),
            dv: Sums::new(kv.len * dim_v),
            sinks: Sums::new(problem.heads_q),
            tables: self.table_sums(),
        };
        for head in (0..problem.group_size()).map(|i| at.head * problem.group_size() + i) {
            let queries = head_of(rows(Tensor::Q), q, head, factor);
            let d_out = head_of(rows(Tensor::DOut), q, head, f64::from);
            let out = head_of(rows(Tensor::Out), q, head, f64::from);
            let mut dq = Sums::new(q.len * dim);
            let [_, heads, all_rows, _] = problem.extents(Tensor::Out);
            let first = (q.batch * heads + head) * all_rows + q.start;
            for row in 0..q.len {
                let number = |operand| self.inputs.floats(operand).get(first + row).copied().map(f64::from);
                let of_row = Row {
                    row,
                    head,
                    query: &queries[row * dim..(row + 1) * dim],
                    d_out: &d_out[row * dim_v..(row + 1) * dim_v],
                    out: &out[row * dim_v..(row + 1) * dim_v],
                    lse: number(Operand::Lse).unwrap_or(f64::NEG_INFINITY),
                    d_lse: number(Operand::DLse).unwrap_or(0.0),
                };
                if of_row.lse != f64::NEG_INFINITY {
                    self.add_row(&at, &of_row, (&keys, &values), &mut dq, &mut share);
                }
            }
            share.dq.push(dq);
        }
        share
    }

    /// Adds what one row gives to the gradients.
    fn add_row(
        &self,
        at: &KvHead,
        row: &Row<'_>,
        (keys, values): (&[f64], &[f64]),
        dq: &mut Sums,
        share: &mut Share,
    ) {
        let problem = self.problem;
        let (dim, dim_v) = (problem.head_dim, problem.head_dim_v);
        let scale = f64::from(problem.softmax_scale());
        let [product, squares] = dot(row.d_out, row.out);
        let delta = product - row.d_lse;
        let of_v_sum = ROUNDING * (dim_v as f64 / 2.0 + 1.0);
        let delta_variance = of_v_sum * (product * product + squares) + ROUNDING * delta * delta;
        if problem.score.sink {
            let sink = f64::from(self.inputs.floats(Operand::Sinks)[row.head]);
            let weight = (sink - row.lse).exp();
            let relative = ROUNDING * (2.0 * row.lse * row.lse + 2.0 * sink * sink + 4.0);
            let variance = (weight * delta).powi(2) * relative + weight * weight * delta_variance;
            share.sinks.add(row.head, -weight * delta, variance);
        }
        let factor: Vec<f64> = row.d_out.iter().map(|&x| self.rounding.input(x as f32)).collect();
        let mut programs = RowPrograms::new(self, at, row);
        let (queries, number_of_keys) = (at.sequence.q.len, at.sequence.kv.len);
        let seen = problem.band.keys(row.row, queries, number_of_keys);
        let mut weighted_keys = vec![0.0; dim];
        let mut dropped = vec![1.0f32; number_of_keys];
        if let Some(dropout) = self.dropout {
            dropout.factors(at.batch * problem.heads_q + row.head, row.row, 0..number_of_keys, &mut dropped);
        }
        for key in seen.start..seen.end {
            if !programs.sees(key) {
                continue;
            }
            let key_row = &keys[key * dim..(key + 1) * dim];
            let value_row = &values[key * dim_v..(key + 1) * dim_v];
            let [product, squares] = dot(row.query, key_row);
            let (logit, slope) = programs.logit(key, scale * product);
            let weight = (logit - row.lse).exp();
            let z = f64::from(dropped[key]);
            let [d_weight, d_weight_squares] = dot(&factor, value_row);
            let [d_weight, d_weight_squares] = [z * d_weight, z * z * d_weight_squares];
            let d_logit = weight * (d_weight - delta);
            let d_score = d_logit * slope;
            // The variance of P, relative, and that of dP.
            let change = slope * of_product(dim, scale * product, scale * scale * squares);
            let relative = of_logit(logit, change) + ROUNDING * (2.0 * row.lse * row.lse + 4.0);
            let of_d_weight = of_v_sum * (d_weight * d_weight + d_weight_squares);
            let of_d_logit = d_logit * d_logit * relative + weight * weight * of_d_weight;
            let by_delta = weight * weight * delta_variance;
            programs.add_to_tables(key, d_logit, of_d_logit + by_delta, share);
            let of_d_score = slope * slope * of_d_logit;
            let (weight_factor, d_score_factor) =
                (self.rounding.factor(weight), self.rounding.factor(d_score));
            share.dv.add_row(key * dim_v, z * weight_factor, (z * weight).powi(2) * relative, &factor);
            share.dk.add_row(key * dim, d_score_factor, of_d_score + slope * slope * by_delta, row.query);
            dq.add_row(row.row * dim, d_score_factor, of_d_score, key_row);
            weighted_keys.iter_mut().zip(key_row).for_each(|(sum, x)| *sum += weight * slope * x);
        }
        // An error of D moves the whole row.
        let variances = &mut dq.variance[row.row * dim..(row.row + 1) * dim];
        for (variance, x) in variances.iter_mut().zip(&weighted_keys) {
            *variance += delta_variance * x * x;
        }
    }
}

/// A query row of a head.
struct Row<'a> {
    /// Position in the sequence.
    row: usize,
    head: usize,
    query: &'a [f64],
    d_out: &'a [f64],
    out: &'a [f64],
    lse: f64,
    d_lse: f64,
}

/// The programs of the problem and their derivatives in one row.
struct RowPrograms<'a> {
    problem: &'a Problem,
    mask: Option<InRow<'a>>,
    score: Option<InRow<'a>>,
    /// The derivative by the score; `None` if it is 0.
    slope: Option<InRow<'a>>,
    /// The reads of tables whose gradients are wanted: table, layout of the gradient, indices, factor.
    reads: Vec<(usize, Table, Vec<InRow<'a>>, InRow<'a>)>,
    /// The score at the last key.
    scaled: f64,
}

impl<'a> RowPrograms<'a> {
    fn new(call: &'a Call<'_>, at: &KvHead, row: &Row<'_>) -> RowPrograms<'a> {
        let programs = &call.problem.programs;
        let point = Point {
            query: row.row,
            batch: at.batch,
            head: row.head,
            query_length: at.sequence.q.len,
            key_length: at.sequence.kv.len,
            ..Point::default()
        };
        let in_row = |program: &'a Program| program.in_row(programs, &call.tables, point, Precision::Exact);
        let derivative = call.derivative.as_ref();
        let wants = call.problem.pass.wants();
        let reads = derivative.into_iter().flat_map(|derivative| &derivative.reads);
        let reads = reads.filter(|read| wants.table(read.table as u8)).map(|read| {
            let table = read.table as usize;
            let index = read.index.iter().map(in_row).collect();
            (table, programs.tables[table].gradient(), index, in_row(&read.factor))
        });
        RowPrograms {
            problem: call.problem,
            mask: programs.mask.as_ref().map(in_row),
            score: programs.score.as_ref().map(in_row),
            slope: derivative.and_then(|derivative| derivative.score.as_ref()).map(in_row),
            reads: reads.collect(),
            scaled: 0.0,
        }
    }

    fn sees(&mut self, key: usize) -> bool {
        self.mask.as_mut().is_none_or(|mask| mask.evaluate(key, 0.0).is_true())
    }

    /// The logit of a scaled product, and its derivative by the product.
    fn logit(&mut self, key: usize, product: f64) -> (f64, f64) {
        let (capped, slope) = match self.problem.score.softcap.map(f64::from) {
            None => (product, 1.0),
            Some(cap) => {
                let tanh = (product / cap).tanh();
                (cap * tanh, 1.0 - tanh * tanh)
            }
        };
        self.scaled = capped;
        let Some(score) = &mut self.score else { return (capped, slope) };
        let logit = score.evaluate(key, capped).float();
        let of_program = self.slope.as_mut().map_or(0.0, |slope| slope.evaluate(key, capped).float());
        (logit, slope * of_program)
    }

    /// Adds the gradient of the logit of the last key, and its variance, to the gradients of the tables.
    fn add_to_tables(&mut self, key: usize, d_logit: f64, variance: f64, share: &mut Share) {
        for (table, gradient, index, factor) in &mut self.reads {
            let factor = factor.evaluate(key, self.scaled).float();
            let index = index.iter_mut().map(|index| i64::from(index.evaluate(key, self.scaled).int()));
            let at = gradient.offset(index);
            share.tables[*table].add(at, d_logit * factor, variance * factor * factor);
        }
    }
}
