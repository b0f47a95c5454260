//! Keys and values that a call appends to its cache, and rotary embedding: the check, and the append in host
//! memory.

use cpu::Executor;
use half::{bf16, f16};
use problem::{
    DType, DTypes, Element, Elements, KeyPlaces, Layout, LengthArray, Operand, OperandMap, Operands, Problem,
    ProblemError, Span,
};

use super::rotary::{Rotary, address, check_integers, check_rows, check_shape, place};
use super::rows::{NewRow, RowWrite};
use super::{Tensor, View};
use crate::AttentionError;
use crate::error::refused;

/// Keys and values that a call appends to its cache before attention.
///
/// The cache is K and V of the call. Its array [`LengthArray::UsedKv`] has the lengths before the append.
/// New key `i` of batch entry `b` becomes row `length[b] + i` of the cache, and attention sees it. Where two
/// batch entries have one page or row of the cache, the rows of the later one are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Append {
    /// New keys, `[batch, head, row, head_dim]`; with [`Append::starts`], packed: `[1, head, row, head_dim]`.
    pub keys: Tensor,
    /// New values, as the keys, with `head_dim_v`.
    pub values: Tensor,
    /// `cu_seqlens_k_new`, `[batch + 1]`: the first new row of each batch entry, and the end of the last.
    pub starts: Option<Tensor>,
    /// The rotation of the new keys and of the queries.
    pub rotary: Option<Rotary>,
}

/// An append that fits its problem, with the operands of the call that it reads and writes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Appending {
    append: Append,
    /// Q, K and V.
    tensors: [Tensor; 3],
    /// The descale factors of an 8-bit cache.
    pub(super) factors: [Option<Tensor>; 2],
}

impl Append {
    /// The append to the cache of a problem, whose operands are given.
    ///
    /// # Errors
    /// When a shape, a type or an address does not fit.
    pub(super) fn checked(
        self,
        problem: &Problem,
        operands: &OperandMap<Tensor>,
    ) -> Result<Appending, AttentionError> {
        let Append { keys, values, starts, rotary } = self;
        if !problem.lengths.kv.used || problem.lengths.kv.packed.is_some() {
            let operand = LengthArray::UsedKv.name();
            return Err(AttentionError::OperandWanted { operand, wanted: true });
        }
        let DTypes { q: dtype, k: of_k, v: of_v, .. } = problem.dtypes;
        let narrow = problem.dtypes.has_narrow_cache() && of_k == of_v;
        let fits = matches!(dtype, DType::F16 | DType::Bf16 | DType::F32);
        if !fits || (of_k, of_v) != (dtype, dtype) && !narrow {
            let expected = "those of q, or one 8-bit type beside q in 16 bits".to_owned();
            let value = format!("{of_k} and {of_v}");
            return Err(refused("k and v", "element types of a cache with an append", value, expected));
        }
        if problem.scales.are_per_block() {
            let (value, expected) = ("blocks of rows".to_owned(), "one for each KV head, or one".to_owned());
            return Err(refused("descale factors", "layout beside an append", value, expected));
        }
        let batch = if starts.is_some() { 1 } else { problem.batch };
        let rows = keys.view.shape().get(2).copied().unwrap_or(0);
        for (argument, tensor, dim) in
            [("k_new", &keys, problem.head_dim), ("v_new", &values, problem.head_dim_v)]
        {
            check_rows(argument, tensor, dtype.into())?;
            check_shape(argument, &tensor.view, &[batch, problem.heads_kv, rows, dim])?;
        }
        if let Some(starts) = &starts {
            check_integers("cu_seqlens_k_new", starts, problem.batch + 1)?;
        }
        if let Some(rotary) = &rotary {
            rotary.check(problem)?;
        }
        let of = |tensor: problem::Tensor| {
            let wanted = AttentionError::OperandWanted { operand: tensor.name(), wanted: true };
            operands.get(Operand::Tensor(tensor)).copied().ok_or(wanted)
        };
        let tensors = [of(problem::Tensor::Q)?, of(problem::Tensor::K)?, of(problem::Tensor::V)?];
        let factors = [problem::Tensor::K, problem::Tensor::V]
            .map(|tensor| operands.get(Operand::Descale(tensor)).copied());
        Ok(Appending { append: self, tensors, factors })
    }
}

/// Q after the rotation: dense rows `[batch, row, head, dim]`.
pub(super) struct Rotated {
    /// Memory that is aligned for every element type.
    memory: Vec<f32>,
    /// Number of elements.
    pub(super) elements: usize,
}

impl Rotated {
    pub(super) fn start(&self) -> std::ptr::NonNull<u8> {
        std::ptr::NonNull::from(&self.memory[..]).cast()
    }
}

impl Appending {
    /// The append, and Q, K and V of the call.
    pub(super) fn parts(&self) -> (&Append, &[Tensor; 3]) {
        (&self.append, &self.tensors)
    }

