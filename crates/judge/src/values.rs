//! Operands of a problem as values and as bytes.

use std::ops::{Index, IndexMut};

use cpu::{CpuError, CpuPlan, Input};
use half::{bf16, f16};
use oracle::Reference;
use problem::{
    DType, E4m3, E5m2, Element, ElementType, Elements, ElementsMut, Operand, OperandMap, Operands, Problem,
    ProblemError, Sequence, Tensor,
};
use rayon::prelude::*;

/// Minimum number of elements that a thread gets in parallel loops.
const SHARE: usize = 1 << 16;

/// Elements of one operand, in its type.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    F16(Vec<f16>),
    Bf16(Vec<bf16>),
    F32(Vec<f32>),
    I32(Vec<i32>),
    U8(Vec<u8>),
    E4m3(Vec<E4m3>),
    E5m2(Vec<E5m2>),
}

/// Runs `$body` with `$x` bound to the vector of the tensor's element type.
macro_rules! each {
    ($values:expr, $x:ident => $body:expr) => {
        match $values {
            Values::F16($x) => $body,
            Values::Bf16($x) => $body,
            Values::F32($x) => $body,
            Values::I32($x) => $body,
            Values::U8($x) => $body,
            Values::E4m3($x) => $body,
            Values::E5m2($x) => $body,
        }
    };
}

/// Like `each!` for a `$body` that makes another vector of the same type.
macro_rules! each_as {
    ($values:expr, $x:ident => $body:expr) => {
        match $values {
            Values::F16($x) => Values::F16($body),
            Values::Bf16($x) => Values::Bf16($body),
            Values::F32($x) => Values::F32($body),
            Values::I32($x) => Values::I32($body),
            Values::U8($x) => Values::U8($body),
            Values::E4m3($x) => Values::E4m3($body),
            Values::E5m2($x) => Values::E5m2($body),
        }
    };
}

/// The start of each row, in the order batch, head, row. `None` when the rows lie in this order without gaps,
/// or when the tensor's span exceeds `elements`.
fn moves(problem: &Problem, tensor: Tensor, elements: usize) -> Option<Vec<usize>> {
    let ([batches, heads, rows, dim], strides) = (problem.extents(tensor), problem.strides(tensor));
    let (span, origin) = problem.span(tensor)?;
    let starts: Vec<usize> = (0..batches * heads * rows)
        .map(|i| {
            let (batch, head, row) = (i / (heads * rows), i / rows % heads, i % rows);
            (origin as i64 + strides.offset(batch, head, row)) as usize
        })
        .collect();
    let in_order = starts.iter().enumerate().all(|(i, &start)| start == i * dim);
    (!in_order && span <= elements).then_some(starts)
}

impl Values {
    /// `values` rounded to `dtype`.
    pub fn round(dtype: DType, values: &[f32]) -> Values {
        fn to<T: Element>(values: &[f32]) -> Vec<T> {
            let mut narrow = vec![T::from_f32(0.0); values.len()];
            let shares = narrow.par_chunks_mut(SHARE).zip(values.par_chunks(SHARE));
            shares.for_each(|(to, from)| T::narrow_scaled(from, 1.0, to));
            narrow
        }
        match dtype {
            DType::F16 => Values::F16(to(values)),
            DType::Bf16 => Values::Bf16(to(values)),
            DType::F32 => Values::F32(to(values)),
            DType::E4m3 => Values::E4m3(to(values)),
            DType::E5m2 => Values::E5m2(to(values)),
        }
    }

    /// `len` zeros.
    pub fn zeros(dtype: DType, len: usize) -> Values {
        match dtype {
            DType::F16 => Values::F16(vec![f16::ZERO; len]),
            DType::Bf16 => Values::Bf16(vec![bf16::ZERO; len]),
            DType::F32 => Values::F32(vec![0.0; len]),
            DType::E4m3 => Values::E4m3(vec![E4m3::default(); len]),
            DType::E5m2 => Values::E5m2(vec![E5m2::default(); len]),
        }
    }

