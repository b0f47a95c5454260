//! Quantisation of Q, K and V to 8-bit floats with descale factors.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use problem::{
    DType, Element, KeyPlaces, Layout, Mean, Problem, ProblemError, Quantization, Rotation, ScaleLayout,
    Tensor,
};

use crate::CpuError;
use crate::simd;
use crate::threads::{Executor, with_default};
use crate::view::{Any, Input};

/// A quantised tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Quantized {
    /// The codes, dense `[batch, heads, rows, dim]`.
    pub codes: Vec<u8>,
    /// The descale factors, dense `[batch, KV heads]` or `[batch, KV heads, blocks]`.
    pub factors: Vec<f32>,
    /// Where the factors are.
    pub layout: ScaleLayout,
}

/// Quantises Q, K or V of a problem. `data` starts at the tensor's lowest element in memory. The threads are
/// those of [`attention`](crate::attention).
///
/// # Errors
/// A [`problem::ProblemError`] that names the option ([`Quantization::check`]), a buffer that is too short,
/// and elements of another type than the problem's.
pub fn quantize<T: Element>(
    problem: &Problem,
    tensor: Tensor,
    data: &[T],
    options: &Quantization,
) -> Result<Quantized, CpuError> {
    options.check(problem, tensor)?;
    let [codes, factors] = quantized_lengths(problem, tensor, options);
    let (mut codes, mut factors) = (vec![0; codes], vec![0.0; factors]);
    let to = (&mut codes[..], &mut factors[..]);
    with_default(|executor| quantize_into(executor, problem, tensor, data.into(), options, to))?;
    Ok(Quantized { codes, factors, layout: options.layout(problem, tensor) })
}

/// Like [`quantize`], on the threads of an executor. Codes and factors are written to memory of the caller.
///
/// # Errors
/// As [`quantize`], [`ProblemError::OperandTooShort`] for codes or factors, and [`CpuError::Stopped`].
pub fn quantize_into(
    executor: &dyn Executor,
    problem: &Problem,
    tensor: Tensor,
    data: Input<'_>,
    options: &Quantization,
    (codes, factors): (&mut [u8], &mut [f32]),
) -> Result<(), CpuError> {
    options.check(problem, tensor)?;
    let rows = Rows::new(problem, tensor, data, options)?;
    let [of_codes, of_factors] = quantized_lengths(problem, tensor, options);
    for (argument, len, needed) in [("codes", codes.len(), of_codes), ("factors", factors.len(), of_factors)]
    {
        if len < needed {
            return Err(ProblemError::OperandTooShort { argument, len, needed }.into());
        }
    }
    let means = rows.means(executor)?;
    let largest = rows.largest(executor, &means)?;
    let norm = rows.rotation.as_ref().map_or(1.0, Rotation::norm);
    let of_block: Vec<[f32; 2]> = largest.into_iter().map(|most| options.factor(most, norm)).collect();
    for (factor, [of_block, _]) in factors.iter_mut().zip(&of_block) {
        *factor = *of_block;
    }
    rows.encode(executor, &means, &of_block, &mut codes[..of_codes])
}

/// The numbers of codes and of factors of a quantised tensor.
pub fn quantized_lengths(problem: &Problem, tensor: Tensor, options: &Quantization) -> [usize; 2] {
    let [batch, heads, rows, dim] = problem.extents(tensor);
    let blocks = options.rows.map_or(1, |of_block| rows.div_ceil(of_block as usize));
    [batch * heads * rows * dim, batch * problem.heads_kv * blocks]
}

/// Elements of a task. Between tasks, a thread looks whether the call should end.
const TASK: usize = 1 << 16;

/// Does the tasks on the threads of the executor.
fn share(executor: &dyn Executor, tasks: usize, task: impl Fn(usize) + Sync) -> Result<(), CpuError> {
    let (next, stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
    executor.run(executor.threads().min(tasks), &|| {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= tasks {
                return;
            }
            if executor.is_stopped() {
                return stopped.store(true, Ordering::Relaxed);
            }
            task(index);
        }
    });
    if stopped.into_inner() { Err(CpuError::Stopped) } else { Ok(()) }
}

