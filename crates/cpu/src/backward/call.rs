//! The tasks of a backward pass.
#![allow(unsafe_code)] // rows of outputs are written by tasks: see `OutputRows::row`

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use problem::program::{Derivative, Point};
use problem::{
    Dropout, Elements, KeyPlaces, Operand, OperandMap, Operands, Problem, Sequence, Strides, Tensor,
};

use super::programs::{RowPrograms, RowTerms, TableValues, derivative, table_sums};
use super::tile::{BLOCK_KV, BLOCK_Q, KeyRows, Logits, Matrix, QueryRows, ScoreTile, TileStep};
use crate::output::{Output, OutputRows};
use crate::simd::{Isa, MAX_LANES, Portable, Simd, widen};
use crate::tile::multiply;
use crate::view::Any;
use crate::{CpuError, CpuPlan, Executor, Input};

#[cfg(target_arch = "aarch64")]
use crate::simd::Neon;
#[cfg(target_arch = "x86_64")]
use crate::simd::{Avx2, Avx512};

/// The number of tasks, at least, into which a deterministic call is divided where it has enough keys. It
/// does not depend on the number of threads, and neither does the order of the sums of dQ.
const DETERMINISTIC_TASKS: usize = 16;

/// A call whose problem and operands have been checked.
pub(super) struct BackwardCall<'a> {
    executor: &'a dyn Executor,
    problem: &'a Problem,
    operands: &'a Operands<'a>,
    sequences: &'a [Sequence],
    tables: &'a TableValues,
    contents: Vec<Elements<'a>>,
    derivative: Option<Derivative>,
    dropout: Option<Dropout>,
    /// Q, K, V, O and dO.
    inputs: [Any<'a>; 5],
    /// dQ, dK and dV.
    outputs: [Output<'a>; 3],
    plan: &'a CpuPlan,
    /// The parts into which the keys of a head are divided.
    parts: usize,
}

/// Some keys of one KV head.
#[derive(Clone, Copy)]
struct Task {
    batch: usize,
    head: usize,
    part: usize,
}

/// The sums that tasks share.
struct Sums {
    /// For each batch entry and query head.
    sinks: Vec<f64>,
    tables: Vec<Vec<f64>>,
}

impl<'a> BackwardCall<'a> {
    #[allow(clippy::too_many_arguments)] // the parts of one call, each checked by the caller
    pub(super) fn new(
        executor: &'a dyn Executor,
        problem: &'a Problem,
        inputs: &OperandMap<Input<'a>>,
        operands: &'a Operands<'a>,
        sequences: &'a [Sequence],
        tables: &'a TableValues,
        outputs: [Output<'a>; 3],
        plan: &'a CpuPlan,
    ) -> Result<BackwardCall<'a>, CpuError> {
        let input = |tensor: Tensor| {
            let none = Input::empty(problem.dtypes.of(tensor).into());
            Any::new(problem, tensor, inputs.get(tensor.into()).copied().unwrap_or(none), KeyPlaces::ROWS)
        };
        let heads = problem.batch * problem.heads_kv;
        let tasks = if problem.pass.deterministic() { DETERMINISTIC_TASKS } else { plan.threads };
        // The sums of tables belong to one task at a time.
        let parts = if problem.pass.wants().tables != 0 { 1 } else { tasks.div_ceil(heads.max(1)) };
        let most = problem.seq_kv.div_ceil(2 * BLOCK_KV).max(1);
        Ok(BackwardCall {
            executor,
            problem,
            operands,
            sequences,
            contents: tables.elements(),
            tables,
            derivative: derivative(problem)?,
            dropout: Dropout::of(problem, operands),
            inputs: [
                input(Tensor::Q)?,
                input(Tensor::K)?,
                input(Tensor::V)?,
                input(Tensor::Out)?,
                input(Tensor::DOut)?,
            ],
            outputs,
            plan,
            parts: parts.min(most),
        })
    }

    /// Writes dQ, dK and dV. Returns the gradients of sinks and tables that are wanted.
    pub(super) fn run(&self) -> OperandMap<Vec<f32>> {
        match self.plan.isa.wide() {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Avx512::detect().map(|simd| self.run_on(simd)),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Avx2::detect().map(|simd| self.run_on(simd)),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => Neon::detect().map(|simd| self.run_on(simd)),
            _ => Some(self.run_on(Portable::<4>)),
        }
        .unwrap_or_default() // the plan's check has found the instruction set
    }

    fn run_on<S: Simd>(&self, simd: S) -> OperandMap<Vec<f32>> {
        let problem = self.problem;
        let (parts, dim) = (self.parts, problem.head_dim);
        let [outer, heads, rows, _] = problem.extents(Tensor::Q);
        let mut room = vec![0.0f32; if parts > 1 { parts * outer * heads * rows * dim } else { 0 }];
        let strides =
            Strides { batch: (heads * rows * dim) as i64, head: (rows * dim) as i64, row: dim as i64 };
        let of_parts = OutputRows::new(&mut room, 0, strides, dim);
        let sums = Mutex::new(Sums {
            sinks: vec![0.0; problem.batch * problem.heads_q],
            tables: table_sums(problem),
        });
        let count = problem.batch * problem.heads_kv * parts;
        let one_at_a_time = problem.pass.wants().tables != 0;
        let next = AtomicUsize::new(0);
        let work = || {
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                if index >= count || self.executor.is_stopped() {
                    return;
                }
                let (head, part) = (index / parts, index % parts);
                let task = Task { batch: head / problem.heads_kv, head: head % problem.heads_kv, part };
                self.task(simd, task, &of_parts, &sums);
            }
        };
        match self.plan.threads.min(count) {
            0 | 1 => work(),
            _ if one_at_a_time => work(),
            threads => self.executor.run(threads, &work),
        }
        if parts > 1 {
            self.add_parts(simd, &room, outer * heads * rows * dim);
        }
        self.finish(sums.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// dQ as the sum of the parts, in their order.
    fn add_parts<S: Simd>(&self, simd: S, room: &[f32], of_part: usize) {
        let problem = self.problem;
        let [_, heads, rows, dim] = problem.extents(Tensor::Q);
        let mut sum = vec![0.0; dim];
        for sequence in self.sequences {
            for (head, row) in (0..heads).flat_map(|h| (0..sequence.q.len).map(move |r| (h, r))) {
                let row = sequence.q.start + row;
                let at = ((sequence.q.batch * heads + head) * rows + row) * dim;
                sum.fill(0.0);
                for part in room.chunks(of_part.max(1)) {
                    sum.iter_mut().zip(&part[at..at + dim]).for_each(|(sum, x)| *sum += x);
                }
                let scale = Some(problem.softmax_scale());
                // SAFETY: this thread alone writes dQ, and the problem's check has established that rows of
                // outputs do not overlap.
                unsafe { self.outputs[0].write(simd, [sequence.q.batch, head, row], &sum, scale) };
            }
        }
    }

    fn finish(&self, sums: Sums) -> OperandMap<Vec<f32>> {
        let heads = self.problem.heads_q;
        let others = self.problem.outputs().filter_map(|spec| match spec.operand {
            Operand::DSinks => {
                let of = |head| sums.sinks.iter().skip(head).step_by(heads).sum::<f64>() as f32;
                Some((spec.operand, (0..heads).map(of).collect()))
            }
            Operand::DTable(table) => {
                let sums = &sums.tables[usize::from(table)];
                Some((spec.operand, sums.iter().map(|&x| x as f32).collect()))
            }
            _ => None,
        });
        others.collect()
    }

    fn task<S: Simd>(&self, simd: S, task: Task, of_parts: &OutputRows<'_, f32>, sums: &Mutex<Sums>) {
        let problem = self.problem;
        let sequence = self.sequences[task.batch];
        let blocks = sequence.kv.len.div_ceil(BLOCK_KV);
        let of_part = blocks.div_ceil(self.parts) * BLOCK_KV;
        let first = (task.part * of_part).min(sequence.kv.len);
        let end = (first + of_part).min(sequence.kv.len);
        let mut keys = Keys::load(simd, self, task, sequence, [first, end]);
        let mut scratch = Scratch::new(keys.ld, keys.ld_v);
        for head in (0..problem.group_size()).map(|i| task.head * problem.group_size() + i) {
            let mut of_sink = 0.0;
            for row in (0..sequence.q.len).step_by(BLOCK_Q) {
                let rows = row..(row + BLOCK_Q).min(sequence.q.len);
                of_sink +=
                    self.query_block(simd, task, (head, rows), &mut keys, &mut scratch, sums, of_parts);
            }
            if task.part == 0 && problem.score.sink {
                let mut sums = sums.lock().unwrap_or_else(PoisonError::into_inner);
                sums.sinks[task.batch * problem.heads_q + head] = of_sink;
            }
        }
        for row in 0..keys.count {
            let place = [sequence.kv.batch, task.head, sequence.kv.start + first + row];
            let dk = &keys.dk[row * keys.ld..][..problem.head_dim];
            let dv = &keys.dv[row * keys.ld_v..][..problem.head_dim_v];
            // SAFETY: the keys belong to this task, and rows of outputs do not overlap.
            unsafe {
                self.outputs[1].write(simd, place, dk, Some(problem.softmax_scale()));
                self.outputs[2].write(simd, place, dv, Some(1.0));
            }
        }
    }

    /// Adds what some rows of a head give. Returns their share of the gradient of the sink.
    #[allow(clippy::too_many_arguments)] // the task, its rows, and its three kinds of memory
    fn query_block<S: Simd>(
        &self,
        simd: S,
        task: Task,
        (head, rows): (usize, std::ops::Range<usize>),
        keys: &mut Keys,
        scratch: &mut Scratch,
        sums: &Mutex<Sums>,
        of_parts: &OutputRows<'_, f32>,
    ) -> f64 {
        let problem = self.problem;
        let sequence = self.sequences[task.batch];
        let of_sink = scratch.load(simd, self, sequence, (head, rows.clone()), [keys.ld, keys.ld_v]);
        scratch.dq.fill(0.0);
        let seen: Vec<[usize; 2]> = rows
            .clone()
            .zip(&scratch.lse)
            .map(|(row, &lse)| {
                let range = problem.band.keys(row, sequence.q.len, sequence.kv.len);
                let (start, end) = (range.start.max(keys.first), range.end.min(keys.first + keys.count));
                if lse == f32::INFINITY || start >= end {
                    [0, 0]
                } else {
                    [start - keys.first, end - keys.first]
                }
            })
            .collect();
        let filled = || seen.iter().filter(|[start, end]| start < end);
        let low = filled().map(|[start, _]| *start).min().unwrap_or(0);
        let high = filled().map(|[_, end]| *end).max().unwrap_or(0);
        for block in (low / BLOCK_KV * BLOCK_KV..high).step_by(BLOCK_KV) {
            self.tile(simd, (task, head, rows.start, block), &seen, keys, scratch, sums);
        }
        for (i, row) in rows.enumerate() {
            let dq = &scratch.dq[i * keys.ld..][..problem.head_dim];
            let row = sequence.q.start + row;
            // SAFETY: the rows of a query head belong to the tasks of its KV head; each has a part of its
            // own.
            unsafe {
                if self.parts == 1 {
                    let scale = Some(problem.softmax_scale());
                    self.outputs[0].write(simd, [sequence.q.batch, head, row], dq, scale);
                } else {
                    let [outer, ..] = problem.extents(Tensor::Q);
                    of_parts.row(task.part * outer + sequence.q.batch, head, row).copy_from_slice(dq);
                }
            }
        }
        of_sink
    }

    /// One tile: the rows of `scratch` from `first_row` on, and the block of keys from `block` on.
    fn tile<S: Simd>(
        &self,
        simd: S,
        (task, head, first_row, block): (Task, usize, usize, usize),
        seen: &[[usize; 2]],
        keys: &mut Keys,
        scratch: &mut Scratch,
        sums: &Mutex<Sums>,
    ) {
        let problem = self.problem;
        let (ld, ld_v) = (keys.ld, keys.ld_v);
        let count = (keys.count - block).min(BLOCK_KV);
        let in_block = |&[start, end]: &[usize; 2]| {
            let (start, end) = (start.max(block), end.min(block + count));
            if start >= end { [0, 0] } else { [start - block, end - block] }
        };
        let seen: Vec<[usize; 2]> = seen.iter().map(in_block).collect();
        let queries = QueryRows {
            rows: seen.len(),
            query: Matrix { data: &scratch.query, ld },
            d_out: Matrix { data: &scratch.d_out, ld: ld_v },
            lse: &scratch.lse,
            delta: &scratch.delta,
        };
        let of_keys = KeyRows {
            keys: count,
            rows: Matrix { data: &keys.rows[block * ld..], ld },
            key_columns: Matrix { data: &keys.key_columns[block..], ld: keys.padded },
            value_columns: Matrix { data: &keys.value_columns[block..], ld: keys.padded },
        };
        let (scores, dims) = (&mut scratch.scores, [problem.head_dim, problem.head_dim_v]);
        simd.backward(TileStep::Products { queries: &queries, keys: &of_keys, dims, scores });
        let dropped = &mut scratch.dropped;
        if let Some(dropout) = &self.dropout {
            let head = task.batch * problem.heads_q + head;
            let first = keys.first + block;
            for (row, factors) in dropped.chunks_exact_mut(BLOCK_KV).take(seen.len()).enumerate() {
                dropout.factors(head, first_row + row, first..first + count, factors);
            }
            multiply(&mut scores.slopes, dropped); // dP
        }
        let logits = Logits { scale: problem.softmax_scale(), cap: problem.score.softcap };
        let has_programs = !problem.programs.is_empty();
        if has_programs {
            let mut sums = sums.lock().unwrap_or_else(PoisonError::into_inner);
            for (row, &range) in seen.iter().enumerate() {
                let sequence = self.sequences[task.batch];
                let point = Point {
                    query: first_row + row,
                    batch: task.batch,
                    head,
                    query_length: sequence.q.len,
                    key_length: sequence.kv.len,
                    ..Point::default()
                };
                let derivative = self.derivative.as_ref();
                let mut programs =
                    RowPrograms::new(problem, self.tables.programs(), &self.contents, derivative, point);
                let Logits { scale, cap } = logits;
                let terms = RowTerms { scale, cap, lse: scratch.natural_lse[row], delta: scratch.delta[row] };
                let place = (row, keys.first + block, range);
                programs.weigh(&terms, place, scores, &mut scratch.shown, &mut sums.tables);
            }
        } else {
            simd.backward(TileStep::Weights { queries: &queries, logits, seen: &seen, scores });
        }
        if self.dropout.is_some() {
            multiply(&mut scores.weights, dropped); // P, as a factor of dV
        }
        let (dk, dv) = (&mut keys.dk[block * ld..], &mut keys.dv[block * ld_v..]);
        if keys.finite && scratch.finite {
            let dq = &mut scratch.dq;
            simd.backward(TileStep::Gradients { queries: &queries, keys: &of_keys, scores, dq, dk, dv });
            return;
        }
        // A weight of 0 must not be multiplied by a NaN that the row does not see.
        for (row, &[start, end]) in seen.iter().enumerate() {
            for key in (start..end).filter(|key| !has_programs || scratch.shown[row * BLOCK_KV + key]) {
                let at = row * BLOCK_KV + key;
                let (weight, slope) = (scores.weights[at], scores.slopes[at]);
                let add = |to: &mut [f32], factor: f32, from: &[f32]| {
                    to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
                };
                add(&mut dv[key * ld_v..][..ld_v], weight, &scratch.d_out[row * ld_v..][..ld_v]);
                add(&mut dk[key * ld..][..ld], slope, &scratch.query[row * ld..][..ld]);
                add(&mut scratch.dq[row * ld..][..ld], slope, &of_keys.rows.data[key * ld..][..ld]);
            }
        }
    }
}

/// The keys of a task, and the sums of their gradients.
struct Keys {
    /// The first key's position in its sequence.
    first: usize,
    count: usize,
    /// `count`, rounded up to whole blocks.
    padded: usize,
    ld: usize,
    ld_v: usize,
    rows: Vec<f32>,
    key_columns: Vec<f32>,
    value_columns: Vec<f32>,
    dk: Vec<f32>,
    dv: Vec<f32>,
    /// Whether all numbers of K and V are finite.
    finite: bool,
}

impl Keys {
    fn load<S: Simd>(
        simd: S,
        call: &BackwardCall<'_>,
        task: Task,
        sequence: Sequence,
        [first, end]: [usize; 2],
    ) -> Keys {
        let (dim, dim_v) = (call.problem.head_dim, call.problem.head_dim_v);
        let [ld, ld_v] = [dim, dim_v].map(|dim| dim.next_multiple_of(MAX_LANES));
        let (count, padded) = (end - first, (end - first).next_multiple_of(BLOCK_KV));
        let [mut rows, mut values] = [vec![0.0; padded * ld], vec![0.0; padded * ld_v]];
        for key in 0..count {
            let row = sequence.kv.start + first + key;
            let [k, v] = [1, 2].map(|input: usize| call.inputs[input].row(sequence.kv.batch, task.head, row));
            widen(simd, k, &mut rows[key * ld..][..dim]);
            widen(simd, v, &mut values[key * ld_v..][..dim_v]);
        }
        let [mut key_columns, mut value_columns] = [vec![0.0; dim * padded], vec![0.0; dim_v * padded]];
        simd.transpose(&rows, ld, &mut key_columns, padded, count, dim);
        simd.transpose(&values, ld_v, &mut value_columns, padded, count, dim_v);
        let finite = is_finite(&rows) && is_finite(&values);
        let (dk, dv) = (vec![0.0; padded * ld], vec![0.0; padded * ld_v]);
        Keys { first, count, padded, ld, ld_v, rows, key_columns, value_columns, dk, dv, finite }
    }
}

/// Whether all numbers are finite: a NaN or an infinity times 0 is NaN.
fn is_finite(numbers: &[f32]) -> bool {
    numbers.iter().fold(0.0, |sum: f32, x| sum + x * 0.0) == 0.0
}

/// The memory of a block of query rows.
struct Scratch {
    query: Vec<f32>,
    d_out: Vec<f32>,
    dq: Vec<f32>,
    /// As [`QueryRows::lse`].
    lse: Vec<f32>,
    natural_lse: Vec<f32>,
    delta: Vec<f32>,
    scores: ScoreTile,
    /// Which keys the rows see; only with programs.
    shown: Vec<bool>,
    /// The factors of dropout of a tile; used only with dropout.
    dropped: Vec<f32>,
    /// Whether all numbers of Q and dO are finite.
    finite: bool,
}

impl Scratch {
    fn new(ld: usize, ld_v: usize) -> Scratch {
        let zeros = |len| vec![0.0; len];
        Scratch {
            query: zeros(BLOCK_Q * ld),
            d_out: zeros(BLOCK_Q * ld_v),
            dq: zeros(BLOCK_Q * ld),
            lse: zeros(BLOCK_Q),
            natural_lse: zeros(BLOCK_Q),
            delta: zeros(BLOCK_Q),
            scores: ScoreTile::new(),
            shown: vec![false; BLOCK_Q * BLOCK_KV],
            dropped: zeros(BLOCK_Q * BLOCK_KV),
            finite: true,
        }
    }

    /// Reads rows of a head and computes their D. Returns their share of the gradient of the sink.
    fn load<S: Simd>(
        &mut self,
        simd: S,
        call: &BackwardCall<'_>,
        sequence: Sequence,
        (head, rows): (usize, std::ops::Range<usize>),
        [ld, ld_v]: [usize; 2],
    ) -> f64 {
        let problem = call.problem;
        let (dim, dim_v) = (problem.head_dim, problem.head_dim_v);
        let [_, heads, all_rows, _] = problem.extents(Tensor::Q);
        let sink = problem.score.sink.then(|| call.operands.floats(Operand::Sinks)[head]);
        let mut out = vec![0.0; dim_v];
        let mut of_sink = 0.0;
        for (i, row) in rows.map(|row| sequence.q.start + row).enumerate() {
            let [query, _, _, output, d_out] = std::array::from_fn(|input| {
                if input == 1 || input == 2 {
                    None
                } else {
                    Some(call.inputs[input].row(sequence.q.batch, head, row))
                }
            });
            for (from, to) in [
                (query, &mut self.query[i * ld..][..dim]),
                (d_out, &mut self.d_out[i * ld_v..][..dim_v]),
                (output, &mut out[..]),
            ] {
                from.into_iter().for_each(|from: Elements<'_>| widen(simd, from, to));
            }
            let index = (sequence.q.batch * heads + head) * all_rows + row;
            let lse = call.operands.floats(Operand::Lse)[index];
            let d_lse = call.operands.floats(Operand::DLse).get(index).copied().unwrap_or(0.0);
            let products = out.iter().zip(&self.d_out[i * ld_v..][..dim_v]);
            let sum: f64 = products.map(|(&o, &d)| f64::from(o) * f64::from(d)).sum();
            let delta = sum - f64::from(d_lse);
            let massless = lse == f32::NEG_INFINITY;
            self.delta[i] = delta as f32;
            self.natural_lse[i] = lse;
            self.lse[i] = if massless { f32::INFINITY } else { lse * std::f32::consts::LOG2_E };
            if let Some(sink) = sink.filter(|_| !massless) {
                of_sink -= (f64::from(sink) - f64::from(lse)).exp() * delta;
            }
        }
        self.finite = is_finite(&self.query) && is_finite(&self.d_out);
        of_sink
    }
}