    /// Whether the call's attention reads rotated queries.
    pub(super) fn rotates(&self) -> bool {
        self.append.rotary.is_some()
    }

    /// Gives the problem the strides of the rotated queries, if the append rotates them.
    pub(super) fn prepared(&self, problem: Problem) -> Problem {
        if !self.rotates() {
            return problem;
        }
        let [_, heads, rows, dim] = problem.extents(problem::Tensor::Q);
        Problem { q: Layout::Bshd.strides(heads, rows, dim), ..problem }
    }

    /// Appends the rows, adds their numbers to the lengths `used`, and returns the rotated queries. `inputs`
    /// are the problem's other arrays of integers. Writes nothing if it returns an error.
    ///
    /// # Safety
    /// As [`super::Ready::enqueue`]: of the operands, and of the tensors of the append.
    pub(super) unsafe fn run<'a>(
        &self,
        executor: Option<&dyn Executor>,
        problem: &Problem,
        inputs: Operands<'a>,
        used: &'a mut [i32],
    ) -> Result<Option<Rotated>, AttentionError> {
        // SAFETY: the arrays have these lengths and are aligned, since `checked` has looked at them.
        let [starts, positions] = unsafe {
            let positions = self.append.rotary.and_then(|rotary| rotary.positions);
            [self.append.starts, positions].map(|array| array.map(|array| integers(&array)))
        };
        let spans = self.new_rows(problem, starts.as_deref())?;
        let before = used.to_vec();
        lengthen(problem, used, &spans)?;
        let inputs = inputs.with(Operand::Lengths(LengthArray::UsedKv), Elements::I32(used));
        problem.check_length_values(&inputs)?;
        let offsets = positions.as_deref().unwrap_or(&before);
        let sequences: Vec<Span> = problem.sequences(&inputs)?.iter().map(|both| both.q).collect();
        self.check_positions(problem, offsets, [&spans, &sequences])?;
        let rows = self.placed(&before, offsets, &spans, KeyPlaces::of(problem, &inputs));
        let Append { keys, values, rotary, .. } = &self.append;
        let [_, key_cache, value_cache] = &self.tensors;
        let (new, caches) = ([keys, values], [key_cache, value_cache]);
        let write = RowWrite { new, caches, rotary: rotary.as_ref(), factors: self.factors };
        // SAFETY: this function's own contract; the places are those of rows of the tensors, and
        // `check_positions` has found the positions in the tables.
        unsafe { write.run(executor, &rows) };
        macro_rules! run {
            ($($dtype:pat => $element:ty),*) => {
                match problem.dtypes.q {
                    // SAFETY: this function's own contract; the type is that of the tensors.
                    $($dtype => unsafe { self.rotated::<$element>(problem, offsets, &sequences) },)*
                    DType::E4m3 | DType::E5m2 => None, // refused by `checked`
                }
            };
        }
        Ok(run!(DType::F16 => f16, DType::Bf16 => bf16, DType::F32 => f32))
    }

    /// The new rows of each batch entry.
    fn new_rows(&self, problem: &Problem, starts: Option<&[i32]>) -> Result<Vec<Span>, AttentionError> {
        let rows = self.append.keys.view.shape[2];
        let Some(starts) = starts else {
            return Ok((0..problem.batch).map(|batch| Span { batch, start: 0, len: rows }).collect());
        };
        let mut least = 0;
        let ascending = starts.iter().position(|&start| {
            let fits = usize::try_from(start).is_ok_and(|start| (least..=rows).contains(&start));
            least = usize::try_from(start).unwrap_or(0);
            !fits
        });
        if let Some(index) = ascending {
            let (argument, value) = ("cu_seqlens_k_new", starts[index].to_string());
            let expected = format!("ascending numbers from 0 to {rows}, the rows of k_new");
            return Err(ProblemError::Length { argument, index, value, expected }.into());
        }
        let span =
            |pair: &[i32]| Span { batch: 0, start: pair[0] as usize, len: (pair[1] - pair[0]) as usize };
        Ok(starts.windows(2).map(span).collect())
    }

    /// Rejects positions without a row in the tables.
    fn check_positions(
        &self,
        problem: &Problem,
        offsets: &[i32],
        rows: [&[Span]; 2],
    ) -> Result<(), AttentionError> {
        let Some(rotary) = &self.append.rotary else { return Ok(()) };
        let table = rotary.cos.view.shape[0];
        let argument = if rotary.positions.is_some() { "rotary_seqlens" } else { "cache_seqlens" };
        for (index, &value) in offsets.iter().enumerate() {
            let [new, queries] = rows.map(|spans| spans[index].len);
            let queries = if is_local(problem) { queries } else { queries.min(1) };
            let most = new.max(queries);
            if !usize::try_from(value).is_ok_and(|from| from.saturating_add(most) <= table) {
                let expected = format!(
                    "0 to {}: rotary_cos has {table} rows, and {most} positions follow",
                    table.saturating_sub(most)
                );
                let value = value.to_string();
                return Err(ProblemError::Length { argument, index, value, expected }.into());
            }
        }
        Ok(())
    }

    /// The new rows and their places in the cache.
    fn placed(&self, before: &[i32], offsets: &[i32], spans: &[Span], places: KeyPlaces<'_>) -> Vec<NewRow> {
        let of_sequence = |(sequence, span): (usize, &Span)| {
            let (entry, start) = (span.batch, span.start);
            (0..span.len).map(move |row| {
                let (page, to) = places.place(sequence, before[sequence] as usize + row);
                let position = offsets[sequence] as usize + row;
                NewRow { from: [entry, start + row], to: [page, to], sequence, position }
            })
        };
        spans.iter().enumerate().flat_map(of_sequence).collect()
    }

    /// The rotated queries; rows of no sequence are zeros.
    ///
    /// # Safety
    /// As [`Appending::run`], for elements of type `T`.
    unsafe fn rotated<T: Element>(
        &self,
        problem: &Problem,
        offsets: &[i32],
        sequences: &[Span],
    ) -> Option<Rotated> {
        let rotary = self.append.rotary.as_ref()?;
        let [q, ..] = &self.tensors;
        let extents @ [_, heads, rows, dim] = problem.extents(problem::Tensor::Q);
        let elements = extents.iter().product::<usize>();
        let mut memory = vec![0.0f32; (elements * size_of::<T>()).div_ceil(4)];
        let strides = Layout::Bshd.strides(heads, rows, dim);
        let to = Tensor {
            address: memory.as_mut_ptr().expose_provenance() as u64,
            view: View::rows(T::DTYPE, extents, strides),
        };
        let mut angles = Vec::new();
        for (sequence, span) in sequences.iter().enumerate() {
            for row in 0..span.len {
                let behind = if is_local(problem) { row } else { 0 };
                // SAFETY: `check_positions` has found the row in the tables; the places are those of rows of
                // Q and of the memory.
                unsafe {
                    rotary.angles(offsets[sequence] as usize + behind, &mut angles);
                    for head in 0..heads {
                        let at = [span.batch, head, span.start + row];
                        let mut query = copied::<T>(q, at);
                        rotary.rotate(&mut query, &angles);
                        store(&to, at, &query);
                    }
                }
            }
        }
        Some(Rotated { memory, elements })
    }
}

