//! Quantisation of Q, K and V to 8-bit floats with descale factors.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use problem::{DType, Element, Layout, Mean, Problem, Quantization, Rotation, ScaleLayout, Tensor};

use crate::CpuError;
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
    with_default(|executor| quantize_on(executor, problem, tensor, data.into(), options))
}

/// Like [`quantize`], on the threads of an executor.
///
/// # Errors
/// As [`quantize`], and [`CpuError::Stopped`].
pub fn quantize_on(
    executor: &dyn Executor,
    problem: &Problem,
    tensor: Tensor,
    data: Input<'_>,
    options: &Quantization,
) -> Result<Quantized, CpuError> {
    options.check(problem, tensor)?;
    let group = Group::new(problem, tensor, data, options)?;
    let groups = problem.batch * problem.heads_kv;
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::with_capacity(groups));
    executor.run(executor.threads().min(groups), &|| {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= groups || executor.is_stopped() {
                return;
            }
            let quantised = group.quantise(index / problem.heads_kv, index % problem.heads_kv);
            done.lock().unwrap_or_else(PoisonError::into_inner).push((index, quantised));
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    if done.len() < groups {
        return Err(CpuError::Stopped);
    }
    done.sort_unstable_by_key(|&(index, _)| index);
    let (codes, factors): (Vec<_>, Vec<_>) = done.into_iter().map(|(_, quantised)| quantised).unzip();
    let layout = options.layout(problem, tensor);
    Ok(Quantized { codes: codes.concat(), factors: factors.concat(), layout })
}

/// The rows that share factors: those of the heads of a group, for each batch entry and KV head.
struct Group<'a> {
    view: Any<'a>,
    options: &'a Quantization,
    rotation: Option<Rotation>,
    heads: usize,
    rows: usize,
    dim: usize,
    /// Rows of a head that share a factor.
    block: usize,
    smooth: bool,
}

impl<'a> Group<'a> {
    fn new(
        problem: &Problem,
        tensor: Tensor,
        data: Input<'a>,
        options: &'a Quantization,
    ) -> Result<Group<'a>, CpuError> {
        let [_, heads, rows, dim] = problem.extents(tensor);
        Ok(Group {
            view: Any::new(problem, tensor, data)?,
            options,
            rotation: options.rotation(problem, tensor),
            heads: heads / problem.heads_kv,
            rows,
            dim,
            block: options.rows.map_or(rows, |rows| rows as usize).max(1),
            smooth: options.smooth_keys && tensor == Tensor::K,
        })
    }

    /// The codes and the factors of a group.
    fn quantise(&self, entry: usize, head_kv: usize) -> (Vec<u8>, Vec<f32>) {
        let &Group { rows, dim, options, .. } = self;
        let mut wide = vec![0.0; self.heads * rows * dim];
        for (i, to) in wide.chunks_exact_mut(dim).enumerate() {
            let (head, row) = (head_kv * self.heads + i / rows, i % rows);
            self.view.row(entry, head, row).widen(to);
        }
        let mut mean = self.smooth.then(|| Mean::new(rows, dim).of(&wide));
        if let Some((mean, rotation)) = mean.as_mut().zip(self.rotation.as_ref()) {
            rotation.flip(mean);
        }
        for row in wide.chunks_exact_mut(dim) {
            // Signs change first, so that an element that equals its mean is +0 in every column, as on GPUs.
            if let Some(rotation) = &self.rotation {
                rotation.flip(row);
            }
            if let Some(mean) = &mean {
                row.iter_mut().zip(mean).for_each(|(x, mean)| *x -= mean);
            }
            if let Some(rotation) = &self.rotation {
                rotation.mix(row);
            }
        }
        let norm = self.rotation.as_ref().map_or(1.0, Rotation::norm);
        let of_block = |i: usize| i % rows / self.block;
        let blocks = options.rows.map_or(1, |_| rows.div_ceil(self.block));
        let mut largest = vec![0.0f32; blocks];
        for (i, row) in wide.chunks_exact(dim).enumerate() {
            let most = &mut largest[of_block(i)];
            *most = row.iter().filter(|x| x.is_finite()).fold(*most, |most, x| most.max(x.abs()));
        }
        let factors: Vec<[f32; 2]> = largest.iter().map(|&most| options.factor(most, norm)).collect();
        let codes = wide.chunks_exact(dim).enumerate().flat_map(|(i, row)| {
            let [_, multiplier] = factors[of_block(i)];
            row.iter().map(move |&x| code(x * multiplier, options.dtype))
        });
        (codes.collect(), factors.iter().map(|&[factor, _]| factor).collect())
    }
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

fn code(x: f32, dtype: DType) -> u8 {
    match dtype {
        DType::E5m2 => problem::E5m2::from_f32(x).to_bits(),
        _ => problem::E4m3::from_f32(x).to_bits(),
    }
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
