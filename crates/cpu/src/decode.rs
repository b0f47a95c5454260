//! Converts 8-bit inputs to 16-bit or f32 tensors for the computation, where it does not read them in place.
//!
//! Each 8-bit number is exactly representable in bf16 and in f16. One descale factor per KV head is applied
//! in the softmax scale and in the normalisation of O, so such inputs are read in place where the computation
//! widens its blocks to f32 ([`is_in_place`]), and converted to 16 bits where it works on 16 bits. Inputs
//! with factors per block of rows are converted to f32 and multiplied by their factors.

use std::sync::atomic::{AtomicUsize, Ordering};

use problem::{
    DType, DTypes, Element, ElementType, KeyPlaces, Layout, Operand, Operands, Problem, Scales, Sequence,
    Span, Storage, Tensor,
};

use crate::Elements;
use crate::aligned::Aligned;
use crate::output::OutputRows;
use crate::threads::Executor;
use crate::view::{Any, Input, Inputs};
use crate::{CpuError, CpuPlan};

/// Factors that the inputs do not contain.
#[derive(Clone, Debug, Default)]
pub(crate) struct Factors {
    /// Factors on the products of queries and keys, one per batch entry and query head; empty if there are
    /// none.
    pub logits: Vec<f32>,
    /// Whether query heads that share a KV head may have different factors.
    pub differ: bool,
    /// Factors on O, one per batch entry and KV head; empty if there are none.
    pub values: Vec<f32>,
}

impl Factors {
    /// The factors of heads. A descale factor of Q or K that is not accepted is NaN.
    pub(crate) fn of_heads(problem: &Problem, operands: &Operands<'_>) -> Factors {
        let mut factors = Factors::default();
        let heads = |count: usize| (0..problem.batch).flat_map(move |b| (0..count).map(move |h| [b, h]));
        let of = |tensor, at| {
            let factors = operands.floats(Operand::Descale(tensor));
            Problem::accepted_factor(tensor, problem.descale(factors, tensor, at))
        };
        let per_block = problem.scales.are_per_block();
        let scaled = |tensor| problem.scales.of(tensor).is_some() && !per_block;
        if scaled(Tensor::Q) || scaled(Tensor::K) {
            let of_head = |[batch, head]: [usize; 2]| {
                let at = [batch, head / problem.group_size(), 0];
                of(Tensor::Q, at) * of(Tensor::K, at)
            };
            factors.logits = heads(problem.heads_q).map(of_head).collect();
        }
        if problem.score.temperature {
            let of_inputs = std::mem::take(&mut factors.logits);
            let of_heads = operands.floats(Operand::Temperature).iter().cycle();
            let all = heads(problem.heads_q).zip(of_heads).enumerate();
            factors.logits = all.map(|(i, (_, factor))| of_inputs.get(i).unwrap_or(&1.0) * factor).collect();
            factors.differ = true;
        }
        if scaled(Tensor::V) {
            let of_head = |[batch, head]: [usize; 2]| of(Tensor::V, [batch, head, 0]);
            factors.values = heads(problem.heads_kv).map(of_head).collect();
        }
        factors
    }

    /// The largest factor on a product; 1 without factors.
    pub(crate) fn largest_logit(&self) -> f32 {
        self.logits.iter().copied().reduce(f32::max).unwrap_or(1.0)
    }
}

/// Whether 8-bit inputs are read in place: the plan computes in f32, and no factor spoils rows of Q or K,
/// which are then NaN. A part of the logits would not do: a row without keys has the result 0.
pub(crate) fn is_in_place(problem: &Problem, plan: &CpuPlan, factors: &Factors) -> bool {
    let in_f32 = plan.isa == plan.isa.wide() || !plan.isa.is_for(problem);
    in_f32 && !problem.scales.are_per_block() && factors.logits.iter().all(|factor| factor.is_finite())
}

/// A problem whose inputs have been decoded.
pub(crate) struct Decoded<T> {
    /// The problem with dense inputs of type `T`, without factors and pages.
    pub problem: Problem,
    pub factors: Factors,
    /// Q, K and V; `None` if the input already had the type and is read in place.
    rooms: [Option<Vec<T>>; 3],
}