/// Whether the band hides keys: then each query has a position of its own.
pub(super) fn is_local(problem: &Problem) -> bool {
    problem.band.before.is_some() || problem.band.after.is_some()
}

/// Adds the new rows to the lengths.
fn lengthen(problem: &Problem, used: &mut [i32], spans: &[Span]) -> Result<(), AttentionError> {
    let capacity = problem.seq_kv;
    for (index, (length, span)) in used.iter_mut().zip(spans).enumerate() {
        let value = *length;
        let total = usize::try_from(value).ok().map(|before| before.saturating_add(span.len));
        let Some(total) = total.filter(|&total| total <= capacity) else {
            let expected = match capacity.checked_sub(span.len) {
                Some(most) => format!(
                    "0 to {most}: the cache has room for {capacity} keys, of which {} are new",
                    span.len
                ),
                None => format!("a cache with room for {} new keys; the room is {capacity}", span.len),
            };
            let (argument, value) = ("cache_seqlens", value.to_string());
            return Err(ProblemError::Length { argument, index, value, expected }.into());
        };
        *length = i32::try_from(total).map_err(|_| ProblemError::TooLarge { tensor: "k" })?;
    }
    Ok(())
}

/// # Safety
/// The array lies there.
unsafe fn integers(array: &Tensor) -> Vec<i32> {
    if array.view.elements() == 0 {
        return Vec::new();
    }
    let stride = array.view.strides[0] as isize;
    let first = address::<i32>(array);
    // SAFETY: the caller's contract.
    (0..array.view.shape[0] as isize).map(|i| unsafe { first.offset(i * stride).read() }).collect()
}

/// # Safety
/// The tensor has the row.
unsafe fn copied<T: Copy>(tensor: &Tensor, at: [usize; 3]) -> Vec<T> {
    // SAFETY: the caller's contract. The slice ends before anything is written.
    unsafe { std::slice::from_raw_parts(place::<T>(tensor, at), tensor.view.shape[3]).to_vec() }
}

/// # Safety
/// The tensor has the row, which nothing else uses.
unsafe fn store<T: Copy>(tensor: &Tensor, at: [usize; 3], row: &[T]) {
    // SAFETY: the caller's contract.
    unsafe { place::<T>(tensor, at).copy_from_nonoverlapping(row.as_ptr(), row.len()) };
}