    /// Decodes little-endian `bytes`. Trailing bytes that do not fill an element are ignored.
    pub fn from_bytes(dtype: DType, bytes: &[u8]) -> Values {
        fn of<T, const N: usize>(bytes: &[u8], from: fn([u8; N]) -> T) -> Vec<T> {
            bytes.as_chunks().0.iter().map(|&bytes| from(bytes)).collect()
        }
        match dtype {
            DType::F16 => Values::F16(of(bytes, f16::from_le_bytes)),
            DType::Bf16 => Values::Bf16(of(bytes, bf16::from_le_bytes)),
            DType::F32 => Values::F32(of(bytes, f32::from_le_bytes)),
            DType::E4m3 => Values::E4m3(bytemuck::cast_slice(bytes).to_vec()),
            DType::E5m2 => Values::E5m2(bytemuck::cast_slice(bytes).to_vec()),
        }
    }

    pub fn to_bytes(&self) -> Vec<u8> {
        fn of<T: Copy + Sync, const N: usize>(values: &[T], bytes: fn(T) -> [u8; N]) -> Vec<u8> {
            let mut all = vec![0; N * values.len()];
            all.par_chunks_mut(N * SHARE).zip(values.par_chunks(SHARE)).for_each(|(all, values)| {
                all.chunks_exact_mut(N).zip(values).for_each(|(b, &x)| b.copy_from_slice(&bytes(x)));
            });
            all
        }
        match self {
            Values::F16(x) => of(x, f16::to_le_bytes),
            Values::Bf16(x) => of(x, bf16::to_le_bytes),
            Values::F32(x) => of(x, f32::to_le_bytes),
            Values::I32(x) => of(x, i32::to_le_bytes),
            Values::U8(x) => x.clone(),
            Values::E4m3(x) => bytemuck::cast_slice(x).to_vec(),
            Values::E5m2(x) => bytemuck::cast_slice(x).to_vec(),
        }
    }

    pub fn dtype(&self) -> ElementType {
        self.elements().dtype()
    }

    /// The elements as a slice of their type.
    pub fn elements(&self) -> Elements<'_> {
        each!(self, x => Elements::from(x))
    }

    pub fn len(&self) -> usize {
        each!(self, x => x.len())
    }

    /// The first `len` elements.
    #[must_use]
    pub fn first(&self, len: usize) -> Values {
        each_as!(self, x => x[..len].to_vec())
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements of a range, cut at the end of the tensor.
    pub fn slice(&self, range: std::ops::Range<usize>) -> Values {
        let range = range.start.min(self.len())..range.end.min(self.len());
        each_as!(self, x => x[range].to_vec())
    }

    /// The elements of a range as f64, cut at the end of the tensor.
    pub fn wide(&self, range: std::ops::Range<usize>) -> Vec<f64> {
        let mut narrow = vec![0.0; range.end.min(self.len()).saturating_sub(range.start)];
        self.slice(range).elements().widen(&mut narrow);
        narrow.into_iter().map(f64::from).collect()
    }

    /// The elements of a tensor with `problem`'s strides, in the dense order `[batch, head, row, dim]`.
    pub fn gather(self, problem: &Problem, tensor: Tensor) -> Values {
        let Some(moves) = moves(problem, tensor, self.len()) else { return self };
        let dim = problem.extents(tensor)[3];
        each_as!(self, x => {
            let mut rows = vec![Default::default(); moves.len() * dim];
            let each = rows.par_chunks_mut(dim).zip(&moves).with_min_len(SHARE / dim.max(1));
            each.for_each(|(row, &start)| row.copy_from_slice(&x[start..start + dim]));
            rows
        })
    }

    /// The inverse of [`Values::gather`]: lays out dense elements with `problem`'s strides, and 0 between the
    /// rows.
    pub fn scatter(self, problem: &Problem, tensor: Tensor) -> Values {
        let elements = problem.span(tensor).map_or(0, |(elements, _)| elements);
        let Some(moves) = moves(problem, tensor, elements) else { return self };
        let dim = problem.extents(tensor)[3];
        each_as!(self, x => {
            let mut laid = vec![Default::default(); elements];
            for (&start, row) in moves.iter().zip(x.chunks_exact(dim)) {
                laid[start..start + dim].copy_from_slice(row);
            }
            laid
        })
    }

    /// Copies the elements of `other`. Reuses this tensor's memory if the types are equal.
    pub fn copy_from(&mut self, other: &Values) {
        match (&mut *self, other) {
            (Values::F16(x), Values::F16(y)) => x.clone_from(y),
            (Values::Bf16(x), Values::Bf16(y)) => x.clone_from(y),
            (Values::F32(x), Values::F32(y)) => x.clone_from(y),
            (Values::I32(x), Values::I32(y)) => x.clone_from(y),
            (Values::U8(x), Values::U8(y)) => x.clone_from(y),
            (Values::E4m3(x), Values::E4m3(y)) => x.clone_from(y),
            (Values::E5m2(x), Values::E5m2(y)) => x.clone_from(y),
            (x, y) => *x = y.clone(),
        }
    }

    /// Sets all elements to NaN, and those of integers to all ones.
    pub fn fill_nan(&mut self) {
        match self {
            Values::I32(x) => x.fill(-1),
            Values::U8(x) => x.fill(0xff),
            Values::F16(x) => x.fill(f16::NAN),
            Values::Bf16(x) => x.fill(bf16::NAN),
            Values::F32(x) => x.fill(f32::NAN),
            Values::E4m3(x) => x.fill(E4m3::NAN),
            Values::E5m2(x) => x.fill(E5m2::NAN),
        }
    }

    pub fn count_nan(&self) -> usize {
        fn of<T: Sync>(x: &[T], is_nan: impl Fn(&T) -> bool + Sync) -> usize {
            x.par_iter().with_min_len(SHARE).filter(|x| is_nan(x)).count()
        }
        match self {
            Values::F16(x) => of(x, |x| x.is_nan()),
            Values::Bf16(x) => of(x, |x| x.is_nan()),
            Values::F32(x) => of(x, |x| x.is_nan()),
            Values::E4m3(x) => of(x, |x| x.is_nan()),
            Values::E5m2(x) => of(x, |x| x.is_nan()),
            Values::I32(_) | Values::U8(_) => 0,
        }
    }

    /// The element at `index` as f32. The conversion of floats is exact.
    pub fn get(&self, index: usize) -> Option<f32> {
        self.elements().get(index)
    }
}