impl<T: Element + Default> Decoded<T> {
    /// Decodes the rows that belong to sequences, on the executor's threads.
    pub(crate) fn new(
        executor: &dyn Executor,
        threads: usize,
        problem: &Problem,
        Inputs { q, k, v }: Inputs<'_>,
        operands: &Operands<'_>,
        sequences: &[Sequence],
    ) -> Self {
        let mut inner = Problem {
            dtypes: DTypes { out: problem.dtypes.out, ..DTypes::uniform(T::DTYPE) },
            scales: Scales::default(),
            storage: Storage::Rows,
            v_in_k: false,
            ..problem.clone()
        };
        let multiplies = T::DTYPE == DType::F32;
        let mut rooms = [None, None, None];
        let tensors = [Tensor::Q, Tensor::K, Tensor::V];
        for ((tensor, input), room) in tensors.into_iter().zip(&[q, k, v]).zip(&mut rooms) {
            let in_pages = tensor != Tensor::Q && problem.storage != Storage::Rows;
            if problem.dtypes.of(tensor) == T::DTYPE && !in_pages {
                continue;
            }
            let [batch, heads, rows, dim] = inner.extents(tensor);
            let strides = Layout::Bhsd.strides(heads, rows, dim);
            inner.set_strides(tensor, strides);
            let room = room.insert(vec![T::default(); batch * heads * rows * dim]);
            let to = OutputRows::new(room, 0, strides, dim);
            let scales = operands.floats(Operand::Descale(tensor));
            let job = Job { problem, tensor, input, scales, sequences, multiplies, to };
            let next = AtomicUsize::new(0);
            let work = || job.run(&next, executor);
            match threads.min(sequences.len() * heads) {
                0 | 1 => work(),
                threads => executor.run(threads, &work),
            }
        }
        let mut factors = Factors::of_heads(problem, operands);
        // The rows of a head with an invalid factor are decoded as NaN, so its factor is not applied again.
        factors.logits.iter_mut().filter(|factor| factor.is_nan()).for_each(|factor| *factor = 1.0);
        Decoded { problem: inner, factors, rooms }
    }

    /// The decoded tensors, and those of `inputs` that were not decoded.
    pub(crate) fn inputs<'a>(&'a self, Inputs { q, k, v }: Inputs<'a>) -> Result<Inputs<'a>, CpuError> {
        let [of_q, of_k, of_v] = &self.rooms;
        let of = |tensor, room: &'a Option<Vec<T>>, input| match room {
            Some(room) => Any::new(&self.problem, tensor, Input::from(&room[..]), KeyPlaces::ROWS),
            None => Ok(input),
        };
        Ok(Inputs { q: of(Tensor::Q, of_q, q)?, k: of(Tensor::K, of_k, k)?, v: of(Tensor::V, of_v, v)? })
    }
}

/// The decoding of one tensor.
struct Job<'a, T> {
    problem: &'a Problem,
    tensor: Tensor,
    input: &'a Any<'a>,
    /// The tensor's factors.
    scales: &'a [f32],
    sequences: &'a [Sequence],
    /// Whether elements are multiplied by their factors.
    multiplies: bool,
    to: OutputRows<'a, T>,
}

impl<T: Element> Job<'_, T> {
    /// Decodes one head of one sequence after another.
    #[allow(unsafe_code)] // as in `forward`: each row is written by the one task that decodes it
    fn run(&self, next: &AtomicUsize, executor: &dyn Executor) {
        let [_, heads, _, dim] = self.problem.extents(self.tensor);
        let mut wide = Aligned::default();
        while !executor.is_stopped() {
            let task = next.fetch_add(1, Ordering::Relaxed);
            let (entry, head) = (task / heads.max(1), task % heads.max(1));
            let Some(sequence) = self.sequences.get(entry) else { return };
            let Span { batch, start, len } = if self.tensor == Tensor::Q { sequence.q } else { sequence.kv };
            let (mut table, mut of) = (Vec::new(), None);
            for row in 0..len {
                let factor = self.factor(entry, head, row);
                let elements = self.input.row(batch, head, start + row);
                // SAFETY: sequences do not overlap, and a task is one head of one sequence.
                let to = unsafe { self.to.row(batch, head, start + row) };
                let bits: &[u8] = match elements {
                    Elements::E4m3(row) => bytemuck::cast_slice(row),
                    Elements::E5m2(row) => bytemuck::cast_slice(row),
                    other => {
                        let wide = wide.resize(dim);
                        other.widen(wide);
                        T::narrow_scaled(wide, factor, to);
                        continue;
                    }
                };
                if of != Some(factor.to_bits()) {
                    of = Some(factor.to_bits());
                    table = decoded(elements.dtype(), factor);
                }
                for (to, &code) in to.iter_mut().zip(bits) {
                    *to = table[usize::from(code)];
                }
            }
        }
    }

    /// The factor by which a row is multiplied. NaN if a factor of Q or K is invalid.
    fn factor(&self, entry: usize, head: usize, row: usize) -> f32 {
        let group = if self.tensor == Tensor::Q { self.problem.group_size() } else { 1 };
        let factor = self.problem.descale(self.scales, self.tensor, [entry, head / group, row]);
        let factor = Problem::accepted_factor(self.tensor, factor);
        match self.multiplies {
            true => factor,
            false if self.tensor != Tensor::V && factor.is_nan() => factor,
            false => 1.0,
        }
    }
}

/// The value of every code of an 8-bit type, times `factor`.
fn decoded<T: Element>(dtype: ElementType, factor: f32) -> Vec<T> {
    let value = |code: u8| match dtype {
        ElementType::E4m3 => problem::E4m3::from_bits(code).to_f32(),
        _ => problem::E5m2::from_bits(code).to_f32(),
    };
    (0..=255).map(|code| T::from_f32(value(code) * factor)).collect()
}