/// The rows of a tensor, numbered in the order batch entry, head, row.
struct Rows<'a> {
    view: Any<'a>,
    dtype: DType,
    rotation: Option<Rotation>,
    /// Batch entries, heads, rows of a head, and elements of a row.
    extents: [usize; 4],
    /// Heads that share factors.
    group: usize,
    /// Rows of a head that share a factor, and the number of such blocks.
    block: usize,
    blocks: usize,
    smooth: bool,
}

impl<'a> Rows<'a> {
    fn new(
        problem: &Problem,
        tensor: Tensor,
        data: Input<'a>,
        options: &Quantization,
    ) -> Result<Rows<'a>, CpuError> {
        let extents @ [_, heads, rows, _] = problem.extents(tensor);
        let block = options.rows.map_or(rows, |rows| rows as usize).max(1);
        Ok(Rows {
            view: Any::new(problem, tensor, data, KeyPlaces::ROWS)?,
            dtype: options.dtype,
            rotation: options.rotation(problem, tensor),
            extents,
            group: heads / problem.heads_kv,
            block,
            blocks: options.rows.map_or(1, |_| rows.div_ceil(block)),
            smooth: options.smooth_keys && tensor == Tensor::K,
        })
    }

    fn count(&self) -> usize {
        let [batch, heads, rows, _] = self.extents;
        batch * heads * rows
    }

    /// Rows of a task.
    fn of_task(&self) -> usize {
        (TASK / self.extents[3]).max(1)
    }

    /// The batch entry, the head and the row in the head of a row.
    fn place(&self, index: usize) -> [usize; 3] {
        let [_, heads, rows, _] = self.extents;
        [index / rows / heads, index / rows % heads, index % rows]
    }

    /// The index of a row's factor.
    fn factor(&self, [entry, head, row]: [usize; 3]) -> usize {
        let heads_kv = self.extents[1] / self.group;
        (entry * heads_kv + head / self.group) * self.blocks + row / self.block
    }

    /// The mean of each head's rows, with the signs of the rotation; empty if rows are not smoothed.
    fn means(&self, executor: &dyn Executor) -> Result<Vec<Vec<f32>>, CpuError> {
        let [batch, heads, rows, dim] = self.extents;
        if !self.smooth || rows == 0 {
            return Ok(Vec::new());
        }
        let mean = Mean::new(rows, dim);
        let sums = Mutex::new(vec![Vec::new(); batch * heads * mean.parts()]);
        share(executor, batch * heads * mean.parts(), |task| {
            let (head, part) = (task / mean.parts(), task % mean.parts());
            let mut strands = mean.no_rows();
            let mut wide = vec![0.0; strands.len()];
            let end = rows.min((part + 1) * mean.part());
            for first in (part * mean.part()..end).step_by(mean.strands()) {
                let wide = &mut wide[..mean.strands().min(end - first) * dim];
                for (row, to) in wide.chunks_exact_mut(dim).enumerate() {
                    self.view.row(head / heads, head % heads, first + row).widen(to);
                }
                mean.add(&mut strands, wide);
            }
            lock(&sums)[task] = strands;
        })?;
        let mut sums = sums.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(sums
            .chunks_mut(mean.parts())
            .map(|parts| {
                let mut mean = mean.of_parts(parts.iter_mut().map(std::mem::take));
                if let Some(rotation) = &self.rotation {
                    rotation.flip(&mut mean);
                }
                mean
            })
            .collect())
    }

    /// A row, smoothed and rotated, but without the rotation's factor.
    fn read(&self, [entry, head, row]: [usize; 3], means: &[Vec<f32>], to: &mut [f32]) {
        self.view.row(entry, head, row).widen(to);
        // Signs change first, so that an element that equals its mean is +0 in every column, as on GPUs.
        if let Some(rotation) = &self.rotation {
            rotation.flip(to);
        }
        if let Some(mean) = means.get(entry * self.extents[1] + head) {
            to.iter_mut().zip(mean).for_each(|(x, mean)| *x -= mean);
        }
        if let Some(rotation) = &self.rotation {
            rotation.mix(to);
        }
    }

    /// The largest finite magnitude of the rows of each factor.
    fn largest(&self, executor: &dyn Executor, means: &[Vec<f32>]) -> Result<Vec<f32>, CpuError> {
        let [batch, heads, ..] = self.extents;
        // The bits of numbers that are not negative have the order of the numbers.
        let factors = batch * heads / self.group * self.blocks;
        let largest: Vec<AtomicI32> = (0..factors).map(|_| AtomicI32::new(0)).collect();
        share(executor, self.count().div_ceil(self.of_task()), |task| {
            let mut wide = vec![0.0; self.extents[3]];
            let first = task * self.of_task();
            for index in first..self.count().min(first + self.of_task()) {
                let place = self.place(index);
                self.read(place, means, &mut wide);
                largest[self.factor(place)].fetch_max(simd::largest_finite(&wide), Ordering::Relaxed);
            }
        })?;
        Ok(largest.into_iter().map(|bits| f32::from_bits(bits.into_inner() as u32)).collect())
    }

    /// Writes the codes. A factor comes with the multiplier of its rows' elements.
    fn encode(
        &self,
        executor: &dyn Executor,
        means: &[Vec<f32>],
        factors: &[[f32; 2]],
        codes: &mut [u8],
    ) -> Result<(), CpuError> {
        let dim = self.extents[3];
        let tasks = Mutex::new(codes.chunks_mut(self.of_task() * dim).enumerate());
        share(executor, self.count().div_ceil(self.of_task()), |_| {
            let Some((task, codes)) = lock(&tasks).next() else { return };
            let mut wide = vec![0.0; dim];
            for (row, codes) in codes.chunks_exact_mut(dim).enumerate() {
                let place = self.place(task * self.of_task() + row);
                self.read(place, means, &mut wide);
                let [_, multiplier] = factors[self.factor(place)];
                simd::codes(self.dtype, &wide, multiplier, codes);
            }
        })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The problem for quantised tensors: dense inputs of the codes' type with factors. `of` contains the results
/// of [`quantize`] for Q, K and V. If [`Problem::dtypes`] has no output of 16 or 32 bits, O is bf16.
pub fn quantized_problem(problem: &Problem, dtype: DType, of: [&Quantized; 3]) -> Problem {
    let mut quantised = problem.clone();
    quantised.dtypes = problem::DTypes { out: problem.dtypes.out, ..dtype.into() };
    for (tensor, strides) in
        [(Tensor::Q, &mut quantised.q), (Tensor::K, &mut quantised.k), (Tensor::V, &mut quantised.v)]
    {
        let [_, heads, rows, dim] = problem.extents(tensor);
        *strides = Layout::Bhsd.strides(heads, rows, dim);
    }
    let [q, k, v] = of.map(|quantised| Some(quantised.layout));
    quantised.scales = problem::Scales { q, k, v };
    // The default scale does not depend on anything that quantisation changes.
    quantised
}

impl Quantized {
    /// The codes of a quantisation to e4m3.
    pub fn e4m3(&self) -> &[problem::E4m3] {
        bytemuck::cast_slice(&self.codes)
    }

    /// The codes of a quantisation to e5m2.
    pub fn e5m2(&self) -> &[problem::E5m2] {
        bytemuck::cast_slice(&self.codes)
    }

    /// The codes as an input of type `dtype`, that of the quantisation.
    pub fn input(&self, dtype: DType) -> Input<'_> {
        match dtype {
            DType::E5m2 => self.e5m2().into(),
            _ => self.e4m3().into(),
        }
    }
}