/// The inputs of a problem. Tensors and tables have a buffer of their span.
#[derive(Clone, Debug, PartialEq)]
pub struct Inputs {
    pub operands: OperandMap<Values>,
}

impl Index<Operand> for Inputs {
    type Output = Values;

    fn index(&self, operand: Operand) -> &Values {
        &self.operands[operand]
    }
}

impl IndexMut<Operand> for Inputs {
    fn index_mut(&mut self, operand: Operand) -> &mut Values {
        &mut self.operands[operand]
    }
}

impl Inputs {
    /// The inputs of a problem that has none beside Q, K and V.
    pub fn of(q: Values, k: Values, v: Values) -> Inputs {
        Inputs { operands: OperandMap::from_iter([(Operand::Q, q), (Operand::K, k), (Operand::V, v)]) }
    }

    /// Copies all inputs. Reuses memory of equal types.
    pub fn copy_from(&mut self, other: &Inputs) {
        for (operand, values) in other.operands.iter() {
            match self.operands.get_mut(operand) {
                Some(own) => own.copy_from(values),
                None => drop(self.operands.insert(operand, values.clone())),
            }
        }
    }

    /// All inputs as slices.
    pub fn elements(&self) -> Operands<'_> {
        self.operands.map(|_, values| values.elements())
    }

    /// The rows of each batch entry. Empty if the arrays of lengths do not fit the problem.
    pub fn sequences(&self, problem: &Problem) -> Vec<Sequence> {
        problem.sequences(&self.elements()).unwrap_or_default()
    }

    /// Attention in f64, the oracle.
    ///
    /// # Errors
    /// When the buffers do not fit the problem.
    pub fn oracle(&self, problem: &Problem) -> Result<Reference, ProblemError> {
        oracle::oracle_with(problem, &self.elements())
    }

    /// The oracle with its deviation, and standard attention in the precision of the inputs. With `wanted`,
    /// only for the rows whose element is set, in the order of the LSE.
    ///
    /// # Errors
    /// When the buffers do not fit the problem.
    pub fn both_references(
        &self,
        problem: &Problem,
        wanted: Option<&[bool]>,
    ) -> Result<(Reference, Reference), ProblemError> {
        let inputs = self.elements();
        let exact = oracle::oracle_of_rows(problem, &inputs, wanted)?;
        Ok((exact, oracle::reference_in_precision_of_rows(problem, &inputs, wanted)?))
    }

    /// Standard attention in the precision of the inputs.
    ///
    /// # Errors
    /// When the buffers do not fit the problem.
    pub fn reference_in_precision(&self, problem: &Problem) -> Result<Reference, ProblemError> {
        oracle::reference_in_precision_with(problem, &self.elements())
    }

    /// Runs the native CPU kernels into `out`, a buffer of the output's [`Problem::span`], and into `lse`.
    ///
    /// # Errors
    /// When the buffers or the plan do not fit the problem.
    pub fn attention_into(
        &self,
        problem: &Problem,
        plan: &CpuPlan,
        out: &mut Values,
        lse: Option<&mut [f32]>,
    ) -> Result<(), CpuError> {
        let inputs = self.operands.map(|_, values| Input::from(values.elements()));
        match out {
            Values::F16(out) => cpu::attention_with(problem, &inputs, out, lse, plan),
            Values::Bf16(out) => cpu::attention_with(problem, &inputs, out, lse, plan),
            Values::F32(out) => cpu::attention_with(problem, &inputs, out, lse, plan),
            Values::E4m3(out) => cpu::attention_with(problem, &inputs, out, lse, plan),
            Values::E5m2(out) => cpu::attention_with(problem, &inputs, out, lse, plan),
            Values::I32(_) | Values::U8(_) => {
                let (dtype, expected) = (out.dtype().name(), problem.dtypes.out.name());
                Err(ProblemError::OperandType { argument: Operand::OUT.name(), dtype, expected }.into())
            }
        }
    }

    /// Runs the native CPU kernels of the backward pass. The gradients have buffers of their operands' sizes,
    /// which begin as NaN.
    ///
    /// # Errors
    /// When the buffers or the plan do not fit the problem.
    pub fn gradients(&self, problem: &Problem, plan: &CpuPlan) -> Result<OperandMap<Values>, CpuError> {
        problem.check()?;
        let blank = |spec: problem::OperandSpec| {
            let dtype = match spec.operand {
                Operand::Tensor(tensor) => problem.dtypes.of(tensor),
                _ => DType::F32,
            };
            let mut values = Values::zeros(dtype, spec.elements);
            values.fill_nan();
            (spec.operand, values)
        };
        let mut outputs: Vec<(Operand, Values)> = problem.outputs().map(blank).collect();
        let buffers = outputs.iter_mut().filter_map(|(operand, values)| {
            let buffer = match values {
                Values::F32(x) => ElementsMut::F32(x),
                Values::F16(x) => ElementsMut::F16(x),
                Values::Bf16(x) => ElementsMut::Bf16(x),
                _ => return None, // `Problem::check` refuses gradients of other types
            };
            Some((*operand, buffer))
        });
        let inputs = self.operands.map(|_, values| Input::from(values.elements()));
        cpu::gradients(problem, &inputs, buffers.collect(), plan)?;
        Ok(outputs.into_iter().collect())
    }

    /// Runs the native CPU kernels and returns the output buffer and the LSE.
    ///
    /// # Errors
    /// When the buffers or the plan do not fit the problem.
    pub fn attention(&self, problem: &Problem, plan: &CpuPlan) -> Result<(Values, Vec<f32>), CpuError> {
        problem.check()?;
        let mut out =
            Values::zeros(problem.dtypes.out, problem.span(Tensor::Out).map_or(0, |(elements, _)| elements));
        let mut lse = vec![0.0; problem.lse_len()];
        self.attention_into(problem, plan, &mut out, Some(&mut lse))?;
        Ok((out, lse))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_laid_out_and_gathered() {
        let dense = Problem::new(2, 3, 4, 2, DType::F32);
        let other = dense.clone().with_layout(problem::Layout::Bshd);
        let values = Values::round(DType::F32, &(0..48).map(|i| i as f32).collect::<Vec<_>>());
        assert_eq!(values.clone().scatter(&dense, Tensor::Q), values);
        let laid = values.clone().scatter(&other, Tensor::Q);
        // Batch 1, row 2, head 1 of [batch, row, head, dim] is batch 1, head 1, row 2.
        assert_eq!(laid.get(24 + 2 * 6 + 2), values.get(24 + 8 + 4));
        assert_eq!(laid.gather(&other, Tensor::Q), values);
    }

    #[test]
    fn bytes_and_values_are_inverse() {
        for dtype in DType::ALL {
            let values = Values::round(dtype, &[0.0, -1.5, 65504.0, f32::NEG_INFINITY, 1e-7]);
            assert_eq!(Values::from_bytes(dtype, &values.to_bytes()), values);
            assert_eq!((values.dtype(), values.len(), values.get(1)), (dtype.into(), 5, Some(-1.5)));
        }
    }
}
